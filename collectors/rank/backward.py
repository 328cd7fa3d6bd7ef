"""Records the backward pass: `torch.autograd.backward`, which `Tensor.backward` and the pipeline stages call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.collectors.schema import DEVICE_MARKS, REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ("regions",)

_BACKWARD = REGION_KINDS.index("backward")
_MARKS = DEVICE_MARKS.index("backward_start"), DEVICE_MARKS.index("backward_end")
_undo: Callable[[], None] | None = None


def start(emit: Emit) -> None:
    global _undo
    name_id = emit.name("backward")

    def record(start_ns: int, end_ns: int, _: tuple[Any, ...]) -> None:
        emit.mark(_MARKS[1])
        emit.region(_BACKWARD, name_id, start_ns, end_ns)

    def before() -> None:
        emit.backward_begins()
        emit.mark(_MARKS[0])

    _undo = emit.around("backward", sys.modules["torch.autograd"], "backward", record, before)


def stop() -> None:
    if _undo is not None:
        _undo()
