"""Saving checkpoints stops the ranks for a large share of the job's time.

**Signal.** The checkpoint part of the step: the main thread is inside `torch.save`,
`torch.distributed.checkpoint.save` or `async_save`, safetensors' `save_file` or Megatron-Core's
`dist_checkpointing.save`, and not blocked on communication. Each step counts with its longest over the ranks, since
the others wait for that one. Reported where at least `min_times` checkpoints were seen and they cost more than
`min_fraction` of all analyzed time; of a profiler's capture, which has few steps, as likely where a single one costs
more than `min_fraction_once` of it. A step that a checkpoint made long is analyzed like any other.

**Why it costs time.** Nothing is launched while the state is copied, serialised and written. Where one rank saves for
all, the others wait in their next collective.

**False positives.** How often a job saves is unknown from a short recording: save more often while recording than
otherwise, and this looks worse than it is. What is waited for elsewhere, such as the future of an asynchronous save,
is not seen as a checkpoint.

**What to try.** `torch.distributed.checkpoint.async_save`, which holds the ranks only while the state is copied to host
memory; every rank its own shard instead of one rank for all; a local disk first; fewer checkpoints: half as many cost
half.

**Source.** CheckFreq (FAST 2021) saves as often as 3.5 % of the time allows; Check-N-Run (NSDI 2022) for copying first
and writing in the background. The threshold of 5 % is ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_regions, price
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, over_occurrences
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import every_nth, named
from rankscope.analysis.text.units import duration
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("checkpoint",),
    per_rank=True,
    explains=("pipeline_bubble",),
    parts=("checkpoint",),
    lost_as=("checkpoint", *AS_WAITING),
)

_MAIN_THREAD = 0
_ASYNCHRONOUS = "async_save"


def detect(
    breakdown: pl.DataFrame,
    regions: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_times: int = 2,
    min_fraction_once: float = 0.10,
) -> list[Finding]:
    """Name the ranks whose checkpoints stop the job, in one finding."""
    grid, saving = _saving(breakdown, min_times, None if kernels is None else min_fraction_once)
    longest = saving.max(axis=0)
    shows = longest > 0
    if longest.mean() < min_fraction * grid.step_ns:
        return []
    per_rank = saving.mean(axis=1)
    ranks = tuple(rank for rank, mean in zip(grid.ranks, per_rank, strict=True) if mean >= per_rank.max() / 2)
    steps = tuple(np.array(grid.steps)[shows].tolist())
    call = _longest_call(regions, ranks)
    return [
        Finding(
            detector="checkpoint_stall",
            title=text(
                "Saving a checkpoint ({call}) stops {ranks} for {time} {often}",
                call=call,
                ranks=named("rank", ranks),
                time=duration(longest[shows].mean()),
                often=every_nth(steps, len(shows)),
            ),
            where=call,
            advice=_advice(call, ranks, grid, grid.ranks[int(per_rank.argmax())]),
            ranks=ranks,
            steps=() if shows.all() else steps,
            confidence="likely" if shows.sum() < min_times else "",
            evidence=longest_regions(regions, "checkpoint", ranks),
            fix="checkpoint",
            **price(grid, over_occurrences(longest, shows)),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.05, min_times: int = 2) -> int:
    """Return the smallest mean time per step that would have been reported."""
    return round(min_fraction * _saving(breakdown, min_times)[0].step_ns)


def _saving(breakdown: pl.DataFrame, min_times: int, once: float | None = None) -> tuple[StepGrid, Floats]:
    """Return the grid, and ns of each (rank, step) in checkpoints.

    Not resolvable where too few were seen to say how often, unless they cost more than the share `once` of the steps.
    """
    grid = judged_grid(breakdown, FEW_STEPS)
    saving = grid.of("checkpoint")
    longest = saving.max(axis=0)
    times = int((longest > 0).sum())
    if not times:
        raise NotResolvable(text("no call that saves a checkpoint was seen in the analyzed steps"))
    if times < min_times and (once is None or longest.mean() < once * grid.step_ns):
        seen = text(
            "{steps} analyzed steps hold one checkpoint, of {length}",
            steps=len(grid.steps),
            length=duration(longest.max()),
        )
        raise NotResolvable(text("{seen}: how often the job saves one is unknown", seen=seen))
    return grid, saving


def _longest_call(regions: pl.DataFrame, ranks: tuple[int, ...]) -> str:
    """Return the name of the call that takes most of the main threads' time."""
    saves = regions.filter(
        pl.col("kind") == "checkpoint", pl.col("thread") == _MAIN_THREAD, pl.col("rank").is_in(ranks)
    )
    by_name = saves.group_by("name").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")).sort("ns", "name")
    return str(by_name["name"][-1]) if len(by_name) else "checkpoint"


def _advice(call: str, ranks: tuple[int, ...], grid: StepGrid, slowest: int) -> str:
    said = (
        text(
            "An asynchronous save holds the rank while it copies the state to host memory: keep the stager and its "
            "pinned memory from one checkpoint to the next."
        )
        if _ASYNCHRONOUS in call
        else text("Use torch.distributed.checkpoint.async_save: it holds the ranks only while the state is copied.")
    )
    if len(ranks) > 1:
        said += text(" Rank {slowest} takes longest.", slowest=slowest)
    elif len(grid.ranks) > 1:
        said += text(
            " Let each rank save its own shard, and compare where rank {slowest} writes to with the others.",
            slowest=slowest,
        )
    return text("{said} Half as many checkpoints cost half.", said=said)
