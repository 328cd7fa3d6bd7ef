"""How unevenly ranks compute in each of a few steps, from pieces of these steps: so that three steps are enough.

A device's computation in a step, kernel after kernel, is cut into pieces of equally many kernels. Data that are longer
on a rank in a step lengthen all of its pieces there; chance lengthens single ones. So what a rank computes longer than
the others is the median over pieces, and how these scatter around it says how sure that is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.metrics.step_matrix import Floats, Ints, StepGrid
from rankscope.analysis.model.kernels import COMPUTE
from rankscope.analysis.text.message import text
from rankscope.errors import NotResolvable

__all__ = ["Uneven", "pieces_of_steps", "uneven_pieces"]

_MOST_PIECES, _LEAST_PIECES = 16, 6
_LEAST_KERNELS = 3  # of a piece
_OF_MEDIAN = 1.2533  # the standard error of a median in those of a mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """Return each rank's computation, ns, its factor over the peers, and the error of that.

    Arrays of (rank, step); the factor is a logarithm. `pieces` (rank, step, piece), ns.
    """

    own: Floats
    longer: Floats
    error: Floats
    pieces: Floats

    @property
    def moving(self) -> Floats:
        """The part of a rank's excess that changes from step to step."""
        return np.asarray(self.longer - self.longer.mean(axis=1, keepdims=True))

    @property
    def moved(self) -> float:
        """By how many standard errors ranks differ from themselves in other steps, root of the mean square."""
        ranks, steps = self.longer.shape
        free = max((ranks - 1) * (steps - 1), 1) / (ranks * steps)
        return float(np.sqrt(np.mean((self.moving / self.error) ** 2) / free))

    def of_uneven_work(self, role: Ints) -> Floats:
        """Return the excess of each step's longest rank over equal work on all ranks of a role, ns."""
        even = [self.own[role == each].mean(axis=0) for each in np.unique(role)]
        return np.asarray(self.own.max(axis=0) - np.max(even, axis=0))

    def of_slow_ranks(self) -> Floats:
        """Return the part of that by slow ranks, ns: by the least factor that a rank has in all steps."""
        always = np.maximum(self.longer.min(axis=1, keepdims=True), 0.0)
        return np.asarray(self.own.max(axis=0) - (self.own * np.exp(-always)).max(axis=0))


def uneven_pieces(kernels: pl.DataFrame, steps: pl.DataFrame, grid: StepGrid, role: Ints) -> Uneven:
    """Return the ranks and steps of the grid; a rank is compared with those of its `role`. Raises NotResolvable."""
    pieces = pieces_of_steps(kernels, steps, grid)
    logs = np.log(pieces)
    for each in np.unique(role):
        logs[role == each] -= logs[role == each].mean(axis=0)
    longer = np.median(logs, axis=2)
    scatter = 1.4826 * np.median(np.abs(logs - longer[:, :, np.newaxis]), axis=2)
    error = np.full_like(longer, _OF_MEDIAN * float(np.sqrt(np.mean(scatter**2))) / pieces.shape[2] ** 0.5)
    return Uneven(own=pieces.sum(axis=2), longer=longer, error=np.maximum(error, 1e-6), pieces=pieces)


def pieces_of_steps(kernels: pl.DataFrame, steps: pl.DataFrame, grid: StepGrid) -> Floats:
    """Return the ranks' computation in each piece, (rank, step, piece) in ns.

    Raises NotResolvable where kernels are too few.
    """
    spans = steps.select("rank", "step", at_ns="start_ns", until_ns="end_ns").sort("at_ns")
    length = pl.col("end_ns") - pl.col("start_ns")
    rows = (
        kernels.filter(pl.col("work") == COMPUTE, length > 0, pl.col("rank").is_in(grid.ranks))
        .select("rank", at_ns="start_ns", ns=length)
        .sort("at_ns")
        .join_asof(spans, on="at_ns", by="rank", check_sortedness=False)
        .filter(pl.col("at_ns") < pl.col("until_ns"), pl.col("step").is_in(grid.steps))
    )
    counts = rows.group_by("rank", "step").len()["len"].to_list()
    least = min(counts, default=0) if len(counts) == len(grid.ranks) * len(grid.steps) else 0
    number = min(least // _LEAST_KERNELS, _MOST_PIECES)
    if number < _LEAST_PIECES:
        raise NotResolvable(text("a step has too few kernels to distinguish load imbalance from chance"), unclear=True)
    of_step = ["rank", "step"]
    place = pl.int_range(pl.len()).over(of_step) * number // pl.len().over(of_step)
    sums = rows.with_columns(piece=place).group_by(*of_step, "piece").agg(pl.col("ns").sum())
    pieces = np.ones((len(grid.ranks), len(grid.steps), number))
    at = np.searchsorted(grid.ranks, sums["rank"]), np.searchsorted(grid.steps, sums["step"]), sums["piece"].to_numpy()
    pieces[at] = sums["ns"].to_numpy()
    return pieces
