"""One rank, or one node, takes longer over its own work than its peers, and they wait for it.

**Signal.** Own time (the step without communication that blocks the rank, and without input, garbage collection,
compilation and checkpoints) is compared with the median of the other ranks that do the same work, step by step: in a
pipeline those of the same stage. A rank is slow if

- it is above its peers in most analyzed steps (`persistence`) by at least `min_z` robust standard deviations of what
  the peers differ among themselves and of what its own steps, or stretches of steps, scatter; or its excess comes in
  bursts that hardly any other rank has; or it alone is above its peers for a long part of the run;
- it costs at least `min_fraction` of the step, clear of its own scatter;
- the peers really were blocked longer than this rank: the loss is no larger than that, within two standard
  deviations.

The cost is by how much the longest rank of a step gets shorter without the excess, if those with at least half of it
were like the rest too: the job would still wait for the next one. The excess is that under those labels (forward,
backward, a region of yours, …) under which the rank stands out likewise, so that noise elsewhere in the step does not
hide it; `where` is the one that holds most of it. If the run can be replayed, the report gives the cost as no more than
the replay says, of several ranks with the others fixed: some of the excess may be hidden behind other waits.

Nodes are analyzed first, in the same way, by the mean of their ranks: what these have in common is distinguished from
chance sooner than what one of them has. A node is slow if all of its ranks take at least half of the loss longer; they
are then analyzed without what their node takes longer.

Where a profiler saw the devices, the loss is no more than the time by which the rank began collectives after the
second-last one; what others compute meanwhile is no loss. Captures of fewer than 5 steps, but for those of pipelines,
are analyzed by single operations: what each collective blocked the ranks for is charged to the rank that came last, or
to the one for which that had waited. A rank, a node, or two or three ranks together are late if all that is charged to
them is more than the largest charge of any rank in 99.5 % of 4,000 permutations of ranks within operations, in the
earlier half of the operations and in the later; if nearly each step has 2 % of a step or a third of the mean charge;
and if each other rank waits 2 % of the step for them, and half of them 5 %. Where each other rank waits 5 % of all
steps for one rank, half of them 10 %, and for no other rank two thirds as much, few operations are enough, be it a
stall in one, whose step the title names: such a finding is likely, not confirmed. A rank that is late in many
operations, but of some steps only, may have more data there, and is not named. No common clock is needed. The cost is
what that rank waits for them that waits least. `where` is the region in which its device, compared with the others',
idled or worked longest, and every region that takes its host at least half of the loss longer than the others in each
step: that time may be hidden behind work that was queued before.

Where NCCL ran and no profiler, own time may not show it, and what counts is how long the others waited in the
collectives that a rank began last, as NCCL's durations have it. A rank is late if this recurs as above; a node, if all
of its ranks are. The cost is at least the longest such wait of a step, and at most their sum: what the others computed
was not seen meanwhile. The lower number is reported, the title has both. If it is late in some steps only, the cost is
what these are longer than the others, within these bounds. If only the sum is above `min_fraction`, nothing is said of
that rank, and the reason is given. With NCCL's profiler plugin the title says whether its GPU or its host is late. In a
pipeline not all that others wait makes the step longer: with CUDA events a replay says what it costs, in which the rank
and those that share its layers compute as the other replicas do. Of one replica only who is late by most is named, and
who is late by half as much or more.

CUDA events give own time in phases without communication; there the costlier of the two is reported. Where forward and
optimizer are longer by one factor (within a quarter), all that the rank computes is taken to be so, and the cost
follows from that, between the two bounds.

Of a table of pipeline operations the sample is the operation: forwards and backwards of a rank against the same ones of
the other replicas, less what the other stages of its replica take longer then (a long microbatch lengthens all stages).
The rank must be longer by 5 standard errors over steps, or over stretches of operations where there are fewer than five
steps, and by four times what other ranks differ; all the time, or since a step from which on it clearly is. It costs
what the replay saves with the rank as fast as its peers; 2 % of the step or more is reported.

**Why it costs time.** A collective ends when its last rank has arrived, so every rank runs at the pace of the
slowest.

**False positives.** Ranks that have other work by design (an uneven shard, a rank 0 that logs) are reported too: the
time is lost, though no machine is at fault. A stage that is longer than the others is `stage_imbalance`; where each
stage has one rank only this is not checked. Another process that keeps one core of the node busy looks like a slow
rank, and is one. Where all ranks are slow alike, there is no peer to compare with. Of two ranks, one that becomes slow
is distinguished from load that comes and goes where it was slow for 50 steps and not for 50.

**What to try.** See what only this rank does in the named region. Compare its host with the others: clock speed,
temperature, other processes, CPU pinning, memory pressure. Swap two hosts: what stays with the rank is the work,
what moves with the host is the machine.

**Source.** Max-statistic by permutation as in Westfall and Young (1993).
Robust z-score and persistence as in Greyhound; stretches of steps as in Schmeiser's batch means (1982);
the last arriver does not wait as in TraceLens; the gain by replacing one worker's time as in ByteDance's what-if
analysis of stragglers. Thresholds are measured on healthy jobs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import ENOUGH_STEPS, FEW_STEPS, judged_grid, peers_grid, price, visible
from rankscope.analysis.metrics.arrival_skew import Arrivals, Lateness, arrivals, lateness
from rankscope.analysis.metrics.step_matrix import (
    Estimate,
    Floats,
    Ints,
    StepGrid,
    above_peers,
    estimate,
    estimates,
    lasting_half_widths,
    over_occurrences,
    own_by_label,
    robust_deviation,
)
from rankscope.analysis.metrics.stragglers import Charged, charged, stragglers
from rankscope.analysis.metrics.trend import longest_stretch, rank_sum_z
from rankscope.analysis.metrics.wait_attribution import caused_by_rank, delays
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, MEMORY
from rankscope.analysis.model.parts import APART, MIXED, OWN_WORK
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import every_nth, named
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.device_breakdown import IDLE_LABELS
from rankscope.analysis.timeline.matching import MUTUAL_OPS, members_of
from rankscope.analysis.timeline.parallelism import roles_of
from rankscope.analysis.timeline.pipeline_ops import replicas
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    per_rank=True,
    explains=("load_imbalance", "slow_link", "pipeline_bubble", "low_bandwidth"),
    cost="bounded",
    parts=OWN_WORK,
    lost_as=AS_WAITING,
)

_TRIM = 0.1  # hiccups of the machine in up to 10 % of the steps do not move the mean
_BOUND_Z = 2.0  # the bound on a loss is a measurement too, and ranks differ by chance
_ALIKE = 0.5  # of the judged one's excess: who has as much counts as slow like it
_MANY = 16  # with more ranks, leaving the judged one out does not change how much they differ
_LARGER_PART = 0.5
_MOST_MIXED = 0.1  # of the step: with more, silence is no proof of health
_MOST_UNMATCHED = 0.1
_STRETCHES = 16  # steps from which there are four stretches of them or more
_MIN_BURSTS = 2  # one may be anything; that two are alike tells them from chance
_BURST_Z, _BURST_SHARE = (
    5,
    0.8,
)  # a burst is this far out of the noise, and this share of the run's bursts is the rank's

_DENSEST, _DENSEST_SIGMAS = 0.4, 2 * 0.5244  # share of the steps, and how wide that is where scatter is normal
_HOSTS_IDLE = 0.1  # share of the step: where devices idle more for hosts, some of these lag behind by chance
_CLEAR_Z = 3.0  # standard deviations of what lasts
_WHILE = 1.05  # what a step is longer than usual, from which it counts to a stretch of slow ones
_LONG = 50  # steps: load on a host lasts, too

# Regions that other detectors judge, or that follow from others.
_NOT_OWN = ("wait", "gc", "input", "compile", "checkpoint")
_TIMED, _EVEN = ("compute", "optimizer"), 0.25  # parts that CUDA events tell; factors this close are one
_VAGUE = (*IDLE_LABELS, COMMUNICATION, COMPUTE, MEMORY)  # labels that name no place in the program

Steps = NDArray[np.bool_]
_Shown = tuple[Floats, Steps]  # the excess per step, 0 where it does not show, and the steps where it shows


@dataclass(frozen=True, slots=True)
class _Peers:
    """Who is compared with whom: ranks, or the mean over the ranks of each node, with those of the same role.

    Arrays are of (rank or node, step) in ns; `role` is a number for each rank or node, the same for those alike.
    """

    own: Floats
    blocked: Floats
    by_label: dict[str, Floats]
    role: Ints

    @property
    def excess(self) -> Floats:
        return above_peers(self.own, self.role)

    @property
    def excess_by_label(self) -> dict[str, Floats]:
        return {label: above_peers(values, self.role) for label, values in self.by_label.items()}

    def without(self, rows: Ints, nodes: _Peers, node: int) -> _Peers:
        """The ranks with those of `rows` shorter by what their node takes longer than the others."""
        own, by_label = self.own.copy(), {label: values.copy() for label, values in self.by_label.items()}
        own[rows] -= nodes.excess[node]
        for label, excess in nodes.excess_by_label.items():
            by_label[label][rows] -= excess[node]
        return replace(self, own=own, by_label=by_label)


@dataclass(frozen=True, slots=True)
class _Slow:
    """Slow ranks as rows of the grid (several are those of a node): excess (0 where it does not show), cost, where."""

    rows: tuple[int, ...]
    excess: Floats
    when: Steps
    lost: Estimate
    where: str
    nodes: tuple[int, ...] = ()
    last: tuple[int, int] | None = None  # how many collectives waited for it, of how many; None: judged by own time
    chance: float | None = None  # how often ranks that are alike would show as much


@dataclass(frozen=True, slots=True)
class _Late:
    """Ranks, several are those of a node, for which others wait: by how much at least, when, and at most per step."""

    ranks: tuple[int, ...]
    node: int | None
    excess: Floats
    when: Steps
    cost: Estimate  # the least that it may be
    most_ns: float
    last: int
    operations: int
    factor: float | None = None  # so much longer it takes for all it computes; then the cost follows from it


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    proxies: pl.DataFrame | None = None,
    device_waits: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.65,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name the ranks and nodes whose own time is longer than their peers', or who come late; the costliest first."""
    waited_for = _waited_for(breakdown, collectives, ranks, regions, groups, hosts_only=device_waits is not None)
    try:
        found = _by_own_time(
            *(breakdown, phases, steps, ranks, collectives, regions, groups),
            *(min_fraction, persistence, min_z),
        )
    except NotResolvable:
        if waited_for is None:
            raise
        found = []
    if waited_for is None:
        return found
    for who in _late(waited_for, min_fraction, persistence, min_z):
        same = [finding for finding in found if set(finding.ranks) & set(who.ranks)]
        if all(who.cost.ns - who.cost.half_width_ns > finding.lost_ns_per_step for finding in same):
            one = _late_finding(waited_for, who, steps, proxies)
            found = [finding for finding in found if finding not in same]
            found.append(replace(one, where=same[0].where) if same and who.factor is None else one)
    if not found:
        _refuse_hidden(waited_for, min_fraction, persistence, min_z)
    return sorted(found, key=lambda finding: -finding.lost_ns_per_step)


