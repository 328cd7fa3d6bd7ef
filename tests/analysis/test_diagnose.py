"""From a run written by hand to the report: what is found, what is healthy, what could not be checked, and the sums."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

import rankscope
import record
from faults import Case, simulated
from rankscope.analysis.compare.gate import gate
from rankscope.analysis.detectors import detectors
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.diagnosis.checks import ask
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.model.finding import Finding, NotChecked
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.report import json_form, phrases
from rankscope.errors import NotResolvable
from support.by_hand import MS, STEPS, not_checked, run


def test_a_finding_costs_hours_of_ranks_and_with_a_price_money():
    """20 % of 2 ranks at 30 an hour is 12 of 60; 10 steps of 30 ms on 2 ranks are 600 ms, at 30 an hour 0.005."""
    priced = diagnose(run({0: 40, 1: 70}), ReportOptions(price=30.0))
    assert priced.verdict.endswith("; 1 rank waits for it; it costs 12 of 60 an hour.")
    assert phrases.cost(priced, priced.findings[0]) == (
        "30.0 ± 0 ms per step (20.0 %), 300 ms in total: 0.000167 rank-hours; in money 12 of 60 an hour; "
        "0.005 in the analyzed steps"
    )
    (finding,) = json.loads(json_form.render(priced))["findings"]
    costs = [finding[f"lost_{what}"] for what in ("hours_per_hour", "hours_total", "money_per_hour", "money_total")]
    assert costs == pytest.approx([0.4, 0.6 / 3600, 12, 0.005])
    on_gpus = diagnose(run({0: 40, 1: 70}, device="NVIDIA H100"))
    assert phrases.cost(on_gpus, on_gpus.findings[0]).endswith("300 ms in total: 0.000167 GPU-hours")
    assert on_gpus.verdict.endswith("; 1 rank waits for it.")


def test_slow_rank_of_a_run_is_the_verdict():
    """Rank 1's backward takes 30 ms longer than rank 0's 40: steps of 150 ms, of which it costs 30."""
    report = diagnose(run({0: 40, 1: 70}))
    assert report.verdict == (
        "Rank 1 is slow: it computes 30.0 ms longer per step than its peers (20.0 % of the 150 ms step); "
        "1 rank waits for it."
    )
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.where) == ("slow_rank", (1,), "backward")
    assert (finding.lost_ns_per_step, finding.lost_ns_total) == (30 * MS, 300 * MS)
    assert (report.steps.count, report.steps.warmup, report.steps.median_ns) == (10, 2, 150 * MS)
    assert {h.detector for h in report.healthy} >= {"gc_stall", "load_imbalance"}
    assert set(not_checked(report)) >= {"input_stall", "slow_link"}


def test_breakdown_sums_to_the_step_and_waits_are_the_peers_lateness():
    report = diagnose(run({0: 40, 1: 70, 2: 40}))
    for rank in report.ranks:
        assert sum(p.ns_per_step for p in report.breakdown if p.rank == rank) == 150 * MS
    assert [(w.rank, w.waited_ns) for w in report.waits] == [(0, STEPS * 30 * MS), (1, 0), (2, STEPS * 30 * MS)]
    assert report.step_ns == dict.fromkeys(range(3), (150 * MS,) * 10)


def test_healthy_run_says_so_and_says_what_it_could_have_seen():
    report = diagnose(run({0: 40, 1: 40, 2: 40, 3: 40}))
    assert report.verdict == (
        "Unexplained: exposed communication takes 8.3 % of the 120 ms step in 10 analyzed steps of 4 ranks, most in "
        "allreduce; rankscope run --profile-steps A-B records what ranks and devices do meanwhile."
    )
    assert report.status == "amber"
    assert report.findings == ()
    assert {h.detector: h.resolution_ns for h in report.healthy}["slow_rank"] == round(0.03 * 120 * MS)


def test_a_job_that_still_runs_can_be_profiled_now():
    trace = replace(run({0: 40, 1: 40, 2: 40, 3: 40}), run={0: {"state": "running"}})
    assert "; rankscope trigger RUN --count 10 records what ranks and devices do" in diagnose(trace).verdict


def test_a_run_too_noisy_for_a_finding_says_so_in_the_verdict():
    """Both backwards jump between 10 and 130 ms, each in its own rhythm: a mean excess must be large to stand out."""
    report = diagnose(run({0: [10, 130, 130, 10], 1: [130, 10, 130, 10, 10]}))
    assert report.findings == ()
    assert "; slow rank has no verdict: in 10 analyzed steps nothing below " in report.verdict
    assert "slow_rank" in not_checked(report)


def test_a_run_whose_only_operation_begins_with_it_is_judged(capsys):
    """A barrier of 20 ms at the very start, and no other operation in any step."""
    trace = run({0: 40, 1: 40}, recorded=False)
    barrier = {"start_ns": 0, "issued_ns": 20 * MS, "end_ns": 20 * MS, "group_id": 7, "seq": 0, "op": "barrier"}
    barrier |= {"is_async": False, "peer": -1, "thread": 0, "node": 0, "attempt": 0}
    rows = [barrier | {"rank": rank} for rank in (0, 1)]
    trace.reader.frames["collectives"] = pl.DataFrame(rows, schema_of("collectives"))
    assert {check.detector for check in diagnose(trace).healthy} >= {"gc_stall"}
    assert "replay failed" not in capsys.readouterr().err


def test_a_collection_behind_another_ranks_work_costs_nothing_and_is_no_finding():
    """In each fifth step rank 1 collects for 30 ms, while rank 0 computes as long: without it no step is shorter.

    Where only rank 1 is that long, the collections cost 30 ms in two of ten steps.
    """
    every_fifth, collects = [40, 40, 40, 40, 70], {(1, 4), (1, 9)}
    alone = diagnose(run({0: 40, 1: every_fifth}, collections=collects))
    assert [(f.detector, f.lost_ns_per_step) for f in alone.findings] == [("gc_stall", 6 * MS)]
    assert alone.verdict == (
        "Likely: Garbage collection stops rank 1 for 30.0 ms in 2 of 10 steps (it costs 6.00 ms, 4.8 % of the 126 ms "
        "step); 1 rank waits for it; unexplained: exposed communication takes 7.9 % of the step, most in allreduce."
    )
    hidden = diagnose(run({0: every_fifth, 1: every_fifth}, collections=collects))
    assert hidden.findings == ()
    assert "gc_stall" in {h.detector for h in hidden.healthy}


def test_the_error_of_bursts_is_that_of_how_often_they_come_where_that_is_irregular():
    """Bursts of 200 ms: in 7 of 98 steps by chance, which could be 2 or 12 as well, or in every tenth."""
    by_chance = np.random.default_rng(4).random(100) < 0.1
    bursts = [240 if by_chance[step] else 40 for step in range(100)]
    (irregular,) = diagnose(run({0: 40, 1: bursts, 2: 40}, steps=100)).findings
    assert (irregular.title[:14], len(irregular.steps)) == ("Rank 1 is slow", 7)
    assert 0.5 < irregular.uncertainty_ns / irregular.lost_ns_per_step < 0.8
    (regular,) = diagnose(run({0: 40, 1: [40] * 9 + [240], 2: 40}, steps=102)).findings
    assert (regular.lost_ns_per_step, regular.uncertainty_ns) == (20 * MS, 0)


def test_missing_ranks_are_in_the_verdict():
    report = diagnose(run({0: 40, 2: 40}, world_size=4))
    assert report.verdict.endswith("; ranks 1,3 of 4 were not recorded.")


def test_what_cannot_be_judged_is_not_called_healthy():
    assert diagnose(run({0: 40}, world_size=1)).findings == ()
    alone = not_checked(diagnose(run({0: 40}, world_size=1)))
    assert "only one rank" in alone["slow_rank"]
    few = diagnose(run({0: 40, 1: 70}, steps=3))
    assert few.verdict.startswith("No verdict: 1 analyzed step, at least 2 are needed; the step is ")
    none = diagnose(run({0: 40, 1: 70}, steps=0))
    assert none.verdict.startswith("No verdict: ")
    assert (none.healthy, none.findings, none.breakdown) == ((), (), ())


def test_without_communication_no_rank_can_be_named():
    assert not_checked(diagnose(run({0: 40, 1: 70}, recorded=False)))["slow_rank"] == "no communication was recorded"


def test_accelerators_are_reported_as_unobserved():
    assert "H100" in not_checked(diagnose(run({0: 40, 1: 40}, device="NVIDIA H100")))["device_time"]


def test_collector_that_was_off_makes_its_detector_unchecked():
    off = {"rank": 1, "table": "*", "source": "gc_pauses", "why": "collector left off by RANKSCOPE_DISABLE"}
    report = diagnose(run({0: 40, 1: 40}, gaps=[off]))
    assert not_checked(report)["gc_stall"] == "collector gc_pauses on rank 1: collector left off by RANKSCOPE_DISABLE"
    assert "gc_stall" not in {h.detector for h in report.healthy}


@pytest.mark.parametrize(("collector", "recorded"), [("collectives", False), ("backward", True)])
def test_slow_ranks_that_nothing_could_show_are_neither_healthy_nor_passed(collector, recorded):
    """Without the collector a rank that waits seems to compute, whoever left it off."""
    why = "collector left off by RANKSCOPE_DISABLE"
    off = [{"rank": rank, "table": "*", "source": collector, "why": why} for rank in (0, 1)]
    report = diagnose(run({0: 40, 1: 40}, gaps=off, recorded=recorded))
    assert report.status == "amber"
    assert f"; slow rank has no verdict: collector {collector} on ranks 0,1: {why}" in report.verdict
    assert any("slow rank" in said for said in gate(report).unseen)


def test_detector_that_fails_is_loud_and_does_not_take_the_others_down(capsys):
    def broken(steps):
        raise ZeroDivisionError("division by zero")

    def unsure(steps):
        raise NotResolvable("it is foggy")

    modules = {
        name: SimpleNamespace(detect=detect, detector=Detector()) for name, detect in (("a", broken), ("b", unsure))
    }
    said = pl.DataFrame(schema=schema_of("gaps"))
    _, healthy, unchecked = ask(modules, {"steps": pl.DataFrame({"step": [1]})}, said, {})
    assert healthy == []
    assert unchecked == [
        NotChecked(detector="a", why="the detector failed: ZeroDivisionError: division by zero", unclear=True),
        NotChecked(detector="b", why="it is foggy"),
    ]
    assert "detector 'a'" in capsys.readouterr().err


def test_detector_that_takes_anothers_findings_runs_after_it_and_gets_the_reason_for_none():
    def slow(steps):
        if len(steps) > 1:
            raise NotResolvable("it is foggy")
        return [finding("slow", 10)]

    def cause(slow):
        if isinstance(slow, NotChecked):
            raise NotResolvable(f"the slow rank is not known: {slow.why}")
        return [finding("cause", one.lost_ns_per_step) for one in slow]

    modules = {
        name: SimpleNamespace(detect=detect, detector=Detector()) for name, detect in (("cause", cause), ("slow", slow))
    }
    said = pl.DataFrame(schema=schema_of("gaps"))
    found, _, _ = ask(modules, {"steps": pl.DataFrame({"step": [1]})}, said, {})
    assert [(one.detector, one.lost_ns_per_step) for one in found] == [("slow", 10), ("cause", 10)]
    _, _, unchecked = ask(modules, {"steps": pl.DataFrame({"step": [1, 2]})}, said, {})
    assert {one.detector: one.why for one in unchecked} == {
        "slow": "it is foggy",
        "cause": "the slow rank is not known: it is foggy",
    }


def test_missing_table_is_the_reason_why_no_detector_that_reads_it_was_asked():
    said = pl.DataFrame(schema=schema_of("gaps"))
    modules = {name: module for name, module in detectors().items() if name in ("slow_rank", "gc_stall")}
    _, _, unchecked = ask(modules, {}, said, {"breakdown": "it is dark"})
    assert {n.detector: n.why for n in unchecked} == {"slow_rank": "it is dark", "gc_stall": "it is dark"}


@pytest.mark.parametrize("lost", [[], [0], [0, 1]])
def test_ranks_out_of_step_are_not_compared(lost):
    """Rank 1 has two steps to each of rank 0's, and that is not because records were lost."""
    gap = {"start_ns": 0, "end_ns": MS, "table": "*", "source": "agent", "count": 9, "why": "lost", "node": 0}
    trace = run({0: 40, 1: 70}, gaps=[gap | {"rank": rank, "attempt": 0} for rank in lost])
    rows = trace.reader.frames["regions"].to_dicts()
    ends = [row for row in rows if (row["rank"], row["kind"]) == (1, "optimizer")]
    halves = [row | {"start_ns": row["start_ns"] - 70 * MS, "end_ns": row["start_ns"] - 65 * MS} for row in ends]
    trace.reader.frames["regions"] = pl.DataFrame([*rows, *halves], schema_of("regions"))
    report = diagnose(trace)
    assert report.findings == ()
    assert [healthy.detector for healthy in report.healthy] == ["hang"]
    assert report.verdict.startswith("No verdict: the ranks number their steps differently")


