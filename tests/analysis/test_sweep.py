"""The fixes that the report tries unasked: the likely ones first, none in a healthy run, never a negative gain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.metrics.links import LINKS
from rankscope.analysis.metrics.wait_attribution import delays
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.replay.sweep import sweep
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.report import html, json_form, phrases, terminal
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.build import build_timeline
from support.by_hand import run

MS = 1_000_000


@pytest.fixture(scope="module")
def slow():
    """Rank 1's backward takes 70 ms, that of the others 40: its step is 150 ms, and would be 120."""
    return diagnose(run({0: 40, 1: 70, 2: 40, 3: 40}))


def swept(trace, *findings):
    timeline = build_timeline(trace)
    costs = delays(timeline.phases, timeline.collectives)
    return sweep(rerun(timeline, LINKS.to_frame()), findings, costs.charges)


def test_the_slow_ranks_fix_is_the_first_row_and_brings_what_it_is_longer(slow):
    first = slow.fixes[0]
    assert (first.fix, first.finding) == ("rank:1", "slow_rank")
    assert abs(first.gain_ns - 30 * MS) <= max(first.uncertainty_ns, 0.1 * MS)
    assert abs(first.step_ns - 120 * MS) <= max(first.uncertainty_ns, 0.1 * MS)
    assert first.finding_lost_ns is None  # cost and gain agree


def test_a_fix_of_more_ranks_that_brings_no_more_is_not_listed(slow):
    assert [fix.fix for fix in slow.fixes] == ["rank:1"]  # `balance` would bring 22.5 ms, all of it by rank 1


def test_a_healthy_run_has_no_rows():
    report = diagnose(run({0: 40, 1: 40, 2: 40, 3: 40}))
    assert report.fixes == ()
    assert "Predicted speedup of fixes" not in terminal.render(report)
    assert json.loads(json_form.render(report))["fixes"] == []


def test_scatter_is_not_balanced_unless_a_finding_asks():
    """Each step another rank takes 30 ms longer, as a healthy job's do by chance: equal work would bring 22.5 ms."""
    turns = {rank: [70 if rank == step else 40 for step in range(4)] for rank in range(4)}
    assert "balance" not in [fix.fix for fix in swept(run(turns))]


def claim(cost_ms):
    """A finding that says that rank 0 costs so much."""
    return Finding(
        detector="slow_rank",
        severity="high",
        title="Rank 0 is slow",
        where="",
        advice="",
        lost_ns_per_step=cost_ms * MS,
        lost_ns_total=10 * cost_ms * MS,
        lost_fraction=cost_ms / 120,
        uncertainty_ns=MS,
        fix="rank:0",
    )


def test_a_finding_whose_cost_the_replay_contradicts_is_listed_with_both():
    """Rank 0 is no longer than its peers: the replay gains nothing, not less."""
    (row,) = swept(run({0: 40, 1: 40, 2: 40}), claim(30))
    assert (row.fix, row.gain_ns, row.finding_lost_ns) == ("rank:0", 0, 30 * MS)


@pytest.mark.parametrize(("cost_ms", "shown_ms"), [(30, None), (25, 25), (40, 40)])
def test_a_findings_cost_is_shown_where_it_differs_by_more_than_the_error(cost_ms, shown_ms):
    """Rank 0 takes 30 ms longer than its peers, which its fix brings; the error is 1 ms."""
    rows = {row.fix: row.finding_lost_ns for row in swept(run({0: 70, 1: 40, 2: 40}), claim(cost_ms))}
    assert rows["rank:0"] == (shown_ms and shown_ms * MS)


def scattered(extra_ms):
    """Rank 1's backward takes 30 ms longer than the others', whose own vary by some ms from step to step."""
    return {rank: [40 + ms + 30 * (rank == 1) for ms in extra_ms[rank]] for rank in range(4)}


def test_a_findings_speedup_is_the_same_in_the_finding_and_among_the_fixes():
    vary = {0: (0, 3, 1, 4, 2), 1: (2, 0, 3, 1, 4), 2: (4, 1, 0, 2, 3), 3: (1, 4, 2, 3, 0)}
    report = diagnose(run(scattered(vary)))
    (finding,), row = report.findings, report.fixes[0]
    assert (finding.fix, row.finding_lost_ns) == (row.fix, None)
    assert row.gain_ns > finding.lost_ns_per_step  # by less than the error, or the row would give the cost
    assert finding.gain_fraction == pytest.approx(row.gain_fraction)
    assert row.gain_ns + row.step_ns == report.steps.mean_ns
    shown = phrases.gain(report, finding)
    assert duration(row.gain_ns) in shown
    assert percent(row.gain_fraction) in shown


def test_a_fix_that_brings_more_than_its_finding_costs_says_so_in_both_places(slow):
    claim = replace(slow.findings[0], lost_ns_per_step=10 * MS, lost_fraction=10 / 150, gain_fraction=10 / 150)
    report = replace(slow, findings=(claim,), fixes=(replace(slow.fixes[0], finding_lost_ns=10 * MS),))
    assert phrases.gain(report, claim) == (
        "a fix would make a step about 6.7 % shorter (10.0 ms), all that it costs; "
        "rankscope whatif --fix rank:1 predicts 30.0 ms, as it fixes more"
    )
    assert swept(run({0: 40, 1: 70, 2: 40, 3: 40}), claim)[0].finding_lost_ns == 10 * MS


def test_every_form_shows_the_rows_and_the_replays_error(slow):
    disagrees = replace(slow, fixes=(replace(slow.fixes[0], finding_lost_ns=75 * MS),))
    shown = " ".join(terminal.render(disagrees, width=160).split())
    assert "Predicted speedup of fixes" in shown
    assert "misses the measured steps by" in shown
    assert "slow rank, measured cost 75.0 ms (50.0 %)" in shown
    assert "<code>rank:1</code>" in html.render(disagrees)
    assert "各项修复的预测加速" in terminal.render(slow, language="zh")
    assert json.loads(json_form.render(slow))["fixes"][0]["fix"] == "rank:1"
