"""What makes a part of the run longer: where steps have two lengths, the checks run on the longer ones alone, too.

What acts in a third of the steps is diluted in the whole run: a link's rate, a stage's share, how usual a rank's
lateness is. By themselves these steps are a run with a fault, as if the user had asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity
from rankscope.analysis.metrics.step_matrix import StepGrid, step_grid
from rankscope.analysis.metrics.trend import longer_stretch
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import some_ranges

__all__ = ["longer_steps", "with_part"]

_ALL_THERE = 0.8  # of its steps: then a finding acts in this part only
_LITTLE = 0.5  # of what it costs per step on average: if it costs no more in the others, too
_LEAST = 0.03  # of the run's mean step: what most checks report
_OF_ALL = "step_change"
_CHANGES = (_OF_ALL, "gradual_slowdown")  # compare steps with each other


def longer_steps(breakdown: pl.DataFrame) -> tuple[int, ...]:
    """Return the steps of the part of the run that is longer; empty: its steps have one length."""
    grid = step_grid(breakdown)
    inside = longer_stretch(grid.of(*grid.parts).mean(axis=0)) if grid.steps else None
    return () if inside is None else tuple(step for step, there in zip(grid.steps, inside, strict=True) if there)


def with_part(
    whole: Sequence[Finding], part: Sequence[Finding], steps: tuple[int, ...], breakdown: pl.DataFrame
) -> list[Finding]:
    """Return the findings of the whole run, with those of its longer `steps` that are not among them.

    Of one that acts in these steps only the title and the steps are those of the part. Where ranks or nodes are named
    for most of what the part takes longer, there is no change of all ranks alike.
    """
    grid = step_grid(breakdown)
    lengths, inside = grid.of(*grid.parts).mean(axis=0), np.isin(grid.steps, steps)
    of_steps, of_time = float(inside.mean()), float(lengths[inside].sum() / lengths.sum())
    least_there = 1 - _LITTLE * (1 - of_steps)
    found = list(whole)
    is_change = any(one.detector in _CHANGES for one in whole)
    for one in part:
        there = _in_run(one, steps, of_steps, of_time)
        if one.detector in _CHANGES or there.lost_fraction < _LEAST or (is_change and not _names_some(one, grid)):
            continue
        at = next((number for number, other in enumerate(found) if _is_same(one, other)), None)
        if at is None:
            found.append(there)
        elif not found[at].steps and there.lost_ns_per_step >= least_there * found[at].lost_ns_per_step:
            found[at] = replace(found[at], title=there.title, steps=there.steps, evidence=there.evidence)
    of_some = [one.lost_ns_per_step for one in found if _names_some(one, grid) and _acts_in(one, steps)]
    return [one for one in found if one.detector != _OF_ALL or 2 * max(of_some, default=0) < one.lost_ns_per_step]


def _names_some(one: Finding, grid: StepGrid) -> bool:
    return 0 < len(one.ranks) < len(grid.ranks) or len(one.nodes) > 0


def _acts_in(one: Finding, steps: tuple[int, ...]) -> bool:
    return len({*one.steps} & {*steps}) > _ALL_THERE * len(one.steps)


def _in_run(one: Finding, steps: tuple[int, ...], of_steps: float, of_time: float) -> Finding:
    """Return a finding of some steps, by what it costs in all of them."""
    fraction = one.lost_fraction * of_time
    return replace(
        one,
        title=one.title if one.steps else text("{what} (in steps {steps})", what=one.title, steps=some_ranges(steps)),
        steps=one.steps or steps,
        severity=severity(fraction),
        lost_ns_per_step=round(one.lost_ns_per_step * of_steps),
        lost_fraction=fraction,
        uncertainty_ns=round(one.uncertainty_ns * of_steps),
        gain_fraction=None if one.gain_fraction is None else fraction,
    )


def _is_same(one: Finding, other: Finding) -> bool:
    return one.detector == other.detector and (
        set(one.ranks) == set(other.ranks) or bool({*one.ranks} & {*other.ranks})
    )
