"""Records the compilations of torch.compile.

torch imports its compiler late, often between the first process group and the first step, and it takes seconds: this
collector waits for the job to do it.
"""

from __future__ import annotations

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
            emit.region(_COMPILE, emit.name(f"compile {args.compile_id}"), started, clock())

    before, after = emit.guard("compile", before), emit.guard("compile", after)
    handler.register_start_callback(before)
    handler.register_end_callback(after)
    _removes.append(partial(handler.remove_start_callback, before))
    _removes.append(partial(handler.remove_end_callback, after))
