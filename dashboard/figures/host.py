"""Host stalls, over the steps and by rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.analysis.report.labels import part_label
from rankscope.analysis.report.palette import LIGHT
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.dashboard.figures.plots import Figure, axis, colour, figure, time_axis

__all__ = [
    "PARTS",
    "ahead_over_steps",
    "by_name",
    "by_rank",
    "over_steps",
    "phases_by_rank",
    "phases_over_steps",
]

PARTS = ("input", "gc", "compile", "checkpoint", "host", "other")
_BARS = 240
_COLOURS = {"forward": "compute", "backward": "backward", "optimizer": "optimizer"}  # of the palette; else other


def over_steps(breakdown: pl.DataFrame) -> Figure:
    """Mean over the ranks of each of the host's parts, a stacked bar per step, or per some neighbouring steps."""
    rows = breakdown.filter(pl.col("part").is_in(PARTS)).select("step", pl.col("part").alias("name"), "ns")
    return _stacked(rows, {part: (part_label(part), LIGHT[part]) for part in PARTS})


def phases_over_steps(marks: pl.DataFrame) -> Figure:
    """Return the same of the phases of the ranks' devices."""
    length = (pl.col("device_ns") - pl.col("begin_ns")).sum().alias("ns")
    rows = marks.group_by("rank", "step", pl.col("phase").alias("name"), maintain_order=True).agg(length)
    names = marks["phase"].unique(maintain_order=True)
    return _stacked(rows, {name: (name, LIGHT[_COLOURS.get(name, "other")]) for name in names})


def _stacked(rows: pl.DataFrame, shown: Mapping[str, tuple[str, str]]) -> Figure:
    """`rows`: step, name, ns; of each name that takes any time the mean, with its label and colour."""
    per_bar, first_of, every = _in_bars(rows)
    traces = []
    for name, (label, filled) in shown.items():
        bars = per_bar.filter(pl.col("name") == name)
        if bars["ns"].sum() > 0:
            traces.append(
                {
                    "type": "bar",
                    "name": label,
                    "x": first_of.gather(bars["step"]).to_list(),
                    "y": bars["ns"].to_list(),
                    "marker": {"color": filled, "line": {"width": 0}},
                    "text": [duration(ns) for ns in bars["ns"]],
                    "textposition": "none",
                    "hovertemplate": f"step %{{x}}: {label} %{{text}}<extra></extra>",
                }
            )
    highest = per_bar.group_by("step").agg(pl.col("ns").sum())["ns"].quantile(0.99) or 1.0
    y = time_axis(text("mean per rank"), highest)
    return figure(traces, x=_steps_axis(every), y=y, barmode="stack", bargap=0.15, showlegend=True)


def ahead_over_steps(marks: pl.DataFrame) -> Figure:
    """Return how far the hosts are ahead where a phase ends, a line per phase: mean over the ranks."""
    rows = marks.select("step", pl.col("phase").alias("name"), pl.col("ahead_ns").alias("ns"))
    per_point, first_of, every = _in_bars(rows)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": text("end of {name}", name=name),
            "x": first_of.gather(points["step"]).to_list(),
            "y": points["ns"].to_list(),
            "line": {"color": colour(number)},
            "text": [duration(ns) for ns in points["ns"]],
            "hovertemplate": f"step %{{x}}, end of {name}: %{{text}}<extra></extra>",
        }
        for number, name in enumerate(marks["phase"].unique(maintain_order=True))
        if len(points := per_point.filter(pl.col("name") == name))
    ]
    highest = max(per_point["ns"].to_list(), default=1.0)
    return figure(traces, x=_steps_axis(every), y=time_axis(text("host run-ahead"), highest), showlegend=True)


def _in_bars(rows: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series, int]:
    """Mean ns by bar and name (step is the bar), the first step of each bar, and how many steps it holds."""
    steps = rows["step"].unique().sort()
    every = max(-(-len(steps) // _BARS), 1)
    bar = (pl.col("step").rank("dense") - 1).cast(pl.Int64) // every
    per_bar = rows.with_columns(bar).group_by("step", "name").agg(pl.col("ns").mean()).sort("step")
    return per_bar, steps.gather_every(every), every


def _steps_axis(every: int) -> dict[str, Any]:
    return axis(text("step (each point is the mean of {every})", every=every) if every > 1 else text("step"))


def by_rank(breakdown: pl.DataFrame) -> pl.DataFrame:
    """One row per rank: mean ns per step of each of the host's parts."""
    means = breakdown.filter(pl.col("part").is_in(PARTS)).group_by("rank", "part").agg(pl.col("ns").mean())
    wide = means.pivot("part", index="rank", values="ns").sort("rank")
    return wide.select("rank", *(pl.col(part) if part in wide.columns else pl.lit(0.0).alias(part) for part in PARTS))


def phases_by_rank(marks: pl.DataFrame) -> pl.DataFrame:
    """One row per rank and phase: mean ns per step, and how far the host is ahead at its end: least, median."""
    length = (pl.col("device_ns") - pl.col("begin_ns")).sum()
    return (
        marks.with_columns(pl.col("step").n_unique().over("rank").alias("_steps"))
        .group_by("rank", "phase", maintain_order=True)
        .agg(
            (length / pl.col("_steps").first()).alias("ns"),
            pl.col("ahead_ns").min().alias("least_ns"),
            pl.col("ahead_ns").median().alias("median_ns"),
        )
    )


def by_name(regions: pl.DataFrame) -> pl.DataFrame:
    """One row per kind and name of region: how often, how long, on how many ranks, and where it takes longest."""
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    per_rank = regions.group_by("kind", "name", "rank").agg(
        pl.len().alias("count"), length.sum(), length.max().alias("longest_ns")
    )
    return (
        per_rank.sort("ns", "rank")
        .group_by("kind", "name", maintain_order=True)
        .agg(
            pl.col("count", "ns").sum(),
            pl.col("longest_ns").max(),
            pl.len().alias("ranks"),
            pl.col("rank").last().alias("most_rank"),
        )
        .sort("ns", descending=True)
    )
