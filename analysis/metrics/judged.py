"""Rows of the steps that are judged."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.metrics.once import once

__all__ = ["in_judged_steps"]


@once
def in_judged_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (rank, step, …) that lie in judged steps; `steps` is that of the timeline."""
    wanted = steps.filter("judged").select("rank", "step")
    by_step, ranks = wanted.group_by("step").agg(pl.col("rank").n_unique()), steps["rank"].n_unique()
    if (by_step["rank"] == ranks).all():  # mostly the same steps of all ranks, which is faster to ask
        judged = rows.filter(pl.col("step").is_in(by_step["step"].implode()))
    else:
        judged = rows.join(wanted, on=["rank", "step"], how="semi")
    return judged if len(judged) < len(rows) else rows.clone()  # which shares its memory: one copy will do
