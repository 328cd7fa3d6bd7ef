"""The allocator of a device asks the driver for memory while the job trains, and the host waits meanwhile.

**Signal.** In a profiler's trace, the calls by which the host asks the driver for memory or gives it back
(`cudaMalloc`, `cudaFree`, pinned host memory, `cuMemMap`, and HIP's): each takes away as much of the host's lead as it
lasts, and what the device then idles for work launched late is its cost, as for `host_sync`. In a recorded run, the
growth of the allocator's count of retries, which are such calls after it has given back all that it kept: the steps in
which it grew against those of the same rank in which it did not. Reported where the job loses `min_fraction` of the
step by it.

**Why it costs time.** PyTorch keeps memory to hand it out again without the driver. Near the limit, or when what it
keeps is in pieces that do not fit, it has to wait for the device, give memory back and ask again: milliseconds each
time, while nothing is launched. The next such time may be an out-of-memory error.

**False positives.** The first steps after a change of shapes fill the allocator once; only what comes back counts.
Where a trace has nearly all of it in few of its steps it is not checked: whether it recurs is not known. Memory is
read about once a second: a step is taken to hold the retries of the second that it ends in.

**What to try.** `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`; no `torch.cuda.empty_cache()` in the loop; sizes
that repeat (pad to a few lengths); a smaller batch, activation checkpointing, `zero_grad(set_to_none=True)`; drop
references to large tensors before the next step allocates.

**Source.** PyTorch's CUDA caching allocator, `num_alloc_retries` of `torch.cuda.memory_stats`. Thresholds are ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, judged_grid, longest_rows, price, visible
from rankscope.analysis.metrics.launch_queue import host_gaps, loss_of_gaps, lost_lead
from rankscope.analysis.metrics.step_matrix import (
    Floats,
    StepGrid,
    estimate,
    nearly_all_in,
    over_occurrences,
    sums,
)
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.kernels import MEMORY_CALLS
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import every_nth, named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("memory",),
    explains=("host_sync", "slow_rank", "host_bound", "gradual_slowdown"),
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    parts=("host",),
    lost_as=AS_WAITING,
)

_LEAST_STEPS = 1  # each holds many calls
_LEAST_GAP_NS = 20_000
_RETRIES, _RESERVED, _TOTAL = "cuda_alloc_retries", "cuda_reserved_bytes", "cuda_total_bytes"
_IN_PIECES = "cuda_inactive_split_bytes"
_MANY_PIECES = 0.1  # share of the reserved memory
_NEAR = 0.9  # share of the device's memory
_GIB = 1 << 30


def detect(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    launches: pl.DataFrame | None = None,
    memory: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Return the cost of calls for memory, from the devices' idle time or from the steps with retries."""
    if kernels is not None and launches is not None:
        return _of_calls(breakdown, phases, kernels, launches, min_fraction)
    return _of_retries(breakdown, steps, _readings(memory), min_fraction)


