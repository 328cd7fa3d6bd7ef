"""Traces of torch.profiler: what a naive importer gets wrong, broken files, and the C scanner against its twin."""

import contextlib
import gc
import gzip
import io
import json
import os
import tarfile
import tempfile
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.readers import json_scan, spill_file
from rankscope.analysis.readers.collective_numbering import Sequence, align
from rankscope.analysis.readers.kineto import scan
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.errors import BadInput
from support.fuzz import scan as fuzz_scan
from support.kineto import ALLREDUCE, copy, event, kernel, launch, meta, opened, step, text_of, write
from support.paths import DATA

KINETO = DATA / "kineto"

needs_fast = pytest.mark.skipif(json_scan._scan is None, reason="the C scanner was not built")
by_each_scanner = pytest.mark.parametrize("fast", [pytest.param(True, marks=needs_fast), False], ids=["C", "Python"])


def rows(trace, table, *columns):
    return trace.table(table).collect().select(*columns).rows()


def whys(trace):
    return [(gap.table, gap.rank, gap.count, gap.why) for gap in trace.gaps()]


# ---------------------------------------------------------------- time


@pytest.mark.parametrize(
    ("ts", "dur", "top", "start_ns", "end_ns"),
    [
        ("1712195495519689", "25", {}, 1712195495519689000, 1712195495519714000),
        ("1712195495519689.123", "0.002", {}, 1712195495519689123, 1712195495519689125),
        (
            "4203669604595.407",
            "1.5",
            {"baseTimeNanoseconds": 1735632360000000000},
            1739836029604595407,
            1739836029604596907,
        ),
        ("12.5", "0", {"displayTimeUnit": "ms"}, 12500, 12500),
        ("12.5", "1", {"displayTimeUnit": "ns"}, 12500, 13500),
        ('"12.5"', '"1"', {}, 12500, 13500),
    ],
    ids=["whole µs", "µs with ns", "after a base", "unit of display", "unit of display is ns", "text"],
)
def test_times_are_exact_in_every_style(tmp_path, ts, dur, top, start_ns, end_ns):
    text = text_of([kernel("k", "TS", "DUR")], **top).replace('"TS"', ts).replace('"DUR"', dur)
    (tmp_path / "rank0.json").write_text(text)
    assert rows(Trace.open(tmp_path / "rank0.json"), "kernels", "start_ns", "end_ns") == [(start_ns, end_ns)]


def test_the_base_of_time_may_stand_behind_the_events(tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [kernel("k", 1, 1)], "baseTimeNanoseconds": 1000}))
    assert rows(Trace.open(tmp_path / "rank0.json"), "kernels", "start_ns") == [(2000,)]


def test_a_kernel_that_precedes_its_launch_and_one_of_no_length_are_kept(tmp_path):
    trace = opened(tmp_path, [launch(50, 5, 1), kernel("early", 8, 10, 1), launch(60, 5, 2), kernel("empty", 70, 0, 2)])
    assert rows(trace, "kernels", "name", "start_ns", "end_ns") == [("early", 8000, 18000), ("empty", 70000, 70000)]
    assert trace.gaps() == []


# ---------------------------------------------------------------- links


def test_device_rows_without_a_launch_are_busy_time_and_reported(tmp_path):
    """10 µs with a launch, 20 µs without: 30 µs busy."""
    trace = opened(tmp_path, [launch(0, 5, 1), kernel("a", 10, 10, 1), kernel(ALLREDUCE, 30, 20, 99)])
    assert diagnose(trace).device[0].busy_ns == 30_000
    assert rows(trace, "collectives", "op", "start_ns", "device_start_ns", "end_ns", "size_bytes", "dtype") == [
        ("allreduce", 30_000, 30_000, 50_000, None, "unknown")
    ]
    why = "1 of 2 device rows were launched outside of the capture: they count all the same"
    assert whys(trace)[0] == ("launches", 0, 1, why)


def test_all_kernels_of_a_graph_have_its_one_launch(tmp_path):
    graph = [kernel("k", 10 + n, 1, 5) for n in range(502)]
    trace = opened(tmp_path, [launch(0, 5, 5, name="cudaGraphLaunch"), *graph])
    assert trace.table("kernels").collect()["correlation"].to_list() == [5] * 502
    assert trace.gaps() == []


def test_what_a_kernel_says_of_its_collective(tmp_path):
    trace = opened(tmp_path, [launch(5, 2, 1), kernel(ALLREDUCE, 10, 10, 1, **meta(Seq=17))])
    wanted = ("op", "seq", "size_bytes", "dtype", "start_ns", "issued_ns", "device_start_ns", "end_ns")
    assert rows(trace, "collectives", *wanted) == [("allreduce", 17, 2000, "bfloat16", 5_000, 7_000, 10_000, 20_000)]
    assert rows(trace, "groups", "name", "role", "members") == [("0", "default_pg", "0,1")]


HTOD, FILL = "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"


@by_each_scanner
def test_copies_and_fills_have_their_bytes_and_kernels_none(tmp_path, monkeypatch, fast):
    """Copies of 1 MB and 3 MB, a fill of 4 kB, a copy that does not say how much it moved, and a kernel."""
    if not fast:
        monkeypatch.setattr(json_scan, "_scan", None)
    events = [copy(HTOD, 0, 100, 1, bytes=1_000_000), copy(HTOD, 200, 100, 2, bytes=3_000_000)]
    events += [copy(FILL, 400, 10, 3, bytes=4096), copy(HTOD, 500, 1000, 4), kernel("gemm", 2000, 50, 5, bytes=7)]
    trace = opened(tmp_path, [*(launch(10 * n, 5, n) for n in range(1, 6)), *events])
    assert rows(trace, "kernels", "name", "work", "bytes") == [
        (HTOD, "memory", 1_000_000),
        (HTOD, "memory", 3_000_000),
        (FILL, "memory", 4096),
        (HTOD, "memory", None),
        ("gemm", "compute", None),
    ]
    assert trace.gaps() == []