def _by_own_time(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    min_fraction: float,
    persistence: float,
    min_z: float,
) -> list[Finding]:
    grid, role, seen, few = _seen(breakdown, collectives, regions, groups)
    peers = _Peers(grid.own, grid.maybe_blocked, own_by_label(phases, grid), role)
    least_ns = min_fraction * grid.step_ns
    slow_nodes: list[_Slow] = []
    if not few:
        slow_nodes, peers = _slow_nodes(peers, grid, ranks, persistence, min_z, least_ns)
    excess, by_label = peers.excess, peers.excess_by_label
    at_times = _while(grid, excess, min_z) or _bursts(grid, excess, persistence)
    found = [_persistent(excess, by_label, persistence, min_z), at_times]
    each = [np.array([row]) for row in range(len(grid.ranks))]
    priced = [s for kind in found for s in _priced(kind, peers, peers.own, each, seen)]
    # A rank that is always a little behind may have bursts besides: the costlier of the two is told.
    rows = sorted({s.rows for s in priced})
    slow = [max((s for s in priced if s.rows == row), key=lambda s: s.lost.ns) for row in rows]
    if seen is not None:
        slow = [_no_more_than_late(s, seen.margin) for s in slow]
    if few:
        assert collectives is not None
        hosts_keep_up = grid.of("host").mean() < _HOSTS_IDLE * grid.step_ns
        made = _charged(phases, collectives, grid, ranks)
        slow = _latecomer(*made, by_label, _node_of(ranks), any_several=hosts_keep_up)
    if few or seen is not None:
        slow = [replace(s, where=_places(s, grid, role, regions)) for s in slow]
    slow = [s for s in (*slow_nodes, *slow) if s.chance is not None or (s.lost.clear and s.lost.ns >= least_ns)]
    return [_finding(grid, s, steps) for s in sorted(slow, key=lambda s: -s.lost.ns)]


