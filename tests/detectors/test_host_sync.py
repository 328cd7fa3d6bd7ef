"""A host that waits for its device: the lead that it loses, and the idle time that follows, in numbers of the head."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import host_sync
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.metrics.launch_queue import host_gaps, lost_lead
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.timeline.build import build_timeline
from rankscope.errors import NotResolvable
from support.device_tables import ITEM, MS, tables
from support.kineto import event, kernel, launch, opened
from support.kineto import step as profiler_step
from support.paths import DATA

KINETO = DATA / "kineto"

OWN_MS = 0.01  # what a call takes that waits for nothing


def test_a_wait_of_70_ms_costs_the_20_that_the_device_then_idles_and_is_named():
    (finding,) = host_sync.detect(*tables(("cudaStreamSynchronize", 10, 80.1)))
    assert (finding.ranks, finding.lost_ns_per_step, finding.gain_fraction) == ((0, 1), 20 * MS, 0.2)
    assert (
        finding.title
        == "The host waits for the device once per step on ranks 0,1, and the device then 20.0 ms for the host"
    )
    assert finding.where == f"log the loss, {ITEM}, cudaStreamSynchronize"
    assert "100 % of this comes after .item(), float(tensor) or `if tensor`" in finding.advice
    first = finding.evidence[0]
    assert (first.rank, first.start_ns, first.end_ns) == (0, 10 * MS, 100 * MS)


def test_a_host_that_calls_nothing_for_20_ms_after_it_waited_does_something_else():
    """Without the wait the device would idle as well, less by what the host had run ahead."""
    breakdown, phases, kernels, launches, regions = tables(("cudaStreamSynchronize", 10, 80.1))
    launches = launches.filter(pl.col("name") != "cudaEventQuery")
    assert host_sync.detect(breakdown, phases, kernels, launches, regions) == []


@pytest.mark.parametrize(
    ("call", "lost_ms"),
    [
        (("cudaStreamSynchronize", 73, 80), 7 - OWN_MS),  # it would have been 7 ms ahead, no more
        (("hipMemcpyWithStream", 60, 80), 20 - OWN_MS),
        (("cudaStreamSynchronize_v3020", 60, 80), 20 - OWN_MS),
        (("cudaMemcpy", 10, 30), 20 - OWN_MS),  # the lead of 20 ms was lost long before the queue drained
    ],
)
def test_it_costs_no_more_than_the_host_waited(call, lost_ms):
    (finding,) = host_sync.detect(*tables(call))
    assert finding.lost_ns_per_step == pytest.approx(lost_ms * MS)


@pytest.mark.parametrize(("busy_ms", "found"), [(59, 1), (61, 0)])
def test_a_host_that_launches_for_three_quarters_of_what_its_device_works_has_no_lead_to_lose(busy_ms, found):
    """The device works 80 ms per step; waiting for it cost the host 8 ms of its lead, as far as it had any."""
    call = ("cudaStreamSynchronize", 70, 80)
    assert len(host_sync.detect(*tables(call, busy_ns=busy_ms * MS))) == found


def test_what_the_job_loses_is_what_its_busiest_rank_loses():
    """Rank 1 alone waits: rank 0 idles as long for other reasons, and the job would wait for it."""
    assert host_sync.detect(*tables({1: [("cudaStreamSynchronize", 10, 80)]})) == []


@pytest.mark.parametrize(
    "calls",
    [
        [("cudaLaunchKernel", 10, 80)],
        [("cudaStreamSynchronize", 80, 80.01)],  # the device had done its work: nothing to wait for
        [("cudaStreamSynchronize", 10, 12)],  # 2 ms of 100
        [("cudaMemcpyAsync", 10, 80)],
    ],
    ids=["a launch", "waits for nothing", "below 3 %", "not blocking"],
)
def test_other_calls_and_cheap_ones_are_silent(calls):
    of = tables(*calls)
    assert host_sync.detect(*of) == []
    assert host_sync.resolution_ns(*of[:4]) == 3 * MS


def test_waiting_that_leaves_no_idle_device_costs_nothing():
    assert host_sync.detect(*tables(("cudaDeviceSynchronize", 10, 99), idle=(100, 100))) == []


def test_trace_without_launches_or_any_call_that_waits_is_not_judged():
    breakdown, phases, kernels, launches, _ = tables(("cudaLaunchKernel", 10, 80))
    with pytest.raises(NotResolvable, match="no call that waits for a device"):
        host_sync.detect(breakdown, phases, kernels, launches.filter(pl.col("name") == "cudaLaunchKernel"))
    with pytest.raises(NotResolvable, match="launched"):
        host_sync.detect(*tables(("cudaStreamSynchronize", 10, 80), launched=False))


def test_a_late_host_follows_from_its_synchronisations_if_they_explain_half_of_it():
    def finding(detector, ms):
        cost = {"lost_ns_per_step": ms * MS, "lost_ns_total": ms * MS, "lost_fraction": ms / 100, "uncertainty_ns": 0}
        text = dict.fromkeys(("title", "where", "advice"), "")
        return Finding(detector=detector, severity="high", ranks=(0, 1), **text, **cost)

    for sync_ms, order in ((12, ["host_sync", "host_bound"]), (8, ["host_bound", "host_sync"])):
        found = root_causes_first([finding("host_bound", 20), finding("host_sync", sync_ms)], range(4))
        assert [f.detector for f in found] == order
        assert found[1].caused_by == ("host_sync" if sync_ms == 12 else None)


@pytest.mark.parametrize("call", ["cudaStreamSynchronize", "cudaMemcpyAsync"])
def test_item_in_a_profilers_trace_is_the_root_and_named_as_it_is_written(tmp_path, call):
    """In each step of 100 ms the host waits in .item() until 80, and launches what comes next at 95.

    A copy to memory that is not pinned is over when its call returns, whatever its name says.
    """
    events = []
    for number in range(8):
        at = 100_000 * number  # µs
        events += [
            profiler_step(number, at, 100_000),
            launch(at, 5, 2 * number),
            kernel("gemm", at + 10, 79_990, 2 * number),
            event("user_annotation", "log the loss", at + 500, 80_000),
            event("cpu_op", "aten::item", at + 900, 79_200),
            event("cpu_op", ITEM, at + 950, 79_100),
            launch(at + 1_000, 79_010, 1000 + number, name=call),
            *(
                launch(at + late, 5, 10_000 * number + late, name="cudaEventQuery")
                for late in range(82_000, 95_000, 4_000)
            ),
            launch(at + 95_000, 5, 2 * number + 1),
            kernel("gemm", at + 95_010, 4_990, 2 * number + 1),
        ]
        if call == "cudaMemcpyAsync":
            where = {"pid": 0, "tid": 7, "device": 0, "stream": 7, "correlation": 1000 + number}
            events.append(event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at + 80_002, 3, **where))
    report = rankscope.diagnose(opened(tmp_path, events, distributedInfo={"rank": 0, "world_size": 1}))
    root, *others = report.findings
    assert (root.detector, root.where) == ("host_sync", f"log the loss, {ITEM}, {call}")
    assert root.lost_ns_per_step == pytest.approx(15.01 * MS, abs=0.02 * MS)
    assert [(f.detector, f.caused_by) for f in others] == [("host_bound", "host_sync")]


@pytest.mark.needs_data
def test_lead_of_a_real_job_is_that_of_a_plain_loop_over_its_calls_and_kernels():
    """DLRM on 4 GPUs, rank 2: in each step one cudaStreamSynchronize of 21 to 33 ms takes the host's lead away."""
    timeline = build_timeline(rankscope.open(KINETO / "torchrec/sst_long_a2a_optimizer_5"))
    kernels = timeline.kernels.filter(pl.col("rank") == 2)
    waits = timeline.launches.filter(pl.col("rank") == 2, pl.col("name") == "cudaStreamSynchronize")
    costly = lost_lead(host_gaps(timeline.phases.filter(pl.col("rank") == 2), kernels), waits, 0)
    begins = timeline.steps.filter(pl.col("rank") == 2)["start_ns"].to_list()
    assert costly.group_by("step").agg(pl.col("cost_ns").sum()).sort("step")["cost_ns"].to_list() == pytest.approx(
        by_hand(kernels, waits, begins), abs=0.02 * MS
    )


