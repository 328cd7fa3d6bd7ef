"""The optimizer in a capture that names none, by its kernels; and the steps, which end with it."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMPUTE, updates_weights
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.steps import STEP_COLUMNS, UPDATES

__all__ = ["optimizer_regions", "steps_of"]

_FEWEST = 2  # with one run of the optimizer it is not known how long a step is
_MAIN_THREAD = 0


def optimizer_regions(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the runs of the optimizer as regions: none, unless it runs twice or more on every rank.

    Between two kernels of the optimizer lie few others within one of its runs, and a forward and backward pass of them
    between two runs: what is more is beyond the widest gap in these numbers, on a logarithmic scale. A run lasts from
    the first launch to the last; of kernels without a launch, as long as they do. `kernels` has `launch_ns`.
    """
    updates = {name: updates_weights(name) for name in kernels["name"].unique()}
    computing = kernels.filter(work=COMPUTE).select(
        *("rank", "node"),
        start_ns=pl.coalesce("launch_ns", "start_ns"),
        end_ns=pl.coalesce(pl.col("launch_ns") + 1, "end_ns"),
        updates=pl.col("name").replace_strict(updates, return_dtype=pl.Boolean),
    )
    runs = [_runs(rows.sort("start_ns")) for _, rows in by_rank(computing)]
    found = pl.concat(runs) if runs and all(len(of_rank) >= _FEWEST for of_rank in runs) else _runs(computing.clear())
    return found.with_columns(kind=pl.lit("optimizer"), name=pl.lit("optimizer"), thread=pl.lit(_MAIN_THREAD))


def steps_of(runs: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Each rank's steps as `steps.find_steps` has them, which end with these runs of the optimizer.

    The first begins on all ranks with the first launch of any, if that is less than a step before their own.
    """
    begun = kernels.group_by("rank").agg(own=pl.coalesce("launch_ns", "start_ns").min())
    usual = pl.col("end_ns").diff().median().over("rank")
    first = pl.when(pl.col("own") - pl.col("own").min() < usual).then(pl.col("own").min()).otherwise("own")
    return (
        runs.join(begun, on="rank", maintain_order="left")
        .with_columns(start_ns=pl.coalesce(pl.col("end_ns").shift(1).over("rank"), first))
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .with_columns(step=pl.int_range(pl.len()).over("rank"), source=pl.lit(UPDATES))
        .select(pl.col(c).cast(t) for c, t in STEP_COLUMNS.items())
    )


def _runs(rows: pl.DataFrame) -> pl.DataFrame:
    """(rank, node, start_ns, end_ns) of one rank, whose rows are in order."""
    at = np.flatnonzero(rows["updates"].to_numpy())
    is_last = _is_last(np.diff(at) - 1) if len(at) else np.zeros(0, bool)
    of_run = pl.Series("run", np.cumsum(is_last) - is_last, dtype=pl.Int64)
    runs = rows[at].with_columns(of_run).group_by("run", maintain_order=True)
    return runs.agg(pl.col("rank", "node").first(), pl.col("start_ns").first(), pl.col("end_ns").max()).drop("run")


def _is_last(between: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which kernels of the optimizer end a run; `between` are how many others lie before the next one of it."""
    sizes = np.log1p(np.unique(np.append(between, 0)))
    widest = np.diff(sizes)
    longest = sizes[np.argmax(widest) + 1] if len(widest) else np.inf
    return np.append(np.log1p(between) >= longest, True)
