"""A pipeline's step as its stages went through it, and as the schedule would have it."""

from __future__ import annotations

import statistics
from typing import Any

import polars as pl

from rankscope.analysis.language import text
from rankscope.analysis.report.palette import LIGHT
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.pipeline import BACKWARD, FORWARD
from rankscope.dashboard.figures.plots import Figure, axis, figure, time_axis

__all__ = ["chart", "computations", "ideal"]

_COLOURS = {FORWARD: LIGHT["compute"], BACKWARD: LIGHT["transfer"]}
_NAMES = {FORWARD: "forward", BACKWARD: "backward"}
_MOST_LABELS = 400  # microbatches that are numbered


def computations(ops: pl.DataFrame, step: int, replica: int) -> pl.DataFrame:
    """stage, name, microbatch, start_ns and end_ns since the step's first computation; in order of start by stage."""
    rows = ops.filter(
        pl.col("step") == step, pl.col("replica") == replica, pl.col("name").is_in(list(_NAMES))
    ).with_columns(pl.coalesce("microbatch", "seq").alias("microbatch"))
    first = pl.col("start_ns").min()
    return rows.select("stage", "name", "microbatch", pl.col("start_ns") - first, pl.col("end_ns") - first).sort(
        "stage", "start_ns"
    )


def ideal(measured: pl.DataFrame) -> pl.DataFrame | None:
    """The same computations in each stage's own order, if all stages were equally fast and nothing else took time.

    A forward needs that of the stage before, a backward that of the stage behind; each takes the median of its kind.
    None where that cannot be: a stage has several model chunks, or lacks a microbatch.
    """
    stages = measured["stage"].unique().sort().to_list()
    order = {s: list(measured.filter(pl.col("stage") == s).select("name", "microbatch").iter_rows()) for s in stages}
    if any(len(set(mine)) != len(mine) or set(mine) != set(order[stages[0]]) for mine in order.values()):
        return None
    length = measured.group_by("name").agg((pl.col("end_ns") - pl.col("start_ns")).median())
    takes = {name: int(ns) for name, ns in length.iter_rows()}
    end: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(stages, 0)
    rows: list[tuple[int, str, int, int, int]] = []
    waiting = {stage: iter(mine) for stage, mine in order.items()}
    following = {stage: next(waiting[stage], None) for stage in stages}
    while any(following.values()):
        before = len(rows)
        for position, stage in enumerate(stages):
            while (todo := following[stage]) is not None:
                name, microbatch = todo
                source = position - 1 if name == FORWARD else position + 1
                needed = (stages[source], name, microbatch) if 0 <= source < len(stages) else None
                if needed is not None and needed not in end:
                    break
                start = max(free[stage], end[needed] if needed is not None else 0)
                free[stage] = end[stage, name, microbatch] = start + takes[name]
                rows.append((stage, name, microbatch, start, free[stage]))
                following[stage] = next(waiting[stage], None)
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
    """The judged step, or any, whose length is closest to the median."""
    lengths = ops.group_by("step").agg((pl.col("end_ns").max() - pl.col("start_ns").min()).alias("ns")).sort("step")
    known = lengths.join(judged, on="step", how="semi")
    if len(known):
        lengths = known
    median = statistics.median(lengths["ns"])
    return int(lengths.sort((pl.col("ns") - median).abs(), "step")["step"][0])
