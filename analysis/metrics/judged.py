"""Rows of the steps that are judged."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.once import once

__all__ = ["in_judged_steps"]


@once
def in_judged_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (rank, step, …) that lie in judged steps; `steps` is that of the timeline."""
    judged = steps.filter("judged")
    if judged.is_empty() or rows.is_empty():
        return rows.clear()
    ranks, numbers = judged["rank"].to_numpy(), judged["step"].to_numpy()
    first, last = int(numbers.min()), int(numbers.max())
    # The first and last column, and the last row, are of no step.
    known = np.zeros((int(ranks.max()) + 2, last - first + 3), np.bool_)
    known[ranks, numbers - first + 1] = True
    rank = rows["rank"].to_numpy().clip(max=len(known) - 1)
    step = (rows["step"] - first + 1).fill_null(0).to_numpy().clip(0, last - first + 2)
    inside = known[rank, step]
    return rows.clone() if inside.all() else rows.filter(inside)  # a clone shares its memory
