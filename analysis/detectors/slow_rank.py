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
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import peers_grid, price
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.phrases import every_nth, named
from rankscope.analysis.report.quantities import duration
from rankscope.analysis.timeline.own import (
    Estimate,
    Floats,
    StepGrid,
    above_peers,
    estimate,
    estimates,
    gain_ns,
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


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.65,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name the ranks whose own time is longer than their peers', the costliest first."""
    grid = peers_grid(breakdown)
    excess = above_peers(grid.own)
    by_label = {label: above_peers(values) for label, values in own_by_label(phases, grid).items()}
    found = _bursts(grid, excess, persistence) | _persistent(excess, by_label, persistence, min_z)
    waited = -above_peers(grid.blocked)
    _, slack = _least_apart(waited, _BOUND_Z)
    slow = [_priced(row, *shown, waited[row], slack[row], by_label) for row, shown in sorted(found.items())]
    slow = [s for s in slow if s.lost.clear and s.lost.ns >= min_fraction * grid.step_ns]
    findings = [_finding(grid, members, nodes, steps) for members, nodes in _whole_nodes(slow, grid, ranks)]
    return sorted(findings, key=lambda finding: -finding.lost_ns_per_step)


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.03, min_z: float = 5.0) -> int:
    """The smallest constant excess, in any part of the step, that would have been reported of any rank."""
    grid = peers_grid(breakdown)
    _, least = _least_apart(above_peers(grid.own), min_z)
    return round(max(min_fraction * grid.step_ns, float(least.max())))


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
    without = grid.busy
    for member in members:
        without[member.row] -= member.excess
    return Finding(
        detector="slow_rank",
        title=_title(ranks, nodes, worst, shown),
        where=worst.where,
        advice=f"See what only {named('rank', ranks)} does in {worst.where}. Compare the host with the others: clock "
        "speed, temperature, other processes, CPU pinning.",
        ranks=ranks,
        nodes=nodes,
        steps=() if worst.when.all() else shown,
        evidence=_typical_step(grid, worst, steps),
        **price(grid, worst.lost, gain_ns(grid.busy, without)),
    )


def _title(ranks: tuple[int, ...], nodes: tuple[int, ...], slow: _Slow, steps: tuple[int, ...]) -> str:
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
    note = f"step {step}: {duration(slow.excess[column])} longer than its peers"
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=note)
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
