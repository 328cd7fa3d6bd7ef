"""Writes down a pipeline's microbatches: a region of each forward and backward, and a mark at both ends of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collectors.schema import DEVICE_MARKS, REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

__all__ = ["Microbatches"]


class Microbatches:
    """`begin` and `end` are called around each "forward" and "backward", on the training thread; `close` at last."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._of = {
            kind: (
                REGION_KINDS.index(kind),
                emit.name(kind),
                DEVICE_MARKS.index(f"{kind}_start"),
                DEVICE_MARKS.index(f"{kind}_end"),
            )
            for kind in ("forward", "backward")
        }

    def begin(self, kind: str) -> None:
        self._emit.mark(self._of[kind][2])
        self._emit.in_microbatch = True

    def end(self, kind: str, start_ns: int, end_ns: int, microbatch: int, stage: int) -> None:
        region, name_id, _, mark = self._of[kind]
        self._emit.in_microbatch = False
        self._emit.mark(mark)
        self._emit.region(region, name_id, start_ns, end_ns, microbatch, stage)

    def close(self) -> None:
        """Also where no `end` has followed a `begin`: the marks of other backwards go on."""
        self._emit.in_microbatch = False
