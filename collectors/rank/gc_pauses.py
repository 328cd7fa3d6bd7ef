"""Records the pauses of Python's garbage collector.

Collections shorter than `MIN_NS` are not recorded: thousands a second can occur, and their time stays in the part of
the step in which they fall.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

MIN_NS = 1_000_000
_GC = REGION_KINDS.index("gc")
_callback: Callable[..., None] | None = None

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    global _callback
    names = [emit.name(f"gc generation {generation}") for generation in range(3)]
    started = 0

    def record(generation: int, end_ns: int) -> None:
        if emit.live:
            emit.region(_GC, names[generation], started, end_ns)

    record = emit.guard("gc_pauses", record)

    def on_collection(phase: str, info: dict[str, Any]) -> None:
        nonlocal started
        now = clock()
        if phase == "start":
            started = now
        elif now - started >= MIN_NS:
            record(info["generation"], now)

    _callback = on_collection
    gc.callbacks.append(_callback)


def stop() -> None:
    if _callback in gc.callbacks:
        gc.callbacks.remove(_callback)


collector = Collector(tables=("regions",), start=start, stop=stop)
