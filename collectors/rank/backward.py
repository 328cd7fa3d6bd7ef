"""Records the backward pass: every run of autograd's engine that accumulates gradients.

`Tensor.backward` and `torch.autograd.backward` end in it; Megatron's pipeline schedules call nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import DEVICE_MARKS, REGION_KINDS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_BACKWARD = REGION_KINDS.index("backward")
_MARKS = DEVICE_MARKS.index("backward_start"), DEVICE_MARKS.index("backward_end")
_ACCUMULATES = 6  # position of the engine's argument `accumulate_grad`
_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    name_id = emit.name("backward")
    variable = sys.modules["torch.autograd.variable"].Variable
    original = variable._execution_engine

    class Engine(type(original)):  # type: ignore[misc]
        """The engine class, with a recording call for backward passes."""

        def run_backward(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
            accumulates = kwargs.get("accumulate_grad", args[_ACCUMULATES] if len(args) > _ACCUMULATES else False)
            return (self.accumulate_gradients if accumulates else super().run_backward)(*args, **kwargs)

        def accumulate_gradients(self, *args: Foreign, **kwargs: Foreign) -> Foreign:
            return super().run_backward(*args, **kwargs)

    def record(start_ns: int, end_ns: int, *_: object) -> None:
        if get_ident() == emit.training_thread:
            emit.in_backward -= 1
        if not emit.in_microbatch:
            emit.mark(_MARKS[1])
        emit.region(_BACKWARD, name_id, start_ns, end_ns)

    def before(args: tuple[Any, ...]) -> None:
        emit.backward_begins()
        emit.on_backward(args[1] if len(args) > 1 else ())
        if get_ident() == emit.training_thread:
            emit.in_backward += 1
        if not emit.in_microbatch:
            emit.mark(_MARKS[0])

    _undos.append(emit.around("backward", Engine, "accumulate_gradients", record, before))
    variable._execution_engine = engine = Engine()

    def undo() -> None:
        if variable._execution_engine is engine:
            variable._execution_engine = original

    _undos.append(undo)


def stop() -> None:
    while _undos:
        _undos.pop()()


collector = Collector(tables=("regions",), start=start, stop=stop)
