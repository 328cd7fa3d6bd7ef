"""Root causes of waits: every wait is charged to the rank that came last, and walked back to why it came late.

A rank that comes last because it had itself waited for a third one is not the root cause: that share goes on to the
third one, through any number of process groups. So a rank can delay the whole job although most ranks never meet it.

Source: delay analysis of Scalasca (Böhme, Geimer, Wolf, Arnold 2010; Böhme et al. 2016): direct and indirect costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.model.parts import BEGAN_LATE, BLOCKED, LEFT_LATE
from rankscope.analysis.model.segments import latest, running_max
from rankscope.analysis.model.tables import numbers
from rankscope.analysis.timeline.host_breakdown import InvariantError
from rankscope.collectors.schema import P2P_OPS

__all__ = [
    "CHARGE_COLUMNS",
    "OUTSIDE",
    "Delays",
    "blocked_by",
    "caused_by_rank",
    "delays",
    "victims",
]

CHARGE_COLUMNS = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "part": pl.String,
    "label": pl.String,
    "direct_ns": pl.Int64,
    "indirect_ns": pl.Int64,
    "blocked_ns": pl.Int64,
}
OUTSIDE = "outside of steps"

_WAITING = ("wait", "bubble")  # time that another rank causes
_MOST_KEYS = 64  # labels beyond the longest ones are one per part: time and memory grow with their number
_REST = "other regions"
_CLOSE_ENOUGH = 1e-7  # share of all waiting that may stay with the last rank found instead of going on
_MOST_HOPS = 1_000
_NEVER = np.int64(np.iinfo(np.int64).min)
_MOST_STEPS_BACK = 64  # in the search for the last operation for which two ranks both waited

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """The charges, and per wait (of one rank in one operation) where its cost goes.

    `charges` has one row per (rank that caused it, step, part, label): `direct_ns` was waited by ranks that met it,
    `indirect_ns` by ranks that waited for those; together they sum to all waiting of the run, to the nanosecond.
    `blocked_ns` is the share in which the waiting ranks could do nothing else: operations may be waited for at once,
    or while the rank computes. Its sum is the time that `phases` has in wait and bubble for matched operations.
    """

    charges: pl.DataFrame
    _ranks: Ints
    _rank: Ints  # the waiting rank, position in `_ranks`; in the order in which each rank's waits ended
    _instance: Ints  # in which operation
    _step: Ints  # and in which step, -1: in none
    _late: Ints  # the rank that came last
    _cost: Floats  # (wait, 2): waited and blocked ns
    _passed: Floats  # share that goes on to the ranks that made `_late` wait
    _first: Ints  # the waits of `_late` it goes on to, in proportion to their blocked time
    _end: Ints


def delays(phases: pl.DataFrame, collectives: pl.DataFrame) -> Delays:
    """Charge each wait of the matched `collectives` to ranks, and to what these did in `phases`.

    The rank that came last is compared with the one that waited, since both last waited for an operation that
    they shared (else since the first step): what it did longer shares the cost in proportion. Its own waiting there
    passes its share on. Only times of one rank are subtracted from each other: no common clock is needed.
    A rank's `phases` are in order of time; without any all is charged to the rank that came last. Raises
    `InvariantError` if charges and waits differ.
    """
    if not phases["rank"].is_sorted():
        phases = phases.sort("rank", "start_ns")
    ranks = np.unique(np.concatenate([collectives["rank"].to_numpy(), phases["rank"].to_numpy()])).astype(np.int64)
    spans = _spans(phases, ranks)
    ops = _operations(collectives, ranks, spans)
    waits = _waits(ops, spans)
    since = _last_met(ops, waits, len(ranks))
    sections = _sections(spans, ops, waits, *since)
    did_longer = [*_longer(spans, sections), np.maximum(sections.outside, 0)]
    longer = np.zeros(len(waits.op))
    for of_key in did_longer:
        longer += of_key
    first, end = _waits_between(waits, since[1], ops.arrival[waits.last])
    blocked_before = np.concatenate([[0], np.cumsum(waits.blocked)])
    has_waited = blocked_before[end] > blocked_before[first]
    waited_longer = np.where(has_waited, np.maximum(sections.waiting, 0), 0)
    whole = np.maximum(longer + waited_longer, waits.waited)
    passed = waited_longer / whole
    result = Delays(
        charges=pl.DataFrame(schema=CHARGE_COLUMNS),
        _ranks=ranks,
        _rank=waits.rank,
        _instance=ops.instance[waits.op],
        _step=ops.step[waits.op],
        _late=waits.late,
        _cost=np.stack([waits.waited, waits.blocked], axis=1).astype(np.float64),
        _passed=passed,
        _first=first,
        _end=end,
    )
    del ops, sections
    received, left = _received(result)
    amount = np.stack([waits.waited, received[:, 0], waits.blocked + received[:, 1]], axis=1)
    unseen = (1 - (longer + waited_longer) / whole)[:, np.newaxis] * amount
    unseen[:, 1] += left[:, 0]
    unseen[:, 2] += left[:, 1]
    never_met = since[0] == _NEVER
    named = [*zip(spans.keys, did_longer[:-1], strict=True), (("other", OUTSIDE), did_longer[-1])]
    charges = _charges(ranks, waits, named, amount / whole[:, np.newaxis], unseen, never_met)
    return Delays(charges=charges, **{f: getattr(result, f) for f in Delays.__slots__ if f != "charges"})


def caused_by_rank(delays: Delays) -> dict[int, int]:
    """Return ns that the ranks of the run waited because of each rank; they sum to all waiting."""
    sums = delays.charges.group_by("rank").agg(pl.col("direct_ns").sum() + pl.col("indirect_ns").sum())
    return dict(sums.sort("rank").iter_rows())


def victims(delays: Delays, roots: Iterable[int]) -> pl.DataFrame:
    """(rank, waited_ns, blocked_ns): what each rank waited because of these, directly or through others."""
    share, count = _share_of(delays, roots), len(delays._ranks)
    columns = [np.bincount(delays._rank, weights=share * cost, minlength=count) for cost in delays._cost.T]
    frame = pl.DataFrame({"rank": delays._ranks, "waited_ns": columns[0], "blocked_ns": columns[1]})
    return frame.select(pl.col("rank").cast(pl.Int32), pl.col("waited_ns", "blocked_ns").round().cast(pl.Int64))


def blocked_by(delays: Delays, roots: Iterable[int]) -> pl.DataFrame:
    """Give (rank, instance_id, step, ns): how long each operation blocked each rank because of these, ns above 0."""
    rows = {"rank": delays._ranks[delays._rank], "instance_id": delays._instance, "step": delays._step}
    frame = pl.DataFrame(rows).with_columns(ns=pl.Series(_share_of(delays, roots) * delays._cost[:, 1]))
    return frame.filter(pl.col("ns") > 0)


def _share_of(delays: Delays, roots: Iterable[int]) -> Floats:
    """Return the share of each wait that goes back to these ranks, directly or through others."""
    blocked = delays._cost[:, 1]
    weight = np.concatenate([[0], np.cumsum(blocked)])
    span = np.maximum(weight[delays._end] - weight[delays._first], 1)
    own = (1 - delays._passed) * np.isin(delays._ranks[delays._late], [*roots])
    share = own
    for _ in range(_MOST_HOPS):
        sums = np.concatenate([[0], np.cumsum(share * blocked)])
        after = own + delays._passed * (sums[delays._end] - sums[delays._first]) / span
        change, share = np.abs(after - share).max(initial=0), after
        if change < _CLOSE_ENOUGH:
            break
    return np.asarray(share)


# ---------------------------------------------------------------- what ranks did


@dataclass(frozen=True, slots=True)
class _Spans:
    """The phases in order of rank and time; `key` is the position in `keys`, -1 for waiting."""

    bounds: Ints  # rank position -> its first row; one more at the end
    start: Ints
    length: Ints
    key: Ints
    blocked: Bools
    keys: list[tuple[str, str]]


def _spans(phases: pl.DataFrame, ranks: Ints) -> _Spans:
    start, length = phases["start_ns"].to_numpy(), (phases["end_ns"] - phases["start_ns"]).to_numpy()
    parts, labels = (phases[c].unique().cast(pl.String).sort().to_list() for c in ("part", "label"))
    part, label = (
        numbers(phases[c], dict(zip(n, range(len(n)), strict=True))) for c, n in (("part", parts), ("label", labels))
    )
    code = part * len(labels) + label
    total = np.bincount(code, weights=length, minlength=len(parts) * len(labels))
    keys: dict[tuple[str, str], int] = {}
    key_of = np.full(len(total), -1)
    for at in np.argsort(-total, kind="stable")[: np.count_nonzero(total)].tolist():
        name, of = parts[at // len(labels)], labels[at % len(labels)]
        if name not in _WAITING:
            key_of[at] = keys.setdefault((name, of if len(keys) < _MOST_KEYS else _REST), len(keys))
    return _Spans(
        bounds=np.searchsorted(phases["rank"].to_numpy(), np.append(ranks, np.iinfo(np.int32).max)),
        start=start,
        length=length,
        key=key_of[code],
        blocked=np.isin(parts, BLOCKED)[part],
        keys=list(keys),
    )


@dataclass(frozen=True, slots=True)
class _Operations:
    """Return matched rows in order of (rank, group, operation): segments, one per rank and group.

    Every rank of the group has one with the same operations. The two sides of point-to-point operations are a group.
    """

    rank: Ints
    instance: Ints
    arrival: Ints
    end: Ints
    waited: Ints
    step: Ints
    last: Ints  # the row of the rank that came last
    segment: Ints
    bounds: Ints  # segment -> its first row; one more at the end
    code: Ints  # segment -> rank * groups + group, ascending
    groups: int
    is_pair: Bools  # group -> it has two sides
    pair: Ints  # group -> code of its two ranks, smaller * ranks + larger, -1
    met: Ints  # the last position in the segment, up to this row's, at whose end the rank waited; -1: none


def _operations(collectives: pl.DataFrame, ranks: Ints, spans: _Spans) -> _Operations:
    rows = collectives.filter(pl.col("instance_id").is_not_null(), pl.col("end_ns").is_not_null()).select(
        "rank", "group_id", "instance_id", "end_ns", pl.col("step").cast(pl.Int64),
        pl.coalesce("device_start_ns", "start_ns").alias("arrival_ns"),
        pl.col("wait_ns").fill_null(0).alias("waited_ns"),
        pl.col("op").is_in(P2P_OPS).alias("p2p"),
    )  # fmt: skip
    rank = np.searchsorted(ranks, rows["rank"].to_numpy()).astype(np.int64)
    instance = rows["instance_id"].to_numpy().astype(np.int64)
    p2p = rows["p2p"].to_numpy()
    count = int(instance.max(initial=-1)) + 1
    low, high = np.full(count, len(ranks)), np.full(count, -1)
    np.minimum.at(low, instance, rank)
    np.maximum.at(high, instance, rank)
    pair = np.where(p2p, (low * len(ranks) + high)[instance], -1)
    _, named = distinct(rows["group_id"].to_numpy())
    _, at, group = np.unique(np.where(p2p, -1 - pair, named), return_index=True, return_inverse=True)
    groups = len(at)
    order = np.lexsort((instance, group, rank))
    rank, group, instance = rank[order], group[order], instance[order]
    code = rank * groups + group
    first = np.flatnonzero(np.diff(code, prepend=-1))
    code = code[first]
    bounds = np.append(first, len(rank)).astype(np.int64)
    segment = np.repeat(np.arange(len(code)), np.diff(bounds))
    waited = rows["waited_ns"].to_numpy()[order]
    by_wait = np.lexsort((waited, instance))
    last = np.full(count, -1)
    last[instance[by_wait][::-1]] = by_wait[::-1]  # the others wait for the rank that waits least
    end = rows["end_ns"].to_numpy()[order]
    position = np.arange(len(rank)) - bounds[segment]
    waiting = _waited(spans, rank, end)
    met = np.where(waiting, np.arange(len(rank)), -1)
    met = np.maximum(np.maximum.accumulate(met), bounds[segment] - 1) - bounds[segment] if len(met) else met
    assert (met <= position).all()
    return _Operations(
        rank=rank,
        instance=instance,
        arrival=rows["arrival_ns"].to_numpy()[order],
        end=end,
        waited=waited,
        step=rows["step"].fill_null(-1).to_numpy()[order],
        last=last[instance],
        segment=segment,
        bounds=bounds,
        code=code,
        groups=groups,
        is_pair=p2p[at],
        pair=pair[at],
        met=met,
    )


def _waited(spans: _Spans, rank: Ints, end: Ints) -> Bools:
    """Return whether the rank was blocked when the operation ended, so that it went on from there.

    True where nothing is known.
    """
    at = latest(spans.start, spans.bounds, rank, end - 1)
    found = at >= spans.bounds[rank]
    at = np.where(found, at, 0)
    if not len(spans.start):
        return np.ones(len(rank), bool)
    inside = found & (end - 1 < spans.start[at] + spans.length[at])
    return np.asarray(~inside | spans.blocked[at])


# ---------------------------------------------------------------- waits


@dataclass(frozen=True, slots=True)
class _Waits:
    """One rank's wait in one operation, in order of rank and of the time at which it was over."""

    op: Ints  # row in the operations
    last: Ints  # the same operation's row of the rank that came last
    rank: Ints
    late: Ints  # rank of `last`
    over: Ints  # when it was over, on the rank's own clock
    step: Ints  # of the late rank
    waited: Ints
    blocked: Ints
    bounds: Ints


