"""Asking for memory while training: seen in a trace's calls, or in the steps in which an allocator retried."""

from __future__ import annotations

import polars as pl
import pytest

from rankscope.analysis.detectors import memory_pressure
from rankscope.errors import NotResolvable
from support.device_tables import MS, tables

GIB = 1 << 30
STEPS = 40


def traced(*calls):
    breakdown, phases, kernels, launches, _ = tables(*calls)
    steps = pl.DataFrame({"rank": [0], "step": [0]})
    return breakdown, steps, phases, kernels, launches


def test_device_that_idles_while_the_driver_is_asked_for_memory_is_a_finding():
    """12 of the 20 ms that the device idles in each step of 100 are a cudaFree and a cudaMalloc."""
    (finding,) = memory_pressure.detect(*traced(("cudaFree", 82, 90.01), ("cudaMalloc", 91, 95.01)))
    assert (finding.ranks, finding.lost_ns_per_step) == ((0, 1), 12 * MS)
    assert finding.title.startswith(
        "Asking the driver for memory (cudaMalloc) makes the devices of ranks 0,1 idle for 12"
    )
    assert finding.evidence[0].table == "kernels"


@pytest.mark.parametrize(
    "calls",
    [[("cudaMalloc", 82, 84)], [("cudaLaunchKernel", 82, 95)], [("cudaStreamSynchronize", 10, 80)]],
    ids=["2 ms of 100", "launches", "waits"],
)
def test_little_of_it_and_other_calls_are_silent(calls):
    of = traced(*calls)
    assert memory_pressure.detect(*of) == []
    assert memory_pressure.resolution_ns(*of) == 3 * MS


def recorded(retries, slow_ms=50, *, state=None):
    """Two ranks, steps of 100 ms; rank 1 retries in these steps, which take it `slow_ms` longer; read at each end."""
    parts, steps, memory = [], [], []
    for rank in range(2):
        count = 3  # before the first step
        for step in range(STEPS):
            longer = slow_ms if step in retries else 0
            own = 100 + longer * rank
            parts += [(rank, step, "compute", own * MS), (rank, step, "wait", (100 + longer - own) * MS)]
            steps.append((rank, step, step * 1000 * MS, (step * 1000 + 100 + longer) * MS))
            count += 2 * (rank == 1 and step in retries)
            readings = {"cuda_alloc_retries": count, "rss_bytes": GIB} | (state or {})
            memory += [(rank, steps[-1][3] + MS, name, value) for name, value in readings.items()]
    span = {"start_ns": pl.Int64, "end_ns": pl.Int64}
    return {
        "breakdown": pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"),
        "steps": pl.DataFrame(steps, {"rank": pl.Int64, "step": pl.Int64, **span}, orient="row"),
        "phases": pl.DataFrame(),
        "memory": pl.DataFrame(memory, ["rank", "time_ns", "name", "value"], orient="row"),
    }


def test_steps_with_retries_cost_what_they_take_longer_than_those_without():
    state = {"cuda_reserved_bytes": 78 * GIB, "cuda_total_bytes": 80 * GIB, "cuda_inactive_split_bytes": 13 * GIB}
    (finding,) = memory_pressure.detect(**recorded(range(7, STEPS, 8), state=state))
    assert (finding.ranks, finding.steps) == ((1,), (7, 15, 23, 31, 39))
    assert finding.lost_ns_per_step == 5 * 50 * MS / STEPS
    assert "every 8 steps, which costs 50.0 ms each time" in finding.title
    assert finding.where == "78.0 of 80.0 GiB reserved, 13.0 GiB of it in pieces"
    assert "16.7 % of its reserved memory is fragmented" in finding.advice
    assert "nearly full" in finding.advice


def test_allocators_that_do_not_retry_or_lose_nothing_by_it_are_healthy():
    for tables_of in (recorded([]), recorded(range(7, STEPS, 8), slow_ms=0), recorded(range(7, STEPS, 8), slow_ms=20)):
        assert memory_pressure.detect(**tables_of) == []
        assert memory_pressure.resolution_ns(**tables_of) >= 3 * MS


def test_what_retries_in_every_step_cost_is_not_known_and_what_was_seen_is_reported():
    with pytest.raises(NotResolvable, match=r"allocator of rank 1 retried 78 times in total \(70.0 GiB reserved\)"):
        memory_pressure.detect(**recorded(range(STEPS), state={"cuda_reserved_bytes": 70 * GIB}))


def test_rank_without_a_device_is_not_checked():
    of = recorded([])
    of["memory"] = of["memory"].filter(pl.col("name") == "rss_bytes")
    with pytest.raises(NotResolvable, match="no allocator of a device was seen"):
        memory_pressure.detect(**of)
