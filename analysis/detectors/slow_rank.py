"""One rank takes longer over its own work than its peers, and they wait for it.

**Signal.** Own time (the step without communication that blocks the rank, and without input, garbage collection and
compilation) is compared with the median of the other ranks, step by step. A rank is slow if

- it is above its peers in most judged steps (`persistence`) by at least `min_z` robust standard deviations of what
  the peers differ among themselves, or its excess comes in bursts that hardly any other rank has;
- the excess is above `min_fraction` of the step and clear of its own scatter;
- the peers really were blocked longer than this rank: the loss is no larger than that, within two standard
  deviations.

The loss is the excess under those labels (forward, backward, a region of yours, …) under which the rank stands out
likewise, so that noise elsewhere in the step is not added to it; `where` is the one that holds most of it.

Where a profiler saw the devices, the loss is no more than the time by which the rank began collectives after the
second-last one; what others compute meanwhile is no loss. Captures of fewer than 5 steps are judged by this: a rank
is late if it holds `min_share` of the time by which ranks were late, and began most collectives last or was late in
each of several steps: who is last most often need not be who costs most.
`where` is then the region in which its device, compared with the others', idled or worked longest, and every region
that takes its host at least half of the loss longer than the others in each step: that time may be hidden behind
work that was queued before. In so few steps nobody can tell whether it stays: below 10 % of the step it counts low.

**Why it costs time.** A collective ends when its last rank has arrived, so every rank runs at the pace of the
slowest.

**False alarms.** Ranks that have other work by design (pipeline stages, an uneven shard, a rank 0 that logs) are
reported too: the time is lost, though no machine is at fault. Another process that keeps one core of the node busy
looks like a slow rank, and is one. Where all ranks are slow alike, there is no peer to tell it by.

**What to try.** See what only this rank does in the named region. Compare its host with the others: clock speed,
temperature, other processes, CPU pinning, memory pressure. Swap two hosts: what stays with the rank is the work,
what moves with the host is the machine.

**Source.** Robust z-score and persistence as in Greyhound; the last arriver waits for nobody as in TraceLens; the
gain by replacing one worker's time as in ByteDance's what-if analysis of stragglers. Thresholds are measured on
healthy jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import ENOUGH_STEPS, FEW_STEPS, peers_grid, price, visible
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.kinds import COMMUNICATION, COMPUTE, MEMORY
from rankscope.analysis.phrases import every_nth, named
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.arrivals import Arrivals, arrivals
from rankscope.analysis.timeline.device_phases import IDLE_LABELS
from rankscope.analysis.timeline.own import (
    Estimate,
    Floats,
    StepGrid,
    above_peers,
    estimate,
    estimates,
    over_occurrences,
    own_by_label,
)

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives",)

_TRIM = 0.1  # hiccups of the machine in up to 10 % of the steps do not move the mean
_BOUND_Z = 2.0  # the bound on a loss is a measurement too, and ranks differ by chance
_MANY = 16  # with more ranks, leaving the judged one out does not change how much they differ
_MIN_BURSTS = 4  # fewer are not told from chance
_BURST_Z, _BURST_SHARE = (
    5,
    0.8,
)  # a burst is this far out of the noise, and this share of the run's bursts is the rank's

_NOT_OWN = ("wait", "gc", "input", "compile")  # regions that other detectors judge, or that follow from others
_VAGUE = (*IDLE_LABELS, COMMUNICATION, COMPUTE, MEMORY)  # labels that name no place in the program

Steps = NDArray[np.bool_]
_Shown = tuple[Floats, Steps]  # the excess per step, 0 where it does not show, and the steps where it shows


@dataclass(frozen=True, slots=True)
class _Slow:
    """A slow rank, as a row of the grid: its excess (0 in steps where it does not show), its cost, and where."""

    row: int
    excess: Floats
    when: Steps
    lost: Estimate
    where: str
    last: tuple[int, int] | None = None  # how many collectives it began last, of how many; None: judged by own time


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.65,
    min_z: float = 5.0,
    min_share: float = 0.8,
) -> list[Finding]:
    """Name the ranks whose own time is longer than their peers', the costliest first."""
    grid, seen = _seen(breakdown, collectives)
    excess = above_peers(grid.own)
    by_label = {label: above_peers(values) for label, values in own_by_label(phases, grid).items()}
    found = [_persistent(excess, by_label, persistence, min_z), _bursts(grid, excess, persistence)]
    waited = -above_peers(grid.blocked)
    _, slack = _least_apart(waited, _BOUND_Z)
    priced = [_priced(row, *shown, waited[row], slack[row], by_label) for kind in found for row, shown in kind.items()]
    # A rank that is always a little behind may have bursts besides: the costlier of the two is told.
    slow = [
        max((s for s in priced if s.row == row), key=lambda s: s.lost.ns) for row in sorted({s.row for s in priced})
    ]
    if seen is not None:
        slow = [_no_more_than_late(s, seen.margin) for s in slow]
        if len(grid.steps) < ENOUGH_STEPS:
            slow = _latecomer(seen, slow, waited, by_label, min_share)
        slow = [replace(s, where=_places(s, grid, regions)) for s in slow]
    slow = [s for s in slow if s.lost.clear and s.lost.ns >= min_fraction * grid.step_ns]
    findings = [_finding(grid, members, nodes, steps) for members, nodes in _whole_nodes(slow, grid, ranks)]
    return sorted(findings, key=lambda finding: -finding.lost_ns_per_step)