def finding(detector, lost, ranks=()):
    return Finding(
        detector=detector,
        severity="high",
        title="",
        where="",
        advice="",
        ranks=ranks,
        lost_ns_per_step=lost,
        lost_ns_total=lost,
        lost_fraction=0.1,
        uncertainty_ns=0,
        gain_fraction=0.1,
    )


@pytest.mark.parametrize(("saves", "error", "first"), [(1, 0, "gc_stall"), (1, 8, "gc_stall"), (8, 9, "slow_rank")])
def test_findings_are_ranked_by_what_they_cost_as_far_as_a_replay_of_their_fix_agrees(saves, error, first):
    """The late rank costs 15 % by its detector, collections 10. A replay that is 9 % off does not say that it is 8."""
    late = replace(finding("slow_rank", 15), lost_fraction=0.15, gain_fraction=saves / 100)
    late = replace(late, gain_uncertainty_fraction=error / 100)
    assert root_causes_first([late, finding("gc_stall", 10, (3,))], range(4))[0].detector == first


def test_a_fix_that_saves_more_than_its_finding_costs_does_not_put_it_first():
    """Quick hosts would save 50 %, with them what one rank stalls; that they are late costs 10, the stall 20."""
    hosts = replace(finding("host_bound", 10), lost_fraction=0.1, gain_fraction=0.5, gain_uncertainty_fraction=0.4)
    stall = replace(finding("slow_rank", 20, (2,)), lost_fraction=0.2, gain_fraction=0.2)
    assert [f.detector for f in root_causes_first([hosts, stall], range(4))] == ["slow_rank", "host_bound"]