def resolution_ns(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    ranks: pl.DataFrame | None = None,
    device_waits: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_z: float = 5.0,
) -> int:
    """The smallest constant excess, in any part of the step, that would have been reported of any rank."""
    waited_for = _waited_for(breakdown, collectives, ranks, regions, groups, hosts_only=device_waits is not None)
    try:
        own_ns = _resolution_of_own_time(breakdown, collectives, regions, groups, min_fraction, min_z)
    except NotResolvable:
        if waited_for is None:
            raise
        own_ns = 0
    if waited_for is None:
        return own_ns
    unmatched = waited_for.collectives.filter(pl.col("op").is_in(MUTUAL_OPS))["instance_id"].is_null().mean()
    if isinstance(unmatched, float) and unmatched > _MOST_UNMATCHED:
        raise NotResolvable(
            text(
                "{share} of the collectives were not matched across ranks: their last rank is unknown",
                share=percent(unmatched),
            )
        )
    noise_ns = max(float(_least_apart(above_peers(late.least), min_z)[1].max()) for late, _, _ in waited_for.judged)
    grid = waited_for.grid
    return max(own_ns, visible(grid, max(min_fraction * grid.step_ns, noise_ns)))


def _resolution_of_own_time(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    min_fraction: float,
    min_z: float,
) -> int:
    grid, role, seen, few = _seen(breakdown, collectives, regions, groups)
    alone = sorted(set(breakdown["rank"]) - set(grid.ranks))
    if alone:
        raise NotResolvable(
            text("no other rank does the same work as {alone}: a pipeline stage of its own", alone=named("rank", alone))
        )
    mixed = _mixed_fraction(breakdown)
    if mixed > _MOST_MIXED:
        raise NotResolvable(
            text("in {share} of the step CUDA events do not show whether ranks compute or wait", share=percent(mixed))
        )
    if few and seen is not None:
        least_ns = float(seen.margin.mean(axis=1).max())
    elif few:  # all others wait for a straggler
        least_ns = float(np.sort(grid.of("wait").mean(axis=1))[1])
    else:
        least_ns = float(_least_apart(above_peers(grid.own, role), min_z)[1].max())
    return visible(grid, max(min_fraction * grid.step_ns, least_ns))


_Judged = tuple[Lateness, list[tuple[int, ...]], list[int | None]]  # with the ranks of each row, and its node


@dataclass(frozen=True, slots=True)
class _WaitedFor:
    """How late nodes, then ranks, are by NCCL's durations."""

    grid: StepGrid
    collectives: pl.DataFrame
    judged: list[_Judged]
    tangled: dict[int, int]  # ranks that may be late since one is that was not seen, and that one


def _waited_for(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    ranks: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    *,
    hosts_only: bool,
) -> _WaitedFor | None:
    """None where there are no durations of NCCL's, or steps of one rank only."""
    if collectives is None or "duration_ns" not in collectives.columns:
        return None
    grid = judged_grid(breakdown, FEW_STEPS)
    if len(grid.ranks) < 2:
        return None
    each = lateness(collectives, grid, regions=regions)
    if each is None:
        return None
    each = _without_stops(each, grid, [(rank,) for rank in grid.ranks], hosts_only=hosts_only)
    tangled = _tangled(collectives, groups, set(grid.ranks))
    of_ranks: _Judged = (each, [(rank,) for rank in grid.ranks], [None] * len(grid.ranks))
    node_of = {} if ranks is None else dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())
    node_of = {rank: node for rank, node in node_of.items() if rank in grid.ranks}
    nodes = sorted(set(node_of.values()))
    together = lateness(collectives, grid, node_of, regions) if set(node_of) == set(grid.ranks) else None
    if len(nodes) < 2 or len(nodes) == len(node_of) or together is None:
        return _WaitedFor(grid, collectives, [of_ranks], tangled)
    members = [tuple(rank for rank in grid.ranks if node_of[rank] == node) for node in nodes]
    of_nodes: _Judged = (_without_stops(together, grid, members, hosts_only=hosts_only), members, [*nodes])
    return _WaitedFor(grid, collectives, [of_nodes, of_ranks], tangled)


def _without_stops(late: Lateness, grid: StepGrid, members: list[tuple[int, ...]], *, hosts_only: bool) -> Lateness:
    """The lateness without what input, garbage collection and the like make of it.

    CUDA events tell when the device ran dry in a stop. Without them it is taken that it did if it was late in that step
    or in the next one: a stop may come after the step's last operation.
    """
    if not hosts_only and not grid.of(MIXED).any():
        return late
    stopped = np.maximum(above_peers(grid.of(*APART)), 0)
    row_of = {rank: row for row, rank in enumerate(grid.ranks)}
    by_row = np.array([stopped[[row_of[rank] for rank in ranks]].min(axis=0) for ranks in members])
    if hosts_only:
        by_row[:, 1:] += np.maximum(by_row - late.least, 0)[:, :-1]
    least = np.maximum(late.least - by_row, 0)
    # A stop makes the rank late in each operation that follows it, by no more than in the one where it is latest.
    return replace(late, least=least, most=np.where(least > 0, np.maximum(late.most - by_row, 0), 0))


