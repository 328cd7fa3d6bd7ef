"""How a job scales: efficiency, where the rest went, and what cannot be compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from record import write
from simulate import Job, healthy_resources, run


def recorded(folder: Path, ranks: int, compute_ns: float = 60e6) -> Path:
    """A job whose gradients cross a slow network from 16 ranks, two nodes, on."""
    job = Job(parallel="ddp", ranks=ranks, steps=12, compute_ns=compute_ns, nic_bytes_per_s=0.2e9)
    return write(run(job, healthy_resources(job)), folder / f"on{ranks}-{compute_ns / 1e6:.0f}ms")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scaling")


@pytest.fixture(scope="module")
def weak(folder) -> list[Path]:
    return [recorded(folder, ranks) for ranks in (4, 8, 16)]


def scaling(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rankscope", "scaling", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_what_a_job_loses_beyond_linear_is_cut_into_parts_that_sum_to_it(weak):
    """All ranks do the same work; from two nodes on 12 MB of gradients take 60 ms to the other node."""
    found = json.loads(scaling(*reversed(weak), "--json").stdout)
    assert found["kind"] == "weak"
    assert [point["ranks"] for point in found["points"]] == [4, 8, 16]
    base, *_, most = found["points"]
    assert (base["efficiency"], base["lost_ns"]) == (1, 0)
    for point in found["points"]:
        assert sum(point["lost"].values()) == point["lost_ns"] == point["step_ns"] - base["step_ns"]
        assert point["efficiency"] == pytest.approx(base["step_ns"] / point["step_ns"])
        assert point["speedup"] == pytest.approx(point["efficiency"] * point["ranks"] / 4)
    assert most["efficiency"] < 0.85
    assert [point["mostly"] for point in found["points"]][::2] == ["", "transfer"]


def test_work_that_all_ranks_share_is_strong_scaling(weak, folder):
    """30 ms on 8 ranks where there are 60 on 4: linear is half of the step, and the optimizer stays as long."""
    half = recorded(folder, 8, compute_ns=30e6)
    found = json.loads(scaling(weak[0], half, "--json").stdout)
    assert found["kind"] == "strong"
    base, point = found["points"]
    assert point["linear_ns"] == pytest.approx(base["step_ns"] / 2, abs=1)
    assert sum(point["lost"].values()) == point["lost_ns"]
    assert 1.5 < point["speedup"] < 2
    assert found["law"] is None
    assert found["no_law"] == "a law needs at least 3 numbers of ranks"


def test_the_printed_form_adds_up_and_says_what_it_is(weak):
    done = scaling(*weak)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Weak scaling (a rank computes ")
    assert "16 ranks: most of the loss is in transfer" in done.stdout
    lines = done.stdout.splitlines()
    head, last = (next(i for i, x in enumerate(lines) if x.strip().startswith(w)) for w in ("8 ranks, ", "sum "))
    columns = [[float(word) for word in line.split()[-2:]] for line in lines[head + 1 : last + 1]]
    *parts, whole = columns
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(whole, abs=1e-9)


def test_runs_of_other_work_are_refused_unless_the_kind_is_given(weak, folder):
    """10 ms on 8 ranks are neither the 60 of 4 ranks nor half of them."""
    other = recorded(folder, 8, compute_ns=10e6)
    done = scaling(weak[0], other)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rankscope: these runs do not do the same work: a rank computes ")
    assert len(done.stderr.splitlines()) == 1
    assert scaling(weak[0], other, "--strong").returncode == 0


def test_one_number_of_ranks_is_no_scaling(weak):
    done = scaling(weak[0], weak[0])
    assert (done.returncode, done.stdout) == (2, "")
    assert "all runs have 4 ranks" in done.stderr
