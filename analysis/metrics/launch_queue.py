"""How far hosts run ahead of their devices, and what calls cost that hold them up."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import TRIM, Estimate, Floats, StepGrid, estimate_of_pieces

__all__ = ["host_gaps", "launching", "loss_of_gaps", "lost_lead", "paces", "without_calls"]

_OWN_NS = 10_000  # what such a call takes although it has nothing to wait for
_LONG_CALL_NS = 100_000  # a launch that takes so long waits for room in the queue
_STALL_NS = 5_000_000  # without a call: what a host does then is no launching
_SOON = 20  # times the usual time from one call to the next: after longer ones the host may have waited


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
    """Return the gaps that hosts without these calls would have covered, each with the last call before its end.

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


def without_calls(gaps: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame) -> Floats:
    """Return how many ns of each gap the host's launching threads make no call in, where that lasts 5 ms or longer.

    `gaps` have `rank`, `gap_ns` and `next_ns`.
    """
    threads = kernels.select("rank", thread="launch_thread").unique().drop_nulls()
    calls = launches.join(threads, on=["rank", "thread"], how="semi").sort("start_ns")
    quiet: dict[int, tuple[Floats, Floats]] = {}
    for (rank,), rows in calls.group_by("rank"):
        start, end = rows["start_ns"].to_numpy(), np.maximum.accumulate(rows["end_ns"].to_numpy())
        long = start[1:] - end[:-1] >= _STALL_NS
        quiet[int(str(rank))] = end[:-1][long], start[1:][long]
    found = np.zeros(len(gaps))
    for at, (rank, begin, until) in enumerate(gaps.select("rank", "gap_ns", "next_ns").iter_rows()):
        since, over = quiet.get(rank, (np.zeros(0), np.zeros(0)))
        found[at] = np.clip(np.minimum(over, until) - np.maximum(since, begin), 0, None).sum()
    return found


def _job_loses(grid: StepGrid, cost: Floats) -> Floats:
    """Return ns per step by which the busiest rank would be shorter without `cost`, an array of (rank, step) in ns."""
    return np.asarray(grid.busy.max(axis=0) - (grid.busy - cost).max(axis=0))


def loss_of_gaps(grid: StepGrid, costly: pl.DataFrame, cost: Floats) -> Estimate:
    """Return the job's loss per step by these gaps, which cost this much by rank and step.

    Of few steps the sample are the gaps of the rank that loses most, as those of the others come at the same time; of
    one step those of all ranks, the only repetition that there is.
    """
    pieces = costly if len(grid.steps) == 1 else costly.filter(rank=grid.ranks[int(cost.mean(axis=1).argmax())])
    return estimate_of_pieces(_job_loses(grid, cost), pieces["cost_ns"].to_numpy().astype(np.float64), TRIM)


def launching(grid: StepGrid, phases: pl.DataFrame, launches: pl.DataFrame) -> Floats:
    """Return ns per step and rank in which the host made call after call, without waiting for the device."""
    of_rank = dict(_in_calls(phases, launches).select("rank", "ns").iter_rows())
    return np.array([of_rank.get(rank, 0) for rank in grid.ranks]) / len(grid.steps)


def paces(phases: pl.DataFrame, launches: pl.DataFrame) -> dict[int, float]:
    """Return by rank the mean ns from one call of its host to the next, where it made call after call."""
    return dict(_in_calls(phases, launches).select("rank", pl.col("ns") / pl.col("calls")).iter_rows())


@once
def _in_calls(phases: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """(rank, ns, calls): from call to call of each thread, without those after which it may have waited."""
    seen = phases.group_by("rank").agg(first_ns=pl.col("start_ns").min(), last_ns=pl.col("end_ns").max())
    lasts = pl.col("end_ns") - pl.col("start_ns")
    waits = pl.when(pl.col("waits") | (lasts >= _LONG_CALL_NS)).then(lasts).otherwise(0)
    until_next = pl.col("start_ns").shift(-1) - pl.col("start_ns") - waits
    of_thread = ["rank", "thread"]
    return (
        launches.select(*of_thread, "start_ns", "end_ns", "waits")
        .join(seen, on="rank")
        .filter(pl.col("start_ns") >= pl.col("first_ns"), pl.col("end_ns") <= pl.col("last_ns"))
        .sort("start_ns")
        .select(*of_thread, until_next.over(of_thread).alias("ns"))
        .filter(pl.col("ns") <= _SOON * pl.col("ns").median().over(of_thread))
        .group_by("rank")
        .agg(pl.col("ns").sum(), pl.len().alias("calls"))
    )