def _mixed_fraction(breakdown: pl.DataFrame) -> float:
    """Share of the step in which CUDA events do not tell whether ranks compute or wait."""
    grid = judged_grid(breakdown, 1)
    return float(grid.of(MIXED).mean()) / grid.step_ns


def _late(waited_for: _WaitedFor, min_fraction: float, persistence: float, min_z: float) -> list[_Late]:
    """The nodes, then the other ranks, that the others wait for again and again."""
    grid = waited_for.grid
    found: list[_Late] = []
    for late, members, nodes in waited_for.judged:
        excess = above_peers(late.least)
        shown = [_persistent(excess, {}, persistence, min_z), _bursts(grid, excess, persistence)]
        for row, (_, when) in (pair for kind in shown for pair in kind.items()):
            if {rank for other in found for rank in other.ranks} & set(members[row]):
                continue
            least = _mean(late.least[row], when)
            most_ns = max(_mean(late.most[row], when).ns, least.ns)
            if not when.all():
                most_ns = float(np.clip(_longer(grid, when), least.ns, most_ns))
                least = replace(least, ns=most_ns)
            if least.clear and least.ns >= min_fraction * grid.step_ns:
                counts = int(late.last[row]), int(late.operations[row])
                one = _Late(members[row], nodes[row], late.least[row], when, least, most_ns, *counts)
                found.append(_if_evenly_slow(one, waited_for) if when.all() else one)
    return _not_made_late(found, waited_for)


def _if_evenly_slow(late: _Late, waited_for: _WaitedFor) -> _Late:
    """The same at what it costs if forward and optimizer say that all is slower there by one factor.

    CUDA events time these two without communication. Where both are longer by the same factor, so is what the ranks
    compute in the phases in which they communicate too: their own time there, less up to all of their transfers.
    """
    grid = waited_for.grid
    mine = np.isin(grid.ranks, late.ranks)
    if mine.all() or not grid.of(MIXED).any():
        return late
    longer: list[Estimate] = []
    for part in _TIMED:
        own = grid.of(part)
        peers = np.median(own[~mine], axis=0)
        if not (peers > 0).all():
            return late
        longer.append(estimate(own[mine].mean(axis=0) / peers - 1, _TRIM))
    low, high = sorted(longer, key=lambda ratio: ratio.ns)
    if not (low.clear and high.clear) or high.ns - low.ns > _EVEN * high.ns + low.half_width_ns + high.half_width_ns:
        return late
    timed = grid.of(*_TIMED)
    # The job waits for the slowest of them, and would for the slowest of the others.
    own_ns, next_ns = (timed[rows].max(axis=0).mean() for rows in (mine, ~mine))
    transfers = waited_for.collectives.filter(pl.col("rank").is_in(late.ranks))["duration_ns"]
    transfers_ns = float(transfers.sum()) / len(late.ranks) / len(grid.steps)
    share = 1 - next_ns / own_ns
    ns = share * (own_ns + grid.of(MIXED)[mine].mean() - transfers_ns / 2)
    half_width_ns = late.cost.half_width_ns + share * transfers_ns / 2
    cost = Estimate(ns=float(np.clip(ns, late.cost.ns, late.most_ns)), half_width_ns=half_width_ns)
    return replace(late, cost=cost, factor=float(timed[mine].mean() / timed[~mine].mean()))


def _longer(grid: StepGrid, when: Steps) -> float:
    """By how much these steps are longer than the others, as a mean over all."""
    length = np.sum(list(grid.parts.values()), axis=0).max(axis=0)
    return float((np.median(length[when]) - np.median(length[~when])) * when.mean())


def _mean(values: Floats, when: Steps) -> Estimate:
    return estimate(values, _TRIM) if when.all() else over_occurrences(values, when)


def _refuse_hidden(waited_for: _WaitedFor, min_fraction: float, persistence: float, min_z: float) -> None:
    """Not resolvable where others wait for a rank again and again, and only all waits together would cost much."""
    grid = waited_for.grid
    for late, members, _ in waited_for.judged:
        for row in _persistent(above_peers(late.most), {}, persistence, min_z):
            most = estimate(late.most[row], _TRIM)
            if most.clear and most.ns >= min_fraction * grid.step_ns:
                raise NotResolvable(
                    text(
                        "{who} comes last to {last} of {operations} collectives and the others wait {least} per step "
                        "for it, or {most} ({share} of the step) if no wait is hidden by computation, which was not "
                        "recorded; rankscope trigger shows it",
                        who=named("rank", members[row]),
                        last=int(late.last[row]),
                        operations=int(late.operations[row]),
                        least=duration(estimate(late.least[row], _TRIM).ns),
                        most=duration(most.ns),
                        share=percent(most.ns / grid.step_ns),
                    )
                )