def resolution_ns(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    launches: pl.DataFrame | None = None,
    memory: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> int:
    """Return the smallest loss per step that would have been reported."""
    if kernels is not None and launches is not None:
        grid, costly, cost = _idle(breakdown, phases, kernels, launches)
        lost = loss_of_gaps(grid, costly, cost)
        return visible(grid, max(min_fraction * grid.step_ns, lost.half_width_ns))
    readings = _readings(memory)
    grid, retried = _retried(breakdown, steps, readings)
    excess = _beyond_usual(grid, retried, readings)
    return visible(grid, max(min_fraction * grid.step_ns, *(estimate(row).half_width_ns for row in excess)))


def _of_calls(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame, min_fraction: float
) -> list[Finding]:
    grid, costly, cost = _idle(breakdown, phases, kernels, launches)
    lost = loss_of_gaps(grid, costly, cost)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        _check_once(grid, cost, min_fraction)
        return []
    ranks = grid.only(cost.mean(axis=1) >= lost.ns / 2).ranks
    costly = costly.filter(pl.col("rank").is_in(ranks))
    calls = costly.group_by("name").agg(pl.col("cost_ns").sum()).sort("cost_ns", "name", descending=[True, False])
    names = calls["name"].head(2).to_list()
    return [
        Finding(
            detector="memory_pressure",
            title=text(
                "Asking the driver for memory ({calls}) makes the devices of {ranks} idle for {lost} per step",
                calls=", ".join(names),
                ranks=named("rank", ranks),
                lost=duration(lost.ns),
            ),
            where=names[0],
            advice=text(
                "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, do not empty the cache in the loop, keep "
                "sizes the same from step to step; if the device is nearly full, a smaller batch or activation "
                "checkpointing."
            ),
            ranks=ranks,
            evidence=longest_rows(costly.select("rank", start_ns="gap_ns", end_ns="next_ns"), "kernels"),
            **price(grid, lost, lost.ns),
        )
    ]


def _check_once(grid: StepGrid, cost: Floats, min_fraction: float) -> None:
    """Not resolvable where that much is lost in few of the steps: whether it comes back is not known."""
    of_step = cost.max(axis=0)
    once = nearly_all_in(of_step)
    if once and of_step.mean() >= min_fraction * grid.step_ns:
        raise NotResolvable(
            text(
                "the host asks the driver for memory for {lost} of the mean step, nearly all of it in {steps}, and a "
                "longer capture would show whether it recurs",
                lost=duration(float(of_step.mean())),
                steps=named("step", [grid.steps[at] for at in once]),
            ),
            unclear=True,
        )


def _idle(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame
) -> tuple[StepGrid, pl.DataFrame, Floats]:
    """Return the grid, the gaps that hosts without these calls would have covered, and ns of them by (rank, step)."""
    if kernels["launch_ns"].null_count() == len(kernels):
        raise NotResolvable(text("the trace does not hold the calls that launched the device's work"))
    grid = judged_grid(breakdown, _LEAST_STEPS)
    calls = launches.filter(pl.col("name").str.contains(MEMORY_CALLS))
    costly = lost_lead(host_gaps(phases, kernels), calls, _LEAST_GAP_NS)
    return grid, costly, sums(grid, costly, "cost_ns")


def _readings(memory: pl.DataFrame | None) -> pl.DataFrame:
    """Return the readings of the ranks' allocators; not resolvable where there are none."""
    if memory is None or memory.filter(pl.col("name") == _RETRIES).is_empty():
        raise NotResolvable(text("no allocator of a device was seen; the ranks' own memory says nothing about it"))
    return memory


def _of_retries(
    breakdown: pl.DataFrame, steps: pl.DataFrame, memory: pl.DataFrame, min_fraction: float
) -> list[Finding]:
    grid, retried = _retried(breakdown, steps, memory)
    excess = _beyond_usual(grid, retried, memory)
    means = excess.mean(axis=1)
    most = int(means.argmax())
    when = retried[most] > 0
    if means[most] < min_fraction * grid.step_ns or not (lost := over_occurrences(excess[most], when)).clear:
        return []
    rank, ranks = grid.ranks[most], grid.only(means >= means[most] / 2).ranks
    shown = tuple(np.array(grid.steps)[when].tolist())
    return [
        Finding(
            detector="memory_pressure",
            title=text(
                "CUDA caching allocator retries on {ranks} {often}, which costs {time} each time",
                ranks=named("rank", ranks),
                often=every_nth(shown, len(when)),
                time=duration(excess[most][when].mean()),
            ),
            where=_state(memory, rank),
            advice=_advice(memory, rank),
            ranks=ranks,
            steps=shown,
            **price(grid, lost, lost.ns),
        )
    ]


def _retried(breakdown: pl.DataFrame, steps: pl.DataFrame, memory: pl.DataFrame) -> tuple[StepGrid, Floats]:
    """Return the grid, and how often the allocator retried in each (rank, step).

    The growth between two readings is that of all steps which end between them.
    """
    grid = judged_grid(breakdown, ENOUGH_STEPS)
    counts = memory.filter(pl.col("name") == _RETRIES).sort("rank", "time_ns")
    grown = counts.select("rank", "time_ns", retries=pl.col("value").diff().over("rank").clip(lower_bound=0))
    of_step = steps.sort("end_ns").join_asof(
        grown.sort("time_ns"),
        left_on="end_ns",
        right_on="time_ns",
        by="rank",
        strategy="forward",
        check_sortedness=False,
    )
    return grid, sums(grid, of_step.drop_nulls("retries"), "retries")


def _beyond_usual(grid: StepGrid, retried: Floats, memory: pl.DataFrame) -> Floats:
    """Own time by (rank, step) beyond the rank's median in steps without retries; 0 in those and on other ranks."""
    excess = np.zeros_like(retried)
    for row in np.flatnonzero(retried.any(axis=1)):
        when = retried[row] > 0
        if (~when).sum() < ENOUGH_STEPS:
            counts = memory.filter(pl.col("rank") == grid.ranks[row], pl.col("name") == _RETRIES)["value"]
            often = text("{times} times in total", times=counts[-1] - counts[0])
            state = _state(memory, grid.ranks[row])
            why = text("in too few steps it did not, so the cost is unknown; a torch.profiler trace shows it")
            raise NotResolvable(
                text(
                    "the allocator of rank {rank} retried {often} ({state}): {why}",
                    rank=grid.ranks[row],
                    often=often,
                    state=state,
                    why=why,
                )
            )
        usual = float(np.median(grid.own[row][~when]))
        excess[row, when] = grid.own[row][when] - usual
    return excess


def _state(memory: pl.DataFrame, rank: int) -> str:
    """`78.9 of 79.1 GiB reserved, 12.0 GiB of it in pieces`, as far as it was recorded."""
    reserved, total, pieces = _highest(memory, rank)
    if not reserved:
        return "memory"
    of_all = text(" of {total:.1f}", total=total / _GIB) if total else ""
    in_pieces = text(", {pieces:.1f} GiB of it in pieces", pieces=pieces / _GIB) if pieces else ""
    return text(
        "{reserved:.1f}{of_all} GiB reserved{in_pieces}", reserved=reserved / _GIB, of_all=of_all, in_pieces=in_pieces
    )


def _advice(memory: pl.DataFrame, rank: int) -> str:
    reserved, total, pieces = _highest(memory, rank)
    said = []
    if reserved and pieces >= _MANY_PIECES * reserved:
        said.append(
            text(
                "{share} of its reserved memory is fragmented and unused: set "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and keep sizes the same from step to step.",
                share=percent(pieces / reserved),
            )
        )
    if total and reserved >= _NEAR * total:
        said.append(text("The device is nearly full: a smaller batch, activation checkpointing, or more shards."))
    return joined(" ", said) or text("Do not empty the cache in the loop, and keep sizes the same from step to step.")


def _highest(memory: pl.DataFrame, rank: int) -> tuple[int, int, int]:
    """Return the most bytes that a rank's allocator had reserved, that its device has, and that lay in unused parts."""
    of_rank = memory.filter(pl.col("rank") == rank).group_by("name").agg(pl.col("value").max())
    most = dict(of_rank.select("name", "value").iter_rows())
    return most.get(_RESERVED, 0), most.get(_TOTAL, 0), most.get(_IN_PIECES, 0)
