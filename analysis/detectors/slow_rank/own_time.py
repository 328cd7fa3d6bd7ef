"""Ranks, or nodes, that take longer over their own work than their peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, FEW_STEPS, judged_grid, peers_grid, visible
from rankscope.analysis.detectors.slow_rank.late_arrival import (
    charged_operations,
    latecomer,
    no_more_than_late,
    nodes_by_rank,
    places_of,
)
from rankscope.analysis.detectors.slow_rank.shape import (
    Shown,
    Slow,
    Steps,
    Thresholds,
    least_apart,
    shapes,
)
from rankscope.analysis.detectors.slow_rank.wording import finding_of
from rankscope.analysis.metrics.arrival_skew import Arrivals, arrivals
from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Floats,
    Ints,
    StepGrid,
    above_peers,
    estimate,
    estimates,
    over_occurrences,
    own_by_label,
)
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.parallelism import roles_of
from rankscope.errors import NotResolvable

__all__ = ["by_own_time", "resolution_of_own_time"]

_BOUND_Z = 2.0  # the bound on a loss is a measurement too, and ranks differ by chance
_ALIKE = 0.5  # of the judged one's excess: ranks with as much count as slow like it
_MANY_ALIKE = 4  # ranks: as many findings would hide the others
_MOST_MIXED = 0.1  # of the step: with more, silence is no proof of health
_HOSTS_IDLE = 0.1  # share of the step: where devices idle more for hosts, some of these lag behind by chance


@dataclass(frozen=True, slots=True)
class _Peers:
    """What is compared: ranks, or the mean over the ranks of each node, with those of the same role.

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
        """Return the ranks with those of `rows` shorter by what their node takes longer than the others."""
        own, by_label = self.own.copy(), {label: values.copy() for label, values in self.by_label.items()}
        own[rows] -= nodes.excess[node]
        for label, excess in nodes.excess_by_label.items():
            by_label[label][rows] -= excess[node]
        return replace(self, own=own, by_label=by_label)


def by_own_time(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    thresholds: Thresholds,
) -> list[Finding]:
    """Return findings of the ranks and nodes whose own time is longer; in few steps of those that come late."""
    grid, role, seen, on_devices = _seen(breakdown, collectives, regions, groups)
    few = on_devices and len(grid.steps) < ENOUGH_STEPS
    peers = _Peers(grid.own, grid.maybe_blocked, own_by_label(phases, grid), role)
    least_ns = thresholds.min_fraction * grid.step_ns
    slow_nodes: list[Slow] = []
    if not few:
        slow_nodes, peers = _slow_nodes(peers, grid, ranks, thresholds)
    each = [np.array([row]) for row in range(len(grid.ranks))]
    slow = _slow(grid, peers, peers.own, each, seen, thresholds)
    by_label = peers.excess_by_label
    if seen is not None:
        slow = [no_more_than_late(s, seen.margin) for s in slow]
    slow = [s for s in (*slow_nodes, *slow) if s.lost.clear and s.lost.ns >= least_ns]
    if few or (on_devices and not slow):
        assert collectives is not None
        hosts_keep_up = grid.of("host").mean() < _HOSTS_IDLE * grid.step_ns
        made = charged_operations(phases, collectives, grid, ranks)
        slow = latecomer(*made, by_label, nodes_by_rank(ranks), any_several=hosts_keep_up)
    if few or seen is not None:
        slow = [s if s.nodes else replace(s, where=places_of(s, grid, role, regions)) for s in slow]
    slow = _together(slow)
    return [finding_of(grid, s, steps) for s in sorted(slow, key=lambda s: -s.lost.ns)]


def resolution_of_own_time(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    min_fraction: float,
    min_z: float,
) -> int:
    """Return the smallest excess of own time that would have been reported of any rank."""
    grid, role, seen, on_devices = _seen(breakdown, collectives, regions, groups)
    alone = sorted({*breakdown["rank"].unique()} - {*grid.ranks})
    if alone:
        raise NotResolvable(
            text("no other rank does the same work as {alone}: a pipeline stage of its own", alone=named("rank", alone))
        )
    mixed = _mixed_fraction(breakdown)
    if mixed > _MOST_MIXED:
        raise NotResolvable(
            text("in {share} of the step CUDA events do not show whether ranks compute or wait", share=percent(mixed))
        )
    least = []
    if on_devices and seen is not None:
        least.append(float(seen.margin.mean(axis=1).max()))
    elif on_devices:  # all others wait for a straggler
        least.append(float(np.sort(grid.of("wait").mean(axis=1))[1]))
    if not on_devices or len(grid.steps) >= ENOUGH_STEPS:
        least.append(float(least_apart(above_peers(grid.own, role), min_z)[1].max()))
    least_ns = min(least)
    return visible(grid, max(min_fraction * grid.step_ns, least_ns))


def _mixed_fraction(breakdown: pl.DataFrame) -> float:
    """Share of the step in which CUDA events do not show whether ranks compute or wait."""
    grid = judged_grid(breakdown, 1)
    return float(grid.of(MIXED).mean()) / grid.step_ns


