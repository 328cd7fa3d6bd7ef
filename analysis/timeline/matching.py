"""Which rows are one operation seen from several ranks, how long it took, and which ranks waited for which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Clock
from rankscope.analysis.model.tables import WORDS
from rankscope.collectors.rank_ranges import as_ranges, members_of
from rankscope.collectors.schema import ALL_TO_ALL_OPS, OPS, P2P_OPS

__all__ = ["MATCHED_COLUMNS", "MUTUAL_OPS", "ROOTED_OPS", "match_collectives", "members_of", "with_least_waits"]

# One rank gives or takes all: the others do not wait for each other, so their durations alone do not show a wait.
ROOTED_OPS = ("broadcast", "reduce", "gather", "gather_into_tensor", "scatter")
# Every rank needs something of every other, so none ends before the last has arrived. Not so an all-to-all, where two
# ranks may have nothing for each other.
MUTUAL_OPS = tuple(
    op for op in OPS if op.startswith(("allreduce", "allgather", "reduce_scatter", "barrier", "monitor"))
)

_REASONS = (None, "group unknown", "peer missing", "operations differ", "end missing")
_UNMATCHED = pl.Enum(sorted(filter(None, _REASONS)))

MATCHED_COLUMNS: dict[str, Any] = {
    "group": pl.String,
    "group_size": pl.UInt32,
    "instance_id": pl.UInt32,
    "unmatched": _UNMATCHED,
    "transfer_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "is_last": pl.Boolean,
    "arrival_spread_ns": pl.Int64,
    "early_ns": pl.Int64,
}

_TRUSTED = 0.1  # a clock's error that is at most this share of what is judged does not matter
_CHUNK_ROWS = 1 << 18  # small enough for the processor's cache, large enough that numpy's calls cost nothing
_ONE_ROW = 1 << 40  # counts rows above the sum of their operations' codes
_SPARSE = 4  # a stream whose ordinals span more than this times its rows gets places only for those there are
_NEVER = -(1 << 62)  # a time that was not seen; differences from times still fit
_NO_SENDER = -2
_WIDEST = 1 << 62  # of a key
_NOTHING, _BY_DURATION, _ROOTED, _BY_START = range(4)  # what a wait is measured by

_CODE = {op: code for code, op in enumerate(OPS)}
_IS_P2P, _IS_ROOTED, _IS_MUTUAL = (np.isin(OPS, ops) for ops in (P2P_OPS, ROOTED_OPS, MUTUAL_OPS))
_SUMMED_CODE = np.arange(len(OPS))  # of a point-to-point the sum is then the number of receives
_SUMMED_CODE[_IS_P2P] = np.array(OPS)[_IS_P2P] != "send"

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def match_collectives(collectives: pl.DataFrame, groups: pl.DataFrame, clocks: Iterable[Clock]) -> pl.DataFrame:
    """Every row of `collectives`, in its order, with what its peers' rows say about it. None is dropped.

    Adds `group` (its name), `group_size`, and
    - `instance_id`: shared by all rows of one operation, dense in the order of first arrival. Null unless every rank
      of the group (both sides of a point-to-point) has exactly one row, with its end, and the same operation;
      `unmatched` then says why: "group unknown", "peer missing", "end missing", "operations differ".
    - `transfer_ns`: the least (end - start) over its ranks: the last arriver does not wait. Needs no common clock.
      Where no rank's end was seen, the rows' `duration_ns` (a column that may be missing) are taken for (end - start),
      if all have one; clocks say nothing about such an operation.
    - `wait_ns`: (end - start) - transfer_ns. For rooted operations at most the time until the last rank arrived,
      and null where the clocks leave that open by more than a tenth of (end - start).
      Where the device's start is known on all ranks, it is the time until the last one began there, if the clocks show
      that; by the devices' own clock error it can be more than the row's duration.
    - `is_last`: this rank arrived last, or together with the last (null where rooted and the clocks do not show it).
    - `arrival_spread_ns`: last minus first arrival; null where the clocks do not show it.
    - `early_ns`: by how much the row ended before its last rank arrived (a receive: before its send began), where that
      cannot be and clocks are known; else null. Such an end is moved to that arrival, unless a device gave it.
    The clocks show it where their error is at most a tenth of the arrival spread. The error between two nodes is the
    sum of both nodes' errors to the reference, in a group that of its two largest; ranks of one node share a clock.
    A row's start is the one on the device where that is known: the host only enqueues.

    Each stream (a group, or a sender, receiver and tag in it) numbers its operations densely, so stream and ordinal
    are a place in an array, and rows add what they know to their place: one pass, without sorting or hashing rows.

    Source: TraceLens and msprof-analyze (transfer as the minimum over ranks); Scalasca's controlled logical clock (the
    end that is moved behind its cause; local durations are exact, so that what follows stays where it is).
    """
    frame = collectives.rechunk()
    op = frame["op"].cast(WORDS["op"]).to_physical().cast(pl.UInt8).to_numpy()  # positions in OPS
    streams, stream = _streams(frame, op, groups, clocks)
    slots = _slots(stream, frame["seq"].to_numpy(), len(streams.sides))
    chunks = list(_chunks(frame, op, slots.of_row))
    sums = _sum(chunks, len(slots.stream))
    places = _judge(sums, streams, slots.stream)
    early = [_early_ns(rows, places.cause_ns) for rows in chunks]
    places = _without_wrong_ends(places, chunks, early)
    said = [_say(rows, places, ns) for rows, ns in zip(chunks, early, strict=True)]
    return (
        pl.concat(said, rechunk=True)
        if said
        else frame.with_columns(pl.lit(None, t).alias(c) for c, t in MATCHED_COLUMNS.items())
    )


def with_least_waits(matched: pl.DataFrame, groups: pl.DataFrame, clocks: Iterable[Clock]) -> pl.DataFrame:
    """Return the result of `match_collectives`, with what ranks that were seen show where other ranks were not.

    No rank ends such an operation before the last has arrived (nor an all-to-all, where ranks have something for each
    other, as `match_collectives` takes them to have in one of unknown kind), so each waited at least for the last of
    those that were seen.
    `seen_id` is shared by the rows of such an operation and goes on from the `instance_id` that there are,
    `least_wait_ns` is 0 for the last. The columns are there only if several ranks of such a group were seen.
    """
    if matched["unmatched"].null_count() == len(matched):
        return matched
    rows = matched.with_row_index("_row").filter(
        pl.col("unmatched") == "peer missing", pl.col("op").is_in([*MUTUAL_OPS, *ALL_TO_ALL_OPS, "unknown"])
    )
    seen = rows.group_by("group_id").agg(pl.col("rank").unique().sort()).filter(pl.col("rank").list.len() > 1)
    if seen.is_empty():
        return matched
    members = pl.Series([as_ranges(ranks) for ranks in seen["rank"].to_list()])
    among = groups.drop("members").join(seen.select("group_id", members=members), on="group_id")
    found = match_collectives(rows.drop(MATCHED_COLUMNS), among, clocks).filter(pl.col("instance_id").is_not_null())
    least = found.select(
        "_row", least_wait_ns="wait_ns", seen_id=pl.col("instance_id") + (matched["instance_id"].max() or 0) + 1
    )
    return matched.with_row_index("_row").join(least, on="_row", how="left", maintain_order="left").drop("_row")


@dataclass(frozen=True, slots=True)
class _Streams:
    """Facts of each stream of operations; arrays are by stream."""

    named: pl.DataFrame  # group, group_size
    is_p2p: Bools
    sides: Ints  # rows of a whole operation; -1: not known
    key: NDArray[np.uint64]  # sum of the keys of the ranks that have them
    error_ns: Floats  # of a difference between two of its ranks; infinite: not known


@dataclass(frozen=True, slots=True)
class _Slots:
    of_row: NDArray[np.uint32]
    stream: Ints  # by slot


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of the table: views, and what is computed from them."""

    frame: pl.DataFrame
    op: NDArray[np.uint8]
    slot: NDArray[np.uint32]
    rank: NDArray[np.int32]
    arrival_ns: Ints
    end_ns: Ints
    by_device: Bools
    duration_ns: Ints | None  # on the device, -1: not known; None: of no row

    @property
    def by_duration(self) -> Bools | None:
        """Which rows have a duration and no end."""
        return None if self.duration_ns is None else (self.end_ns == _NEVER) & (self.duration_ns >= 0)

    @property
    def own_ns(self) -> Ints:
        """Time from the arrival to the end, far below 0 if unknown."""
        own, by_duration = self.end_ns - self.arrival_ns, self.by_duration
        if by_duration is None or self.duration_ns is None:
            return own
        return np.where(by_duration, self.duration_ns, own)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the rows of each operation."""

    rows: Ints
    code: Ints  # the operation, or for point-to-point the number of receives
    same: Bools  # all rows have that code
    key: NDArray[np.uint64]
    by_device: Ints  # rows that began on a device
    by_duration: Ints  # rows of which only the duration is known
    first_ns: Ints
    last_ns: Ints
    sent_ns: Ints
    transfer_ns: Ints


@dataclass(frozen=True, slots=True)
class _Places:
    """Facts of each operation."""

    shown: pl.DataFrame  # those of MATCHED_COLUMNS that are the same for all rows
    transfer_ns: Ints
    last_ns: Ints
    cause_ns: Ints  # before this no rank (of a point-to-point: the receiver) ends; _NEVER: not known
    error_ns: Floats
    form: NDArray[np.uint8]
    is_resolved: Bools
    is_repaired: Bools


def _slices(rows: int) -> Iterator[slice]:
    """All rows in chunks: what is computed on the way is then small, and its memory is used again."""
    return (slice(low, low + _CHUNK_ROWS) for low in range(0, rows, _CHUNK_ROWS))


def _streams(
    frame: pl.DataFrame, op: NDArray[np.uint8], groups: pl.DataFrame, clocks: Iterable[Clock]
) -> tuple[_Streams, NDArray[np.int32]]:
    """Return the streams, those of whole groups first, and each row's."""
    ids = groups["group_id"].unique().sort()
    code = _positions(ids, frame["group_id"])
    if code is None:  # there are rows of groups that are not known
        ids = frame["group_id"].unique().sort()
        code = _positions(ids, frame["group_id"])
    assert code is not None
    in_p2p = np.flatnonzero(_IS_P2P[op])
    ends, p2p_code = _p2p_streams(
        frame.select("rank", "peer", "tag")[in_p2p], op[in_p2p], code[in_p2p].astype(np.int64)
    )
    group_of = np.concatenate([np.arange(len(ids)), ends["group"].to_numpy()])
    code[in_p2p] = p2p_code + len(ids)

    known = groups.unique("group_id", keep="first").select("group_id", group="name", members="members")
    named = ids.to_frame().join(known, on="group_id", how="left", maintain_order="left")
    members = [np.array(members_of(text or ""), np.int64) for text in named["members"]]
    error = _ClockErrors.of(frame, clocks)
    sender, receiver = ends["sender"].to_numpy(), ends["receiver"].to_numpy()
    known_sides = (sender >= 0) & (receiver >= 0) & (sender != receiver)
    named = named.select("group", group_size=pl.Series([len(m) for m in members], dtype=pl.UInt32))
    known_members = pl.col("group").is_not_null() & (pl.col("group_size") > 0)
    named = named.with_columns(pl.when(known_members).then("group_size"))
    streams = _Streams(
        named=named[group_of],
        is_p2p=np.arange(len(group_of)) >= len(ids),
        sides=np.concatenate([[len(m) or -1 for m in members], np.where(known_sides, 2, -1)]).astype(np.int64),
        key=np.concatenate(
            [
                np.array([_rank_key(m).sum(dtype=np.uint64) for m in members], np.uint64),
                _rank_key(sender) + _rank_key(receiver),
            ]
        ),
        error_ns=np.concatenate([[error.within(m) for m in members], error.between(sender, receiver)]),
    )
    return streams, code


