"""Ranks that others wait for by NCCL's durations, where no profiler ran."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid
from rankscope.analysis.detectors.slow_rank.shape import Steps, Thresholds, persistent, shapes
from rankscope.analysis.metrics.arrival_skew import Lateness, lateness
from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Estimate,
    Floats,
    StepGrid,
    above_peers,
    estimate,
    over_occurrences,
)
from rankscope.analysis.model.parts import APART, MIXED
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import how_to_profile, named
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.analysis.timeline.pipeline_ops import replicas
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotResolvable

__all__ = ["Late", "WaitedFor", "guilty_layer", "late_ranks", "paced_ranks", "refuse_hidden", "waits_by_durations"]

_LARGER_PART = 0.5
_APART = 0.03  # of the step, as what is reported
_TIMED, _EVEN = ("compute", "optimizer"), 0.25  # parts that CUDA events time; factors this close are one


@dataclass(frozen=True, slots=True)
class Late:
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


_Judged = tuple[Lateness, list[tuple[int, ...]], list[int | None]]  # with the ranks of each row, and its node


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """How late nodes, then ranks, are by NCCL's durations."""

    grid: StepGrid
    collectives: pl.DataFrame
    judged: list[_Judged]
    tangled: dict[int, int]  # ranks that may be late since one is that was not seen, and that one


def waits_by_durations(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None,
    ranks: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
    *,
    hosts_only: bool,
) -> WaitedFor | None:
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
    judged: list[_Judged] = [(each, [(rank,) for rank in grid.ranks], [None] * len(grid.ranks))]
    node_of = {} if ranks is None else dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())
    node_of = {rank: node for rank, node in node_of.items() if rank in grid.ranks}
    nodes = sorted(set(node_of.values()))
    together = lateness(collectives, grid, node_of, regions) if set(node_of) == set(grid.ranks) else None
    if 1 < len(nodes) < len(node_of) and together is not None:
        members = [tuple(rank for rank in grid.ranks if node_of[rank] == node) for node in nodes]
        judged.insert(0, (_without_stops(together, grid, members, hosts_only=hosts_only), members, [*nodes]))
    some = _waiting_least(collectives, grid)
    apart = {rank: rank if rank not in some else min(some) for rank in grid.ranks}
    of_some = lateness(collectives, grid, apart, regions) if some else None
    if of_some is not None:
        members = [some if rank == min(some) else (rank,) for rank in sorted(set(apart.values()))]
        of_some = _without_stops(of_some, grid, members, hosts_only=hosts_only)
        judged.append((of_some, members, [None] * len(members)))
    return WaitedFor(grid, collectives, judged, tangled)


