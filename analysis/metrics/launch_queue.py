"""How far hosts run ahead of their devices, and what calls cost that hold them up."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.step_matrix import Floats, StepGrid

__all__ = ["host_gaps", "job_loses", "lost_lead"]

_OWN_NS = 10_000  # what such a call takes although it has nothing to wait for


def host_gaps(phases: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """(rank, step, gap_ns, next_ns): the time in which a device idles before work launched late, in order.

    One row per step and gap, whatever its labels; without those at the end of which nothing begins.
    """
    host = phases.filter(pl.col("part") == "host").sort("rank", "start_ns")
    new = (pl.col("rank") != pl.col("rank").shift()) | (pl.col("start_ns") != pl.col("end_ns").shift())
    last = kernels.group_by("rank").agg(pl.col("start_ns").max().alias("last_ns"))
    return (
        host.group_by("rank", "step", new.fill_null(True).cum_sum().alias("gap"), maintain_order=True)
        .agg(pl.col("start_ns").min().alias("gap_ns"), pl.col("end_ns").max().alias("next_ns"))
        .join(last, on="rank", maintain_order="left")
        .filter(pl.col("next_ns") <= pl.col("last_ns"))
        .drop("gap", "last_ns")
    )


def lost_lead(gaps: pl.DataFrame, calls: pl.DataFrame, min_ns: int) -> pl.DataFrame:
    """The gaps that hosts without these calls would have covered, each with the last call before its end.

    A call takes away as much of its host's lead as it lasts, a gap uses up as much of it as it is long, and none is
    ever owed (Lindley's recursion). Columns: those of `gaps`, `cost_ns` (at least `min_ns`), and the call's `start_ns`,
    `end_ns`, `thread` and `name`.
    """
    held = (pl.col("end_ns") - pl.col("start_ns") - _OWN_NS).clip(lower_bound=0)
    taken = calls.select("rank", at=pl.col("end_ns"), lead=held)
    used = gaps.select("rank", "gap_ns", at=pl.col("next_ns"), lead=pl.col("gap_ns") - pl.col("next_ns"))
    total = pl.col("lead").cum_sum()
    left = (total - pl.min_horizontal(total.cum_min(), 0)).over("rank")
    covered = (
        pl.concat([taken, used], how="diagonal")
        .sort("rank", "at")
        .with_columns(left=left)
        .with_columns(cost_ns=pl.col("left").shift(1).over("rank").fill_null(0) - pl.col("left"))
        .filter(pl.col("gap_ns").is_not_null(), pl.col("cost_ns") >= min_ns)
    )
    ends = calls.filter(held > 0).select(
        "rank", "start_ns", "end_ns", "thread", "name", pl.col("end_ns").alias("returned_ns")
    )
    return (
        gaps.join(covered.select("rank", "gap_ns", "cost_ns"), on=["rank", "gap_ns"])
        .sort("next_ns")
        .join_asof(
            ends.sort("returned_ns"),
            left_on="next_ns",
            right_on="returned_ns",
            by="rank",
            check_sortedness=False,
        )
        .sort("rank", "gap_ns")
    )


def job_loses(grid: StepGrid, cost: Floats) -> Floats:
    """Return ns per step by which the busiest rank would be shorter without `cost`, an array of (rank, step) in ns."""
    return np.asarray(grid.busy.max(axis=0) - (grid.busy - cost).max(axis=0))