def _waits(ops: _Operations, spans: _Spans) -> _Waits:
    waiting = np.flatnonzero(ops.waited > 0)
    over = ops.arrival + ops.waited
    op = waiting[np.lexsort((over[waiting], ops.rank[waiting]))]
    rank = ops.rank[op]
    # Of several waits at once, the next to be over is what blocks; then the one after it.
    blocked = _time_in(spans, spans.key == -1, rank, over[op])
    same = np.concatenate([[False], rank[1:] == rank[:-1]]) if len(rank) else np.empty(0, bool)
    blocked = blocked - np.where(same, np.concatenate([[0], blocked[:-1]]), 0) if len(rank) else blocked
    last = ops.last[op]
    return _Waits(
        op=op,
        last=last,
        rank=rank,
        late=ops.rank[last],
        over=over[op],
        step=ops.step[last],
        waited=ops.waited[op],
        blocked=blocked,
        bounds=np.searchsorted(rank, np.arange(len(spans.bounds))),
    )


def _time_in(spans: _Spans, chosen: Bools, rank: Ints, at: Ints) -> Ints:
    """Return ns that each rank had spent in the chosen phases until `at`."""
    before = np.concatenate([[0], np.cumsum(np.where(chosen, spans.length, 0))])
    row = latest(spans.start, spans.bounds, rank, at)
    began = row >= spans.bounds[rank]
    row = np.where(began, row, 0)
    if not len(spans.start):
        return np.zeros(len(at), np.int64)
    part = np.where(chosen[row], np.clip(at - spans.start[row], 0, spans.length[row]), 0)
    return np.asarray(np.where(began, before[row] + part - before[spans.bounds[rank]], 0))


