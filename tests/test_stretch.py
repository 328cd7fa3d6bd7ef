"""Part of a long run: `RUN/steps=100-150` reads what these steps need, and no more, with the same numbers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.diagnose import read_run
from rankscope.collectors import writer

sys.path.append(str(Path(__file__).parents[1] / "benchmarks" / "faults"))
from record import write
from simulate import Job, healthy_resources, run

RANKSCOPE = [sys.executable, "-m", "rankscope"]
SLOW, SINCE = 5, 60


@pytest.fixture(scope="module", params=["fsdp", "3d", "ddp-nccl", "pp-1f1b", "3d-nccl"])
def job(request, tmp_path_factory):
    """A job of 120 steps on 2 nodes or more whose clocks differ, in files of 256 rows; one rank slow from step 60 on."""
    job = Job(parallel=request.param, ranks=16, steps=120, seed=1, nic_bytes_per_s=20e9)
    can = healthy_resources(job)
    can.slowness[SINCE:, SLOW] *= 1.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SEAL_ROWS", 256)
        return write(run(job, can), tmp_path_factory.mktemp(request.param) / "run")


def test_steps_of_part_of_a_run_are_cut_as_in_all_of_it(job):
    _, whole = read_run(job)
    _, part = read_run(job / "steps=70-99")
    at = ["rank", "step"]
    wanted = whole.steps.filter(pl.col("step").is_between(70, 99))
    assert part.steps.select(*at, "judged").equals(wanted.select(*at, "judged"))
    assert len(wanted) == 16 * 30
    lengths = part.steps.join(wanted, on=at).select(pl.col("end_ns") - pl.col("start_ns"), ns=pl.col("end_ns_right") - pl.col("start_ns_right"))
    assert (lengths["end_ns"] - lengths["ns"]).abs().max() <= 5_000  # clocks are fitted to other pings
    both = part.breakdown.join(whole.breakdown, on=[*at, "part"], how="left")
    assert (both["ns"] - both["ns_right"]).abs().max() <= 200_000
    assert part.matched_fraction == 1
    assert len(part.collectives) < len(whole.collectives) / 3
