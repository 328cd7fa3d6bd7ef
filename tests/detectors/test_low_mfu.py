"""Model FLOPs against the devices' peak: through the command line, on simulated devices."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.analysis.metrics.mfu import peak_tflops
from record import write
from simulate import Job, healthy_resources, run

JOB = Job(parallel="ddp-gpu", ranks=4, steps=12, compute_ns=90e6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four devices, called cuda, that compute for about 94 of 96 ms."""
    return write(run(JOB, healthy_resources(JOB)), tmp_path_factory.mktemp("mfu") / "run")


def report(folder: Path, *options: str) -> dict:
    command = [sys.executable, "-m", "rankscope", "report", str(folder), "--json", "-", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def not_checked(said: dict) -> str:
    return next((one["why"] for one in said["not_checked"] if one["detector"] == "low_mfu"), "")


def test_mfu_is_flops_over_what_all_devices_could_do_in_the_mean_step(folder):
    """Half of what four devices of 100 TFLOP/s do in 100 ms."""
    said = report(folder, "--flops-per-step", "20e12", "--peak-tflops", "100")
    step_s = (
        statistics.fmean(sum(p["ns_per_step"] for p in said["breakdown"] if p["rank"] == r) for r in range(4)) / 1e9
    )
    assert said["utilisation"] == {
        "mfu": pytest.approx(20e12 / (400e12 * step_s), rel=1e-3),
        "flops_per_step": 20e12,
        "peak_flops": 400e12,
        "counted": None,
    }
    assert said["findings"] == []
    assert "low_mfu" in said["healthy"]


def test_devices_that_compute_all_the_time_and_get_little_done_are_a_finding(folder):
    """A tenth of the peak: at 40 % of it a quarter of the time would do."""
    said = report(folder, "--flops-per-step", "3.7e12", "--peak-tflops", "100")
    (finding,) = said["findings"]
    assert finding["detector"] == "low_mfu"
    assert finding["where"] == "kernels that are no matrix products"
    busy = statistics.fmean(
        sum(p["ns_per_step"] for p in said["breakdown"] if p["rank"] == r and p["part"] in ("compute", "overlapped"))
        for r in range(4)
    )
    needed_ns = 3.7e12 / 4 / 100e12 * 1e9
    assert finding["lost_ns_per_step"] == pytest.approx(busy - needed_ns / 0.4, rel=1e-3)


def test_what_is_not_known_is_not_checked(folder):
    said = report(folder)
    assert said["utilisation"] is None
    assert "--flops-per-step" in not_checked(said)
    assert "the peak of cuda is unknown" in not_checked(report(folder, "--flops-per-step", "20e12"))


def test_the_printed_form_says_the_mfu(folder):
    command = [sys.executable, "-m", "rankscope", "report", str(folder), "--short"]
    command += ["--flops-per-step", "20e12", "--peak-tflops", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "% of 100 TFLOP/s" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_dense_bf16(device, peak):
    assert peak_tflops(device) == peak


@pytest.mark.parametrize("option", ["--flops-per-step", "--peak-tflops"])
def test_numbers_that_make_no_sense_are_refused(folder, option):
    command = [sys.executable, "-m", "rankscope", "report", str(folder), option, "-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
