"""All ranks become slower alike from some step on, or for a while.

**Signal.** The stretch of at least `min_steps` analyzed steps that are longest against all others: their median is more
than `min_ratio` times the median of the rest, a rank-sum test puts them `min_z` standard deviations apart, and what
grew is the ranks' compute time or the transfer, on at least half of the ranks. Of a run that is too long to be held at
once the same is asked of the mean over ranks of each of its steps, too.

**Why it costs time.** Comparing ranks with each other is blind to what hits all of them: there is no healthy peer. The
run's own earlier or later steps are the only measure.

**False positives.** Work that really changes: longer sequences from some step on, a phase of training with another
batch size, an evaluation inside of steps. Where one rank makes all others wait, or what grew is input, garbage
collection or compilation, this stays silent: they have checks of their own. So has what creeps up (`gradual_slowdown`).
A rank, node, link or stage that explains most of it in these steps is the finding instead.

**What to try.** See what happened at the step where it began: a clock or power limit, another job on the hosts or the
network, a full disk, memory that runs out. Compare the counters of the nodes before and after.

**Source.** Own-history change points as in Greyhound (a shift above 10 % that lasts 10 steps); the stretch is the
maximum-sum segment, the test that of Mann and Whitney.
"""

from __future__ import annotations

import math

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import judged_grid, price
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, StepGrid, estimate
from rankscope.analysis.metrics.trend import longer_stretch
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.parts import OWN
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, percent

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector()


def detect(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    *,
    min_ratio: float = 1.1,
    min_steps: int = 10,
    min_z: float = 5.0,
) -> list[Finding]:
    """Return the stretch of steps in which all ranks are slower, as one finding."""
    grid = _enough(breakdown, min_steps, min_z)
    lengths = grid.of(*grid.parts).mean(axis=0)
    inside = longer_stretch(lengths, min_ratio, min_steps, min_z)
    if inside is None:
        return []
    usual, slow = np.median(lengths[~inside]), np.median(lengths[inside])
    # Where one rank is late, what the others compute beside communication and what they compute alone change places.
    parts = grid.parts | {"compute": grid.of("compute", "overlapped")}
    grown = {part: _growth(values, inside) for part, values in parts.items() if part != "overlapped"}
    where = max(grown, key=lambda part: grown[part])
    if grown[where] < (slow - usual) / 2 or where not in (*OWN, "transfer"):
        return []
    share = float(inside.mean())
    over = estimate(lengths[inside] - usual)
    slow_steps = tuple(np.array(grid.steps)[inside].tolist())
    begins, ends = slow_steps[0], slow_steps[-1]
    until = "" if ends == grid.steps[-1] else text(" to {ends}", ends=ends)
    return [
        Finding(
            detector="step_change",
            title=text(
                "Steps from {begins}{until} take {time} ({share}) longer than the others on all ranks; the part that "
                "grew is {where}",
                begins=begins,
                until=until,
                time=duration(slow - usual),
                share=percent(slow / usual - 1),
                where=where,
            ),
            where=where,
            advice=text(
                "See what changed at step {begins}: clocks and power, other jobs on hosts and network, "
                "memory; compare the nodes' counters before and after.",
                begins=begins,
            ),
            steps=slow_steps,
            evidence=_first_slow_step(steps, grid, begins),
            **price(grid, Estimate((slow - usual) * share, over.half_width_ns * share), (slow - usual) * share),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_ratio: float = 1.1, min_steps: int = 10, min_z: float = 5.0) -> int:
    """Return the smallest cost per step of a shift of half of the steps that would have been reported."""
    grid = _enough(breakdown, min_steps, min_z)
    return round((min_ratio - 1) * grid.step_ns / 2)


def _enough(breakdown: pl.DataFrame, min_steps: int, min_z: float) -> StepGrid:
    # Two halves of n steps without any overlap are √(3n² / 4(n + 1)) standard deviations apart.
    return judged_grid(breakdown, max(2 * min_steps, math.ceil(4 / 3 * min_z**2 + 1)))


def _growth(values: Floats, inside: NDArray[np.bool_]) -> float:
    """Return how much a part grows on the median rank."""
    return float(np.median(np.median(values[:, inside], axis=1) - np.median(values[:, ~inside], axis=1)))


def _first_slow_step(steps: pl.DataFrame, grid: StepGrid, step: int) -> tuple[Evidence, ...]:
    rows = steps.filter(pl.col("rank") == grid.ranks[0], pl.col("step") == step)
    return tuple(
        Evidence(
            table="steps",
            rank=grid.ranks[0],
            start_ns=start,
            end_ns=end,
            note=text("step {step}: the first slow one", step=step),
        )
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