@by_each_scanner
@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("65536", 65536),
        ('"65536"', 65536),
        ("6.5536e4", 65536),
        ('65536, "note": "a{\\"b"', 65536),
        ("5000000000", 5_000_000_000),
        ("0", 0),
        ("-1", None),
        ("null", None),
        ('"many"', None),
        ('{"bytes": 5}', None),
        ("18446744073709551615", None),
    ],
)
def test_bytes_that_are_no_size_are_unknown(tmp_path, monkeypatch, fast, written, read):
    if not fast:
        monkeypatch.setattr(json_scan, "_scan", None)
    text = text_of([copy(HTOD, 0, 100, bytes="BYTES"), copy(HTOD, 200, 100, bytes=9)])
    (tmp_path / "rank0.json").write_text(text.replace('"BYTES"', written))
    assert rows(Trace.open(tmp_path / "rank0.json"), "kernels", "bytes") == [(read,), (9,)]


def nccl_2_15(collective, kernel_name, seq, ts, *, rank, correlation):
    """What torch 2.15's NCCL backend writes of one kernel: an operator, a span of the same name, and a kernel."""
    said = {"Collective name": collective, "In msg nelems": 8, "Out msg nelems": 16, "dtype": "Float", "Seq": seq}
    said |= {"Process Group Name": "0", "Process Group Description": "", "Process Group Ranks": "[]"}
    return [
        event("cpu_op", "record_param_comms", ts, 20, **said),
        event("user_annotation", collective, ts + 1, 18),
        launch(ts + 5, 2, correlation),
        kernel(kernel_name, ts + 100, 50, correlation, device=rank, **said),
    ]


def test_operations_of_nccl_on_torch_2_15(tmp_path):
    """An all-gather, an all-to-all and a coalesced all-reduce of two tensors, which is two kernels of one number; of a
    second one, rank 1 has but one kernel."""
    to_all, reduce = "ncclDevKernel_SendRecv(ncclDevComm*)", ("all_reduce", ALLREDUCE)
    kernels = [("allGatherSingleImpl", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 7)]
    kernels += [("allToAllSingleImpl", to_all, 8), (*reduce, 9), (*reduce, 9), (*reduce, 10), (*reduce, 10)]
    for rank, count in ((0, 6), (1, 5)):
        events = [step(1, 0, 10_000), event("user_annotation", "my phase", 0, 50)]
        for number, (name, kernel_name, seq) in enumerate(kernels[:count]):
            at = 1000 * number + 100 * rank
            events += nccl_2_15(name, kernel_name, seq, at, rank=rank, correlation=number + 1)
        group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "ranks": [0, 1]}
        info = {"rank": rank, "world_size": 2, "pg_config": [group]}
        write(tmp_path / f"rank{rank}.json", events, distributedInfo=info)
    trace = Trace.open(tmp_path)
    assert {name for (name,) in rows(trace, "regions", "name")} == {"my phase"}
    found = build_timeline(trace).collectives.filter(pl.col("rank") == 0)
    assert found["op"].to_list() == ["allgather_base", "alltoall_base", *["allreduce"] * 4]
    assert found["group"].unique().to_list() == ["0"]
    assert found["instance_id"].to_list() == [0, 1, 2, 3, None, None]
    assert set(found["unmatched"][4:]) == {"peer missing"}


def test_a_kernel_without_words_takes_those_of_the_operator_that_launched_it(tmp_path):
    """`External id` 2 of the kernel points to another operator, as in files where it is the correlation."""
    trace = opened(
        tmp_path,
        [
            event("cpu_op", "record_param_comms", 0, 10, **{"External id": 1}, **meta("_allgather_base", 8, "3")),
            event("cpu_op", "record_param_comms", 20, 10, **{"External id": 2}, **meta("allreduce", 4, "0")),
            launch(5, 2, 2),
            kernel("ncclDevKernel_Generic(ncclDevComm*)", 30, 5, 2, **{"External id": 2}),
        ],
    )
    assert rows(trace, "collectives", "op", "size_bytes") == [("allgather_base", 16)]
    assert rows(trace, "groups", "name") == [("3",)]


def test_a_kernel_that_nothing_describes_is_what_the_range_around_its_launch_says(tmp_path):
    """As before torch 2.2. The name of an all-reduce's kernel says it already; outside of a range nothing is known."""
    send = "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)"
    trace = opened(
        tmp_path,
        [
            event("user_annotation", "nccl:all_to_all", 0, 10),
            event("user_annotation", "nccl:all_to_all", 40, 10),
            *(launch(at, 2, at) for at in (5, 20, 45)),
            *(kernel(name, at + 5, 2, at) for at, name in ((5, send), (20, send), (45, ALLREDUCE))),
        ],
    )
    assert rows(trace, "collectives", "op") == [("alltoall",), ("unknown",), ("allreduce",)]


def test_compiled_graphs_have_one_name_on_all_ranks(tmp_path):
    """Their hash is another one on each rank, so that none could be compared."""
    for rank in range(2):
        write(tmp_path / f"rank{rank}.json", [event("user_annotation", f"## Call CompiledFxGraph f{rank}a9z ##", 0, 9)])
    assert set(rows(Trace.open(tmp_path), "regions", "name")) == {("CompiledFxGraph",)}


