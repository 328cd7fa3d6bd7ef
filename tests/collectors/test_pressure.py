"""The collector `pressure` against a folder that looks like /proc."""

from __future__ import annotations

import pytest

from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.node import Node, pressure
from rankscope.errors import Unavailable

LINES = "{kind} avg10=1.50 avg60=0.00 avg300=0.00 total={total}\n"


def node_in(folder):
    return Node(addresses=frozenset(), gap=lambda source, why: None, proc=folder)


def test_time_that_tasks_waited_is_read_in_seconds(tmp_path):
    (tmp_path / "pressure").mkdir()
    for resource, total in (("cpu", 2_000_000), ("io", 3_500_000), ("memory", 0)):
        some, full = (LINES.format(kind=kind, total=total // half) for kind, half in (("some", 1), ("full", 2)))
        (tmp_path / "pressure" / resource).write_text(some + full)
    node = node_in(tmp_path)
    pressure.start(node)
    read = {name: value for _, name, _, value in pressure.sample(node)}
    assert read == {"cpu_some_s": 2.0, "io_some_s": 3.5, "io_full_s": 1.75, "memory_some_s": 0.0}
    assert {("pressure", name) for name in read} == {(c.source, c.name) for c in COUNTERS if c.source == "pressure"}
    pressure.stop()


def test_kernel_that_measures_none_says_so_in_one_line(tmp_path):
    with pytest.raises(Unavailable, match="boot it with psi=1"):
        pressure.start(node_in(tmp_path))
