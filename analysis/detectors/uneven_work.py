"""The longest rank changes from step to step: the work itself is uneven.

**Signal.** Forward and backward grow and shrink together on a rank: rank correlation of at least `min_correlation`
after each rank's and each step's median (in a pipeline that of its stage) is taken away. Work that follows the data
lengthens both; a preempted process lengthens whatever it was doing. What the two have in common is taken to be the
data, and the loss is by how much it makes the longest rank of a step longer: more than `min_fraction` of the step, and
no single rank is to blame for most of it (`persistence`).

That is `max(own) - max(own - x)` per step. `x` is by how much a rank is above the mean of the step (and stage), less
what noise makes of it: without uneven data the ranks would still differ, and by how much is told from how far forward
and backward disagree. Where they do by 3 standard deviations, the smaller of what the two say is the data's. What a
rank clearly takes longer in all steps is not the data's.

**Why it costs time.** Every step lasts as long as its longest rank. With random lengths the loss grows with the
number of ranks, and no machine is to blame.

**False alarms.** Where forward and backward are not told apart, this is not checked. Other load on the host that
lasts through forward and backward of single steps can look the same.

**What to try.** Give every rank batches of equal cost: bucket by length, pack sequences to a token budget, balance
the sum of squared lengths where attention dominates, sort within a window and deal out to the ranks.

**Source.** Forward-backward correlation as the mark of uneven sequences: ByteDance's analysis of stragglers, there
Pearson's of 0.9 and more, which a few preempted steps break. Two halves of one measurement tell its noise as in test
theory's split-half reliability. Thresholds are measured on healthy jobs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from rankscope.analysis.detectors import NotResolvable, peers_grid, price, visible
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.language import text
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.own import Floats, Ints, StepGrid, estimate, estimates, own_by_label
from rankscope.analysis.timeline.roles import roles_of

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives", "backward")

_DISAGREE = 3.0  # standard deviations between what forward and backward say: one of them was preempted
_CLEARLY = 2.5  # half widths of a 95 % interval: a rank that is so clearly longer in all steps is slow, not unlucky
_TRIM = 0.1


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.6,
    min_correlation: float = 0.6,
) -> list[Finding]:
    """Report work that is spread unevenly over the ranks in a way that changes from step to step."""
    grid, correlation, longer = _imbalance(breakdown, phases, collectives, regions, groups)
    lost = estimate(longer)
    by_rank = np.bincount(grid.own.argmax(axis=0), weights=longer)
    if correlation < min_correlation or lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    if by_rank.max() >= persistence * longer.sum():
        return []
    return [
        Finding(
            detector="uneven_work",
            title=text(
                "The work is uneven: the longest rank of a step, not always the same one, computes "
                "{lost} longer than with even work",
                lost=duration(lost.ns),
            ),
            where=text("forward and backward"),
            advice=text(
                "Give every rank batches of equal cost: bucket by length, or pack sequences to a token budget."
            ),
            ranks=grid.ranks,
            evidence=_widest_step(grid, steps),
            fix="balance",
            **price(grid, lost),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_correlation: float = 0.6,
) -> int:
    """The smallest imbalance that would have been reported: what is smaller may hide in the noise."""
    grid, forward, backward, role = _labelled(breakdown, phases, collectives, regions, groups)
    said, noise = _halves(forward, backward, role)
    # With as much noise in what each of the two says, uneven data of this scatter have the correlation.
    data = _scatter(said[0] - said[1]) * (min_correlation / (1 - min_correlation) / 2) ** 0.5
    deviation = _beyond(grid.own, role)
    longest = deviation.max(axis=0).mean() / max(_scatter(deviation), 1.0)
    return visible(grid, max(min_fraction * grid.step_ns, float(longest * (np.hypot(noise, data) - noise))))


def _imbalance(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> tuple[StepGrid, float, Floats]:
    """The grid, how forward and backward go together, and how much longer uneven data make each step, ns."""
    grid, forward, backward, role = _labelled(breakdown, phases, collectives, regions, groups)
    longer = grid.own.max(axis=0) - _even(grid.own, forward, backward, role).max(axis=0)
    return grid, _correlation(forward, backward, role), longer


def _labelled(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> tuple[StepGrid, Floats, Floats, Ints]:
    """The grid, forward and backward by (rank, step), and the role of each rank."""
    grid = peers_grid(breakdown)
    labels = own_by_label(phases, grid)
    if "forward" not in labels or "backward" not in labels:
        raise NotResolvable(text("forward and backward are not told apart, so uneven data cannot be told from noise"))
    role = roles_of(grid.ranks, groups, regions, collectives)
    if len(np.unique(role)) == len(role):
        raise NotResolvable(
            text("each pipeline stage has one rank only, so no rank has a peer that does the same work")
        )
    return grid, labels["forward"], labels["backward"], role


def _halves(forward: Floats, backward: Floats, role: Ints) -> tuple[list[Floats], float]:
    """What either says of how far the data are from the mean, ns of both together; and the noise of both together.

    Noise that grows with the square root of time makes the two differ by so much more than it makes their sum scatter.
    """
    both = forward.mean() + backward.mean()
    said = [_beyond(label, role) * both / label.mean() for label in (forward, backward)]
    return said, float(_scatter(said[0] - said[1]) * (forward.mean() * backward.mean()) ** 0.5 / both)


def _even(own: Floats, forward: Floats, backward: Floats, role: Ints) -> Floats:
    """Own time as it would be with even data, (rank, step) in ns: what ranks of a role do together stays the same."""
    said, noise = _halves(forward, backward, role)
    difference, deviation = said[0] - said[1], _beyond(own, role)
    without = min(noise / max(_scatter(deviation), 1.0), 1.0)
    smaller = np.where(np.abs(said[0]) < np.abs(said[1]), *said)
    data = np.where(np.abs(difference) > _DISAGREE * _scatter(difference), smaller, deviation)
    always, half_widths = estimates(deviation, _TRIM)
    data = data - np.where(np.abs(always) > _CLEARLY * half_widths, always, 0.0)[:, np.newaxis]
    return np.asarray(own - (1 - without) * _beyond(data, role))


def _beyond(values: Floats, role: Ints, usual: Callable[..., Floats] = np.mean) -> Floats:
    """Each (rank, step) minus what is usual in the step among the ranks of its role."""
    beyond = np.empty_like(values)
    for each in np.unique(role):
        beyond[role == each] = values[role == each] - usual(values[role == each], axis=0)
    return beyond


def _scatter(values: Floats) -> float:
    """Robust standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _correlation(forward: Floats, backward: Floats, role: Ints) -> float:
    """Rank correlation over (rank, step) of what is neither the rank's nor the step's median; 0 where nothing varies.

    Ranks and medians, since a few preempted steps would otherwise decide; logarithms, since all sequences of a step may
    be long, and then a rank that is always slow is slow by more.
    """
    logs = (_beyond(np.log(np.maximum(label, 1.0)), role, np.median) for label in (forward, backward))
    x, y = (_order(beyond - np.median(beyond, axis=1, keepdims=True)) for beyond in logs)
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
        Evidence(
            table="steps",
            rank=rank,
            start_ns=start,
            end_ns=end,
            note=text("step {step}: this rank is the longest", step=step),
        )
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
