"""The host launches the device's work too late, and the device is idle.

**Signal.** Device idle time before work whose launch call began only after the device was idle (the part `host`). A
kernel that only communicates meanwhile does not change that, if it still runs when the late work begins: nothing waited
for it; but no more of this time counts than there is work that could begin earlier. What the busiest rank would be
shorter without this time is the loss, reported above `min_fraction` of the step if it is not one rank's: half of it
would stay with that rank's host quick, or at least half of the ranks would hold the job up next, for a quarter of it or
more: their devices idle as well, or their hosts launch for so long. It is analyzed without the ranks that `slow_rank`
found if without them only what may be chance is left, or less than half. Their hosts are as slow as the others', and it
is not, if the pace of their calls explains half of it: one has to be last, and while the others wait for it their hosts
run ahead. What the host did in these gaps is split into: asking the driver for memory, calling nothing for 5 ms or
longer, having just waited for the device (a synchronisation drains the queue), the launch calls themselves, and all
else.

Of a capture of 3 to 20 steps also stalls are reported that come in a third of them at most and hold 80 % of the loss:
of several ranks' hosts, at once or one after the other, not in the first step alone. Whether they recur is not known,
so that they are likely; the title names the steps.

Without a profiler, CUDA events give the host run-ahead. While the device has work that was enqueued before, it
does not wait for the host; so what it can idle at most in a phase is the time from its coming to the mark before until
the host has enqueued the last of the phase's work. If that is below `min_fraction` of the step on each rank, the host
is healthy. Else it is not checked; the reason gives the host-bound share of the step, or the run-ahead: what
it costs only a profiled window shows.

**Why it costs time.** The host normally queues work ahead of the device. When it falls behind, every microsecond of
Python, of a driver call or of waiting for a result is a microsecond in which the device does nothing.

**False positives.** A profiler that records shapes and stacks slows the host down by a third to two thirds, the device
not at all: a trace made with them looks more host-bound than the job is. Input, garbage collection and compilation
have checks of their own and are not counted here; nor is what only one rank loses (`slow_rank`).

**What to try.** Many short kernels: `torch.compile`, CUDA graphs, larger batches, `fused=True` for the optimizer.
Synchronisations: no `.item()`, `.cpu()`, `print` of a tensor or `torch.cuda.synchronize()` in the loop, or only every
n steps. Memory calls: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, no `torch.cuda.empty_cache()` in the loop,
sizes that repeat.

**Source.** The rule on the launch is HTA's idle time breakdown. Threshold ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import judged_grid, longest_rows, price, visible
from rankscope.analysis.metrics.device_lead import idle_at_most_ns, paced_by_host
from rankscope.analysis.metrics.intervals import covered_ns
from rankscope.analysis.metrics.launch_queue import launching, without_calls
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, StepGrid, estimate_of_pieces, sums
from rankscope.analysis.model.finding import Finding, NotChecked
from rankscope.analysis.model.kernels import COMMUNICATION, MEMORY_CALLS
from rankscope.analysis.model.parts import BLOCKED, UNSEEN
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import how_to_profile, named
from rankscope.analysis.text.units import duration, percent, percent_at_most
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    explains=("slow_rank",),
    slows_all_alike=True,
    lost_as=("idle", "wait", "compile"),
    own_loss="idle",
)

_LEAST_STEPS = 1  # a profiler's capture has few, and each holds many gaps
_LENGTH = pl.col("end_ns") - pl.col("start_ns")
_BEFORE_LAUNCH = pl.min_horizontal("end_ns", "launch_ns")
_LAUNCH = r"Launch|^(cuda|hip)(Memcpy|Memset)\w*Async"
_STAYS = 0.5  # share of the loss that is there without the rank that makes most of it: hosts take turns
_AS_LATE = 0.25  # of the loss: a rank that would delay the job next for so long has the same slow host
_REMAINS = 0.5  # share of the loss that is there without the ranks that others wait for
_MOSTLY = 0.5  # of the step, or of the idle time
_MUCH = 0.25  # share of the idle time from which a cause is worth its advice
_STALL_STEPS, _STALL_SHARE, _STALL_MOST = (3, 20), 1 / 3, 0.8
_NONE = 0.01  # share of it up to which communication beside it is not said: the table has it as idle

_ADVICE = {
    "memory": text(
        "ask the driver for memory (cudaMalloc, cudaFree): set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
        "do not empty the cache in the loop, keep sizes the same"
    ),
    "sync": text(
        "come after the host waited for the device: take .item(), .cpu(), printing of tensors and "
        "synchronize() out of the loop"
    ),
    "launch": text(
        "are launch calls: fewer and larger kernels (torch.compile, CUDA graphs, fused optimizer, larger batch)"
    ),
    "stall": text(
        "are stalls of 5 ms or more in which the host launches nothing: it may wait for input, save a checkpoint, "
        "compile, evaluate, collect garbage or log, which a capture with Python stacks shows (with_stack=True; nsys "
        "--python-sampling=true)"
    ),
    "other": text("are Python and framework code between launches: torch.compile, CUDA graphs, less work per operator"),
}


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    launches: pl.DataFrame | None = None,
    marks: pl.DataFrame | None = None,
    slow_rank: Sequence[Finding] | NotChecked = (),
    *,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Return the loss by late hosts, of at least half of the ranks, as one finding."""
    if kernels is None:
        _check_lead(breakdown, marks, min_fraction)
        return []
    if launches is None:
        raise NotResolvable(text("the calls that launch the device's work were not recorded"))
    beside = _late_beside_communication(phases, kernels)
    grid = _launched(breakdown, kernels)
    loss = _loss(grid, phases, beside, launches)
    is_late = np.isin(grid.ranks, _named(slow_rank))
    if is_late.any() and not is_late.all():
        rest = _loss(grid.only(~is_late), phases, beside, launches)
        remains = max(rest.lost.ns, loss.pace_ns[is_late].min()) >= _REMAINS * loss.lost.ns
        loss = loss if rest.lost.clear and remains else rest
    grid, lost, holds_up_ns = loss.grid, loss.lost, loss.holds_up_ns
    if not loss.is_shared or lost.ns < min_fraction * grid.step_ns:
        stalls = _stalls(grid, beside, min_fraction)
        return [] if stalls is None else [_of_stalls(stalls, grid, phases, kernels, launches)]
    ranks = grid.only(holds_up_ns > 0).ranks
    idle_ns, whole_ns = (ns.mean(axis=1)[holds_up_ns > 0] for ns in (grid.of("host"), _late(grid, beside)))
    idle = phases.filter(pl.col("part") == "host")
    beside = beside.filter(pl.col("certain_ns") > 0).select(idle.columns)
    gaps = pl.concat([idle, beside]).filter(pl.col("rank").is_in(ranks)).sort("rank", "start_ns")
    place = _place(idle)
    causes = _causes(gaps, kernels, launches)
    communicates = idle_ns.sum() < (1 - _NONE) * whole_ns.sum()
    return [
        Finding(
            detector="host_bound",
            title=text(
                "Host-bound on {ranks}: the device {idles} for {late} per step before work that was launched late",
                idles=text("is idle or only communicates") if communicates else text("is idle"),
                ranks=named("rank", ranks),
                late=_longest(whole_ns if communicates else idle_ns),
            ),
            where=place,
            advice=_advice(causes, place),
            ranks=ranks,
            evidence=longest_rows(gaps, "kernels"),
            fix="host",
            **price(grid, lost),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    marks: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> int:
    """Return the smallest idle time per step that would have been reported.

    Idle time of unknown launch may be the host's.
    """
    if kernels is None:
        return _check_lead(breakdown, marks, min_fraction)
    grid = _launched(breakdown, kernels)
    lost, _ = _lost(grid, phases, _late_beside_communication(phases, kernels))
    unseen = phases.filter(pl.col("part") == "other", pl.col("label") == UNSEEN)
    unseen_ns = unseen.select(_LENGTH.sum()).item() / len(grid.ranks) / len(grid.steps)
    return visible(grid, max(min_fraction * grid.step_ns, lost.half_width_ns, unseen_ns))


def _check_lead(breakdown: pl.DataFrame, marks: pl.DataFrame | None, min_fraction: float) -> int:
    """Return an upper bound of a device's idle time for want of work, ns per step. Not resolvable if that is large."""
    if marks is None:
        raise NotResolvable(text("no work of a device was recorded"))
    grid = judged_grid(breakdown)
    idle_ns, least_ns = idle_at_most_ns(grid, marks), min_fraction * grid.step_ns
    if idle_ns < least_ns:
        return round(least_ns)
    paced, most = paced_by_host(marks), percent_at_most(idle_ns / grid.step_ns)
    if paced >= _MOSTLY:
        raise NotResolvable(
            text(
                "host-bound in {paced} of the step: the launch queue is empty, because the host is slow or waits "
                "for the device (.item(), synchronize()); devices may be idle for up to {most} of the step, and a "
                "profiled window measures the cost: {how}",
                paced=percent(paced),
                most=most,
                how=how_to_profile(),
            )
        )
    raise NotResolvable(
        text(
            "host run-ahead is {ahead} (median), less than the phases take: devices may be idle for up to {most} of "
            "the step; a profiled window shows whether they are: {how}",
            ahead=duration(float(np.median(marks["ahead_ns"].to_numpy()))),
            most=most,
            how=how_to_profile(),
        )
    )


@dataclass(frozen=True, slots=True)
class _Stalls:
    """The steps in which hosts stall, the ranks that do, and the loss: the mean over all steps."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    lost: Estimate


def _stalls(grid: StepGrid, beside: pl.DataFrame, min_fraction: float) -> _Stalls | None:
    """Return the stalls of several hosts in few steps of a capture, if these are where it loses most."""
    count, late = len(grid.steps), _late(grid, beside)
    if not _STALL_STEPS[0] <= count <= _STALL_STEPS[1]:
        return None
    busy = grid.busy - grid.of("host") + late
    lost = busy.max(axis=0) - (busy - late).max(axis=0)
    in_steps = np.flatnonzero(lost >= lost.max() / 2)
    several = len(in_steps) <= _STALL_SHARE * count and (in_steps > 0).any()
    if not several or lost[in_steps].sum() < _STALL_MOST * lost.sum() or lost.mean() < min_fraction * grid.step_ns:
        return None
    ranks = np.flatnonzero((late[:, in_steps] >= lost[in_steps] / 2).any(axis=1))
    if len(ranks) < 2:  # the others wait for it: that is `slow_rank`'s
        return None
    mean = float(lost.mean())
    return _Stalls(
        steps=tuple(grid.steps[at] for at in in_steps),
        ranks=tuple(grid.ranks[at] for at in ranks),
        lost=Estimate(mean, mean),
    )


def _of_stalls(
    stalls: _Stalls, grid: StepGrid, phases: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame
) -> Finding:
    gaps = phases.filter(
        pl.col("part") == "host", pl.col("rank").is_in(stalls.ranks), pl.col("step").is_in(stalls.steps)
    ).sort("rank", "start_ns")
    place = _place(gaps)
    longest = gaps.group_by("rank", "step").agg(ns=_LENGTH.sum())["ns"].max()
    return Finding(
        detector="host_bound",
        title=text(
            "Hosts stall in {steps}: the devices of {ranks} are idle for up to {late} in a step before work that was "
            "launched late",
            steps=named("step", stalls.steps),
            ranks=named("rank", stalls.ranks),
            late=duration(float(longest) if isinstance(longest, int) else 0.0),
        ),
        where=place,
        advice=_advice(_causes(gaps, kernels, launches), place),
        ranks=stalls.ranks,
        steps=stalls.steps,
        evidence=longest_rows(gaps, "kernels"),
        confidence="likely",
        fix="host",
        **price(grid, stalls.lost),
    )


def _place(gaps: pl.DataFrame) -> str:
    """Return where the host is during most of these gaps."""
    labels = gaps.group_by("label").agg(ns=_LENGTH.sum()).sort("ns", "label")["label"]
    return str(labels[-1]) if len(labels) else "the step"


def _launched(breakdown: pl.DataFrame, kernels: pl.DataFrame) -> StepGrid:
    if kernels["launch_ns"].null_count() == len(kernels):
        raise NotResolvable(text("the trace does not hold the calls that launched the device's work"))
    return judged_grid(breakdown, _LEAST_STEPS)


@dataclass(frozen=True, slots=True)
class _Loss:
    """What quick hosts save, and whether that is clearly more than one rank's; how long each rank holds the job up.

    `pace_ns` is how long it would by the pace of its calls alone, without what its host does only now and then.
    """

    grid: StepGrid
    lost: Estimate
    is_shared: bool
    holds_up_ns: Floats
    pace_ns: Floats


def _loss(grid: StepGrid, phases: pl.DataFrame, beside: pl.DataFrame, launches: pl.DataFrame) -> _Loss:
    lost, stays = _lost(grid, phases, beside)
    late_ns = (grid.of("host") + sums(grid, _without_waits(beside, launches), "possible_ns")).mean(axis=1)
    quick_ns = (grid.busy - grid.of("host")).max(axis=0).mean()
    pace_ns = launching(grid, phases, launches) - quick_ns
    holds_up_ns = np.maximum(late_ns, pace_ns)
    is_shared = stays >= _STAYS or 2 * (holds_up_ns >= _AS_LATE * lost.ns).sum() >= len(holds_up_ns)
    return _Loss(grid, lost, is_shared and lost.clear, holds_up_ns, pace_ns)


def _lost(grid: StepGrid, phases: pl.DataFrame, beside: pl.DataFrame) -> tuple[Estimate, float]:
    """Return how much shorter the busiest rank's step would be with quick hosts.

    The share that stays if only one gets quick.

    The mean over all steps: hosts that are late now and then take turns, and the job waits for each.
    """
    late = _late(grid, beside)
    busy = grid.busy - grid.of("host") + late
    lost = busy.max(axis=0) - (busy - late).max(axis=0)
    ordered = np.sort(busy, axis=0)
    others = np.where(busy == ordered[-1], ordered[-2:][0], ordered[-1])
    stays = lost.mean() - (busy.max(axis=0) - np.maximum(others, busy - late)).mean(axis=1).max()
    of_latest = pl.col("rank") == grid.ranks[int(late.mean(axis=1).argmax())]
    gaps = phases.filter(of_latest, pl.col("part") == "host").select(ns=pl.col("end_ns") - pl.col("start_ns"))
    pieces = pl.concat([gaps["ns"], beside.filter(of_latest)["certain_ns"]]).to_numpy().astype(np.float64)
    return estimate_of_pieces(lost, pieces), float(stays / max(lost.mean(), 1.0))


def _late(grid: StepGrid, beside: pl.DataFrame) -> Floats:
    """Return ns by (rank, step) that a device idles, or certainly only communicates, before work launched late."""
    # No more work can begin earlier, beside communication, than there is.
    work = grid.of("compute") + grid.of("overlapped")
    return grid.of("host") + np.minimum(sums(grid, beside, "certain_ns"), work)


def _longest(late_ns: Floats) -> str:
    """Return the time of one rank, or that of several at most."""
    most = duration(float(late_ns.max()))
    return most if duration(float(late_ns.min())) == most else text("up to {most}", most=most)


def _named(slow_rank: Sequence[Finding] | NotChecked) -> list[int]:
    """Return the ranks that others wait for."""
    return [] if isinstance(slow_rank, NotChecked) else [rank for finding in slow_rank for rank in finding.ranks]


def _late_beside_communication(phases: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the phases in which a device only communicated before work that was launched late.

    `possible_ns` of each lie before the launch; `certain_ns` are the host's: what was launched began before the
    communication was over, so it had not waited for it.
    """
    is_communication = pl.col("work") == COMMUNICATION
    starts = kernels.filter(~is_communication).select("rank", "launch_ns", at_ns="start_ns").sort("at_ns")
    ends = kernels.filter(is_communication).select("rank", over_ns="end_ns").sort("over_ns")
    return (
        phases.filter(pl.col("part").is_in(BLOCKED))
        .sort("start_ns")
        .join_asof(starts, left_on="start_ns", right_on="at_ns", by="rank", strategy="forward", check_sortedness=False)
        .join_asof(ends, left_on="start_ns", right_on="over_ns", by="rank", strategy="forward", check_sortedness=False)
        .filter(pl.col("launch_ns") > pl.col("start_ns"))
        .with_columns(
            possible_ns=_BEFORE_LAUNCH - pl.col("start_ns"),
            certain_ns=(pl.col("end_ns") - pl.col("start_ns")) * (pl.col("at_ns") < pl.col("over_ns")),
        )
    )


def _without_waits(beside: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Return the same, `possible_ns` without the time in which the host waited for the device."""
    waits, frames = dict(by_rank(launches.filter("waits"))), [beside.clear()]
    for rank, rows in by_rank(beside.sort("rank", "start_ns")):
        start, end = (rows.select(of).to_series().to_numpy() for of in ("start_ns", _BEFORE_LAUNCH))
        spent = covered_ns(start, end, waits[rank]) if rank in waits else np.zeros(len(rows))
        frames.append(rows.with_columns(possible_ns=pl.col("possible_ns") - pl.Series(spent).cast(pl.Int64)))
    return pl.concat(frames)


def _causes(gaps: pl.DataFrame, kernels: pl.DataFrame, launches: pl.DataFrame) -> dict[str, float]:
    """Share of the gaps' time by what the host did in them; they sum to 1."""
    spent = dict.fromkeys(_ADVICE, 0.0)
    calls = launches.select(
        *("rank", "start_ns", "end_ns"),
        kind=pl.when(pl.col("name").str.contains(MEMORY_CALLS))
        .then(pl.lit("memory"))
        .when("waits")
        .then(pl.lit("sync"))
        .when(pl.col("name").str.contains(_LAUNCH))
        .then(pl.lit("launch")),
    ).drop_nulls("kind")
    for (rank,), of_rank in gaps.sort("start_ns").group_by("rank"):
        start, end = of_rank["start_ns"].to_numpy(), of_rank["end_ns"].to_numpy()
        mine = {key[0]: rows for key, rows in calls.filter(pl.col("rank") == rank).group_by("kind")}
        covered = {kind: covered_ns(start, end, rows) for kind, rows in mine.items()}
        own = covered.get("memory", np.zeros(len(start)))
        spent["memory"] += own.sum()
        stalled = without_calls(of_rank.rename({"start_ns": "gap_ns", "end_ns": "next_ns"}), kernels, launches)
        spent["stall"] += stalled.sum()
        left = end - start - own - stalled
        drained = _drained(start, end, mine)
        spent["sync"] += left[drained].sum()
        launching = np.minimum(covered.get("launch", np.zeros(len(start))), left)[~drained]
        spent["launch"] += launching.sum()
        spent["other"] += (left[~drained] - launching).sum()
    total = sum(spent.values())
    return {cause: ns / total for cause, ns in spent.items()}


def _drained(start: Floats, end: Floats, calls: Mapping[str, pl.DataFrame]) -> NDArray[np.bool_]:
    """Return the gaps during which a synchronisation ended that had begun before.

    The host had waited for the device.
    """
    if "sync" not in calls:
        return np.zeros(len(start), dtype=bool)
    ordered = calls["sync"].sort("end_ns")
    begin, done = ordered["start_ns"].to_numpy(), ordered["end_ns"].to_numpy()
    first = np.searchsorted(done, start)
    known = np.minimum(first, len(done) - 1)
    return (first < len(done)) & (done[known] < end) & (begin[known] <= start)


def _advice(causes: Mapping[str, float], place: str) -> str:
    """Return advice for each cause that matters, the greatest first. `place` is where the host mostly is meanwhile."""
    inside = text(
        "are stalls of 5 ms or more in which the host launches nothing, mostly in {place}: see which operators run "
        "there",
        place=place,
    )
    of = _ADVICE | {"stall": inside} if "::" in place else _ADVICE  # of an operator
    ordered = sorted(causes, key=lambda cause: -causes[cause])
    said = [text("{share} {cause}", share=percent(causes[c]), cause=of[c]) for c in ordered if causes[c] >= _MUCH]
    return text("Of this time {causes}.", causes=joined("; ", said or [of[ordered[0]]]))