def _late_finding(waited_for: _WaitedFor, late: _Late, steps: pl.DataFrame, proxies: pl.DataFrame | None) -> Finding:
    grid = waited_for.grid
    who = text("Node {node}", node=late.node) if late.node is not None else text("Rank {rank}", rank=late.ranks[0])
    shown = tuple(np.array(grid.steps)[late.when].tolist())
    layer = _guilty_layer(late, grid, proxies)
    pace = _pace(waited_for.collectives, late.ranks)
    where = {"GPU": text("before collectives, on its GPU"), "host": text("before collectives, on its host")}
    if late.factor is None:
        place = where.get(layer, text("before collectives"))
        advice = text(
            "See what only {ranks} does before its collectives: rankscope trigger records a few steps of it. Compare "
            "its GPU (clocks, temperature, throttling) and its host with the others.",
            ranks=named("rank", late.ranks),
        )
        cost = _between(late.cost.ns, late.most_ns)
        title = text(
            "{who} is late: {layer} begins {last} of {operations} collectives last, {what}",
            who=who,
            layer={"GPU": text("its GPU"), "host": text("its host")}.get(layer, text("it")),
            last=late.last,
            operations=late.operations,
            # In a pipeline not all that others wait makes the step longer.
            what=text("others wait {cost} per step for it", cost=cost)
            if pace
            else text("at a cost of {cost} per step", cost=cost),
        )
    else:
        place = text("all that it computes")
        advice = text(
            "Compare the GPU of {ranks} with the others: clocks, temperature, power limit, what else runs on it. Swap "
            "two hosts: what stays with the rank is its work, what moves with the host is the machine.",
            ranks=named("rank", late.ranks),
        )
        title = text(
            "{who} takes {longer} longer for all that it computes, and begins {last} of {operations} collectives last",
            who=who,
            longer=percent(late.factor - 1),
            last=late.last,
            operations=late.operations,
        )
    return Finding(
        detector="slow_rank",
        title=title,
        where=place,
        advice=advice,
        ranks=late.ranks,
        nodes=() if late.node is None else (late.node,),
        steps=() if late.when.all() else shown,
        fix=f"rank:{','.join(map(str, pace))}" if pace else None,
        gain_why=text("what the others computed while they waited was not recorded"),
        evidence=_typical_step(grid, late.ranks[0], late.excess, late.when, steps, text("that others waited for it")),
        **price(grid, late.cost),
    )


def _pace(collectives: pl.DataFrame, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """In a pipeline: these and the ranks that they hold up within their stage. Empty where there is none."""
    if not collectives["op"].is_in(P2P_OPS).any():
        return ()
    together = collectives.filter(pl.col("op").is_in(MUTUAL_OPS), pl.col("wait_ns").is_not_null())
    held_up = together.filter(pl.col("rank").is_in(ranks), "is_last")["group_id"].value_counts(sort=True)["group_id"]
    slowed = together.filter(pl.col("group_id").is_in(held_up.head(1).implode()))["rank"].unique().sort()
    return tuple(slowed.to_list())


def _tangled(collectives: pl.DataFrame, groups: pl.DataFrame | None, judged: set[int]) -> dict[int, int]:
    """The ranks that share a group with one that was not seen, and those that send to or receive from such.

    What all ranks call together makes nobody late: there each is as late as it is by itself.
    """
    seen = judged & set(collectives.drop_nulls("duration_ns")["rank"])
    found: dict[int, int] = {}
    for members in set() if groups is None else set(groups["members"]):
        of_group = set(members_of(members))
        unseen = of_group - seen
        if unseen and not of_group >= seen:
            found |= dict.fromkeys(of_group & seen, min(unseen))
    replica = _replica_of(collectives)
    by_replica = {replica[rank]: other for rank, other in found.items() if rank in replica}
    by_replica |= {number: rank for rank, number in replica.items() if rank not in seen}
    return found | {rank: by_replica[number] for rank, number in replica.items() if number in by_replica}


def _replica_of(collectives: pl.DataFrame) -> dict[int, int]:
    """By rank of a pipeline the number of its replica: ranks that send to each other."""
    sent = collectives.filter(pl.col("op").is_in(P2P_OPS), pl.col("peer") >= 0)
    return dict(replicas(sent.select("rank", "peer").unique().rows()))


def _not_made_late(found: list[_Late], waited_for: _WaitedFor) -> list[_Late]:
    """Without those of a pipeline's replica that are late by less than half as much as one that sends to them.

    Who exchanges data with ranks that were not seen may be late since they are, but for those known to compute longer.
    Not resolvable if no others are left.
    """
    tangled = waited_for.tangled
    judged = [late for late in found if late.factor is not None or not set(late.ranks) & tangled.keys()]
    if found and not judged:
        who = next(late for late in found if set(late.ranks) & tangled.keys()).ranks
        raise NotResolvable(
            plural(
                "{late} arrives late, maybe because {other}, which exchanges data with it and was not seen, did",
                "{late} arrive late, maybe because {other}, which exchanges data with them and was not seen, did",
                len(who),
                late=named("rank", who),
                other=named("rank", [min(tangled[rank] for rank in who if rank in tangled)]),
            ),
            unclear=True,
        )
    found, collectives = judged, waited_for.collectives
    if len(found) < 2:
        return found
    replica = _replica_of(collectives)
    kept: list[_Late] = []
    made_late: dict[int, float] = {}  # by replica, what the first of its ranks is late by: they come by that
    for late in sorted(found, key=lambda late: -late.cost.ns):
        first_ns = max(made_late.get(replica.get(rank, -1), 0.0) for rank in late.ranks)
        if late.cost.ns >= first_ns / 2:
            kept.append(late)
            for rank in _pace(collectives, late.ranks):
                if rank in replica:
                    made_late.setdefault(replica[rank], late.cost.ns)
    return kept


def _guilty_layer(late: _Late, grid: StepGrid, proxies: pl.DataFrame | None) -> str:
    """What NCCL's proxies say of a late rank: "GPU", "host", or nothing.

    Data had come and its GPU did not take them: its kernel began late. Else, those who send to it were not told where
    to: it had not called NCCL. Each has to explain the larger part of the least that others waited.
    """
    if proxies is None or late.node is not None:
        return ""
    rank, least_ns = late.ranks[0], _LARGER_PART * late.cost.ns * len(grid.steps)
    of_call = ["rank", "call"]
    received = proxies.filter(pl.col("rank") == rank, pl.col("event") == "recv")
    sent_to = proxies.filter(pl.col("peer_rank") == rank, pl.col("event") == "send")
    if received.group_by(of_call).agg(pl.col("gpu_wait_ns").max())["gpu_wait_ns"].sum() >= least_ns:
        return "GPU"
    of_sender = (
        sent_to.group_by(of_call).agg(pl.col("peer_wait_ns").max()).group_by("rank").agg(pl.col("peer_wait_ns").sum())
    )
    return "host" if (of_sender["peer_wait_ns"] >= least_ns).any() else ""


def _between(least_ns: float, most_ns: float) -> str:
    least, most = duration(least_ns), duration(most_ns)
    return least if least == most else text("{least} to {most}", least=least, most=most)


def _seen(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> tuple[StepGrid, Ints, Arrivals | None, bool]:
    """The grid of the ranks that have peers, and the role of each, over a few steps at least; arrivals by one clock.

    One step will do where operations were seen on the devices. Last: whether there are so few steps that these are
    the sample.
    """
    grid = peers_grid(breakdown, 1)
    role = roles_of(grid.ranks, groups, regions, collectives)
    has_peers = np.bincount(role)[role] > 1
    if not has_peers.any():
        raise NotResolvable(
            text("each pipeline stage has one rank only, so no rank has a peer that does the same work")
        )
    seen = arrivals(collectives, grid.only(has_peers)) if collectives is not None else None
    on_devices = collectives is not None and bool(collectives["device_start_ns"].count())
    grid = grid if on_devices else peers_grid(breakdown, FEW_STEPS)
    return grid.only(has_peers), role[has_peers], seen, on_devices and len(grid.steps) < ENOUGH_STEPS


def _slow_nodes(
    peers: _Peers, grid: StepGrid, ranks: pl.DataFrame, persistence: float, min_z: float, min_ns: float
) -> tuple[list[_Slow], _Peers]:
    """The nodes whose ranks are all slow, and the ranks as they would be if those nodes were like the others.

    What all ranks of a node have in common is told from chance sooner than what one of them has.
    """
    node_of = dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())
    numbers, node = np.unique([node_of.get(rank, -1) for rank in grid.ranks], return_inverse=True)
    if numbers[0] < 0 or len(numbers) < 2:
        return [], peers
    # Nodes are alike if they hold the same roles in the same shares.
    held = np.eye(peers.role.max() + 1)[peers.role]
    _, alike = np.unique(_mean_by(node, held), axis=0, return_inverse=True)
    by_label = {label: _mean_by(node, values) for label, values in peers.by_label.items()}
    nodes = _Peers(_mean_by(node, peers.own), _mean_by(node, peers.blocked), by_label, alike.ravel())
    found = _persistent(nodes.excess, nodes.excess_by_label, persistence, min_z)
    slow: list[_Slow] = []
    ranks_of = [np.flatnonzero(node == row) for row in range(len(numbers))]
    for one in _priced(found, nodes, peers.own, ranks_of, None):
        rows = ranks_of[one.rows[0]]
        if len(rows) > 1 and one.lost.clear and one.lost.ns >= min_ns and _all_slow(peers, node, rows, one.lost.ns):
            slow.append(replace(one, rows=tuple(rows.tolist()), nodes=(int(numbers[one.rows[0]]),)))
            peers = peers.without(rows, nodes, one.rows[0])
    return slow, peers


def _mean_by(of: Ints, values: Floats) -> Floats:
    """Mean over the rows of each number in `of`, in their order."""
    return np.array([values[of == each].mean(axis=0) for each in np.unique(of)])


def _all_slow(peers: _Peers, node: Ints, rows: Ints, lost_ns: float) -> bool:
    """Whether each rank of a node takes at least half of `lost_ns` longer than those of its role elsewhere."""
    elsewhere = node != node[rows[0]]
    usual = [np.median(peers.own[elsewhere & (peers.role == peers.role[row])], axis=0) for row in rows]
    return bool((estimates(peers.own[rows] - np.array(usual), _TRIM)[0] >= lost_ns / 2).all())


def _node_of(ranks: pl.DataFrame) -> dict[int, int]:
    return dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())


