"""How much of some intervals others cover."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["covered_ns"]

Floats = NDArray[np.float64]


def covered_ns(start: Floats, end: Floats, others: pl.DataFrame) -> Floats:
    """Return how many ns of each of these intervals lie in one of the others (`start_ns`, `end_ns`).

    The intervals do not overlap each other, and are in order; the others may be in any, one inside another.
    """
    begin, done = _union(others)
    edges = np.concatenate([[0.0], np.cumsum(done - begin)])

    def before(at: Floats) -> Floats:
        index = np.searchsorted(begin, at, side="right")
        over = np.where(index > 0, np.maximum(done[index - 1] - at, 0), 0)
        return edges[index] - over

    return before(end) - before(start)


def _union(others: pl.DataFrame) -> tuple[Floats, Floats]:
    """Start and end of what the others cover together, in order."""
    ordered = others.sort("start_ns")
    begin, done = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
    reached = np.maximum.accumulate(done)
    new = np.concatenate([[True], begin[1:] > reached[:-1]])
    return begin[new], np.concatenate([reached[:-1][new[1:]], reached[-1:]])
