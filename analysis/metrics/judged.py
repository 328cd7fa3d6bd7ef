"""Rows of the steps that are judged."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.once import once

__all__ = ["in_judged_steps"]

_NONE = -1  # of a time outside of all steps


@once
def in_judged_steps(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (rank, step, …) that lie in judged steps; `steps` is that of the timeline."""
    judged = steps.filter("judged")
    if judged.is_empty() or rows.is_empty():
        return rows.clear()
    ranks, numbers = judged["rank"].to_numpy(), judged["step"].to_numpy()
    first, last = int(numbers.min()), int(numbers.max())
    known = np.zeros((int(ranks.max()) + 2, last - first + 2), np.bool_)  # the last row and column are of no step
    known[ranks, numbers - first] = True
    rank = np.minimum(rows["rank"].to_numpy(), len(known) - 1)
    step = rows["step"].fill_null(first + _NONE).to_numpy() - first
    inside = known[rank, np.where((step >= 0) & (step <= last - first), step, _NONE)]
    return rows.clone() if inside.all() else rows.filter(inside)  # a clone shares its memory
