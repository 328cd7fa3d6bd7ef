"""Which GPU the rank uses, once the job has initialised CUDA: it joins the rank to the node's topology."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ()


def start(emit: Emit) -> None:
    """Say it once, within a second of CUDA's first use."""
    cuda = sys.modules["torch"].cuda
    told = False

    def tell() -> None:
        nonlocal told
        if told or not cuda.is_initialized():
            return
        told = True
        uuid = getattr(cuda.get_device_properties(cuda.current_device()), "uuid", None)  # torch before 2.4 has none
        if uuid is not None:
            emit.send({"type": "gpu", "uuid": f"GPU-{uuid}"})

    emit.on_tick(emit.guard("device", tell))


def stop() -> None:
    """Nothing was put in."""