def resolution_ns(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_z: float = 5.0,
) -> int:
    """The smallest constant excess, in any part of the step, that would have been reported of any rank."""
    grid, seen = _seen(breakdown, collectives)
    if seen is not None and len(grid.steps) < ENOUGH_STEPS:
        least_ns = float(seen.margin.mean(axis=1).max())
    else:
        least_ns = float(_least_apart(above_peers(grid.own), min_z)[1].max())
    return visible(grid, max(min_fraction * grid.step_ns, least_ns))


def _seen(breakdown: pl.DataFrame, collectives: pl.DataFrame | None) -> tuple[StepGrid, Arrivals | None]:
    """The grid, of at least one step where arrivals on the devices were seen, else of a few."""
    grid = peers_grid(breakdown, 1)
    seen = arrivals(collectives, grid) if collectives is not None else None
    return (grid, seen) if seen is not None else (peers_grid(breakdown, FEW_STEPS), None)


def _no_more_than_late(slow: _Slow, margin: Floats) -> _Slow:
    """The rank with what it costs, which is no more than what it was late."""
    late = estimate(margin[slow.row])
    return replace(slow, lost=min(slow.lost, late, key=lambda bound: bound.ns)) if slow.when.all() else slow


def _latecomer(
    seen: Arrivals, slow: Sequence[_Slow], waited: Floats, by_label: dict[str, Floats], min_share: float
) -> list[_Slow]:
    """The rank that began most collectives last and whose lateness is most of all lateness, if there is one."""
    costs = seen.margin.sum(axis=1)
    row = int(costs.argmax())
    of_step = seen.margin[row]
    comes_back = len(of_step) > 1 and bool((of_step >= of_step.mean() / 2).all())
    mostly_last = 2 * seen.last[row] > seen.operations[row]
    if costs[row] < min_share * costs.sum() or not (mostly_last or comes_back):
        return []
    by_chance = float(np.delete(costs, row).max()) / seen.margin.shape[1]
    late = estimate(seen.margin[row])
    late = Estimate(late.ns, late.half_width_ns if np.isfinite(late.half_width_ns) else by_chance)
    known = [s.lost for s in slow if s.row == row]
    bound = known[0] if known else Estimate(float(waited[row].mean()), late.half_width_ns)
    lost = min(late, bound, key=lambda estimate: estimate.ns)
    share = {label: float(values[row].sum()) for label, values in by_label.items()}
    where = max(share, key=lambda label: share[label], default="the step")
    always = np.ones(seen.margin.shape[1], dtype=bool)
    return [_Slow(row, seen.margin[row], always, lost, where, (int(seen.last[row]), int(seen.operations[row])))]


