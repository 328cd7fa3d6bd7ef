"""The longest rank changes from step to step: the work itself is uneven.

**Signal.** The longest own time in a step is, on average, more than `min_fraction` of the step above the mean over
ranks, no single rank is to blame for most of that (`persistence`), and forward and backward grow and shrink together
on a rank (rank correlation `min_correlation` after each rank's and each step's median is taken away). Work that follows
the data lengthens both; a preempted process lengthens whatever it was doing.

**Why it costs time.** Every step lasts as long as its longest rank. With random lengths the loss grows with the
number of ranks, and no machine is to blame.

**False alarms.** Where forward and backward are not told apart, this is not checked. Other load on the host that
lasts through forward and backward of single steps can look the same.

**What to try.** Give every rank batches of equal cost: bucket by length, pack sequences to a token budget, balance
the sum of squared lengths where attention dominates, sort within a window and deal out to the ranks.

**Source.** Forward-backward correlation of 0.9 and more as the mark of uneven sequences: ByteDance's analysis of
stragglers, there Pearson's, which a few preempted steps break. The thresholds of 10 % and 0.8 are ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import NotResolvable, peers_grid, price
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.own import Estimate, Floats, StepGrid, estimate, own_by_label

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives", "backward")


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    *,
    min_fraction: float = 0.10,
    persistence: float = 0.6,
    min_correlation: float = 0.8,
) -> list[Finding]:
    """Report work that is spread unevenly over the ranks in a way that changes from step to step."""
    grid, lost = _imbalance(breakdown)
    labels = own_by_label(phases, grid)
    if "forward" not in labels or "backward" not in labels:
        raise NotResolvable("forward and backward are not told apart, so uneven data cannot be told from noise")
    beyond = grid.own.max(axis=0) - grid.own.mean(axis=0)
    by_rank = np.bincount(grid.own.argmax(axis=0), weights=beyond)
    correlation = _correlation(labels["forward"], labels["backward"])
    if lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    if by_rank.max() >= persistence * beyond.sum() or correlation < min_correlation:
        return []
    return [
        Finding(
            detector="uneven_work",
            title=f"The work is uneven: in each step the longest rank, not always the same, computes "
            f"{duration(lost.ns)} longer than the mean",
            where="forward and backward",
            advice="Give every rank batches of equal cost: bucket by length, or pack sequences to a token budget.",
            ranks=grid.ranks,
            evidence=_widest_step(grid, steps),
            fix="balance",
            **price(grid, lost),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.10) -> int:
    """The smallest imbalance that would have been reported."""
    grid, lost = _imbalance(breakdown)
    return round(max(min_fraction * grid.step_ns, lost.half_width_ns))


def _imbalance(breakdown: pl.DataFrame) -> tuple[StepGrid, Estimate]:
    grid = peers_grid(breakdown)
    return grid, estimate(grid.own.max(axis=0) - grid.own.mean(axis=0))


def _correlation(forward: Floats, backward: Floats) -> float:
    """Rank correlation over (rank, step) of what is neither the rank's nor the step's median; 0 where nothing varies.

    Ranks and medians, since a few preempted steps would otherwise decide.
    """
    x, y = (_order(v - np.median(v, axis=0) - np.median(v, axis=1, keepdims=True)) for v in (forward, backward))
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def _order(values: Floats) -> Floats:
    """Each value's place in the order of all, equal ones at their mean place, centred on 0."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_place = np.cumsum(count) - (count + 1) / 2
    return np.asarray(mean_place[place.ravel()] - (values.size - 1) / 2)


def _widest_step(grid: StepGrid, steps: pl.DataFrame) -> tuple[Evidence, ...]:
    """The step with the largest imbalance, on its longest rank."""
    column = int((grid.own.max(axis=0) - grid.own.mean(axis=0)).argmax())
    rank, step = grid.ranks[int(grid.own[:, column].argmax())], grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=f"step {step}: this rank is the longest")
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