def _charged(
    phases: pl.DataFrame, collectives: pl.DataFrame, grid: StepGrid, ranks: pl.DataFrame
) -> tuple[Charged | None, list[tuple[int, ...]]]:
    """Who made whom wait in each operation, and the nodes of several ranks; nothing of a pipeline.

    There ranks wait for their neighbours by design.
    """
    if collectives["op"].is_in(P2P_OPS).any():
        return None, []
    node_of = _node_of(ranks)
    nodes = sorted({node_of[rank] for rank in grid.ranks if rank in node_of})
    units = [tuple(row for row, rank in enumerate(grid.ranks) if node_of.get(rank) == node) for node in nodes]
    costs = delays(phases, collectives)
    return charged(costs, collectives, grid, caused_by_rank(costs)), [unit for unit in units if len(unit) > 1]


def _no_more_than_late(slow: _Slow, margin: Floats) -> _Slow:
    """The rank with what it costs, which is no more than what it was late."""
    late = estimate(margin[slow.rows[0]])
    return replace(slow, lost=min(slow.lost, late, key=lambda bound: bound.ns)) if slow.when.all() else slow


def _latecomer(
    seen: Charged | None,
    units: Sequence[tuple[int, ...]],
    by_label: dict[str, Floats],
    node_of: dict[int, int],
    *,
    any_several: bool,
) -> list[_Slow]:
    """The rank, or ranks, that operations are charged to more than chance makes any rank, if there is one."""
    late = None if seen is None else stragglers(seen, units, any_several=any_several)
    if late is None or seen is None:
        return []
    row = late.rows[0]
    share = {label: float(values[row].sum()) for label, values in by_label.items()}
    where = max(share, key=lambda label: share[label], default="the step")
    nodes = {node_of.get(seen.grid.ranks[row], -1) for row in late.rows}
    is_node = late.rows in units and len(nodes) == 1 and -1 not in nodes
    return [
        _Slow(
            *(late.rows, late.per_step, late.when, late.cost, where),
            nodes=tuple(nodes) if is_node else (),
            last=(late.charged, late.operations),
            chance=late.chance,
        )
    ]


