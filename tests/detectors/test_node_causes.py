"""Why a rank or a node is slow, where the nodes' counters show it: runs whose clocks and counters are written down."""

from __future__ import annotations

import pytest

import rankscope
from support.command_line import MS
from support.counters import EVERY_MS, IDLE, POWER_CAP, READINGS, THERMAL, gpus, sampled
from support.ddp_run import record

SLOW = {rank: 70 if rank == 3 else 40 for rank in range(4)}  # rank 3 takes 30 ms longer than the others' 40


def reasons_of(report):
    return {check.detector: check.why for check in report.not_checked}


def test_throttled_gpu_is_the_cause_and_its_slow_rank_follows_from_it(tmp_path):
    """Rank 3 takes 80 ms a step instead of 50, at 1.2 GHz instead of 1.8: a third of its 80 ms is explained, 26.7."""
    report = sampled(record(tmp_path, SLOW), gpus([1.8, 1.8, 1.8, 1.2], {3: THERMAL}))
    cause, slow = report.findings
    assert (cause.detector, cause.ranks, cause.caused_by, cause.fix) == ("throttling", (3,), None, "rank:3")
    assert cause.lost_ns_per_step == pytest.approx(80 * MS / 3, rel=1e-6)
    assert (slow.detector, slow.caused_by, slow.lost_ns_per_step) == ("slow_rank", "throttling", 30 * MS)
    assert cause.title == (
        "The GPU of rank 3 is throttled to 66.7 % of the others' clock (thermal slowdown by the hardware), "
        "which makes it slow"
    )
    assert cause.where == "gpu3 of node 0"
    assert cause.gain_fraction == pytest.approx(cause.lost_fraction)
    assert cause.evidence[0].note == "gpu3: 1.20 GHz"


def test_throttling_that_explains_little_of_what_a_rank_takes_longer_is_its_own_finding(tmp_path):
    """1.6 of 1.8 GHz: a ninth of 80 ms, 8.9 of the 30 that rank 3 takes longer."""
    report = sampled(record(tmp_path, SLOW), gpus([1.8, 1.8, 1.8, 1.6], {3: POWER_CAP}))
    assert [(f.detector, f.caused_by) for f in report.findings] == [("slow_rank", None), ("throttling", None)]
    assert report.findings[1].lost_ns_per_step == pytest.approx(80 * MS / 9, rel=1e-6)


def test_node_whose_gpus_are_all_throttled_is_one_cause(tmp_path):
    slow = {rank: 70 if rank in (2, 3) else 40 for rank in range(8)}
    folder = record(tmp_path, slow, ranks_per_node=2)
    clocks = {node: 1.0 if node == 1 else 1.8 for node in range(4)}
    readings = {}
    for node, ghz in clocks.items():
        readings |= gpus([ghz, ghz], dict.fromkeys((0, 1), POWER_CAP) if node == 1 else {}, node=node)
    cause, slow = sampled(folder, readings).findings
    assert (cause.detector, cause.nodes, cause.ranks, cause.fix) == ("throttling", (1,), (2, 3), "node:1")
    assert (slow.detector, slow.caused_by) == ("slow_rank", "throttling")


@pytest.mark.parametrize(
    ("before", "readings"),
    [
        (SLOW, gpus([1.8, 1.8, 1.8, 0.3], {3: IDLE}, busy={3: 0.0})),
        (SLOW, gpus([1.8, 1.8, 1.8, [0.3, 1.8]], {3: [IDLE, 0]}, busy={3: [0.1, 0.9]})),
        (SLOW, gpus([1.8, 1.8, 1.8, 1.2], {})),
        (SLOW, gpus([1.2, 1.2, 1.2, 1.2], dict.fromkeys(range(4), POWER_CAP))),
        (SLOW, gpus([1.8, 1.8, 1.8, 1.75], {3: POWER_CAP})),
        (dict.fromkeys(range(4), 40), gpus([1.8, 1.8, 1.8, 1.2], {3: THERMAL})),
    ],
    ids=["idle", "idle between", "no reason", "all alike", "by 3 %", "none is slow"],
)
def test_low_clocks_without_a_loss_or_a_reason_are_silent(before, readings, tmp_path):
    report = sampled(record(tmp_path, before), readings)
    assert "throttling" not in {finding.detector for finding in report.findings}


def test_slow_ranks_gpu_that_was_not_read_is_not_healthy(tmp_path):
    """The driver of rank 3's GPU hangs from the start, or after a quarter of a second."""
    of_others = gpus([1.8, 1.8, 1.8, 1.8], {})
    for name in ("never", "at first"):
        readings = {key: value for key, value in of_others.items() if key[3] != "gpu3"}
        folder = record(tmp_path / name, SLOW)
        if name == "at first":
            lost = [None] * (READINGS - 5)
            readings |= {key: [of_others[key]] * 5 + lost for key in of_others if key[3] == "gpu3"}
        why = reasons_of(sampled(folder, readings))["throttling"]
        assert why == "rank 3 is slow, and the GPU's clock was not read there, or not all the time"
    healthy = sampled(record(tmp_path / "all", SLOW), of_others)
    assert "throttling" in {check.detector for check in healthy.healthy}


def test_slow_ranks_host_that_was_not_read_is_not_healthy(tmp_path):
    readings = hosts(dict.fromkeys(range(3), 0.02), cpu_steal_s={0: 0.0})
    why = reasons_of(sampled(record(tmp_path / "none", SLOW), readings))["noisy_host"]
    assert why == "rank 3 is slow, and the host's counters were not read there, or not all the time"
    healthy = sampled(record(tmp_path / "all", SLOW), hosts(dict.fromkeys(range(4), 0.02)))
    assert "noisy_host" in {check.detector for check in healthy.healthy}


