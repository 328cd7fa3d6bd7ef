"""Which thread trains, and the numbers of the others."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np

from rankscope.analysis.model.annotations import STEP, TRAINS
from rankscope.analysis.readers.kineto.capture import Ints
from rankscope.analysis.readers.kineto.steps import announces_step
from rankscope.analysis.readers.spill_file import Rows

__all__ = ["thread_numbers"]


def thread_numbers(names: Sequence[str], spans: Rows, launches: Rows, *operators: Rows) -> Ints:
    """By code of a thread's name: 0 for the main thread, then in order of appearance.

    The main thread announces the steps; else it runs the optimizer or waits for the loader (autograd's own thread may
    launch more); else it has ranges that are named as steps are; else it launches most.
    """
    trains = np.array([name.startswith(TRAINS) for name in names], bool)
    named = np.array([re.match(STEP, name) is not None for name in names], bool)
    chosen = (spans.where(which.__getitem__, "name")["tid"] for which in (announces_step(names), trains, named))
    steps = next((tids for tids in chosen if len(tids)), np.empty(0, np.int64))

    def threads_of(*tables: Rows) -> Iterator[Ints]:
        return (rows["tid"] for table in tables for rows in table.blocks("tid"))

    def candidates() -> Iterator[Ints]:
        return iter([steps]) if len(steps) else threads_of(launches if len(launches) else spans)

    counts = sum((np.bincount(codes, minlength=len(names)) for codes in candidates()), np.zeros(len(names), np.int64))
    main = [int(counts.argmax())] if counts.any() else []
    seen = map(_as_seen, itertools.chain(candidates(), threads_of(spans, launches, *operators)))
    ordered = list(dict.fromkeys([*main, *itertools.chain.from_iterable(seen)]))
    number = np.zeros(max(ordered, default=0) + 1, np.uint16)
    number[ordered] = np.minimum(np.arange(len(ordered)), (1 << 16) - 1)
    return number


def _as_seen(codes: Ints) -> list[int]:
    """Return the different codes, in order of appearance."""
    first = np.full(codes.max(initial=-1) + 1, -1)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1, dtype=np.int32)  # of several, the last one assigned stays
    found = np.flatnonzero(first >= 0)
    return [int(code) for code in found[np.argsort(first[found])]]
