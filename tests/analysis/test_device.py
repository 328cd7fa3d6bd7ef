"""The device block, on rows a reader can check in the head and on real traces against independent arithmetic."""

import functools
import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.model.kernels import device_work, kernel_op
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.device_breakdown import device_phases
from rankscope.analysis.timeline.device_time import device_parts
from rankscope.analysis.timeline.host_breakdown import breakdown, check_phases
from rankscope.analysis.timeline.steps import on_device, whole_captures
from support.paths import DATA
from support.rows import collectives, matched, regions, step_spans

ORACLE = DATA / "oracle.json"

SETS = {
    "torchrec/sst_long_a2a_optimizer": "torchrec/sst_long_a2a_optimizer",
    "torchrec/sst_long_a2a_optimizer_5": "torchrec/sst_long_a2a_optimizer_5",
    "torchrec/resnet18": "torchrec/resnet18",
    "nanogpt-adamsync-current": "nanogpt-adamsync/modded-nanogpt-current-gpu-rank-00-chrome-trace.json.gz",
    "nanogpt-adamsync-hook": "nanogpt-adamsync/modded-nanogpt-hook-gpu-rank-00-chrome-trace.json.gz",
    "hta-nccl_data": "hta/nccl_parser_config/nccl_data.json.gz",
    "hta-ns_resolution": "hta/ns_resolution_trace",
    "hta-negative_queue": "hta/negative_queue_length_values_check",
    "tracelens-b200-eager": "tracelens/b200/eager_trace.json.gz",
    "tracelens-mi300-resnet-ddp": "tracelens/mi300/resnet_act_checkpoint.json.gz",
    "param-dlrm8": "param-dlrm8/dlrm_kineto.tar.gz",
    "kineto-tb-workers0-span1": "tb-plugin-workers0",
}
METRICS = {
    "window_ns": "window_ns",
    "gpu_busy_ns": "busy_ns",
    "gpu_idle_ns": "idle_ns",
    "compute_union_ns": "compute_ns",
    "comm_union_ns": "communication_ns",
    "mem_union_ns": "memory_ns",
    "comm_overlapped_by_compute_ns": "overlap_ns",
    "exposed_comm_ns": "exposed_ns",
}

# Sets in which kernels communicate that are compute to the oracle, which knows NCCL's and DeepEP's: torch's symmetric
# memory.
OTHERWISE = {"tracelens-b200-eager": "nccl|multimem_"}


