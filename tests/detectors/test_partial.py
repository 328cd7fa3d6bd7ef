"""What a recording lacks must not read as health: runs with a known fault, of which something is taken away."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from functools import cache

import numpy as np
import pytest

import rankscope
from faults import Case, simulated
from rankscope.analysis.model import digest
from rankscope.analysis.report import terminal
from rankscope.analysis.report.view import view_of
from rankscope.dashboard.figures.waterfall import waterfall
from record import write
from simulate import Job, healthy_resources, run

SLOW = 4  # the rank of the job below that takes 40 % of the step longer


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    """A simulated job's run folder, which is not to be changed, its fault, and the job."""

    @cache
    def of(kind, seed, parallel):
        log, (truth,) = simulated(Case(kind, "loud", seed), small=True, parallel=parallel)
        return write(log, tmp_path_factory.mktemp("simulated") / "run"), truth, log.job

    return of


@pytest.fixture
def own_run(simulate, tmp_path):
    """The run in a folder of which this test may take away what it wants, and its fault."""

    def of(kind, parallel, seed=1):
        run, truth, _ = simulate(kind, seed, parallel)
        return shutil.copytree(run, tmp_path / "run"), truth

    return of


@pytest.fixture
def lacking(own_run):
    """The report of the run without these of its folders."""

    def report(*patterns):
        run, _ = own_run("slow_rank", "")
        taken = [folder for pattern in patterns for folder in run.glob(pattern)]
        for folder in taken:
            shutil.rmtree(folder)
        assert taken
        return rankscope.diagnose(rankscope.open(run))

    return report


def not_checked(report, detector):
    return [check.why for check in report.not_checked if check.detector == detector]


@pytest.mark.long
def test_the_whole_run_names_the_rank(simulate):
    """16 ranks in 2 replicas of 4 stages, each of 2 ranks."""
    run, truth, job = simulate("slow_rank", 1, "")
    assert (truth.ranks, job.parallel, job.ranks) == ((SLOW,), "3d", 16)
    (finding,) = rankscope.diagnose(rankscope.open(run)).findings
    assert (finding.detector, finding.ranks) == ("slow_rank", (SLOW,))


@pytest.mark.parametrize("taken", [f"regions/rank={SLOW:05d}", f"*/rank={SLOW:05d}"], ids=["its phases", "all of it"])
def test_a_rank_that_was_not_seen_is_not_healthy_when_others_wait_for_it(lacking, taken):
    report = lacking(taken)
    assert report.findings == ()
    (why,) = not_checked(report, "slow_rank")
    assert why.endswith(f"of the step with rank {SLOW}, whose steps were not seen")
    assert f"slow rank has no verdict: {why}" in report.verdict
    said = (
        f"rank {SLOW} of 16 was not recorded" if taken[0] == "*" else f"rank {SLOW} has no steps and was not analyzed"
    )
    assert said in report.verdict
    assert "analyzed steps of 15 ranks" in report.verdict


OTHERS = [f"groups/rank={rank:05d}" for rank in range(16) if rank != SLOW]
UNMATCHED = "of the step in operations that were not matched across ranks"


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        (["collectives/rank=00000"], "what rank 0 did between operations was not seen"),
        (["regions/rank=00000"], "what rank 0 did between operations was not seen"),
        (OTHERS, UNMATCHED),
    ],
    ids=["a peer's operations", "a peer's phases", "the others' groups"],
)
def test_a_finding_stays_where_what_was_lost_holds_the_replay(lacking, taken, why):
    """A fix of the rank shortens no step there: others wait as long, whatever is fixed."""
    (finding,) = lacking(*taken).findings
    assert (finding.detector, finding.ranks) == ("slow_rank", (SLOW,))
    assert finding.lost_fraction == pytest.approx(0.45, abs=0.02)
    assert finding.gain_fraction is None
    assert finding.gain_why.endswith(why)