def test_communication_that_hiding_would_not_cure_ranks_by_what_it_costs():
    """Of 15 ms exposed 1 can be hidden: faster links would bring the rest. Collections cost 10."""
    found = [
        replace(finding("exposed_communication", 15), lost_fraction=0.15, gain_fraction=0.01),
        finding("gc_stall", 10),
    ]
    assert [f.detector for f in root_causes_first(found, range(4))] == ["exposed_communication", "gc_stall"]


def test_what_follows_from_a_consequence_is_kept_and_names_what_it_follows_from():
    found = [finding("pipeline_bubble", 10), finding("slow_rank", 20), finding("stage_imbalance", 30)]
    ordered = [(f.detector, f.caused_by) for f in root_causes_first(found, range(4))]
    assert ordered == [
        ("stage_imbalance", None),
        ("slow_rank", "stage_imbalance"),
        ("pipeline_bubble", "slow_rank"),
    ]


def test_what_all_ranks_do_alike_explains_no_straggler():
    """The hosts of all four wait for their devices; that one of four is late is another matter."""
    for ranks, cause in (((0, 1, 2, 3), None), ((2, 3), "host_sync")):
        found = root_causes_first([finding("slow_rank", 20, (2,)), finding("host_sync", 30, ranks)], range(4))
        assert {f.detector: f.caused_by for f in found}["slow_rank"] == cause


