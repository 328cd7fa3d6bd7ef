"""Steps of a capture that names none: they end where the kernels of the optimizer do."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMPUTE, updates_weights
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.steps import STEP_COLUMNS, UPDATES

__all__ = ["steps_of_kernels"]

_FEWEST = 2  # runs of the optimizer: with one it is not known how long a step is


def steps_of_kernels(kernels: pl.DataFrame) -> pl.DataFrame:
    """Each rank's steps as `steps.find_steps` has them; none unless the optimizer runs twice on every rank.

    Between two kernels of the optimizer lie few others within one of its runs, and a forward and backward pass of them
    between two runs: what is more is beyond the widest gap in these numbers, on a logarithmic scale. A step ends when
    the last kernel of a run has been launched; of kernels without a launch, when it has ended. The first begins on all
    ranks with the first kernel of any. `kernels` has `launch_ns`.
    """
    updates = {name: updates_weights(name) for name in kernels["name"].unique()}
    computing = kernels.filter(work=COMPUTE).select(
        "rank",
        at=pl.coalesce("launch_ns", "start_ns"),
        end_ns=pl.coalesce(pl.col("launch_ns") + 1, "end_ns"),
        updates=pl.col("name").replace_strict(updates, return_dtype=pl.Boolean),
    )
    first = computing["at"].sort()[:1].to_numpy()
    found = [_of_rank(rank, rows.sort("at"), first) for rank, rows in by_rank(computing)]
    if not found or any(len(steps) < _FEWEST for steps in found):
        return pl.DataFrame(schema=STEP_COLUMNS)
    return pl.concat(found)


def _of_rank(rank: int, rows: pl.DataFrame, first: NDArray[np.int64]) -> pl.DataFrame:
    at = np.flatnonzero(rows["updates"].to_numpy())
    ends = rows["end_ns"].to_numpy()[at[_is_last(np.diff(at) - 1)]] if len(at) else np.zeros(0, np.int64)
    ends = np.maximum.accumulate(ends)
    starts = np.append(first, ends)[: len(ends)]
    steps = pl.DataFrame({"start_ns": starts, "end_ns": ends}).filter(pl.col("start_ns") < pl.col("end_ns"))
    steps = steps.with_columns(rank=pl.lit(rank), step=pl.int_range(pl.len()), source=pl.lit(UPDATES))
    return steps.select(pl.col(c).cast(t) for c, t in STEP_COLUMNS.items())


def _is_last(between: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which kernels of the optimizer end a run; `between` are how many others lie before the next one of it."""
    sizes = np.log1p(np.unique(np.append(between, 0)))
    widest = np.diff(sizes)
    longest = sizes[np.argmax(widest) + 1] if len(widest) else np.inf
    return np.append(np.log1p(between) >= longest, True)
