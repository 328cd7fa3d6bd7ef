"""Writes down a pipeline's microbatches: a region of each forward and backward, and a mark at both ends of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.collectors.schema import DEVICE_MARKS, REGION_KINDS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

__all__ = ["Microbatches"]


class Microbatches:
    """`begin` and `end` are called around each "forward" and "backward", on the training thread; `close` at last.

    `around` has a method do that itself.
    """

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

    def around(
        self,
        collector: str,
        owner: Foreign,
        method: str,
        kind: str,
        which: Callable[[tuple[Any, ...]], tuple[int, int]],
    ) -> Callable[[], None]:
        """Record each call of `owner.method`; `which` makes (microbatch, stage) from its arguments.

        Returns a function that undoes it.
        """

        def record(start_ns: int, end_ns: int, args: tuple[Any, ...], *_: object) -> None:
            self.end(kind, start_ns, end_ns, *which(args))

        return self._emit.around(collector, owner, method, record, lambda _: self.begin(kind))

    def close(self) -> None:
        """Also where no `end` has followed a `begin`: the marks of other backwards go on."""
        self._emit.in_microbatch = False