def _positions(sorted_ids: pl.Series, ids: pl.Series) -> NDArray[np.int32] | None:
    """Return the position of each id among the sorted ones; None if one is missing."""
    known, wanted = sorted_ids.to_numpy(), ids.to_numpy()
    found = np.empty(len(wanted), np.int32)
    for here in _slices(len(wanted)):
        part = np.searchsorted(known, wanted[here])
        if not len(known) or (known[np.minimum(part, len(known) - 1)] != wanted[here]).any():
            return None
        found[here] = part
    return found


def _p2p_streams(rows: pl.DataFrame, op: NDArray[np.uint8], group: Ints) -> tuple[pl.DataFrame, Ints]:
    """`group`, `sender` and `receiver` of each stream (they have tags too), and each row's stream.

    A receive from any source has the sender only if one rank alone sends there, and else none.
    """
    sends, any_source = op == _CODE["send"], op == _CODE["recv_any_source"]
    rank, peer, tag = (rows[c].cast(pl.Int64).to_numpy() for c in ("rank", "peer", "tag"))
    sender, receiver = np.where(sends, rank, peer), np.where(sends, peer, rank)
    sender[any_source] = _NO_SENDER
    if any_source.any():
        there = ["group", "receiver", "tag"]
        ends = pl.DataFrame({"group": group, "sender": sender, "receiver": receiver, "tag": tag})
        only = ends.filter(~any_source).group_by(there).agg(pl.col("sender").unique().alias("only"))
        only = only.filter(pl.col("only").list.len() == 1).with_columns(pl.col("only").list.first())
        found = ends.join(only, on=there, how="left", maintain_order="left")["only"].fill_null(_NO_SENDER).to_numpy()
        sender[any_source] = found[any_source]
    key = group  # of all that distinguishes streams
    for part in (sender, receiver, tag):
        least = int(part.min(initial=0))
        span = int(part.max(initial=0)) - least + 1
        if (int(key.max(initial=0)) + 1) * span >= _WIDEST:
            key = _dense(key)
        key = key * span + (part - least)
    key = _dense(key)
    first = np.zeros(int(key.max(initial=-1)) + 1, np.int64)
    first[key] = np.arange(len(key))
    streams = {"group": group[first], "sender": sender[first], "receiver": receiver[first]}
    return pl.DataFrame(streams), key


