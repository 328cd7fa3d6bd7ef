"""A run that is too long for a report: phases of it whose steps differ are found by their lengths, and looked into."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.compare.gate import gate
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.diagnosis.run_phases import looks_at, phases_of, sentence
from rankscope.analysis.diagnosis.stretch_summary import StretchSummary
from rankscope.analysis.model.finding import StepSummary
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.report import html, json_form, terminal
from rankscope.analysis.runs import memory_budget
from rankscope.analysis.runs.step_range import Stretch
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.steps import judge
from record import write
from simulate import Job, healthy_resources, run
from support.report_schema import SCHEMA, check

STEPS, SLOW, FROM, UNTIL = 800, 5, 200, 300


def recorded(folder: Path, slowness: np.ndarray) -> Path:
    """800 steps of 129 ms on 8 ranks, whose compute takes so many times longer."""
    job = Job(parallel="fsdp", ranks=8, steps=STEPS, seed=2, nic_bytes_per_s=20e9)
    can = healthy_resources(job)
    can.slowness[:] *= slowness
    return write(run(job, can), folder)


def judged(folder: Path, share: float):
    """The report where only this share of the run fits."""
    trace = Trace.open(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "_MOST", memory_budget._BEFORE + memory_budget.bytes_of_rows(trace.reader) * share)
        return diagnose(Trace.open(folder))


@pytest.fixture(scope="module")
def slow_for_a_while(tmp_path_factory):
    """Rank 5 computes half as fast again from step 200 to 299; the last 200 are read."""
    slowness = np.ones((STEPS, 8))
    slowness[FROM:UNTIL, SLOW] = 1.5
    return judged(recorded(tmp_path_factory.mktemp("while") / "run", slowness), 0.2501)


@pytest.fixture(scope="module")
def slower_since(tmp_path_factory):
    """All ranks compute a fifth longer from step 400 on; the last 200 are read."""
    slowness = np.ones((STEPS, 8))
    slowness[400:] = 1.2
    return judged(recorded(tmp_path_factory.mktemp("since") / "run", slowness), 0.2501)


@pytest.mark.long
def test_a_rank_that_was_slow_for_a_while_is_named_though_other_steps_are_held(slow_for_a_while):
    """The phase needs no sentence of its own: its rank is the headline."""
    report = slow_for_a_while
    (look,) = report.history.looks
    assert (look.phase.first, look.phase.last) == (FROM, UNTIL - 1)
    assert look.phase.median_ns == pytest.approx(1.46 * report.history.read.median_ns, rel=0.03)
    assert [(found.detector, found.title.split(":")[0]) for found in look.findings] == [
        ("slow_rank", f"Rank {SLOW} is slow")
    ]
    assert report.verdict.startswith(f"{look.findings[0].title} (in steps 200-299) (it costs ")
    assert report.verdict.endswith(" step); 7 ranks wait for it.")


@pytest.mark.long
def test_a_slowdown_of_all_ranks_is_reported_with_the_part_that_grew(slower_since):
    """A step's 111 ms of compute, of 130, have become 133."""
    (look,) = slower_since.history.looks
    assert (look.phase.first, look.phase.last) == (0, 399)
    assert look.findings == ()
    assert look.changes[0].part == "compute"
    compute_ns = np.mean([part.ns_per_step for part in slower_since.breakdown if part.part == "compute"])  # 122 of it
    assert look.changes[0].ns == pytest.approx(compute_ns * (1 / 1.2 - 1) * 133 / 122, rel=0.1)
    (found,) = slower_since.findings
    assert (found.detector, found.where, found.steps) == ("step_change", "compute", tuple(range(400, STEPS)))
    assert slower_since.verdict.startswith(f"Likely: {found.title} (it costs ")
    assert found.lost_ns_per_step == pytest.approx(22e6 / 2, rel=0.2)


def test_every_form_of_the_report_says_it(slow_for_a_while):
    line = "found there: Rank 5 is slow"
    assert line in terminal.render_short(slow_for_a_while, width=400)
    assert "longer than the last ones" in html.render(slow_for_a_while)
    assert "第 200-299 步每步" in html.render(slow_for_a_while, language="zh")
    said = json.loads(json_form.render(slow_for_a_while))
    check(said, SCHEMA, "report")
    assert said["history"]["looks"][0]["phase"]["first"] == FROM


def test_a_gate_does_not_let_such_a_run_pass(slow_for_a_while, slower_since):
    (failure,) = gate(slow_for_a_while).failures
    assert failure.startswith("Rank 5 is slow")
    assert failure.endswith(" (in steps 200-299) (slow rank, medium, 5.5 % of the step)")
    assert gate(slow_for_a_while, severity="high").failures == ()
    (failure,) = gate(slower_since).failures
    assert failure.startswith("Steps from 400 take 2")
    assert gate(slower_since).unseen == ()


