"""Records the compilations of torch.compile, and the reason for each recompilation.

torch imports its compiler late, often between the first process group and the first step, and it takes seconds: this
collector waits for the job to do it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.in_rank.import_hooks import after_import
from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import REGION_KINDS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_COMPILE = REGION_KINDS.index("compile")
_REASON = 200  # characters: a guard that fails can print a whole expression
_removes: list[Callable[[], None]] = []

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    _removes.append(after_import("torch._dynamo.callback", emit.guard("compile", partial(_install, emit))))


def stop() -> None:
    while _removes:
        _removes.pop()()


def _install(emit: Emit, module: ModuleType) -> None:
    handler = module.callback_handler
    started, seen = 0, _seen()

    def before(*_: Foreign) -> None:
        nonlocal started
        started = clock()

    def after(*given: Foreign) -> None:
        nonlocal seen
        if emit.live:
            number = _number(given)
            emit.region(_COMPILE, emit.name(f"compile {number}{_reason(number, seen)}"), started, clock())
        seen = _seen()

    before, after = emit.guard("compile", before), emit.guard("compile", after)
    handler.register_start_callback(before)
    handler.register_end_callback(after)
    _removes.append(partial(handler.remove_start_callback, before))
    _removes.append(partial(handler.remove_end_callback, after))


def _number(given: tuple[Any, ...]) -> str:
    """Dynamo's `frame/compilation`; older torch (2.5) does not hand it to a callback."""
    return str(given[0].compile_id if given else sys.modules["torch._guards"].CompileContext.current_compile_id())


def _failures() -> dict[CodeType, list[str]]:
    """Return why compiled code could not be used again, all that Dynamo found."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # it may be about to be imported
    return dict(getattr(dynamo, "guard_failures", {}))


def _seen() -> dict[CodeType, int]:
    return {code: len(reasons) for code, reasons in _failures().items()}


def _reason(number: str, seen: dict[CodeType, int]) -> str:
    """`: 0/0: tensor 'x' size mismatch …` where this frame is compiled again: its first failure after those `seen`."""
    frame = number.partition("/")[0]
    new = (reason for code, reasons in _failures().items() for reason in reasons[seen.get(code, 0) :])
    return next((f": {reason[:_REASON]}" for reason in new if reason.startswith(f"{frame}/")), "")


collector = Collector(tables=("regions",), start=start, stop=stop)
