"""The breakdown as one array per part, and the estimates that detectors make from it.

*Own time* is what a rank does by itself in a step: the step without communication that blocks it and without
input, garbage collection, compilation and checkpoints, which have detectors of their own. *Busy time* is all that is
not blocked on communication. In a synchronous job the step lasts as long as its busiest rank, so what a fault costs is
how much the largest busy time shrinks without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.once import once
from rankscope.analysis.model.parts import APART, BLOCKED, MAYBE_BLOCKED, OWN
from rankscope.analysis.model.tables import numbers

__all__ = [
    "ENOUGH_STEPS",
    "TRIM",
    "Estimate",
    "StepGrid",
    "above_peers",
    "by_rank_and_step",
    "deviation_of_alike",
    "error_of_change",
    "estimate",
    "estimate_of_operations",
    "estimate_of_pieces",
    "estimates",
    "estimates_by_step",
    "gain_ns",
    "lasting_half_widths",
    "nearly_all_in",
    "own_by_label",
    "part_errors",
    "robust_deviation",
    "step_grid",
    "sums",
]

ENOUGH_STEPS = 5  # to compare steps with each other
_AGREEING_STEPS = 3
_ONE_STEP = 0.5  # half width over what is lost, where one step was seen
_FEW_STEPS, _NEARLY_ALL = 5, 0.9  # that are named as those of a loss; share of it that they hold
TRIM = 0.1  # hiccups of the machine in up to 10 % of the steps do not move the mean
# Student's t: how many standard errors half a 95 % interval is, for 1, 2, … degrees of freedom.
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepGrid:
    """ns of each part, an array of (rank, step), over the steps that all of `ranks` have.

    `step_ns` is the mean step of all ranks that were seen, also where the grid holds some of them only.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    parts: dict[str, Floats]
    step_ns: float

    def of(self, *parts: str) -> Floats:
        """Time per (rank, step) in `parts` together."""
        total = np.zeros((len(self.ranks), len(self.steps)))
        for part in parts:
            total += self.parts.get(part, 0.0)
        return total

    def only(self, rows: NDArray[np.bool_]) -> StepGrid:
        """Return the same of these rows."""
        ranks = tuple(rank for rank, kept in zip(self.ranks, rows, strict=True) if kept)
        return StepGrid(ranks, self.steps, {part: values[rows] for part, values in self.parts.items()}, self.step_ns)

    def at(self, columns: NDArray[np.bool_]) -> StepGrid:
        """Return the same in these steps."""
        steps = tuple(step for step, kept in zip(self.steps, columns, strict=True) if kept)
        return StepGrid(
            self.ranks, steps, {part: values[:, columns] for part, values in self.parts.items()}, self.step_ns
        )

    @property
    def own(self) -> Floats:
        return self.of(*OWN)

    @property
    def busy(self) -> Floats:
        return self.of(*OWN, *APART)

    @property
    def blocked(self) -> Floats:
        return self.of(*BLOCKED)

    @property
    def maybe_blocked(self) -> Floats:
        return self.of(*MAYBE_BLOCKED)


@once
def step_grid(breakdown: pl.DataFrame) -> StepGrid:
    """Arrange the breakdown by rank and step; a step that a rank lacks is left out."""
    (ranks, rank), (steps, step) = (distinct(breakdown[column].to_numpy()) for column in ("rank", "step"))
    names = breakdown["part"].unique().cast(pl.String).sort().to_list()
    part = numbers(breakdown["part"], dict(zip(names, range(len(names)), strict=True)))
    shape = (len(names), len(ranks), len(steps))
    cell = (part * len(ranks) + rank) * len(steps) + step
    values = np.bincount(cell, breakdown["ns"].to_numpy(), math.prod(shape)).reshape(shape)
    seen = np.zeros(shape[1:], dtype=bool)
    seen[rank, step] = True
    whole: NDArray[np.bool_] = np.logical_and.reduce(seen, axis=0)
    if not whole.all():
        values, steps, part = values[:, :, whole], steps[whole], part[whole[step]]
    values.flags.writeable = False  # the grid is shared
    step_ns = float(values.sum()) / max(len(ranks) * len(steps), 1)
    parts = {names[int(each)]: values[each] for each in np.flatnonzero(np.bincount(part, minlength=len(names)))}
    return StepGrid(tuple(ranks.tolist()), tuple(steps.tolist()), parts, step_ns)