def test_what_was_not_read_is_reported(tmp_path):
    assert "no counters of the nodes were recorded" in reasons_of(_plain(tmp_path / "none"))["throttling"]
    on_cpu = sampled(record(tmp_path / "cpu", SLOW), {(0, "host", "load_1min", ""): 1})
    assert "not recorded which GPU a rank uses" in reasons_of(on_cpu)["throttling"]
    unknown = {key: value for key, value in gpus([1.8, 1.2], {1: THERMAL}).items() if key[2] != "clock_event_reasons"}
    old = reasons_of(sampled(record(tmp_path / "old", SLOW), unknown))
    assert "clock_event_reasons was not recorded" in old["throttling"]


def _plain(folder):
    return rankscope.diagnose(rankscope.open(record(folder, SLOW)))


def hosts(queued, *, used=0.6, busy=4.0, ranks_per_node=8, **rates):
    """Readings of the hosts: what each rank's main thread queues and its process uses, and `rates` by node."""
    found = {}
    for rank, rate in queued.items():
        node, cpus = rank // ranks_per_node, used[rank] if isinstance(used, dict) else used
        found[node, "host", "main_thread_queued_s", f"rank{rank}"] = growing(rate)
        found[node, "host", "cpu_s", f"rank{rank}"] = growing(cpus)
        found[node, "host", "cpu_busy_s", ""] = growing(busy)
        found |= {(node, "host", name, ""): growing(of.get(node, 0)) for name, of in rates.items()}
    return found


def growing(rate):
    return [index * EVERY_MS / 1000 * rate for index in range(READINGS)]


def test_rank_whose_main_thread_gets_no_processor_is_slow_for_that(tmp_path):
    """30 % of each step of 90 ms, of which it would queue 2 % like the others: 25.2 of the 30 ms that it is slow."""
    report = sampled(record(tmp_path, SLOW), hosts({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.3}))
    cause, slow = report.findings
    assert (cause.detector, cause.ranks, cause.where, cause.fix) == ("noisy_host", (3,), "node 0", "rank:3")
    assert cause.lost_ns_per_step == pytest.approx(25.2 * MS, rel=1e-6)
    assert (slow.detector, slow.caused_by) == ("slow_rank", "noisy_host")
    # 4 processors busy, of which the four ranks use 0.6 each
    assert cause.title == (
        "Rank 3 loses 25.2 ms per step without a processor: "
        "processes that are no ranks, or are started by them, keep 1.6 processors of the node busy"
    )


def test_limit_of_a_control_group_is_named(tmp_path):
    readings = hosts({0: 0.02, 1: 0.02, 2: 0.02, 3: 0.3})
    readings[0, "host", "cgroup_throttled_s", "rank3"] = growing(0.25)
    (cause, _) = sampled(record(tmp_path, SLOW), readings).findings
    assert cause.title.endswith("its control group is throttled 25.0 % of the time")
    assert cause.advice.startswith("Raise the group's CPU limit")


@pytest.mark.parametrize(
    ("rates", "lost_ms", "said"),
    [
        # 0.8 of the 2.0 processors that were wanted, of 80 ms of own work
        ({"cpu_steal_s": {1: 0.8}}, 30, "the hypervisor gives 40.0 % of its processors' time to others"),
        ({"memory_stalled_s": {1: 0.3}}, 27, "the node waits for memory 30.0 % of the time"),
    ],
    ids=["steal", "memory"],
)
def test_what_a_node_takes_from_its_ranks_explains_why_it_is_slow(rates, lost_ms, said, tmp_path):
    folder = record(tmp_path, {rank: 70 if rank in (2, 3) else 40 for rank in range(8)}, ranks_per_node=2)
    readings = hosts(dict.fromkeys(range(8), 0.02), busy=1.2, ranks_per_node=2, **rates)
    cause, slow = sampled(folder, readings).findings
    assert (cause.detector, cause.nodes, cause.ranks, cause.fix) == ("noisy_host", (1,), (2, 3), "node:1")
    assert cause.lost_ns_per_step == pytest.approx(lost_ms * MS, rel=1e-4)
    assert cause.title.endswith(said)
    assert slow.caused_by == "noisy_host"


@pytest.mark.parametrize(
    ("before", "readings"),
    [
        (SLOW, hosts(dict.fromkeys(range(4), 0.3))),
        (SLOW, hosts({0: 0.1, 1: 0.1, 2: 0.1, 3: 0.3}, used={0: 0.3, 1: 0.3, 2: 0.3, 3: 0.9})),
        (SLOW, hosts({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.15})),
        (SLOW, hosts(dict.fromkeys(range(4), 0.02), cpu_steal_s={0: 2.0}, memory_stalled_s={0: 0.5})),
        (dict.fromkeys(range(4), 40), hosts({0: 0.0, 1: 0.0, 2: 0.0, 3: 0.4})),
    ],
    ids=["all alike", "as much as it computes more", "13.5 of 30 ms", "the only node", "none is slow"],
)
def test_host_that_does_not_explain_a_slow_rank_is_silent(before, readings, tmp_path):
    report = sampled(record(tmp_path, before), readings)
    assert "noisy_host" not in {finding.detector for finding in report.findings}


def test_hosts_that_were_not_read_are_not_checked(tmp_path):
    assert "no counters of the nodes" in reasons_of(_plain(tmp_path / "none"))["noisy_host"]
    old = sampled(record(tmp_path / "old", SLOW), {(0, "host", "load_1min", ""): 1})
    assert "no counter of other load on a host was read twice" in reasons_of(old)["noisy_host"]