def _waits_between(waits: _Waits, after: Ints, until: Ints) -> tuple[Ints, Ints]:
    """Return the waits of the late rank that were over in that time: first, and one after the last."""
    first = latest(waits.over, waits.bounds, waits.late, after) + 1
    return first, np.maximum(latest(waits.over, waits.bounds, waits.late, until) + 1, first)


def _last_met(ops: _Operations, waits: _Waits, ranks: int) -> tuple[Ints, Ints]:
    """Return when the waiting and the late rank last went on together, each on its own clock.

    That is the end of the last operation both took part in, in any group, for which both waited: one that they
    did not wait for left their lead and lag as they were. Else before all that was recorded.
    """
    best, best_late = np.full(len(waits.op), _NEVER), np.full(len(waits.op), _NEVER)
    reached = running_max(ops.end, ops.bounds)  # ends ascend
    segment_rank, segment_group = ops.code // ops.groups, ops.code % ops.groups
    for slot in _slots(segment_rank, ops.is_pair[segment_group], ranks):
        group = segment_group[slot[waits.rank]] if len(segment_group) else np.empty(0, np.int64)
        _meet(ops, waits, np.where(slot[waits.rank] >= 0, group, -1), reached, best, best_late)
    pairs = np.flatnonzero(ops.is_pair)
    if len(pairs):
        low, high = np.minimum(waits.rank, waits.late), np.maximum(waits.rank, waits.late)
        order = pairs[np.argsort(ops.pair[pairs])]
        place = np.minimum(np.searchsorted(ops.pair[order], low * ranks + high), len(order) - 1)
        group = np.where(ops.pair[order[place]] == low * ranks + high, order[place], -1)
        _meet(ops, waits, group, reached, best, best_late)
    return best, best_late


