"""Events in rows: those that are at once lie below each other, as timelines draw them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["nest_rows", "pack_rows"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def pack_rows(start: Ints, end: Ints, most: int) -> NDArray[np.intp]:
    """For each event the first row in which nothing before it is still there; nested events lie below their parents.

    Events are ordered by start, longer ones first. Those that find no room in the first `most` rows have row `most`.
    """
    row = np.zeros(len(start), np.intp)
    left = np.arange(len(start))
    for _ in range(most):
        if not len(left):
            break
        kept = _chain(start[left], end[left])
        left = left[~kept]
        row[left] += 1
    return row


def _chain(start: Ints, end: Ints) -> Bools:
    """Return the first event, the first one after its end, and so on."""
    if (start[1:] >= end[:-1]).all():
        return np.ones(len(start), np.bool_)
    beyond = len(start)
    jump = np.append(np.searchsorted(start, np.maximum(end, start), "left"), beyond)
    # Of events without a duration each would find itself: what starts and ends at once is followed by its neighbour.
    jump[:-1] = np.maximum(jump[:-1], np.arange(1, beyond + 1))
    reached = np.zeros(beyond + 1, np.bool_)
    reached[0] = True
    # Jumps of 1, 2, 4, … events: after each the chain is known twice as far.
    while jump[0] < beyond:
        reached[jump[reached]] = True
        jump = jump[jump]
    reached[jump[reached]] = True
    return reached[:-1]


def nest_rows(start: Ints, end: Ints, most: int) -> NDArray[np.intp]:
    """Return for each event a row, in which each event before it either holds it as a whole or is over.

    So one row takes a thread's calls, however deep. Order and `most` as for `pack_rows`.
    """
    row = np.full(len(start), most, np.intp)
    left = np.arange(len(start))
    for number in range(most):
        kept = left
        while (crossing := _crossing(start[kept], end[kept])).any():
            kept = kept[~crossing]
        row[kept] = number
        left = left[row[left] == most]
        if not len(left):
            break
    return row


def _crossing(start: Ints, end: Ints) -> Bools:
    """Events to be taken out so that the others nest, and some more: none where all nest, and never the first."""
    end = np.maximum(end, start + 1)  # one without a duration is in another, too
    depth = np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")
    crossing = np.zeros(len(start), np.bool_)
    for level in range(1, int(depth.max(initial=0)) + 1):
        above, here = np.flatnonzero(depth == level - 1), np.flatnonzero(depth == level)
        at = np.searchsorted(above, here)
        crossing[here] = (at == 0) | (end[above[at - 1]] < end[here]) if len(above) else True
    return crossing
