"""Looking up times among the rows of one rank, or of one rank and group, for all of them at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["MOST", "latest", "reached_before", "running_max"]

MOST = 1 << 62  # numbers that put segments one after the other on one axis are less

Ints = NDArray[np.int64]


def reached_before(rows: pl.DataFrame, *by: str) -> pl.Series:
    """Return the latest `end_ns` of the rows before, of those with the same numbers `by`.

    Null for the first of these, and after one without an end. Rows with the same numbers follow each other.
    """
    if rows.is_empty() or rows["end_ns"].null_count():
        return rows.select(pl.col("end_ns").cum_max().shift(1).over(by)).to_series()
    is_first = np.zeros(len(rows), bool)
    is_first[0] = True
    for column in by:
        values = rows[column].to_numpy()
        is_first[1:] |= values[1:] != values[:-1]
    reached = running_max(rows["end_ns"].to_numpy(), np.append(np.flatnonzero(is_first), len(rows)))
    before = pl.Series(np.append(reached[:1], reached[:-1]))
    return pl.select(pl.when(pl.Series(~is_first)).then(before)).to_series()


def running_max(values: Ints, bounds: Ints) -> Ints:
    """Return the largest value of each row's segment up to that row; bounds of segments as in `latest`."""
    if not len(values):
        return values
    low, high = int(values.min()), int(values.max())
    span, segments = high - low + 1, len(bounds) - 1
    if segments * span >= MOST:
        pieces = (values[begin:end] for begin, end in pairwise(bounds.tolist()))
        return np.concatenate([np.maximum.accumulate(piece) for piece in pieces])
    # On one axis, so that what is reached in one segment is before all of the next.
    offset = np.repeat(np.arange(segments) * span - low, np.diff(bounds))
    return np.asarray(np.maximum.accumulate(values + offset) - offset)


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
