"""How step times change over a run: a line through them, or two levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.metrics.step_matrix import ENOUGH_STEPS, Floats

__all__ = ["Trend", "follows_line", "longer_stretch", "longest_stretch", "rank_sum_z", "trend"]

_POINTS = 1000  # pairs are compared, so longer runs are drawn together first
_LEAST = 3  # values that show a line
_CLIP = 2.0  # a step counts at most as this many medians, so that single hiccups make no stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A straight line through the values: what it has at first, and by how much it grows until the last (95 %: ±).

    `z` is by how many standard deviations of chance the values rise.
    """

    first: float
    growth: float
    half_width: float
    z: float


def trend(values: Floats) -> Trend:
    """Return the line through `values`, ns of each step, that half of all pairs of steps are steeper than.

    Source: Theil 1950 and Sen 1968 for slope and interval; Mann and Kendall for the test, its variance corrected for
    values that resemble the ones before them as Hamed and Rao (1998) do. At least `_LEAST` values.
    """
    points = _drawn_together(values)
    count = len(points)
    early, late = np.triu_indices(count, 1)
    rises = points[late] - points[early]
    slopes = rises / (late - early)
    slope = float(np.median(slopes))
    residual = points - slope * np.arange(count)
    deviation = (count * (count - 1) * (2 * count + 5) / 18 * _resemblance(residual)) ** 0.5
    within = 1.96 * deviation / 2
    low, high = (int(np.clip(len(slopes) / 2 + x, 0, len(slopes) - 1)) for x in (-within, within))
    ordered = np.partition(slopes, (low, high))
    return Trend(
        first=float(np.median(residual)),
        growth=slope * (count - 1),
        half_width=float(ordered[high] - ordered[low]) / 2 * (count - 1),
        z=float(np.sign(rises).sum() / deviation),
    )


def follows_line(values: Floats, inside: NDArray[np.bool_]) -> bool:
    """Say whether the line through the values misses them by less than two levels do, one of them `inside`.

    Two values show no line.
    """
    if len(values) < _LEAST:
        return False
    line = trend(values)
    of_line = line.first + line.growth * np.linspace(0, 1, len(values))
    of_levels = np.where(inside, *(np.median(values[x]) if x.any() else 0.0 for x in (inside, ~inside)))
    return bool(np.abs(values - of_line).sum() < np.abs(values - of_levels).sum())


def longer_stretch(
    lengths: Floats, min_ratio: float = 1.1, min_steps: int = ENOUGH_STEPS, min_z: float = 3.0
) -> NDArray[np.bool_] | None:
    """Return which steps are in the stretch that is longer than the others; None where there is none.

    Both have `min_steps` or more, their medians are `min_ratio` apart and their ranks `min_z` standard deviations; and
    two levels fit better than a line. By default it is worth to look at both by themselves, and clear of nothing.
    """
    if len(lengths) < 2 * min_steps:
        return None
    inside = longest_stretch(lengths, (1 + min_ratio) / 2)
    if min(inside.sum(), (~inside).sum()) < min_steps or rank_sum_z(lengths, inside) < min_z:
        return None
    if np.median(lengths[inside]) < min_ratio * np.median(lengths[~inside]) or follows_line(lengths, inside):
        return None
    return inside


def longest_stretch(lengths: Floats, ratio: float, usual_ns: float | None = None) -> NDArray[np.bool_]:
    """Return which steps are in the stretch with the largest sum beyond `ratio` × the usual step.

    Usual is the lower quartile if it is not known: up to three quarters of the steps may be slow. Lengths are those of
    one rank (steps) or of several (ranks, steps), of which each has its own stretch.
    """
    usual = np.quantile(lengths, 0.25, axis=-1, keepdims=True)
    if usual_ns is not None:
        usual = np.full_like(usual, usual_ns)
    beyond = np.cumsum(np.minimum(lengths, _CLIP * usual) - ratio * usual, axis=-1)
    before = np.concatenate([np.zeros_like(usual), beyond[..., :-1]], axis=-1)
    lowest = np.minimum.accumulate(before, axis=-1)
    last = np.argmax(beyond - lowest, axis=-1, keepdims=True)
    first = np.argmax(before == np.take_along_axis(lowest, last, axis=-1), axis=-1, keepdims=True)
    at = np.arange(lengths.shape[-1])
    return np.asarray((at >= first) & (at <= last))


def rank_sum_z(values: Floats, inside: NDArray[np.bool_]) -> float:
    """Return how many standard deviations the ranks of the values inside lie above chance."""
    ranks = np.argsort(np.argsort(values, kind="stable"), kind="stable") + 1.0
    m, n = int(inside.sum()), int((~inside).sum())
    return float((ranks[inside].sum() - m * (m + n + 1) / 2) / (m * n * (m + n + 1) / 12) ** 0.5)


def _drawn_together(values: Floats) -> Floats:
    """At most `_POINTS` medians of neighbours."""
    size = -(-len(values) // _POINTS)
    if size == 1:
        return values
    whole = values[: len(values) // size * size]
    return np.asarray(np.median(whole.reshape(-1, size), axis=1))


def _resemblance(residual: Floats) -> float:
    """Return the factor of the variance of Kendall's S by autocorrelation; at least 1."""
    count = len(residual)
    _, place = np.unique(np.rint(residual), return_inverse=True)  # whole ns: what is less is arithmetic
    ranks = place - place.mean()
    lags = np.arange(1, count - 2)
    similar = np.correlate(ranks, ranks, "full")[count : 2 * count - 3] / max((ranks * ranks).sum(), 1.0)
    similar = np.where(similar > 1.96 / count**0.5, similar, 0.0)
    weights = (count - lags) * (count - lags - 1) * (count - lags - 2)
    return float(1 + 2 * (weights * similar).sum() / (count * (count - 1) * (count - 2)))
