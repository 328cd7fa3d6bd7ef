"""Python's garbage collector stops a rank, and the others wait for it.

**Signal.** The gc part of the step, from `gc.callbacks`, where it is not hidden behind blocked communication. Each
step counts with its longest collection over the ranks, since ranks that collect in different steps stop the job
each time. Reported above `min_fraction` of the step and `min_ns` per step. A collection is its own evidence: one that
takes `min_fraction_once` of all analyzed time is reported, though it is not yet known how often it returns.

Where ranks run on devices of which neither kernels nor CUDA events were recorded, a collection counts as far as it
is sure that devices waited for it, and is not checked if only all of it were enough.

**Why it costs time.** A full collection visits every object of the process. The main thread launches nothing
meanwhile, and all ranks wait for it in the next collective; with N ranks that collect at different times the job
stops N times as often.

**False positives.** A collection while the rank would have been blocked on communication anyway costs nothing and is
not counted. Pauses under 1 ms are not recorded.

**What to try.** `gc.collect()` once after warm-up, then `gc.freeze()`; or `gc.disable()` and `gc.collect()` on all
ranks in the same step, every few hundred steps. Look for `gc.collect()` in the loop, and for code that makes many
objects per step.

**Source.** torchtitan's synchronised garbage collection; the mean over steps of the largest over ranks is the cost
when every step ends in a collective. Thresholds are ours.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_regions, of_hosts, price, visible
from rankscope.analysis.metrics.host_stalls import held_up
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, estimate, over_occurrences
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import every_nth, named
from rankscope.analysis.text.units import duration

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("gc_pauses",),
    per_rank=True,
    explains=("pipeline_bubble",),
    # Stops of several ranks in a step add up along a pipeline.
    cost="as_replayed",
    parts=("gc",),
    lost_as=("gc", *AS_WAITING),
)

_LENGTH = pl.col("end_ns") - pl.col("start_ns")


def detect(
    breakdown: pl.DataFrame,
    regions: pl.DataFrame,
    device_waits: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.01,
    min_fraction_once: float = 0.10,
    min_ns: int = 1_000_000,
) -> list[Finding]:
    """Name the ranks whose collections stop the job, in one finding."""
    grid = judged_grid(breakdown, FEW_STEPS)
    least_ns = max(min_fraction * grid.step_ns, min_ns)
    return of_hosts(
        lambda waits: _found(grid, held_up(grid, "gc", waits), regions, least_ns, min_fraction_once), device_waits
    )


def _found(
    grid: StepGrid, collecting: Floats, regions: pl.DataFrame, least_ns: float, min_fraction_once: float
) -> list[Finding]:
    longest = collecting.max(axis=0)
    shows = longest > longest.mean() / 2
    # The collections themselves show whether it is clear: one in five steps is as certain as one in each.
    lost = replace(over_occurrences(longest, shows), ns=float(longest.mean()))
    once = longest.max() >= min_fraction_once * len(longest) * grid.step_ns
    if not (lost.clear or once) or lost.ns < least_ns:
        return []
    # A device may still be busy, or wait for another rank, while its host collects: the cause is the same.
    per_rank = regions.filter(pl.col("kind") == "gc").group_by("rank").agg(ns=_LENGTH.sum())
    ranks = tuple(per_rank.filter(pl.col("ns") >= pl.col("ns").max() / 2)["rank"].sort().to_list())
    steps = tuple(np.array(grid.steps)[shows].tolist())
    return [
        Finding(
            detector="gc_stall",
            title=text(
                "Garbage collection{generation} stops {ranks} for {time} {often}",
                generation=_generation(regions),
                ranks=named("rank", ranks),
                time=duration(longest[shows].mean()),
                often=every_nth(steps, len(shows)),
            ),
            where="gc",
            advice=text(
                "Collect once after warm-up and gc.freeze(), or gc.disable() and gc.collect() on all ranks in "
                "the same step; look for gc.collect() in the loop."
            ),
            ranks=ranks,
            steps=() if shows.all() else steps,
            evidence=longest_regions(regions, "gc", ranks),
            fix="gc",
            **price(grid, lost),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.01, min_ns: int = 1_000_000) -> int:
    """Return the smallest mean collection per step that would have been reported."""
    grid = judged_grid(breakdown, FEW_STEPS)
    scatter = estimate(grid.of("gc").max(axis=0)).half_width_ns
    return visible(grid, max(min_fraction * grid.step_ns, min_ns, scatter))


def _generation(regions: pl.DataFrame) -> str:
    """Return the generation that takes most of the time, from names like `gc generation 2`."""
    time_ns = _LENGTH.sum().alias("ns")
    names = regions.filter(pl.col("kind") == "gc").group_by("name").agg(time_ns).sort("ns", "name")
    generation = str(names["name"][-1]).removeprefix("gc generation ") if len(names) else ""
    return text(" (generation {generation})", generation=generation) if generation.isdigit() else ""
