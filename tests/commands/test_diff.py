"""Two runs side by side: what changed adds up, and what cannot be compared is reported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankscope.analysis.compare.two_runs import step_change
from rankscope.analysis.model.comparison import StepChange
from record import write
from simulate import Job, healthy_resources, run

JOB = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)
MS = 1_000_000


def recorded(folder: Path, *, job: Job = JOB, slow_rank: int | None = None, by: float = 1.5) -> Path:
    can = healthy_resources(job)
    if slow_rank is not None:
        can.slowness = can.slowness * np.where(np.arange(job.ranks) == slow_rank, by, 1.0)
    return write(run(job, can), folder)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    return recorded(tmp_path_factory.mktemp("diff") / "healthy")


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    """Rank 2 takes half again as long: 45 ms of 90 and 2 of the optimizer's 4."""
    return recorded(tmp_path_factory.mktemp("diff") / "slow", slow_rank=2)


def diff(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "diff", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_rank_that_became_slow_is_the_difference(healthy, slow):
    found = json.loads(diff(healthy, slow, "--json").stdout)
    step = found["step"]
    assert step["change_ns"] == step["b_ns"] - step["a_ns"] == pytest.approx(46 * MS, rel=0.08)
    assert step["clear"]
    assert sum(part["change_ns"] for part in found["parts"]) == step["change_ns"]
    assert sum(part["a_ns"] for part in found["parts"]) == step["a_ns"]
    (rank,) = found["ranks"]
    assert rank["rank"] == 2
    assert rank["b_ns"] - rank["a_ns"] == pytest.approx(46 * MS, rel=0.1)
    assert [(change["status"], change["b"]["detector"]) for change in found["findings"]] == [("new", "slow_rank")]
    assert {change["op"] for change in found["operations"]} == {"allreduce"}
    assert {change["group"] for change in found["operations"]} == {"default_pg0"}, "its name"


def test_the_other_way_round_the_finding_is_gone_and_columns_add_up_as_they_are_shown(healthy, slow):
    done = diff(slow, healthy)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("part "))
    last = next(i for i, line in enumerate(lines) if line.startswith("step "))
    rows = [[float(x) for x in line.split()[-4:-1]] for line in lines[first + 1 : last + 1]]
    *parts, step = np.array(rows)
    assert np.allclose(np.sum(parts, axis=0), step, atol=1e-9)
    assert step[2] < -40
    assert any(line.startswith("gone") and "slow rank, rank 2" in line for line in lines)


def test_a_rank_that_changed_less_than_the_others_is_not_said_to_have_changed_more(healthy, tmp_path):
    can = healthy_resources(JOB)
    can.slowness = can.slowness * np.where(np.arange(JOB.ranks) == 2, 1.4, 1.5)
    lines = diff(healthy, write(run(JOB, can), tmp_path / "slower")).stdout.splitlines()
    at = lines.index("Ranks whose time outside communication changed differently from the others")
    rank, said = lines[at + 1].split("; ")
    assert rank.startswith("rank 2 ")
    assert re.search(r"  \+3\d\.\d ms  the usual change is \+4\d\.\d ms$", rank)
    assert said == "the difference is mostly compute"


def test_a_run_is_no_different_from_itself(healthy):
    found = json.loads(diff(healthy, healthy, "--json").stdout)
    assert (found["step"]["change_ns"], found["step"]["clear"]) == (0, False)
    assert (found["findings"], found["ranks"], found["notes"]) == ([], [], [])


def test_the_same_job_once_more_is_not_clear_of_chance(healthy, tmp_path):
    again = recorded(tmp_path / "again", job=Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6, seed=1))
    assert "which is not clear of chance" in diff(healthy, again).stdout


def test_a_job_on_more_ranks_is_compared_as_a_whole_with_a_note(healthy, tmp_path):
    wide = recorded(tmp_path / "wide", job=Job(parallel="ddp", ranks=8, steps=20, compute_ns=90e6))
    found = json.loads(diff(healthy, wide, "--json").stdout)
    assert found["ranks"] == []
    assert found["notes"][0] == "A has 4 ranks, B 8"
    assert found["notes"][-1].startswith("ranks are not compared one by one")


def test_communication_whose_peers_were_not_recorded_is_not_reported_as_gone(healthy, tmp_path):
    """Of B only rank 0 is there: it still reduces, but its peers are unknown."""
    alone = tmp_path / "alone"
    shutil.copytree(healthy, alone)
    for folder in alone.glob("*/rank=0000[123]"):
        shutil.rmtree(folder)
    found = json.loads(diff(healthy, alone, "--json").stdout)
    assert found["operations"] == []
    assert "communication is not compared: none of B's was matched on all its ranks" in found["notes"]


def test_a_run_without_steps_is_refused_in_one_line(healthy, tmp_path):
    empty = tmp_path / "empty"
    for name in ("run", "ranks", "strings"):
        shutil.copytree(healthy / name, empty / name)
    done = diff(healthy, empty)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"rankscope: run B, {empty}, has no analyzed step, so there is nothing to compare\n"


@pytest.mark.parametrize(
    ("a_ns", "b_ns", "said"),
    [
        (89_960_000, 110_670_000, "20.7 ms longer"),  # 90.0 -> 110.7 in the table: 20.7, not 20.71
        (89_940_000, 110_660_000, "20.8 ms longer"),  # 89.9 -> 110.7
        (89_960_000, 89_990_000, "30.0 µs longer"),  # 90.0 twice: the table does not show it
    ],
)
def test_the_headline_has_the_change_of_the_table(a_ns, b_ns, said):
    change = step_change(StepChange(a_ns=a_ns, b_ns=b_ns, uncertainty_ns=None))
    assert change.startswith(said)