@pytest.mark.parametrize("name", ["of the job", "in the group"])
def test_a_peer_is_named_by_its_rank_in_the_job_or_by_its_place_in_the_group(tmp_path, name):
    """Stages of a pipeline, ranks 1 and 3: place 0 and 1 of their group. Rank 1 sends, and rank 3 sends back."""
    for place, rank in enumerate((1, 3)):
        peer = 1 - place if name == "in the group" else 4 - rank
        events = []
        for number in range(4):
            at, is_sender = 1_000 * (number + 1), number % 2 == place
            op, end = ("send", {"Dst Rank": peer}) if is_sender else ("recv", {"Src Rank": peer})
            args = meta(op, ranks="[1, 3]", **end)
            events += [launch(at, 5, number), kernel("ncclDevKernel_SendRecv", at + 10, 90, number, **args)]
        write(tmp_path / f"rank{rank}.json", events)
    timeline = build_timeline(Trace.open(tmp_path))
    assert set(timeline.collectives.select("rank", "peer").rows()) == {(1, 3), (3, 1)}
    assert timeline.collectives["instance_id"].n_unique() == 4


def test_a_batch_of_sends_and_receives_is_what_was_called_before_its_kernel_was_launched(tmp_path):
    """Rank 0 sends 1000 elements to rank 1 and receives 500 in the same kernel, which is launched after both calls;
    rank 1's calls are not in its file the first time."""
    batch = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    for rank in (0, 1):
        events = []
        for number, (at, there) in enumerate(((0, rank == 0), (1000, True))):
            send, recv = {"Dst Rank": 1 - rank, "Seq": 2 * number + 1}, {"Src Rank": 1 - rank, "Seq": 2 * number + 2}
            if there:
                sent, received = (1000, 500) if rank == 0 else (500, 1000)
                events.append(event("cpu_op", "record_param_comms", at, 10, **meta("send", sent, **send)))
                events.append(event("cpu_op", "record_param_comms", at + 12, 10, **meta("recv", received, **recv)))
            events += [
                launch(at + 30, 2, number + 1),
                kernel(batch, at + 100 + 50 * rank, 200, number + 1, device=rank),
            ]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    found = build_timeline(Trace.open(tmp_path)).collectives
    found = found.sort("rank", "device_start_ns", pl.col("op").cast(pl.String))
    known = found.filter(pl.col("peer") >= 0).select("rank", "device_start_ns", "op", "peer", "size_bytes")
    assert known.rows() == [
        (0, 100_000, "recv", 1, 1000),
        (0, 100_000, "send", 1, 2000),
        (0, 1_100_000, "recv", 1, 1000),
        (0, 1_100_000, "send", 1, 2000),
        (1, 1_150_000, "recv", 0, 2000),
        (1, 1_150_000, "send", 0, 1000),
    ]
    (lost,) = found.filter(pl.col("peer") < 0).select("rank", "device_start_ns", "op", "instance_id").rows()
    assert lost == (1, 150_000, "send", None)
    assert (
        found.filter(pl.col("instance_id").is_not_null())["device_start_ns"].to_list()
        == [1_100_000] * 2 + [1_150_000] * 2
    )


@pytest.mark.parametrize("ahead", [0, 80, 600])
def test_a_device_whose_clock_is_off_does_not_change_who_was_last(tmp_path, ahead):
    """Rank 0 comes 500 µs after rank 1 to each of 20 reductions; rank 1's device, in µs, is so much ahead."""
    for rank in (0, 1):
        events = [step(1, 0, 41_000)]
        for n in range(20):
            at, arrived = 2_000 * n, (1_500, 1_000)[rank]
            off = ahead * rank
            events += [launch(at, 5, 2 * n), kernel("gemm", at + 10 + off, arrived - 10, 2 * n, device=rank)]
            words = {"device": rank, **meta(Seq=n)}
            events += [
                launch(at + 10, 5, 2 * n + 1),
                kernel(ALLREDUCE, at + arrived + off, 1600 - arrived, 2 * n + 1, **words),
            ]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    timeline = build_timeline(Trace.open(tmp_path))
    waits = timeline.collectives.group_by("rank").agg(pl.col("wait_ns").mean(), pl.col("is_last").all()).sort("rank")
    expected = 500_000 if ahead != 80 else 420_000  # so little is within what ends differ by anyway
    assert waits.rows() == [(0, 0, True), (1, expected, False)]
    gaps = [gap.why for gap in timeline.gaps if "clock" in gap.why]
    assert gaps == ["its device's clock was 300 µs off the others' and was set right"] * (2 if ahead == 600 else 0)


def test_what_the_profiler_lost_is_reported_and_such_steps_are_excluded(tmp_path):
    """20 kernels of 480 µs in each of 6 steps of 10 ms; the driver dropped all of the last three steps but one."""
    events = []
    for number in range(6):
        at = 10_000 * number
        events.append(step(number, at, 9_990))
        for n in range(20):
            events.append(launch(at + 50 + 10 * n, 5, 20 * number + n))
            if number < 3 or (number, n) == (4, 7):
                events.append(kernel("gemm", at + 300 + 480 * n, 480, 20 * number + n))
    trace = opened(tmp_path, events)
    report = diagnose(trace)
    assert report.steps.count == 3
    gaps = [gap.why for gap in report.gaps]
    assert "what 59 calls of 120 launched was not recorded" in gaps
    assert "3 steps not analyzed, since much of what was launched in them was not recorded" in gaps
    assert {part.part for part in report.breakdown if part.ns_per_step > 1_000_000} == {"compute"}


def test_rows_without_a_time_and_several_devices_are_reported(tmp_path):
    base = 1_735_632_360_000_000_000
    events = [launch(10 * n, 5, n) for n in range(4)]
    events += [kernel("a", 10, 10, 0), kernel("b", 20, 10, 1, device=1), kernel("c", -base / 1000, 0, 2)]
    trace = opened(tmp_path, events, baseTimeNanoseconds=base)
    assert rows(trace, "kernels", "start_ns") == [(base + 10_000,), (base + 20_000,)]
    assert whys(trace)[:2] == [
        ("kernels", 0, 1, "1 device row to which the driver gave no time were left out"),
        ("kernels", 0, None, "its work on 2 devices counts as that of one"),
    ]