def test_of_hosts_that_are_slow_alike_the_last_one_is_no_second_root_cause(tmp_path):
    """All take as long to launch a kernel. While others wait for one rank their hosts run ahead, its own does not."""
    log, (truth,) = simulated(Case("host_bound", "loud", 2), small=True, parallel="")
    hosts, last = diagnose(rankscope.open(record.write(log, tmp_path / "run"))).findings
    assert (hosts.detector, hosts.ranks, hosts.caused_by) == ("host_bound", tuple(range(8)), None)
    assert (last.detector, len(last.ranks), last.caused_by) == ("slow_rank", 1, "host_bound")
    assert hosts.lost_fraction == pytest.approx(truth.cost_fraction, abs=0.02)


def test_a_rank_whose_experts_are_popular_is_slow_because_of_them_even_if_that_costs_more():
    """Above its peers by up to twice as much as above the mean; by more than that it is slow of itself."""
    for cost, cause in ((190, "expert_imbalance"), (210, None)):
        found = root_causes_first([finding("slow_rank", cost, (2,)), finding("expert_imbalance", 100, (2,))], range(4))
        assert {f.detector: f.caused_by for f in found}["slow_rank"] == cause


def test_a_rank_that_comes_late_and_waits_for_its_batch_is_late_because_of_that():
    """By operations of few steps, which do not say why. Own time has no input in it, and may be longer besides."""
    for cost, chance, ranks, cause in (
        (190, 0.001, (2,), "input_stall"),
        (210, 0.001, (2,), None),
        (190, None, (2,), None),
        (190, 0.001, (0, 1, 2, 3), None),
    ):
        late = replace(finding("slow_rank", cost, (2,)), chance=chance)
        found = root_causes_first([late, finding("input_stall", 100, ranks)], range(4))
        assert {f.detector: f.caused_by for f in found}["slow_rank"] == cause


