"""Work of devices that a profiler lost: the calls that launched it are there, its own rows are not.

The driver drops rows where the profiler's buffers are full, and, in processes that have lived long, at the begin of a
capture. What is lost would count as the device's idle time, and as the host's fault.
"""

from __future__ import annotations

import polars as pl

from rankscope.analysis.finding import Gap
from rankscope.analysis.kinds import LAUNCHING_CALLS
from rankscope.analysis.language import text
from rankscope.analysis.phrases import counted
from rankscope.analysis.timeline.steps import in_steps

__all__ = ["set_lost_aside"]

_MUCH = 0.1  # share of a step's launches from which it is not judged
_TOLD = 0.01  # share of all from which it is told


def set_lost_aside(
    steps: pl.DataFrame, hosts: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame
) -> tuple[pl.DataFrame, list[Gap]]:
    """The steps, those not judged in which a rank's device lacks a tenth of what was launched, and what is to be said.

    `steps` is as `steps.judge` has it, `hosts` the hosts' steps.
    """
    calls = launches.filter(pl.col("name").str.contains(LAUNCHING_CALLS)).unique(["rank", "correlation"])
    rows = kernels.select("rank", "correlation", seen=True).drop_nulls().unique()
    calls = calls.join(rows, on=["rank", "correlation"], how="left")
    calls = calls.filter(pl.col("seen").any().over("rank"))  # else the file does not relate them
    if calls["seen"].null_count() == 0:
        return steps, []
    calls = in_steps(calls.sort("rank", "start_ns"), hosts)
    lost, all_calls = pl.col("seen").is_null().sum().alias("lost"), pl.len().alias("all")
    by_step = calls.drop_nulls("step").group_by("rank", "step").agg(lost, all_calls)
    unseen = by_step.filter(pl.col("lost") >= _MUCH * pl.col("all"))["step"].unique()
    aside = pl.col("judged") & pl.col("step").is_in(unseen.implode())
    not_judged = steps.filter(aside)["step"].n_unique()
    set_aside = steps.with_columns(
        judged=pl.col("judged") & ~aside,
        aside=pl.when(aside).then(pl.lit("lost")).otherwise("aside"),
    )
    by_rank = calls.group_by("rank").agg(lost, all_calls).filter(pl.col("lost") >= _TOLD * pl.col("all")).sort("rank")
    gaps = [
        Gap(
            table="kernels",
            rank=rank,
            node=None,
            count=count,
            why=text("what {lost} of {all:,} launched was not recorded", lost=counted(count, "call"), all=total),
        )
        for rank, count, total in by_rank.rows()
    ]
    if not_judged:
        why = text(
            "{steps} not judged, since much of what was launched in them was not recorded",
            steps=counted(not_judged, "step"),
        )
        gaps.append(Gap(table="steps", rank=None, node=None, count=not_judged, why=why))
    return set_aside, gaps