def test_without_named_steps_the_main_thread_is_the_one_with_the_optimizer_and_not_that_of_backward(tmp_path):
    """Thread 2, autograd's, launches ten times as much."""
    events = []
    for number in range(6):
        at = 10_000 * number
        events.append(event("user_annotation", "enumerate(DataLoader)#_Iter.__next__", at, 4_000, tid=1))
        events += [launch(at + 4_000, 5, 100 * number, tid=1), kernel("forward", at + 4_010, 1_000, 100 * number)]
        for n in range(1, 11):
            events.append(launch(at + 5_000 + 10 * n, 5, 100 * number + n, tid=2))
            events.append(kernel("backward", at + 5_100 + 400 * n, 400, 100 * number + n))
        events.append(event("user_annotation", "Optimizer.step#SGD.step", at + 5_500, 400, tid=1))
    report = diagnose(opened(tmp_path, events))
    assert report.steps.source == "optimizer"
    assert report.steps.count >= 3
    (waits,) = [part.ns_per_step for part in report.breakdown if part.part == "input"]
    assert waits == 4_000_000


def test_without_an_optimizer_the_main_thread_is_the_one_whose_ranges_are_named_as_steps(tmp_path):
    """Thread 2 launches ten times as much, in ranges of layers. A step begins where the one before ended."""
    events = []
    for number in range(6):
        at = 10_000 * number
        events.append(event("user_annotation", f"step {number}", at + 2_000, 8_000, tid=1))
        events += [launch(at + 4_000, 5, 100 * number, tid=1), kernel("forward", at + 4_010, 1_000, 100 * number)]
        for n in range(1, 11):
            events.append(event("user_annotation", f"layer {n}", at + 5_000 + 10 * n, 8, tid=2))
            events.append(launch(at + 5_000 + 10 * n, 5, 100 * number + n, tid=2))
            events.append(kernel("backward", at + 5_100 + 400 * n, 400, 100 * number + n))
    report = diagnose(opened(tmp_path, events))
    assert (report.steps.source, report.steps.count, report.steps.median_ns) == ("named ranges", 6, 10_000_000)


def test_ranks_with_different_numbers_of_kernels_are_aligned_by_their_ends(tmp_path):
    """Rank 1 lacks the first of five. It comes 300 µs late to each of the others, so rank 0 waits 4 × 300 µs."""
    begin = [0, 10_000, 25_000, 31_000, 47_000]
    for rank, late, first in ((0, 0, 0), (1, 300, 1)):
        kernels = [kernel(ALLREDUCE, t + late, 1000 - late, device=rank) for t in begin[first:]]
        write(tmp_path / f"rank{rank}.json", kernels, distributedInfo={"rank": rank, "world_size": 2})
    report = diagnose(Trace.open(tmp_path))
    assert [(w.rank, w.waited_ns) for w in report.waits] == [(0, 1_200_000), (1, 0)]
    assert report.matched_fraction == 8 / 9


def test_a_rank_that_lacks_an_operation_is_aligned_by_ends():
    """Operations of two kinds end together but for 0.1 ms. Rank 1 lacks the fifth, or has two in another order."""
    ends = array([0, 10, 30, 60, 100, 150, 210, 280, 360, 450]) * 1_000_000
    kinds = array([1, 2, 1, 1, 2, 1, 2, 1, 1, 2])
    whole, kept = Sequence(kind=kinds, end_ns=ends), [0, 1, 2, 3, 5, 6, 7, 8, 9]
    holed = Sequence(kind=kinds[kept], end_ns=ends[kept] + 100_000)
    swapped = [0, 2, 1, 3, 4, 5, 6, 7, 8, 9]
    other = Sequence(kind=kinds[swapped], end_ns=ends[swapped] + 100_000)
    assert aligned(whole, holed) == kept
    assert aligned(holed, whole) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]  # the longest is what others are aligned with
    assert aligned(whole, other) == swapped
    late = Sequence(kind=holed.kind, end_ns=holed.end_ns + 7_000_000)
    assert align({0: whole, 1: late}, one_clock=True) is None
    assert aligned(whole, late, one_clock=False) == kept
    few = Sequence(kind=kinds[[0, 1, 2, 4, 5]], end_ns=ends[[0, 1, 2, 4, 5]])
    assert align({0: Sequence(kind=kinds[:6], end_ns=ends[:6]), 1: few}, one_clock=True) is None


def aligned(whole, other, *, one_clock=True):
    return align({0: whole, 1: other}, one_clock=one_clock)[1].tolist()


def test_one_kernel_without_a_duration_does_not_take_the_others_away(tmp_path):
    """Rank 1 lacks the 20th of 32 all-reduces, 10 ms apart: kinds agree at every shift, ends only where they belong."""
    for rank in (0, 1):
        kernels = [kernel(ALLREDUCE, 10_000 * n, 1000, device=rank) for n in range(32)]
        if rank == 1:
            kernels[20]["dur"] = "long"
        write(tmp_path / f"rank{rank}.json", kernels, distributedInfo={"rank": rank, "world_size": 2})
    assert build_timeline(Trace.open(tmp_path)).matched_fraction == pytest.approx(62 / 63)


def test_evenly_spaced_operations_do_not_give_the_offset_of_two_clocks():
    even = Sequence(kind=array([1] * 40), end_ns=array(range(40)) * 1_000_000)
    assert align({0: even, 1: Sequence(kind=even.kind, end_ns=even.end_ns + 7)}, one_clock=False) is None
    holed = Sequence(kind=even.kind[:39], end_ns=np.delete(even.end_ns, 20))
    assert align({0: even, 1: holed}, one_clock=False) is None


def array(values):
    return np.array(values, np.int64)


@pytest.mark.parametrize("tid", [-1, -1873213632, "25738", "python 1", 18446744073709551615])
def test_any_thread_id_is_a_thread(tmp_path, tid):
    events = [
        step(1, 0, 100),
        launch(5, 2, 1),
        launch(9, 2, 2, tid=tid),
        launch(15, 2, 3, tid=tid),
        kernel("k", 20, 1, 1),
    ]
    assert [t for (t,) in rows(opened(tmp_path, events), "launches", "thread")] == [0, 1, 1]


