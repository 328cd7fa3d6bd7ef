"""Infers process groups from the communication kernels of an Nsight export, which does not say whose they are.

A communicator works on one stream of each of its ranks, its operations come there in one order on all of them, and
none is over on any rank before it has begun on the last. So streams of two ranks are of one group where the names of
their kernels agree one by one, their ends fall together, and every operation overlaps; of several that do, those whose
ends differ least. A kernel of point-to-point communication is of two ranks, and their group has those that are with
each other. Streams that fit no other rank's stay without a group: what they wait for is then not known.

Several communicators that share a stream (synchronous operations since torch 2.8) agree where their groups hold the
same ranks, and otherwise only if their operations have different names: a stream that fits no other is taken apart by
these.

Source: NCCL user guide, "Using multiple NCCL communicators concurrently", and "Group calls".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMMUNICATION, SEND_RECV, kernel_op
from rankscope.analysis.readers import collective_numbering
from rankscope.analysis.readers.nsight_exchanges import (
    CLOSE_NS,
    ENOUGH,
    MOST_NS,
    SLACK_NS,
    Clocks,
    Stream,
    exchanges,
)
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import NO_PEER

__all__ = ["Inferred", "infer_groups"]

_ONE_WAY = {"send": "recv", "recv": "send"}
_WAYS = {"send": 1, "recv": -1}
_ROOTED = ("broadcast", "reduce")  # of the operations that kernels are named after
_OVERLAP = 0.98  # share of the operations that must overlap; ends of a trace cut some
_COMPARED = 8  # members of a group with which a stream is compared; the others agree with these
_CLOSER = 2  # times: a stream that is so much closer to another one is that one's

_GROUPS = {"rank": pl.Int32, "node": pl.Int32, "start_ns": pl.Int64, "group_id": pl.Int64} | dict.fromkeys(
    ("name", "backend", "role", "members"), pl.String
)

Ints = NDArray[np.int64]
_Group = list[tuple[Stream, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Rows of `collectives` and of `groups`, and how many communication kernels belong to no group of several ranks."""

    collectives: pl.DataFrame
    groups: pl.DataFrame
    alone: int


@dataclass(frozen=True, slots=True)
class _Fit:
    """The offset from a position on a stream to that on another, and how far apart their ends are, ns."""

    shift: int
    apart_ns: float


def infer_groups(
    kernels: pl.DataFrame, launches: pl.DataFrame, called: pl.DataFrame, unix_ns: Mapping[int, int]
) -> Inferred:
    """Give the operations behind these kernels of all ranks, and the groups that they show.

    `kernels` and `launches` have the columns of their tables, `called` (rank, start_ns, end_ns, op, name) says when
    hosts called what. Times of one `node` are of one clock, and `unix_ns` says when its time 0 was, where it is known.
    """
    rows = _called_in(_operations(kernels, launches), called)
    ops = sorted(set(rows["op"]))
    streams = [
        _stream(of_stream, ops) for _, of_stream in rows.group_by("rank", "device", "stream", maintain_order=True)
    ]
    group_id, seq, size, peer = (np.full(len(rows), value, np.int64) for value in (0, 0, 1, NO_PEER))
    known: list[dict[str, Any]] = []
    alone = 0
    for number, group in enumerate(_grouped(streams, ops, unix_ns)):
        several = len(group) > 1
        members = ranges(sorted(stream.rank for stream, _ in group)) if several else ""
        name = f"inferred-{number}"
        identity = _identity(name, members)
        first = min(shift for _, shift in group)
        for stream, shift in group:
            group_id[stream.rows], size[stream.rows] = identity, len(group)
            seq[stream.rows] = np.arange(len(stream.rows)) + shift - first
            if len(group) == 2:
                peer[stream.rows] = sum(member.rank for member, _ in group) - stream.rank
            begun_ns = rows["device_start_ns"][int(stream.rows[0])]
            known.append({"rank": stream.rank, "node": stream.node, "start_ns": begun_ns, "group_id": identity})
            known[-1] |= {"name": name, "backend": "nccl", "role": "", "members": members}
        alone += 0 if several else len(group[0][0].rows)
    collectives = rows.with_columns(
        group_id=pl.Series(group_id), seq=pl.Series(seq), size=pl.Series(size), peer=pl.Series(peer), tag=pl.lit(0)
    )
    collectives = _with_ops(collectives).with_columns(dtype=pl.lit("unknown")).sort("rank", "device_start_ns")
    groups = pl.DataFrame(known, schema=_GROUPS).filter(pl.col("members") != "")
    collectives = collectives.drop("row", "stream", "device", "said", "exchanges", "size")
    return Inferred(collectives=collectives, groups=groups, alone=alone)


