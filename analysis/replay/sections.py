"""Between which operations of its rank a node lies, so that ranks are compared by what they do there."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.replay.graph import Graph, Ints, Shorts

__all__ = ["launched_alike", "operations_before"]

_AT_ONCE = 1 << 17  # nodes, so that what is made of them takes little memory


def operations_before(graph: Graph) -> Shorts:
    """How many matched operations the node's rank had called in the node's step when it began; 0 of no rank or step.

    Of what a device did: when it was launched, since a device computes on while an operation is in flight.
    """
    section = _operations_before(graph, graph.start_ns)
    if graph.ahead_ns is None:
        return section
    launched = _operations_before(graph, graph.start_ns - np.maximum(graph.ahead_ns, 0))
    return np.where(graph.ahead_ns < 0, section, launched)


def launched_alike(graph: Graph, nodes: Ints, section: Shorts, at: Ints, size: tuple[int, int]) -> NDArray[np.bool_]:
    """Say of each step whether all ranks launched as many of these nodes between the same operations.

    They do not where several threads launch, in any order. `section`, of all nodes, are the operations before, and `at`
    is the place of each of `nodes` in (rank, step), which have this `size`.
    """
    if graph.ahead_ns is None:
        return np.ones(size[1], bool)
    on_device = graph.ahead_ns[nodes] >= 0
    sections, span = distinct(section[nodes[on_device]])
    shape = (*size, len(sections))
    counts = np.bincount(at[on_device] * len(sections) + span, minlength=math.prod(shape)).reshape(shape)
    return np.asarray((counts == counts[:1]).all(axis=(0, 2)))


def _operations_before(graph: Graph, called_ns: Ints) -> Shorts:
    sides = np.flatnonzero((graph.rank >= 0) & (graph.step >= 0) & (graph.instance >= 0))
    sides = sides[np.lexsort((called_ns[sides], graph.instance[sides], graph.rank[sides]))]
    first = (np.diff(graph.rank[sides], prepend=-1) != 0) | (np.diff(graph.instance[sides], prepend=-1) != 0)
    calls = sides[first]  # where its arrival and its end are two nodes
    section = np.zeros(len(graph), np.int32)
    if not len(calls):
        return section
    steps = int(graph.step.max()) + 1

    def place_of(nodes: Ints | slice) -> Ints:
        return np.where(graph.step[nodes] < 0, -1, graph.rank[nodes].astype(np.int64) * steps + graph.step[nodes])

    place = place_of(calls)
    order = np.lexsort((called_ns[calls], place))
    called, place = called_ns[calls[order]], place[order]
    places, begin, of = np.unique(place, return_index=True, return_inverse=True)
    since = called[begin]
    width = int((called - since[of]).max()) + 2  # a place's calls have the keys from its number times this on
    keys = of * width + (called - since[of])
    for at in range(0, len(graph), _AT_ONCE):
        some = slice(at, at + _AT_ONCE)
        place = place_of(some)
        of = np.minimum(np.searchsorted(places, place), len(places) - 1)
        after = np.clip(called_ns[some] - since[of], -1, width - 2)
        count = np.searchsorted(keys, of * width + after, side="right") - begin[of]
        section[some] = np.where(places[of] == place, count, 0)
    return section
