"""The simulated captures of benchmarks/captures: they can be read, and a planted fault is what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl
import pytest

import rankscope
from captures.engine import Job, resources, run, step_ns
from captures.planted import CLEAN, KINDS, Case, Truth, simulated
from captures.programs import PROGRAMS
from captures.real_sets import SETS, show
from captures.score import answer, is_false_positive, is_right, roots, told
from captures.variants import HALVES, Variant
from captures.write import write
from captures.write_nsight import write_nsight
from rankscope.analysis.diagnosis.by_replay import blamed_by_replay
from rankscope.analysis.metrics.links import judged_links
from rankscope.analysis.model.finding import PredictedFix
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline

QUIET = Variant("two modes", "independent", "free", 1.0, "kernels")
JOB = Job(
    parallel="ddp",
    ranks=4,
    node_size=4,
    steps=3,
    seed=1,
    variant=QUIET,
    compute_ns=60e6,
    layers=6,
    kernels=4,
    bytes=1e8,
    activation_bytes=1e6,
    bandwidth=100e9,
    python_ns=10e3,
)


@pytest.mark.parametrize("parallel", PROGRAMS)
def test_all_ranks_of_a_capture_can_be_read_and_their_operations_matched(parallel, tmp_path):
    seed = next(s for s in range(99) if simulated(Case(CLEAN, "", 2, s, "tuning")).job.parallel == parallel)
    capture = simulated(Case(CLEAN, "", 2, seed, "tuning"))
    capture = replace(capture, files=replace(capture.files, information="all", marks=True, metadata="all"))
    trace = rankscope.open(write(capture, tmp_path / "capture"))
    of_rank = trace.table("collectives").group_by("rank").len().collect()
    assert sorted(of_rank["rank"]) == list(range(capture.job.ranks))
    steps = trace.table("steps").collect()
    assert len(steps) == 2 * capture.job.ranks


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *product(["slow_rank", "slow_node", "host_sync", "memory_pressure", "input_stall"], [0, 1]),
        *[("expert_imbalance", 0), ("expert_imbalance", 5)],
    ],
)
def test_a_fault_is_found_in_exports_of_nsight_too(kind, seed, tmp_path):
    """Even seeds have a file for each host, odd ones a file for each rank."""
    capture = simulated(Case(kind, "loud", 3, seed, "tuning"))
    said = [told(finding) for finding in roots(rankscope.diagnose(rankscope.open(write_nsight(capture, tmp_path))))]
    assert is_right(said[0], capture.truth, capture)


def test_a_slow_device_costs_all_ranks_what_it_takes_longer():
    """Half of 60 ms of computation and of 3.6 ms of optimizer; what is transferred stays hidden."""
    slow = resources(JOB)
    slow.device[:, 2] *= 1.5
    cost_ns = step_ns(run(JOB, slow, PROGRAMS["ddp"])) - step_ns(run(JOB, resources(JOB), PROGRAMS["ddp"]))
    assert cost_ns == pytest.approx(31.8e6, rel=0.1)


def test_a_slow_host_costs_nothing_as_long_as_it_is_ahead():
    slow = resources(JOB)
    slow.host[:] = 2
    healthy_ns = step_ns(run(JOB, resources(JOB), PROGRAMS["ddp"]))
    assert step_ns(run(JOB, slow, PROGRAMS["ddp"])) == pytest.approx(healthy_ns, rel=0.02)
    slow.host[:] = 60  # 72 + 6 kernels of 0.6 ms each
    assert step_ns(run(JOB, slow, PROGRAMS["ddp"])) > 0.7 * (78 * 0.6e6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_fault_costs_about_its_dose_and_the_capture_is_the_same_each_time(kind):
    case = Case(kind, "quiet", 3, 4, "tuning")
    truth = simulated(case).truth
    assert 0.08 < truth.cost_fraction < 0.17
    assert simulated(case).truth == truth


def test_halves_share_no_noise():
    seen = {half: {simulated(Case(CLEAN, "", 2, s, half)).job.variant.tail for s in range(9)} for half in HALVES}
    assert seen["tuning"] & seen["report"] == set()


@pytest.mark.parametrize(
    ("kind", "steps", "seed"),
    [
        ("load_imbalance", 3, 0),  # of operators without metadata
        ("load_imbalance", 3, 2),  # one of the steps is 5 times as long as the others
        ("expert_imbalance", 1, 0),
        ("expert_imbalance", 3, 0),  # of all-to-alls without numbers
        ("stage_imbalance", 1, 1),  # the first stage, with two replicas
        ("stage_imbalance", 3, 2),  # the last stage of one replica
        ("slow_link", 1, 2),  # of sends and receives
        ("slow_link", 1, 0),  # of reductions, of which a part is hidden
        ("slow_node", 1, 0),  # of nodes whose clocks are apart
        ("rank_stall", 3, 1),  # in each step, hidden in the first by what its device has queued
        ("rank_stall", 6, 0),  # in steps that may be compared, after a call that all hosts wait in
        ("load_imbalance", 6, 0),  # that do not say what is forward
    ],
)
def test_few_steps_are_enough_for_what_each_operation_shows(kind, steps, seed, tmp_path):
    """Whose fault it is, and no less than two thirds of what it costs."""
    capture = simulated(Case(kind, "loud", steps, seed, "tuning"))
    report = rankscope.diagnose(rankscope.open(write(capture, tmp_path / "capture")))
    first = told(roots(report)[0])
    assert is_right(first, capture.truth, capture)
    assert first["fraction"] > 2 / 3 * capture.truth.cost_fraction


def test_a_longer_first_step_of_five_hides_no_late_host(tmp_path):
    """Steps scatter too much for their mean to be clear of zero; the devices idle in each."""
    capture = simulated(Case("host_bound", "loud", 5, 17, "report"))
    first = told(roots(rankscope.diagnose(rankscope.open(write(capture, tmp_path))))[0])
    assert is_right(first, capture.truth, capture)


def of_ranks(case, ranks, folder):
    """The report on the files of these ranks of a capture, and what was planted in it."""
    capture = simulated(case)
    some = replace(capture, ranks=[rank for rank in capture.ranks if rank.number in ranks])
    return rankscope.diagnose(rankscope.open(write(some, folder / "capture"))), capture.truth


@pytest.mark.parametrize(
    ("case", "other"),
    [(("rank_stall", "loud", 3, 4), 6), (("rank_stall", "quiet", 3, 5), 5), (("slow_rank", "loud", 3, 2), 1)],
    ids=["loud", "quiet", "moe"],
)
def test_of_two_recorded_ranks_of_eight_the_late_one_is_named_with_what_the_other_waits(case, other, tmp_path):
    """No collective ends before its last rank has come, whatever the six others do."""
    report, truth = of_ranks(Case(*case, "tuning"), {*simulated(Case(*case, "tuning")).truth.ranks, other}, tmp_path)
    first = report.findings[0]
    assert (first.detector, first.confidence, first.ranks) == ("slow_rank", "likely", truth.ranks)
    assert 0.8 * truth.cost_fraction < first.lost_fraction < 1.2 * truth.cost_fraction
    assert not any(finding.detector == "exposed_communication" for finding in report.findings)
    assert (report.matched_fraction, report.world_size) == (0.0, 8)


def test_of_two_recorded_ranks_of_a_group_of_experts_the_late_one_is_named_by_their_all_to_alls(tmp_path):
    report, truth = of_ranks(Case("slow_rank", "quiet", 3, 2, "tuning"), {5, 6}, tmp_path)
    assert [(one.detector, one.ranks) for one in report.findings] == [("slow_rank", truth.ranks)]


def test_one_recorded_stage_of_a_healthy_pipeline_has_no_exposed_communication(tmp_path):
    """A quarter of the step passes in receives: stages wait for each other by design, and transfers are part of it."""
    report, _ = of_ranks(Case(CLEAN, "", 3, 6, "tuning"), {0}, tmp_path)
    assert report.findings == ()
    (why,) = (check.why for check in report.not_checked if check.detector == "exposed_communication")
    assert why == "in 24.2 % of the step it is not known whether pipeline stages transfer or wait for each other"


@pytest.mark.parametrize(
    "case", [("expert_imbalance", "loud", 3, 6), ("rank_stall", "loud", 3, 6)], ids=["moe", "stall"]
)
def test_ranks_that_wait_for_one_that_was_not_recorded_are_not_named_for_being_late_then(case, tmp_path):
    """They come late to the reductions of all, since they waited in all-to-alls with the one whose file is missing."""
    (late,) = simulated(Case(*case, "tuning")).truth.ranks
    report, _ = of_ranks(Case(*case, "tuning"), set(range(8)) - {late}, tmp_path)
    assert [finding.ranks for finding in report.findings if finding.detector == "slow_rank"] == []
    assert report.verdict.startswith("Unexplained: unattributed communication takes")


def test_a_rank_that_the_replay_names_is_likely_though_operations_do_not_show_it(tmp_path):
    """One of eight ranks costs 7.0 % of three steps; the rank its peers wait for changes by chance as well."""
    slow = simulated(Case("slow_rank", "masked", 3, 1, "tuning"))
    (finding,) = rankscope.diagnose(rankscope.open(write(slow, tmp_path / "slow"))).findings
    assert (finding.detector, finding.ranks, finding.confidence) == ("slow_rank", slow.truth.ranks, "likely")
    assert finding.lost_fraction == pytest.approx(slow.truth.cost_fraction, abs=0.02)
    assert finding.title.startswith(f"Rank {slow.truth.ranks[0]} makes steps ")


PREDICTED = PredictedFix(fix="rank:0", step_ns=90, gain_ns=10, gain_fraction=0.1, uncertainty_ns=2)


@pytest.mark.parametrize(
    ("other", "steps", "blamed"),
    [
        (None, 3, True),
        (replace(PREDICTED, fix="rank:1", gain_ns=6), 3, True),
        (replace(PREDICTED, fix="rank:1", gain_ns=8), 3, False),  # two ranks bring about as much
        (replace(PREDICTED, fix="host", gain_ns=30), 3, True),
        (replace(PREDICTED, fix="node:0", gain_ns=9), 3, False),  # its node does as well
        (None, 9, True),
        (None, 10, False),  # enough steps to compare them with each other
    ],
)
def test_a_rank_is_named_by_the_replay_if_no_other_brings_as_much(other, steps, blamed):
    spans = [(rank, step, 100 * step, 100 * step + 100) for rank in range(2) for step in range(steps)]
    span = pl.DataFrame(spans, ["rank", "step", "start_ns", "end_ns"], orient="row")
    phases = span.with_columns(part=pl.lit("compute"), label=pl.lit("mm"))
    called = {"rank": pl.Int32, "group_id": pl.Int64, "group_size": pl.UInt32, "op": pl.String, "wait_ns": pl.Int64}
    tables = {"breakdown": phases.with_columns(ns=100), "phases": phases, "steps": span}
    tables["collectives"] = pl.DataFrame(schema=called)
    tables["ranks"] = pl.DataFrame({"rank": [0, 1], "node": [0, 0]})
    found = blamed_by_replay(lambda: [PREDICTED, *([other] if other else [])], [], tables)
    assert (found is not None) is blamed
    if found is not None:
        assert (found.ranks, found.lost_fraction, found.where) == ((0,), 0.1, "mm")


def test_a_node_is_named_by_the_replay_with_its_ranks():
    spans = [(rank, step, 100 * step, 100 * step + 100) for rank in range(4) for step in range(3)]
    span = pl.DataFrame(spans, ["rank", "step", "start_ns", "end_ns"], orient="row")
    phases = span.with_columns(part=pl.lit("compute"), label=pl.lit("mm"))
    called = {"rank": pl.Int32, "group_id": pl.Int64, "group_size": pl.UInt32, "op": pl.String, "wait_ns": pl.Int64}
    tables = {"breakdown": phases.with_columns(ns=100), "phases": phases, "steps": span}
    tables |= {"collectives": pl.DataFrame(schema=called)}
    tables |= {"ranks": pl.DataFrame({"rank": [0, 1, 2, 3], "node": [0, 0, 1, 1]})}
    fixes = [replace(PREDICTED, fix="node:1"), replace(PREDICTED, fix="rank:3", gain_ns=2)]
    found = blamed_by_replay(lambda: fixes, [], tables)
    assert (found.ranks, found.nodes, found.fix) == ((2, 3), (1,), "node:1")
    assert found.title.startswith("Node 1 makes steps 10 ns longer")


def test_a_slow_rank_and_healthy_ranks_are_no_uneven_work(tmp_path):
    """What a device takes longer in all steps is its own; what kernels scatter by chance is no rank's."""
    slow, healthy = (
        rankscope.diagnose(rankscope.open(write(simulated(case), tmp_path / case.kind)))
        for case in (Case("slow_rank", "loud", 3, 0, "tuning"), Case(CLEAN, "", 3, 2, "tuning"))
    )
    assert "load_imbalance" not in {finding.detector for finding in slow.findings}
    assert "load_imbalance" in {check.detector for check in healthy.healthy}


