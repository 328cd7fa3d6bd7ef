"""Dependencies between kernels: the one before on the stream, and those inferred from times."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.replay.host_calls import LOOK_BACK, NEAR_NS, Calls

__all__ = ["ended_just_before", "last_launched_before", "last_to_end"]

_EARLY_NS = 2_000  # stamps are rounded, and a kernel may begin so long before the one that it waits for has ended
_NEAR_SHARE = 0.02  # or within this share of the time that nothing explains
Ints = NDArray[np.signedinteger[Any]]  # times take 8 bytes, codes and numbers of nodes 4
Bools = NDArray[np.bool_]


def last_to_end(stream: Ints, end: Ints) -> Ints:
    """Return the kernel that ended last of those that began before on its stream, -1.

    None. They are by stream and start.
    """
    index = np.arange(len(end))
    before = np.full(len(end), -1)
    for rows in np.split(index, np.flatnonzero(np.diff(stream)) + 1):
        reach = np.maximum.accumulate(end[rows])
        last = np.maximum.accumulate(np.where(end[rows] == reach, rows, -1))
        before[rows[1:]] = last[:-1]
    return before


def last_launched_before(calls: Calls, call_of: Ints, communicates: Bools, end: Ints, start: Ints) -> Ints:
    """Return for each kernel that communicates the last other one that its thread had launched before, -1: none."""
    found = np.full(len(end), -1)
    launched = np.flatnonzero(call_of >= 0)
    order = launched[np.lexsort((start[launched], call_of[launched]))]  # calls are by thread and time
    thread = calls.thread[call_of[order]]
    position = np.arange(len(order))
    last = np.maximum.accumulate(np.where(communicates[order], -1, position)) if len(order) else position
    known = communicates[order] & (last >= 0)
    other = order[np.maximum(last, 0)]
    known &= (thread[np.maximum(last, 0)] == thread) & (end[other] <= start[order] + _EARLY_NS)
    known &= start[other] < start[order]
    found[order[known]] = other[known]
    return found


def ended_just_before(stream: Ints, start: Ints, end: Ints, explained: Ints) -> Ints:
    """Return the kernel of another stream that ended just before one whose begin nothing else explains, -1: none."""
    found = np.full(len(start), -1)
    asked = np.flatnonzero(start - explained > NEAR_NS)
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], start[asked] + _EARLY_NS, side="right") - 1
    for _ in range(LOOK_BACK):
        own = (at >= 0) & (stream[order[np.maximum(at, 0)]] == stream[asked])
        if not own.any():
            break
        at = at - own
    other = order[np.maximum(at, 0)]
    delay = start[asked] - explained[asked]
    near = np.maximum(NEAR_NS, _NEAR_SHARE * delay)
    known = (at >= 0) & (stream[other] != stream[asked]) & (start[asked] - end[other] <= near)
    known &= start[other] < start[asked]
    found[asked[known]] = other[known]
    return found