def by_hand(kernels, waits, begins):
    """ns per step that hosts without these calls would have been ahead, gap by gap."""
    events = [(end, end - start - 10_000, None) for start, end in waits.select("start_ns", "end_ns").iter_rows()]
    reached = kernels["start_ns"].min()
    for start, end, launched in kernels.sort("start_ns").select("start_ns", "end_ns", "launch_ns").iter_rows():
        if launched is not None and start > reached < launched:
            events.append((start, 0, reached))
        reached = max(reached, end)
    lead, cost = 0, [0] * len(begins)
    for at, waited, idle_since in sorted(events, key=lambda event: event[0]):
        lead += max(waited, 0)
        if idle_since is not None:
            covered = min(lead, at - idle_since)
            lead -= covered
            cost[sum(begin <= idle_since for begin in begins) - 1] += covered
    return cost


def test_the_innermost_region_is_the_last_to_begin_of_those_that_hold_the_call():
    rng = np.random.default_rng(7)

    def spans(count, longest):
        start = rng.permutation(4 * count)[:count]
        names = [f"r{i}" for i in range(count)]
        end = start + rng.integers(0, longest, count)
        where = {"rank": rng.integers(0, 2, count), "thread": rng.integers(1, 3, count)}
        return pl.DataFrame({**where, "start_ns": start, "end_ns": end, "name": names})

    calls, regions = spans(150, 6), spans(300, 400)
    expected = []
    for rank, thread, start, end, _ in calls.iter_rows():
        holds = (pl.col("rank") == rank) & (pl.col("thread") == thread)
        holders = regions.filter(holds, pl.col("start_ns") <= start, pl.col("end_ns") >= end).sort("start_ns")
        expected.append(holders["name"][-1] if len(holders) else "")
    assert "" in expected
    assert len(set(expected)) > 20
    assert host_sync._innermost(calls, regions) == expected