# ---------------------------------------------------------------- classes


def test_what_is_no_device_work_and_no_step(tmp_path):
    trace = opened(
        tmp_path,
        [
            step(4, 0, 100),
            event("cpu_op", "triton_poi_fused_add_0", 5, 5, stream=7, correlation=1),
            event("gpu_user_annotation", "ProfilerStep#4", 5, 90, pid=0, tid=7),
            event("gpu_user_annotation", "nccl:all_reduce", 5, 90, pid=0, tid=7),
            event("overhead", "Command Buffer Full", 5, 90, pid=-1, tid=0),
            event("cuda_sync", "Stream Sync", 5, 90, pid=0, tid=7, stream=7),
            event("user_annotation", "Optimizer.step#SGD.step", 50, 10),
            event("user_annotation", "nccl:all_reduce", 70, 10),
            kernel("k", 5, 5, device=0),
        ],
    )
    assert rows(trace, "kernels", "name") == [("k",)]
    assert rows(trace, "steps", "start_ns", "end_ns", "thread") == [(0, 100_000, 0)]
    assert rows(trace, "regions", "name", "kind") == [("Optimizer.step#SGD.step", "optimizer")]
    assert "collectives" not in trace


def test_amd_stream_zero_generic_kernels_and_devices_without_a_name(tmp_path):
    generic = "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)"
    events = [kernel("Cijk_Alik_Bljk", 0, 10, 1, stream=0, device=2), kernel(generic, 20, 5, 2, stream=3, device=2)]
    trace = opened(tmp_path, events, deviceProperties=[{"id": 2, "name": ""}])
    assert rows(trace, "kernels", "stream", "device", "work") == [(0, 2, "compute"), (3, 2, "communication")]
    assert rows(trace, "ranks", "device", "local_rank") == [("accelerator", 2)]


def test_the_oldest_names(tmp_path):
    trace = opened(
        tmp_path,
        [
            event("Operator", "ProfilerStep#5", 0, 100, tid="25738"),
            event("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 20, tid="25738"),
            event("Operator", "aten::add", 30, 5, tid="25738"),
            event("Runtime", "cudaLaunchKernel", 31, 2, tid="25738", correlation=3),
            event(
                "Kernel",
                "ncclAllReduceRingLLKernel_sum_f32(ncclColl)",
                40,
                5,
                pid=0,
                tid="stream 7",
                stream=7,
                correlation=3,
            ),
            event("Memset", "Memset (Device)", 50, 5, pid=0, tid="stream 7", stream=7, correlation=4),
        ],
        name="worker0.1623143089861.pt.trace.json",
    )
    assert rows(trace, "kernels", "work", "stream") == [("communication", 7), ("memory", 7)]
    assert rows(trace, "launches", "correlation") == [(3,)]
    assert rows(trace, "steps", "start_ns", "end_ns") == [(0, 100_000)]
    assert rows(trace, "regions", "kind", "start_ns") == [("input", 1_000)]
    assert rows(trace, "collectives", "op") == [("allreduce",)]


def test_without_device_work_nothing_is_judged_and_nothing_is_called_healthy(tmp_path):
    report = diagnose(opened(tmp_path, [step(n, n * 100, 99) for n in range(20)]))
    assert (report.findings, report.healthy) == ((), ())
    assert report.steps.source == "ProfilerStep"
    reasons = {unchecked.detector: unchecked.why for unchecked in report.not_checked}
    assert reasons["slow_rank"].startswith("the trace holds no device work")
    assert "device_time" not in reasons


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "info", "rank"),
    [
        ("a.pt.trace.json", {"rank": 5, "world_size": 8, "backend": "nccl"}, 5),
        ("a.pt.trace.json.gz", {"rank": 5}, 5),
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json", {"backend": "nccl"}, 34),
        ("inference_rank_1.json.gz", {}, 1),
        ("worker3_step_12.1694128201554.pt.trace.json", {}, 3),
        ("gpu-rank-07-chrome-trace.json", {}, 7),
    ],
)
def test_the_rank_from_the_file_or_its_name(tmp_path, name, info, rank):
    trace = opened(tmp_path, [kernel("k", 0, 1)], name=name, distributedInfo=info)
    assert rows(trace, "ranks", "rank") == [(rank,)]


def test_an_unknown_rank_is_taken_to_be_0_if_it_is_alone_and_asked_for_otherwise(tmp_path):
    trace = opened(tmp_path, [kernel("k", 0, 1)], name="one/trace.json", distributedInfo={"backend": "nccl"})
    assert whys(trace) == [("ranks", 0, None, "the file does not name its rank: it is assumed to be rank 0")]
    write(tmp_path / "one" / "other.json", [kernel("k", 0, 1)])
    with pytest.raises(BadInput, match=r"^other.json does not say which rank it is: put it into the file's name"):
        Trace.open(tmp_path / "one")


def test_two_captures_in_one_folder_are_distinguished(tmp_path):
    for name in ("before-rank0.json", "before-rank1.json", "after-rank0.json"):
        write(tmp_path / name, [kernel("k", 0, 1)])
    with pytest.raises(BadInput, match=r"rank 0 is in both after-rank0.json and before-rank0.json: these are two"):
        Trace.open(tmp_path)
    assert rows(Trace.open([tmp_path / "before-rank0.json", tmp_path / "before-rank1.json"]), "ranks", "rank") == [
        (0,),
        (1,),
    ]


def test_ranks_that_left_no_trace_are_named(tmp_path):
    trace = opened(tmp_path, [kernel("k", 0, 1)], distributedInfo={"rank": 2, "world_size": 5})
    assert whys(trace) == [("ranks", None, 4, "ranks 0,1,3,4 of 5: no trace of them is here")]


