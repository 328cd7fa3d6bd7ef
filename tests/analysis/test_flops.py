"""FLOPs that the shapes in a profiler's trace say, and what they are of the devices' peak."""

import json
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import rankscope
from rankscope.analysis.metrics.mfu import flops_of_kernels
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline


class Block(torch.nn.Module):
    """Two projections, batched products and attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return torch.bmm(self.out(y), x.transpose(1, 2)).sum()


def test_flops_of_forward_and_backward_are_those_of_torchs_own_counter(tmp_path):
    model, x = Block(), torch.randn(8, 32, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    with torch.profiler.profile(record_shapes=True) as profiler:
        model(x).backward()
    profiler.export_chrome_trace(str(tmp_path / "rank0.json"))
    operators = rankscope.open(tmp_path / "rank0.json").table("operators").collect()
    assert operators["flops"].null_count() == 0
    assert set(operators["name"]) >= {"aten::addmm", "aten::mm", "aten::bmm"}
    counted = counter.get_total_flops()
    if not any("attention" in str(op) for op in counter.get_flop_counts()["Global"]):  # on GPUs only, before torch 2.15
        shape = (8, 4, 32, 16)
        counted += sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert operators["flops"].sum() == counted


def trace_of(folder, *, in_graph=()):
    """Five steps of 10 ms on an H100: four products of 1 TFLOP and 2 ms; those in `in_graph` have no operator."""
    events = []

    def add(category, name, start_us, length_us, **arguments):
        tid = 7 if category == "kernel" else 1
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start_us, "dur": length_us}
            | {"args": arguments}
        )

    for number in range(5):
        start = 10_000 * number
        add("user_annotation", f"ProfilerStep#{number}", start, 10_000)
        for product in range(4):
            at, correlation = start + 100 * product, 4 * number + product + 1
            if product not in in_graph:
                add("cpu_op", "aten::mm", at, 50, **{"Input Dims": [[5000, 10_000], [10_000, 10_000]]})
            add("cuda_runtime", "cudaLaunchKernel", at + 10, 5, correlation=correlation)
            add(
                "kernel",
                "nvjet_tst_NNN",
                start + 100 + 2000 * product,
                2000,
                correlation=correlation,
                stream=7,
                device=0,
            )
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3"}
    trace = {"schemaVersion": 1, "deviceProperties": [device], "distributedInfo": {"rank": 0, "world_size": 1}}
    (folder / "rank0.json").write_text(json.dumps(trace | {"traceEvents": events}))
    return folder / "rank0.json"


def test_hfu_is_the_operators_flops_over_what_the_device_could_do(tmp_path):
    """4 products of 10^12 FLOPs in 10 ms are 400 of 989.4 TFLOP/s, and low_mfu judges them."""
    report = rankscope.diagnose(rankscope.open(trace_of(tmp_path)))
    assert report.utilisation.mfu == pytest.approx(400 / 989.4, rel=0.06)  # the first step ends later than the others
    assert (report.utilisation.flops_per_step, report.utilisation.counted) == (4e12, 1.0)
    assert "low_mfu" in {one.detector for one in report.healthy}


def test_products_without_an_operator_make_it_a_lower_bound_that_nothing_rests_on(tmp_path):
    """One of four was launched by a graph."""
    trace = trace_of(tmp_path, in_graph=(3,))
    report = rankscope.diagnose(rankscope.open(trace))
    assert (report.utilisation.flops_per_step, report.utilisation.counted) == (3e12, 0.75)
    why = next(str(one.why) for one in report.not_checked if one.detector == "low_mfu")
    assert why == "shapes give the FLOPs of only 75.0 % of the time of matrix products: give --flops-per-step"
    command = [sys.executable, "-m", "rankscope", "report", str(trace), "--short"]
    said = " ".join(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.split())
    assert "HFU at least 30.3 % of 989.4 TFLOP/s: shapes cover 75.0 % of the time of matrix products" in said


def test_below_half_nothing_is_reported(tmp_path):
    assert rankscope.diagnose(rankscope.open(trace_of(tmp_path, in_graph=(1, 2, 3)))).utilisation is None


def test_an_operators_flops_are_those_of_its_kernels_that_multiply(tmp_path):
    """Three of four products of 1 TFLOP have operators, in 5 steps; each takes 2 ms: 500 TFLOP/s."""
    trace = Trace.open(trace_of(tmp_path, in_graph=(3,)))
    kernels = build_timeline(trace).kernels
    by_name = flops_of_kernels(trace.table("operators").collect(), kernels)
    (name,) = kernels["name"].unique()
    assert by_name.to_dicts() == [{"name": name, "flops": 15e12, "flops_per_s": pytest.approx(5e14)}]
