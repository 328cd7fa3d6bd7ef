"""One rank takes longer over its own work than its peers, and they wait for it.

**Signal.** Own time (the step without communication that blocks the rank, and without input, garbage collection and
compilation) is compared with the median of the other ranks, step by step. A rank is slow if

- it is above its peers in most judged steps (`persistence`) by at least `min_z` robust standard deviations of what
  the peers differ among themselves, or its excess comes in bursts that hardly any other rank has;
- the excess is above `min_fraction` of the step and clear of its own scatter;
- the peers really were blocked longer than this rank: the loss is never larger than that.

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
from rankscope.analysis.timeline.own import Estimate, Floats, StepGrid, above_peers, estimate, gain_ns, own_by_label

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives",)

_TRIM = 0.1  # hiccups of the machine in up to 10 % of the steps do not move the mean
_MIN_BURSTS = 4  # fewer are not told from chance


@dataclass(frozen=True, slots=True)
class _Slow:
    """A slow rank, as a row of the grid: its excess (0 in steps where it does not show), its cost, and where."""

    row: int
    excess: Floats
    when: NDArray[np.bool_]
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
    slow: list[_Slow] = []
    for row in range(len(grid.ranks)):
        when = _persistent(excess, row, persistence, min_z)
        if when is None:
            when = _bursts(grid, excess, row, persistence)
        if when is not None:
            held = _located(grid, excess, by_label, row, when, min_z)
            if held.lost.clear and held.lost.ns >= min_fraction * grid.step_ns:
                slow.append(held)
    findings = [_finding(grid, members, nodes, steps) for members, nodes in _whole_nodes(slow, grid, ranks)]
    return sorted(findings, key=lambda finding: -finding.lost_ns_per_step)


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.03, min_z: float = 5.0) -> int:
    """The smallest constant excess that would have been reported of any rank."""
    grid = peers_grid(breakdown)
    excess = above_peers(grid.own)
    return round(max(min_fraction * grid.step_ns, min_z * max(_scatter(excess, row) for row in range(len(excess)))))


def _scatter(excess: Floats, row: int) -> float:
    """One robust standard deviation of a healthy rank's mean excess: among the peers, or over this rank's steps."""
    peers = np.array([estimate(values, _TRIM).ns for values in np.delete(excess, row, axis=0)])
    among = 1.4826 * float(np.median(np.abs(peers - np.median(peers))))
    return max(among, estimate(excess[row], _TRIM).half_width_ns / 1.96)


def _persistent(excess: Floats, row: int, persistence: float, min_z: float) -> NDArray[np.bool_] | None:
    """All steps, if the rank exceeds its peers in most of them and by more than they differ."""
    lost = estimate(excess[row], _TRIM)
    above = float(np.mean(excess[row] > lost.ns / 2))
    if lost.ns <= 0 or above < persistence or lost.ns < min_z * _scatter(excess, row):
        return None
    return np.ones(excess.shape[1], dtype=bool)


def _bursts(grid: StepGrid, excess: Floats, row: int, persistence: float) -> NDArray[np.bool_] | None:
    """The steps of the rank's bursts, if its excess comes in bursts and hardly any other rank has them."""
    noise = 1.4826 * float(np.median(np.abs(excess - np.median(excess))))
    burst = excess > max(0.1 * grid.step_ns, 5 * noise)
    cost = np.where(burst, excess, 0.0)
    if not burst[row].any() or cost[row].sum() < 0.8 * cost.sum():
        return None
    typical: NDArray[np.bool_] = burst[row] & (excess[row] > float(np.median(excess[row][burst[row]])) / 2)
    if not _MIN_BURSTS <= typical.sum() < persistence * len(typical):
        return None
    return typical


def _located(
    grid: StepGrid, excess: Floats, by_label: dict[str, Floats], row: int, when: NDArray[np.bool_], min_z: float
) -> _Slow:
    """The slow rank with the labels under which it stands out, and the loss there."""
    trim = _TRIM if when.all() else 0.0
    shown = {label: np.where(when, values[row], 0.0) for label, values in by_label.items()}
    means = {label: estimate(values, trim).ns for label, values in shown.items()}
    apart = [label for label in shown if abs(means[label]) >= min_z * _scatter(by_label[label], row)]
    total = np.where(when, excess[row], 0.0)
    located = np.sum([shown[label] for label in apart], axis=0) if apart else np.zeros_like(total)
    # Spread over many labels, a loss may stand out under none of them.
    if estimate(located, trim).ns < estimate(total, trim).ns / 2:
        located = total
    lost = estimate(located, trim)
    peers_waited = estimate(np.where(when, -above_peers(grid.blocked)[row], 0.0), trim)
    lost = Estimate(min(lost.ns, peers_waited.ns), lost.half_width_ns)
    return _Slow(row, located, when, lost, max(means, key=lambda label: means[label], default="the step"))


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
    without = grid.busy
    for member in members:
        without[member.row] -= member.excess
    return Finding(
        detector="slow_rank",
        title=_title(ranks, nodes, worst),
        where=worst.where,
        advice=f"See what only {named('rank', ranks)} does in {worst.where}. Compare the host with the others: clock "
        "speed, temperature, other processes, CPU pinning.",
        ranks=ranks,
        nodes=nodes,
        steps=() if worst.when.all() else tuple(np.array(grid.steps)[worst.when].tolist()),
        evidence=_typical_step(grid, worst, steps),
        **price(grid, worst.lost, gain_ns(grid.busy, without)),
    )


def _title(ranks: tuple[int, ...], nodes: tuple[int, ...], slow: _Slow) -> str:
    one = len(ranks) == 1
    subject = f"Node {nodes[0]} is" if nodes else f"{named('rank', ranks).capitalize()} {'is' if one else 'are'}"
    pronoun = "it computes" if one else f"{named('rank', ranks)} compute"
    times = int(slow.when.sum())
    if slow.when.all():
        how_much = f"{duration(slow.lost.ns)} longer per step"
    else:
        how_much = f"{duration(slow.lost.ns * len(slow.when) / times)} longer {every_nth(times, len(slow.when))}"
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
