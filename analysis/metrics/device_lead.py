"""How far hosts run ahead of their devices, by CUDA events."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.step_matrix import StepGrid, step_grid, sums
from rankscope.analysis.model.finding import Lead
from rankscope.analysis.model.parts import APART

__all__ = ["idle_at_most_ns", "lead_of", "paced_by_host"]

_EMPTY_NS = 50_000  # a device comes to a mark so soon only where it had nothing else to do: launching takes some 10 µs


def idle_at_most_ns(grid: StepGrid, marks: pl.DataFrame) -> float:
    """Return the most that any device idles for want of work, ns per step: mean over the steps.

    Without what it idles while the host's main thread is stopped; with the clock's error at each mark.
    """
    late = (pl.col("recorded_ns") + pl.col("clock_error_ns").fill_null(0) - pl.col("begin_ns")).clip(lower_bound=0)
    rows = marks.with_columns(_ns=pl.min_horizontal(late, pl.col("device_ns") - pl.col("begin_ns")))
    idle = np.maximum(sums(grid, rows, "_ns") - grid.of(*APART), 0)
    return float(idle.max(axis=0).mean())


def paced_by_host(marks: pl.DataFrame) -> float:
    """Share of the time, over ranks and steps, in which the host had no lead.

    In phases at whose end the device has nothing left to do but communicate, that is the time from its coming to the
    mark before until the host has enqueued this one. The host is slow then, or has waited for its device.
    """
    at_once = pl.max_horizontal(pl.lit(_EMPTY_NS), pl.col("clock_error_ns").fill_null(0))
    ends_dry = pl.col("ahead_ns") <= at_once + pl.col("communication_ns").fill_null(0)
    paced, length = pl.col("idle_ns").filter(ends_dry).sum(), (pl.col("device_ns") - pl.col("begin_ns")).sum()
    return float(marks.select(paced / length).item() or 0.0)


def lead_of(breakdown: pl.DataFrame, marks: pl.DataFrame) -> Lead | None:
    """Return how far hosts are ahead in the judged steps; None where there are no marks."""
    if marks.is_empty() or breakdown.is_empty():
        return None
    grid = step_grid(breakdown)
    return Lead(
        ahead_ns=round(float(np.median(marks["ahead_ns"].to_numpy()))),
        paced_fraction=paced_by_host(marks),
        idle_fraction=idle_at_most_ns(grid, marks) / grid.step_ns,
    )