def test_of_two_findings_that_explain_each_other_the_one_seen_at_work_is_the_cause_and_none_is_lost():
    """A slow group's ranks are late for others; a late rank may make transfers look slow."""
    found = root_causes_first([finding("slow_rank", 120, (0, 1)), finding("low_bandwidth", 100, (0, 1))], range(4))
    assert [(f.detector, f.caused_by) for f in found] == [("low_bandwidth", None), ("slow_rank", "low_bandwidth")]


def test_consequence_follows_its_cause_and_names_it():
    found = [
        finding("gc_stall", 20, (3,)),
        finding("load_imbalance", 25, (0, 1, 2)),
        finding("slow_rank", 30, (2,)),
        finding("load_imbalance", 40, (0, 1, 2)),
    ]
    ordered = root_causes_first(found, range(4))
    assert [(f.detector, f.lost_ns_per_step, f.caused_by) for f in ordered] == [
        ("load_imbalance", 40, None),
        ("slow_rank", 30, None),
        ("load_imbalance", 25, "slow_rank"),
        ("gc_stall", 20, None),
    ]


@pytest.mark.parametrize("late_ns", [5_000 * MS, 50 * MS], ids=["5 s", "50 ms"])
def test_end_before_the_last_rank_arrived_is_put_down_to_a_timeout_or_to_the_clock(late_ns):
    """Rank 1 calls the last operation that long after the others' ended: 42 steps of 120 ms, or less than one."""
    trace = run({0: 40, 1: 40, 2: 40})
    late = (pl.col("rank") == 1) & (pl.col("seq") == STEPS - 1)
    times = (pl.when(late).then(pl.col(c) + late_ns).otherwise(c).alias(c) for c in ("start_ns", "issued_ns", "end_ns"))
    trace.reader.frames["collectives"] = trace.reader.frames["collectives"].with_columns(times)
    (why,) = (gap.why for gap in diagnose(trace).gaps if "end before their last rank arrived" in gap.why)
    assert why.startswith(f"2 rows of operations end before their last rank arrived, by up to {late_ns - 10 * MS} ns: ")
    assert ("a timeout or an error ended them" in why, "clocks or stamps are wrong" in why) == (
        (True, False) if late_ns > 1_000 * MS else (False, True)
    )