OPEN = (None, None, "no trace says how many ranks the job has: there may be more than these")


@pytest.mark.parametrize(
    ("ranks", "members", "lacking", "parts"),
    [
        ([0], "", OPEN, {"compute", "unsplit"}),  # no rank communicates alone
        ([0, 1], "0,1", OPEN, {"compute", "transfer"}),
        ([0, 2], "0-2", (1, 1, "rank 1 of 3: no trace of them is here"), {"compute", "unsplit"}),
    ],
    ids=["one", "first", "between"],
)
def test_how_many_ranks_a_job_has_where_no_trace_says(tmp_path, ranks, members, lacking, parts):
    """5 reductions of which the files name neither group nor size, all at once: transfers if these are all ranks."""
    for rank in ranks:
        work = [kernel("k", 20 * n, 10, n, device=rank) for n in range(5)]
        work += [kernel(ALLREDUCE, 20 * n + 10, 10, 9 + n, device=rank) for n in range(5)]
        write(tmp_path / f"rank{rank}.json", [step(1, 0, 100), *work])
    trace = Trace.open(tmp_path)
    assert {said for (said,) in rows(trace, "groups", "members")} == {members}
    assert [gap[1:] for gap in whys(trace) if gap[0] == "ranks"] == [lacking]
    assert {part.part for part in diagnose(trace).breakdown if part.ns_per_step} == parts


def test_a_folder_of_other_things_and_a_tar(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "LICENSE").write_text("free")
    (tmp_path / "d" / "config.json").write_text('{"lr": 0.1}')
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as tar:
        for rank in (0, 1):
            write(tmp_path / "d" / f"rank{rank}.json.gz", [kernel(f"k{rank}", 0, 1)])
            tar.add(tmp_path / "d" / f"rank{rank}.json.gz", f"traces/rank{rank}.json.gz")
        tar.add(tmp_path / "d" / "LICENSE", "LICENSE")
    for path in (tmp_path / "d", tmp_path / "t.tar.gz"):
        trace = Trace.open(path)
        assert trace.source == "kineto"
        assert rows(trace, "kernels", "rank", "name") == [(0, "k0"), (1, "k1")]


