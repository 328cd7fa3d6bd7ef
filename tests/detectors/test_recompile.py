"""Compilations after warm-up: a real job whose batch size changes, and the rule on tables written down."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import recompile
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from support.kineto import event, kernel, launch, step, write
from support.paths import SCRIPTS

JOB = SCRIPTS / "recompile.py"
RANKSCOPE = Path(sys.executable).with_name("rankscope")
MS = 1_000_000
SIZE = "compile 0/1: 0/0: tensor 'x' size mismatch at index 0. expected 8, actual 23"


def tables(*compiling_ms, own_ms=100, name=SIZE):
    """Two ranks; rank 1 compiles for that long in each of the steps."""
    parts = [
        (rank, step, part, value * MS)
        for step, ms in enumerate(compiling_ms)
        for rank in range(2)
        for part, value in {"compute": own_ms, "compile": ms * rank, "wait": ms * (1 - rank)}.items()
    ]
    times = [(step * 1000 * MS, (step * 1000 + ms) * MS) for step, ms in enumerate(compiling_ms)]
    regions = [(1, start, end, "compile", name, 0) for start, end in times]
    return (
        pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(regions, ["rank", "start_ns", "end_ns", "kind", "name", "thread"], orient="row"),
    )


def test_compiling_in_two_of_ten_steps_is_a_finding_with_its_reason():
    (finding,) = recompile.detect(*tables(0, 0, 50, 0, 0, 0, 50, 0, 0, 0))
    assert (finding.ranks, finding.steps, finding.lost_ns_per_step) == ((1,), (2, 6), 10 * MS)
    assert finding.where == "tensor 'x' size mismatch at index 0"
    assert finding.fix == "compile"


def test_all_ranks_that_compile_are_named_also_those_whose_devices_had_work_meanwhile():
    parts, regions = tables(0, 0, 50, 0, 0, 0, 50, 0, 0, 0)
    others = [regions.with_columns(pl.lit(0, pl.Int64).alias("rank"), thread=pl.lit(n, pl.Int64)) for n in (0, 7)]
    assert [f.ranks for f in recompile.detect(parts, pl.concat([regions, others[0]]))] == [(0, 1)]
    assert [f.ranks for f in recompile.detect(parts, pl.concat([regions, others[1]]))] == [(1,)]


@pytest.mark.parametrize(
    ("compiling_ms", "found"),
    [([0] * 10, 0), ([0, 0, 100, *[0] * 7], 0), ([0, 9, 0, 0, 0, 9, 0, 0, 0, 0], 0), ([0, 11, 0, 0, 11] * 2, 1)],
    ids=["never", "once, a tenth of less than all time", "below 2 % of the step", "above it"],
)
def test_it_speaks_from_two_steps_and_2_percent_on(compiling_ms, found):
    assert len(recompile.detect(*tables(*compiling_ms))) == found


@pytest.mark.parametrize(("name", "found"), [(SIZE, 1), ("compile [0/1]", 1), ("compile [1/0]", 0), ("compile", 0)])
def test_once_is_enough_where_it_takes_a_tenth_of_all_time_and_was_compiled_before(name, found):
    """80 of 580 ms, 16 of the mean step's 116; whether it comes back is not known: 16 more or less."""
    findings = recompile.detect(*tables(0, 0, 80, 0, 0, name=name))
    assert [(f.lost_ns_per_step, f.uncertainty_ns) for f in findings] == [(16 * MS, 16 * MS)] * found


def test_without_a_recorded_reason_it_is_a_finding_all_the_same():
    (finding,) = recompile.detect(*tables(0, 50, 50, 0, 0, name="compile 0/1"))
    assert finding.where == "compile"


@pytest.mark.alone
@pytest.mark.real_job
def test_job_whose_batch_size_changes_gets_that_advice(tmp_path):
    launcher = [RANKSCOPE, "run", "--out", tmp_path / "run", "--standalone", "--nproc-per-node", "2", JOB]
    subprocess.run([str(word) for word in launcher], check=True, capture_output=True, timeout=200)
    report = json.loads((tmp_path / "run/report.json").read_text())
    finding, steps = report["findings"][0], report["findings"][0]["steps"]
    assert (finding["detector"], finding["ranks"]) == ("recompile", [0, 1])
    # On a busy machine one of them may be excluded as an outlier.
    assert set(steps) <= {15, 20, 25, 30, 35}
    assert len(steps) >= 4
    assert finding["where"] in ("tensor 'x' size mismatch at index 0", "tensor 'L['x']' size mismatch at index 0")
    # In each there are two compilations, of which one has a graph for the back end, which takes 60 ms.
    compilations = rankscope.open(tmp_path / "run").table("regions").filter(pl.col("kind") == "compile").collect()
    lost_ns = finding["lost_ns_per_step"] * report["steps"]["count"]
    assert 60 * MS * len(steps) <= lost_ns <= (compilations["end_ns"] - compilations["start_ns"]).sum()


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])  # of torch 2.13, and of earlier ones
@pytest.mark.parametrize("compiled", [(1,), (0, 2)])
def test_compilations_in_a_trace_of_the_profiler_are_named_with_their_steps(tmp_path, compiled, category):
    """Steps of 100 ms that compute for 54; where torch compiles the device idles for 40 ms meanwhile."""
    events = []
    for number in range(3):
        at = 1_000_000 + 100_000 * number
        first = at + 45_000 if number in compiled else at + 5_000
        events += [step(number, at, 100_000), launch(first, 10, number), kernel("gemm", first + 15, 54_000, number)]
        if number in compiled:
            for name in ("_compile.compile_inner", "create_aot_dispatcher_function"):
                events.append(event(category, f"{name} (dynamo_timed)", at + 4_000, 40_000))
    write(tmp_path / "rank0.json", events)
    report = diagnose(Trace.open(tmp_path))
    (found,) = report.findings
    assert (found.detector, found.ranks, found.steps) == ("recompile", (0,), compiled)
    if len(compiled) == 1:
        assert found.lost_ns_per_step == pytest.approx(40 * MS / 3, rel=0.01)
    said = {1: "torch.compile compiles in 1 step", 2: "torch.compile compiles again in 2 steps"}
    assert found.title.startswith(said[len(compiled)])


def test_a_trace_without_a_compilation_says_nothing_about_them(tmp_path):
    write(tmp_path / "rank0.json", [step(0, 0, 100), launch(5, 1, 0), kernel("gemm", 10, 50, 0)])
    (unchecked,) = [one for one in diagnose(Trace.open(tmp_path)).not_checked if one.detector == "recompile"]
    assert unchecked.why == "the trace names no compilation by torch.compile"