def kernels(*rows):
    """(rank, work, start, end)."""
    schema = {"rank": pl.Int32, "work": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def test_unions_count_what_overlaps_once():
    """Compute 0-100 and 50-150, a copy 140-160, communication 120-200: 30 of its 80 ns are under compute."""
    rows = kernels(
        (3, "communication", 120, 200), (3, "compute", 50, 150), (3, "compute", 0, 100), (3, "memory", 140, 160)
    )
    (part,) = device_parts(rows)
    assert part.rank == 3
    assert (part.window_ns, part.busy_ns, part.idle_ns) == (200, 200, 0)
    assert (part.compute_ns, part.communication_ns, part.memory_ns) == (150, 80, 20)
    assert (part.overlap_ns, part.exposed_ns) == (30, 50)


def test_idle_is_what_no_stream_works_in_and_rows_of_no_length_count_for_the_window():
    (part,) = device_parts(kernels((0, "compute", 10, 20), (0, "compute", 12, 15), (0, "compute", 50, 50)))
    assert (part.window_ns, part.busy_ns, part.idle_ns) == (40, 10, 30)


def test_a_rank_without_device_rows_has_no_part():
    assert [p.rank for p in device_parts(kernels((1, "compute", 0, 1), (5, "compute", 0, 1)))] == [1, 5]
    assert device_parts(kernels()) == ()


# ---------------------------------------------------------------- steps and parts of the device's time


def launched(*rows):
    """(work, start, end, when the host launched it[, thread[, stream]]) of rank 0."""
    schema = {"rank": pl.Int32, "work": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64, "launch_ns": pl.Int64}
    schema |= {"launch_thread": pl.UInt16, "stream": pl.Int32}
    return pl.DataFrame([(0, *row, *(0, 7)[len(row) - 4 :]) for row in rows], schema=schema, orient="row")


def cut(kernel_rows, region_rows=None, calls=None, length=100):
    """(part, label, start, end) of the only step."""
    region_rows = regions() if region_rows is None else region_rows
    steps = step_spans((0, 0, 0, length))
    rows = device_phases(steps, kernel_rows, region_rows, matched(collectives() if calls is None else calls))
    check_phases(rows, steps)
    return rows.select("part", "label", "start_ns", "end_ns").rows()


def on_devices(*rows):
    """(rank, seq, start on the device, end[, op]): launched at once."""
    return collectives(*rows).with_columns(device_start_ns="start_ns")


def test_what_runs_on_a_device_is_named_by_what_it_hides():
    """Communication 20-80 whose last rank begins at 60; a kernel 30-40 under it; a copy 80-90 alone."""
    rows = launched(
        ("communication", 20, 80, 0), ("compute", 30, 40, 0), ("memory", 80, 90, 0), ("compute", 90, 100, 0)
    )
    calls = on_devices((0, 0, 20, 80), (1, 0, 60, 80))
    assert cut(rows, calls=calls)[1:] == [
        ("wait", "allreduce", 20, 30),
        ("overlapped", "compute", 30, 40),
        ("wait", "allreduce", 40, 60),
        ("transfer", "allreduce", 60, 80),
        ("memory", "memory", 80, 90),
        ("compute", "compute", 90, 100),
    ]


def test_waiting_on_a_device_is_a_bubble_for_a_neighbour_and_unsplit_where_unknown():
    received = launched(("communication", 0, 100, 0))
    calls = pl.concat([on_devices((0, 0, 0, 100, "recv")), on_devices((1, 0, 70, 100, "send"))])
    calls = calls.with_columns(peer=1 - pl.col("rank"))
    assert cut(received, calls=calls) == [("bubble", "recv", 0, 70), ("transfer", "recv", 70, 100)]
    assert cut(received, calls=on_devices((0, 0, 0, 100))) == [("unsplit", "allreduce", 0, 100)]
    assert cut(received) == [("unsplit", "communication", 0, 100)]


def test_idle_time_is_the_hosts_if_it_launched_only_after_the_device_had_run_dry():
    """Idle 10-40 (launched at 30), 50-60 (launched at 45, while it worked), 70-80 (not seen), and 90-100."""
    rows = launched(("compute", 0, 10, 0), ("compute", 40, 50, 30), ("compute", 60, 70, 45), ("compute", 80, 90, None))
    idle = [row for row in cut(rows) if row[0] != "compute"]
    assert idle == [
        ("host", "no region", 10, 40),
        ("other", "between kernels", 50, 60),
        ("other", "launch not in the trace", 70, 80),
        ("host", "no region", 90, 100),
    ]


def test_what_was_queued_long_before_it_began_is_not_the_hosts_fault():
    rows = launched(("compute", 0, 10_000, 0), ("compute", 40_000, 50_000, 5_000))
    assert ("other", "queued, not started", 10_000, 40_000) in cut(rows, length=50_000)


def test_a_stream_that_works_leaves_no_stream_idle():
    rows = launched(("compute", 0, 60, 0, 0, 7), ("compute", 50, 100, 0, 0, 20))
    assert cut(rows) == [("compute", "compute", 0, 100)]


def test_idle_time_goes_to_what_stopped_the_main_thread():
    rows = launched(("compute", 0, 20, 0), ("compute", 90, 100, 85))
    stops = regions((0, "input", 10, 50, "next"), (0, "gc", 40, 60, "gc generation 2"), (0, "compile", 60, 70))
    assert cut(rows, stops) == [
        ("compute", "compute", 0, 20),
        ("input", "next", 20, 40),
        ("gc", "gc generation 2", 40, 60),
        ("compile", "compile", 60, 70),
        ("host", "no region", 70, 90),
        ("compute", "compute", 90, 100),
    ]


def test_device_work_bears_the_region_in_which_it_was_launched():
    """The second is launched by autograd's thread while the main one is in `backward`; the third by an unknown one."""
    rows = launched(("compute", 0, 30, 5), ("compute", 30, 60, 25, 1), ("compute", 60, 100, None))
    places = regions((0, "user", 0, 20, "forward"), (0, "user", 2, 8, "attention"), (0, "user", 20, 50, "backward"))
    assert [label for _, label, _, _ in cut(rows, places)] == ["attention", "backward", "compute"]


def test_the_hosts_idle_time_bears_the_innermost_region_that_covers_most_of_it():
    """The launching thread is in `lookup` 20-90 and within it in `sleep` 30-80, most of 10-90; `short` is not."""
    rows = launched(("compute", 0, 10, 0), ("compute", 90, 100, 85, 1))
    spans = regions((0, "user", 20, 90, "lookup"), (0, "operator", 30, 80, "sleep"), (0, "operator", 40, 60, "short"))
    spans = spans.with_columns(thread=pl.lit(1, pl.UInt16))
    assert cut(rows, spans)[1] == ("host", "sleep", 10, 90)


def test_a_step_on_the_device_ends_when_its_own_work_has_ended():
    """The host's steps are 0-100 and 110-200; work launched at 90 runs until 150, what was launched before until 20."""
    steps = step_spans((0, 0, 0, 100), (0, 1, 110, 200))
    rows = launched(
        ("compute", 5, 20, None), ("compute", 20, 60, 10), ("compute", 70, 150, 90), ("compute", 150, 190, 120)
    )
    assert on_device(steps, rows).select("step", "start_ns", "end_ns").rows() == [(0, 20, 150), (1, 150, 200)]


@pytest.mark.parametrize(("first", "begins"), [((0, 299_000), 350_000), ((0, 30_000), 30_000), ((150_000, 299_000), 0)])
def test_what_begins_after_the_device_was_idle_was_launched_in_the_step_though_its_launch_was_not_seen(first, begins):
    """Work of unknown launch was queued before the step if the device goes on with it at once, 0.1 ms at most."""
    rows = launched(
        ("compute", *first, None), ("compute", 300_000, 350_000, None), ("compute", 350_000, 400_000, 340_000)
    )
    assert on_device(step_spans((0, 0, 0, 500_000)), rows)["start_ns"].to_list() == [begins]


@pytest.mark.parametrize(("launched_at", "begins"), [(100_000, 600_000), (590_000, 0)])
def test_a_device_that_begins_late_with_what_was_launched_long_before_was_busy_until_then(launched_at, begins):
    """What it did until then was launched before the capture began, and is not in it."""
    rows = launched(("compute", 600_000, 700_000, launched_at), ("compute", 700_000, 800_000, 650_000))
    assert on_device(step_spans((0, 0, 0, 900_000)), rows)["start_ns"].to_list() == [begins]


@pytest.mark.parametrize(("count", "begins"), [(40, 450_000), (4, 0)])
def test_more_kernels_than_a_host_can_have_launched_were_queued_before_though_the_device_had_been_idle(count, begins):
    """Idle until 150,000, then kernels of unknown launch; the first known launch is at 10,000, one each 1,000."""
    unknown = [
        ("compute", 150_000 + n * 300_000 // count, 150_000 + (n + 1) * 300_000 // count, None) for n in range(count)
    ]
    known = [("compute", 450_000 + n * 100, 450_000 + (n + 1) * 100, 10_000 + 1_000 * n) for n in range(50)]
    assert on_device(step_spans((0, 0, 0, 900_000)), launched(*unknown, *known))["start_ns"].to_list() == [begins]


def test_without_steps_the_capture_is_one():
    first = step_spans((0, 0, 50, 80), (1, 0, 10, 20))
    second = step_spans((0, 0, 60, 90))
    assert whole_captures(first, second).drop("source").rows() == [(0, 0, 50, 90), (1, 0, 10, 20)]


spans = st.tuples(st.integers(-10, 110), st.integers(0, 50)).map(lambda s: (s[0], s[0] + s[1]))
device_rows = st.tuples(
    st.sampled_from(["compute", "communication", "memory"]),
    spans,
    st.one_of(st.none(), st.integers(-20, 110)),
    st.integers(0, 1),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(device_rows, max_size=8),
    st.lists(st.tuples(st.sampled_from(["user", "operator", "input", "gc", "compile"]), spans), max_size=5),
    st.lists(st.tuples(spans, spans, st.booleans(), st.sampled_from(["allreduce", "broadcast"])), max_size=4),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_the_devices_parts_sum_to_the_step_whatever_the_intervals(work, region_rows, calls, lengths):
    edges = np.cumsum([0, *lengths])
    steps = step_spans(*((0, i, int(edges[i]), int(edges[i + 1])) for i in range(len(lengths))))
    rows = launched(*((kind, *span, call, thread) for kind, span, call, thread in work))
    both = [(r, n, *(a, b)[r], op) for n, (a, b, peer, op) in enumerate(calls) for r in ((0, 1) if peer else (0,))]
    region_rows = regions(*((0, kind, *span) for kind, span in region_rows))
    got = device_phases(steps, rows, region_rows, matched(on_devices(*both)))
    check_phases(got, steps)
    table = breakdown(got, steps)
    assert table.group_by("step").agg(pl.col("ns").sum()).sort("step")["ns"].to_list() == lengths


# ---------------------------------------------------------------- which work a row is


@pytest.mark.parametrize(
    ("category", "name", "work"),
    [
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "communication"),
        ("kernel", "ncclDevKernel_Generic(ncclDevComm*, channelMasks)", "communication"),
        ("Kernel", "ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "communication"),
        ("kernel", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "communication"),
        ("kernel", "void vllm::ep::combine<4>(int*)", "communication"),
        ("kernel", "nvshmemi_transfer_rma", "communication"),
        ("kernel", "void hybrid_ep::dispatch_kernel<8>(int4*)", "communication"),
        ("kernel", "void c10d::symmetric_memory::multimem_all_reduce_kernel<c10::BFloat16, 16>(long)", "communication"),
        ("kernel", "void two_shot_all_reduce_kernel_inplace<float, 16, 8>(float*)", "communication"),
        ("kernel", "userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(void**)", "communication"),
        ("kernel", "void vllm::cross_device_reduce_1stage<__half, 8>(vllm::RankData*)", "communication"),
        ("kernel", "mscclKernel_Sum_float_Simple_false", "communication"),
        ("kernel", "__amd_rocclr_copyBuffer.kd", "memory"),
        ("kernel", "void at::native::reduce_kernel<512, 1>(float*)", "compute"),
        ("kernel", "void step::keep<4>(int*)", "compute"),
        ("Kernel", "volta_sgemm_128x64_nn", "compute"),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", "memory"),
        ("Memset", "Memset (Device)", "memory"),
        ("gpu_user_annotation", "nccl:all_reduce", None),
        ("cuda_sync", "Stream Sync", None),
        ("overhead", "Command Buffer Full", None),
        ("cpu_op", "triton_poi_fused_add_0", None),
    ],
)
def test_what_a_row_stands_for(category, name, work):
    assert device_work(category, name) == work


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter_base"),
        ("ncclKernel_Reduce_RING_LL_Sum_float", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", "unknown"),
        ("ncclDevKernel_Generic(ncclDevComm*)", "unknown"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32(ncclSymkDevWorkArgs const*)", "allreduce"),
        ("ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)", "allgather_base"),
        ("volta_sgemm_128x64_nn", None),
        ("deep_ep::intranode::dispatch", None),
    ],
)
def test_which_operation_a_kernel_is(name, op):
    assert kernel_op(name) == op


@functools.cache
def oracle():
    """(set, rank) -> metric -> value."""
    found = {}
    for row in json.loads(ORACLE.read_text())["rows"]:
        found.setdefault((row["set"], row["rank"]), {})[row["metric"]] = row["value"]
    return found


def halves(trace, pattern):
    """The ns in which a kernel of such a name runs, and those in which another one does, one by one."""
    names = trace.table("kernels").filter(pl.col("work") != "memory").collect()
    communicates = names["name"].str.contains(pattern)
    return tuple(
        {ns for start, end in rows.select("start_ns", "end_ns").iter_rows() for ns in range(start, end)}
        for rows in (names.filter(communicates), names.filter(~communicates))
    )


@pytest.mark.needs_data
@pytest.mark.parametrize("name", SETS)
def test_every_rank_of_every_set_agrees_to_the_nanosecond(name):
    """Intervals, and the wait for the last arriver where several ranks are at hand."""
    trace = Trace.open(DATA / "kineto" / SETS[name])
    report = diagnose(trace)
    expected = {rank: metrics for (of_set, rank), metrics in oracle().items() if of_set == name}
    assert [part.rank for part in report.device] == sorted(expected)
    for part in report.device:
        wanted = {ours: expected[part.rank][theirs] for theirs, ours in METRICS.items()}
        if name in OTHERWISE:
            communication, others = halves(trace, OTHERWISE[name])
            alone = len(communication - others)
            wanted |= {"communication_ns": len(communication), "exposed_ns": alone}
            wanted |= {"overlap_ns": len(communication) - alone, "compute_ns": len(others)}
        assert {ours: getattr(part, ours) for ours in wanted} == wanted
    waited = {wait.rank: wait.waited_ns for wait in report.waits}
    for rank, metrics in expected.items():
        if "wait_for_last_arriver" in metrics:
            assert waited[rank] == metrics["wait_for_last_arriver"]["wait_for_last_arriver_ns"]


@pytest.mark.needs_data
def test_the_command_line_gives_the_same_block():
    folder = DATA / "kineto" / SETS["torchrec/resnet18"]
    command = [sys.executable, "-m", "rankscope", "report", folder, "--json", "-"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert [(p["rank"], p["exposed_ns"]) for p in report["device"]] == [(0, 7_734_000), (1, 172_000)]
    assert [(w["rank"], w["waited_ns"]) for w in report["waits"]] == [(0, 7_164_000), (1, 0)]
    assert report["source"] == "kineto"


def test_a_report_leaves_the_folder_of_a_foreign_trace_as_it_is(tmp_path):
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {"stream": 0}}
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [kernel]}))
    subprocess.run(
        [sys.executable, "-m", "rankscope", "report", tmp_path], check=True, capture_output=True, timeout=120
    )
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.json"]
