"""What operations in a graph wait for and what waits for them, on each rank; and changes of that.

A side is an operation on one of its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct_in_order
from rankscope.analysis.replay.device_graph import BETWEEN
from rankscope.analysis.replay.graph import Changes, Floats, Graph, Ints, Shorts, spread

__all__ = ["NONE", "Edges", "Wiring", "transfers", "wiring"]

NONE = -1


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """The edges of a graph, and the sides of its operations in order of `instance` and rank; `NONE`: there is none."""

    graph: Graph
    waits: Shorts  # of each edge: this node waits
    waited_for: Shorts  # for this one
    ranks: int  # more than the highest rank
    key: Ints  # of each side: instance * ranks + rank
    done: Ints  # the node of its end
    arrives: Ints  # the node of its arrival, or the transfer where that is none of its own
    first_enter: Ints  # the edges that say when the rank has come: `enter[first_enter[i] : first_enter[i + 1]]`
    enter: Ints
    on_devices: bool  # each rank's arrival is a node

    def sides(self, instances: Ints) -> tuple[Ints, Ints]:
        """Return the sides of these instances, and the position of each one's instance."""
        low, high = (np.searchsorted(self.key, (instances + more) * self.ranks) for more in (0, 1))
        return spread(low, high - low)

    def beside(self, sides: Ints, instances: Ints) -> Ints:
        """Return the side on the same rank of the instance beside each of these sides."""
        wanted = instances * self.ranks + self.key[sides] % self.ranks
        at = np.minimum(np.searchsorted(self.key, wanted), len(self.key) - 1)
        return np.where(self.key[at] == wanted, at, NONE)

    @property
    def entries(self) -> Ints:
        """How many edges say when the rank of a side has come."""
        return np.diff(self.first_enter)

    def came(self, sides: Ints) -> tuple[Ints, Ints]:
        """Return the edges that say when the ranks of these sides have come, and the position of each one's side."""
        at, of = spread(self.first_enter[sides], self.entries[sides])
        return self.enter[at], of

    @cached_property
    def ready(self) -> tuple[Ints, Ints]:
        """The nodes whose ends make a side's data ready, without communication, in order of side; and their sides."""
        graph = self.graph
        edges, side = self.came(np.arange(len(self.key)))
        node = self.waited_for[edges]
        pauses = graph.label[node] == (graph.labels.index(BETWEEN) if BETWEEN in graph.labels else len(graph.labels))
        first = graph.first.astype(np.int64)
        before, of = spread(first[node[pauses]], first[node[pauses] + 1] - first[node[pauses]])
        nodes = np.concatenate([node[~pauses], self.waited_for[before]])
        sides = np.concatenate([side[~pauses], side[pauses][of]])
        own = graph.instance[nodes] < 0
        order = np.argsort(sides[own], kind="stable")
        return nodes[own][order], sides[own][order]


def transfers(graph: Graph, instances: Ints) -> Ints:
    """Return the node of the transfer of each of these instances, `NONE` of those that are not in the graph."""
    nodes = np.flatnonzero((graph.rank < 0) & (graph.instance >= 0))
    of = np.full(max(int(graph.instance.max(initial=0)), int(instances.max(initial=0))) + 1, NONE)
    of[graph.instance[nodes]] = nodes
    return of[instances]


def wiring(graph: Graph, instances: Ints) -> Wiring:
    """Return the sides of these instances."""
    waits, waited_for = graph.waits, graph.before
    edges = np.flatnonzero(np.isin(graph.instance, instances)[waits])
    to, of = waits[edges], waited_for[edges]
    same = graph.instance[to] == graph.instance[of]
    ends, arrivals = to[same & (graph.rank[of] < 0)], of[same & (graph.rank[to] < 0)]
    is_arrival = np.zeros(len(graph), dtype=bool)
    is_arrival[arrivals] = True
    called = (graph.rank[to] < 0) & (graph.rank[of] >= 0) & (graph.instance[of] < 0)
    enters = called | is_arrival[to]
    edges, node, other = edges[enters], to[enters], of[enters]

    ranks = int(graph.rank.max(initial=0)) + 1
    key_of_end, key_of_arrival = (graph.instance[nodes] * ranks + graph.rank[nodes] for nodes in (ends, arrivals))
    key_of_entry = graph.instance[node] * ranks + np.where(graph.rank[node] < 0, graph.rank[other], graph.rank[node])
    key = distinct_in_order(np.concatenate([key_of_end, key_of_arrival, key_of_entry]))
    done, arrives = np.full(len(key), NONE), np.full(len(key), NONE)
    done[np.searchsorted(key, key_of_end)] = ends
    side = np.searchsorted(key, key_of_entry)
    order = np.argsort(side, kind="stable")
    arrives[side[order[::-1]]] = node[order[::-1]]  # the first one remains
    arrives[np.searchsorted(key, key_of_arrival)] = arrivals
    return Wiring(
        graph=graph,
        waits=waits,
        waited_for=waited_for,
        ranks=ranks,
        key=key,
        done=done,
        arrives=arrives,
        first_enter=np.searchsorted(side[order], np.arange(len(key) + 1)),
        enter=edges[order],
        on_devices=bool((graph.rank[arrives[arrives >= 0]] >= 0).any()),
    )


@dataclass(frozen=True, slots=True)
class Edges:
    """Edges that go, and that come."""

    gone: list[Ints] = field(default_factory=list)
    waits: list[NDArray[np.integer]] = field(default_factory=list)
    waited_for: list[NDArray[np.integer]] = field(default_factory=list)

    def tie(self, nodes: NDArray[np.integer], others: NDArray[np.integer]) -> None:
        """Each of the nodes waits for the other beside it."""
        self.waits.append(nodes)
        self.waited_for.append(others)

    def into(self, changes: Changes, duration: Floats) -> Changes:
        return Changes(
            duration_ns=duration,
            gone=np.concatenate([changes.gone, *self.gone]),
            waits=np.concatenate([changes.waits, *self.waits]),
            waited_for=np.concatenate([changes.waited_for, *self.waited_for]),
        )