def said(detector, ranks=(), level="confirmed"):
    return {"detector": detector, "level": level, "ranks": list(ranks), "groups": [], "fraction": 0.1, "title": ""}


@pytest.mark.parametrize(
    ("kind", "ranks", "finding", "right"),
    [
        ("slow_rank", (2,), said("slow_rank", (2,)), True),
        ("slow_rank", (2,), said("slow_rank", (2,), "likely"), True),
        ("slow_rank", (2,), said("slow_rank", (2,), "unexplained"), False),
        ("slow_rank", (2,), said("slow_rank", (1,)), False),
        ("slow_rank", (2,), said("host_bound", (2,)), False),
        ("rank_stall", (2,), said("host_bound", (2,)), True),
        ("host_bound", (), said("host_bound", (0, 1, 2, 3)), True),
        ("input_stall", (), said("input_stall", (0, 1, 2, 3)), True),
        ("input_stall", (1,), said("input_stall", (0, 1, 2, 3)), False),
        ("slow_link", (2, 3), said("slow_link", (2, 3)), True),
        ("slow_link", (2, 3), said("slow_link"), False),
    ],
)
def test_a_verdict_is_right_if_it_has_the_kind_and_names_whose_fault_it_is(kind, ranks, finding, right):
    capture = replace(simulated(Case(CLEAN, "", 1, 0, "tuning")), job=JOB)
    assert is_right(finding, Truth(kind, ranks, "", 0.1), capture) is right


