"""All ranks' times in one order, rank after rank, so that one search or sum serves them all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["MOST", "RankKeys"]

MOST = 1 << 62  # keys are less

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankKeys:
    """A rank's place × span + ns since the origin. `ranks` are in order, and times less than `span` after `origin`."""

    ranks: Ints
    origin: int
    span: int

    def of(self, frame: pl.DataFrame, column: str) -> Ints:
        """Return the keys of a column of times."""
        return np.asarray(frame[column].to_numpy() + self.offset(frame), dtype=np.int64)

    def offset(self, frame: pl.DataFrame) -> Ints:
        """Return by row what makes its times keys."""
        return self.place(frame) * self.span - self.origin

    def place(self, frame: pl.DataFrame) -> Ints:
        """Return by row the place of its rank."""
        rank, first = frame["rank"].to_numpy(), int(self.ranks[0])
        if int(self.ranks[-1]) - first > len(rank) + len(self.ranks):
            return np.searchsorted(self.ranks, rank).astype(np.int64)
        places = np.zeros(int(self.ranks[-1]) - first + 1, np.int64)
        places[self.ranks - first] = np.arange(len(self.ranks))
        return np.asarray(places[rank - first])
