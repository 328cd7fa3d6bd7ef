"""What-ifs of when communication happens: behind computation, issued earlier, in smaller pieces, or not at all.

Each changes a graph: durations of transfers, and what waits for what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl

from rankscope.analysis.metrics.backward import last_backwards
from rankscope.analysis.metrics.exposed_operations import computed, exposed_operations
from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.replay.device_graph import BETWEEN
from rankscope.analysis.replay.graph import Changes, Floats, Graph, Ints
from rankscope.analysis.timeline.build import Timeline

__all__ = ["Pieces", "Wiring", "hidden", "kept_parameters", "operations", "prefetched", "split", "transfers", "wiring"]

_GATHER = "allgather"
_SHARDED = "sharded"


def operations(timeline: Timeline) -> pl.DataFrame:
    """Return the matched operations of judged steps, by `instance_id`: group, step, sort, kind, op, size and begin.

    `exposed_ns` is the mean over its ranks, `computed_ns` how long the median rank computes with nothing in flight: in
    the step, and of reductions that begin in its last backward or after it since then, less the share until the first
    gradients are ready: one in as many as there are reductions. `is_edge` as `exposed_operations` has it; `again` says
    whether it gathers in backward what had been gathered in forward.
    """
    phases, collectives = (in_judged_steps(table, timeline.steps) for table in (timeline.phases, timeline.collectives))
    rows = exposed_operations(collectives, phases, timeline.groups).drop_nulls("instance_id")
    known = collectives.drop_nulls("instance_id").unique("instance_id").select("instance_id", "group_id", "size_bytes")
    window = last_backwards(timeline.regions, phases, timeline.kernels).select("rank", "step", "backward_ns")
    computing = phases.filter(pl.col("part") == "compute").drop("label")
    since = computing.join(window, on=["rank", "step"]).filter(pl.col("start_ns") >= pl.col("backward_ns"))
    by_step, by_backward = (
        computed(table).group_by("step").agg(pl.col("ns").median().alias(name))
        for table, name in ((computing, "computed_ns"), (since, "_since_ns"))
    )
    reduces = pl.col("in_backward").fill_null(value=False) & pl.col("op").str.contains("reduce")
    return (
        rows.join(window, on=["rank", "step"], how="left")
        .with_columns(in_backward=pl.col("began_ns") >= pl.col("backward_ns"))
        .group_by("instance_id")
        .agg(
            pl.col("step", "sort", "kind", "op").first(),
            pl.col("is_edge", "in_backward").any(),
            pl.col("exposed_ns").mean(),
            pl.col("began_ns").min(),
        )
        .join(known, on="instance_id")
        .join(by_step, on="step", how="left")
        .join(by_backward, on="step", how="left")
        .with_columns(_reduces=reduces)
        .with_columns(_ready=1 - 1 / pl.len().over("group_id", "step", "_reduces"))
        .with_columns(
            computed_ns=pl.when("_reduces")
            .then(pl.coalesce("_since_ns", "computed_ns") * pl.col("_ready"))
            .otherwise("computed_ns")
        )
        .drop("_since_ns", "_reduces", "_ready")
        .sort("group_id", "began_ns", "instance_id")
        .with_columns(again=_gathered_again())
    )


def _gathered_again() -> pl.Expr:
    """Of the gathers of one size in a step, those in backward, no more than there are before it."""
    is_gather = (pl.col("kind") == _SHARDED) & pl.col("op").str.starts_with(_GATHER)
    late = is_gather & pl.col("in_backward").fill_null(value=False)
    of_size = ["group_id", "step", "size_bytes"]
    early = (is_gather & ~late).sum().over(of_size)
    return late & (late.cum_sum().over(of_size) <= early)


@dataclass(frozen=True, slots=True)
class Wiring:
    """The edges of a graph, and the nodes of its operations by `instance`."""

    graph: Graph
    waits: Ints
    waited_for: Ints
    transfer: dict[int, int]  # instance -> its transfer
    enters: dict[tuple[int, int], Ints]  # (instance, rank) -> edges that say when the rank has come
    done: dict[tuple[int, int], int]  # (instance, rank) -> the node of its end
    arrives: dict[tuple[int, int], int]  # (instance, rank) -> the node of its arrival, or the transfer if there is none
    on_devices: bool  # each rank's arrival is a node

    def between(self, node: int, other: int) -> list[int]:
        """Return the edges by which one waits for the other."""
        low, high = int(self.graph.first[node]), int(self.graph.first[node + 1])
        return [edge for edge in range(low, high) if self.waited_for[edge] == other]


def transfers(graph: Graph, instances: Ints) -> dict[int, int]:
    """Return the node of the transfer of each of these instances."""
    nodes = np.flatnonzero((graph.rank < 0) & np.isin(graph.instance, instances))
    return dict(zip(graph.instance[nodes].tolist(), nodes.tolist(), strict=True))


def wiring(graph: Graph, instances: Ints) -> Wiring:
    """Return the entries of these instances."""
    transfer = transfers(graph, instances)
    waits = np.repeat(np.arange(len(graph)), np.diff(graph.first))
    waited_for = graph.before.astype(np.int64)
    wanted = np.isin(graph.instance, instances)
    edges = np.flatnonzero(wanted[waits])
    to, of = waits[edges], waited_for[edges]
    same = graph.instance[to] == graph.instance[of]
    done = {_place(graph, node): node for node in to[same & (graph.rank[of] < 0)].tolist()}
    arrives = {_place(graph, node): node for node in of[same & (graph.rank[to] < 0)].tolist()}
    is_arrival = np.zeros(len(graph), dtype=bool)
    is_arrival[list(arrives.values())] = True
    called = (graph.rank[to] < 0) & (graph.rank[of] >= 0) & (graph.instance[of] < 0)
    enters: dict[tuple[int, int], list[int]] = {}
    for edge in edges[called | is_arrival[to]].tolist():
        node, other = int(waits[edge]), int(waited_for[edge])
        place = (int(graph.instance[node]), int(graph.rank[other] if graph.rank[node] < 0 else graph.rank[node]))
        enters.setdefault(place, []).append(edge)
        arrives.setdefault(place, node)
    on_devices = any(node != transfer[place[0]] for place, node in arrives.items())
    entered = {place: np.array(edges_in) for place, edges_in in enters.items()}
    return Wiring(graph, waits, waited_for, transfer, entered, done, arrives, on_devices)


def _place(graph: Graph, node: int) -> tuple[int, int]:
    return int(graph.instance[node]), int(graph.rank[node])


@dataclass(slots=True)
class _Edges:
    """Edges that go, and that come."""

    gone: list[int]
    waits: list[int]
    waited_for: list[int]

    def tie(self, node: int, other: int) -> None:
        self.waits.append(node)
        self.waited_for.append(other)

    def into(self, changes: Changes, duration: Floats) -> Changes:
        return Changes(
            duration_ns=duration,
            gone=np.concatenate([changes.gone, np.array(self.gone, dtype=np.int64)]),
            waits=np.concatenate([changes.waits, np.array(self.waits, dtype=np.int64)]),
            waited_for=np.concatenate([changes.waited_for, np.array(self.waited_for, dtype=np.int64)]),
        )


def hidden(ops: pl.DataFrame, sort: str, op: str, transfer: Mapping[int, int], changes: Changes) -> Changes | None:
    """Hide what is exposed of these operations behind computation, but for the edges, as far as there is any."""
    chosen = ops.filter(pl.col("sort") == sort, (pl.col("op") == op) | (op == ""), ~pl.col("is_edge"))
    chosen = chosen.filter(pl.col("exposed_ns") > 0)
    if chosen.is_empty():
        return None
    exposed = pl.col("exposed_ns").sum().over("group_id", "step")
    share = (pl.col("computed_ns").fill_null(0) / exposed).clip(0, 1)
    duration = changes.duration_ns.copy()
    for instance, ns in chosen.select("instance_id", pl.col("exposed_ns") * share).iter_rows():
        node = transfer.get(instance)
        if node is not None:
            duration[node] = max(duration[node] - ns, 0.0)
    return replace(changes, duration_ns=duration)


def prefetched(ops: pl.DataFrame, earlier: int, wired: Wiring, changes: Changes) -> Changes | None:
    """Each gather of parameters is issued when the one so many before it in the step is now.

    It follows the gather before it. What the group did between the two moments comes after it.
    """
    gathers = ops.filter(pl.col("kind") == _SHARDED, pl.col("op").str.starts_with(_GATHER))
    edges = _Edges([], [], [])
    for (group,), of_group in gathers.group_by("group_id", maintain_order=True):
        moved: dict[int, int] = {}  # instance -> the one whose place it takes
        for _, of_step in of_group.group_by("step", maintain_order=True):
            numbers = of_step["instance_id"].to_list()
            moved |= {numbers[k]: numbers[max(k - earlier, 0)] for k in range(1, len(numbers))}
        if moved:
            _move(ops.filter(group_id=group), moved, wired, edges)
    return edges.into(changes, changes.duration_ns) if edges.waits else None


def _move(ops: pl.DataFrame, moved: dict[int, int], wired: Wiring, edges: _Edges) -> None:
    start = dict(ops.select("instance_id", "began_ns").iter_rows())
    ranks = sorted({rank for instance, rank in wired.enters if instance in start})
    for instance, source in moved.items():
        for rank in ranks:
            if (instance, rank) not in wired.enters or (source, rank) not in wired.enters:
                continue
            edges.gone += wired.enters[instance, rank].tolist()
            for other in wired.waited_for[wired.enters[source, rank]].tolist():
                edges.tie(wired.arrives[instance, rank], other)
    numbers = ops["instance_id"].to_list()
    order = sorted(numbers, key=lambda one: (start[moved.get(one, one)], one in moved, start[one]))
    if wired.on_devices:
        _follow(order, moved, ranks, wired, edges)
    else:
        _queue(order, wired, edges)


def _follow(order: list[int], moved: dict[int, int], ranks: list[int], wired: Wiring, edges: _Edges) -> None:
    """On each rank a moved operation, and the one after it, come after the one before."""
    for earlier, later in pairwise(order):
        for rank in ranks:
            node, over = wired.arrives.get((later, rank)), wired.done.get((earlier, rank))
            if (later in moved or earlier in moved) and node is not None and over is not None:
                edges.tie(node, over)


def _queue(order: list[int], wired: Wiring, edges: _Edges) -> None:
    """Transfers of a group one after the other, in this order and no other."""
    nodes = [wired.transfer[one] for one in order if one in wired.transfer]
    is_one = np.zeros(len(wired.graph), dtype=bool)
    is_one[nodes] = True
    edges.gone += np.flatnonzero(is_one[wired.waits] & is_one[wired.waited_for]).tolist()
    for earlier, later in pairwise(nodes):
        edges.tie(later, earlier)


def kept_parameters(ops: pl.DataFrame, wired: Wiring, changes: Changes) -> Changes | None:
    """Parameters stay gathered after forward: backward neither gathers them again nor waits for that."""
    again = ops.filter("again")["instance_id"].to_list()
    if not again:
        return None
    duration, edges = changes.duration_ns.copy(), _Edges([], [], [])
    spared = set(again)
    for place, over in wired.done.items():
        if place[0] not in spared:
            continue
        transfer = wired.transfer[place[0]]
        edges.gone += wired.between(over, transfer)
        came = wired.waited_for[wired.enters[place]].tolist() if not wired.on_devices else [wired.arrives[place]]
        for other in came:
            edges.tie(over, other)
        duration[[over, transfer]] = 0.0
    for _, of_group in (
        [] if wired.on_devices else ops.filter(pl.col("again").any().over("group_id")).group_by("group_id")
    ):
        _queue([one for one in of_group["instance_id"].to_list() if one not in spared], wired, edges)
    return edges.into(changes, duration)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Into how many equal parts each bucket of gradients goes, `before` it the one that was reduced before in the step.

    `share` is what one part takes of what the bucket's transfer takes. With `at_end` all gradients of a bucket are
    ready when its last is, else one after the other since the bucket before was.
    """

    bucket: list[int]
    before: list[int]
    parts: list[int]
    share: list[float]
    at_end: bool


