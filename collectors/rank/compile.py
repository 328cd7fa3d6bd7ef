"""Records the compilations of torch.compile, and of a compilation that is not the first of its code why it was needed.

torch imports its compiler late, often between the first process group and the first step, and it takes seconds: this
collector waits for the job to do it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.imports import after_import
from rankscope.collectors.schema import REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ("regions",)

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
    started = 0

    def before(_: Any) -> None:  # noqa: ANN401
        nonlocal started
        started = clock()

    def after(args: Any) -> None:  # noqa: ANN401
        if emit.live:
            emit.region(_COMPILE, emit.name(f"compile {args.compile_id}{_reason()}"), started, clock())

    before, after = emit.guard("compile", before), emit.guard("compile", after)
    handler.register_start_callback(before)
    handler.register_end_callback(after)
    _removes.append(partial(handler.remove_start_callback, before))
    _removes.append(partial(handler.remove_end_callback, after))


def _reason() -> str:
    """`: 0/1: tensor 'x' size mismatch …` where code is compiled again, else nothing; only newer torch knows."""
    try:
        known = sys.modules["torch._dynamo.utils"].get_metrics_context()._metrics
    except (KeyError, AttributeError):
        return ""
    reason = known.get("recompile_reason")
    return f": {str(reason)[:_REASON]}" if reason else ""