def own_by_label(phases: pl.DataFrame, grid: StepGrid) -> dict[str, Floats]:
    """Own time by label of the phases, arrays of (rank, step) in ns; together they are the grid's own time."""
    own, labels, label = _labelled(phases)
    cell, known = _cells(own, grid.ranks, grid.steps)
    per_label = len(grid.ranks) * len(grid.steps)
    values = _summed(label * per_label + cell, own["ns"], known, len(labels) * per_label)
    return dict(zip(labels.to_list(), values.reshape(len(labels), len(grid.ranks), len(grid.steps)), strict=True))


@once
def _labelled(phases: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series, Ints]:
    """Return the phases of own time (rank, step, ns), their labels in order, and the place of each one's."""
    own = phases.filter(pl.col("part").is_in(OWN))
    labels = own["label"].unique().sort()
    label = own["label"].cast(pl.Enum(labels)).to_physical().to_numpy().astype(np.int64)
    return own.select("rank", "step", ns=pl.col("end_ns") - pl.col("start_ns")), labels, label


def sums(grid: StepGrid, rows: pl.DataFrame, column: str) -> Floats:
    """Sum of the column, an array of (rank, step) over the grid's."""
    return by_rank_and_step(rows, column, grid.ranks, grid.steps)


def by_rank_and_step(rows: pl.DataFrame, column: str, ranks: Sequence[int], steps: Sequence[int]) -> Floats:
    """Return the sums of a column of rows (rank, step, …) as an array of (rank, step).

    Other ranks and steps are left out.
    """
    cell, known = _cells(rows, ranks, steps)
    return _summed(cell, rows[column], known, len(ranks) * len(steps)).reshape(len(ranks), len(steps))


def _cells(rows: pl.DataFrame, ranks: Sequence[int], steps: Sequence[int]) -> tuple[Ints, NDArray[np.bool_] | None]:
    """Return the place of each row (rank, step) in an array of these, and which have one; None: all of them."""
    cell, rank = _known_places(rows["step"], steps), _known_places(rows["rank"], ranks)
    known = None
    if min(cell.min(initial=0), rank.min(initial=0)) < 0:
        known = (cell >= 0) & (rank >= 0)
    rank *= len(steps)
    cell += rank
    return cell, known


def _summed(cell: Ints, values: pl.Series, known: NDArray[np.bool_] | None, size: int) -> Floats:
    """Return the sums of the values by cell."""
    if known is not None:
        cell, values = cell[known], values.filter(pl.Series(known))
    return np.bincount(cell, values.to_numpy(), size).astype(np.float64, copy=False)