def test_what_counts_as_a_false_positive():
    """Lost time that is called unexplained is none, if it is there."""
    row = {"said": [said("x", level="unexplained")], "right": False, "truth": None}
    assert not is_false_positive(row | {"lost": 0.06})
    assert is_false_positive(row | {"lost": 0.04})
    assert is_false_positive({"said": [said("slow_rank", (0,))], "lost": 0.5})
    assert not is_false_positive({"said": [], "lost": 0.5})
    assert answer(row) == "healthy"


def test_files_hold_what_they_are_to_lack(tmp_path):
    capture = simulated(Case(CLEAN, "", 2, 3, "tuning"))
    bare = replace(capture.files, unit="base", information="none", marks=False, metadata="none", packed=False)
    folder = write(replace(capture, files=bare), tmp_path / "capture")
    document = json.loads((folder / "rank1.pt.trace.json").read_text())
    names = {event["name"] for event in document["traceEvents"]}
    assert "distributedInfo" not in document
    assert "baseTimeNanoseconds" in document
    assert not any(name.startswith("ProfilerStep") for name in names)
    assert not any("Process Group Name" in event["args"] for event in document["traceEvents"])
    assert np.all([event["dur"] >= 0 for event in document["traceEvents"]])


def test_real_sets_that_are_absent_are_reported_and_not_counted(tmp_path):
    lines = []
    assert show(tmp_path, lines.append) == 0
    assert len(lines) == len(SETS) + 1
    assert lines[-1] == f"0 of 0 sets right, {len(SETS)} absent"


