"""Records the rank's memory about once a second: resident set, and the CUDA allocator's state where there is one."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from rankscope.collectors.rank import Collector

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_CUDA_STATS = {
    "allocated_bytes.all.current": "cuda_allocated_bytes",
    "allocated_bytes.all.peak": "cuda_allocated_peak_bytes",
    "reserved_bytes.all.current": "cuda_reserved_bytes",
    "inactive_split_bytes.all.current": "cuda_inactive_split_bytes",
    "num_alloc_retries": "cuda_alloc_retries",
    "num_ooms": "cuda_ooms",
}
_statm = -1


def start(emit: Emit) -> None:
    global _statm
    _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    page = os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules["torch"]

    has_stats = True

    def read() -> None:
        nonlocal has_stats
        now = time.perf_counter_ns()
        rss = int(os.pread(_statm, 128, 0).split()[1]) * page
        readings = {"rss_bytes": rss}
        if emit.device is not None and has_stats and torch.cuda.is_initialized():
            try:
                stats = torch.cuda.memory_stats(emit.device)
            except RuntimeError as error:  # an allocator of the job's own
                has_stats, stats = False, {}
                why = str(error).partition("\n")[0]
                emit.gap("memory", "memory", f"the CUDA allocator does not report its state: {why}")
            readings |= {name: stats[key] for key, name in _CUDA_STATS.items() if key in stats}
            readings["cuda_total_bytes"] = torch.cuda.get_device_properties(emit.device).total_memory
        for name, value in readings.items():
            emit.ring.memory(emit.name(name), now, value)

    emit.on_tick(emit.guard("memory", read))


def stop() -> None:
    global _statm
    if _statm >= 0:
        os.close(_statm)
        _statm = -1


collector = Collector(tables=("memory",), start=start, stop=stop)