def _operations(kernels: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of NCCL and RCCL by rank and start, with the call that launched each, where it is there."""
    ops = {name: kernel_op(name) for name in kernels["name"].unique()}
    calls = launches.select(*("rank", "node", "correlation", "thread"), call_ns="start_ns", issued_ns="end_ns").unique(
        ["rank", "node", "correlation"], keep="first"
    )
    return (
        kernels.filter(pl.col("work") == COMMUNICATION)
        .with_columns(op=pl.col("name").replace_strict(ops, return_dtype=pl.String))
        .drop_nulls("op")
        .join(calls, on=["rank", "node", "correlation"], how="left")
        .sort("rank", "start_ns")
        .select(
            *("rank", "node", "device", "stream", "op", "end_ns"),
            exchanges=pl.col("name").str.contains(SEND_RECV),
            device_start_ns="start_ns",
            start_ns=pl.coalesce("call_ns", "start_ns"),
            issued_ns=pl.coalesce("issued_ns", "start_ns"),
            thread=pl.col("thread").fill_null(0),
            number=pl.int_range(pl.len()).over("rank"),
        )
        .with_row_index("row")
    )


def _called_in(collectives: pl.DataFrame, called: pl.DataFrame) -> pl.DataFrame:
    """Return the operations with `said`, the one of the range in which the host called each; null: in none."""
    rows = collectives.sort("start_ns").with_columns(said=pl.lit(None, pl.String))
    by_torch = pl.col("name").str.contains(":")
    for which in (by_torch, ~by_torch):  # NCCL's own ranges lie within torch's
        begun = called.filter(which).sort("start_ns").select("rank", "start_ns", until_ns="end_ns", called="op")
        rows = rows.join_asof(begun, on="start_ns", by="rank", check_sortedness=False)
        inside = pl.when(pl.col("start_ns") < pl.col("until_ns")).then("called")
        rows = rows.with_columns(said=pl.coalesce("said", inside)).drop("until_ns", "called")
    return rows.sort("row")


def _with_ops(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the operations with what ranges say that they are, on any rank, and whom a send or receive is with.

    In a group of two one sends what the other receives. Where all ranks of several exchange, it is an all-to-all.
    """
    own, operation, of_two = pl.col("said"), ("group_id", "seq"), pl.col("size") == 2
    said = own.drop_nulls().first().over(operation)
    is_sent = said.is_in(_ONE_WAY)
    by_peer = pl.when(of_two).then(said.replace(_ONE_WAY))
    of_all = pl.col("exchanges").all().over(operation) & (pl.len().over(operation) == pl.col("size"))
    by_name = pl.when(of_all & (pl.col("size") > 2), op="unknown").then(pl.lit("alltoall")).otherwise("op")
    ops = collectives.with_columns(op=pl.coalesce(own, pl.when(is_sent).then(by_peer).otherwise(said), by_name))
    with_peer = pl.col("op").is_in(_ONE_WAY) & of_two
    return ops.with_columns(peer=pl.when(with_peer).then("peer").otherwise(NO_PEER))


def _stream(rows: pl.DataFrame, ops: Sequence[str]) -> Stream:
    codes = {op: code for code, op in enumerate(ops)}
    return Stream(
        rank=rows["rank"][0],
        node=rows["node"][0],
        clock=rows["node"][0],
        kind=rows["op"].replace_strict(codes, return_dtype=pl.Int64).to_numpy(),
        way=rows["said"].replace_strict(_WAYS, default=0, return_dtype=pl.Int64).to_numpy(),
        start_ns=rows["device_start_ns"].to_numpy(),
        end_ns=rows["end_ns"].to_numpy(),
        rows=rows["row"].to_numpy(),
    )


def _grouped(streams: Sequence[Stream], ops: Sequence[str], unix_ns: Mapping[int, int]) -> list[_Group]:
    """Return the streams of each group, and what to add to a position on each to get the same operation's on all.

    Streams that are alone are taken apart by the names of their operations where fewer operations are alone then.
    """
    groups = _of_whole_streams(streams, ops, unix_ns)
    mixed = {id(group[0][0]) for group in groups if len(group) == 1 and len(np.unique(group[0][0].kind)) > 1}
    if not mixed:
        return groups
    parts = [part for one in streams for part in (_parts(one) if id(one) in mixed else [one])]
    apart = _of_whole_streams(parts, ops, unix_ns)
    return min(groups, apart, key=lambda found: sum(len(of[0][0].rows) for of in found if len(of) == 1))


def _of_whole_streams(streams: Sequence[Stream], ops: Sequence[str], unix_ns: Mapping[int, int]) -> list[_Group]:
    """Return the same of the streams as they are, but for those of point-to-point communication.

    Where that shows how far clocks differ, operations that end together must do so on these clocks.
    """
    groups = _fitting(streams, ops)
    left, pairs = _exchanged(groups, ops, unix_ns)
    placed = _placed(pairs)
    if not placed:
        return left + pairs
    moved = [_on_clock(stream, placed) for group in left for stream, _ in group]
    return _fitting(moved, ops) + pairs


def _on_clock(stream: Stream, placed: Mapping[int, tuple[int, float]]) -> Stream:
    clock, ahead_ns = placed.get(stream.clock, (stream.clock, 0.0))
    ahead = round(ahead_ns)
    return replace(stream, clock=clock, start_ns=stream.start_ns - ahead, end_ns=stream.end_ns - ahead)


def _parts(stream: Stream) -> list[Stream]:
    """Return the operations of each name as streams of their own."""
    return [stream.only(stream.kind == kind) for kind in np.unique(stream.kind)]


def _exchanged(
    groups: Sequence[_Group], ops: Sequence[str], unix_ns: Mapping[int, int]
) -> tuple[list[_Group], list[_Group]]:
    """Return the groups, and those of two ranks each that point-to-point communication makes of some of them.

    Those have what is left of their streams, too.
    """
    unnamed = [
        group for group in groups if all(ops[kind] == "unknown" for of, _ in group for kind in np.unique(of.kind))
    ]
    streams = [stream.only(np.argsort(stream.end_ns, kind="stable")) for group in unnamed for stream, _ in group]
    of_group = [number for number, group in enumerate(unnamed) for _ in group]
    pairs = [(a, b) for a, b in combinations(range(len(streams)), 2) if of_group[a] != of_group[b]]
    pairs = [(a, b) for a, b in pairs if streams[a].rank != streams[b].rank]
    together: dict[int, tuple[int, float]] = {}
    for number, group in enumerate(unnamed):
        if len(group) > 1:
            apart, first = _apart_ns(group), of_group.index(number)
            together |= {first + at: (number, float(apart[at].max())) for at in range(len(group))}
            pairs += [(first + a, first + b) for a, b in _far_nearer(group, apart)]
    found = exchanges(streams, pairs, together, Clocks(_placed(groups), unix_ns))
    taken: dict[int, list[Ints]] = {}
    for pair, places in found.items():
        for at, of_stream in zip(pair, places, strict=True):
            taken.setdefault(at, []).append(of_stream)
    new = [[(streams[at].only(of_stream), 0) for at, of_stream in zip(*item, strict=True)] for item in found.items()]
    for at, parts in taken.items():
        rest = np.delete(np.arange(len(streams[at].rows)), np.concatenate(parts))
        new += [[(streams[at].only(rest), 0)]] if len(rest) else []
    gone = {id(unnamed[of_group[at]]) for at in taken}
    return [group for group in groups if id(group) not in gone], new


def _apart_ns(group: _Group) -> NDArray[np.float64]:
    """Return how far apart the ends of each two of its streams are, but for what clocks differ by."""
    apart = np.zeros((len(group), len(group)))
    for a, b in combinations(range(len(group)), 2):
        between = _between(group[a], group[b])
        apart[a, b] = apart[b, a] = np.median(np.abs(between - np.median(between))) if len(between) else 0.0
    return apart


def _far_nearer(group: _Group, apart: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the pairs of its streams that end far nearer to each other than to any other one.

    Those of two nodes may seem farther apart than they are: they show nothing about the streams of one.
    """
    clocks = np.array([stream.clock for stream, _ in group])
    is_one = clocks[:, None] == clocks[None, :]
    found = []
    for a, b in combinations(range(len(group)), 2):
        others = np.delete(np.arange(len(group)), (a, b))
        of_both = [apart[at, others[is_one[at, others] >= is_one[a, b]]] for at in (a, b)]
        if all(len(of_one) and apart[a, b] * _CLOSER < of_one.min() for of_one in of_both):
            found.append((a, b))
    return found


def _between(one: tuple[Stream, int], other: tuple[Stream, int]) -> Ints:
    """Return by how much later each operation of both ends on the second."""
    (here, at), (there, beyond) = one, other
    low, high = max(at, beyond), max(min(at + len(here.rows), beyond + len(there.rows)), at, beyond)
    return there.end_ns[low - beyond : high - beyond] - here.end_ns[low - at : high - at]


def _placed(groups: Sequence[_Group]) -> dict[int, tuple[int, float]]:
    """Return by how much the clock of each node is ahead of that of another one, by the groups that span nodes."""
    ahead: dict[int, dict[int, float]] = {}
    for first, *others in groups:
        for other in others:
            one, there, apart = first[0].clock, other[0].clock, _between(first, other)
            if one != there and len(apart):
                ahead.setdefault(one, {})[there] = float(np.median(apart))
                ahead.setdefault(there, {})[one] = -float(np.median(apart))
    placed: dict[int, tuple[int, float]] = {}
    for root in ahead:
        reached = [] if root in placed else [(root, 0.0)]
        while reached:
            node, by_ns = reached.pop()
            if node not in placed:
                placed[node] = root, by_ns
                reached += [(other, by_ns + more) for other, more in ahead[node].items()]
    return placed


def _fitting(streams: Sequence[Stream], ops: Sequence[str]) -> list[_Group]:
    """Return the same of the streams as they are."""
    rooted = [code for code, op in enumerate(ops) if op in _ROOTED]
    left, groups = list(streams), []
    while left:
        first, *left = left
        fits = {number: fit for number, other in enumerate(left) if (fit := _fit(first, other, rooted)) is not None}
        group = {len(left): (first, 0)}
        for number, fit in sorted(fits.items(), key=lambda item: (item[1].apart_ns, item[0])):
            others = [other for at, other in enumerate(left) if at != number and at not in group]
            belongs = _fits_all(left[number], fit.shift, list(group.values()), rooted)
            if belongs and not _fits_better(left[number], fit.apart_ns, others, rooted):
                group[number] = left[number], fit.shift
        groups.append(list(group.values()))
        left = [stream for number, stream in enumerate(left) if number not in group]
    return groups


def _fits_all(stream: Stream, shift: int, group: Sequence[tuple[Stream, int]], rooted: Collection[int]) -> bool:
    """Say whether the stream, at this shift to the group's first one, follows the others too; one of each rank may."""
    if any(member.rank == stream.rank for member, _ in group):
        return False
    fits = [(_fit(member, stream, rooted), ahead) for member, ahead in group[1:_COMPARED]]
    return all(fit is not None and fit.shift + ahead == shift for fit, ahead in fits)


def _fits_better(stream: Stream, apart_ns: float, others: Sequence[Stream], rooted: Collection[int]) -> bool:
    """Say whether one of the others ends its operations far closer to this stream's.

    Ranks that keep in step by one group end what they do in other groups at about the same time, too.
    """
    if apart_ns <= CLOSE_NS:
        return False
    fits = (_fit(stream, other, rooted) for other in others if other.rank != stream.rank)
    return any(fit is not None and fit.apart_ns * _CLOSER <= apart_ns for fit in fits)


def _fit(one: Stream, other: Stream, rooted: Collection[int]) -> _Fit | None:
    """Return how the second stream follows the first; None where they are not of one group, or that is not certain."""
    one_clock = one.clock == other.clock
    sequences = {
        at: collective_numbering.Sequence(kind=of.kind, end_ns=of.end_ns) for at, of in enumerate((one, other))
    }
    numbers = collective_numbering.align(sequences, one_clock=one_clock)
    if numbers is None or any((np.diff(of_stream) != 1).any() for of_stream in numbers.values()):
        return None
    shift = int(numbers[1][0] - numbers[0][0])
    low, high = max(shift, 0), min(shift + len(other.rows), len(one.rows))
    if high <= low:
        return None
    here, there = slice(low, high), slice(low - shift, high - shift)
    apart = other.end_ns[there] - one.end_ns[here]
    clocks = 0.0 if one_clock else float(np.median(apart))
    off_ns = float(np.median(np.abs(_without_drift(apart, one.end_ns[here], one_clock=one_clock))))
    if off_ns > MOST_NS:
        return None
    # Only the last to arrive begins after others have ended an operation that has a root: it does not wait.
    mutual = ~np.isin(one.kind[here], list(rooted))
    begun = np.maximum(one.start_ns[here], other.start_ns[there] - clocks)
    over = np.minimum(one.end_ns[here], other.end_ns[there] - clocks)
    if mutual.any() and np.mean((begun <= over + SLACK_NS)[mutual]) < _OVERLAP:
        return None
    return _Fit(shift, off_ns)


def _without_drift(apart: Ints, at: Ints, *, one_clock: bool) -> NDArray[np.float64]:
    """Return the differences without what clocks differ by: of one host, those of devices only by a constant."""
    off = np.asarray(apart - np.median(apart), np.float64)
    half = len(off) // 2
    if one_clock or half < ENOUGH:
        return off
    by, time = (np.median(of[half:]) - np.median(of[:half]) for of in (off, at.astype(np.float64)))
    tilted = off - by / time * (at - np.median(at)) if time else off
    return np.asarray(tilted - np.median(tilted))


def _identity(*parts: str) -> int:
    """Equal on all ranks of a group, and on no other group's."""
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
