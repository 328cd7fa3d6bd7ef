"""One rank takes longer over its own work than its peers, and they wait for it.

**Signal.** Own time (the step without communication that blocks the rank, and without input, garbage collection and
compilation) is compared with the median of the other ranks, step by step. A rank is slow if

- it is above its peers in most judged steps (`persistence`) by at least `min_z` robust standard deviations of what
  the peers differ among themselves, or its excess comes in bursts that hardly any other rank has;
- the excess is above `min_fraction` of the step and clear of its own scatter;
- the peers really were blocked longer than this rank: the loss is never larger than that.

`where` is the label (forward, backward, a region of yours, …) that holds most of the excess.

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
from rankscope.analysis.timeline.own import OWN, Estimate, Floats, StepGrid, above_peers, estimate, gain_ns

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives",)

_TRIM = 0.1  # hiccups of the machine in up to 10 % of the steps do not move the mean
_MIN_BURSTS = 4  # fewer are not told from chance


@dataclass(frozen=True, slots=True)
class _Slow:
    """A slow rank, as a row of the grid: what it costs, and in which steps."""

    row: int
    lost: Estimate
    when: NDArray[np.bool_]


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
    slow: list[_Slow] = []
    for row in range(len(grid.ranks)):
        held = _persistent(excess, row, persistence, min_z) or _bursts(grid, excess, row, persistence)
        if held is not None:
            held = _Slow(row, _bounded(grid, held), held.when)
            if held.lost.clear and held.lost.ns >= min_fraction * grid.step_ns:
                slow.append(held)
    findings = [
        _finding(grid, excess, members, nodes, phases, steps) for members, nodes in _whole_nodes(slow, grid, ranks)
    ]
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


def _persistent(excess: Floats, row: int, persistence: float, min_z: float) -> _Slow | None:
    """The rank if it exceeds its peers in most steps and by more than they differ."""
    lost = estimate(excess[row], _TRIM)
    above = float(np.mean(excess[row] > lost.ns / 2))
    if lost.ns <= 0 or above < persistence or lost.ns < min_z * _scatter(excess, row):
        return None
    return _Slow(row, lost, np.ones(excess.shape[1], dtype=bool))


def _bursts(grid: StepGrid, excess: Floats, row: int, persistence: float) -> _Slow | None:
    """The rank if its excess comes in bursts, in fewer steps, and hardly any other rank has bursts."""
    noise = 1.4826 * float(np.median(np.abs(excess - np.median(excess))))
    burst = excess > max(0.1 * grid.step_ns, 5 * noise)
    cost = np.where(burst, excess, 0.0)
    if not burst[row].any() or cost[row].sum() < 0.8 * cost.sum():
        return None
    typical = burst[row] & (excess[row] > float(np.median(excess[row][burst[row]])) / 2)
    if not _MIN_BURSTS <= typical.sum() < persistence * len(typical):
        return None
    return _Slow(row, estimate(np.where(typical, excess[row], 0.0)), typical)


def _bounded(grid: StepGrid, slow: _Slow) -> Estimate:
    """The loss, but no more than the peers were blocked longer than the rank itself."""
    longer = np.where(slow.when, -above_peers(grid.blocked)[slow.row], 0.0)
    waited = estimate(longer, _TRIM if slow.when.all() else 0.0)
    return Estimate(min(slow.lost.ns, waited.ns), slow.lost.half_width_ns)


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


def _finding(
    grid: StepGrid,
    excess: Floats,
    members: tuple[_Slow, ...],
    nodes: tuple[int, ...],
    phases: pl.DataFrame,
    steps: pl.DataFrame,
) -> Finding:
    worst = max(members, key=lambda member: member.lost.ns)
    ranks = tuple(grid.ranks[member.row] for member in members)
    without = grid.busy
    for member in members:
        without[member.row] -= np.where(member.when, excess[member.row], 0.0)
    where = _where(phases, grid, ranks)
    return Finding(
        detector="slow_rank",
        title=_title(ranks, nodes, worst),
        where=where,
        advice=f"See what only {named('rank', ranks)} does in {where}. Compare the host with the others: clock speed, "
        "temperature, other processes, CPU pinning.",
        ranks=ranks,
        nodes=nodes,
        steps=() if worst.when.all() else tuple(np.array(grid.steps)[worst.when].tolist()),
        evidence=_typical_step(grid, excess, worst, steps),
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
        burst_ns = slow.lost.ns * len(slow.when) / times
        how_much = f"{duration(burst_ns)} longer {every_nth(times, len(slow.when))}"
    return f"{subject} slow: {pronoun} {how_much} than {'its' if one else 'their'} peers"


def _where(phases: pl.DataFrame, grid: StepGrid, ranks: tuple[int, ...]) -> str:
    """The label under which the ranks spend the most more than the other ranks."""
    mine = pl.col("rank").is_in(ranks)
    per_label = (
        phases.filter(pl.col("part").is_in(OWN), pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("ns"))
        .group_by("label")
        # Divided by the number of ranks, not of rows: a label that a rank does not have is no time there.
        .agg(
            pl.col("ns").filter(mine).sum() / len(ranks)
            - pl.col("ns").filter(~mine).sum() / max(len(grid.ranks) - len(ranks), 1)
        )
    )
    return str(per_label.sort("ns", "label")["label"][-1]) if len(per_label) else "the step"


def _typical_step(grid: StepGrid, excess: Floats, slow: _Slow, steps: pl.DataFrame) -> tuple[Evidence, ...]:
    """The step with the median excess among those where it shows."""
    among = np.flatnonzero(slow.when)
    column = among[np.argsort(excess[slow.row, among])[len(among) // 2]]
    rank, step = grid.ranks[slow.row], grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    note = f"step {step}: {duration(excess[slow.row, column])} longer than its peers"
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=note)
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
