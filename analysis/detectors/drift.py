"""Steps become longer throughout the run, little by little.

**Signal.** The line through the lengths of the judged steps (half of all pairs of steps are steeper than it) rises: its
mean is at least `min_fraction` of the step above its beginning, and the rise is `min_z` standard deviations clear of
chance, where values that resemble the ones before count as fewer. The line must come closer to the steps than two
levels do: a change at one step is `uniform_slowdown`. `where` is the part that grows most, `ranks` are those on which
it grows by at least half of what the step does; where it does so on all, none is named.

**Why it costs time.** Each step is only a little longer than the one before, so no two neighbours look different, and a
look at the first minutes finds a healthy job. The cost is what the steps take longer than the first ones did.

**False alarms.** Work that grows by design: a curriculum of longer sequences, a growing batch. Silence on a short run
says little: a creep of 1 % per hour is not seen in 10 minutes.

**What to try.** Own time on all ranks: clocks and temperature, fragmentation of the allocator, lists that grow (logged
tensors that keep their graph, metrics). On one rank: its cooling, other processes on its host. Garbage collection:
objects that pile up. Input: a cache that runs full, files that are farther away. Transfer: other traffic.

**Source.** Theil 1950, Sen 1968; the test of Mann and Kendall with the correction of Hamed and Rao 1998. Thresholds are
ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import judged_grid, price
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.phrases import named
from rankscope.analysis.report.quantities import duration, percent
from rankscope.analysis.report.texts import part_label
from rankscope.analysis.timeline.own import Estimate, Floats, StepGrid
from rankscope.analysis.timeline.trend import Trend, follows_line, longest_stretch, trend

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ()

_SECONDARY = ("wait", "bubble", "overlapped")  # grow because something else does, or beside it


def detect(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_steps: int = 30,
    min_z: float = 5.0,
) -> list[Finding]:
    """Steps that creep up, as one finding."""
    grid = judged_grid(breakdown, min_steps)
    lengths = _lengths(grid)
    line = trend(lengths)
    if line.growth / 2 < min_fraction * grid.step_ns or line.z < min_z:
        return []
    if not follows_line(lengths, longest_stretch(lengths, 1 + min_fraction)):
        return []
    where, ranks = _what_grows(grid, line)
    on = f" on {named('rank', ranks)}" if ranks else ""
    return [
        Finding(
            detector="drift",
            title=f"Steps become longer throughout the run, from {duration(line.first)} to "
            f"{duration(line.first + line.growth)} ({percent(line.growth / line.first)}); "
            f"what grows is {part_label(where)}{on}",
            where=where,
            advice=_ADVICE.get(where, _ADVICE["compute"]),
            ranks=ranks,
            evidence=_first_and_last(steps, grid, ranks),
            **price(grid, Estimate(line.growth / 2, line.half_width / 2), line.growth / 2),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame, *, min_fraction: float = 0.03, min_steps: int = 30, min_z: float = 5.0
) -> int:
    """What a drift costs per step that would just have been reported."""
    grid = judged_grid(breakdown, min_steps)
    return round(max(min_fraction * grid.step_ns, min_z / 1.96 * trend(_lengths(grid)).half_width / 2))


_ADVICE = {
    "compute": "Compare the first and the last steps: clocks and temperature, memory that fills up or fragments, "
    "Python lists that grow (losses kept with their graph, metrics).",
    "input": "See what the loader does later that it did not do at first: a cache that runs full, longer files, "
    "storage that others use.",
    "gc": "Objects pile up from step to step: look for lists and caches that grow; gc.freeze() after warm-up.",
    "compile": "Compilations become more frequent: see which guards fail (TORCH_LOGS=recompiles).",
    "transfer": "Compare the first and the last transfers: other traffic, retransmits, sizes that grow.",
    "wait": "Ranks drift apart, and not always the same is late: compare their own time in the last steps.",
}


def _lengths(grid: StepGrid) -> Floats:
    return np.asarray(grid.of(*grid.parts).mean(axis=0))


def _what_grows(grid: StepGrid, line: Trend) -> tuple[str, tuple[int, ...]]:
    """The part that grows most, waiting last of all; and the ranks where it holds half of the growth, if not all."""
    # Where a peer is late, what computes beside communication and what computes alone change places.
    parts = grid.parts | {"compute": grid.of("compute", "overlapped")}
    grown = {part: _growth(values) for part, values in parts.items() if part not in _SECONDARY}
    causes = {part: values.max() for part, values in grown.items()}
    where = max(causes, key=lambda part: causes[part], default="wait")
    if causes.get(where, 0.0) < line.growth / 2:
        return "wait", ()
    here = grown[where] >= line.growth / 2
    return where, () if here.all() else tuple(np.array(grid.ranks)[here].tolist())


def _growth(values: Floats) -> Floats:
    """By how much each rank's values grow over the run, by the medians of its first and last third."""
    count = values.shape[1]
    third = count // 3
    apart = np.median(values[:, -third:], axis=1) - np.median(values[:, :third], axis=1)
    return np.asarray(apart * (count - 1) / (count - third))


def _first_and_last(steps: pl.DataFrame, grid: StepGrid, ranks: tuple[int, ...]) -> tuple[Evidence, ...]:
    """The first and the last judged step on the first rank where it grows."""
    rank = (ranks or grid.ranks)[0]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step").is_in([grid.steps[0], grid.steps[-1]])).sort("step")
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=f"step {step}: {duration(end - start)}")
        for step, start, end in rows.select("step", "start_ns", "end_ns").iter_rows()
    )
