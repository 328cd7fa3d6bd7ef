"""Copies between host and device that nothing hides.

**Signal.** In a profiler's trace, the time in which a device does nothing but copy from its host or to it (copies on
the device are work), on the rank that this holds up most. Reported where the job loses `min_fraction` of the step by
it.

**Why it costs time.** The copy engines work beside the kernels: a batch could be copied while the one before is
computed, and offloaded parameters or optimizer states while other layers are. A copy from memory that is not pinned
goes through a buffer of the driver, at a fraction of the link's rate, and its call returns only when it is done.

**False positives.** The first batch of a capture has nothing to hide behind; copies that happen once are no property of
a step, and need more steps to show.

**What to try.** `pin_memory=True` in the `DataLoader` and `non_blocking=True` in `.to()`; the next batch copied on a
stream of its own (as torchrec's `TrainPipeline` and most prefetchers do); smaller types on the way (bytes, normalized
on the device). With CPU offload: prefetch, larger buckets, or less of it. To the host: keep losses and metrics on the
device, and fetch them every n steps.

**Source.** The CUDA programming guide on overlapping transfers; the threshold is ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import judged_grid, longest_rows, price, visible
from rankscope.analysis.metrics.intervals import covered_ns
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Estimate,
    Floats,
    StepGrid,
    estimate_of_pieces,
    estimates_by_step,
    sums,
)
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.kernels import COPIES_TO_HOST, HOST_COPIES, MEMORY
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.device_time import by_rank

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(explains=("host_sync", "slow_rank"), explains_share=0.5, parts=("memory",), lost_as=("wait",))

_LEAST_STEPS = 1
_MOSTLY = 0.5  # of the time of the copies
_TO_HOST, _PAGEABLE = pl.col("name").str.contains(COPIES_TO_HOST), pl.col("name").str.contains("(?i)pageable")


def detect(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame, *, min_fraction: float = 0.03
) -> list[Finding]:
    """Return the copies that hold the job up, as one finding."""
    grid, copies, exposed = _exposed(breakdown, phases, kernels)
    lost = _lost(grid, copies, exposed)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    ranks = grid.only(exposed.mean(axis=1) >= lost.ns / 2).ranks
    of_ranks = _copies(kernels).filter(pl.col("rank").is_in(ranks))
    length = pl.col("end_ns") - pl.col("start_ns")
    whole, to_host, pageable = of_ranks.select(
        length.sum(), length.filter(_TO_HOST).sum().alias("to_host"), length.filter(_PAGEABLE).sum().alias("pageable")
    ).row(0)
    is_to_host = to_host >= _MOSTLY * whole
    names = of_ranks.group_by("name").agg(length.sum().alias("ns")).sort("ns", "name")["name"]
    title = (
        text(
            "Copies to the host hold the devices of {ranks} up for {lost} per step",
            ranks=named("rank", ranks),
            lost=duration(lost.ns),
        )
        if is_to_host
        else text(
            "Copies from the host hold the devices of {ranks} up for {lost} per step",
            ranks=named("rank", ranks),
            lost=duration(lost.ns),
        )
    )
    return [
        Finding(
            detector="exposed_copies",
            title=title,
            where=str(names[-1]),
            advice=_advice(pageable / whole, is_to_host=is_to_host),
            ranks=ranks,
            evidence=longest_rows(of_ranks, "kernels"),
            **price(grid, lost, lost.ns),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame, *, min_fraction: float = 0.03
) -> int:
    """Return the smallest loss per step that would have been reported."""
    grid, copies, exposed = _exposed(breakdown, phases, kernels)
    return visible(grid, max(min_fraction * grid.step_ns, _lost(grid, copies, exposed).half_width_ns))


@once
def _exposed(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame
) -> tuple[StepGrid, pl.DataFrame, Floats]:
    """Return the grid, the phases in which devices only copy from or to their hosts (`ns`), and ns by (rank, step)."""
    grid = judged_grid(breakdown, _LEAST_STEPS)
    copies = dict(by_rank(_copies(kernels)))
    found = [phases.clear().with_columns(ns=pl.lit(0.0))]
    for rank, alone in by_rank(phases.filter(pl.col("part") == "memory").sort("rank", "start_ns")):
        if rank in copies:
            start, end = alone["start_ns"].to_numpy(), alone["end_ns"].to_numpy()
            found.append(alone.with_columns(ns=pl.Series(covered_ns(start, end, copies[rank]))))
    rows = pl.concat(found)
    return grid, rows, sums(grid, rows, "ns")


def _copies(kernels: pl.DataFrame) -> pl.DataFrame:
    return kernels.filter(pl.col("work") == MEMORY, pl.col("name").str.contains(HOST_COPIES))


def _lost(grid: StepGrid, copies: pl.DataFrame, exposed: Floats) -> Estimate:
    """Return how much shorter the busiest rank's step would be without them.

    Of a single step each copy is a sample, those of all ranks.
    """
    of_steps = grid.busy.max(axis=0) - (grid.busy - exposed).max(axis=0)
    if len(of_steps) > 1:
        return estimates_by_step(of_steps[np.newaxis], TRIM)[0]
    return estimate_of_pieces(of_steps, copies.filter(pl.col("ns") > 0)["ns"].to_numpy())


def _advice(pageable: float, *, is_to_host: bool) -> str:
    if is_to_host:
        return text("Keep losses, metrics and states on the device, and fetch them every n steps only.")
    said = text(
        "Copy the next batch, or the next layers that are offloaded, on a stream of their own while this one is "
        "computed."
    )
    if pageable < _MOSTLY:
        return said
    unpinned = text(
        "{share} of the time is of memory that is not pinned: pin_memory=True in the DataLoader, and non_blocking=True "
        "in .to().",
        share=percent(pageable),
    )
    return joined(" ", (unpinned, said))
