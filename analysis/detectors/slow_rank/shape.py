"""The shape of an excess over the peers: all the time, in bursts, or for a while; and the slow ranks by it."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Estimate,
    Floats,
    StepGrid,
    deviation_of_alike,
    estimates,
    lasting_half_widths,
    robust_deviation,
)
from rankscope.analysis.metrics.trend import follows_line, longest_stretch, rank_sum_z

__all__ = ["Shown", "Slow", "Steps", "Thresholds", "least_apart", "persistent", "shapes"]

_MANY = 16  # with more ranks, leaving the judged one out does not change how much they differ
_STRETCHES = 16  # steps from which there are four stretches of them or more
_MIN_BURSTS = 2  # one may be chance; two alike are not
_BURST_Z, _BURST_SHARE = 5, 0.8  # so far out of the noise, and so much of what all bursts of the run cost
_DENSEST, _DENSEST_SIGMAS = 0.4, 2 * 0.5244  # share of the steps, and how wide that is where scatter is normal
_CLEAR_Z = 3.0  # standard deviations of what lasts
_WHILE = 1.05  # what a step is longer than usual, from which it counts to a stretch of slow ones
_GROWS = 1.5  # times: the later half of a part against the earlier one
_FEWEST_INSIDE = 10  # steps, and outside: fewer are bursts
_LONG = 50  # the same of two ranks, of which either may be what is usual: load on a host lasts, too

Steps = NDArray[np.bool_]
Shown = tuple[Floats, Steps]  # the excess per step, 0 where it does not show, and the steps where it shows


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of `detect`: a share of the step, a share of the steps, and robust standard deviations."""

    min_fraction: float
    persistence: float
    min_z: float


@dataclass(frozen=True, slots=True)
class Slow:
    """Slow ranks as rows of the grid (several are those of a node): excess (0 where it does not show), cost, where."""

    rows: tuple[int, ...]
    excess: Floats
    when: Steps
    lost: Estimate
    where: str
    nodes: tuple[int, ...] = ()
    last: tuple[int, int] | None = None  # how many collectives waited for it, of how many; None: judged by own time
    chance: float | None = None  # how often ranks that are alike would show as much


def least_apart(excess: Floats, min_z: float) -> tuple[Floats, Floats]:
    """Each rank's mean excess, and how large it must be, either way, to stand out.

    That is `min_z` robust standard deviations of a healthy rank's mean: among the peers, or over the rank's own steps,
    one by one or, where there are enough of them, in stretches, since load on a machine lasts.
    """
    means, half_widths = estimates(excess, TRIM)
    if excess.shape[1] >= _STRETCHES:
        half_widths = np.maximum(half_widths, lasting_half_widths(excess, TRIM))
    if len(means) > _MANY:
        among = np.full(len(means), deviation_of_alike(means))
    else:
        among = np.array([robust_deviation(np.delete(means, row)) for row in range(len(means))])
    return means, min_z * np.maximum(among, half_widths / 1.96)


def persistent(excess: Floats, by_label: dict[str, Floats], persistence: float, min_z: float) -> dict[int, Shown]:
    """Return the ranks that exceed their peers in most steps by more than those differ, under labels or over all."""
    located = np.zeros_like(excess)
    for values in by_label.values():
        means, least = least_apart(values, min_z)
        located += np.where((np.abs(means) >= least)[:, np.newaxis], values, 0.0)
    totals, least = least_apart(excess, min_z)
    # Spread over many labels, a loss may stand out under none of them.
    diffuse = (estimates(located, TRIM)[0] < totals / 2) & (totals >= least)
    located[diffuse] = excess[diffuse]
    lost = estimates(located, TRIM)[0]
    often = np.mean(located > lost[:, np.newaxis] / 2, axis=1) >= persistence
    always = np.ones(excess.shape[1], dtype=bool)
    # What a rank loses under one label and gains under another is no loss.
    return {int(row): (located[row], always) for row in np.flatnonzero((lost > 0) & often & (totals >= lost / 2))}


