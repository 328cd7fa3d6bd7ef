"""Numbers collectives whose files lack numbers: aligns the sequences of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankscope.analysis.readers import collective_numbering
from rankscope.analysis.readers.event_text import MISSING
from rankscope.analysis.readers.kineto.capture import Calls, Capture, Ints
from rankscope.analysis.readers.kineto.ranks import all_ranks
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import ALL_TO_ALL_OPS, NO_PEER, P2P_OPS

__all__ = ["number_collectives"]

_UNKNOWN_GROUP = ""


def number_collectives(ranks: Mapping[int, Capture], *, one_clock: bool) -> None:
    """Give each row its `seq` where the file does not: the sequences of all ranks are aligned."""
    _make_peers_global(ranks)
    everyone = all_ranks(ranks)
    collectives = {rank: capture.calls for rank, capture in ranks.items()}
    by_group: dict[str, dict[int, Ints]] = {}
    transfers: dict[tuple[str, int, int], dict[int, Ints]] = {}  # by group, sender and receiver
    for rank, calls in collectives.items():
        peer = np.array(calls["peer"], np.int64)
        sends = np.array(calls["op"]) == "send"
        for name in set(calls["group"]):
            of_group = calls["group"] == name
            by_group.setdefault(name, {})[rank] = np.flatnonzero(of_group & (peer < 0))
            for other, is_send in set(zip(peer[of_group].tolist(), sends[of_group].tolist(), strict=True)):
                ends = (rank, other) if is_send else (other, rank)
                at = np.flatnonzero(of_group & (peer == other) & (sends == is_send))
                if other >= 0:
                    transfers.setdefault((name, *ends), {})[rank] = at
    for rows in transfers.values():
        _number_transfers(collectives, rows, one_clock=one_clock)
    for name, rows in sorted(by_group.items()):
        if name != _UNKNOWN_GROUP and all((collectives[rank]["seq"][at] != MISSING).all() for rank, at in rows.items()):
            _separate({rank: (collectives[rank], at) for rank, at in rows.items()})
            continue
        codes: dict[tuple[Any, ...], int] = {}
        sequences = {rank: _as_sequence(collectives[rank], at, codes) for rank, at in rows.items()}
        numbers = collective_numbering.align(sequences, one_clock=one_clock)
        if name == _UNKNOWN_GROUP:
            for rank in rows:
                ranks[rank].groups.members[name] = everyone if numbers is not None else ""
        if numbers is None:  # nothing is certain: no two ranks have a number in common
            begins = itertools.accumulate((len(at) for at in rows.values()), initial=0)
            numbers = {
                rank: np.arange(len(at)) + begin for (rank, at), begin in zip(rows.items(), begins, strict=False)
            }
        for rank, of_rank in numbers.items():
            collectives[rank]["seq"][rows[rank]] = of_rank


def _make_peers_global(ranks: Mapping[int, Capture]) -> None:
    """Peers are ranks of the job; where some cannot be, all are taken as places in their groups."""
    found = []
    for rank, capture in ranks.items():
        groups = {name: members_of(text) for name, text in capture.groups.members.items() if text}
        for i, (peer, name) in enumerate(zip(capture.calls["peer"], capture.calls["group"], strict=True)):
            if peer >= 0 and name in groups:
                found.append((capture.calls["peer"], i, rank, groups[name]))
    if all(peers[i] in members and peers[i] != rank for peers, i, rank, members in found):
        return
    for peers, i, rank, members in found:
        place = peers[i]
        peers[i] = members[place] if place < len(members) and members[place] != rank else NO_PEER


def _number_transfers(collectives: Mapping[int, Calls], rows: Mapping[int, Ints], *, one_clock: bool) -> None:
    """Give sends and receives the same number on both ranks: torch's own numbers count all exchanges of a rank."""
    codes: dict[tuple[Any, ...], int] = {}
    sequences = {rank: _as_sequence(collectives[rank], at, codes, ("dtype", "size_bytes")) for rank, at in rows.items()}
    numbers = collective_numbering.align(sequences, one_clock=one_clock)
    if numbers is None:  # a small message may end on its sender long before
        first, last = sequences.values()
        last_begins = 0 if np.array_equal(first.kind, last.kind) else len(first.kind)
        begins = zip(rows.items(), (0, last_begins), strict=True)
        numbers = {rank: np.arange(len(at)) + begin for (rank, at), begin in begins}
    for rank, at in rows.items():
        collectives[rank]["seq"][at] = numbers[rank]


def _separate(rows: Mapping[int, tuple[Calls, Ints]]) -> None:
    """Kernels of one number get numbers of their own, in their order, where every rank has as many of it.

    torch 2.15 runs a coalesced operation as one kernel for each tensor.
    """
    whole = {rank: at[~np.isin(np.array(calls["op"])[at], P2P_OPS)] for rank, (calls, at) in rows.items()}
    counts: dict[int, set[int]] = {}
    for rank, at in whole.items():
        for seq, count in zip(*np.unique(rows[rank][0]["seq"][at], return_counts=True), strict=True):
            counts.setdefault(int(seq), set()).add(int(count))
    most = max((max(found) for found in counts.values()), default=1)
    if most == 1 or max(counts) * most >= 1 << 32:
        return
    for rank, at in whole.items():
        seen: dict[int, int] = {}
        numbers = rows[rank][0]["seq"]
        for i in at:
            seq = int(numbers[i])
            numbers[i] = seq * most + seen.get(seq, 0)
            if len(counts[seq]) == 1:
                seen[seq] = seen.get(seq, 0) + 1


def _as_sequence(
    calls: Calls, at: Ints, codes: dict[tuple[Any, ...], int], kind_by: Sequence[str] = ("op", "dtype", "size_bytes")
) -> collective_numbering.Sequence:
    """Return these rows; `codes` are of the kinds on all ranks. How much an all-to-all moves is not the same on all."""
    kinds = (
        tuple(
            None if column == "size_bytes" and calls["op"][i] in ALL_TO_ALL_OPS else calls[column][i]
            for column in kind_by
        )
        for i in at
    )
    kind = np.array([codes.setdefault(key, len(codes)) for key in kinds], np.int64)
    return collective_numbering.Sequence(kind=kind, end_ns=calls["end_ns"][at])
