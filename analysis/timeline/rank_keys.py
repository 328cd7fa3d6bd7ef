"""All ranks' times in one order, rank after rank, so that one search or sum serves them all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.lookup import row_of

__all__ = ["RankKeys"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankKeys:
    """A rank's place × span + ns since the origin. `ranks` are in order, and times less than `span` after `origin`."""

    ranks: Ints
    origin: int
    span: int

    @classmethod
    def covering(cls, *frames: pl.DataFrame) -> RankKeys:
        """Return keys for the spans (rank, start_ns, end_ns) of these frames, of which one has rows."""
        ranks = pl.concat([frame["rank"] for frame in frames]).unique().sort().to_numpy()
        first = min(int(frame["start_ns"].to_numpy().min()) for frame in frames if len(frame))
        last = max(int(frame["end_ns"].to_numpy().max()) for frame in frames if len(frame))
        return cls(ranks, first, last - first + 1)

    def of(self, frame: pl.DataFrame, column: str) -> Ints:
        """Return the keys of a column of times."""
        return np.asarray(frame[column].to_numpy() + self.offset(frame), dtype=np.int64)

    def offset(self, frame: pl.DataFrame) -> Ints:
        """Return by row what makes its times keys."""
        return self.place(frame) * self.span - self.origin

    def place(self, frame: pl.DataFrame) -> Ints:
        """Return by row the place of its rank."""
        return row_of(frame, pl.DataFrame({"rank": self.ranks}, frame.select("rank").schema), ["rank"])
