"""What a collective should take, what it takes by its size, and how much of it holds a rank up."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.metrics.bandwidth import (
    Line,
    Link,
    bus_factor,
    busbw,
    costs,
    faster_than_ring,
    fit_line,
    lines,
    link_of,
    transfers,
)
from rankscope.analysis.metrics.exposed_communication import with_exposed

US, MB = 1_000, 1_000_000
COLUMNS = (
    *("rank", "group_id", "group", "group_size", "op", "step", "instance_id"),
    *("start_ns", "device_start_ns", "end_ns", "size_bytes", "wait_ns", "transfer_ns"),
)
TYPES = (pl.Int64, pl.Int64, pl.String, pl.UInt32, pl.String, pl.Int64, pl.UInt32, *[pl.Int64] * 6)


@pytest.mark.parametrize(
    ("op", "algorithm", "ns"),
    [
        # 8 ranks, 8,000 bytes, α = 10 ns, β = 1 ns per byte, γ = 0.1: by hand
        ("allreduce", "ring", 14 * 10 + 14_000 + 700),
        ("allreduce", "tree", 6 * (10 + 8_000) + 3 * 800),
        ("allreduce", "double binary tree", 6 * 10 + 16_000 + 800),
        ("allreduce", "recursive doubling", 3 * (10 + 8_000 + 800)),
        ("allreduce", "Rabenseifner", 6 * 10 + 14_000 + 700),
        ("allreduce", "2D torus", 2 * (1 + 3) * 10 + 14_000 + 700),  # 2 × 4
        ("allreduce", "parameter server", 20 + 8_000 + 800),
        ("allreduce", "in-network", 10 + 8_000),
        ("reduce_scatter_base", "ring", 70 + 7_000 + 700),
        ("allgather_base", "recursive doubling", 30 + 7_000),
        ("allgather", "2D torus", 40 + 7_000),
        ("alltoall_base", "pairwise", 70 + 7_000),
        ("alltoall", "Bruck", 3 * (10 + 4_000)),
        ("broadcast", "tree", 3 * (10 + 8_000)),
        ("broadcast", "double binary tree", 30 + 8_000),
    ],
)
def test_models_of_the_algorithms(op, algorithm, ns):
    assert costs(op, 8)[algorithm].ns(8_000, Link(10, 1, 0.1)) == pytest.approx(ns)


def test_what_is_no_collective_has_no_model():
    assert costs("send", 8) == {}
    assert costs("allreduce", 1) == {}


def test_latency_decides_between_algorithms_where_messages_are_small():
    link = Link(20 * US, 0.1)  # 20 µs, 10 GB/s
    small, large = ({name: cost.ns(n, link) for name, cost in costs("allreduce", 64).items()} for n in (1_000, 1e9))
    assert min(small, key=small.get) == "in-network"
    assert small["recursive doubling"] < small["Rabenseifner"] < small["2D torus"] < small["ring"]
    assert large["ring"] < large["double binary tree"] < large["recursive doubling"] < large["tree"]


def test_bus_bandwidth_factors_are_those_of_nccl_tests():
    ops = ("allreduce", "allgather_base", "reduce_scatter", "alltoall_base", "broadcast", "reduce")
    assert [bus_factor(op, 4) for op in ops] == [1.5, 0.75, 0.75, 0.75, 1, 1]


def test_busbw_is_that_of_nccl_tests():
    """1 GB in 1 s on 4 ranks: 2·3/4 for an allreduce, 3/4 for an allgather, 1 for a broadcast, none for a barrier."""
    rows = pl.DataFrame(
        {
            "op": ["allreduce", "allgather_base", "broadcast", "barrier"],
            "group_size": pl.Series([4] * 4, dtype=pl.UInt32),
            "size_bytes": [10**9, 10**9, 10**9, 0],
            "transfer_ns": [10**9] * 4,
        }
    )
    assert rows.select(busbw()).to_series().to_list() == [1.5e9, 0.75e9, 1e9, None]


def test_a_ring_of_64_is_the_wrong_algorithm_for_small_sizes_only():
    """126 messages of 10 µs: 1.26 ms, where halving and doubling sends 12."""
    ring = Line(
        latency_ns=126 * 10 * US, ns_per_byte=0.2, latency_error_ns=0, rate_error_ns_per_byte=0, error=0, sizes=9
    )
    assert faster_than_ring("allreduce", 64, ring, 8) == ("recursive doubling", pytest.approx(6 / 126, rel=0.01))
    assert faster_than_ring("allreduce", 64, ring, 1e9) is None


def test_latency_and_bandwidth_come_from_the_median_of_each_size():
    """300 µs and 2 GB/s; every tenth transfer is 50 ms late."""
    size = np.repeat([1e3, 1e5, 1e6, 1e7], 40)
    ns = (300 * US + size / 2) * (1 + 0.05 * np.random.default_rng(0).standard_normal(len(size)))
    ns[::10] += 50e6
    line = fit_line(size, ns)
    assert line.latency_ns == pytest.approx(300 * US, rel=0.05)
    assert 1 / line.ns_per_byte == pytest.approx(2, rel=0.05)
    assert line.half_bytes == pytest.approx(600_000, rel=0.1)
    ring = link_of(line, costs("allreduce", 4)["ring"])
    assert ring.latency_ns == pytest.approx(50 * US, rel=0.05)  # of 6 messages
    assert line.sizes == 4
    assert line.error < 0.05


def test_sizes_that_hardly_differ_give_no_latency():
    assert fit_line(np.array([1e6, 1.1e6, 1.2e6]), np.array([1e6, 1.1e6, 1.2e6])) is None


def rows(*spans, op="allreduce", size=MB, wait=0):
    """Rows of two ranks in one group; rank 1 arrives with rank 0. `spans` are (start, end) in µs, one per operation."""
    return pl.DataFrame(
        [
            (rank, 7, "dp", 2, op, 0, i, start * US, None, end * US, size, wait * US, (end - start - wait) * US)
            for rank in (0, 1)
            for i, (start, end) in enumerate(spans)
        ],
        dict(zip(COLUMNS, TYPES, strict=True)),
        orient="row",
    )


def test_a_transfer_begins_when_all_are_there_and_the_one_before_has_ended():
    """The second is called at 20, while the first is under way until 100: 80 of its 160 are its own."""
    moved = transfers(rows((0, 100), (20, 180), (200, 290), wait=10))
    assert moved["ns"].to_list() == [90 * US, 80 * US, 80 * US]
    assert moved["alone"].to_list() == [True, False, True]


def test_broadcasts_and_unmatched_rows_give_no_transfer():
    assert transfers(rows((0, 100), op="broadcast")).is_empty()
    assert transfers(rows((0, 100)).with_columns(instance_id=pl.lit(None, pl.UInt32))).is_empty()
    assert lines(transfers(rows((0, 100), (200, 300)))) == {}


def test_only_what_blocks_a_rank_is_exposed():
    """Two operations overlap from 50 to 100; the rank is blocked from 80 to 150. Rank 1 is never blocked."""
    calls = rows((0, 100), (50, 150))
    phases = pl.DataFrame(
        {"rank": [0, 0, 0], "part": ["overlapped", "transfer", "wait"]}
        | {"start_ns": [0, 80 * US, 150 * US], "end_ns": [80 * US, 150 * US, 200 * US]}
    )
    found = with_exposed(calls, phases)
    assert found.select("rank", "instance_id", "exposed_ns").rows() == [
        (0, 0, 20 * US),
        (0, 1, 50 * US),
        (1, 0, 0),
        (1, 1, 0),
    ]