def _known_places(values: pl.Series, among: Sequence[int]) -> Ints:
    """Return the position of each value among these sorted ones; -1 if it is none of them, or null."""
    numbers = (values.fill_null(-1) if values.null_count() else values).to_numpy()
    if not among:
        return np.full(len(numbers), -1)
    first, last = among[0], among[-1]
    if last - first + 1 == len(among):  # without a gap
        place = numbers.astype(np.int64)
        place -= first
        if place.min(initial=0) < 0 or place.max(initial=0) >= len(among):
            place[(place < 0) | (place >= len(among))] = -1
        return place
    ordered = np.asarray(among)
    if last - first > len(numbers) + len(ordered):
        at = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
        return np.where(ordered[at] == numbers, at, -1)
    place = np.full(last - first + 3, -1)  # one more at both ends for all beyond them
    place[ordered - first + 1] = np.arange(len(ordered))
    return np.asarray(place[np.clip(numbers, first - 1, last + 1) - (first - 1)])


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % half width, ns; `of_each_ns` is that of what happens in some steps, not of how often."""

    ns: float
    half_width_ns: float
    of_each_ns: float | None = None

    @property
    def clear(self) -> bool:
        """Clear of zero: what happens is. A single spike among quiet steps never is, four of them just are."""
        return self.ns > (self.half_width_ns if self.of_each_ns is None else self.of_each_ns)


def estimate(values: Floats, trim: float = 0.0) -> Estimate:
    """Mean of `values` after setting aside the share `trim` at each end, and its 95 % half width."""
    means, half_widths = estimates(values[np.newaxis], trim)
    return Estimate(float(means[0]), float(half_widths[0]))


def estimates(values: Floats, trim: float = 0.0) -> tuple[Floats, Floats]:
    """Return the same for each row at once: means and half widths.

    Source: Tukey and McLaughlin 1963, the winsorized standard deviation of a trimmed mean.
    """
    count = values.shape[1]
    cut = int(trim * count)
    ordered = np.sort(values, axis=1)
    kept = ordered[:, cut : count - cut]
    if kept.shape[1] < 2:
        return kept.mean(axis=1), np.full(len(values), np.inf)
    winsorized = np.clip(ordered, kept[:, :1], kept[:, -1:])
    errors = winsorized.std(axis=1, ddof=1) / ((1 - 2 * cut / count) * count**0.5)
    return kept.mean(axis=1), half_width(errors, kept.shape[1])


def estimate_of_pieces(values: Floats, pieces_ns: Floats, trim: float = 0.0) -> Estimate:
    """Return the same of what is lost per step in these pieces (gaps, calls): of few steps they are the sample.

    Each might not have happened, so that a single one is never clear of zero; four of one length just are, or three
    steps that agree. Where what is lost is less than they take together, each counts as much less. Of one or two
    steps, and of more whose mean is not clear of zero, the median counts, of two the lower one: the first of a capture
    is often longer, and what happens once is no property of a step.

    Source: the variance of a compound Poisson sum is that of its number times the mean square of its terms.
    """
    of_steps = estimate(values, trim) if len(values) >= _AGREEING_STEPS else Estimate(0.0, np.inf)
    if len(values) >= ENOUGH_STEPS and of_steps.clear:
        return of_steps
    total, usual = float(pieces_ns.sum()), float(_lower_median(values))
    share = float(np.sqrt(np.square(pieces_ns).sum())) / total if total else 0.0
    return Estimate(usual, min(1.96 * share * max(usual, 0.0), of_steps.half_width_ns))


def estimates_by_step(values: Floats, trim: float = 0.0) -> list[Estimate]:
    """Estimate what each row loses per step: a step shows its own loss for certain, that of others at best by half.

    Of few steps the median counts, of two the lower one: what happens once is no property of a step.
    """
    steps = values.shape[1]
    if steps >= ENOUGH_STEPS:
        return [Estimate(*one) for one in zip(*(of.tolist() for of in estimates(values, trim)), strict=True)]
    usual = np.maximum(_lower_median(values), 0.0)
    return [Estimate(ns, _ONE_STEP * ns / steps**0.5) for ns in usual.tolist()]


def _lower_median(values: Floats) -> Floats:
    return np.asarray(np.sort(values)[..., (values.shape[-1] - 1) // 2])


def estimate_of_operations(values: Floats, steps: int) -> Estimate:
    """Return the sum of what operations cost, per step, where the operations are the samples and not the few steps.

    Of a single one it is clear of nothing.
    """
    total = float(values.sum())
    scatter = 1.96 * float(values.std(ddof=1)) * len(values) ** 0.5 if len(values) > 1 else abs(total)
    return Estimate(total / steps, scatter / steps)


def nearly_all_in(of_step: Floats) -> list[int]:
    """Return the places of the steps that hold nearly all of a loss; none where these are not few."""
    most = np.sort(np.argsort(-of_step, kind="stable")[: min(len(of_step) // 3, _FEW_STEPS)])
    held = most[of_step[most] >= (1 - _NEARLY_ALL) * of_step.max(initial=0.0)]
    places: list[int] = held.tolist() if of_step[held].sum() >= _NEARLY_ALL * of_step.sum() else []
    return places


def lasting_half_widths(values: Floats, trim: float = 0.0) -> Floats:
    """Half the 95 % interval around each row's mean where what happens to a step happens to the next ones too.

    From the means of about as many stretches as each has steps; infinite where there are fewer than two.

    Source: batch means, Schmeiser 1982.
    """
    count = values.shape[1]
    stretches = int(count**0.5)
    if stretches < 2:
        return np.full(len(values), np.inf)
    low, high = np.quantile(values, (trim, 1 - trim), axis=1, keepdims=True)
    bounds = np.linspace(0, count, stretches + 1).astype(int)[:-1]
    lengths = np.diff(bounds, append=count)
    means = np.add.reduceat(np.clip(values, low, high), bounds, axis=1) / lengths
    return half_width(means.std(axis=1, ddof=1) / stretches**0.5, stretches)


def part_errors(breakdown: pl.DataFrame) -> dict[str, float]:
    """By part the 95 % half width of its mean, of the breakdown of these ranks and steps; empty with too few steps."""
    grid = step_grid(breakdown)
    if len(grid.steps) < 2:
        return {}
    return {part: estimate(values.mean(axis=0)).half_width_ns for part, values in grid.parts.items()}


def error_of_change(a: float | None, b: float | None) -> int | None:
    """95 % half width of a difference, from those of both sides."""
    return None if a is None or b is None else round((a * a + b * b) ** 0.5)


def half_width(standard_error: Floats, count: int) -> Floats:
    """Half the 95 % interval around a mean of `count` values."""
    freedom = count - 1
    return standard_error * (_T_95[freedom - 1] if freedom <= len(_T_95) else 1.96 + 2.4 / freedom)


def over_occurrences(values: Floats, when: NDArray[np.bool_]) -> Estimate:
    """Mean of `values` over all steps, 0 where not `when`; it is clear of zero where what happened is, however often.

    Its half width is that of what happened, or of how often, by how irregular the distances are: what happens in every
    tenth step does so as often in other ones. Of what happened once it is the mean itself, one more or one less, so
    that it is not clear of zero.

    Source: the variance of the number of renewals, Cox 1962.
    """
    at, steps = np.flatnonzero(when), len(when)
    if len(at) < 2:
        once = float(values[when].sum()) / steps
        return Estimate(once, once)
    of_each_ns = estimate(values[when]).half_width_ns * len(at) / steps
    distances = np.diff(at, append=at[0] + steps)
    irregular = min(float(distances.std() / distances.mean()), 1.0)
    over_all = estimate(np.where(when, values, 0.0))
    return Estimate(over_all.ns, max(of_each_ns, irregular * over_all.half_width_ns), of_each_ns)


def above_peers(values: Floats, role: Ints | None = None) -> Floats:
    """Each (rank, step) minus the median of the other ranks of its `role` in that step; 0 where there are none."""
    if role is None:
        return _above_others(values)
    above = np.zeros_like(values)
    for each in np.unique(role):
        above[role == each] = _above_others(values[role == each])
    return above


def _above_others(values: Floats) -> Floats:
    if len(values) < 2:
        return np.zeros_like(values)
    # The median of the others without a loop over ranks: leaving one out shifts what follows it in the sorted column.
    left, right = (len(values) - 2) // 2, (len(values) - 1) // 2
    ordered = np.partition(values, sorted({left, right, left + 1, right + 1}), axis=0)
    low, high = (np.where(values <= ordered[at], ordered[at + 1], ordered[at]) for at in (left, right))
    return np.asarray(values - (low + high) / 2)


def robust_deviation(values: Floats) -> float:
    """Of normal scatter its standard deviation; a few that are far out do not matter."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def deviation_of_alike(values: Floats) -> float:
    """Return the robust deviation, or twice that of the half of the values that are closest together if it is less.

    Of values of two kinds, half of them each, the first is how far the kinds are apart, the second twice the scatter
    within one. Of normal scatter it is the first.

    Source: the shortest half, Rousseeuw and Leroy 1988.
    """
    ordered, half = np.sort(values), len(values) // 2
    shortest = float((ordered[half - 1 :] - ordered[: len(ordered) - half + 1]).min())
    return min(robust_deviation(values), shortest / 0.6745)


def gain_ns(busy: Floats, without: Floats) -> float:
    """Return ns per step that the busiest rank becomes shorter when `busy` becomes `without`, (rank, step) each."""
    return float(np.mean(busy.max(axis=0) - without.max(axis=0)))
