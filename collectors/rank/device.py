"""Records the rank's GPU, once the job has initialised CUDA: its name, and its key in the node's topology."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rankscope.collectors.rank import Collector

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_PATIENCE = 10  # seconds


def start(emit: Emit) -> None:
    """Send it once, within a second of the first operation or optimizer on it."""
    torch = sys.modules["torch"]
    cuda = torch.cuda
    sent, ticks = False, 0

    def report() -> None:
        nonlocal sent, ticks
        if sent:
            return
        ticks += 1
        if emit.device is None and ticks >= _PATIENCE:  # no optimizer of torch's, no operation on a device
            emit.device = cuda.current_device()
        if emit.device is None:
            return
        sent = True
        device = cuda.get_device_properties(emit.device)
        uuid = None
        if torch.version.hip and hasattr(device, "pci_bus_id"):  # HIP's UUID is not that of AMD SMI in all versions
            uuid = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
        elif hasattr(device, "uuid"):
            uuid = f"GPU-{device.uuid}"
            if torch.version.hip:
                why = f"torch {torch.__version__} does not say at which PCI address an AMD GPU is"
                emit.gap("counters", "device", f"{why}: the GPU of this rank may not be known")
        emit.send({"type": "gpu", "name": device.name, "uuid": uuid})

    emit.on_tick(emit.guard("device", report), needs_cuda=True)


def stop() -> None:
    """Nothing was put in."""


collector = Collector(tables=(), start=start, stop=stop, needs_gpu=True)
