"""What keeps the host from its work, over the steps and by rank."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.report.palette import LIGHT
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.report.texts import part_label
from rankscope.dashboard.figures.plots import Figure, axis, figure, time_axis

__all__ = ["PARTS", "by_name", "by_rank", "over_steps"]

PARTS = ("input", "gc", "compile", "checkpoint", "host", "other")
_BARS = 240


def over_steps(breakdown: pl.DataFrame) -> Figure:
    """Mean over the ranks of each of the host's parts, a stacked bar per step, or per some neighbouring steps."""
    steps = breakdown["step"].unique().sort()
    every = -(-len(steps) // _BARS)
    per_bar = (
        breakdown.filter(pl.col("part").is_in(PARTS))
        .with_columns((pl.col("step").rank("dense") - 1).cast(pl.Int64) // every)
        .group_by("step", "part")
        .agg(pl.col("ns").mean())
        .sort("step")
    )
    first_of = steps.gather_every(every)
    traces = []
    for part in PARTS:
        rows = per_bar.filter((pl.col("part") == part) & (pl.col("part").is_in(_taken(per_bar))))
        if len(rows):
            traces.append(
                {
                    "type": "bar",
                    "name": part_label(part),
                    "x": first_of.gather(rows["step"]).to_list(),
                    "y": rows["ns"].to_list(),
                    "marker": {"color": LIGHT[part], "line": {"width": 0}},
                    "text": [duration(ns) for ns in rows["ns"]],
                    "textposition": "none",
                    "hovertemplate": f"step %{{x}}: {part_label(part)} %{{text}}<extra></extra>",
                }
            )
    highest = per_bar.group_by("step").agg(pl.col("ns").sum())["ns"].quantile(0.99) or 1.0
    bins = f"step (each bar is the mean of {every})" if every > 1 else "step"
    return figure(
        traces, x=axis(bins), y=time_axis("mean per rank", highest), barmode="stack", bargap=0.15, showlegend=True
    )


def _taken(per_bar: pl.DataFrame) -> list[str]:
    """Parts that take any time."""
    return per_bar.group_by("part").agg(pl.col("ns").sum()).filter(pl.col("ns") > 0)["part"].to_list()


def by_rank(breakdown: pl.DataFrame) -> pl.DataFrame:
    """One row per rank: mean ns per step of each of the host's parts."""
    means = breakdown.filter(pl.col("part").is_in(PARTS)).group_by("rank", "part").agg(pl.col("ns").mean())
    wide = means.pivot("part", index="rank", values="ns").sort("rank")
    return wide.select("rank", *(pl.col(part) if part in wide.columns else pl.lit(0.0).alias(part) for part in PARTS))


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
