"""What-ifs of when communication happens: behind computation, issued earlier, in smaller pieces, or not at all.

Each changes a graph: durations of transfers, and what waits for what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rankscope.analysis.metrics.backward import last_backwards
from rankscope.analysis.metrics.exposed_operations import BY_SORT, computed, exposed_operations
from rankscope.analysis.metrics.judged import in_judged_steps
from rankscope.analysis.replay.graph import Changes, Floats, Ints, spread
from rankscope.analysis.replay.wiring import NONE, Edges, Wiring, transfers
from rankscope.analysis.timeline.build import Timeline

__all__ = ["Pieces", "hidden", "kept_parameters", "operations", "prefetched", "split"]

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
        computed(table)
        .group_by("rank", "step")
        .agg(pl.col("ns").sum())
        .group_by("step")
        .agg(pl.col("ns").median().alias(name))
        for table, name in ((computing, "computed_ns"), (since, "_since_ns"))
    )
    reduces = pl.col("in_backward").fill_null(value=False) & pl.col("op").str.contains("reduce")
    return (
        rows.join(window, on=["rank", "step"], how="left")
        .with_columns(in_backward=pl.col("began_ns") >= pl.col("backward_ns"))
        .group_by("instance_id")
        .agg(
            pl.col("step").first(),
            pl.col(BY_SORT).first().cast(pl.String),
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
        .with_columns(pl.col("instance_id").cast(pl.Int64), again=_gathered_again())
    )


def _gathered_again() -> pl.Expr:
    """Of the gathers of one size in a step, those in backward, no more than there are before it."""
    is_gather = (pl.col("kind") == _SHARDED) & pl.col("op").str.starts_with(_GATHER)
    late = is_gather & pl.col("in_backward").fill_null(value=False)
    of_size = ["group_id", "step", "size_bytes"]
    early = (is_gather & ~late).sum().over(of_size)
    return late & (late.cum_sum().over(of_size) <= early)


def hidden(ops: pl.DataFrame, sort: str, op: str, transfer: Ints, changes: Changes) -> Changes | None:
    """Hide what is exposed of these operations behind computation, but for the edges, as far as there is any.

    `transfer` is the node of each operation's transfer, `NONE` where it has none.
    """
    chosen = ops.with_columns(_node=transfer).filter(pl.col("sort") == sort, (pl.col("op") == op) | (op == ""))
    chosen = chosen.filter(~pl.col("is_edge"), pl.col("exposed_ns") > 0)
    if chosen.is_empty():
        return None
    exposed = pl.col("exposed_ns").sum().over("group_id", "step")
    share = (pl.col("computed_ns").fill_null(0) / exposed).clip(0, 1)
    hides = chosen.select("_node", ns=pl.col("exposed_ns") * share).filter(pl.col("_node") != NONE)
    node, duration = hides["_node"].to_numpy(), changes.duration_ns.copy()
    duration[node] = np.maximum(duration[node] - hides["ns"].to_numpy(), 0.0)
    return replace(changes, duration_ns=duration)


def prefetched(ops: pl.DataFrame, earlier: int, wired: Wiring, changes: Changes) -> Changes | None:
    """Each gather of parameters is issued when the one so many before it in the step is now.

    It follows the gather before it. What the group did between the two moments comes after it.
    """
    place = ["group_id", "step"]
    moved = (
        ops.filter(pl.col("kind") == _SHARDED, pl.col("op").str.starts_with(_GATHER))
        .select(
            *("group_id", "instance_id"),
            source=pl.coalesce(pl.col("instance_id").shift(earlier), pl.col("instance_id").first()).over(place),
            is_first=pl.int_range(pl.len()).over(place) == 0,
        )
        .filter(~pl.col("is_first"))
    )
    edges, source = Edges(), moved["source"].to_numpy()
    sides, of = wired.sides(moved["instance_id"].to_numpy())
    peers = wired.beside(sides, source[of])
    both = peers != NONE
    both[both] = (wired.entries[sides[both]] > 0) & (wired.entries[peers[both]] > 0)
    sides, peers = sides[both], peers[both]
    edges.gone.append(wired.came(sides)[0])
    came, of = wired.came(peers)
    edges.tie(wired.arrives[sides[of]], wired.waited_for[came])
    began = ops.select(source="instance_id", placed_ns="began_ns")
    order = (
        ops.join(moved.select("instance_id", "source"), on="instance_id", how="left")
        .with_columns(pl.col("source").fill_null(pl.col("instance_id")), moved=pl.col("source").is_not_null())
        .filter(pl.col("moved").any().over("group_id"))
        .join(began, on="source", how="left")
        .sort("group_id", "placed_ns", "moved", "began_ns", "instance_id")
    )
    (_follow if wired.on_devices else _queue)(order, wired, edges)
    return edges.into(changes, changes.duration_ns) if any(map(len, edges.waits)) else None


def _follow(order: pl.DataFrame, wired: Wiring, edges: Edges) -> None:
    """On each rank a moved operation of a group, and the one after it, come after the one before."""
    instance, moved = order["instance_id"].to_numpy(), order["moved"].to_numpy()
    group = order["group_id"].rank("dense").to_numpy()
    later = 1 + np.flatnonzero((group[1:] == group[:-1]) & (moved[1:] | moved[:-1]))
    sides, of = wired.sides(instance[later])
    before = wired.beside(sides, instance[later[of] - 1])
    both = (before != NONE) & (wired.arrives[sides] != NONE) & (wired.done[before] != NONE)
    edges.tie(wired.arrives[sides[both]], wired.done[before[both]])


def _queue(order: pl.DataFrame, wired: Wiring, edges: Edges) -> None:
    """Transfers of a group one after the other, in this order and no other."""
    node = transfers(wired.graph, order["instance_id"].to_numpy())
    node, group = node[node != NONE], order["group_id"].rank("dense").to_numpy()[node != NONE]
    of = np.full(len(wired.graph), NONE)
    of[node] = group
    waiting = of[wired.waits]
    edges.gone.append(np.flatnonzero((waiting != NONE) & (waiting == of[wired.waited_for])))
    goes_on = group[1:] == group[:-1]
    edges.tie(node[1:][goes_on], node[:-1][goes_on])


def kept_parameters(ops: pl.DataFrame, wired: Wiring, changes: Changes) -> Changes | None:
    """Parameters stay gathered after forward: backward neither gathers them again nor waits for that."""
    again = ops.filter("again")["instance_id"].to_numpy()
    if not len(again):
        return None
    duration, edges = changes.duration_ns.copy(), Edges()
    sides, of = wired.sides(again)
    of, sides = of[wired.done[sides] != NONE], sides[wired.done[sides] != NONE]
    over, transfer = wired.done[sides], transfers(wired.graph, again)[of]
    goal = np.full(len(wired.graph), NONE)
    goal[over] = transfer
    edges.gone.append(np.flatnonzero(goal[wired.waits] == wired.waited_for))
    duration[over] = duration[transfer] = 0.0
    if wired.on_devices:
        arrives = wired.arrives[sides]
        edges.tie(over[arrives != NONE], arrives[arrives != NONE])
    else:
        came, of = wired.came(sides)
        edges.tie(over[of], wired.waited_for[came])
        _queue(ops.filter(pl.col("again").any().over("group_id")).filter(~pl.col("again")), wired, edges)
    return edges.into(changes, duration)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Into how many equal parts each bucket of gradients goes, `before` it the one that was called before in the step.

    `earlier` is the one that ended before, `NONE` where there is none: gloo moves two at once.

    `share` is what one part takes of what the bucket's transfer takes. With `at_end` all gradients of a bucket are
    ready when its last is, else one after the other since the bucket before was.
    """

    bucket: Ints  # instances
    before: Ints
    earlier: Ints
    parts: Ints  # two at least
    share: Floats
    at_end: bool


