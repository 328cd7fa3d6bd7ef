"""What a capture of one rank and one step allows to judge: what its host does to its device, and nothing of peers."""

import json

import pytest

import rankscope

STREAM, MAIN = 7, 100


def capture(path, *, kernels, calls):
    """A capture of one step of 100 ms. Kernels and calls are (start, length, name) in µs, each call launching one."""
    common = {"ph": "X", "pid": 0}
    events = [{**common, "cat": "user_annotation", "name": "ProfilerStep#1", "tid": MAIN, "ts": 0, "dur": 100_000}]
    for number, (start, lasts, name) in enumerate(calls):
        row = {**common, "cat": "cuda_runtime", "name": name, "tid": MAIN, "ts": start, "dur": lasts}
        events.append(row | {"args": {"correlation": number}})
    for number, (start, lasts, name) in enumerate(kernels):
        row = {**common, "cat": "kernel", "name": name, "tid": STREAM, "ts": start, "dur": lasts}
        events.append(row | {"args": {"device": 0, "stream": STREAM, "correlation": number}})
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 8}}))
    return rankscope.diagnose(rankscope.open(path))


def launched_late(every_us, busy_us):
    """Kernels every so often, each launched 10 µs before it begins: what is between them is the host's."""
    starts = range(10, 100_000 - every_us + 10, every_us)
    kernels = [(start, busy_us, "gemm") for start in starts]
    return kernels, [(start - 10, 5, "cudaLaunchKernel") for start in starts]


def test_one_rank_whose_device_waits_for_its_host_for_86_percent_of_one_step_is_host_bound(tmp_path):
    """100 kernels of 140 µs, one each 1,000 µs: the device idles 860 µs before each."""
    kernels, calls = launched_late(1_000, 140)
    report = capture(tmp_path / "rank0.json", kernels=kernels, calls=calls)
    assert [finding.detector for finding in report.findings] == ["host_bound"]
    assert report.findings[0].lost_fraction == pytest.approx(0.86, abs=0.02)
    assert "Host-bound on rank 0" in report.verdict


def test_twenty_synchronisations_in_one_step_of_one_rank_are_named(tmp_path):
    """Each call waits for 4 ms of work; the host then takes 1 ms, which it would have been ahead without it."""
    kernels = [(i * 5_000 + 1_000, 4_000, "gemm") for i in range(20)]
    calls = [(i * 5_000 + 990, 5, "cudaLaunchKernel") for i in range(20)]
    waits = [(i * 5_000 + 1_010, 3_995, "cudaStreamSynchronize") for i in range(20)]
    report = capture(tmp_path / "rank0.json", kernels=kernels, calls=calls + waits)
    found = next(finding for finding in report.findings if finding.detector == "host_sync")
    assert found.lost_fraction == pytest.approx(0.19, abs=0.01)
    assert "cudaStreamSynchronize" in found.where


def test_one_rank_that_keeps_its_device_busy_is_healthy_and_stragglers_need_the_other_ranks(tmp_path):
    kernels, calls = launched_late(1_000, 990)
    report = capture(tmp_path / "rank0.json", kernels=kernels, calls=calls)
    assert report.findings == ()
    assert {"host_bound", "memory_pressure"} <= {check.detector for check in report.healthy}
    why = {check.detector: check.why for check in report.not_checked}
    assert "needs the traces of the others" in why["slow_rank"]


def test_one_pause_in_one_step_is_no_finding(tmp_path):
    """Whether it comes back in the next step, one step cannot show."""
    kernels = [(10, 49_000, "gemm"), (59_010, 40_990, "gemm")]
    calls = [(0, 5, "cudaLaunchKernel"), (59_000, 5, "cudaLaunchKernel")]
    report = capture(tmp_path / "rank0.json", kernels=kernels, calls=calls)
    assert report.findings == ()
    assert "host_bound" not in {check.detector for check in report.healthy}