def _dense(key: Ints) -> Ints:
    """Return the position of each among those that there are."""
    return np.searchsorted(pl.Series(key).unique().sort().to_numpy(), key)


@dataclass(frozen=True, slots=True)
class _ClockErrors:
    """The error of a difference between two ranks' times: of both nodes' clocks together, none within a node."""

    node: Ints  # by rank
    error_ns: Floats  # by rank

    @classmethod
    def of(cls, rows: pl.DataFrame, clocks: Iterable[Clock]) -> _ClockErrors:
        known = {c.node: c.error_ns for c in clocks if c.error_ns is not None}
        rank = rows["rank"].to_numpy()
        node = np.full(rank.max(initial=0) + 1, -1)
        node[rank] = rows["node"].fill_null(-1).to_numpy()
        return cls(node, np.array([known.get(int(n), np.inf) for n in node]))

    def within(self, members: Ints) -> float:
        seen = members[members < len(self.node)]
        nodes, at = np.unique(self.node[seen], return_index=True)
        return float(np.sort(self.error_ns[seen[at]])[-2:].sum()) if len(nodes) > 1 else 0.0

    def between(self, one: Ints, other: Ints) -> Floats:
        last = len(self.node) - 1
        a, b = np.clip(one, 0, last), np.clip(other, 0, last)
        return np.where(self.node[a] == self.node[b], 0.0, self.error_ns[a] + self.error_ns[b])