def test_every_step_of_the_run_is_analyzed(slow_for_a_while):
    """Rank 5's 100 steps of 190 ms lose 60 ms each: 5 % of the run's 110 s."""
    history = slow_for_a_while.history
    assert (history.analyzed, history.stretches) == (STEPS, 5)
    (found,) = slow_for_a_while.findings
    assert (found.detector, found.ranks, found.steps) == ("slow_rank", (SLOW,), tuple(range(FROM, UNTIL)))
    assert found.lost_ns_per_step == pytest.approx(found.lost_ns_total / slow_for_a_while.steps.count, abs=1)
    assert all(seen.steps == (FROM, UNTIL - 1) for seen in found.evidence)  # where to open it
    assert found.lost_ns_total == pytest.approx(100 * 60e6, rel=0.1)
    assert found.lost_fraction == pytest.approx(0.054, rel=0.1)
    assert not any("were read" in gap.why for gap in slow_for_a_while.gaps)


@pytest.mark.long
def test_a_healthy_run_has_no_phases(tmp_path):
    report = judged(recorded(tmp_path / "run", np.ones((STEPS, 8))), 0.25)
    assert report.history.count == STEPS
    assert report.history.looks == ()
    assert report.findings == ()
    assert f" of the step in {STEPS - 2} analyzed steps of 8 ranks." in report.verdict
    assert report.status == "green"


def stretch_of(lengths: np.ndarray, read: int) -> Stretch:
    """A run of one rank with steps of these lengths in ms, of which the last so many are read."""
    ends = np.cumsum(lengths * 1e6).astype(np.int64)
    number = np.arange(len(ends), dtype=np.int32)
    columns = {"rank": np.zeros_like(number), "step": number, "start_ns": np.append(0, ends[:-1]), "end_ns": ends}
    no_regions = pl.DataFrame(schema=schema_of("regions"))
    steps = judge(pl.DataFrame(columns | {"source": ["optimizer"] * len(ends)}), no_regions)
    counted = steps.with_columns(node=pl.lit(0, pl.Int32))
    last = len(ends) - 1
    return Stretch(
        first=len(ends) - read, last=last, kept=0, asked=False, said="", counted=counted, spans={0: (0, 1 << 62)}
    )


def phases(lengths: np.ndarray, read: int) -> list[tuple[int, int]]:
    stretch = stretch_of(lengths, read)
    return [(span.first, span.last) for span in phases_of(stretch, stretch.history())]


def test_phases_that_are_short_count_together():
    """A hundred incidents of 180 steps at twice the length: 13 % of the run, none of them 1 %."""
    lengths = np.random.default_rng(1).normal(100, 2, 120_000)
    for number in range(100):
        lengths[1000 + number * 1100 :][:180] *= 2
    found = sorted(phases(lengths, 5000))
    assert len(found) == 100
    assert all(abs(first - 1000 - number * 1100) <= 20 for number, (first, _) in enumerate(found))


def test_noise_does_not_cut_a_phase_into_pieces():
    """The first half takes 12 % longer, and steps scatter by a tenth."""
    lengths = np.random.default_rng(1).normal(100, 10, 120_000)
    lengths[:60_000] *= 1.12
    assert len(phases(lengths, 5000)) < 20
    (first, last) = phases(lengths, 5000)[0]
    assert last - first > 3000


def test_scatter_alone_is_no_phase():
    for seed in range(5):
        assert phases(np.random.default_rng(seed).normal(100, 30, 60_000).clip(30), 5000) == []


def test_others_of_the_kind_are_counted():
    """A report of 200 steps has room for three looks, and the run for five phases."""
    rng = np.random.default_rng(1)
    lengths = rng.normal(100, 2, 6000)
    for number in range(5):
        lengths[1000 + number * 800 :][:200] *= 1.5
    stretch = stretch_of(lengths, 200)
    history = stretch.history()
    of_last = StepSummary(count=200, warmup=0, outliers=0, mean_ns=100_000_000, median_ns=None, p90_ns=None, source="")
    last = StretchSummary(first=5800, last=5999, steps=of_last)
    looks = looks_at(phases_of(stretch, history), history.read, last, [])
    assert sorted(look.others for look in looks) == [0, 0, 2]
    said = sentence(replace(history, looks=tuple(looks)), [])
    assert re.search(r"^Steps \d+-\d+, and 2 other phases, took (49|50)\.\d % longer than steps 5800-5999.$", said)
