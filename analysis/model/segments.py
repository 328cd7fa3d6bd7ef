"""Looking up times among the rows of one rank, or of one rank and group, for all of them at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["latest"]

Ints = NDArray[np.int64]


def latest(keys: Ints, bounds: Ints, segment: Ints, at: Ints) -> Ints:
    """Return the last row of each query's segment whose key is not above `at`; keys ascend within a segment.

    Segment s has the rows from `bounds[s]` to below `bounds[s + 1]`. Where there is none: one before the segment.
    """
    order = None if (segment[1:] >= segment[:-1]).all() else np.argsort(segment, kind="stable")
    asked = at if order is None else at[order]
    cuts = np.searchsorted(segment if order is None else segment[order], np.arange(len(bounds)))
    count = np.zeros(len(at), np.int64)
    limits = zip(cuts[:-1].tolist(), cuts[1:].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    for begin, end, low, high in limits:
        if begin < end:
            count[begin:end] = keys[low:high].searchsorted(asked[begin:end], "right")
    rows = count + np.repeat(bounds[:-1] - 1, np.diff(cuts))
    if order is None:
        return np.asarray(rows)
    found = np.empty_like(rows)
    found[order] = rows
    return found
