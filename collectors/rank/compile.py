"""Records the compilations of torch.compile.

torch imports its compiler late, often between the first process group and the first step. This collector must not be
the one that imports it (that takes seconds), so it waits for the import to happen.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.schema import REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ("regions",)

_MODULE = "torch._dynamo.callback"
_COMPILE = REGION_KINDS.index("compile")
_removes: list[Callable[[], None]] = []

clock = time.perf_counter_ns


def start(emit: Emit) -> None:
    install = emit.guard("compile", lambda module: _install(emit, module))
    if _MODULE in sys.modules:
        install(sys.modules[_MODULE])
        return
    finder = _AfterImport(install)
    sys.meta_path.insert(0, finder)
    _removes.append(finder.leave)


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


class _AfterImport:
    """A finder that finds nothing, but calls `then` with the module once `_MODULE` has been imported."""

    def __init__(self, then: Callable[[ModuleType], Any]) -> None:
        self._then = then
        self._asking = False

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != _MODULE or self._asking:
            return None
        self._asking = True
        try:
            spec = find_spec(name)
        finally:
            self._asking = False
        self.leave()
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec

    def leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