def _seen(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> tuple[StepGrid, Ints, Arrivals | None, bool]:
    """Return the grid of the ranks that have peers, and the role of each, over a few steps at least.

    Arrivals by one clock.

    One step will do where operations were seen on the devices. Last: whether they were, so that these can be the
    sample.
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
    return grid.only(has_peers), role[has_peers], seen, on_devices


def _slow_nodes(
    peers: _Peers, grid: StepGrid, ranks: pl.DataFrame, thresholds: Thresholds
) -> tuple[list[Slow], _Peers]:
    """Return the nodes whose ranks are all slow, and the ranks as they would be if those nodes were like the others.

    Fewer steps suffice to exclude chance for all ranks of a node than for one of them.
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
    slow: list[Slow] = []
    ranks_of = [np.flatnonzero(node == row) for row in range(len(numbers))]
    least_ns = thresholds.min_fraction * grid.step_ns
    for one in _slow(grid, nodes, peers.own, ranks_of, None, thresholds):
        rows = ranks_of[one.rows[0]]
        if len(rows) > 1 and one.lost.clear and one.lost.ns >= least_ns and _all_slow(peers, node, rows, one):
            slow.append(replace(one, rows=tuple(rows.tolist()), nodes=(int(numbers[one.rows[0]]),)))
            peers = peers.without(rows, nodes, one.rows[0])
    return slow, peers


def _mean_by(of: Ints, values: Floats) -> Floats:
    """Mean over the rows of each number in `of`, in their order."""
    _, count = np.unique(of, return_counts=True)
    sums = np.add.reduceat(values[np.argsort(of, kind="stable")], np.cumsum(count) - count, axis=0)
    return np.asarray(sums / count[:, np.newaxis])


def _all_slow(peers: _Peers, node: Ints, rows: Ints, slow: Slow) -> bool:
    """Say whether each rank of a node takes at least half of what is lost longer than those of its role elsewhere.

    In the steps in which the node is slow.
    """
    elsewhere, when = node != node[rows[0]], slow.when
    usual = [np.median(peers.own[elsewhere & (peers.role == peers.role[row])], axis=0) for row in rows]
    longer = (peers.own[rows] - np.array(usual))[:, when]
    return bool((estimates(longer, TRIM)[0] >= slow.lost.ns * len(when) / when.sum() / 2).all())


def _slow(
    grid: StepGrid,
    peers: _Peers,
    own: Floats,
    ranks_of: Sequence[Ints],
    seen: Arrivals | None,
    thresholds: Thresholds,
) -> list[Slow]:
    """Return those of `peers` that are slow in most steps, for a while or in bursts; `own` and others as of `_priced`.

    One that is always a little behind may have bursts besides: the costlier of the two is returned.
    """
    shown = shapes(grid, peers.excess, peers.excess_by_label, thresholds)
    priced = [s for found in shown for s in _priced(found, peers, own, ranks_of, seen)]
    rows = sorted({s.rows for s in priced})
    return [max((s for s in priced if s.rows == row), key=lambda s: s.lost.ns) for row in rows]


def _together(slow: list[Slow]) -> list[Slow]:
    """Return the same, ranks that are slow in all steps as one where they are many and alike.

    Each of these costs what it does with the others fixed, so that the costliest is what all of them cost.
    """
    alone = [s for s in slow if s.when.all() and len(s.rows) == 1 and not s.nodes and s.chance is None]
    most_ns = max((s.excess.mean() for s in alone), default=0.0)
    alike = [s for s in alone if s.excess.mean() >= _ALIKE * most_ns]
    if len(alike) < _MANY_ALIKE:
        return slow
    costliest = max(alike, key=lambda s: s.lost.ns)
    rows = tuple(sorted(row for s in alike for row in s.rows))
    one = replace(costliest, rows=rows, excess=np.mean([s.excess for s in alike], axis=0))
    return [one, *(s for s in slow if s not in alike)]


def _priced(
    found: dict[int, Shown], peers: _Peers, own: Floats, ranks_of: Sequence[Ints], seen: Arrivals | None
) -> list[Slow]:
    """Return the slow ones among `peers` with what each costs.

    `own` is that of the ranks, of which each holds `ranks_of`.

    That is by how much the longest rank of a step, whatever its role, is longer than it would be without the excess,
    and no more than its peers were blocked longer than itself, and some slack. Peers that are as slow count as fixed:
    to fix this one alone would be of no use. Where arrivals on the devices were `seen`, these show better which
    rank came next; the cost is the excess.
    """
    waited = -above_peers(peers.blocked, peers.role)
    _, slack = least_apart(waited, _BOUND_Z)
    by_label = peers.excess_by_label
    usual = np.maximum(np.median(own, axis=0), 1.0)
    means = {row: float(excess.mean()) for row, (excess, _) in found.items()}
    slow: list[Slow] = []
    for row, (excess, when) in found.items():
        others = own.copy()
        for other in found:
            if other != row and means[other] >= _ALIKE * means[row]:
                others[ranks_of[other]] -= _steady(*found[other], usual)
        fixed = others.copy()
        fixed[ranks_of[row]] -= _steady(excess, when, usual)
        longer = others.max(axis=0) - fixed.max(axis=0) if seen is None else excess
        if when.all():
            lost, bound = estimate(longer, TRIM), estimate(waited[row], TRIM)
        else:
            lost, bound = over_occurrences(longer, when), over_occurrences(waited[row], when)
        share = {label: float(values[row][when].mean()) for label, values in by_label.items()}
        where = max(share, key=lambda label: share[label], default="the step")
        lost = replace(lost, ns=min(lost.ns, bound.ns + slack[row]))
        slow.append(Slow((row,), excess, when, lost, where))
    return slow


def _steady(excess: Floats, when: Steps, usual: Floats) -> Floats:
    """Return the time per step that a fix saves.

    Always the same share of what is `usual`, since scatter stays; or bursts.
    """
    return usual * estimate(excess / usual, TRIM).ns if when.all() else excess
