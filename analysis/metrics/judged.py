"""Rows of the steps that are judged."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.metrics.once import once

__all__ = ["in_judged_steps"]


@once
def in_judged_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (rank, step, …) that lie in judged steps; `steps` is that of the timeline."""
    judged = rows.join(steps.filter("judged").select("rank", "step"), on=["rank", "step"], how="semi")
    return judged if len(judged) < len(rows) else rows.clone()  # which shares its memory: one copy will do
