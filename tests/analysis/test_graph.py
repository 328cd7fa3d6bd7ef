"""What waits for what, and what comes out when it is run again."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from rankscope.analysis.replay.graph import Nodes, assemble, longest_chain, replay, replay_in_python
from rankscope.errors import NotReplayable

NONE = np.empty(0, dtype=np.int64)


def graph_of(duration_ns, waits, waited_for):
    nothing = np.zeros(len(duration_ns), dtype=np.int64)
    nodes = Nodes(
        duration_ns=np.array(duration_ns, dtype=float),
        **dict.fromkeys(("rank", "step", "part", "label", "instance", "start_ns", "end_ns"), nothing),
        parts=(),
        labels=(),
        origin_ns=0,
    )
    return assemble(nodes, np.array(waits, dtype=np.int64), np.array(waited_for, dtype=np.int64))


def test_transfer_begins_when_the_last_rank_has_arrived():
    """Ranks arrive after 10 and 30 ns, the transfer takes 5, rank 0 then needs another 2: node 0 is given last."""
    graph = graph_of([5, 10, 30, 2, 0], waits=[0, 0, 3, 4], waited_for=[1, 2, 0, 0])
    assert replay(graph, graph.duration_ns).tolist() == [35, 10, 30, 37, 35]


def test_circle_is_refused():
    with pytest.raises(NotReplayable, match="2 operations wait for each other"):
        graph_of([1, 1, 1], waits=[0, 1], waited_for=[1, 0])


def test_graph_of_nothing_is_replayed():
    graph = graph_of([], waits=[], waited_for=[])
    assert len(replay(graph, graph.duration_ns)) == 0


def test_durations_of_another_graph_are_refused():
    graph = graph_of([1, 1], waits=[1], waited_for=[0])
    with pytest.raises(ValueError, match="3 durations for 2 nodes"):
        replay(graph, np.zeros(3))


@pytest.mark.skipif(
    importlib.util.find_spec("rankscope.analysis.replay._replay") is None, reason="it was built without a C compiler"
)
@pytest.mark.parametrize("nodes", [1, 2, 30, 2000])
def test_compiled_loop_and_its_python_twin_agree(nodes, monkeypatch):
    random = np.random.default_rng(nodes)
    pairs = random.integers(0, nodes, (2, 3 * nodes))
    later, earlier = pairs.max(axis=0), pairs.min(axis=0)
    shuffled = random.permutation(nodes)
    edges = shuffled[later[later > earlier]], shuffled[earlier[later > earlier]]
    duration = random.integers(0, 100, nodes)
    graph = graph_of(duration, *edges)
    fast = replay(graph, graph.duration_ns)
    assert fast.tolist() == replay_in_python(graph.order, graph.first, graph.before, graph.duration_ns).tolist()
    ends, last = fast.astype(np.int64), int(fast.argmax())
    chain = longest_chain(graph, ends, last)
    assert graph.duration_ns[chain].sum() == fast[last]
    monkeypatch.setattr("rankscope.analysis.replay.graph._replay", None)
    assert longest_chain(graph, ends, last).tolist() == chain.tolist()
    slow = graph_of(duration, *edges)
    assert replay(slow, slow.duration_ns).tolist() == fast.tolist()