def split(pieces: Pieces, wired: Wiring, changes: Changes, ends: Floats) -> Changes:
    """Each part is reduced when its gradients are ready on all ranks, and the part before has been; `ends` of nodes."""
    edges = Edges()
    duration = changes.duration_ns.copy()
    node, earlier = (transfers(wired.graph, of) for of in (pieces.bucket, np.maximum(pieces.earlier, 0)))
    duration[node] *= pieces.share
    # All parts of a bucket but the last are new nodes, numbered from `first` on.
    count = pieces.parts - 1
    first = len(duration) + np.cumsum(count) - count
    part, of = spread(first, count)
    number = 1 + part - first[of]
    follows = (number > 1) | (pieces.earlier != NONE)[of]
    edges.tie(part[follows], np.where(number == 1, earlier[of], part - 1)[follows])
    edges.tie(node, first + count - 1)
    # So is the time until a part's gradients are ready on a rank.
    ready, side_of = wired.ready
    first_ready = np.searchsorted(side_of, np.arange(len(wired.key) + 1))
    sides, of_bucket = wired.sides(pieces.bucket)
    since = wired.beside(sides, pieces.before[of_bucket])
    known = (since != NONE) & (np.diff(first_ready)[sides] > 0)
    known[known] = np.diff(first_ready)[since[known]] > 0
    sides, since, of_bucket = sides[known], since[known], of_bucket[known]
    latest = np.maximum.reduceat(np.append(ends[ready], 0.0), first_ready[:-1])
    spent = np.maximum(latest[sides] - latest[since], 0.0)
    gets, at = spread(first[of_bucket], count[of_bucket])
    share = 1.0 if pieces.at_end else (1 + gets - first[of_bucket][at]) / pieces.parts[of_bucket][at]
    wait = first[-1] + count[-1] + np.arange(len(gets))
    edges.tie(gets, wait)
    begins, of_wait = spread(first_ready[since[at]], np.diff(first_ready)[since[at]])
    edges.tie(wait[of_wait], ready[begins])
    return edges.into(changes, np.concatenate([duration, duration[node][of], spent[at] * share]))
