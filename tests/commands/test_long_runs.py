"""Runs that are too long to be held at once are compared by all their steps: `diff`, `check --against`, `scaling`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.trace import Trace
from rankscope.profiler.main import main
from record import write
from simulate import Job, healthy_resources, run

STEPS, SLOW, MS = 240, range(40, 100), 1_000_000


def recorded(folder: Path, *, ranks: int = 4, by: float = 1.0) -> Path:
    """240 steps of some 95 ms; rank 2 takes 90 ms times `by` to compute in a quarter of them, long before the end."""
    job = Job(parallel="ddp", ranks=ranks, steps=STEPS, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness[SLOW.start : SLOW.stop, 2] *= by
    return write(run(job, can), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("long")
    recorded(folder / "healthy")
    recorded(folder / "slow", by=1.4)
    recorded(folder / "wide", ranks=8, by=1.4)
    return folder


@pytest.fixture
def said(runs, monkeypatch, capsys):
    """Run a command where a quarter of a run of 4 ranks fits at once: its status, and what it prints."""
    rows = memory_budget.bytes_of_rows(Trace.open(runs / "healthy").reader)
    monkeypatch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + rows * 0.253)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.chdir(runs)
        monkeypatch.setattr(sys, "argv", ["rankscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code), capsys.readouterr().out

    return call


def test_what_made_earlier_steps_longer_is_the_difference(said):
    """36 ms in a quarter of the steps are 9 ms of the mean step, of which the last steps show nothing."""
    status, out = said("diff", "healthy", "slow", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["a"]["steps"], found["b"]["steps"]) == (STEPS - 2, STEPS - 2)
    step = found["step"]
    assert step["change_ns"] == pytest.approx(9 * MS, rel=0.1)
    assert sum(part["change_ns"] for part in found["parts"]) == step["change_ns"]
    (rank,) = found["ranks"]
    assert rank["rank"] == 2
    assert rank["b_ns"] - rank["a_ns"] == pytest.approx(9 * MS, rel=0.1)
    (change,) = found["findings"]
    assert (change["status"], change["b"]["detector"], change["b"]["ranks"]) == ("new", "slow_rank", [2])
    assert change["b"]["lost_ns_per_step"] == pytest.approx(9 * MS, rel=0.15)
    held = "communication and kernels are those of the last "
    assert [f"of 240 steps {STEPS - 2} are compared; {held}" in note for note in found["notes"]] == [True, True]


def test_what_the_whole_baseline_has_too_does_not_count(said):
    status, out = said("check", "slow", "--against", "healthy", "--slower", "0.5")
    assert (status, out.splitlines()[0]) == (1, "failed: slow")
    assert "Rank 2 is slow" in out.splitlines()[1]
    assert said("check", "slow", "--against", "slow", "--slower", "0.5")[0] == 0


def test_a_job_scales_by_all_steps(said):
    """Both runs are cut off; the wide one's last steps alone would be as long as the others."""
    status, out = said("scaling", "healthy", "wide", "--weak", "--json")
    base, point = json.loads(out)["points"]
    assert status == 0
    assert (base["steps"], point["steps"]) == (STEPS - 2, STEPS - 2)
    assert point["lost_ns"] == pytest.approx(9 * MS, rel=0.2)
    assert sum(point["lost"].values()) == point["lost_ns"]


def test_a_run_whose_folder_can_keep_nothing_is_compared_by_all_steps_too(said, runs):
    shutil.copytree(runs / "healthy", runs / "full", ignore=shutil.ignore_patterns("summary"))
    (runs / "full" / "summary").write_text("a file, where the folder would be")
    found = json.loads(said("diff", "full", "slow", "--json")[1])
    kept = json.loads(said("diff", "healthy", "slow", "--json")[1])
    assert found["step"] == kept["step"]
    assert found["parts"] == kept["parts"]