def test_a_bare_array(tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps([kernel("k", 0, 1), kernel("l", 2, 1)]))
    assert rows(Trace.open(tmp_path / "rank0.json"), "kernels", "name") == [("k",), ("l",)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.pt.trace.json", b"", "is empty"),
        ("a.json", b"", "is empty"),
        ("a.pt.trace.json.gz", gzip.compress(b"", mtime=0), "is empty"),
        (
            "a.pt.trace.json",
            b'{"schema": "1.0.1", "pid": 1, "nodes": [{"id": 1}]}',
            "is an execution trace, not a profiler",
        ),
        ("a.pt.trace.json", b"\x00\x01 not json", "is no trace of torch.profiler: it has no traceEvents"),
        ("a.pt.trace.json", b'{"traceEvents": []}', "holds no event"),
        ("a.pt.trace.json", b'{"traceEvents": [', "holds no event"),
        ("a.pt.trace.json.gz", gzip.compress(b'{"traceEvents": [{"ph": "X"}]}', mtime=0)[:12], "is cut off"),
        ("a.pt.trace.json.gz", b"\x1f\x8bnot gzip at all", "cannot be read further"),
        ("a.txt", b"hello", "is in no format that can be read"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=says) as raised:
        Trace.open(tmp_path / name)
    assert "\n" not in str(raised.value)
    assert name in str(raised.value)


BROKEN = {
    "unescaped quotes": ('"name": "first"', '"name": "say "hi" twice"', ["second"], "1 event could not be read"),
    "a brace in broken quotes": ('"name": "first"', '"name": "a "{["', ["second"], "1 event could not be read"),
    "unquoted value": ('"name": "first"', '"name": "first", "dtype": BFloat16', ["first", "second"], None),
    "missing value": ('"name": "first"', '"name": "first", "Process Group Description": ', ["first", "second"], None),
    "NaN": ('"ts": 0', '"ts": NaN', ["second"], "1 event without a time or duration were left out"),
    "time in words": ('"ts": 0', '"ts": "now"', ["second"], "1 event without a time or duration were left out"),
    "no duration": ('"dur": 1', '"dur": null', ["second"], "1 event without a time or duration were left out"),
    "negative duration": ('"dur": 1', '"dur": -1', ["second"], "1 event without a time or duration were left out"),
    "a key twice": ('"name": "first"', '"name": "never", "name": "first"', ["first", "second"], None),
    "escapes": ('"name": "first"', '"name": "a\\u00e4\\"\\\\"', ['aä"\\', "second"], None),
    "unsound escape": ('"name": "first"', '"name": "C:\\path"', ["C:\\path", "second"], None),
    "line break in a string": ('"name": "first"', '"name": "a\nb"', ["a\nb", "second"], None),
}


@pytest.mark.parametrize("kind", BROKEN)
@by_each_scanner
def test_broken_json_costs_no_more_than_the_broken_event(tmp_path, monkeypatch, kind, fast):
    was, now, names, said = BROKEN[kind]
    if not fast:
        monkeypatch.setattr(json_scan, "_scan", None)
    text = text_of([kernel("first", 0, 1, 1), kernel("second", 5, 1, 2), launch(0, 1, 1), launch(0, 1, 2)])
    (tmp_path / "rank0.json").write_text(text.replace(was, now, 1))
    trace = Trace.open(tmp_path / "rank0.json")
    assert [name for (name,) in rows(trace, "kernels", "name")] == names
    assert [gap.why for gap in trace.gaps() if said and gap.why.startswith(said)] or (said is None and not trace.gaps())


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path):
    """Random names do not compress, so half of the file holds about half of the 2,000 events."""
    events = [kernel(os.urandom(200).hex(), n, 1, n) for n in range(2_000)]
    packed = gzip.compress(text_of(events).encode())
    (tmp_path / "rank0.json.gz").write_bytes(packed[: len(packed) // 2])
    trace = Trace.open(tmp_path / "rank0.json.gz")
    assert 700 < len(rows(trace, "kernels", "name")) < 1_300
    assert whys(trace) == [("*", 0, None, "the file is cut off: what came after is lost")]
    (tmp_path / "rank0.json").write_text(text_of(events[:3])[:-40])
    trace = Trace.open(tmp_path / "rank0.json")
    assert len(rows(trace, "kernels", "name")) == 2
    assert whys(trace) == [("*", 0, None, "the file ends before its list of events does: what came after is lost")]


def test_an_event_that_never_ends_does_not_swallow_the_others(tmp_path):
    events = [kernel("first", 0, 1), *(kernel(f"k{n}", n, 1) for n in range(40_000))]
    text = text_of(events).replace('"device": 0', '"device": [[', 1)
    assert len(text) > json_scan._MAX_EVENT
    (tmp_path / "rank0.json").write_text(text)
    trace = Trace.open(tmp_path / "rank0.json")
    assert len(rows(trace, "kernels", "name")) == 40_000
    assert whys(trace) == [("*", 0, 1, "1 event could not be read: the JSON is broken there")]


# ---------------------------------------------------------------- the two scanners


CATEGORIES = (b"kernel", b"cuda_runtime"), (b"cpu_op",), (b"aten::mm",)


def both(data, cuts=()):
    """What the two scanners make of the data when it comes in pieces that end at `cuts`."""
    return [_everything(kind(*CATEGORIES), data, sorted({c for c in cuts if c < len(data)})) for kind in _scanners()]


def _scanners():
    return (json_scan._FastScanner, json_scan.PythonScanner)


def _everything(scanner, data, cuts):
    rows, metas = json_scan.Filled(json_scan.ROW_COLUMNS, 8), json_scan.Filled(json_scan.META_COLUMNS, 3)
    buffer, start, found = bytearray(data), 0, []
    for end in [*cuts, len(data)]:
        while True:
            start, why = scanner.scan(buffer, start, end, end == len(data), False, rows, metas)
            found.append((why, start, _listed(rows), _listed(metas)))
            if why != json_scan.FULL:
                break
        if why == json_scan.CLOSED:
            break
    return found, scanner.names(0), scanner.counts()


def _listed(filled):
    return {name: values.tolist() for name, values in filled.taken().items()}


SEED = json.dumps(
    [
        kernel(ALLREDUCE, 1712195495519689.123, 0.002, 7, **meta(Seq=3)),
        event("cpu_op", "aten::add", 4203669604595.407, 12, **{"Input Dims": [[1, "a]"], {"b": 2}], "External id": 9}),
        event(
            "cpu_op", "aten::mm", 4203669604600.5, 12, **{"Input type": ["a", ""], "Input Dims": [[8, 4], [4, 2], []]}
        ),
        {"ph": "f", "id": 1, "pid": 1, "tid": -3, "ts": 1e15, "cat": "ac2g", "name": "ac2g", "bp": "e"},
        event("python_function", 'a "quoted" \\ name', 1.5e3, 1),
        launch(1712195495519680, 3, 7),
        kernel("k", 1712195495519689, 2, 8, grid=[1, {"x": [2]}], text="device", bytes=65536),
    ],
    indent=1,
)[1:].encode()
PIECES = [
    b'"',
    b"\\",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\n",
    b"NaN",
    b"1e5",
    b"-",
    b".",
    b'},{"ph"',
    b'"ph":"X",',
    b'"ts":1,',
    b'"stream": 5',
    b'"bytes": 7',
    b'"Collective name":',
    b'"args": {',
    b'"Input Dims": [[3], 4] ]',
    b'"name": "aten::mm",',
    b"9" * 19,
]


@needs_fast
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(SEED)), st.integers(0, 6), st.sampled_from(PIECES)), max_size=6),
    st.lists(st.integers(0, len(SEED)), max_size=3),
)
def test_both_scanners_agree_on_damaged_events(damages, cuts):
    data = bytearray(SEED)
    for at, removed, inserted in damages:
        data[at : at + removed] = inserted
    fast, reference = both(bytes(data), cuts)
    assert fast == reference


@needs_fast
@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*PIECES, b'"ph":"X"', b'"cat":"kernel"', b'"dur":2', b'"args":{', b" "]), max_size=40))
def test_both_scanners_agree_on_anything(pieces):
    fast, reference = both(b"".join(pieces))
    assert fast == reference


@needs_fast
@settings(max_examples=300, deadline=None)
@given(st.from_regex(r"-?[0-9]{1,22}(\.[0-9]{0,8})?([eE][+-]?[0-9]{1,3})?", fullmatch=True))
def test_numbers_are_exact(text):
    """Against decimal arithmetic, for all that fits: at most 19 digits and 3 × 10^18 ns."""
    data = b'{"ph": "X", "cat": "kernel", "dur": 1, "ts": ' + text.encode() + b"}]"
    fast, reference = both(data)
    assert fast == reference
    digits = text.lower().split("e")[0].replace(".", "").lstrip("-0")
    exact = (Decimal(text) * 1000).to_integral_value(ROUND_HALF_UP)
    if len(digits) <= 19:
        wanted = [int(exact)] if abs(exact) <= 3 * 10**18 else []
        assert fast[0][0][2]["ts"] == wanted


@needs_fast
@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_the_size_of_the_pieces_does_not_matter(monkeypatch, chunk):
    monkeypatch.setattr(json_scan, "_CHUNK", chunk)
    events = b",\n".join([SEED.rstrip()[:-1]] * 20) + b'], "after": 1}'
    result = json_scan.Scan()
    scanner = json_scan.new_scanner(*CATEGORIES)
    batches = json_scan.scan_events(scanner, io.BytesIO(events), b"", result)
    assert sum(len(batch.rows["ts"]) for batch in batches) == 100
    assert (scanner.counts(), result.cut, result.trailer) == ((140, 0, 0, 0), False, b', "after": 1}')


