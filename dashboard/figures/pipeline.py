"""A pipeline's step as its stages went through it, and as the schedule would have it."""

from __future__ import annotations

import statistics
from typing import Any

import polars as pl

from rankscope.analysis.model.pipeline_ops import BACKWARD, FORWARD, WEIGHTS
from rankscope.analysis.report.palette import LIGHT
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.dashboard.figures.plots import Figure, axis, figure, time_axis

__all__ = ["chart", "computations", "ideal"]

_COLOURS = {FORWARD: LIGHT["compute"], BACKWARD: LIGHT["transfer"], WEIGHTS: LIGHT["overlapped"]}
_NAMES = {FORWARD: "forward", BACKWARD: "backward", WEIGHTS: "gradients of weights"}
_MOST_LABELS = 400  # microbatches that are numbered


def computations(ops: pl.DataFrame, step: int, replica: int) -> pl.DataFrame:
    """rank, stage, name, microbatch, start_ns and end_ns since the step's first computation; by stage and start."""
    rows = ops.filter(
        pl.col("step") == step, pl.col("replica") == replica, pl.col("name").is_in(list(_NAMES))
    ).with_columns(pl.coalesce("microbatch", "seq").alias("microbatch"))
    first = pl.col("start_ns").min()
    since = pl.col("start_ns") - first, pl.col("end_ns") - first
    return rows.select("rank", "stage", "name", "microbatch", *since).sort("stage", "start_ns")


def ideal(measured: pl.DataFrame) -> pl.DataFrame | None:
    """Return the same computations in each rank's own order, if stages were equally fast and nothing else took time.

    A forward needs that of the stage before, a backward that of the stage behind, gradients of weights neither; each
    takes the median of its kind.
    None where that cannot be: a stage lacks a microbatch.
    """
    stages = measured["stage"].unique().sort().to_list()
    by_stage = [sorted(measured.filter(stage=stage).select("name", "microbatch").iter_rows()) for stage in stages]
    if any(mine != by_stage[0] or len(set(mine)) != len(mine) for mine in by_stage):
        return None
    length = measured.group_by("name").agg((pl.col("end_ns") - pl.col("start_ns")).median())
    takes = {name: int(ns) for name, ns in length.iter_rows()}
    position = {stage: place for place, stage in enumerate(stages)}
    end: dict[tuple[int, str, int], int] = {}
    rows: list[tuple[int, int, str, int, int, int]] = []
    ordered = measured.sort("start_ns")
    waiting = {
        rank: list(ordered.filter(rank=rank).select("stage", "name", "microbatch").iter_rows())
        for rank in ordered["rank"].unique().sort()
    }
    free = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        before = len(rows)
        for rank, todo in waiting.items():
            done = 0
            for stage, name, microbatch in todo:
                source = position[stage] + (-1 if name == FORWARD else 1)
                needed = (stages[source], name, microbatch) if 0 <= source < len(stages) and name != WEIGHTS else None
                if needed is not None and needed not in end:
                    break
                start = max(free[rank], end[needed] if needed is not None else 0)
                free[rank] = end[stage, name, microbatch] = start + takes[name]
                rows.append((rank, stage, name, microbatch, start, free[rank]))
                done += 1
            del todo[:done]
        if len(rows) == before:  # the orders contradict each other
            return None
    return pl.DataFrame(rows, schema=measured.schema, orient="row").sort("stage", "start_ns")


def chart(rows: pl.DataFrame, longest_ns: int) -> Figure:
    """One row per stage, one bar per microbatch, its number in it."""
    traces: list[dict[str, Any]] = []
    for name, colour in _COLOURS.items():
        mine = rows.filter(pl.col("name") == name)
        lengths = (mine["end_ns"] - mine["start_ns"]).to_list()
        numbers = [str(n) for n in mine["microbatch"]]
        said = [
            f"stage {stage}, {_NAMES[name]} of microbatch {n}<br>{duration(ns)}, from {duration(start)}"
            for stage, n, ns, start in zip(mine["stage"], numbers, lengths, mine["start_ns"], strict=True)
        ]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _NAMES[name],
                "x": lengths,
                "base": mine["start_ns"].to_list(),
                "y": mine["stage"].to_list(),
                "text": numbers if len(rows) <= _MOST_LABELS else None,
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "insidetextfont": {"color": "#ffffff" if name == FORWARD else "#14181d"},
                "hovertext": said,
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {"color": colour, "line": {"color": "rgba(255,255,255,.7)", "width": 1}},
                "constraintext": "inside",
            }
        )
    stages = rows["stage"].unique().sort().to_list()
    y = axis(text("stage"), autorange="reversed", tickvals=stages, ticktext=[str(stage) for stage in stages])
    return figure(
        traces, x=time_axis(text("since the step's first computation"), longest_ns), y=y, barmode="overlay", bargap=0.25
    )


def typical_step(ops: pl.DataFrame, judged: pl.DataFrame) -> int:
    """Return the judged step, or any, whose length is closest to the median."""
    lengths = ops.group_by("step").agg((pl.col("end_ns").max() - pl.col("start_ns").min()).alias("ns")).sort("step")
    known = lengths.join(judged, on="step", how="semi")
    if len(known):
        lengths = known
    median = statistics.median(lengths["ns"])
    return int(lengths.sort((pl.col("ns") - median).abs(), "step")["step"][0])
