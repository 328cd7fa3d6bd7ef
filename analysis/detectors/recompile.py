"""torch.compile compiles again while the job trains, and the ranks wait meanwhile.

**Signal.** Compilations on the main thread in at least `min_steps` analyzed steps, so after warm-up, that take more
than `min_fraction` of all analyzed time. Each step counts with its longest compilation over the ranks; named are all
that compile at least half as long as the one that does so longest, also where their devices had work meanwhile. One
step is enough where it took `min_fraction_once` of that time and Dynamo's number says that it was not the first of its
code (`0/1`), or in a profiler's trace, which has no such number.

Where ranks run on devices of which neither kernels nor CUDA events were recorded, a compilation counts as far as it
is sure that devices waited for it, and is not checked if only all of it were enough.

**Why it costs time.** A compiled graph holds for what its guards saw: shapes, types, values of Python variables. When
one changes, the code is compiled again, which takes seconds on the host; the device idles, and all ranks wait for
the one that compiles. A graph break splits a graph into several, each of which is compiled again.

**False positives.** A first compilation that comes late (an evaluation, a phase of training with other shapes) is paid
once; it is reported only if it happens in several steps. So is what makes sizes dynamic, in a short recording.
Compilations in other threads or processes are not seen.

**What to try.** Read the reason that is named: for a size that changes, `torch._dynamo.mark_dynamic` or
`torch.compile(dynamic=True)`, or pad to a few sizes; for a Python number, make it a tensor. `TORCH_LOGS=recompiles`
prints every reason, `TORCH_LOGS=graph_breaks` every break.

**Source.** `torch._dynamo.callback` reports each compilation, Dynamo's metrics the guard that failed. Thresholds are
ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_regions, of_hosts, price
from rankscope.analysis.metrics.host_stalls import held_up
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, over_occurrences
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import duration

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("compile",),
    per_rank=True,
    explains=("slow_rank",),
    # Stops of several ranks in a step add up along a pipeline.
    cost="as_replayed",
    parts=("compile",),
    lost_as=("compile", *AS_WAITING),
)

_MAIN_THREAD = 0
_PROFILED, _SECOND = r" \(dynamo_timed\)$", r"^compile \S*/[1-9]"
_REASON = r"^compile \S+: (?:\S+/\S+: )?(.+)$"


def detect(
    breakdown: pl.DataFrame,
    regions: pl.DataFrame,
    device_waits: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.02,
    min_fraction_once: float = 0.10,
    min_steps: int = 2,
) -> list[Finding]:
    """Name the ranks that compile in judged steps, in one finding."""
    grid = judged_grid(breakdown, FEW_STEPS)
    least = {True: min_fraction, False: min_fraction_once}

    def found(waits: pl.DataFrame | None) -> list[Finding]:
        return _found(grid, held_up(grid, "compile", waits), regions, least, min_steps)

    return of_hosts(found, device_waits)


def _found(
    grid: StepGrid, compiling: Floats, regions: pl.DataFrame, least: dict[bool, float], min_steps: int
) -> list[Finding]:
    longest = compiling.max(axis=0)
    shows = longest > 0
    several = bool(shows.sum() >= min_steps)
    if not (several or _again(regions)) or longest.mean() < least[several] * grid.step_ns or not shows.any():
        return []
    ranks = tuple(sorted({*_most_of(grid, compiling.mean(axis=1)), *_most_of(grid, _on_hosts(grid, regions))}))
    reason = _commonest_reason(regions)
    again = text("compiles again") if several or _names(regions).str.contains(_SECOND).any() else text("compiles")
    return [
        Finding(
            detector="recompile",
            title=text(
                "torch.compile {again} in {steps} after warm-up, {time} each, on {ranks}",
                again=again,
                steps=counted(int(shows.sum()), "step"),
                time=duration(longest[shows].mean()),
                ranks=named("rank", ranks),
            ),
            where=reason or "compile",
            advice=(text("The guard that failed most often: {reason}. ", reason=reason) if reason else "")
            + text(
                "Mark sizes that change with torch._dynamo.mark_dynamic, or pad to a few sizes; TORCH_LOGS=recompiles "
                "prints every reason."
            ),
            ranks=ranks,
            steps=() if shows.all() else tuple(np.array(grid.steps)[shows].tolist()),
            evidence=longest_regions(regions, "compile", ranks),
            fix="compile",
            **price(grid, over_occurrences(longest, shows)),
        )
    ]


def _most_of(grid: StepGrid, per_rank: Floats) -> list[int]:
    """Return the ranks with at least half of what the rank with most has."""
    return [rank for rank, own in zip(grid.ranks, per_rank, strict=True) if own >= max(per_rank.max() / 2, 1.0)]


def _on_hosts(grid: StepGrid, regions: pl.DataFrame) -> Floats:
    """Return how long each rank's main thread compiles, ns, also while its device has work or waits for others."""
    compiles = regions.filter(pl.col("kind") == "compile", pl.col("thread") == _MAIN_THREAD)
    by_rank = compiles.group_by("rank").agg((pl.col("end_ns") - pl.col("start_ns")).sum())
    own = dict(by_rank.iter_rows())
    return np.array([float(own.get(rank, 0)) for rank in grid.ranks])


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.02) -> int:
    """Return the smallest mean compilation per step that would have been reported."""
    return round(min_fraction * judged_grid(breakdown, FEW_STEPS).step_ns)


def _again(regions: pl.DataFrame) -> bool:
    """Say whether code was compiled that had been before, as `compile 0/1`, or may have been, in a profiler's trace."""
    return bool(_names(regions).str.contains(f"{_SECOND}|{_PROFILED}").any())


def _names(regions: pl.DataFrame) -> pl.Series:
    return regions.filter(pl.col("kind") == "compile")["name"]


def _commonest_reason(regions: pl.DataFrame) -> str:
    """Return the reason for most of the time spent on compiling again, as Dynamo words it.

    Empty where none was recorded.

    A variable of the script says more than one of Dynamo's own (`___stack0`).
    """
    reasons = (
        regions.filter(pl.col("kind") == "compile")
        .with_columns(reason=pl.col("name").str.extract(_REASON))
        .drop_nulls("reason")
        .with_columns(reason=pl.col("reason").str.replace(r"expected \S+, actual \S+", "").str.strip_chars(" ."))
        .group_by("reason")
        .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
        .sort(~pl.col("reason").str.contains("'___"), "ns", "reason")
    )
    return str(reasons["reason"][-1]) if len(reasons) else ""