def split(pieces: Pieces, wired: Wiring, changes: Changes, ends: Floats) -> Changes:
    """Each part is reduced when its gradients are ready on all ranks, and the part before has been; `ends` of nodes."""
    edges = _Edges([], [], [])
    duration = changes.duration_ns.copy()
    more: list[float] = []
    ranks = sorted({rank for _, rank in wired.enters})
    for bucket, before, parts, share in zip(pieces.bucket, pieces.before, pieces.parts, pieces.share, strict=True):
        node, earlier = wired.transfer[bucket], wired.transfer[before]
        duration[node] *= share
        for part in range(1, parts):
            number = len(duration) + len(more)
            more.append(duration[node])
            edges.tie(number, earlier)
            for rank in ranks:
                since, until = _ready(wired, (before, rank)), _ready(wired, (bucket, rank))
                if not since or not until:
                    continue
                spent = max(ends[until]) - max(ends[since])
                more.append(max(spent, 0.0) * (1.0 if pieces.at_end else part / parts))
                for other in since:
                    edges.tie(len(duration) + len(more) - 1, other)
                edges.tie(number, len(duration) + len(more) - 1)
            earlier = number
        edges.tie(node, earlier)
    return edges.into(changes, np.concatenate([duration, more]))


def _ready(wired: Wiring, place: tuple[int, int]) -> list[int]:
    """Return the nodes whose ends made the operation's data ready, without communication."""
    graph = wired.graph
    found: list[int] = []
    for node in wired.waited_for[wired.enters[place]].tolist() if place in wired.enters else ():
        pauses = graph.labels[graph.label[node]] == BETWEEN
        before = wired.waited_for[graph.first[node] : graph.first[node + 1]].tolist() if pauses else [node]
        found += [one for one in before if graph.instance[one] < 0]
    return found