def _places(slow: _Slow, grid: StepGrid, role: Ints, regions: pl.DataFrame | None) -> str:
    """Where the device shows it and, besides, the regions that take the host much longer than its peers each step."""
    if regions is None:
        return slow.where
    row = slow.rows[0]
    rank, length = grid.ranks[row], pl.col("end_ns") - pl.col("start_ns")
    rows = regions.filter(pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
    rows = rows.filter(~pl.col("kind").is_in(_NOT_OWN))
    much = rows.filter(pl.col("rank") == rank).group_by("name").agg(length.sum())
    names = much.filter(pl.col("end_ns") >= slow.lost.ns / 2 * len(grid.steps))["name"]
    longer: dict[str, pl.DataFrame] = {}
    for (name,), of_name in rows.filter(pl.col("name").is_in(names.implode())).group_by("name"):
        values = np.zeros((len(grid.ranks), len(grid.steps)))
        index = (np.searchsorted(grid.ranks, of_name["rank"]), np.searchsorted(grid.steps, of_name["step"]))
        np.add.at(values, index, of_name.select(length).to_series().to_numpy())
        if (above_peers(values, role)[row][slow.when] >= slow.lost.ns / 2).all():
            longer[str(name)] = of_name.filter(pl.col("rank") == rank)
    inner = sorted(longer, key=lambda name: (longer[name].select(length.sum()).item(), name))
    places = [name for i, name in enumerate(inner) if not any(_holds(longer[name], longer[o]) for o in inner[:i])]
    return ", ".join(dict.fromkeys([*places, slow.where] if slow.where in _VAGUE else [slow.where, *places]))


def _holds(outer: pl.DataFrame, inner: pl.DataFrame) -> bool:
    """Whether each of the inner spans lies within one of the outer ones."""
    starts = outer.sort("start_ns")
    at = np.searchsorted(starts["start_ns"], inner["start_ns"], side="right") - 1
    return bool((at >= 0).all() and (starts["end_ns"].to_numpy()[at] >= inner["end_ns"].to_numpy()).all())


def _least_apart(excess: Floats, min_z: float) -> tuple[Floats, Floats]:
    """Each rank's mean excess, and how large it must be, either way, to stand out.

    That is `min_z` robust standard deviations of a healthy rank's mean: among the peers, or over the rank's own steps,
    one by one or, where there are enough of them, in stretches, since load on a machine lasts.
    """
    means, half_widths = estimates(excess, _TRIM)
    if excess.shape[1] >= _STRETCHES:
        half_widths = np.maximum(half_widths, lasting_half_widths(excess, _TRIM))
    if len(means) > _MANY:
        among = np.full(len(means), robust_deviation(means))
    else:
        among = np.array([robust_deviation(np.delete(means, row)) for row in range(len(means))])
    return means, min_z * np.maximum(among, half_widths / 1.96)


def _persistent(excess: Floats, by_label: dict[str, Floats], persistence: float, min_z: float) -> dict[int, _Shown]:
    """The ranks that exceed their peers in most steps by more than those differ, under some labels or over all."""
    located = np.zeros_like(excess)
    for values in by_label.values():
        means, least = _least_apart(values, min_z)
        located += np.where((np.abs(means) >= least)[:, np.newaxis], values, 0.0)
    totals, least = _least_apart(excess, min_z)
    # Spread over many labels, a loss may stand out under none of them.
    diffuse = (estimates(located, _TRIM)[0] < totals / 2) & (totals >= least)
    located[diffuse] = excess[diffuse]
    lost = estimates(located, _TRIM)[0]
    often = np.mean(located > lost[:, np.newaxis] / 2, axis=1) >= persistence
    always = np.ones(excess.shape[1], dtype=bool)
    # What a rank loses under one label and gains under another is no loss.
    return {int(row): (located[row], always) for row in np.flatnonzero((lost > 0) & often & (totals >= lost / 2))}


def _bursts(grid: StepGrid, excess: Floats, persistence: float) -> dict[int, _Shown]:
    """The rank whose excess comes in bursts, in fewer steps, if hardly any other rank has bursts."""
    found = _beyond(grid, excess, robust_deviation(excess), persistence)
    if found or len(excess) != 2 or excess.shape[1] < _STRETCHES:
        return found
    # Of two ranks each is the other's peer, and one that is slow in half of the steps hides in its own scatter. The
    # densest part of the steps tells that; and whether this is load that lasts, which comes to an end, their mean.
    ordered, part = np.sort(excess[0]), math.ceil(_DENSEST * excess.shape[1])
    scatter = float((ordered[part - 1 :] - ordered[: len(ordered) - part + 1]).min()) / _DENSEST_SIGMAS
    clear = estimates(excess)[0] >= _CLEAR_Z / 1.96 * lasting_half_widths(excess)
    return {row: shown for row, shown in _beyond(grid, excess, scatter, persistence).items() if clear[row]}


def _beyond(grid: StepGrid, excess: Floats, scatter: float, persistence: float) -> dict[int, _Shown]:
    """The rank whose excess goes far beyond this scatter in some steps, if hardly any other rank's does."""
    burst = excess > max(0.1 * grid.step_ns, _BURST_Z * scatter)
    cost = np.where(burst, excess, 0.0).sum(axis=1)
    row = int(cost.argmax())
    if cost[row] == 0 or cost[row] < _BURST_SHARE * cost.sum():
        return {}
    typical: Steps = burst[row] & (excess[row] > float(np.median(excess[row][burst[row]])) / 2)
    if not _MIN_BURSTS <= typical.sum() < persistence * len(typical):
        return {}
    return {row: (np.where(typical, excess[row], 0.0), typical)}


def _while(grid: StepGrid, excess: Floats, min_z: float) -> dict[int, _Shown]:
    """The one rank that is above its peers for a long part of the run, by far more than stretches of it differ."""
    found: dict[int, _Shown] = {}
    for row, values in enumerate(excess):
        inside = longest_stretch(grid.step_ns + values, _WHILE)
        if min(inside.sum(), (~inside).sum()) < _LONG:
            continue
        scatter = np.concatenate([_of_stretches(values[inside]), _of_stretches(values[~inside])]).std()
        enough = np.median(values[inside]) >= max(0.1 * grid.step_ns, _BURST_Z * scatter)
        if enough and rank_sum_z(values, inside) >= min_z:
            found[row] = np.where(inside, values, 0.0), inside
    return found if len(found) == 1 else {}


def _of_stretches(values: Floats) -> Floats:
    """What the means of eight stretches of steps differ from the mean of all."""
    means = np.array([stretch.mean() for stretch in np.array_split(values, 8)])
    return np.asarray(means - means.mean())


def _priced(
    found: dict[int, _Shown], peers: _Peers, own: Floats, ranks_of: Sequence[Ints], seen: Arrivals | None
) -> list[_Slow]:
    """The slow ones among `peers` with what each costs; `own` is that of the ranks, of which each holds `ranks_of`.

    That is by how much the longest rank of a step, whatever its role, is longer than it would be without the excess,
    and no more than its peers were blocked longer than itself, and some slack. Peers that are as slow count as fixed:
    to fix this one alone would be of no use. Where arrivals on the devices were `seen`, these tell better who came
    next; the cost is the excess.
    """
    waited = -above_peers(peers.blocked, peers.role)
    _, slack = _least_apart(waited, _BOUND_Z)
    by_label = peers.excess_by_label
    usual = np.maximum(np.median(own, axis=0), 1.0)
    means = {row: float(excess.mean()) for row, (excess, _) in found.items()}
    slow: list[_Slow] = []
    for row, (excess, when) in found.items():
        others = own.copy()
        for other in found:
            if other != row and means[other] >= _ALIKE * means[row]:
                others[ranks_of[other]] -= _steady(*found[other], usual)
        mended = others.copy()
        mended[ranks_of[row]] -= _steady(excess, when, usual)
        longer = others.max(axis=0) - mended.max(axis=0) if seen is None else excess
        if when.all():
            lost, bound = estimate(longer, _TRIM), estimate(waited[row], _TRIM)
        else:
            lost, bound = over_occurrences(longer, when), over_occurrences(waited[row], when)
        share = {label: float(values[row][when].mean()) for label, values in by_label.items()}
        where = max(share, key=lambda label: share[label], default="the step")
        lost = replace(lost, ns=min(lost.ns, bound.ns + slack[row]))
        slow.append(_Slow((row,), excess, when, lost, where))
    return slow


def _steady(excess: Floats, when: Steps, usual: Floats) -> Floats:
    """What mending takes away per step: always the same share of what is `usual`, since scatter stays; or bursts."""
    return usual * estimate(excess / usual, _TRIM).ns if when.all() else excess


def _finding(grid: StepGrid, slow: _Slow, steps: pl.DataFrame) -> Finding:
    ranks = tuple(grid.ranks[row] for row in slow.rows)
    shown = tuple(np.array(grid.steps)[slow.when].tolist())
    costs = price(grid, slow.lost)
    how = text("longer than its peers") if slow.last is None else text("late in its collectives, added up")
    return Finding(
        detector="slow_rank",
        title=_title(ranks, slow, shown),
        where=slow.where,
        advice=text(
            "See what only {ranks} does there. Compare the host with the others: clock speed, "
            "temperature, other processes, CPU pinning.",
            ranks=named("rank", ranks),
        ),
        ranks=ranks,
        nodes=slow.nodes,
        steps=() if slow.when.all() else shown,
        chance=slow.chance,
        fix=_fix(ranks, slow),
        evidence=_typical_step(grid, ranks[0], slow.excess, slow.when, steps, how),
        **costs,
    )


def _fix(ranks: tuple[int, ...], slow: _Slow) -> str:
    if slow.last is not None:
        return f"rank:{','.join(map(str, ranks))}"
    return f"node:{slow.nodes[0]}" if slow.nodes else f"rank:{ranks[0]}"


def _title(ranks: tuple[int, ...], slow: _Slow, steps: tuple[int, ...]) -> str:
    cost = duration(slow.lost.ns)
    subject = text("Node {node}", node=slow.nodes[0]) if slow.nodes else text("Rank {rank}", rank=ranks[0])
    if slow.last is not None:
        last, operations = slow.last
        if not slow.when.all():
            return plural(
                "{subject} arrives late in {steps}: the others wait {cost} or more there for it",
                "{subject} arrive late in {steps}: the others wait {cost} or more there for them",
                1 if slow.nodes else len(ranks),
                subject=subject if slow.nodes else named("Rank", ranks),
                steps=named("step", steps),
                cost=duration(slow.lost.ns * len(slow.when)),
            )
        return plural(
            "{subject} arrives late: the others wait {cost} or more per step for it, in {last} of {operations} "
            "collectives",
            "{subject} arrive late: the others wait {cost} or more per step for them, in {last} of {operations} "
            "collectives",
            1 if slow.nodes else len(ranks),
            subject=subject if slow.nodes else named("Rank", ranks),
            cost=cost,
            last=last,
            operations=operations,
        )
    each = cost if slow.when.all() else duration(slow.lost.ns * len(slow.when) / len(steps))
    often = text("per step") if slow.when.all() else every_nth(steps, len(slow.when))
    if len(ranks) == 1:
        return text(
            "{subject} is slow: it computes {time} longer {often} than its peers",
            subject=subject,
            time=each,
            often=often,
        )
    return text(
        "{subject} is slow: {ranks} compute {time} longer {often} than their peers",
        subject=subject,
        ranks=named("rank", ranks),
        time=each,
        often=often,
    )


def _typical_step(
    grid: StepGrid, rank: int, excess: Floats, when: Steps, steps: pl.DataFrame, how: str
) -> tuple[Evidence, ...]:
    """The step with the median excess among those where it shows."""
    among = np.flatnonzero(when)
    column = among[np.argsort(excess[among])[len(among) // 2]]
    step = grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    note = text("step {step}: {excess} {how}", step=step, excess=duration(excess[column]), how=how)
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=note)
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
