"""Ranks wait for their next batch.

**Signal.** The input part of the step: the main thread is inside the data loader's `next()`. A rank stands out when
it spends `min_fraction` of the step more there than the median of its peers; otherwise all ranks that spend more
than that are named together.

**Why it costs time.** The main thread can launch nothing while it waits, and the other ranks wait for this one in
the next collective.

**False alarms.** A loader without workers (`num_workers=0`) loads inside `next()`, so all of its work counts: that
time is lost, but storage need not be the reason. The first batch of an epoch starts the workers. Loaders with an
iterator of their own are not seen; their time is part of the rank's own.

**What to try.** More workers (`num_workers`), `prefetch_factor`, `persistent_workers=True`, decoding outside the
loop. If it is one rank only: its storage mount, its page cache, the file sizes of its shard, other processes on its
host.

**Source.** "Analyzing and Mitigating Data Stalls in DNN Training" (2021) for the effect; the threshold of 5 % is
ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, NotResolvable, judged_grid, longest_regions, price, visible
from rankscope.analysis.finding import Finding
from rankscope.analysis.phrases import every_nth, named
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.own import Estimate, Floats, StepGrid, above_peers, estimate

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("input",)

_ALWAYS = 0.9  # share of the steps above which a stall is there in every step
_TRIM = 0.1


def detect(breakdown: pl.DataFrame, regions: pl.DataFrame, *, min_fraction: float = 0.05) -> list[Finding]:
    """Name the ranks that wait for input: each that stands out, or else all of them together."""
    grid = _with_input(breakdown, regions)
    waited = grid.of("input")
    excess = above_peers(waited)
    apart = _large(excess, min_fraction * grid.step_ns)
    if apart and 2 * len(apart) <= len(waited):
        findings = [_finding(grid, regions, (row,), excess[[row]], estimate(excess[row])) for row in apart]
        return sorted(findings, key=lambda finding: -finding.lost_ns_per_step)
    stalled = _large(waited, min_fraction * grid.step_ns)
    if not stalled:
        return []
    # The mean over ranks and not their maximum: what one rank stalls longer than another is seldom all in the way.
    return [_finding(grid, regions, tuple(stalled), waited[stalled], estimate(waited[stalled].mean(axis=0)))]


def resolution_ns(breakdown: pl.DataFrame, regions: pl.DataFrame, *, min_fraction: float = 0.05) -> int:
    """The smallest stall that would have been reported."""
    grid = _with_input(breakdown, regions)
    return visible(grid, max(min_fraction * grid.step_ns, *(estimate(row).half_width_ns for row in grid.of("input"))))


def _with_input(breakdown: pl.DataFrame, regions: pl.DataFrame) -> StepGrid:
    if regions.filter(pl.col("kind") == "input").is_empty():
        raise NotResolvable("no data loader was seen; time spent on input counts as the ranks' own")
    return judged_grid(breakdown, FEW_STEPS)


def _large(values: Floats, least_ns: float) -> list[int]:
    """Rows whose mean is clear of chance and at least `least_ns`."""
    means = [estimate(row) for row in values]
    return [row for row, mean in enumerate(means) if mean.clear and mean.ns >= least_ns]


def _finding(grid: StepGrid, regions: pl.DataFrame, rows: tuple[int, ...], stall: Floats, lost: Estimate) -> Finding:
    ranks = tuple(grid.ranks[row] for row in rows)
    shows = stall.max(axis=0) > lost.ns / 2
    steps = tuple(np.array(grid.steps)[shows].tolist())
    always = bool(shows.mean() >= _ALWAYS)
    if always:  # then single hiccups need not be taken for part of it
        lost = estimate(stall.mean(axis=0), _TRIM)
    often = "" if always else f", {every_nth(steps, len(shows))}"
    advice = (
        "Raise num_workers and prefetch_factor, keep the workers (persistent_workers=True), decode outside of the loop."
    )
    if len(rows) < len(grid.ranks):
        advice += f" Compare storage and host of {named('rank', ranks)} with the others."
    return Finding(
        detector="input_stall",
        title=f"{named('rank', ranks).capitalize()} {'waits' if len(ranks) == 1 else 'wait'} "
        f"{duration(lost.ns)} per step for the next batch{often}",
        where="input",
        advice=advice,
        ranks=ranks,
        steps=() if always else steps,
        evidence=longest_regions(regions, "input", ranks),
        fix="input",
        **price(grid, lost),
    )
