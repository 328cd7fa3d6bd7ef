"""Infers process groups from the communication kernels of an Nsight export, which does not say whose they are.

A communicator works on one stream of each of its ranks, its operations come there in one order on all of them, and
none is over on any rank before it has begun on the last. So streams of two ranks are of one group where the names of
their kernels agree one by one, their ends fall together, and every operation overlaps; of several that do, those whose
ends differ least. Streams that fit no other rank's stay without a group: what they wait for is then not known.

Several communicators that share a stream (synchronous operations since torch 2.8) agree where their groups hold the
same ranks, and otherwise only if their operations have different names: a stream that fits no other is taken apart by
these.

Source: NCCL user guide, "Using multiple NCCL communicators concurrently", and "Group calls".
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMMUNICATION, kernel_op
from rankscope.analysis.readers import collective_numbering
from rankscope.analysis.text.units import ranges

__all__ = ["Inferred", "infer_groups"]

_ROOTED = ("broadcast", "reduce")  # of the operations that kernels are named after
_SLACK_NS = 50_000  # by how much one operation may end on a rank before it begins on another: clocks of devices differ
_OVERLAP = 0.98  # share of the operations that must overlap; ends of a trace cut some
_ENOUGH = 8  # operations from which on a drift can be seen
_COMPARED = 8  # members of a group with which a stream is compared; the others agree with these
# How far apart ends of one operation are, but for what clocks differ by: 18 us at most in traces of five jobs (median),
# while ranks that only keep in step are some 100 us apart.
_CLOSE_NS, _MOST_NS = 20_000, 50_000
_CLOSER = 2  # times: a stream that is so much closer to another one is that one's

_GROUPS = {"rank": pl.Int32, "node": pl.Int32, "start_ns": pl.Int64, "group_id": pl.Int64} | dict.fromkeys(
    ("name", "backend", "role", "members"), pl.String
)

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inferred:
    """Rows of `collectives` and of `groups`, and how many communication kernels belong to no group of several ranks."""

    collectives: pl.DataFrame
    groups: pl.DataFrame
    alone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """The communication kernels of one stream, in their order."""

    rank: int
    node: int
    kind: Ints
    start_ns: Ints
    end_ns: Ints
    rows: Ints  # in the frame of all streams

    @property
    def sequence(self) -> collective_numbering.Sequence:
        return collective_numbering.Sequence(kind=self.kind, end_ns=self.end_ns)


@dataclass(frozen=True, slots=True)
class _Fit:
    """The offset from a position on a stream to that on another, and how far apart their ends are, ns."""

    shift: int
    apart_ns: float


def infer_groups(kernels: pl.DataFrame, launches: pl.DataFrame, called: pl.DataFrame) -> Inferred:
    """Give the operations behind these kernels of all ranks, and the groups that they show.

    `kernels` and `launches` have the columns of their tables, `called` (rank, start_ns, end_ns, op, name) says when
    hosts called what. Times of one `node` are of one clock.
    """
    rows = _operations(kernels, launches)
    ops = sorted(set(rows["op"]))
    streams = [
        _stream(of_stream, ops) for _, of_stream in rows.group_by("rank", "device", "stream", maintain_order=True)
    ]
    group_id, seq = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    known: list[dict[str, Any]] = []
    alone = 0
    for number, group in enumerate(_grouped(streams, [code for code, op in enumerate(ops) if op in _ROOTED])):
        several = len(group) > 1
        members = ranges(sorted(stream.rank for stream, _ in group)) if several else ""
        name = f"inferred-{number}"
        identity = _identity(name, members)
        first = min(shift for _, shift in group)
        for stream, shift in group:
            group_id[stream.rows] = identity
            seq[stream.rows] = np.arange(len(stream.rows)) + shift - first
            start_ns = int(stream.start_ns[0])
            known.append({"rank": stream.rank, "node": stream.node, "start_ns": start_ns, "group_id": identity})
            known[-1] |= {"name": name, "backend": "nccl", "role": "", "members": members}
        alone += 0 if several else len(group[0][0].rows)
    collectives = rows.drop("row", "stream", "device").with_columns(
        group_id=pl.Series(group_id), seq=pl.Series(seq), peer=pl.lit(-1), tag=pl.lit(0), dtype=pl.lit("unknown")
    )
    said = pl.col("said").drop_nulls().first().over("group_id", "seq")  # on any of its ranks
    collectives = _called_in(collectives, called).with_columns(op=pl.coalesce(said, "op")).drop("said")
    groups = pl.DataFrame(known, schema=_GROUPS).filter(pl.col("members") != "")
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
    return rows.sort("rank", "device_start_ns")


def _stream(rows: pl.DataFrame, ops: Sequence[str]) -> _Stream:
    codes = {op: code for code, op in enumerate(ops)}
    return _Stream(
        rank=rows["rank"][0],
        node=rows["node"][0],
        kind=rows["op"].replace_strict(codes, return_dtype=pl.Int64).to_numpy(),
        start_ns=rows["device_start_ns"].to_numpy(),
        end_ns=rows["end_ns"].to_numpy(),
        rows=rows["row"].to_numpy(),
    )


def _grouped(streams: Sequence[_Stream], rooted: Collection[int]) -> list[list[tuple[_Stream, int]]]:
    """Return the streams of each group, and what to add to a position on each to get the same operation's on all.

    Streams that are alone are taken apart by the names of their operations where fewer operations are alone then.
    """
    groups = _fitting(streams, rooted)
    mixed = {id(group[0][0]) for group in groups if len(group) == 1 and len(np.unique(group[0][0].kind)) > 1}
    if not mixed:
        return groups
    apart = _fitting([part for one in streams for part in (_parts(one) if id(one) in mixed else [one])], rooted)
    return min(groups, apart, key=lambda found: sum(len(of[0][0].rows) for of in found if len(of) == 1))


def _parts(stream: _Stream) -> list[_Stream]:
    """Return the operations of each name as streams of their own."""
    which = [stream.kind == kind for kind in np.unique(stream.kind)]
    return [
        replace(
            stream,
            **{column: getattr(stream, column)[mine] for column in ("kind", "start_ns", "end_ns", "rows")},
        )
        for mine in which
    ]


def _fitting(streams: Sequence[_Stream], rooted: Collection[int]) -> list[list[tuple[_Stream, int]]]:
    """Return the same of the streams as they are."""
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


def _fits_all(stream: _Stream, shift: int, group: Sequence[tuple[_Stream, int]], rooted: Collection[int]) -> bool:
    """Say whether the stream, at this shift to the group's first one, follows the others too; one of each rank may."""
    if any(member.rank == stream.rank for member, _ in group):
        return False
    fits = [(_fit(member, stream, rooted), ahead) for member, ahead in group[1:_COMPARED]]
    return all(fit is not None and fit.shift + ahead == shift for fit, ahead in fits)