@pytest.mark.parametrize(
    ("kind", "parallel", "table"),
    [
        ("input_stall", "", "regions"),
        ("slow_rank", "ddp-nccl", "regions"),
        ("slow_rank", "ddp-rccl", "regions"),
        ("input_stall", "ddp-nccl", "collectives"),
        ("input_stall", "ddp-rccl", "collectives"),
        ("slow_link", "", "regions"),
    ],
)
def test_no_check_of_ranks_calls_those_healthy_that_were_not_seen(own_run, kind, parallel, table):
    run, truth = own_run(kind, parallel)
    for rank in truth.ranks:
        shutil.rmtree(run / f"{table}/rank={rank:05d}")
    report = rankscope.diagnose(rankscope.open(run))
    assert kind in [one.detector for one in (*report.findings, *report.not_checked)]
    assert "no steps and" in report.verdict


@pytest.mark.parametrize("parallel", ["ddp-nccl", "ddp-rccl", "3d-nccl"])
def test_one_rank_is_not_compared(own_run, parallel):
    """NCCL's durations of the others are there, their steps are not."""
    run, truth = own_run("slow_rank", parallel)
    for folder in run.glob("regions/rank=*"):
        if folder.name != f"rank={truth.ranks[0]:05d}":
            shutil.rmtree(folder)
    (why,) = not_checked(rankscope.diagnose(rankscope.open(run)), "slow_rank")
    assert why.startswith("only one rank was seen")


def test_a_rank_whose_operations_were_lost_is_not_slow(own_run):
    """Without its calls what it waits for seems its own time; others of its groups say that it must have called."""
    run, truth = own_run("slow_rank", "pp-nccl")
    assert truth.ranks == (SLOW,)
    shutil.rmtree(run / "collectives/rank=00000")
    report = rankscope.diagnose(rankscope.open(run))
    assert {finding.ranks for finding in report.findings} == {(SLOW,)}
    whys = [gap.why for gap in report.gaps if gap.rank == 0]
    assert whys == ["rank 0 called nothing in 40 steps in which others did: they are not analyzed"]
    assert "rank 0 has no steps and was not analyzed" in report.verdict


@pytest.mark.parametrize(
    ("parallel", "lost"),
    [
        ("pp-nccl", "collectives/rank=00004"),
        ("pp-nccl", "collectives/rank=000[0-3,5-9]*"),
        *(("3d-nccl", f"{table}/rank=00000") for table in ("collectives", "flight_records", "groups", "regions")),
    ],
)
def test_who_waits_for_a_rank_that_was_not_seen_is_not_blamed(own_run, parallel, lost):
    """The slow rank's own records were lost, or all but its own; others of its pipeline come late because of it."""
    run, truth = own_run("slow_rank", parallel)
    taken = [folder for folder in run.glob(lost) if "[" not in lost or folder.name != f"rank={SLOW:05d}"]
    for folder in taken:
        shutil.rmtree(folder)
    assert taken
    report = rankscope.diagnose(rankscope.open(run))
    assert {finding.ranks for finding in report.findings} <= {truth.ranks}
    assert report.findings or not_checked(report, "slow_rank")


@pytest.mark.parametrize("parallel", ["", "ddp-rccl"])
def test_a_node_is_named_though_a_rank_did_not_say_what_it_is(own_run, parallel):
    run, truth = own_run("slow_node", parallel)
    shutil.rmtree(run / f"ranks/rank={truth.ranks[0]:05d}")
    report = rankscope.diagnose(rankscope.open(run))
    (finding,) = (one for one in report.findings if one.detector == "slow_rank")
    assert finding.nodes == truth.nodes
    assert [gap.rank for gap in report.gaps if gap.table == "ranks"] == [truth.ranks[0]]


def test_where_only_hosts_were_seen_the_verdict_says_how_long_devices_wait(simulate):
    """Work is uneven, which needs the devices' time to be found; the hosts run ahead and wait for nothing."""
    path, truth, job = simulate("load_imbalance", 1, "ddp-rccl")
    report = rankscope.diagnose(rankscope.open(path))
    assert not_checked(report, "load_imbalance")
    said = re.search(r"devices wait for peers for ([\d.]+) % of the step in a single operation", report.verdict)
    assert 0.05 <= float(said[1]) / 100 <= truth.cost_fraction
    assert report.status == "amber"
    assert "the hosts' time only" in (printed := terminal.render(report, width=2000))
    assert "what its device does meanwhile is not known" in printed
    assert "no communication seen in flight" not in printed
    (shown,) = view_of(report).of("time")
    bars = waterfall(report, digest.breakdown(report.breakdown), shown.table)
    assert "work only" not in [str(bar.label) for bar in bars]  # it is not known how much of it is work
    healthy = rankscope.diagnose(rankscope.open(write(run(job, healthy_resources(job)), path.parent / "healthy")))
    assert "devices wait" not in healthy.verdict