def _slots(segment_rank: Ints, is_pair: Bools, ranks: int) -> list[Ints]:
    """Return the segments of collective groups.

    The first of each rank, the second of each rank, … (-1: it has none).
    """
    rows = np.flatnonzero(~is_pair)
    owner = segment_rank[rows]
    nth = np.arange(len(rows)) - np.searchsorted(owner, owner)
    slots = []
    for n in range(int(nth.max(initial=-1)) + 1):
        slot = np.full(ranks, -1)
        slot[owner[nth == n]] = rows[nth == n]
        slots.append(slot)
    return slots


def _meet(ops: _Operations, waits: _Waits, group: Ints, reached: Ints, best: Ints, best_late: Ints) -> None:
    """Move `best` and `best_late` on to the last operation of this group in which the two ranks met, if it is later."""
    here = np.flatnonzero(group >= 0)
    codes = [ranks[here] * ops.groups + group[here] for ranks in (waits.rank, waits.late)]
    segments = [np.minimum(np.searchsorted(ops.code, code), len(ops.code) - 1) for code in codes]
    shared = np.logical_and(*(ops.code[s] == code for s, code in zip(segments, codes, strict=True)))
    here, (mine, theirs) = here[shared], (s[shared] for s in segments)
    limits = []
    for segment, row in ((mine, waits.op[here]), (theirs, waits.last[here])):
        position = latest(reached, ops.bounds, segment, ops.arrival[row]) - ops.bounds[segment]
        own = ops.segment[row] == segment
        limits.append(np.where(own, np.minimum(position, row - ops.bounds[segment] - 1), position))
    at = np.minimum(*limits)
    for _ in range(_MOST_STEPS_BACK):
        before = at.copy()
        for segment in (mine, theirs):
            at = np.where(at >= 0, ops.met[ops.bounds[segment] + np.maximum(at, 0)], -1)
        if (at == before).all():
            break
    else:
        at = np.where(at == before, at, -1)
    met = at >= 0
    here, mine, theirs = here[met], (ops.bounds[mine] + at)[met], (ops.bounds[theirs] + at)[met]
    later = ops.end[mine] > best[here]
    best[here[later]], best_late[here[later]] = ops.end[mine[later]], ops.end[theirs[later]]


