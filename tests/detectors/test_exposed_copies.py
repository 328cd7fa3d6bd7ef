"""Copies between host and device that nothing hides, in a profiler's trace."""

from __future__ import annotations

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from support.kineto import copy, kernel, launch, step, write

PINNED, PAGEABLE = "Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pageable -> Device)"


def report(tmp_path, name, copy_us, *, at=0, steps=4):
    """Steps of 1 ms: 50 kernels of 20 µs one after the other, and a copy beside or before them."""
    events = []
    for number in range(steps):
        begin = 1000 + number * (1000 + (copy_us if at == 0 else 0))
        events.append(step(number, begin, 1000 + (copy_us if at == 0 else 0)))
        first = begin + (copy_us if at == 0 else 0)
        events += [launch(begin - 900, 2, 1000 * number + 999, name="cudaMemcpyAsync")]
        events += [copy(name, begin + at, copy_us, 1000 * number + 999, stream=8)]
        for place in range(50):
            correlation = 1000 * number + place
            events += [launch(begin - 890 + place, 1, correlation), kernel("gemm", first + 20 * place, 20, correlation)]
    write(tmp_path / "rank0.json", events)
    return diagnose(Trace.open(tmp_path))


@pytest.mark.parametrize(
    ("name", "title", "advice"),
    [
        (PAGEABLE, "Copies from the host", "100 % of the time is of memory that is not pinned"),
        (PINNED, "Copies from the host", "Copy the next batch"),
        ("Memcpy DtoH (Device -> Pinned)", "Copies to the host", "Keep losses"),
    ],
)
def test_copies_that_nothing_hides_cost_what_they_last(tmp_path, name, title, advice):
    """250 µs before the 1,000 µs that are computed: a fifth of the step."""
    of = report(tmp_path, name, 250)
    (found,) = [finding for finding in of.findings if finding.detector == "exposed_copies"]
    assert found.where == name
    assert found.title == f"{title} hold the devices of rank 0 up for 250 µs per step"
    assert found.lost_fraction == pytest.approx(0.2, abs=1e-3)
    assert found.advice.startswith(advice)


@pytest.mark.parametrize(("name", "at"), [(PINNED, 100), ("Memcpy DtoD (Device -> Device)", 0)])
def test_copies_behind_kernels_and_on_the_device_are_no_finding(tmp_path, name, at):
    of = report(tmp_path, name, 250, at=at)
    assert [finding for finding in of.findings if finding.detector == "exposed_copies"] == []
    assert "exposed_copies" in {healthy.detector for healthy in of.healthy}


def test_without_kernels_it_is_not_checked(tmp_path):
    write(tmp_path / "rank0.json", [step(number, 1000 * number, 1000) for number in range(4)])
    assert "exposed_copies" in {unchecked.detector for unchecked in diagnose(Trace.open(tmp_path)).not_checked}