def _rank_key(rank: Ints) -> NDArray[np.uint64]:
    """Return 64 bits per rank whose sums differ too. Source: SplitMix64."""
    z = (rank.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))


def _slots(stream: NDArray[np.int32], seq: NDArray[np.uint32], count: int) -> _Slots:
    """Return a place for each ordinal of each stream.

    Where ordinals have large holes, for those only that there are.
    """
    least, most = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
    rows = np.zeros(count, np.int64)
    for here in _slices(len(seq)):
        number = seq[here].astype(np.int64)
        np.minimum.at(least, stream[here], number)
        np.maximum.at(most, stream[here], number)
        rows += np.bincount(stream[here], minlength=count)
    span = np.where(rows > 0, most - least + 1, 0)
    sparse = span > _SPARSE * rows
    span[sparse] = 0
    base = np.cumsum(span) - span
    of_slot = np.repeat(np.arange(count), span)
    of_row = np.empty(len(seq), np.uint32)
    begin = np.where(sparse, 0, base - least)
    for here in _slices(len(seq)):
        of_row[here] = begin[stream[here]] + seq[here]
    if sparse.any():
        holed = np.flatnonzero(sparse[stream])
        own, place = np.unique(np.stack([stream[holed], seq[holed]]), axis=1, return_inverse=True)
        of_row[holed] = len(of_slot) + place.ravel()
        of_slot = np.concatenate([of_slot, own[0]])
    return _Slots(of_row, of_slot)