@pytest.mark.parametrize("seed", [55, 97], ids=["early", "late"])
def test_a_rank_that_lost_records_does_not_keep_the_job_from_being_judged(tmp_path, seed):
    """Its optimizers were lost with them: it counts fewer steps than the others, and what it calls one may be two."""
    log, _ = simulated(Case("clean", "lost records", seed))
    report = rankscope.diagnose(rankscope.open(write(log, tmp_path / "run")))
    assert report.findings == ()
    assert "slow_rank" in [check.detector for check in report.healthy]
    assert report.steps.count >= 0.8 * log.job.steps
    (lost,) = {gap.rank for gap in report.gaps if gap.rank is not None}
    assert f"records of rank {lost} were lost: its steps are numbered by their operations, and 1 step left out" in [
        gap.why for gap in report.gaps
    ]


def test_a_few_of_many_ranks_that_lost_records_are_numbered_as_the_others(tmp_path):
    """Most operations of such pipelines are of other ranks only, and agree: what two steps make was one rank's longer
    step, another rank's each time."""
    job = Job(parallel="pp-nccl", ranks=96, microbatches=4, steps=30, seed=3, lost=0.06)
    report = rankscope.diagnose(rankscope.open(write(run(job, healthy_resources(job)), tmp_path / "run")))
    lost = {gap.rank for gap in report.gaps if "were overwritten" in gap.why}
    assert len(lost) >= 4
    assert {gap.rank for gap in report.gaps if "are numbered by their operations" in gap.why} == lost
    lengths: Counter[int] = Counter()
    for part in report.breakdown:
        lengths[part.rank] += part.ns_per_step
    assert len(lengths) == 96
    assert max(lengths.values()) < 1.03 * min(lengths.values())
    assert report.findings == ()


def test_a_rank_that_lost_too_much_to_be_numbered_is_said_to_be(tmp_path):
    """Of one of 96 ranks every third optimizer is missing as well: it has a third fewer steps than the others."""
    job = Job(parallel="pp-nccl", ranks=96, microbatches=4, steps=30, seed=3, lost=0.06)
    log = run(job, healthy_resources(job))
    optimizers = [region for region in log.regions if region["kind"] == "optimizer" and 16 in region["rank"]]
    for region in optimizers[2::3]:
        region["end_ns"] = np.where(np.asarray(region["rank"]) == 16, np.inf, region["end_ns"])
    report = rankscope.diagnose(rankscope.open(write(log, tmp_path / "run")))
    assert {gap.rank for gap in report.gaps if "may have other numbers" in gap.why} == {16}


def test_ranks_of_which_no_communication_was_recorded_are_not_healthy(own_run):
    """They wait for each other inside what looks like computing."""
    folder, _ = own_run("slow_link", "")
    assert rankscope.diagnose(rankscope.open(folder)).findings[0].detector == "slow_link"
    shutil.rmtree(folder / "collectives")
    report = rankscope.diagnose(rankscope.open(folder))
    unchecked = {check.detector: check.why for check in report.not_checked}
    assert unchecked["slow_link"] == unchecked["slow_rank"] == unchecked["hang"] == "no communication was recorded"
    assert "; slow rank has no verdict: no communication was recorded" in report.verdict


@pytest.mark.long
@pytest.mark.parametrize("lost", ["regions/rank=00009", "collectives/rank=00009", "collectives"])
def test_steps_that_become_longer_do_so_though_who_holds_them_up_was_not_seen(own_run, lost):
    run, truth = own_run("gradual_slowdown", "pp-nccl", seed=29)
    assert truth.ranks == (9,)
    shutil.rmtree(run / lost)
    (finding,) = rankscope.diagnose(rankscope.open(run)).findings
    assert (finding.detector, finding.ranks) == ("gradual_slowdown", ())
    assert finding.lost_ns_per_step == pytest.approx(truth.cost_ns, rel=0.05)
    assert "Steps become longer throughout the run, from 226 ms to 456 ms" in finding.title
