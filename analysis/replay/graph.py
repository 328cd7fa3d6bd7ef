"""Dependency graphs: one structure for every source, and its replay with other durations.

Source: dPRO and Lumos (a job's operations as a graph that is run again), ByteDance's what-if analysis of stragglers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.model.pointers import pointer
from rankscope.analysis.text.message import text
from rankscope.errors import NotReplayable

try:
    from rankscope.analysis.replay import _replay
except ImportError:  # it is built where there is a C compiler
    _replay = None  # type: ignore[assignment]

__all__ = [
    "Changes",
    "Graph",
    "Nodes",
    "assemble",
    "longest_chain",
    "placed",
    "replay",
    "replay_in_python",
    "replay_with",
    "spread",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int32]
Column = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes that take time, in any order: each column in pieces, one after the other. Durations leave out all waiting.

    A collective is an arrival on each rank, one transfer that waits for all arrivals, and an end on each rank.
    """

    duration_ns: Column
    rank: Column  # -1: of no single rank, as a transfer
    step: Column  # -1: outside of the steps
    part: Column  # position in `parts`, -1: none
    label: Column  # position in `labels`, -1: none
    instance: Column  # `instance_id` of the collective that the node belongs to, -1: none
    # As measured, on the run's clock; waiting, where there was any, lies before `end_ns - duration_ns`.
    start_ns: Column
    end_ns: Column
    ahead_ns: Column | None = None  # how long before its start a device's was launched; -1: a host's
    parts: tuple[str, ...]
    labels: tuple[str, ...]
    origin_ns: int

    def __len__(self) -> int:
        return sum(map(len, self.duration_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Nodes in order, their columns as of `Nodes`, and what each waits for; `replay` defines what that means.

    What node `i` waits for is `before[first[i] : first[i + 1]]`, all of them lower numbers than `i`. A node that waits
    for nothing begins at 0, which is `origin_ns` on the run's clock.
    """

    duration_ns: Floats
    rank: Shorts
    step: Shorts
    part: Shorts
    label: Shorts
    instance: Ints
    start_ns: Ints
    end_ns: Ints
    ahead_ns: Shorts | None
    parts: tuple[str, ...]
    labels: tuple[str, ...]
    origin_ns: int
    first: Shorts  # one more than there are nodes
    before: Shorts

    def __len__(self) -> int:
        return len(self.duration_ns)

    @property
    def waits(self) -> Shorts:
        """The node that waits, for each of `before`."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Other durations of a graph's nodes, and of more nodes, numbered on from them; and what waits for what instead.

    `gone` are positions in `before` that no longer count; node `waits[k]` waits for `waited_for[k]` besides.
    """

    duration_ns: Floats
    gone: Ints
    waits: NDArray[np.integer]
    waited_for: NDArray[np.integer]


def replay(graph: Graph, duration_ns: Floats) -> Floats:
    """Return when each node ends, in ns after the origin: its duration after the last end of what it waits for."""
    duration = np.ascontiguousarray(duration_ns, dtype=np.float64)
    if len(duration) != len(graph):
        raise ValueError(f"{len(duration)} durations for {len(graph)} nodes")
    return _replayed(graph.first, graph.before, duration)


def replay_with(graph: Graph, changes: Changes) -> Floats:
    """Return the same with changes. Raises `NotReplayable` if nodes then wait for each other in a circle."""
    if not len(changes.gone) and not len(changes.waits):
        return replay(graph, changes.duration_ns)
    n = len(changes.duration_ns)
    kept = np.ones(len(graph.before), dtype=bool)
    kept[changes.gone] = False
    waits = np.concatenate([graph.waits[kept], changes.waits], dtype=np.int32, casting="same_kind")
    waited_for = np.concatenate([graph.before[kept], changes.waited_for], dtype=np.int32, casting="same_kind")
    number, first, before = _arranged(n, waits, waited_for)
    return _replayed(first, before, placed([changes.duration_ns], number, np.float64))[number]


def _replayed(first: Shorts, before: Shorts, duration: Floats) -> Floats:
    if _replay is None:
        return replay_in_python(first, before, duration)
    end = np.empty(len(duration))
    _replay.replay(len(duration), pointer(first), pointer(before), pointer(duration), pointer(end))
    return end


def replay_in_python(first: Shorts, before: Shorts, duration_ns: Floats) -> Floats:
    """Return the same without a compiler: what the fast one is held against."""
    starts, others = first.tolist(), before.tolist()
    end: list[float] = []
    for i, duration in enumerate(duration_ns.tolist()):
        end.append(max((end[j] for j in others[starts[i] : starts[i + 1]]), default=0.0) + duration)
    return np.array(end)


def longest_chain(graph: Graph, end_ns: Ints, last: int) -> Shorts:
    """Return the nodes that made this one end at `end_ns`, as of `replay`, the first one first."""
    end = np.ascontiguousarray(end_ns, dtype=np.int64)
    if _replay is not None:
        chain: Shorts = np.empty(len(graph), dtype=np.int32)
        n = _replay.chain(len(graph), last, pointer(graph.first), pointer(graph.before), pointer(end), pointer(chain))
        found: Shorts = np.flip(chain[:n]).copy()
        return found
    found = [last]
    while len(before := graph.before[graph.first[found[-1]] : graph.first[found[-1] + 1]]):
        found.append(before[::-1].item(end[before[::-1]].argmax()))
    return np.array(found[::-1], dtype=np.int32)


def assemble(nodes: Nodes, waits: NDArray[np.integer], waited_for: NDArray[np.integer]) -> tuple[Graph, Shorts]:
    """Return the graph in which node `waits[k]` waits for `waited_for[k]`; and each node's number in it.

    Raises `NotReplayable` if nodes wait for each other in a circle.
    """
    number, first, before = _arranged(len(nodes), waits, waited_for)

    def codes(column: Column) -> Shorts:
        return placed(column, number, np.int32)

    def times(column: Column) -> Ints:
        return placed(column, number, np.int64)

    graph = Graph(
        duration_ns=placed(nodes.duration_ns, number, np.float64),
        first=first,
        before=before,
        rank=codes(nodes.rank),
        step=codes(nodes.step),
        part=codes(nodes.part),
        label=codes(nodes.label),
        instance=times(nodes.instance),
        start_ns=times(nodes.start_ns),
        end_ns=times(nodes.end_ns),
        ahead_ns=None if nodes.ahead_ns is None else codes(nodes.ahead_ns),
        parts=nodes.parts,
        labels=nodes.labels,
        origin_ns=nodes.origin_ns,
    )
    return graph, number


def placed(column: Column, number: Shorts, kind: type[np.generic]) -> NDArray[Any]:
    """Return the values by the numbers of their nodes."""
    values, at = np.empty(len(number), kind), 0
    for piece in column:
        values[number[at : at + len(piece)]] = piece
        at += len(piece)
    return values


def _arranged(n: int, waits: NDArray[np.integer], waited_for: NDArray[np.integer]) -> tuple[Shorts, Shorts, Shorts]:
    """Return numbers of the nodes, each after all that it waits for; and `first` and `before`, see `Graph`.

    Raises `NotReplayable` if nodes wait for each other in a circle.
    """
    waits, waited_for = (np.ascontiguousarray(of, dtype=np.int32) for of in (waits, waited_for))
    if _replay is None:
        return _arranged_in_python(n, waits, waited_for)
    number, first, before = (np.empty(size, dtype=np.int32) for size in (n, n + 1, len(waits)))
    arrays = map(pointer, (waits, waited_for, number, first, before))
    _check_all(_replay.arrange(n, len(waits), *arrays), n)
    return number, first, before


def _check_all(in_order: int, n: int) -> None:
    if in_order < n:
        raise NotReplayable(text("{n} operations wait for each other in a circle", n=n - in_order))


def _arranged_in_python(n: int, waits: Shorts, waited_for: Shorts) -> tuple[Shorts, Shorts, Shorts]:
    missing = np.bincount(waits, minlength=n).tolist()
    needs: list[list[int]] = [[] for _ in range(n)]
    followers: list[list[int]] = [[] for _ in range(n)]
    for node, other in zip(waits.tolist(), waited_for.tolist(), strict=True):
        needs[node].append(other)
    for node, others in enumerate(needs):
        for other in others:
            followers[other].append(node)
    ready = [node for node in range(n) if not missing[node]]
    for node in ready:  # it grows meanwhile
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    _check_all(len(ready), n)
    number, first = np.empty(n, dtype=np.int32), np.zeros(n + 1, dtype=np.int32)
    number[np.array(ready, dtype=np.int32)] = np.arange(n)
    np.cumsum([len(needs[node]) for node in ready], out=first[1:])
    before = number[np.array([other for node in ready for other in needs[node]], dtype=np.int32)]
    return number, first, before


def spread(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return the numbers `first[i]` to `first[i] + count[i] - 1` one after the other, and the `i` of each."""
    of = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(first)[of] + within, of