def shapes(
    grid: StepGrid, excess: Floats, by_label: dict[str, Floats], thresholds: Thresholds
) -> tuple[dict[int, Shown], dict[int, Shown]]:
    """Return those that exceed their peers in most steps, and those that do for a while, else in bursts."""
    most = persistent(excess, by_label, thresholds.persistence, thresholds.min_z)
    at_times = _for_a_while(grid, excess, thresholds.min_z)
    return most, at_times or _bursts(grid, excess, thresholds.persistence, most)


def _bursts(grid: StepGrid, excess: Floats, persistence: float, known: Container[int]) -> dict[int, Shown]:
    """Return the rank whose excess comes in bursts, if hardly any other rank has bursts.

    In fewer steps than those of a rank that is slow in most, unless it is none of the `known` ones that are.
    """
    found = _beyond(grid, excess, robust_deviation(excess), persistence, known)
    if found or len(excess) != 2 or excess.shape[1] < _STRETCHES:
        return found
    # Of two ranks each is the other's peer, and one that is slow in half of the steps hides in its own scatter. The
    # densest part of the steps shows that; their mean, whether it is a lasting load that ends.
    ordered, part = np.sort(excess[0]), math.ceil(_DENSEST * excess.shape[1])
    scatter = float((ordered[part - 1 :] - ordered[: len(ordered) - part + 1]).min()) / _DENSEST_SIGMAS
    clear = estimates(excess)[0] >= _CLEAR_Z / 1.96 * lasting_half_widths(excess)
    found = _beyond(grid, excess, scatter, persistence, known)
    return {row: shown for row, shown in found.items() if clear[row]}


def _for_a_while(grid: StepGrid, excess: Floats, min_z: float) -> dict[int, Shown]:
    """Return the ranks that are above their peers for a part of the run, by far more than their stretches differ.

    Of two ranks only the one that is so for a long part. What creeps up is no part.
    """
    found: dict[int, Shown] = {}
    stretches = longest_stretch(grid.step_ns + excess, _WHILE, grid.step_ns)
    steps = stretches.sum(axis=1)
    fewest, least_ns = (_FEWEST_INSIDE, 0.0) if len(excess) > 2 else (_LONG, 0.1 * grid.step_ns)
    for row in np.flatnonzero((steps >= fewest) & (excess.shape[1] - steps >= fewest)).tolist():
        values, inside = excess[row], stretches[row]
        scatter = np.concatenate([_of_stretches(values[inside]), _of_stretches(values[~inside])]).std()
        enough = np.median(values[inside]) >= max(least_ns, _BURST_Z * scatter)
        if enough and rank_sum_z(values, inside) >= min_z and not _creeps_up(values, inside):
            found[row] = np.where(inside, values, 0.0), inside
    return found


def _creeps_up(values: Floats, inside: Steps) -> bool:
    """Say whether the values grow, through all steps or inside: then they have no level there."""
    early, late = np.array_split(values[inside], 2)
    return bool(np.median(late) > _GROWS * np.median(early)) or follows_line(values, inside)


def _beyond(
    grid: StepGrid, excess: Floats, scatter: float, persistence: float, known: Container[int]
) -> dict[int, Shown]:
    """Return the rank whose excess goes far beyond this scatter in some steps, if hardly any other rank's does."""
    burst = excess > max(0.1 * grid.step_ns, _BURST_Z * scatter)
    cost = np.where(burst, excess, 0.0).sum(axis=1)
    row = int(cost.argmax())
    if cost[row] == 0 or cost[row] < _BURST_SHARE * cost.sum():
        return {}
    typical: Steps = burst[row] & (excess[row] > float(np.median(excess[row][burst[row]])) / 2)
    most = typical.sum() >= persistence * len(typical)
    if typical.sum() < _MIN_BURSTS or (most and (row in known or _creeps_up(excess[row], typical))):
        return {}
    return {row: (np.where(typical, excess[row], 0.0), typical)}


def _of_stretches(values: Floats) -> Floats:
    """Return how far the means of eight stretches of steps differ from the mean of all."""
    means = np.array([stretch.mean() for stretch in np.array_split(values, 8)])
    return np.asarray(means - means.mean())