def _places(slow: _Slow, grid: StepGrid, regions: pl.DataFrame | None) -> str:
    """Where the device shows it and, besides, the regions that take the host much longer than its peers each step."""
    if regions is None:
        return slow.where
    rank, length = grid.ranks[slow.row], pl.col("end_ns") - pl.col("start_ns")
    rows = regions.filter(pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
    rows = rows.filter(~pl.col("kind").is_in(_NOT_OWN))
    much = rows.filter(pl.col("rank") == rank).group_by("name").agg(length.sum())
    names = much.filter(pl.col("end_ns") >= slow.lost.ns / 2 * len(grid.steps))["name"]
    longer: dict[str, pl.DataFrame] = {}
    for (name,), of_name in rows.filter(pl.col("name").is_in(names.implode())).group_by("name"):
        values = np.zeros((len(grid.ranks), len(grid.steps)))
        index = (np.searchsorted(grid.ranks, of_name["rank"]), np.searchsorted(grid.steps, of_name["step"]))
        np.add.at(values, index, of_name.select(length).to_series().to_numpy())
        if (above_peers(values)[slow.row] >= slow.lost.ns / 2).all():
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

    That is `min_z` robust standard deviations of a healthy rank's mean: among the peers, or over the rank's own steps.
    """
    means, half_widths = estimates(excess, _TRIM)
    if len(means) > _MANY:
        among = np.full(len(means), _deviation(means))
    else:
        among = np.array([_deviation(np.delete(means, row)) for row in range(len(means))])
    return means, min_z * np.maximum(among, half_widths / 1.96)


def _deviation(values: Floats) -> float:
    """Robust standard deviation."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


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
    burst = excess > max(0.1 * grid.step_ns, _BURST_Z * _deviation(excess))
    cost = np.where(burst, excess, 0.0).sum(axis=1)
    row = int(cost.argmax())
    if cost[row] == 0 or cost[row] < _BURST_SHARE * cost.sum():
        return {}
    typical: Steps = burst[row] & (excess[row] > float(np.median(excess[row][burst[row]])) / 2)
    if not _MIN_BURSTS <= typical.sum() < persistence * len(typical):
        return {}
    return {row: (np.where(typical, excess[row], 0.0), typical)}


def _priced(
    row: int, excess: Floats, when: Steps, waited: Floats, slack_ns: float, by_label: dict[str, Floats]
) -> _Slow:
    """The rank with what its excess costs: no more than its peers were blocked longer than itself, and some slack."""
    if when.all():
        lost, peers_waited = estimate(excess, _TRIM), estimate(waited, _TRIM)
    else:
        lost, peers_waited = over_occurrences(excess, when), over_occurrences(waited, when)
    share = {label: float(values[row][when].mean()) for label, values in by_label.items()}
    where = max(share, key=lambda label: share[label], default="the step")
    return _Slow(row, excess, when, Estimate(min(lost.ns, peers_waited.ns + slack_ns), lost.half_width_ns), where)


def _whole_nodes(
    slow: Sequence[_Slow], grid: StepGrid, ranks: pl.DataFrame
) -> list[tuple[tuple[_Slow, ...], tuple[int, ...]]]:
    """The slow ranks and their node: together where they are all the ranks of a node, else one by one without it."""
    node_of = dict(ranks.select("rank", "node").iter_rows())
    nodes = [node_of.get(rank, -1) for rank in grid.ranks]
    together: list[tuple[tuple[_Slow, ...], tuple[int, ...]]] = []
    for node in sorted({nodes[s.row] for s in slow}):
        members = tuple(s for s in slow if nodes[s.row] == node)
        if 1 < len(members) == nodes.count(node) < len(nodes):
            together.append((members, (node,)))
        else:
            together.extend(((member,), ()) for member in members)
    return together


def _finding(grid: StepGrid, members: tuple[_Slow, ...], nodes: tuple[int, ...], steps: pl.DataFrame) -> Finding:
    worst = max(members, key=lambda member: member.lost.ns)
    ranks = tuple(grid.ranks[member.row] for member in members)
    shown = tuple(np.array(grid.steps)[worst.when].tolist())
    # Lateness is what the others would no longer wait for; the rank's own time, which a fix mends, does not show it.
    costs = price(grid, worst.lost, None if worst.last is None else worst.lost.ns)
    if worst.last is not None and costs["severity"] == "medium":
        costs["severity"] = "low"
    return Finding(
        detector="slow_rank",
        title=_title(ranks, nodes, worst, shown, costs["severity"]),
        where=worst.where,
        advice=f"See what only {named('rank', ranks)} does in {worst.where}. Compare the host with the others: clock "
        "speed, temperature, other processes, CPU pinning.",
        ranks=ranks,
        nodes=nodes,
        steps=() if worst.when.all() else shown,
        fix=None if worst.last is not None else f"node:{nodes[0]}" if nodes else f"rank:{ranks[0]}",
        evidence=_typical_step(grid, worst, steps),
        **costs,
    )


def _title(ranks: tuple[int, ...], nodes: tuple[int, ...], slow: _Slow, steps: tuple[int, ...], severity: str) -> str:
    if slow.last is not None:
        little, small = ("a little ", "small ") if severity == "low" else ("", "")
        often = f"it begins {slow.last[0]} of {slow.last[1]} collectives last"
        return f"Rank {ranks[0]} is {little}late: {often}, at a {small}cost of {duration(slow.lost.ns)} per step"
    one = len(ranks) == 1
    subject = f"Node {nodes[0]} is" if nodes else f"{named('rank', ranks).capitalize()} {'is' if one else 'are'}"
    pronoun = "it computes" if one else f"{named('rank', ranks)} compute"
    if slow.when.all():
        how_much = f"{duration(slow.lost.ns)} longer per step"
    else:
        each_ns = slow.lost.ns * len(slow.when) / len(steps)
        how_much = f"{duration(each_ns)} longer {every_nth(steps, len(slow.when))}"
    return f"{subject} slow: {pronoun} {how_much} than {'its' if one else 'their'} peers"


def _typical_step(grid: StepGrid, slow: _Slow, steps: pl.DataFrame) -> tuple[Evidence, ...]:
    """The step with the median excess among those where it shows."""
    among = np.flatnonzero(slow.when)
    column = among[np.argsort(slow.excess[among])[len(among) // 2]]
    rank, step = grid.ranks[slow.row], grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    how = "longer than its peers" if slow.last is None else "late in its collectives, added up"
    note = f"step {step}: {duration(slow.excess[column])} {how}"
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=note)
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
