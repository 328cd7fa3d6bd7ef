"""The host waits for its device, and falls behind it: the device then idles for work that is launched late.

**Signal.** The host's lead is followed over the capture. Each call that returns only when the device has caught up
(`cudaStreamSynchronize`, `cudaDeviceSynchronize`, `cudaEventSynchronize`, a blocking `cudaMemcpy`, a `cudaMemcpyAsync`
to pageable memory, and HIP's) took away as much lead as it lasted; each time in which the device idled for work
launched late would have used up as much of it. What the lead would have covered is what the calls cost; what the
busiest rank would be shorter without it is the loss, reported above `min_fraction` of the step. Gaps of less than
`min_ns` are not counted, nor are ranks whose host launches for three quarters of the time in which its device works, or
longer: it has no lead to lose, and is slow by itself (`host_bound`). Nor is a rank counted that waits as often as the
others do and loses twice as much: what comes after the call takes it longer than them (`slow_rank`). Time in which
the host calls nothing for 5 ms or longer, once per step, is not counted: it does something else (`host_bound`).

**Why it costs time.** A host that launches ahead hides its own slowness behind the device's work. A synchronisation
empties the queue: whatever Python does next, the device waits for it.

**False positives.** The host would have to run ahead as far as it waited, which a full launch queue or memory may not
allow. A call in a thread whose launches no other thread waits for holds up that thread only. A profiler slows the host
down, so that more idle time follows each call than without it.

**What to try.** No `.item()`, `.cpu()`, `float(tensor)`, `if tensor` or `print` of a tensor in the loop, or only every
n steps: keep losses on the device and read them late. Indexing with a mask, `nonzero` and `unique` need a size from the
device: `torch.where`, or a fixed size, does not. Copies with `non_blocking=True` from and to pinned memory.

**Source.** HTA's idle time breakdown for work that was launched late; that of it which follows from synchronisations is
ours: a lead that calls take away and late launches use up, never below zero (Lindley's recursion).
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import judged_grid, price, visible
from rankscope.analysis.metrics.launch_queue import host_gaps, launching, loss_of_gaps, lost_lead, without_calls
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, sums
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    explains=("host_bound", "slow_rank"),
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    parts=("host",),
    lost_as=("idle", "wait"),
)

_AS_OFTEN, _FAR_MORE = 1.5, 2.0  # times what is usual of a rank
_ONCE = 1.5  # times per step, at most
_NO_LEAD = 0.75  # of what its device works: a host that launches for so long is slow by itself
_LEAST_STEPS = 1  # a profiler's capture has few, and each holds many gaps

# By the operator that waited: how it is written in a script.
_WRITTEN = {
    "aten::item": text(".item(), float(tensor) or `if tensor`"),
    "aten::_local_scalar_dense": text(".item(), float(tensor) or `if tensor`"),
    "aten::is_nonzero": "`if tensor`",
    "aten::nonzero": text("nonzero(), or an index that is a mask"),
    "aten::masked_select": "masked_select()",
    "aten::unique": "unique()",
    "aten::_unique2": "unique()",
    "aten::copy_": text(".cpu() or .to() without non_blocking=True"),
    "aten::_to_copy": text(".cpu() or .to() without non_blocking=True"),
    "aten::to": text(".cpu() or .to() without non_blocking=True"),
}


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame,
    launches: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_ns: int = 20_000,
) -> list[Finding]:
    """Return the loss by hosts that wait for their devices, as one finding."""
    grid, costly, cost = _costs(breakdown, phases, kernels, launches, min_ns)
    lost = loss_of_gaps(grid, costly, cost)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    ranks = grid.only(cost.mean(axis=1) >= lost.ns / 2).ranks
    costly = costly.filter(pl.col("rank").is_in(ranks))
    count = costly.select("rank", "start_ns").n_unique() / len(ranks) / len(grid.steps)
    places = _places(costly, regions)
    by_place = places.group_by("place", "operator", "name").agg(pl.col("cost_ns").sum())
    place, operator, call, ns = by_place.sort("cost_ns", "place", "operator", "name").row(-1)
    share = ns / places["cost_ns"].sum()
    where = ", ".join(dict.fromkeys(word for word in (place, operator, call) if word))
    return [
        Finding(
            detector="host_sync",
            title=text(
                "The host waits for the device {often} per step on {ranks}, and the device then {lost} for the host",
                often=_times(count),
                ranks=named("rank", ranks),
                lost=duration(lost.ns),
            ),
            where=where,
            advice=text(
                "{share} of this comes after {call}{place}. Take it out of the loop, or do it every n "
                "steps only; keep values on the device until they are needed.",
                share=percent(share),
                call=_written(operator, call),
                place=text(" in {place}", place=place) if place else "",
            ),
            ranks=ranks,
            evidence=_longest(costly),
            **price(grid, lost, lost.ns),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame,
    launches: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_ns: int = 20_000,
) -> int:
    """Return the smallest idle time per step that would have been reported."""
    grid, costly, cost = _costs(breakdown, phases, kernels, launches, min_ns)
    lost = loss_of_gaps(grid, costly, cost)
    return visible(grid, max(min_fraction * grid.step_ns, lost.half_width_ns))


def _costs(
    breakdown: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame, min_ns: int
) -> tuple[StepGrid, pl.DataFrame, Floats]:
    """Return the grid, the calls with the gaps that they cost, and what they cost, an array of (rank, step) in ns."""
    if kernels["launch_ns"].null_count() == len(kernels):
        raise NotResolvable(text("the trace does not hold the calls that launched the device's work"))
    calls = launches.filter("waits")
    if calls.is_empty():
        raise NotResolvable(text("the trace holds no call that waits for a device, not even the profiler's own"))
    grid = judged_grid(breakdown, _LEAST_STEPS)
    costly = lost_lead(host_gaps(phases, kernels), calls, min_ns)
    costly = costly.with_columns(stall=pl.Series(without_calls(costly, kernels, launches)).cast(pl.Int64))
    is_once = (pl.col("stall") > 0).sum().over("rank") <= _ONCE * len(grid.steps)
    launched_ns = pl.col("next_ns") - pl.col("gap_ns") - pl.when(is_once).then("stall").otherwise(0)
    costly = costly.with_columns(cost_ns=pl.min_horizontal("cost_ns", launched_ns)).drop("stall")
    costly = costly.filter(pl.col("cost_ns") >= min_ns)
    has_lead = launching(grid, phases, launches) < _NO_LEAD * (grid.busy - grid.of("host")).mean(axis=1)
    has_lead &= ~_stalls(grid, calls, sums(grid, costly, "cost_ns").mean(axis=1))
    costly = costly.filter(pl.col("rank").is_in(grid.only(has_lead).ranks))
    return grid, costly, sums(grid, costly, "cost_ns")


def _stalls(grid: StepGrid, calls: pl.DataFrame, cost: Floats) -> NDArray[np.bool_]:
    """Return the ranks that wait for their devices as often as others, and lose far more: by what comes after."""
    made = dict(calls.group_by("rank").len().iter_rows())
    count = np.array([made.get(rank, 0) for rank in grid.ranks])
    usual = (len(count) - 1) // 2
    as_often = count <= _AS_OFTEN * np.sort(count)[usual]
    return np.asarray(as_often & (cost > _FAR_MORE * np.sort(cost)[usual]))


def _places(costly: pl.DataFrame, regions: pl.DataFrame | None) -> pl.DataFrame:
    """Return the calls with `operator` and `place`.

    The innermost of each that holds the call on its thread, else empty.
    """
    if regions is None:
        return costly.with_columns(operator=pl.lit(""), place=pl.lit(""))
    held_by = {
        column: pl.Series(_innermost(costly, regions.filter(pl.col("kind") == kind)), dtype=pl.String)
        for column, kind in (("operator", "operator"), ("place", "user"))
    }
    return costly.with_columns(**held_by)


def _innermost(calls: pl.DataFrame, regions: pl.DataFrame) -> list[str]:
    """By call the name of the region that begins last of those that hold it on its thread; empty where there is none.

    Of a trace's regions only those are gone through in which a call begins.
    """
    columns = ("rank", "thread", "start_ns", "end_ns", "name")
    begins = calls.select("rank", "thread", call_ns="start_ns").unique().sort("call_ns")
    holders = (
        regions.select(columns)
        .drop_nulls("thread")
        .sort("start_ns")
        .join_asof(
            begins,
            left_on="start_ns",
            right_on="call_ns",
            by=["rank", "thread"],
            strategy="forward",
            check_sortedness=False,
        )
        .filter(pl.col("call_ns") <= pl.col("end_ns"))
    )
    rows = pl.concat(
        [
            holders.select(*columns, call=pl.lit(None, pl.Int64)),
            calls.select(*columns).with_columns(call=pl.int_range(pl.len(), dtype=pl.Int64)),
        ]
    ).sort(
        *("rank", "thread", "start_ns", pl.col("call").is_not_null(), "end_ns"),
        descending=[False, False, False, False, True],
        maintain_order=True,
    )
    held, still_open, thread = [""] * len(calls), list[tuple[int, str]](), None
    for *of, start, end, name, call in rows.iter_rows():
        if of != thread:
            still_open, thread = [], of
        while still_open and still_open[-1][0] < start:
            still_open.pop()
        if call is not None:
            held[call] = next((holder for until, holder in reversed(still_open) if until >= end), "")
            continue
        while still_open and still_open[-1][0] <= end:  # this one begins later, and holds what that one holds
            still_open.pop()
        still_open.append((end, name))
    return held


def _written(operator: str, call: str) -> str:
    if operator in _WRITTEN:
        return f"{_WRITTEN[operator]} ({operator}, {call})"
    return f"{operator} ({call})" if operator else call


def _times(count: float) -> str:
    return text("{count:.3g} times", count=count) if round(count, 2) != 1 else text("once")


def _longest(costly: pl.DataFrame) -> tuple[Evidence, ...]:
    """Return the costliest gap on each of the first four ranks, from the call before it until the device works."""
    rows = costly.sort("cost_ns", descending=True).unique("rank", keep="first", maintain_order=True).sort("rank")
    return tuple(
        Evidence(
            table="kernels",
            rank=rank,
            start_ns=start,
            end_ns=end,
            note=text("costliest: {cost} after {name}", cost=duration(cost), name=name),
        )
        for rank, start, end, cost, name in rows.head(4)
        .select("rank", "start_ns", "next_ns", "cost_ns", "name")
        .iter_rows()
    )
