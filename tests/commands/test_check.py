"""`rankscope check`: what it says with its exit status, of simulated runs of four ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from record import write
from simulate import Job, healthy_resources, run

JOB = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs by name: rank 2 of `slow` and `slower` takes 1.5 and 1.7 times as long, all of `longer` 95 of 90 ms.

    Of the two ranks of `unsteady` each takes 1.3 times as long in three of ten steps.
    """
    folder = tmp_path_factory.mktemp("check")
    jobs = {"longer": replace(JOB, compute_ns=95e6), "short": replace(JOB, steps=4)}
    for name, by in {"healthy": 1.0, "slow": 1.5, "slower": 1.7, "longer": 1.0, "short": 1.0}.items():
        job = jobs.get(name, JOB)
        can = healthy_resources(job)
        can.slowness = can.slowness * np.array([1.0, 1.0, by, 1.0])
        write(run(job, can), folder / name)
    job = replace(JOB, ranks=2)
    can = healthy_resources(job)
    can.slowness = can.slowness * (1 + 0.3 * (np.random.default_rng(3).random((20, 2)) < 0.3))
    write(run(job, can), folder / "unsteady")
    shutil.copytree(folder / "healthy", folder / "lacking")
    for part in (folder / "lacking").glob("*/rank=00003"):
        shutil.rmtree(part)
    return folder


def check(runs: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and what was printed."""
    command = [sys.executable, "-m", "rankscope", "check", *arguments]
    done = subprocess.run(command, cwd=runs, capture_output=True, text=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_healthy_run_passes(runs):
    status, lines = check(runs, "healthy")
    assert (status, lines[0]) == (0, "passed: healthy")
    assert lines[1].startswith("No bottleneck above ")
    assert lines[1].endswith(" of the step in 18 analyzed steps of 4 ranks.")


def test_a_finding_fails_from_the_severity_that_counts(runs):
    status, lines = check(runs, "slow", "--severity", "high")
    assert (status, lines[0]) == (1, "failed: slow")
    assert lines[1].startswith("Rank 2 is slow: ")
    assert "(slow rank, high, 3" in lines[1]


def test_what_the_earlier_run_has_too_does_not_count_unless_it_costs_more(runs):
    assert check(runs, "slow", "--against", "slow")[0] == 0
    status, lines = check(runs, "slower", "--against", "slow")
    assert status == 1
    assert [line.split(":")[0].split(" of ")[0] for line in lines[1:3]] == ["Rank 2 is slow", "the mean step"]


@pytest.mark.long
def test_a_step_may_be_longer_by_the_share_that_is_allowed(runs):
    """By 5 of 97 ms, which no detector would find."""
    status, lines = check(runs, "longer", "--against", "healthy")
    assert (status, lines[0]) == (1, "failed: longer")
    assert lines[1].endswith(" longer (5.2 %), and 3.0 % is allowed")
    assert check(runs, "longer", "--against", "healthy", "--slower", "0.1")[0] == 0
    assert check(runs, "longer")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "unseen"),
    [
        (["lacking"], ["rank 3 of 4 not recorded"]),
        (["short"], ["slow rank below ", "low bandwidth, load imbalance, "]),
        (["unsteady", "--severity", "high"], ["slow rank below "]),
        (
            ["short", "--against", "healthy"],
            ["slow rank below ", "the mean step of ", "low bandwidth, load imbalance, "],
        ),
        (["lacking", "--against", "healthy"], ["4 ranks there and 3 here", "rank 3 of 4 not recorded"]),
    ],
)
def test_what_was_not_seen_does_not_pass(runs, arguments, unseen):
    """Two analyzed steps do not show whether they became longer by 3 %.

    The work of `unsteady` is uneven, which costs less than what counts; a slow rank that costs more would be hidden.
    """
    status, lines = check(runs, *arguments)
    assert (status, lines[0]) == (3, f"not enough data: {arguments[0]}")
    said = [line.removeprefix("not seen: ") for line in lines if line.startswith("not seen: ")]
    assert len(said) == len(unseen)
    assert all(any(line.startswith(what) for line in said) for what in unseen)


def test_a_step_that_is_no_longer_hides_nothing_new(runs):
    """Nor would a slow rank be seen in a run that scatters as much, but the step says that none came in."""
    arguments = ("unsteady", "--severity", "high", "--against", "unsteady", "--slower", "0.5")
    assert check(runs, *arguments)[0] == 0


def test_a_run_that_cannot_be_read_is_neither(runs):
    assert check(runs, "nowhere") == (2, ["rankscope: nowhere does not exist"])
