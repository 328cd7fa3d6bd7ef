"""The graph of what the ranks' main threads and their communication did.

A main thread is a chain: its own time as measured, cut where operations are called, and spans in which it is blocked.
A blocked span ends its wake-up after the operations that ended in it. An operation is one transfer that waits for the
calls of all its ranks, and an end on each of them. Steps follow each other with no barrier but that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import among, distinct
from rankscope.analysis.metrics.host_stalls import only_hosts_seen
from rankscope.analysis.metrics.trend import longer_stretch
from rankscope.analysis.model.finding import Fidelity
from rankscope.analysis.model.lookup import looked_up
from rankscope.analysis.model.segments import MOST
from rankscope.analysis.model.tables import in_order, numbers
from rankscope.analysis.replay.chains import Chains, chains_of
from rankscope.analysis.replay.graph import Floats, Graph, Ints, Nodes, Shorts, assemble, replay, spread
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.host_breakdown import PARTS
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.analysis.timeline.rank_keys import RankKeys
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotReplayable

__all__ = ["HostGraph", "before_steps", "fidelity", "graph_of", "step_lengths"]

_LATE_STAMP_NS = 1_000_000  # an operation's end can be stamped that much after the thread that waited for it went on
_LATE_SHARE = 0.1  # of the wait
# A group's transfers follow each other on a rank. gloo moves two at once, but they share the link: one after the other
# meets the steps better wherever the two differ.
_AT_ONCE = 1
_CLOCK_ERROR = 0.02  # of the step
_MAIN_THREAD = 0
_NONE = -1
# What the graph asks of each operation: all columns would take three times as much.
_OF_OPERATION = (
    *("rank", "step", "start_ns", "end_ns", "op", "group_id", "group_size", "size_bytes"),
    *("peer", "tag", "instance_id"),
)
_TRANSFER = PARTS.index("transfer")

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGraph:
    """The graph, where its steps end, and which nodes recur from step to step.

    `steps` has a row per step of a rank: rank, step, judged, measured_ns, `last` (the node that ends it) and `before`
    (the one that ends where it starts). `cycle` is the same number for the same thing in each step (a transfer, an
    end, a wake-up), -1 for the ranks' own time.
    """

    graph: Graph
    steps: pl.DataFrame
    cycle: Ints
    unmatched: int  # operations that have their measured length and do not wait for peers
    matched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Operations as each rank saw them. `arrival` and `end` are keys, see `RankKeys`."""

    arrival: Ints
    end: Ints
    place: Ints
    step: Ints
    label: Ints
    position: Ints  # in the step
    group: Ints
    queue: Ints
    instance_id: Ints
    ids: Ints  # the `instance_id` of each whole operation
    op: Ints  # position in `ids`, -1: of no whole operation
    row_of_op: Ints  # of each whole operation that of its last rank
    mutual: Bools  # of one in which all give to all

    @property
    def matched(self) -> Bools:
        return np.asarray(self.op >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Transfers of operations, and the rows' ends; times are ns since the origin on the rank's clock."""

    joins: Bools  # the row's end waits for the transfer
    began: Ints  # when the last rank had come
    transfer_ns: Ints
    local_end: Ints
    end_ns: Ints  # how long the end takes by itself


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Numbers of nodes before they are in order: where each rank begins, spans, transfers, ends of rows."""

    n_ranks: int
    n_spans: int
    n_ops: int
    n_rows: int

    @property
    def spans(self) -> Ints:
        return np.arange(self.n_ranks, self.n_ranks + self.n_spans)

    @property
    def transfers(self) -> Ints:
        return self.n_ranks + self.n_spans + np.arange(self.n_ops)

    @property
    def ends(self) -> Ints:
        return self.n_ranks + self.n_spans + self.n_ops + np.arange(self.n_rows)


@dataclass(frozen=True, slots=True)
class _Arrows:
    """Dependencies, pair by pair."""

    waits: list[Shorts] = field(default_factory=list)
    waited_for: list[Shorts] = field(default_factory=list)

    def tie(self, nodes: Ints, others: Ints) -> None:
        """Each of the nodes waits for the other beside it."""
        self.waits.append(nodes.astype(np.int32))
        self.waited_for.append(others.astype(np.int32))

    def all(self) -> tuple[Shorts, Shorts]:
        """Return all of them, which are not kept."""
        waits, waited_for = (np.concatenate(of) for of in (self.waits, self.waited_for))
        self.waits.clear()
        self.waited_for.clear()
        return waits, waited_for


def graph_of(timeline: Timeline) -> HostGraph:
    """Return the graph of a run whose main threads were recorded. Raises `NotReplayable`."""
    phases = in_order(timeline.phases, "rank", "start_ns")
    if phases.is_empty():
        raise NotReplayable(text("no step was seen"))
    if not timeline.comparable:
        raise NotReplayable(text("the ranks number their steps differently"))
    if len(timeline.marks):
        raise NotReplayable(text("CUDA events alone give no dependency graph; a profiled window does"))
    if only_hosts_seen(timeline.ranks, timeline.collectives, timeline.kernels, timeline.marks):
        raise NotReplayable(text("what the devices did was not recorded; a profiled window does that"))
    if timeline.ranks["node"].n_unique() > 1:
        _check_clocks(timeline)
    bounds = phases.group_by("rank").agg(pl.col("start_ns").min().alias("_from"), pl.col("end_ns").max().alias("_to"))
    seen = timeline.collectives.select(_OF_OPERATION).filter(pl.col("end_ns").is_not_null())
    seen = seen.pipe(looked_up, bounds, ["rank"]).filter(pl.col("start_ns").is_between("_from", "_to", closed="none"))
    ranks = phases["rank"].unique().sort()
    origin = int(phases["start_ns"].to_numpy().min())
    latest = max(int(f["end_ns"].to_numpy().max()) for f in (phases, seen) if len(f))
    keys = RankKeys(ranks.to_numpy(), origin, latest - origin + 2)
    if len(ranks) * keys.span >= MOST:
        raise NotReplayable(text("the run is too long for so many ranks"))
    # Operations of which not all ranks are on a main thread's chain do not wait for peers.
    instance = seen["instance_id"].cast(pl.Int64).fill_null(_NONE).to_numpy()
    ranks_of = pl.lit(pl.Series(np.bincount(instance + 1, minlength=1)[instance + 1]))
    whole = ranks_of == pl.when(pl.col("op").is_in(P2P_OPS)).then(2).otherwise("group_size")
    seen = seen.with_columns(pl.when(whole).then("instance_id").alias("instance_id")).drop("_from", "_to", "group_size")
    labels = sorted({*phases["label"].unique().to_list(), *seen["op"].unique().to_list()})
    rows = _rows(seen, keys, labels)
    del seen
    return _assembled(timeline, phases, rows, keys, labels)


def _check_clocks(timeline: Timeline) -> None:
    """Raise `NotReplayable` if the nodes' clocks do not show which rank was last."""
    errors = [clock.error_ns for clock in timeline.clocks]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        raise NotReplayable(text("the nodes' clocks could not be brought together"))
    step_ns = float(np.median((timeline.steps["end_ns"] - timeline.steps["start_ns"]).to_numpy()))
    if max(known, default=0) > _CLOCK_ERROR * step_ns:
        raise NotReplayable(text("the nodes' clocks may be off by {error}", error=duration(max(known))))


def _assembled(
    timeline: Timeline, phases: pl.DataFrame, rows: _Rows, keys: RankKeys, labels: Sequence[str]
) -> HostGraph:
    chains = chains_of(phases, keys, rows.arrival)
    error_ns = 2 * max((c.error_ns or 0 for c in timeline.clocks), default=0)
    numbers = _Numbers(len(keys.ranks), len(chains.start), len(rows.ids), len(rows.op))
    arrows = _Arrows()
    arrows.tie(numbers.spans, chains.before)
    span, row, ends = _awaited(chains, rows.arrival, rows.end)
    arrows.tie(numbers.spans[span], numbers.ends[row])
    rows = replace(rows, end=ends)
    span_ns, wakes = _woken(chains, rows, span, row)
    node, row = _joined_by_backward(timeline.regions, rows, chains, keys)
    arrows.tie(numbers.spans[node], numbers.ends[row])
    moved = _moved(chains, rows, keys, numbers, arrows, error_ns)
    step = _of_phases(chains, phases["step"].to_numpy())
    nodes = _nodes(phases, step, chains, rows, keys, moved, span_ns, labels)
    position = rows.position
    positions = int(position.max(initial=0)) + 1
    of_op, of_end = position[rows.row_of_op], positions * (1 + numbers.n_ranks + rows.place) + position
    cycle = (
        np.full(numbers.n_ranks, _NONE),
        np.where(wakes >= 0, positions * (1 + chains.place) + wakes, _NONE),
        np.where(of_op >= 0, of_op, _NONE),
        np.where(moved.joins & (position >= 0), of_end, _NONE),
    )
    return HostGraph(
        graph=assemble(nodes, *arrows.all()),
        steps=_steps(timeline, chains, step, keys),
        cycle=np.concatenate(cycle),
        unmatched=int((~rows.matched).sum()),
        matched=len(rows.ids),
    )


def _rows(seen: pl.DataFrame, keys: RankKeys, labels: Sequence[str]) -> _Rows:
    code = dict(zip(labels, range(len(labels)), strict=True))
    instance_id = seen["instance_id"].cast(pl.Int64).fill_null(_NONE).to_numpy()
    is_op = np.bincount(instance_id + 1, minlength=1)[1:] > 0
    op = np.where(instance_id >= 0, np.concatenate([np.cumsum(is_op), [0]])[instance_id] - 1, _NONE)
    row_of_op = np.zeros(is_op.sum(), np.int64)
    row_of_op[op[op >= 0]] = np.flatnonzero(op >= 0)
    return _Rows(
        arrival=keys.of(seen, "start_ns"),
        end=keys.of(seen, "end_ns"),
        place=keys.place(seen),
        step=seen["step"].fill_null(_NONE).to_numpy().astype(np.int64),
        label=numbers(seen["op"], code),
        position=_position_in_cycle(seen, op, row_of_op),
        group=seen["group_id"].to_numpy(),
        queue=_queue(seen),
        instance_id=instance_id,
        ids=np.flatnonzero(is_op),
        op=op,
        row_of_op=row_of_op,
        mutual=(op >= 0) & seen["op"].is_in(MUTUAL_OPS).to_numpy(),
    )


def _woken(chains: Chains, rows: _Rows, span: Ints, row: Ints) -> tuple[Ints, Ints]:
    """Return how long each span of a main thread takes by itself, and the position in the step of what ended its wait.

    Blocked spans wait for what ended in them, `row` beside `span`.
    """
    last_end = chains.start.copy()
    np.maximum.at(last_end, span, rows.end[row])
    wakes = np.full(len(chains.start), _NONE)
    order = np.argsort(rows.end[row], kind="stable")
    wakes[span[order]] = rows.position[row[order]]  # the span waits for the last one to end
    return np.where(chains.blocked, chains.end - last_end, chains.end - chains.start), wakes


def _moved(chains: Chains, rows: _Rows, keys: RankKeys, numbers: _Numbers, arrows: _Arrows, error_ns: int) -> _Moved:
    """Return the operations' dependencies, and the lengths of their transfers and ends without waiting."""
    before = chains.node_before(rows.arrival)
    transfers, ends, op, matched = numbers.transfers, numbers.ends, rows.op, rows.matched
    began, freed = _begins(rows.arrival, rows.end, rows.queue)
    together = rows.mutual & (freed >= 0) & rows.mutual[freed]  # queue as operations, not rank by rank
    began, freed = np.where(together, rows.arrival, began), np.where(together, _NONE, freed)
    queued = freed >= 0
    # On one rank's clock, to compare ranks: without the place.
    local_began, local_end = began - rows.place * keys.span, rows.end - rows.place * keys.span
    last_began = np.full(numbers.n_ops, -1)
    np.maximum.at(last_began, op[matched], local_began[matched])
    later, earlier_op, freed_at = _queued_operations(rows, local_end, last_began)
    last_began[later] = np.maximum(last_began[later], freed_at)
    # A rank that ended before the last one arrived did not wait for it: the root of a broadcast, a buffered send.
    joins = np.zeros(numbers.n_rows, dtype=bool)
    joins[matched] = local_end[matched] >= last_began[op[matched]] - error_ns
    transfer_ns = np.full(numbers.n_ops, np.iinfo(np.int64).max)
    np.minimum.at(transfer_ns, op[joins], np.maximum(local_end[joins] - last_began[op[joins]], 0))
    arrows.tie(transfers[op[matched]], before[matched])
    arrows.tie(transfers[later], transfers[earlier_op])
    arrows.tie(transfers[op[matched & queued]], ends[freed[matched & queued]])
    arrows.tie(ends[joins], transfers[op[joins]])
    done = np.zeros(numbers.n_rows, dtype=np.int64)
    done[joins] = last_began[op[joins]] + transfer_ns[op[joins]]
    alone = ~joins
    arrows.tie(ends[alone], before[alone])
    arrows.tie(ends[alone & queued], ends[freed[alone & queued]])
    done[alone] = local_began[alone]
    earlier = _latest_begun(rows, local_began, local_end, alone & matched, keys.span)
    arrows.tie(ends[earlier >= 0], before[earlier[earlier >= 0]])
    done[earlier >= 0] = np.maximum(done, np.where(earlier >= 0, local_began[earlier], 0))[earlier >= 0]
    return _Moved(
        joins=joins,
        began=last_began,
        transfer_ns=transfer_ns,
        local_end=local_end,
        end_ns=np.maximum(local_end - done, 0),
    )


def _of_phases(chains: Chains, column: NDArray[np.integer]) -> Shorts:
    """Return for each span the value of its phase, -1 where it is in none."""
    values = column.astype(np.int32)[chains.phase]
    values[chains.phase < 0] = _NONE
    return values


def _nodes(
    phases: pl.DataFrame,
    step: Shorts,
    chains: Chains,
    rows: _Rows,
    keys: RankKeys,
    moved: _Moved,
    span_ns: Ints,
    labels: Sequence[str],
) -> Nodes:
    """Return the columns of the nodes, in the order of `_Numbers`; `step` of the spans."""

    def coded(column: str, names: Sequence[str]) -> Shorts:
        return _of_phases(chains, numbers(phases[column], dict(zip(names, range(len(names)), strict=True))))

    def together(kind: type[np.number], *pieces: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate(pieces, dtype=kind, casting="unsafe")

    n_ranks, n_spans, n_ops, n_rows = len(keys.ranks), len(chains.start), len(rows.ids), len(rows.op)
    nothing, of_op = np.broadcast_to(_NONE, n_ranks), rows.row_of_op
    start, end = (times - (chains.place * keys.span - keys.origin) for times in (chains.start, chains.end))
    begun = start[np.searchsorted(chains.place, np.arange(n_ranks))]
    arrival = rows.arrival - (rows.place * keys.span - keys.origin)
    began, ended = moved.began + keys.origin, moved.local_end + keys.origin
    of_ops, transfer = np.broadcast_to(_NONE, n_ops), np.broadcast_to(_TRANSFER, n_ops + n_rows)
    return Nodes(
        duration_ns=together(np.float64, begun - keys.origin, span_ns, moved.transfer_ns, moved.end_ns),
        rank=together(np.int32, keys.ranks, keys.ranks[chains.place], of_ops, keys.ranks[rows.place]),
        step=together(np.int32, nothing, step, rows.step[of_op], rows.step),
        part=together(np.int32, nothing, coded("part", PARTS), transfer),
        label=together(np.int32, nothing, coded("label", labels), rows.label[of_op], rows.label),
        instance=together(np.int64, nothing, np.broadcast_to(_NONE, n_spans), rows.ids, rows.instance_id),
        start_ns=together(np.int64, np.broadcast_to(keys.origin, n_ranks), start, began, arrival),
        end_ns=together(np.int64, begun, end, began + moved.transfer_ns, ended),
        parts=PARTS,
        labels=tuple(labels),
        origin_ns=keys.origin,
    )


def _awaited(chains: Chains, arrival: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Blocked spans and the rows that they wait for, pair by pair; and the rows' ends, none later than what it held up.

    A span waits for what ended in it. Where the next end after it is nearer to its own than the last end in it, the end
    of what held it up was stamped late: it is the next one, if it had been called before and its end follows at once.
    """
    spans = np.flatnonzero(chains.blocked)
    order = np.argsort(end, kind="stable")
    by_end = end[order]
    low = np.searchsorted(by_end, chains.start[spans], side="right")
    high = np.searchsorted(by_end, chains.end[spans], side="right")
    count = high - low
    at, of = spread(low, count)
    pair_span, pair_row = spans[of], order[at]

    after = np.append(by_end, np.iinfo(np.int64).max)[high] - chains.end[spans]
    before = chains.end[spans] - np.where(count > 0, np.append(by_end, 0)[high - 1], np.iinfo(np.int64).min // 2)
    nearer = np.flatnonzero((after < before) & (high < len(order)))
    span, row = spans[nearer], order[high[nearer]]
    late = end[row] - chains.end[span]
    most = _LATE_SHARE * (chains.end[span] - chains.start[span])
    is_call = among(chains.start[span], arrival)
    own = is_call & (arrival[row] == chains.start[span]) & (late <= np.minimum(most, _LATE_STAMP_NS))
    known = (arrival[row] < chains.end[span]) & (own | ~is_call & (late <= np.maximum(most, _LATE_STAMP_NS)))
    end = end.copy()
    np.minimum.at(end, row[known], chains.end[span[known]])
    return np.concatenate([pair_span, span[known]]), np.concatenate([pair_row, row[known]]), end


def _position_in_cycle(seen: pl.DataFrame, op: Ints, row_of_op: Ints) -> Ints:
    """Return the same number for the same operation of each step: its group, operation, size and place among those.

    A whole operation is numbered where its last rank saw it, on all of its ranks alike.
    """
    chosen, place = distinct(np.where(op >= 0, np.append(row_of_op, 0)[op], np.arange(len(op))))
    kind = ["group_id", "op", "size_bytes", "peer", "tag"]
    some = seen.select("rank", "step", *kind)[chosen]
    kinds = some.select(kind).unique(maintain_order=True).with_row_index("_kind")
    numbered = some.join(kinds, on=kind, nulls_equal=True, maintain_order="left")
    nth = numbered.select(pl.int_range(pl.len(), dtype=pl.Int64).over("rank", "step", "_kind")).to_series().to_numpy()
    _, position = distinct(numbered["_kind"].to_numpy().astype(np.int64) * (nth.max(initial=0) + 1) + nth)
    return np.where(numbered["step"].is_null().to_numpy(), _NONE, position)[place]


def _queue(seen: pl.DataFrame) -> Ints:
    """Return which rank and group an operation queues in; sends and receives queue nowhere."""
    groups, group = distinct(seen["group_id"].to_numpy())
    queue = seen["rank"].to_numpy().astype(np.int64) * (len(groups) + 1) + group
    return np.where(seen["op"].is_in(P2P_OPS).to_numpy(), _NONE, queue)


def _begins(arrival: Ints, end: Ints, queue: Ints) -> tuple[Ints, Ints]:
    """Return when each operation's turn came, and the row whose end it had to wait for (-1: it was the first)."""
    order = np.lexsort((arrival, queue))
    freed = np.full(len(order), _NONE)
    earlier, later = order[:-_AT_ONCE], order[_AT_ONCE:]
    same = (queue[earlier] == queue[later]) & (queue[later] >= 0) & (end[earlier] < end[later])
    freed[later[same]] = earlier[same]
    return np.where(freed >= 0, np.maximum(arrival, end[freed]), arrival), freed


def _queued_operations(rows: _Rows, end: Ints, last_began: Ints) -> tuple[Ints, Ints, Ints]:
    """Operations in which all give to all, the one of the group whose transfer was over before it, and when it was.

    A transfer is over when the first rank says so: what the others took to say it holds no transfer up. Of two that
    ran at once the one that ended first counts as the earlier one.
    """
    over = np.full(len(rows.ids), np.iinfo(np.int64).max)
    np.minimum.at(over, rows.op[rows.mutual], end[rows.mutual])
    ops = np.flatnonzero(rows.mutual[rows.row_of_op])
    over, group = np.maximum(over, last_began)[ops], rows.group[rows.row_of_op[ops]]
    order = np.lexsort((over, group))
    ops, over, group = ops[order], over[order], group[order]
    same = group[1:] == group[:-1]
    return ops[1:][same], ops[:-1][same], over[:-1][same]


def _latest_begun(rows: _Rows, began: Ints, end: Ints, of: Bools, span: int) -> Ints:
    """Return for each row of `of` the last row of its operation that had begun when it ended, -1 for the others."""
    found, asked = np.full(len(of), _NONE), np.flatnonzero(of)
    alone = np.zeros(len(rows.ids) + 1, bool)
    alone[rows.op[asked]] = True
    known = np.flatnonzero(alone[rows.op])
    key = rows.op[known] * span + began[known]
    order = np.argsort(key, kind="stable")
    at = np.searchsorted(key[order], rows.op[asked] * span + end[asked], side="right") - 1
    found[asked] = known[order[at]]
    return found


def _joined_by_backward(
    regions: pl.DataFrame, of_operations: _Rows, chains: Chains, keys: RankKeys
) -> tuple[Ints, Ints]:
    """Chain nodes that begin where a backward ends, and the rows that it had to wait for had they not ended before.

    DDP waits at the end of backward for the operations issued in it, unless the script has waited for them since.
    """
    arrival, end = of_operations.arrival, of_operations.end
    of_main = regions.filter(pl.col("thread") == _MAIN_THREAD, pl.col("rank").is_in(keys.ranks))
    backward = of_main.filter(pl.col("kind") == "backward").pipe(in_order, "rank", "start_ns")
    waits = np.sort(keys.of(of_main.filter(pl.col("kind") == "wait"), "start_ns"), kind="stable")
    wait = np.append(waits, np.iinfo(np.int64).max)
    low, high = keys.of(backward, "start_ns"), keys.of(backward, "end_ns")
    inside = np.searchsorted(low, arrival, side="right") - 1
    rows = np.flatnonzero((inside >= 0) & (of_operations.queue != _NONE))
    until = high[inside[rows]]
    at = np.searchsorted(chains.start, until)
    on_chain = (at < len(chains.start)) & (chains.place[np.minimum(at, len(chains.start) - 1)] == until // keys.span)
    unwaited = wait[np.searchsorted(wait, arrival[rows])] >= until
    keep = (arrival[rows] < until) & (end[rows] <= until) & on_chain & unwaited
    return at[keep], rows[keep]


def _steps(timeline: Timeline, chains: Chains, step: Shorts, keys: RankKeys) -> pl.DataFrame:
    """One row per step of a rank, see `HostGraph`."""
    inside = np.flatnonzero(step >= 0)
    within, place = step[inside], chains.place[inside]
    new = np.append(0, np.flatnonzero((within[1:] != within[:-1]) | (place[1:] != place[:-1])) + 1)
    first, last = inside[new], inside[np.append(new[1:], len(inside)) - 1]
    return pl.DataFrame(
        {
            "rank": keys.ranks[chains.place[first]],
            "step": pl.Series(step[first], dtype=pl.Int32),
            "measured_ns": chains.end[last] - chains.start[first],
            "before": chains.before[first],
            "last": len(keys.ranks) + last,
        }
    ).join(timeline.steps.select("rank", "step", "judged"), on=["rank", "step"], how="left", maintain_order="left")


def step_lengths(host: HostGraph, end_ns: Floats) -> Floats:
    """Return the length of each row of `steps`, given when each node ends."""
    return np.asarray(end_ns[host.steps["last"].to_numpy()] - end_ns[host.steps["before"].to_numpy()])


def before_steps(host: HostGraph) -> Ints:
    """Return the nodes that end before their rank's first step begins."""
    graph = host.graph
    begins = host.steps.group_by("rank").agg(pl.col("before").sort_by("step").first())
    begin_ns = np.full(int(graph.rank.max()) + 2, np.iinfo(np.int64).min)  # the last for nodes of no rank, -1
    begin_ns[begins["rank"].to_numpy()] = graph.end_ns[begins["before"].to_numpy()]
    return np.flatnonzero(graph.end_ns <= begin_ns[graph.rank])


def fidelity(host: HostGraph) -> Fidelity:
    """Replay each half of the steps with what transfers, late ends and wake-ups took in the other half.

    The ranks' own time is what was measured, everything else is the mean of the same thing in the other half's steps;
    where steps have two lengths, in those of its own.
    """
    graph = host.graph
    kind = np.where(host.cycle >= 0, 2 * host.cycle + _is_longer(host.steps)[graph.step], _NONE)
    errors: list[Floats] = []
    sums = np.zeros(2)
    for half in (0, 1):
        own_step = graph.step % 2 == half
        recurs = kind >= 0
        fitted = graph.duration_ns.copy()
        usual = _means(kind[recurs & ~own_step], graph.duration_ns[recurs & ~own_step])
        nodes = np.flatnonzero(recurs & own_step)
        fitted[nodes] = usual(kind[nodes], graph.duration_ns[nodes])
        length = step_lengths(host, replay(graph, fitted))
        chosen = (host.steps["judged"] & (host.steps["step"] % 2 == half)).to_numpy()
        measured = host.steps["measured_ns"].to_numpy()[chosen]
        errors.append(np.abs(length[chosen] - measured) / measured)
        sums += length[chosen].sum(), measured.sum()
    error = np.concatenate(errors)
    if host.steps.filter("judged")["step"].n_unique() < 2:
        raise NotReplayable(text("with fewer than two analyzed steps a replay cannot be checked"))
    return Fidelity(
        steps=len(error),
        median_error=float(np.median(error)),
        p90_error=float(np.quantile(error, 0.9)),
        mean_error=float(sums[0] / sums[1] - 1),
    )


def _is_longer(steps: pl.DataFrame) -> Bools:
    """Return of each step number, and of none at the end, whether it is in the part of the run that is longer."""
    judged = steps.filter("judged").group_by("step").agg(pl.col("measured_ns").mean()).sort("step")
    longer = np.zeros(int(steps["step"].to_numpy().max(initial=0)) + 2, dtype=bool)
    inside = longer_stretch(judged["measured_ns"].to_numpy())
    if inside is not None:
        longer[judged["step"].to_numpy()[inside]] = True
    return longer


def _means(kind: Ints, value: Floats) -> Callable[[Ints, Floats], Floats]:
    """Return a function that gives kinds the mean of their values here, and those not here what they have.

    The mean and not the median, since a step is a sum of many, and what takes long now and then is part of it.
    """
    kinds, of = np.unique(kind, return_inverse=True)
    if not len(kinds):
        return lambda _, otherwise: otherwise
    mean = np.bincount(of, weights=value) / np.bincount(of)

    def usual(wanted: Ints, otherwise: Floats) -> Floats:
        at = np.minimum(np.searchsorted(kinds, wanted), len(kinds) - 1)
        return np.where(kinds[at] == wanted, mean[at], otherwise)

    return usual
