"""Records the exception that ends the training process, for the table of how ranks ended.

It comes by `sys.excepthook`, which a script or framework may replace: then only the exit code is known.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.in_rank.code_of_job import is_hidden
from rankscope.collectors.in_rank.stderr import text_of
from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import INSTALLED

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_LONGEST = 500
_before: Any = None
_hook: Any = None

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    global _before, _hook
    before = _before = sys.excepthook

    def report(_kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if emit.live:
            said = text_of(error).splitlines()[0]
            emit.send({"type": "raised", "time_ns": clock(), "error": _fitting(said), "place": _fitting(_place(trace))})

    guarded = emit.guard("exceptions", report)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        guarded(kind, error, trace)
        before(kind, error, trace)

    _hook = sys.excepthook = hook


def stop() -> None:
    if sys.excepthook is _hook:
        sys.excepthook = _before


def _place(trace: TracebackType | None) -> str:
    """Give the innermost line of the job's own code; empty if there is none."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_hidden(code.co_filename) and not any(folder in code.co_filename for folder in INSTALLED):
            place = f"{code.co_filename}:{trace.tb_lineno} ({code.co_name})"
        trace = trace.tb_next
    return place


def _fitting(text: str) -> str:
    return text[:_LONGEST].encode(errors="replace").decode()


collector = Collector(tables=("exits",), start=start, stop=stop)
