"""Exclude steps with lost records, which would otherwise count as compute time or as host-bound.

The driver drops rows of a device where the profiler's buffers are full, and, in processes that have lived long, at the
begin of a capture: the calls that launched them are there, they are not. And a rank whose operations were not recorded
seems to compute where it waits.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.kernels import LAUNCHING_CALLS
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.steps import OPTIMIZER, UPDATES, in_steps, last_begun
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import P2P_OPS

__all__ = ["set_cut_aside", "set_lost_aside", "without_lost_operations"]

_MUCH = 0.1  # share of a step's launches from which it is not judged
_WHOLE = 0.9  # share of the usual number of kernels that a whole step has
_REPORTED = 0.01  # share of all from which it is reported


def set_lost_aside(
    steps: pl.DataFrame, hosts: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame
) -> tuple[pl.DataFrame, list[Gap]]:
    """Return the steps, those excluded in which a rank's device lacks a tenth of what was launched, and the remarks.

    `steps` is as `steps.judge` has it, `hosts` the hosts' steps.
    """
    by = ["rank", "correlation"]
    calls, rows = launches.filter(pl.col("name").str.contains(LAUNCHING_CALLS)), kernels.select(by)
    seen, none = dict(by_rank(rows)), rows.clear()
    if all(_have_all(seen.get(rank, none), of_rank) for rank, of_rank in by_rank(calls)):
        return steps, []
    calls = calls.unique(by).join(rows.with_columns(seen=True).unique(), on=by, how="left")
    calls = calls.filter(pl.col("seen").any().over("rank"))  # else the file does not relate them
    calls = in_steps(calls.sort("rank", "start_ns"), hosts)
    lost, launched = pl.col("seen").is_null().sum().alias("lost"), pl.len().alias("launched")
    by_step = calls.drop_nulls("step").group_by("rank", "step").agg(lost, launched)
    unseen = by_step.filter(pl.col("lost") >= _MUCH * pl.col("launched"))["step"].unique()
    aside = pl.col("judged") & pl.col("step").is_in(unseen.implode())
    not_judged = steps.filter(aside)["step"].n_unique()
    set_aside = steps.with_columns(
        judged=pl.col("judged") & ~aside,
        aside=pl.when(aside).then(pl.lit("lost")).otherwise("aside"),
    )
    of_ranks = calls.group_by("rank").agg(lost, launched).sort("rank")
    gaps = [
        Gap(
            table="kernels",
            rank=rank,
            node=None,
            count=count,
            why=text("what {lost} of {all:,} launched was not recorded", lost=counted(count, "call"), all=total),
        )
        for rank, count, total in of_ranks.filter(pl.col("lost") >= _REPORTED * pl.col("launched")).rows()
    ]
    if not_judged:
        why = plural(
            "{steps} not analyzed, since much of what was launched in it was not recorded",
            "{steps} not analyzed, since much of what was launched in them was not recorded",
            not_judged,
            steps=counted(not_judged, "step"),
        )
        gaps.append(Gap(table="steps", rank=None, node=None, count=not_judged, why=why))
    return set_aside, gaps


def set_cut_aside(steps: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the steps, the first not analyzed where a capture began within it.

    Where the optimizer ends steps no more is known of the first one than that it has fewer kernels than the others.
    """
    ended_by_optimizer = steps.filter(pl.col("source").is_in([OPTIMIZER, UPDATES]))
    placed = in_steps(kernels.select("rank", "start_ns"), ended_by_optimizer).drop_nulls("step")
    first = pl.col("step") == pl.col("step").min()
    counts = placed.group_by("rank", "step").len()
    of_first, usual = (pl.col("len").filter(which).median() for which in (first, ~first))
    cut = counts.group_by("rank").agg(pl.col("step").min(), is_cut=of_first < _WHOLE * usual).filter("is_cut")
    aside = pl.col("judged") & pl.col("step").is_in(cut["step"].unique().implode())
    return steps.with_columns(
        judged=pl.col("judged") & ~aside,
        aside=pl.when(aside).then(pl.lit("incomplete")).otherwise("aside"),
    )


def _have_all(rows: pl.DataFrame, calls: pl.DataFrame) -> bool:
    return bool(calls["correlation"].is_in(rows["correlation"].implode()).fill_null(value=False).all())


def without_lost_operations(
    steps: pl.DataFrame, collectives: pl.DataFrame, groups: pl.DataFrame
) -> tuple[pl.DataFrame, list[Gap]]:
    """Return the steps but for those in which a rank called nothing, and which others of its groups cannot do without.

    A rank of a group that called nothing at all has no steps, if others called anything.
    """
    ranks = _without_calls(steps, collectives)
    if ranks.is_empty():
        return steps, []
    together = collectives.filter(~pl.col("op").is_in(P2P_OPS)).select("rank", "group_id", "start_ns")
    called = in_steps(together, steps).drop_nulls("step").select("group_id", "step").unique()
    once = groups.unique("group_id", keep="last", maintain_order=True)
    members = [
        (group_id, rank) for group_id, said in once.select("group_id", "members").rows() for rank in members_of(said)
    ]
    of_groups = pl.DataFrame(members, {"group_id": pl.Int64, "rank": pl.Int32}, orient="row")
    called_with = ranks.join(of_groups, on="rank").join(called, on=["group_id", "step"], how="semi")
    called_never = ranks.join(collectives.select("rank"), on="rank", how="anti").join(of_groups, on="rank", how="semi")
    lost = pl.concat([called_with.select("rank", "step"), called_never.filter(pl.lit(len(collectives) > 0))]).unique()
    gaps = [
        Gap(
            table="collectives",
            rank=rank,
            node=None,
            count=None,
            why=text(
                "{rank} called nothing in {steps} in which others did: they are not analyzed",
                rank=named("rank", [rank]),
                steps=counted(count, "step"),
            ),
        )
        for rank, count in lost.group_by("rank").len().sort("rank").rows()
    ]
    return steps.join(lost, on=["rank", "step"], how="anti", maintain_order="left"), gaps


def _without_calls(steps: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the steps of each rank in which it called nothing: (rank, step)."""
    last = last_begun(collectives, steps["rank"], steps["end_ns"] - 1)
    begun = np.append(collectives["start_ns"].to_numpy(), -(1 << 62))[last]
    return steps.filter(pl.Series(begun < steps["start_ns"].to_numpy())).select("rank", "step")