def test_parameters_that_are_gathered_when_their_layer_begins_are_named_and_prefetch_hides_them(tmp_path):
    """FSDP on 4 ranks without prefetch. The same job is 31 % shorter with it, and with reductions that overlap."""
    capture = simulated(Case("exposed_communication", "loud", 3, 2, "tuning"))
    assert (capture.job.parallel, capture.job.ranks) == ("fsdp", 4)
    report = rankscope.diagnose(rankscope.open(write(capture, tmp_path / "capture")))
    first = report.findings[0]
    assert (first.detector, first.where, first.ranks) == ("exposed_communication", "allgather_base", ())
    assert "that no computation hides" in report.verdict
    gains = {fix.fix: fix.gain_fraction for fix in report.fixes}
    assert first.fix in gains
    assert gains["prefetch:1"] == pytest.approx(capture.truth.cost_fraction, abs=0.03)


@pytest.mark.parametrize("seed", [1, 3])
def test_gradients_hide_behind_backward_only(tmp_path, seed):
    """All gradients are reduced after backward, in a simulated DDP job. Overlapped, they would save 21 to 22 % of the
    step: the rest of backward is not long enough for more, and the forward is over."""
    capture = simulated(Case("exposed_communication", "loud", 3, seed, "tuning"))
    assert capture.job.parallel == "ddp"
    seen = build_timeline(Trace.open(write(capture, tmp_path)))
    replayed = rerun(seen, judged_links(seen.counters, seen.steps, {}))
    (fix,) = (one for one in replayed.possible() if one.startswith("overlap:"))
    assert replayed.gain(fix).gain_ns / replayed.step_ns == pytest.approx(capture.truth.cost_fraction, abs=0.03)
