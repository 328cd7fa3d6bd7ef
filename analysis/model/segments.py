"""Looking up times among the rows of one rank, or of one rank and group, for all of them at once."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["latest", "reached_before"]

_MOST = 1 << 62  # keys are less

Ints = NDArray[np.int64]


def reached_before(rows: pl.DataFrame, *by: str) -> pl.Series:
    """Return the latest `end_ns` of the rows before, of those with the same numbers `by`; null for the first.

    Rows with the same numbers follow each other.
    """
    reached = pl.col("end_ns").cum_max().shift(1).over(by)
    if rows.is_empty() or rows["end_ns"].null_count():
        return rows.select(reached).to_series()
    ends, is_first = rows["end_ns"].to_numpy(), np.zeros(len(rows), bool)
    is_first[0] = True
    for column in by:
        values = rows[column].to_numpy()
        is_first[1:] |= values[1:] != values[:-1]
    low = int(ends.min())
    segment, span = np.cumsum(is_first), int(ends.max()) - low + 1
    if int(segment[-1]) * span >= _MOST - abs(low):
        return rows.select(reached).to_series()
    # The segments one after the other on one axis, so that what is reached in one is before all of the next.
    offset = segment * span - low
    keys = np.maximum.accumulate(ends + offset)
    keys -= offset
    before = pl.Series(np.append(keys[:1], keys[:-1]))
    return pl.select(pl.when(pl.Series(~is_first)).then(before)).to_series()


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
