"""The device block, on rows a reader can check in the head and on real traces against independent arithmetic."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from rankscope.analysis.diagnose import diagnose
from rankscope.analysis.kinds import device_work, kernel_op
from rankscope.analysis.timeline.device import device_parts
from rankscope.analysis.trace import Trace

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
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

needs_data = pytest.mark.skipif(not ORACLE.exists(), reason=f"the public traces are not at {DATA}")


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


@pytest.mark.parametrize(
    ("category", "name", "work"),
    [
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "communication"),
        ("kernel", "ncclDevKernel_Generic(ncclDevComm*, channelMasks)", "communication"),
        ("Kernel", "ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "communication"),
        ("kernel", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)", "communication"),
        ("kernel", "void vllm::ep::combine<4>(int*)", "communication"),
        ("kernel", "nvshmemi_transfer_rma", "communication"),
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


@needs_data
@pytest.mark.parametrize("name", SETS)
def test_every_rank_of_every_set_agrees_to_the_nanosecond(name):
    """Intervals, and the wait for the last arriver where several ranks are at hand."""
    report = diagnose(Trace.open(DATA / "kineto" / SETS[name]))
    expected = {rank: metrics for (of_set, rank), metrics in oracle().items() if of_set == name}
    assert [part.rank for part in report.device] == sorted(expected)
    for part in report.device:
        wanted = {ours: expected[part.rank][theirs] for theirs, ours in METRICS.items()}
        assert {ours: getattr(part, ours) for ours in wanted} == wanted
    waited = {wait.rank: wait.waited_ns for wait in report.waits}
    for rank, metrics in expected.items():
        if "wait_for_last_arriver" in metrics:
            assert waited[rank] == metrics["wait_for_last_arriver"]["wait_for_last_arriver_ns"]


@needs_data
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