def _chunks(frame: pl.DataFrame, op: NDArray[np.uint8], slot: NDArray[np.uint32]) -> Iterator[_Rows]:
    for here in _slices(len(frame)):
        part = frame[here]
        device, start = part["device_start_ns"], part["start_ns"]
        end = part["end_ns"].fill_null(_NEVER).to_numpy()
        arrival = start if device.null_count() == len(part) else device.fill_null(start)
        rank = part["rank"].to_numpy()
        lasted = part["duration_ns"].fill_null(-1).to_numpy() if "duration_ns" in part.columns else None
        yield _Rows(part, op[here], slot[here], rank, arrival.to_numpy(), end, device.is_not_null().to_numpy(), lasted)


def _sum(chunks: list[_Rows], count: int) -> _Sums:
    packed, key = np.zeros(count, np.int64), np.zeros(count, np.uint64)
    rank_keys = _rank_key(np.arange(1 + max((rows.rank.max(initial=0) for rows in chunks), default=0)))
    code, by_device = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    timed = np.zeros(count, np.int64)
    first, transfer = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).max)
    last, sent = np.full(count, _NEVER), np.full(count, _NEVER)
    for rows in chunks:
        own_code = _SUMMED_CODE[rows.op]
        np.add.at(packed, rows.slot, own_code + _ONE_ROW)
        np.add.at(key, rows.slot, rank_keys[rows.rank])
        np.minimum.at(code, rows.slot, own_code)
        np.minimum.at(first, rows.slot, rows.arrival_ns)
        np.maximum.at(last, rows.slot, rows.arrival_ns)
        np.minimum.at(transfer, rows.slot, rows.own_ns)
        if rows.by_device.any():
            np.add.at(by_device, rows.slot, rows.by_device.astype(np.int64))
        by_duration = rows.by_duration
        if by_duration is not None:
            np.add.at(timed, rows.slot, by_duration.astype(np.int64))
        sends = np.flatnonzero(rows.op == _CODE["send"])
        sent[rows.slot[sends]] = rows.arrival_ns[sends]
    total = packed % _ONE_ROW
    rows_seen = packed // _ONE_ROW
    return _Sums(rows_seen, total, total == rows_seen * code, key, by_device, timed, first, last, sent, transfer)