def test_names_beyond_the_limit_share_one_code(monkeypatch):
    monkeypatch.setattr(json_scan, "MAX_NAMES", 4)
    scanner = json_scan.PythonScanner(*CATEGORIES)
    data = json.dumps([event("kernel", "b", 0, 1, pid=1, tid=2)])[1:].encode()
    _everything(scanner, data, [])
    assert (scanner.names(2), scanner.counts()[3]) == ([b"kernel", b"b"], 2)


WHOLE = text_of(
    [
        step(1, 0, 100),
        launch(5, 2, 1),
        event("cpu_op", "record_param_comms", 4, 10, **meta(Seq=1)),
        kernel(ALLREDUCE, 10, 10, 1, **meta(Seq=3, **{"Src Rank": 1, "Dst Rank": 0})),
        kernel("k", 30, 10, 2),
    ],
    distributedInfo={"backend": "nccl", "rank": 0, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
    deviceProperties=[{"id": 0, "name": "H100"}],
    baseTimeNanoseconds=1000,
).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 40), st.sampled_from(PIECES)), max_size=4),
    st.booleans(),
    st.integers(0, 60),
)
def test_damaged_files_are_read_or_refused(tmp_path, damages, packed, cut):
    """Whatever is in a file: a report, or `BadInput`. Nothing else is raised."""
    data = bytearray(WHOLE)
    for at, removed, inserted in damages:
        data[at : at + removed] = inserted
    content = gzip.compress(bytes(data)) if packed else bytes(data)
    (tmp_path / "rank0.json").write_bytes(content[: len(content) - cut])
    with contextlib.suppress(BadInput):
        trace = Trace.open(tmp_path / "rank0.json")
        for table in trace.tables():
            trace.table(table).collect()
        trace.gaps()


@pytest.mark.skipif(fuzz_scan.address_sanitizer() is None, reason="gcc has no AddressSanitizer here")
def test_no_byte_outside_of_the_data_is_touched():
    run = fuzz_scan.run([], seconds=60, inputs=10_000, seed=1)
    assert (run.returncode, run.stdout) == (0, "10000 inputs\n"), run.stderr[-3000:]


# ---------------------------------------------------------------- real traces


@pytest.mark.needs_data
def test_collectives_that_are_known_of_a_real_trace():
    trace = Trace.open(KINETO / "hta/nccl_parser_config/nccl_data.json.gz")
    assert len(rows(trace, "collectives", "op")) == 21
    assert 2_049_000 * 4 in {size for (size,) in rows(trace, "collectives", "size_bytes")}


@pytest.mark.needs_data
@by_each_scanner
def test_bytes_of_a_real_trace_are_all_that_it_says(monkeypatch, fast):
    """16 copies of 244,403,360 bytes, the first of 92,928, and 3 fills of 21,760."""
    if not fast:
        monkeypatch.setattr(json_scan, "_scan", None)
    trace = Trace.open(KINETO / "hta/critical_path/alexnet")
    kernels = trace.table("kernels").collect()
    by_name = kernels.filter(pl.col("work") == "memory").group_by("name", maintain_order=True)
    moved = by_name.agg(pl.len(), pl.col("bytes").first().alias("first"), pl.col("bytes").sum())
    assert moved.rows() == [("Memcpy HtoD (Pageable -> Device)", 16, 92_928, 244_403_360), (FILL, 3, 20_736, 21_760)]
    assert kernels.filter(pl.col("work") == "compute")["bytes"].to_list() == [None] * 79


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["torchrec/sst_long_a2a_optimizer_5", "tracelens/mi300/resnet_act_checkpoint.json.gz"])
def test_the_python_scanner_reads_real_traces_alike(monkeypatch, name):
    def everything():
        trace = Trace.open(KINETO / name)
        return {table: trace.table(table).collect().rows() for table in trace.tables()}, whys(trace)

    with_any = everything()
    monkeypatch.setattr(json_scan, "_scan", None)
    assert everything() == with_any


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["param-dlrm8/dlrm_kineto.tar.gz", "torchrec/resnet18"])
def test_a_table_that_does_not_fit_into_memory_reads_alike(monkeypatch, name):
    in_memory = Trace.open(KINETO / name)
    monkeypatch.setattr(spill_file, "BLOCK_ROWS", 100)
    in_pieces = Trace.open(KINETO / name)
    assert in_pieces.gaps() == in_memory.gaps()
    for table in in_memory.tables():
        assert in_pieces.table(table).collect().equals(in_memory.table(table).collect()), table


def test_equal_times_keep_their_order_in_pieces(tmp_path, monkeypatch):
    """Two kernels at a time are read again; those at 20 lie in the first pair and in the last."""
    monkeypatch.setattr(spill_file, "BLOCK_ROWS", 2)
    times = (20, 30, 10, 40, 5, 20)
    trace = opened(tmp_path, [kernel(f"k{i}", ts, 1, correlation=i) for i, ts in enumerate(times)])
    names = [name for piece in trace.pieces("kernels") for name in piece["name"]]
    assert names == ["k4", "k2", "k0", "k5", "k1", "k3"]


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "Spill", lambda _: spill_file.Spill(Path("/dev/full")))
    with pytest.raises(BadInput, match=r"no room for temporary files in \S+: set TMPDIR to another folder"):
        opened(tmp_path, [kernel("k", ts, 1) for ts in range(5)])


def test_the_rows_of_a_run_are_removed_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trace = opened(tmp_path, [kernel("k", 1, 1)])
    assert len(list(tmp_path.glob("rankscope-*/0.rows"))) == 1
    del trace
    gc.collect()
    assert not list(tmp_path.glob("rankscope-*"))
