"""Dependency graphs: one structure for every source, and its replay with other durations.

Source: dPRO and Lumos (a job's operations as a graph that is run again), ByteDance's what-if analysis of stragglers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    "replay",
    "replay_in_python",
    "replay_with",
    "spread",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shorts = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes that take time. Durations leave out all waiting.

    A collective is an arrival on each rank, one transfer that waits for all arrivals, and an end on each rank.
    """

    duration_ns: Floats
    rank: Shorts  # -1: of no single rank, as a transfer
    step: Shorts  # -1: outside of the steps
    part: Shorts  # position in `parts`, -1: none
    label: Shorts  # position in `labels`, -1: none
    instance: Ints  # `instance_id` of the collective that the node belongs to, -1: none
    start_ns: Ints  # as measured, on the run's clock; waiting, where there was any, lies before `end_ns - duration_ns`
    end_ns: Ints
    ahead_ns: Shorts | None = None  # how long before its start a device's was launched; -1: a host's
    parts: tuple[str, ...]
    labels: tuple[str, ...]
    origin_ns: int

    def __len__(self) -> int:
        return len(self.duration_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph(Nodes):
    """Nodes, and what each waits for; `replay` defines what that means.

    What node `i` waits for is `before[first[i] : first[i + 1]]`, all of it earlier in `order`. A node that waits for
    nothing begins at 0, which is `origin_ns` on the run's clock.
    """

    first: Shorts  # one more than there are nodes
    before: Shorts
    order: Shorts

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
    if len(duration_ns) != len(graph):
        raise ValueError(f"{len(duration_ns)} durations for {len(graph)} nodes")
    return _replayed(graph.order, graph.first, graph.before, duration_ns)


def replay_with(graph: Graph, changes: Changes) -> Floats:
    """Return the same with changes. Raises `NotReplayable` if nodes then wait for each other in a circle."""
    if not len(changes.gone) and not len(changes.waits):
        return replay(graph, changes.duration_ns)
    kept = np.ones(len(graph.before), dtype=bool)
    kept[changes.gone] = False
    waits = np.concatenate([graph.waits[kept], changes.waits], dtype=np.int32, casting="same_kind")
    waited_for = np.concatenate([graph.before[kept], changes.waited_for], dtype=np.int32, casting="same_kind")
    first, before, order = _arranged(len(changes.duration_ns), waits, waited_for)
    return _replayed(order, first, before, changes.duration_ns)


def _replayed(order: Shorts, first: Shorts, before: Shorts, duration_ns: Floats) -> Floats:
    duration = np.ascontiguousarray(duration_ns, dtype=np.float64)
    if _replay is None:
        return replay_in_python(order, first, before, duration)
    end = np.empty(len(duration))
    arrays: list[NDArray[Any]] = [order, first, before, duration, end]
    _replay.replay(len(duration), *map(pointer, arrays))
    return end


def replay_in_python(order: Shorts, first: Shorts, before: Shorts, duration_ns: Floats) -> Floats:
    """Return the same without a compiler: what the fast one is held against."""
    starts, others, took = first.tolist(), before.tolist(), duration_ns.tolist()
    end = [0.0] * len(took)
    for node in order.tolist():
        end[node] = max((end[j] for j in others[starts[node] : starts[node + 1]]), default=0.0) + took[node]
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


def assemble(nodes: Nodes, waits: NDArray[np.integer], waited_for: NDArray[np.integer]) -> Graph:
    """Return the graph in which node `waits[k]` waits for `waited_for[k]`.

    Raises `NotReplayable` if nodes wait for each other in a circle.
    """
    first, before, order = _arranged(len(nodes), waits, waited_for)
    columns = {field.name: getattr(nodes, field.name) for field in fields(nodes)}
    return Graph(**columns, first=first, before=before, order=order)


def _arranged(n: int, waits: NDArray[np.integer], waited_for: NDArray[np.integer]) -> tuple[Shorts, Shorts, Shorts]:
    """Return `first`, `before` and `order`, see `Graph`. Raises `NotReplayable` if nodes wait for each other."""
    waits, waited_for = (np.ascontiguousarray(of, dtype=np.int32) for of in (waits, waited_for))
    if _replay is None:
        first, before, order = _arranged_in_python(n, waits, waited_for)
    else:
        first, before, order = (np.empty(size, dtype=np.int32) for size in (n + 1, len(waits), n))
        arrays = [waits, waited_for, first, before, order]
        order = order[: _replay.arrange(n, len(waits), *map(pointer, arrays))]
    if len(order) < n:
        raise NotReplayable(text("{n} operations wait for each other in a circle", n=n - len(order)))
    return first, before, order


def _arranged_in_python(n: int, waits: Shorts, waited_for: Shorts) -> tuple[Shorts, Shorts, Shorts]:
    """Return the same; those in a circle are left out of the order."""
    first = np.zeros(n + 1, dtype=np.int32)
    np.cumsum(np.bincount(waits, minlength=n), out=first[1:])
    before = waited_for[np.argsort(waits, kind="stable")]
    missing = np.diff(first).tolist()
    followers: list[list[int]] = [[] for _ in range(n)]
    for node, other in zip(np.repeat(np.arange(n), missing).tolist(), before.tolist(), strict=True):
        followers[other].append(node)
    ready = [node for node in range(n) if not missing[node]]
    for node in ready:  # it grows meanwhile
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    return first, before, np.array(ready, dtype=np.int32)


def spread(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return the numbers `first[i]` to `first[i] + count[i] - 1` one after the other, and the `i` of each."""
    of = np.repeat(np.arange(len(first)), count)
    within = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    return np.asarray(first)[of] + within, of