def _judge(sums: _Sums, streams: _Streams, stream: Ints) -> _Places:
    """Return which operations are whole, and the facts of each that the clocks allow."""
    is_p2p, sides, error = streams.is_p2p[stream], streams.sides[stream], streams.error_ns[stream]
    named = streams.named[stream]
    no_group = ~is_p2p & named["group_size"].is_null().to_numpy()
    missing = (sums.rows != sides) | (sums.key != streams.key[stream])
    differ = np.where(is_p2p, sums.code != 1, ~sums.same)
    timed = sums.by_duration > 0
    is_open = (sums.transfer_ns < _NEVER // 2) | (timed & (sums.by_duration < sums.rows))
    error = np.where(timed, np.inf, error)  # when it began on a device is not known
    why = np.select([no_group, missing, differ, is_open], [1, 2, 3, 4], 0)
    whole = why == 0
    op = np.where(is_p2p, _CODE["send"], sums.code // np.maximum(sums.rows, 1))
    op[~whole] = 0
    spread = sums.last_ns - sums.first_ns
    resolved = whole & (error <= _TRUSTED * spread)
    rank_of = np.full(len(stream), -1)
    by_time = np.flatnonzero(whole)[np.argsort(sums.first_ns[whole], kind="stable")]
    rank_of[by_time] = np.arange(len(by_time))
    form = np.where(_IS_ROOTED[op], _ROOTED, _BY_DURATION)
    form[resolved & (sums.by_device == sums.rows)] = _BY_START
    form[~whole] = _NOTHING
    cause = np.where(is_p2p, sums.sent_ns, np.where(_IS_MUTUAL[op], sums.last_ns, _NEVER))
    cause[~whole | np.isinf(error)] = _NEVER
    shown = named.with_columns(
        instance_id=_where(whole, rank_of).cast(pl.UInt32),
        unmatched=_nulls(_UNMATCHED, len(why)) if whole.all() else pl.Series(_REASONS, dtype=_UNMATCHED).gather(why),
        transfer_ns=_where(whole, sums.transfer_ns),
        arrival_spread_ns=_where(resolved, spread),
    )
    return _Places(
        shown=shown,
        transfer_ns=sums.transfer_ns,
        last_ns=sums.last_ns,
        cause_ns=cause,
        error_ns=error,
        form=form.astype(np.uint8),
        is_resolved=resolved,
        is_repaired=np.zeros(len(stream), np.bool_),
    )


def _early_ns(rows: _Rows, cause_ns: Ints) -> Ints:
    """Return how much too early each row ended, before its cause; 0: it did not."""
    early: Ints = np.maximum(cause_ns[rows.slot] - rows.end_ns, 0)
    early[rows.op == _CODE["send"]] = 0
    return early


def _without_wrong_ends(places: _Places, chunks: list[_Rows], early_ns: list[Ints]) -> _Places:
    """Move ends that no error of a clock explains: they are wrong, and their rows' durations too."""
    pairs = list(zip(chunks, early_ns, strict=True))
    wrong = [rows.slot[(ns > places.error_ns[rows.slot]) & ~rows.by_device] for rows, ns in pairs if ns.any()]
    if not any(len(slots) for slots in wrong):
        return places
    repaired = places.is_repaired.copy()
    repaired[np.concatenate(wrong)] = True
    transfer = np.where(repaired, np.iinfo(np.int64).max, places.transfer_ns)
    for rows, ns in pairs:
        here = np.flatnonzero(repaired[rows.slot])
        own = (rows.own_ns + np.where(rows.by_device, 0, ns))[here]
        np.minimum.at(transfer, rows.slot[here], own)
    shown = places.shown.with_columns(
        transfer_ns=pl.when(pl.col("instance_id").is_not_null()).then(pl.Series(transfer))
    )
    return replace(places, shown=shown, transfer_ns=transfer, is_repaired=repaired)


def _say(rows: _Rows, places: _Places, early_ns: Ints) -> pl.DataFrame:
    """Return the rows with what is known of their operations."""
    slot, arrival = rows.slot, rows.arrival_ns
    form = places.form[slot]
    moved = np.where(rows.by_device, 0, early_ns) if early_ns.any() else None
    own = rows.own_ns
    if moved is not None:
        own += np.where(places.is_repaired[slot], moved, 0)
    wait = own - places.transfer_ns[slot]
    is_last = wait == 0
    has_wait = form != _NOTHING
    has_last = has_wait
    by_clock = np.flatnonzero(form > _BY_DURATION)
    if len(by_clock):
        has_wait, has_last = has_wait.copy(), has_wait.copy()
        its, rooted = slot[by_clock], form[by_clock] == _ROOTED
        until_last, beyond = places.last_ns[its] - arrival[by_clock], wait[by_clock]
        error = places.error_ns[its]
        least, most = np.clip(until_last - error, 0, None), until_last + error
        open_ns = np.minimum(beyond, most) - np.minimum(beyond, least)
        wait[by_clock] = np.where(rooted, np.minimum(beyond, until_last), until_last)
        has_wait[by_clock] = ~rooted | (np.isfinite(error) & (open_ns <= 2 * _TRUSTED * own[by_clock]))
        is_last[by_clock] = until_last == 0
        has_last[by_clock] = ~rooted | places.is_resolved[its]
    said = pl.DataFrame(
        [
            _where(has_wait, wait).alias("wait_ns"),
            _where(has_last, is_last).alias("is_last"),
            _where(early_ns > 0, early_ns).alias("early_ns"),
        ]
    )
    frame = rows.frame
    if moved is not None:
        frame = frame.with_columns(pl.col("end_ns") + pl.Series(moved))
    of_slot, at = places.shown, pl.Series(slot)
    empty = [column for column in of_slot.columns if of_slot[column].null_count() == len(of_slot)]
    shown = of_slot.drop(empty)[at].with_columns(_nulls(of_slot.schema[c], len(slot)).alias(c) for c in empty)
    return frame.hstack(shown).hstack(said).select(*frame.columns, *MATCHED_COLUMNS)


def _where(known: Bools, values: NDArray[Any]) -> pl.Series:
    """Return the values, null where they are not known."""
    series = pl.Series(values)
    if known.all():
        return series
    return series.set(pl.Series(~known), None) if known.any() else _nulls(series.dtype, len(values))


def _nulls(kind: pl.DataType, rows: int) -> pl.Series:
    """So many nulls, whose memory is not touched: fresh memory costs more than what is written to it."""
    return pl.repeat(None, rows, dtype=kind, eager=True)
