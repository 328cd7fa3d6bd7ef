"""Several ranks or nodes with the same fault: one finding, at what fixing all of them brings."""

from __future__ import annotations

import pytest

import rankscope
from faults import Case, simulated
from record import write
from simulate import Job, healthy_resources, run, step_ns

OF_A_SOCKET = [rank for rank in range(32) if rank % 8 >= 4]


def recorded(folder, slow, factor, parallel="fsdp"):
    """The report, and the true cost: what the mean step takes longer than without them."""
    can = healthy_resources(job := Job(parallel=parallel, ranks=32, steps=40, seed=5))
    without = step_ns(run(job, can))
    can.slowness[:, slow] *= factor
    log = run(job, can)
    return rankscope.diagnose(rankscope.open(write(log, folder / "run"))), step_ns(log) - without


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "moe"])
@pytest.mark.parametrize("slow", [OF_A_SOCKET, [3, 9, 20, 21, 30]], ids=["half", "five"])
def test_ranks_that_are_slow_alike_are_one_finding(slow, parallel, tmp_path):
    report, cost_ns = recorded(tmp_path, slow, 1.3, parallel)
    (finding,) = [finding for finding in report.findings if not finding.caused_by]
    assert (finding.detector, finding.ranks, finding.confidence) == ("slow_rank", tuple(slow), "confirmed")
    assert finding.lost_ns_per_step == pytest.approx(cost_ns, rel=0.2)
    assert finding.fix == "rank:" + ",".join(map(str, slow))
    assert finding.gain_fraction == pytest.approx(cost_ns / report.steps.mean_ns, rel=0.2)


@pytest.mark.parametrize("slow", [OF_A_SOCKET, [3, 20]], ids=["half", "two"])
def test_ranks_that_are_late_alike_by_durations_are_one_finding(slow, tmp_path):
    """Each by itself makes the others wait for no longer than the next one: together they do."""
    report, cost_ns = recorded(tmp_path, slow, 1.3, "ddp-rccl")
    (finding,) = [finding for finding in report.findings if not finding.caused_by]
    assert (finding.detector, finding.ranks) == ("slow_rank", tuple(slow))
    assert " are late: they begin " in finding.title
    assert finding.lost_ns_per_step <= 1.1 * cost_ns  # at least the longest wait of a step: a bound from below


def test_one_that_is_much_slower_than_the_others_is_named_alone(tmp_path):
    can = healthy_resources(job := Job(parallel="fsdp", ranks=32, steps=40, seed=5))
    can.slowness[:, OF_A_SOCKET] *= 1.1
    can.slowness[:, 6] *= 1.5
    report = rankscope.diagnose(rankscope.open(write(run(job, can), tmp_path / "run")))
    first = report.findings[0]
    assert (first.detector, first.ranks) == ("slow_rank", (6,))


def test_a_socket_a_little_slower_is_no_finding(tmp_path):
    assert recorded(tmp_path, OF_A_SOCKET, 1.015)[0].findings == ()


@pytest.mark.parametrize("slow", [(0, 2), (3, 6), (1, 4)])
def test_nodes_with_slow_links_are_one_finding_without_the_node_between_them(slow, tmp_path):
    """In a ring all links of node 1 are slow, too, where nodes 0 and 2 have slow cards."""
    can = healthy_resources(job := Job(parallel="fsdp", ranks=64, steps=40, seed=5))
    without = step_ns(run(job, can))
    can.nic[:, slow] /= 15
    log = run(job, can)
    report = rankscope.diagnose(rankscope.open(write(log, tmp_path / "run")))
    (finding,) = [finding for finding in report.findings if not finding.caused_by]
    assert (finding.detector, finding.nodes, finding.confidence) == ("slow_link", slow, "confirmed")
    assert finding.title.startswith(f"The links of nodes {','.join(map(str, slow))} are slow")
    assert finding.fix == "link:" + ",".join(f"node{node}" for node in slow)
    assert finding.lost_ns_per_step == pytest.approx(step_ns(log) - without, rel=0.1)


def test_the_rank_that_is_last_while_all_wait_for_input_is_no_second_root_cause(tmp_path):
    """On devices the rank without a lead waits for each batch, and the others for it; with input fixed none is late."""
    log, (truth,) = simulated(Case("input_stall", "quiet", 11))
    found = rankscope.diagnose(rankscope.open(write(log, tmp_path / "run"))).findings
    assert [(one.detector, one.ranks) for one in found if one.caused_by is None] == [("input_stall", truth.ranks)]
    assert {(one.detector, one.caused_by) for one in found[1:]} <= {("slow_rank", "input_stall")}