# ---------------------------------------------------------------- what the late rank did longer


@dataclass(frozen=True, slots=True)
class _Sections:
    """The bounds of each section in the phases: of the late rank (0 to 1) and of the waiting one (2 to 3)."""

    row: list[Ints]
    into: list[Ints]  # ns into that row
    waiting: Ints  # ns the late rank was longer in waiting …
    outside: Ints  # … and outside of all phases


def _sections(spans: _Spans, ops: _Operations, waits: _Waits, met: Ints, met_late: Ints) -> _Sections:
    begin = np.full(len(spans.bounds) - 1, np.iinfo(np.int64).max)
    np.minimum.at(begin, ops.rank, ops.arrival)
    has = np.diff(spans.bounds) > 0
    begin[has] = np.minimum(begin[has], spans.start[spans.bounds[:-1][has]])
    asked = [
        (waits.late, np.maximum(met_late, begin[waits.late])),
        (waits.late, ops.arrival[waits.last]),
        (waits.rank, np.maximum(met, begin[waits.rank])),
        (waits.rank, ops.arrival[waits.op]),
    ]
    rows, into = [], []
    for rank, at in asked:
        row = latest(spans.start, spans.bounds, rank, at)
        began = row >= spans.bounds[rank]
        row = np.where(began, row, spans.bounds[rank])
        of_row = np.minimum(row, len(spans.start) - 1)
        spent = np.clip(at - spans.start[of_row], 0, spans.length[of_row]) if len(spans.start) else np.zeros_like(at)
        rows.append(row)
        into.append(np.where(began, spent, 0))
    elapsed = (asked[1][1] - asked[0][1]) - (asked[3][1] - asked[2][1])
    sections = _Sections(rows, into, np.empty(0, np.int64), np.empty(0, np.int64))
    waiting = _between(spans, sections, spans.key == -1)
    inside = _between(spans, sections, np.ones(len(spans.key), bool))
    return _Sections(rows, into, waiting, elapsed - inside)


def _longer(spans: _Spans, sections: _Sections) -> list[NDArray[np.float32]]:
    """By how many ns the late rank took longer than the waiting one, for each key; 0 where it took less."""
    keys = range(len(spans.keys))
    return [np.maximum(_between(spans, sections, spans.key == key), 0).astype(np.float32) for key in keys]


def _between(spans: _Spans, sections: _Sections, chosen: Bools) -> Ints:
    before = np.zeros(len(chosen) + 1, np.int64)
    np.cumsum(spans.length * chosen, out=before[1:])
    chosen = np.append(chosen, False)  # where a rank has no phases its sections point behind the last one
    at = [before[row] + into * chosen[row] for row, into in zip(sections.row, sections.into, strict=True)]
    return np.asarray((at[1] - at[0]) - (at[3] - at[2]))