def _waiting_least(collectives: pl.DataFrame, grid: StepGrid) -> tuple[int, ...]:
    """Return the two ranks or more, of half of them at most, that wait clearly less than all others; or none.

    Ranks that are late alike are last in turn: each by itself makes the others wait for no longer than the next one.
    """
    rows = collectives.filter(pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
    waits = rows.drop_nulls("wait_ns").group_by("rank").agg(pl.col("wait_ns").sum()).sort("wait_ns", "rank")
    gaps = np.diff(waits["wait_ns"].to_numpy())[: len(waits) // 2]
    count = int(gaps.argmax()) + 1 if len(gaps) else 0
    if count < 2 or gaps.max() < _APART * grid.step_ns * len(grid.steps):
        return ()
    return tuple(sorted(waits["rank"].to_list()[:count]))


def late_ranks(waited_for: WaitedFor, thresholds: Thresholds) -> list[Late]:
    """Return the nodes, then the other ranks, last several together, that the others wait for time and again."""
    grid = waited_for.grid
    found: list[Late] = []
    for late, members, nodes in waited_for.judged:
        excess = above_peers(late.least)
        shown = shapes(grid, excess, {}, thresholds)
        for row, (_, when) in (pair for kind in shown for pair in kind.items()):
            if {rank for other in found for rank in other.ranks} & set(members[row]):
                continue
            least = _mean(late.least[row], when)
            most_ns = max(_mean(late.most[row], when).ns, least.ns)
            if not when.all():
                most_ns = float(np.clip(_longer(grid, when), least.ns, most_ns))
                least = replace(least, ns=most_ns)
            if least.clear and least.ns >= thresholds.min_fraction * grid.step_ns:
                counts = int(late.last[row]), int(late.operations[row])
                one = Late(members[row], nodes[row], late.least[row], when, least, most_ns, *counts)
                found.append(_if_evenly_slow(one, waited_for) if when.all() else one)
    return _not_made_late(found, waited_for)


def refuse_hidden(waited_for: WaitedFor, thresholds: Thresholds) -> None:
    """Not resolvable where others wait for a rank again and again, and only all waits together would cost much."""
    grid = waited_for.grid
    for late, members, _ in waited_for.judged:
        for row in persistent(above_peers(late.most), {}, thresholds.persistence, thresholds.min_z):
            most = estimate(late.most[row], TRIM)
            if most.clear and most.ns >= thresholds.min_fraction * grid.step_ns:
                raise NotResolvable(
                    text(
                        "{who} arrives last at {last} of {operations} collectives and the others wait {least} per "
                        "step for it, or {most} ({share} of the step) if no wait is hidden by computation, which was "
                        "not recorded; a profiled window shows it ({how})",
                        who=named("rank", members[row]),
                        last=int(late.last[row]),
                        operations=int(late.operations[row]),
                        least=duration(estimate(late.least[row], TRIM).ns),
                        most=duration(most.ns),
                        share=percent(most.ns / grid.step_ns),
                        how=how_to_profile(),
                    )
                )


def paced_ranks(collectives: pl.DataFrame, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """In a pipeline: these and the ranks that they hold up within their stage. Empty where there is none."""
    if not collectives["op"].is_in(P2P_OPS).any():
        return ()
    together = collectives.filter(pl.col("op").is_in(MUTUAL_OPS), pl.col("wait_ns").is_not_null())
    held_up = together.filter(pl.col("rank").is_in(ranks), "is_last")["group_id"].value_counts(sort=True)["group_id"]
    slowed = together.filter(pl.col("group_id").is_in(held_up.head(1).implode()))["rank"].unique().sort()
    return tuple(slowed.to_list())


def guilty_layer(late: Late, grid: StepGrid, proxies: pl.DataFrame | None) -> str:
    """Return the late side of a rank by NCCL's proxies: "GPU", "host", or nothing.

    GPU: its data had arrived and its kernel did not take it, for longer than on the other ranks, whose kernels also
    need time for what they take. Host: its senders did not know the address, since it had not called NCCL. Each has to
    explain the larger part of the least that others waited.
    """
    if proxies is None or len(late.ranks) > 1:
        return ""
    rank, least_ns = late.ranks[0], _LARGER_PART * late.cost.ns * len(grid.steps)
    of_call = ["rank", "call"]
    of_receives = proxies.filter(pl.col("event") == "recv").group_by(of_call).agg(pl.col("gpu_wait_ns").max())
    waited, is_late = pl.col("gpu_wait_ns"), pl.col("rank") == rank
    of_ranks = of_receives.group_by("rank").agg(waited.sum())
    longer = of_ranks.select(waited.filter(is_late).sum() - waited.filter(~is_late).median().fill_null(0)).item()
    sent_to = proxies.filter(pl.col("peer_rank") == rank, pl.col("event") == "send")
    if longer >= least_ns:
        return "GPU"
    of_sender = (
        sent_to.group_by(of_call).agg(pl.col("peer_wait_ns").max()).group_by("rank").agg(pl.col("peer_wait_ns").sum())
    )
    return "host" if (of_sender["peer_wait_ns"] >= least_ns).any() else ""


def _without_stops(late: Lateness, grid: StepGrid, members: list[tuple[int, ...]], *, hosts_only: bool) -> Lateness:
    """Return the lateness without what input, garbage collection and the like make of it.

    CUDA events show when the launch queue drained in a stop. Without them it is assumed to have drained if the rank was
    late in that step or in the next one: a stop may come after the step's last operation.
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


def _if_evenly_slow(late: Late, waited_for: WaitedFor) -> Late:
    """Return the same at what it costs if forward and optimizer say that all is slower there by one factor.

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
        longer.append(estimate(own[mine].mean(axis=0) / peers - 1, TRIM))
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
    """Return how much longer these steps are than the others, as a mean over all."""
    length = np.sum(list(grid.parts.values()), axis=0).max(axis=0)
    return float((np.median(length[when]) - np.median(length[~when])) * when.mean())


def _mean(values: Floats, when: Steps) -> Estimate:
    return estimate(values, TRIM) if when.all() else over_occurrences(values, when)


def _tangled(collectives: pl.DataFrame, groups: pl.DataFrame | None, judged: set[int]) -> dict[int, int]:
    """Return the ranks that share a group with one that was not seen, and those that send to or receive from such.

    Operations of all ranks make no rank late: there each is as late as it is by itself.
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


def _not_made_late(found: list[Late], waited_for: WaitedFor) -> list[Late]:
    """Without those of a pipeline's replica that are late by less than half as much as one that sends to them.

    Ranks that exchange data with unrecorded ones may be late because of these, unless they are known to compute longer.
    Not resolvable if no others are left.
    """
    tangled = waited_for.tangled
    judged = [late for late in found if late.factor is not None or not set(late.ranks) & tangled.keys()]
    if found and not judged:
        ranks = next(late for late in found if set(late.ranks) & tangled.keys()).ranks
        raise NotResolvable(
            plural(
                "{late} arrives late, maybe because {other}, which exchanges data with it and was not seen, did",
                "{late} arrive late, maybe because {other}, which exchanges data with them and was not seen, did",
                len(ranks),
                late=named("rank", ranks),
                other=named("rank", [min(tangled[rank] for rank in ranks if rank in tangled)]),
            ),
            unclear=True,
        )
    found, collectives = judged, waited_for.collectives
    if len(found) < 2:
        return found
    replica = _replica_of(collectives)
    kept: list[Late] = []
    made_late: dict[int, float] = {}  # by replica, what the first of its ranks is late by: they come by that
    for late in sorted(found, key=lambda late: -late.cost.ns):
        first_ns = max(made_late.get(replica.get(rank, -1), 0.0) for rank in late.ranks)
        if late.cost.ns >= first_ns / 2:
            kept.append(late)
            for rank in paced_ranks(collectives, late.ranks):
                if rank in replica:
                    made_late.setdefault(replica[rank], late.cost.ns)
    return kept
