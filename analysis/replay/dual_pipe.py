"""Pipelines in which a rank runs the forward of one microbatch and the backward of another at once: DualPipe.

What overlaps takes longer than either alone, so what one of them would take without the other is in no file: such
steps are measured, not replayed.

Source: DeepSeek-V3 technical report (2024), table 2 and section 3.2.1; DualPipeV as in DeepSeek's DualPipe repository.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Pipeline
from rankscope.analysis.model.pipeline_ops import BACKWARD, COMPUTES, FORWARD, WEIGHTS
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent

__all__ = ["dual_pipe", "is_dual_pipe"]

_OVERLAPPED, _PAIRED = 0.5, 0.2  # of the shorter one's length; share of the forwards that so overlap with a backward


def is_dual_pipe(ops: pl.DataFrame) -> bool:
    """Say whether forwards of a rank run while a backward of the same rank does, one in five or more."""
    forwards = ops.filter(name=FORWARD).height
    return forwards > 0 and len(_pairs(ops)) >= _PAIRED * forwards


def dual_pipe(ops: pl.DataFrame) -> Pipeline:
    """Return the schedule and its measured bubble: a rank is busy while any of its computations runs.

    In theory idle are (p / 2 - 1) (F&B + B - 3 W) of p ranks, under DualPipeV (p - 1) (F&B + B - 3 W), with the mean
    times of an overlapped pair F&B, a whole backward B and gradients of weights W; not known without the last.
    """
    computes = ops.filter(pl.col("name").is_in(COMPUTES))
    places = computes.group_by("rank").agg(pl.col("stage").min()).sort("stage")
    ranks = places["rank"].to_list()
    of_step = ["step", "replica"]
    span = computes.group_by(of_step).agg(span=pl.col("end_ns").max() - pl.col("start_ns").min())
    busy = _busy(computes).join(span, on=of_step).group_by("rank").agg(pl.col("busy").mean(), pl.col("span").mean())
    bubble = {n: 1 - share for n, share in enumerate(_in_order(busy, ranks, pl.col("busy") / pl.col("span")))}
    busiest = min(bubble, key=lambda place: bubble[place])
    (work_ns,) = _in_order(busy, ranks[busiest : busiest + 1], pl.col("busy"))
    first = computes.filter(pl.col("rank") == ranks[-1], name=FORWARD).sort("start_ns")["stage"][0]
    name = "DualPipe" if first >= len(ranks) else "DualPipeV"  # the second direction begins on the last rank
    idle_ns = _idle_ns(computes, len(ranks) / 2 if name == "DualPipe" else len(ranks))
    theory = None if idle_ns is None else idle_ns / (idle_ns + work_ns)
    needs = text(" where {schedule} needs {share}", schedule=name, share=percent(theory)) if theory is not None else ""
    stages = computes.filter(pl.col("rank") == ranks[0])["stage"].n_unique()
    forwards = computes.filter(pl.col("rank") == ranks[0], name=FORWARD)
    return Pipeline(
        schedule=name,
        stages=len(ranks),
        microbatches=len(forwards) // (forwards.select(of_step).n_unique() * (1 if name == "DualPipe" else stages)),
        theory_fraction=theory,
        bubble=bubble,
        busiest_stage=busiest,
        excess={},
        explanation=text(
            "Rank {rank} idles {share}{needs}; forwards and backwards overlap, so steps are measured, not replayed.",
            rank=ranks[busiest],
            share=percent(bubble[busiest]),
            needs=needs,
        ),
    )


def _in_order(rows: pl.DataFrame, ranks: list[int], value: pl.Expr) -> list[float]:
    found = dict(rows.select("rank", value).iter_rows())
    return [float(found[rank]) for rank in ranks]


def _pairs(ops: pl.DataFrame) -> pl.DataFrame:
    """Return forwards and the backward of their rank that runs at the same time: begin and end of both together."""
    of_rank, times = ["rank", "step", "replica"], ["start_ns", "end_ns"]
    backwards = ops.filter(name=BACKWARD).select(*of_rank, *times, begins="start_ns").sort("start_ns")
    forwards = ops.filter(name=FORWARD).select(*of_rank, *times).with_columns(middle=(pl.sum_horizontal(times)) // 2)
    near = (
        forwards.sort("middle")
        .join_asof(backwards, left_on="middle", right_on="begins", by=of_rank, suffix="_b", check_sortedness=False)
        .drop_nulls("start_ns_b")
    )
    lengths = pl.min_horizontal(pl.col("end_ns") - pl.col("start_ns"), pl.col("end_ns_b") - pl.col("start_ns_b"))
    both = pl.min_horizontal("end_ns", "end_ns_b") - pl.max_horizontal("start_ns", "start_ns_b")
    return near.filter(both > _OVERLAPPED * lengths).select(
        *of_rank,
        pl.min_horizontal("start_ns", "start_ns_b").alias("start_ns"),
        pl.max_horizontal("end_ns", "end_ns_b").alias("end_ns"),
    )


def _busy(computes: pl.DataFrame) -> pl.DataFrame:
    """Return for how long any computation of a rank ran: rank, step, replica, busy."""
    of_rank = ["rank", "step", "replica"]
    reached = pl.col("end_ns").cum_max().shift(1).over(of_rank).fill_null(pl.col("start_ns"))
    added = (pl.col("end_ns") - pl.max_horizontal("start_ns", reached)).clip(0)
    return computes.sort("start_ns").with_columns(busy=added).group_by(of_rank).agg(pl.col("busy").sum())


def _idle_ns(computes: pl.DataFrame, stages: float) -> float | None:
    weights = computes.filter(name=WEIGHTS)
    if weights.is_empty():
        return None
    length = pl.col("end_ns") - pl.col("start_ns")
    pairs = _pairs(computes)
    both_ns = float(np.mean(pairs.select(length).to_series().to_numpy()))
    of = ["rank", "step", "replica", "stage", "microbatch"]
    split = computes.filter(name=BACKWARD).join(weights.select(of), on=of, how="semi")
    if split.is_empty():
        return None
    weights_ns, inputs_ns = (float(np.mean(rows.select(length).to_series().to_numpy())) for rows in (weights, split))
    return max((stages - 1) * (both_ns + inputs_ns + weights_ns - 3 * weights_ns), 0.0)
