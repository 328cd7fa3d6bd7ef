"""Records NCCL's calls, and what its proxies waited for, from the NCCL profiler plugin.

The plugin writes to a ring of its own; this hands the ring to the agent. It does nothing where the launcher has not
set the plugin up, or where NCCL is not used.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

from rankscope.collectors.native.nccl_plugin import EVENTS, VARIABLE, built, too_old
from rankscope.collectors.rank import Collector

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_NOT_BUILT = "NCCL's profiler plugin is not built: rankscope doctor --build"
_LOSSES = {  # counters of the plugin, and what they count
    "rankscope_nccl_lost": "more was under way at once than the plugin can follow",
    "rankscope_nccl_never_ended": "NCCL does not report what these proxies do (CollNet, copies, kernels)",
}


def start(emit: Emit) -> None:
    """Give the agent the plugin's ring, or say in `gaps` why there is none."""
    ours = built()
    given = os.environ.get(VARIABLE)
    if ours is None or given != str(ours):
        why = _NOT_BUILT
        if given:
            why = f"NCCL has another profiler plugin: {VARIABLE}={given}"
        emit.on_tick(emit.guard("nccl", _Told(emit, why)), needs_cuda=True)
        return
    emit.on_tick(emit.guard("nccl", _Told(emit, "")), needs_cuda=True)
    unknown = set(filter(None, os.environ.get("RANKSCOPE_NCCL_EVENTS", "").split(","))) - set(EVENTS)
    if unknown:
        known = ", ".join(EVENTS)
        emit.gap("nccl_events", "nccl", f"RANKSCOPE_NCCL_EVENTS: {', '.join(sorted(unknown))} is none of {known}")
    plugin = ctypes.CDLL(str(ours))  # the one that NCCL has loaded, or will
    ring = plugin.rankscope_nccl_ring()
    if ring < 0:
        raise OSError(-ring, os.strerror(-ring))
    emit.hand_over(ring)
    reported = dict.fromkeys(_LOSSES, 0)

    def report_losses() -> None:
        for counter, why in _LOSSES.items():
            so_far = getattr(plugin, counter)
            so_far.restype = ctypes.c_uint64
            count = so_far()
            if count > reported[counter]:
                emit.gap("nccl_events", "nccl", why, count=count - reported[counter])
                reported[counter] = count

    emit.on_tick(emit.guard("nccl", report_losses), needs_cuda=True)


def stop() -> None:
    """Leave the plugin to NCCL; its ring is read no more when the rank is gone."""


class _Told:
    """Says once, and only in a job that uses NCCL, why there is no plugin, or that this NCCL does not load it."""

    def __init__(self, emit: Emit, why: str) -> None:
        self._emit = emit
        self._done = False
        self._why = why

    def __call__(self) -> None:
        torch = sys.modules["torch"]
        if self._done or not torch.distributed.is_initialized():
            return
        self._done = True
        if "nccl" not in str(torch.distributed.get_backend_config()):
            return
        why = too_old(torch.cuda.nccl.version()) or self._why
        for table in collector.tables if why else ():
            self._emit.gap(table, "nccl", why)


def _lacks() -> str:
    return "" if built() else _NOT_BUILT


collector = Collector(tables=("nccl_calls", "nccl_events"), start=start, stop=stop, needs_gpu=True, lacks=_lacks)
