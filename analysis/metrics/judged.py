"""Rows of the steps that are judged."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.metrics.once import once
from rankscope.analysis.model.lookup import row_of

__all__ = ["in_judged_steps"]


@once
def in_judged_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (rank, step, …) that lie in judged steps; `steps` is that of the timeline."""
    inside = row_of(rows, steps.filter("judged"), ["rank", "step"]) >= 0
    return rows.clone() if inside.all() else rows.filter(inside)  # a clone shares its memory