# ---------------------------------------------------------------- from wait to wait


def _received(chain: Delays) -> tuple[Floats, Floats]:
    """(wait, 2): cost that other waits pass on to each; and what each was still to pass on where the walk ended.

    A wait passes on to many: what each gets of it is its blocked time by a density over the range, so that all ranges
    are added at once.
    """
    blocked = chain._cost[:, 1]
    before = np.concatenate([[0], np.cumsum(blocked)])
    span = np.maximum(before[chain._end] - before[chain._first], 1)
    received = np.zeros_like(chain._cost)
    now = chain._cost
    for _ in range(_MOST_HOPS):
        passing = now * chain._passed[:, np.newaxis]
        if passing[:, 0].sum() <= _CLOSE_ENOUGH * chain._cost[:, 0].sum():
            break
        active = passing[:, 0] > 0
        first, end, density = chain._first[active], chain._end[active], (passing / span[:, np.newaxis])[active]
        size = len(now) + 1
        covered = np.cumsum(np.bincount(first, minlength=size) - np.bincount(end, minlength=size))[:-1] > 0
        now = np.zeros_like(now)
        for column in range(now.shape[1]):
            change = np.bincount(first, density[:, column], size) - np.bincount(end, density[:, column], size)
            now[:, column] = np.where(covered, np.maximum(np.cumsum(change)[:-1], 0) * blocked, 0)
        received += now
    return received, now * chain._passed[:, np.newaxis]


def _charges(
    ranks: Ints,
    waits: _Waits,
    longer: list[tuple[tuple[str, str], NDArray[Any]]],
    per_ns: Floats,
    unseen: Floats,
    never_met: Bools,
) -> pl.DataFrame:
    """Return the table of charges.

    The cost of each wait by what the late rank did longer, summed per rank, step and key.
    """
    steps, step = np.unique(waits.step, return_inverse=True)
    cell = waits.late * len(steps) + step
    frames = []

    def charge(part: str, label: str, costs: Floats) -> None:
        sums = [np.bincount(cell, weights=column) for column in costs.T]
        at = np.flatnonzero(sums[0] + sums[1])
        values = dict(zip(("direct_ns", "indirect_ns", "blocked_ns"), (s[at] for s in sums), strict=True))
        names = {"part": pl.lit(part), "label": pl.lit(label)}
        rows = pl.DataFrame({"rank": ranks[at // len(steps)], "step": steps[at % len(steps)], **values})
        frames.append(rows.with_columns(**names))

    for (part, label), ns in longer:
        charge(part, label, ns[:, np.newaxis] * per_ns)
    for label, chosen in ((LEFT_LATE, ~never_met), (BEGAN_LATE, never_met)):
        charge("other", label, np.where(chosen[:, np.newaxis], np.maximum(unseen, 0), 0))
    table = pl.concat(frames).sort("rank", "step", "part", "label")
    waited = table["direct_ns"].to_numpy() + table["indirect_ns"].to_numpy()
    whole = _whole(waited, int(waits.waited.sum()))
    indirect = np.minimum(np.rint(table["indirect_ns"].to_numpy()).astype(np.int64), whole)
    blocked = _whole(table["blocked_ns"].to_numpy(), int(waits.blocked.sum()))
    exact = table.with_columns(
        step=pl.when(pl.col("step") >= 0).then("step"),
        direct_ns=whole - indirect,
        indirect_ns=indirect,
        blocked_ns=blocked,
    )
    return exact.filter(pl.col("direct_ns") + pl.col("indirect_ns") > 0).select(
        pl.col(c).cast(t) for c, t in CHARGE_COLUMNS.items()
    )


def _whole(values: Floats, total: int) -> Ints:
    """Return the values as whole ns that sum to the total, which their own sum must be but for rounding."""
    sums = np.cumsum(values)
    if not len(sums):
        sums = np.zeros(1)
    if abs(sums[-1] - total) > 1e-6 * total + 1:
        raise InvariantError(f"delays of {sums[-1]:.0f} ns are charged for {total} ns of waiting")
    whole = np.rint(sums * (total / sums[-1] if sums[-1] else 1)).astype(np.int64)
    return np.diff(whole, prepend=0)[: len(values)]
