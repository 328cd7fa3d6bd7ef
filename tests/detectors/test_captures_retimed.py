"""Faults put into a capture: what comes later, and what does not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from captures.planted import CLEAN, Case, simulated
from captures.retime import Change, load, retimed
from captures.retime import write as write_retimed
from captures.write import write


@pytest.fixture
def real(tmp_path):
    """A healthy capture of two steps."""
    capture = simulated(Case(CLEAN, "", 2, 1, "tuning"))
    files = replace(capture.files, unit="base", information="all", marks=True, metadata="all", unlaunched=0.0)
    return load(write(replace(capture, files=files), tmp_path / "capture"))


def test_without_a_change_nothing_is_later(real):
    assert set(retimed(real, Change()).values()) == {0}
    assert all(row.shift == row.later == 0 for row in real.rows)


def test_what_all_of_a_collective_take_longer_all_ranks_leave_later(real):
    for row in real.instances[0]:
        row.extra = 1000
    retimed(real, Change())
    assert [row.shift for row in real.instances[0]] == [0] * len(real.documents)
    assert [row.later for row in real.instances[0]] == [1000] * len(real.documents)


def test_ranks_wait_for_the_one_that_stalls_no_longer_than_it_does(real):
    """20 ms, more than the host was ahead: the others begin the next collective when they did, and leave it later."""
    step = real.steps[1][0]
    longer = retimed(real, Change({1: [(step.start + 1, 20_000)]}))
    assert longer[1] > 0
    late = max(one[1].later for one in real.instances)
    assert 0 < late <= 20_000
    held_up = [row for one in real.instances for row in one if row.rank != 1 and row.later > row.shift]
    assert held_up
    assert max(row.later for row in real.rows) <= 20_000 + 1e-6


def test_no_kernel_begins_before_its_launch_though_clocks_of_devices_differ(real, tmp_path):
    """The device's clock of rank 1 is 60 us early, as real ones are: its kernels seem to begin before their launch."""
    path = write_retimed(real, tmp_path / "early") / "rank1.pt.trace.json"
    document = json.loads(path.read_text())
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["ts"] -= 60
    path.write_text(json.dumps(document))
    early = load(path.parent)
    launched = [row for row in early.rows if row.launch is not None]
    assert min(row.event["ts"] - row.launch.event["ts"] for row in launched) < 0
    retimed(early, Change({1: [(early.steps[1][0].start + 1, 20_000)]}))
    assert max(row.launch.shift for row in launched) == 20_000
    assert min(row.start + row.shift - row.launch.start - row.launch.shift for row in launched) > -1e-3


def test_no_rank_leaves_a_collective_before_the_last_has_come(real):
    """Whatever stalls, and however short the collective is."""
    for place in (0.1, 0.4, 0.7):
        step = real.steps[1][0]
        retimed(real, Change({1: [(step.start + place * (step.end - step.start), 50_000)]}))
        ends = [min(row.end + row.later for row in one) for one in real.instances]
        last = [max(row.start + row.shift for row in one) for one in real.instances]
        assert min(end - come for end, come in zip(ends, last, strict=True)) >= -100
        assert min(row.end + row.later - row.start - row.shift for row in real.rows) > -1e-3


def test_files_have_the_new_times(real, tmp_path):
    for row in real.instances[0]:
        row.extra = 1000
    retimed(real, Change())
    again = load(write_retimed(real, tmp_path / "again"))
    before, after = real.instances[0][0], again.instances[0][0]
    assert after.event["dur"] == pytest.approx(before.event["dur"] + 1000)
