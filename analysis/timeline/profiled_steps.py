"""Exclude steps in which a deep window's profiler was on: it makes them longer."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted

__all__ = ["PROFILED", "profiled_gaps", "set_profiled_aside"]

PROFILED = "profiled"


def set_profiled_aside(steps: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Return the steps, those not judged that a window touched on any rank, from its preparation until it had stopped.

    `steps` is as `steps.judge` has it, `windows` the table, on one clock.
    """
    spans = windows.select("rank", pl.col("start_ns").alias("_begin"), pl.col("end_ns").alias("_stop"))
    touched = (
        steps.select("rank", "step", "start_ns", "end_ns")
        .join(spans, on="rank")
        .filter(pl.col("start_ns") < pl.col("_stop"), pl.col("end_ns") > pl.col("_begin"))
    )
    aside = pl.col("judged") & pl.col("step").is_in(touched["step"].unique().implode())
    return steps.with_columns(
        judged=pl.col("judged") & ~aside,
        aside=pl.when(aside).then(pl.lit(PROFILED)).otherwise("aside"),
    )


def profiled_gaps(steps: pl.DataFrame) -> list[Gap]:
    """Return how many steps that is."""
    count = steps.filter(pl.col("aside") == PROFILED)["step"].n_unique()
    why = text(
        "{count} not analyzed, since the profiler of a profiled window ran in them", count=counted(count, "step")
    )
    return [Gap(table="steps", rank=None, node=None, count=count, why=why)] if count else []
