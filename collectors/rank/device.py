"""Which GPU the rank uses, once the job has initialised CUDA: it joins the rank to the node's topology."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ()


def start(emit: Emit) -> None:
    """Say it once, within a second of CUDA's first use."""
    torch = sys.modules["torch"]
    cuda = torch.cuda
    told = False

    def tell() -> None:
        nonlocal told
        if told or not cuda.is_initialized():
            return
        told = True
        device = cuda.get_device_properties(cuda.current_device())
        uuid = getattr(device, "uuid", None)  # torch before 2.4 has none
        if torch.version.hip and hasattr(device, "pci_bus_id"):  # HIP's UUID is not that of AMD SMI in all versions
            address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
            emit.send({"type": "gpu", "uuid": address})
        elif uuid is not None:
            emit.send({"type": "gpu", "uuid": f"GPU-{uuid}"})

    emit.on_tick(emit.guard("device", tell))


def stop() -> None:
    """Nothing was put in."""
