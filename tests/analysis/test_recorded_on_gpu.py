"""Runs that rankscope recorded on an H100, tests/recorded/README.md: what CUDA events show against what kernels say."""

import tarfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import rankscope
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.timeline.build import build_timeline
from rankscope.dashboard.timeline.drawn_rows import DRAWN

RECORDED = Path(__file__).parents[1] / "recorded"
MS = 1_000_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    def unpack(name):
        folder = tmp_path_factory.mktemp("recorded")
        with tarfile.open(RECORDED / f"{name}.tar.xz") as archive:
            archive.extractall(folder)
        return folder / name

    return unpack


def parts_of(report):
    """Each part's share of the mean step, over all ranks."""
    ns = {}
    for part in report.breakdown:
        ns[part.part] = ns.get(part.part, 0) + part.ns_per_step
    return {part: value / sum(ns.values()) for part, value in ns.items() if value}


def length(rows):
    return int((rows["end_ns"] - rows["start_ns"]).sum())


def within(rows, start_ns, end_ns):
    """The rows, ended by two times, as disjoint spans."""
    rows = rows.filter(pl.col("end_ns") > start_ns, pl.col("start_ns") < end_ns).sort("start_ns")
    start, end = rows["start_ns"].clip(start_ns).to_numpy(), rows["end_ns"].clip(None, end_ns).to_numpy()
    reached = np.maximum.accumulate(np.append(start_ns, end))[:-1]
    start = np.maximum(start, reached)
    return int(np.maximum(end - start, 0).sum())


def test_waits_by_marks_are_those_of_kernels_within_three_percent_of_the_step(recorded):
    """FSDP2 on two ranks, in the steps of its window: kernels of communication run, and no others. They differ by 5 ms
    at most; the first step begins when its device is done with the step before, which marks show 65 ms behind."""
    folder = recorded("h100-fsdp2")
    run, window = rankscope.open(folder), build_timeline(rankscope.open(folder / "window-0001"))
    marks = run.table("device_marks").collect().drop_nulls("device_ns").sort("rank", "recorded_ns")
    compared = 0
    for step in window.steps.iter_rows(named=True):
        span, of_rank = (step["start_ns"], step["end_ns"]), pl.col("rank") == step["rank"]
        kernels = window.kernels.filter(of_rank)
        exposed = within(kernels, *span) - within(kernels.filter(work="compute"), *span)
        waits = marks.filter(of_rank, pl.col("mark").is_in(("wait_start", "wait_end")))
        waits = waits.with_columns(start_ns=pl.col("device_ns").shift(1), end_ns="device_ns").filter(mark="wait_end")
        assert abs(within(waits, *span) - exposed) < 0.03 * (span[1] - span[0])
        compared += exposed > 100 * MS
    assert compared == 6


def test_fsdp2s_exposed_communication_is_found_without_a_profiler(recorded):
    report = rankscope.diagnose(rankscope.open(recorded("h100-fsdp2")))
    assert [finding.where for finding in report.findings] == ["allgather_base", "reduce_scatter_base"]
    assert report.verdict.startswith("Likely: Exposed communication: 78.6 ms per step of allgather_base in group 0")
    shares = parts_of(report)
    assert shares["transfer"] == pytest.approx(0.757, abs=0.002)
    assert shares["unsplit"] == pytest.approx(0.117, abs=0.002)
    assert sum(shares.values()) == pytest.approx(1)


def test_a_pipelines_schedule_and_transfers_are_known_without_a_profiler(recorded):
    """Its sends and receives are parts of coalesced operations, of which only the whole has a duration."""
    report = rankscope.diagnose(rankscope.open(recorded("h100-pipeline")))
    assert (report.pipeline.schedule, report.pipeline.stages, report.pipeline.microbatches) == ("1F1B", 2, 8)
    (finding,) = report.findings
    assert (finding.detector, finding.where) == ("exposed_communication", "p2p")
    assert report.matched_fraction == 1


def test_an_operation_whose_end_is_not_seen_is_drawn_as_its_call(recorded):
    """The recorder times none of a group's first one: the timeline page would draw it to the end of the run."""
    rows = build_timeline(rankscope.open(recorded("h100-fsdp2"))).collectives
    assert rows["transfer_ns"].null_count() == 2
    drawn = rows.select("rank", **DRAWN["collectives"](rows).columns)
    assert drawn["end_ns"].equals(rows["issued_ns"])


def test_a_late_rank_is_named_and_its_gpu_is_not_blamed_for_what_both_need(recorded):
    """The host of rank 1 sleeps 20 ms before each all-reduce; both GPUs take 18 ms for what has arrived."""
    report = rankscope.diagnose(rankscope.open(recorded("h100-late")))
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.where) == ("slow_rank", (1,), "before collectives")
    assert finding.lost_ns_per_step == pytest.approx(20.7 * MS, rel=0.02)


def test_a_healthy_step_has_no_finding_and_the_flops_counted_by_hand(recorded):
    """Its job printed 121.707 ms per step, 5.154e+13 FLOPs and an MFU of 42.8 % of 989 TFLOP/s."""
    options = ReportOptions(flops_per_step=5.154e13, peak_tflops=989)
    report = rankscope.diagnose(rankscope.open(recorded("h100-step")), options)
    assert report.findings == ()
    assert report.utilisation.mfu == pytest.approx(0.428, abs=0.001)
    assert parts_of(report)["compute"] == pytest.approx(0.942, abs=0.002)