def _fits_better(stream: _Stream, apart_ns: float, others: Sequence[_Stream], rooted: Collection[int]) -> bool:
    """Say whether one of the others ends its operations far closer to this stream's.

    Ranks that keep in step by one group end what they do in other groups at about the same time, too.
    """
    if apart_ns <= _CLOSE_NS:
        return False
    fits = (_fit(stream, other, rooted) for other in others if other.rank != stream.rank)
    return any(fit is not None and fit.apart_ns * _CLOSER <= apart_ns for fit in fits)


def _fit(one: _Stream, other: _Stream, rooted: Collection[int]) -> _Fit | None:
    """Return how the second stream follows the first; None where they are not of one group, or that is not certain."""
    one_clock = one.node == other.node
    numbers = collective_numbering.align({0: one.sequence, 1: other.sequence}, one_clock=one_clock)
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
    if off_ns > _MOST_NS:
        return None
    # Only the last to arrive begins after others have ended an operation that has a root: it does not wait.
    mutual = ~np.isin(one.kind[here], list(rooted))
    begun = np.maximum(one.start_ns[here], other.start_ns[there] - clocks)
    over = np.minimum(one.end_ns[here], other.end_ns[there] - clocks)
    if mutual.any() and np.mean((begun <= over + _SLACK_NS)[mutual]) < _OVERLAP:
        return None
    return _Fit(shift, off_ns)


def _without_drift(apart: Ints, at: Ints, *, one_clock: bool) -> NDArray[np.float64]:
    """Return the differences without what clocks differ by: of one host, those of devices only by a constant."""
    off = np.asarray(apart - np.median(apart), np.float64)
    half = len(off) // 2
    if one_clock or half < _ENOUGH:
        return off
    by, time = (np.median(of[half:]) - np.median(of[:half]) for of in (off, at.astype(np.float64)))
    tilted = off - by / time * (at - np.median(at)) if time else off
    return np.asarray(tilted - np.median(tilted))


def _identity(*parts: str) -> int:
    """Equal on all ranks of a group, and on no other group's."""
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
