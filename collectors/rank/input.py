"""Records the time a rank waits for its next batch: `next()` on the iterator of a torch `DataLoader`.

A loader with an iterator of its own is not seen: such a script can say `rankscope.annotate("input")`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import REGION_KINDS

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

_INPUT = REGION_KINDS.index("input")
_undo: Callable[[], None] | None = None


def start(emit: Emit) -> None:
    global _undo
    name_id = emit.name("DataLoader")

    def record(start_ns: int, end_ns: int, *_: object) -> None:
        emit.region(_INPUT, name_id, start_ns, end_ns)

    iterator = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
    _undo = emit.around("input", iterator, "__next__", record)


def stop() -> None:
    if _undo is not None:
        _undo()


collector = Collector(tables=("regions",), start=start, stop=stop)
