"""Real jobs of the frameworks that people train with, on two ranks, as their users write them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

import rankscope
from support.paths import SCRIPTS

RANKSCOPE = [sys.executable, "-m", "rankscope"]
pytestmark = pytest.mark.real_job
TORCHRUN = ("run", "--standalone", "--nproc-per-node", "2")
ITSELF = ("exec", "--", sys.executable)
MS = 1_000_000


def train(folder: Path, framework: str, job: str, *arguments: str, launch: tuple[str, ...] = TORCHRUN) -> dict:
    """The report of the job, which must end well and whose collectors must all stay on."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: pip install -e '.[frameworks]'")
    command = [*RANKSCOPE, launch[0], "--out", str(folder / "run"), *launch[1:], str(SCRIPTS / job), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stderr[-20_000:]
    made = subprocess.run([*RANKSCOPE, "report", str(folder / "run"), "--json", "-"], capture_output=True, timeout=100)
    report = json.loads(made.stdout)
    assert not [gap for gap in report["gaps"] if "switched off" in gap["why"]]
    assert report["ranks"] == [0, 1]
    return report


def regions(folder: Path, *kinds: str) -> pl.DataFrame:
    """The main thread's, of these kinds, in order."""
    found = rankscope.open(folder / "run").table("regions").collect()
    return found.filter(pl.col("kind").is_in(kinds), pl.col("thread") == 0).sort("rank", "start_ns")


def share(report: dict, part: str) -> float:
    """Of the mean step of both ranks."""
    ns = {True: 0, False: 0}
    for row in report["breakdown"]:
        ns[row["part"] == part] += row["ns_per_step"]
    return ns[True] / (ns[True] + ns[False])


def found(report: dict) -> list[tuple[str, list[int], str]]:
    return [(finding["detector"], finding["ranks"], finding["where"]) for finding in report["findings"]]


@pytest.mark.alone
def test_megatron_pipeline_is_1f1b_and_names_the_stage_that_is_too_long(tmp_path):
    """24 steps of 4 microbatches; stage 0 sleeps 40 ms in each forward, and balanced stages would share that."""
    report = train(tmp_path, "megatron", "megatron_gpt.py", "--pipeline", "2", "--slow-rank", "0")
    of_schedule = regions(tmp_path, "forward", "backward").drop_nulls("stage")
    assert (of_schedule["stage"] == of_schedule["rank"]).all()
    assert Counter(of_schedule.select("rank", "kind", "microbatch").rows()) == {
        (rank, kind, microbatch): 24 for rank in (0, 1) for kind in ("forward", "backward") for microbatch in range(4)
    }
    assert (report["pipeline"]["schedule"], report["pipeline"]["stages"], report["pipeline"]["microbatches"]) == (
        "1F1B",
        2,
        4,
    )
    assert report["steps"]["count"] + report["steps"]["warmup"] == 24
    assert found(report)[0] == ("stage_imbalance", [0], "stage 0, forward-compute")
    assert share(report, "other") < 0.2


def test_megatron_chunks_of_the_interleaved_schedule_are_stages_of_their_own(tmp_path):
    (tmp_path / "saved").mkdir()
    options = ("--pipeline", "2", "--chunks", "2", "--steps", "8", "--save", str(tmp_path / "saved"))
    report = train(tmp_path, "megatron", "megatron_gpt.py", *options)
    saved = regions(tmp_path, "checkpoint").filter(name="dist_checkpointing.save")
    assert saved["rank"].to_list() == [0, 1]
    of_schedule = regions(tmp_path, "forward", "backward").drop_nulls("stage")
    assert Counter(of_schedule.select("rank", "kind", "stage", "microbatch").rows()) == {
        (stage % 2, kind, stage, microbatch): 8
        for stage in range(4)
        for kind in ("forward", "backward")
        for microbatch in range(4)
    }
    found = report["pipeline"]
    assert (found["schedule"], found["stages"], found["microbatches"]) == ("interleaved 1F1B", 2, 4)
    assert found["theory_fraction"] == pytest.approx(1 / 9)
    assert "stage_imbalance" not in [check["detector"] for check in report["not_checked"]]


@pytest.mark.alone
def test_megatron_without_a_pipeline_names_the_slow_rank(tmp_path):
    """Rank 1 sleeps 40 ms in the forward of each of 4 microbatches. No backward is torch's own: all are seen."""
    report = train(tmp_path, "megatron", "megatron_gpt.py", "--slow-rank", "1")
    assert len(regions(tmp_path, "backward")) == 2 * 24 * 4
    assert found(report)[0] == ("slow_rank", [1], "forward")
    assert report["findings"][0]["lost_ns_per_step"] == pytest.approx(160 * MS, rel=0.2)
    assert share(report, "other") < 0.1


def test_lightning_starts_its_ranks_itself_and_its_closures_are_no_optimizer(tmp_path):
    """Two epochs of 20 batches on each of two ranks."""
    report = train(tmp_path, "lightning", "lightning_ddp.py", launch=ITSELF)
    passes = regions(tmp_path, "backward", "optimizer")
    assert Counter(passes.select("rank", "kind").rows()) == {
        (rank, kind): 40 for rank in (0, 1) for kind in ("backward", "optimizer")
    }
    next_ns = pl.col("start_ns").shift(-1).over("rank").fill_null(2**62)
    assert passes.select((pl.col("end_ns") <= next_ns).all()).item()
    assert report["steps"]["source"] == "optimizer"


def test_accelerate_accumulates_two_batches_into_a_step(tmp_path):
    report = train(tmp_path, "accelerate", "accelerate_accumulating.py")
    assert Counter(regions(tmp_path, "backward", "optimizer", "input")["kind"]).items() >= {
        ("backward", 80),
        ("optimizer", 40),
    }
    assert report["steps"]["count"] + report["steps"]["warmup"] + report["steps"]["outliers"] == 20
    assert len(regions(tmp_path, "input")) >= 80


def test_deepspeed_steps_of_several_groups_of_weights_are_one(tmp_path):
    """20 steps, in each of which its third stage steps once for each of its groups."""
    report = train(tmp_path, "deepspeed", "deepspeed_zero3.py")
    assert len(regions(tmp_path, "optimizer")) > 2 * 20
    assert report["steps"]["count"] + report["steps"]["warmup"] + report["steps"]["outliers"] == 20


@pytest.mark.alone
def test_deepspeed_pipeline_is_1f1b_and_names_the_stage_that_is_too_long(tmp_path):
    report = train(tmp_path, "deepspeed", "deepspeed_pipeline.py")
    of_schedule = regions(tmp_path, "forward", "backward").drop_nulls("stage")
    assert Counter(of_schedule.select("rank", "stage", "kind", "microbatch").rows()) == {
        (stage, stage, kind, microbatch): 20
        for stage in (0, 1)
        for kind in ("forward", "backward")
        for microbatch in range(4)
    }
    pipeline = report["pipeline"]
    assert (pipeline["schedule"], pipeline["stages"], pipeline["microbatches"]) == ("1F1B", 2, 4)
    assert ("stage_imbalance", [1]) in [(detector, ranks) for detector, ranks, _ in found(report)]
