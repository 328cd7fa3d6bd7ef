"""What detectors say of communication that is slow by itself: runs written by hand, of which every number is known."""

from __future__ import annotations

import random
import re

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.schema import TABLES
from support.by_hand import Tables, not_checked

US, MS, KB, MB = 1_000, 1_000_000, 1_000, 1_000_000
STEPS = 12  # the first 2 are warm-up


class Job:
    """Ranks that do one thing after the other; times are ns, an operation begins when the last of its group is there.

    `groups` are lists of ranks by name. A rank in several groups of a kind calls them by its own.
    """

    def __init__(self, ranks, *, per_node=None, groups=None, speed=None, seed=0):
        self.rows = {name: [] for name in TABLES}
        self.node = {rank: rank // (per_node or ranks) for rank in range(ranks)}
        self.at = dict.fromkeys(range(ranks), 0)
        self.free = {}
        self.calls = {}
        self.random = random.Random(seed)
        self.groups = {name: (number, members) for number, (name, members) in enumerate(groups.items())}
        for rank, node in self.node.items():
            by = {"rank": rank, "node": node, "attempt": 0, "start_ns": 0}
            self.rows["ranks"].append(by | {"local_rank": rank, "world_size": ranks, "device": "cpu"})
            for name, (number, members) in self.groups.items():
                if rank in members:
                    about = {"group_id": number, "name": name, "backend": "gloo", "role": ""}
                    self.rows["groups"].append(by | about | {"members": ",".join(map(str, members))})
        for node in sorted(set(self.node.values())):
            for second in range(40) if speed else ():
                by = {"node": node, "time_ns": second * 100 * MS, "source": "nic", "device": "eth0"}
                self.rows["counters"] += [by | {"name": "speed_bytes_per_s", "value": speed}]
                self.rows["counters"] += [by | {"name": "tx_bytes", "value": second * 1e6}]

    def region(self, rank, kind, start, end):
        span = {"start_ns": start, "end_ns": end, "kind": kind, "name": kind, "thread": 0}
        self.rows["regions"].append({"rank": rank, "node": self.node[rank], "attempt": 0} | span)

    def work(self, kind, ns):
        """All ranks do this for so long; an `optimizer` ends the step."""
        for rank in self.at:
            if kind is not None:
                self.region(rank, kind, self.at[rank], self.at[rank] + ns)
            self.at[rank] += ns

    def reduce(self, names, size, ns, *, op="allreduce", wait=True):
        """An operation in each of these groups that takes `ns`, a few percent more or less; all wait for its end."""
        for name in names:
            number, members = self.groups[name]
            begin = max(max(self.at[rank] for rank in members), self.free.get(name, 0))
            lasts = ns(name) if callable(ns) else ns
            end = self.free[name] = begin + round(lasts * self.random.uniform(0.97, 1.03))
            seq = self.calls[name] = self.calls.get(name, -1) + 1
            for rank in members:
                start = self.at[rank]
                call = {"start_ns": start, "issued_ns": start + 5 * US, "end_ns": end, "group_id": number, "seq": seq}
                what = {"op": op, "dtype": "float32", "is_async": not wait, "peer": -1, "tag": 0, "size_bytes": size}
                by = {"rank": rank, "node": self.node[rank], "attempt": 0, "thread": 0}
                self.rows["collectives"].append(by | call | what)
                self.at[rank] += 5 * US
                if wait:
                    self.region(rank, "wait", self.at[rank], end)
                    self.at[rank] = end

    def join(self):
        """All ranks wait for all that they have sent."""
        for rank in self.at:
            last = max(self.free[name] for name, (_, members) in self.groups.items() if rank in members)
            if last > self.at[rank]:
                self.region(rank, "wait", self.at[rank], last)
                self.at[rank] = last

    def sockets(self, *, rate, limited, window, rtt_ms):
        """Node 0 and 1 send each other so many bytes per busy second, half of the time."""
        for node in (0, 1):
            for tenth in range(40):
                busy = 0.05 * tenth
                values = {"bytes_sent": rate * busy, "busy_s": busy, "rwnd_limited_s": limited * busy}
                values |= {"rtt_s": rtt_ms / 1e3, "min_rtt_s": rtt_ms / 1e3, "window_bytes": window, "retransmits": 0}
                by = {
                    "node": node,
                    "time_ns": tenth * 100 * MS,
                    "source": "tcp",
                    "device": f"rank{node}>10.0.0.{1 - node}",
                }
                self.rows["counters"] += [by | {"name": name, "value": float(v)} for name, v in values.items()]

    def report(self):
        run = {node: {"addresses": [f"10.0.0.{node}"]} for node in set(self.node.values())}
        return diagnose(Trace(paths=("by hand",), source="native", run=run, reader=Tables(self.rows)))


def of(report, detector):
    return [finding for finding in report.findings if finding.detector == detector]


def healthy(report):
    return {check.detector for check in report.healthy}


# ---- small messages

WORLD = {"0": [0, 1, 2, 3]}
ALPHA, PER_BYTE = 300 * US, 0.5  # 300 µs, and 2 GB/s for what all-reduce is given


def takes(size):
    return ALPHA + PER_BYTE * size


def loop_over_parameters(count, *, between=20 * US, inside=None):
    """After backward, for each of `count` layers one all-reduce of 4 kB and one of 400 kB."""
    job = Job(4, groups=WORLD)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.work("backward", 40 * MS)
        for _ in range(count):
            for size in (4 * KB, 400 * KB):
                job.reduce(["0"], size, takes(size))
                job.work(inside, between)
        job.work("optimizer", 5 * MS)
    return job.report()


def test_reducing_each_small_parameter_alone_costs_its_latency():
    """60 of 4 kB take 302 µs each; all at once 300 + 0.5 ns × 240 kB = 420 µs. Saved are 17.7 ms of a step of 116."""
    report = loop_over_parameters(60)
    (finding,) = of(report, "small_messages")
    assert finding.title == "60 small allreduce per step, together 240 kB, take 303 µs each, most of it latency"
    assert finding.lost_ns_per_step == pytest.approx(60 * 302 * US - 420 * US, rel=0.02)
    assert finding.gain_fraction == pytest.approx(finding.lost_fraction)
    assert finding.where == "outside of forward and backward"
    assert finding.advice.startswith("Send them as 1 operation per step")
    assert finding.groups == ("0",)
    assert [row.rank for row in finding.evidence] == [0, 1, 2, 3]


def test_one_tiny_operation_does_not_hide_that_small_ones_take_their_latency():
    """96 of 96 bytes take 4.2 ms each, one of 4 bytes 0.5 ms, so that no line fits: 399 ms of 516 are saved."""
    job = Job(4, groups=WORLD)
    for _ in range(STEPS):
        job.work("forward", 2 * MS)
        job.work("backward", 2 * MS)
        for size, ns in [(4, 0.5 * MS), *[(96, 4.2 * MS)] * 96, *[(2304, 4.2 * MS)] * 24]:
            job.reduce(["0"], size, ns)
            job.work(None, 20 * US)
        job.work("optimizer", 5 * MS)
    (finding,) = of(job.report(), "small_messages")
    assert finding.title == "97 small allreduce per step, together 9.22 kB, take 4.20 ms each, most of it latency"
    assert finding.lost_ns_per_step == pytest.approx(0.5 * MS + 96 * 4.2 * MS - 4.8 * MS, rel=0.02)


def test_up_to_a_kilobyte_is_latency_whatever_the_line_says():
    """n½ is 1 kB by 300 µs and 0.3 µs a byte; 60 of 500 bytes take 450 µs each, together 300 µs + 60 × 150 µs."""
    job = Job(4, groups=WORLD)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.work("backward", 20 * MS)
        for size in [500] * 60 + [5 * KB] * 10:
            job.reduce(["0"], size, 300 * US + 0.3 * US * size)
            job.work(None, 20 * US)
        job.work("optimizer", 5 * MS)
    (finding,) = of(job.report(), "small_messages")
    assert finding.lost_ns_per_step == pytest.approx(60 * 450 * US - 9.3 * MS, rel=0.1)


def test_few_small_operations_are_healthy():
    assert "small_messages" in healthy(loop_over_parameters(6))


def test_operations_with_computation_in_between_cannot_be_fused():
    """As in tensor parallelism: each needs what was computed with the one before."""
    assert "small_messages" in healthy(loop_over_parameters(60, between=60 * US, inside="forward"))


def test_scalars_are_latency_on_every_network_and_equal_larger_sizes_are_not_checked():
    for size, said in ((8, True), (40 * KB, False)):
        job = Job(4, groups=WORLD)
        for _ in range(STEPS):
            job.work("forward", 20 * MS)
            for _ in range(40):
                job.reduce(["0"], size, ALPHA)
                job.work(None, 10 * US)
            job.work("optimizer", 5 * MS)
        report = job.report()
        assert len(of(report, "small_messages")) == said
        assert ("hardly differ" in not_checked(report).get("small_messages", "")) != said


@pytest.mark.parametrize(("buckets", "found"), [([1, 25, 25, 25], 0), ([0.02] * 250 + [8], 1)], ids=["25 MB", "20 kB"])
def test_default_buckets_are_healthy_and_tiny_ones_are_not(buckets, found):
    """Sent during backward, at 10 GB/s, and waited for at its end. 250 tiny ones take 75 ms, of which 40 are hidden."""
    job = Job(4, groups=WORLD)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        start = dict(job.at)
        for mb in buckets:
            job.at = {rank: at + 40 * MS // len(buckets) for rank, at in job.at.items()}
            job.reduce(["0"], round(mb * MB), ALPHA + 0.1 * mb * MB, wait=False)
        job.join()
        for rank, begin in start.items():
            job.region(rank, "backward", begin, job.at[rank])
        job.work("optimizer", 5 * MS)
    report = job.report()
    findings = of(report, "small_messages")
    assert len(findings) == found
    assert found or "small_messages" in {*healthy(report), *not_checked(report)}


# ---- low bandwidth

TENSOR = {f"tp{node}": [2 * node, 2 * node + 1] for node in range(4)}


def split_layers(slow=None, *, factor=1.0, groups=TENSOR):
    """Four nodes of two ranks; in each step four all-reduces of 8 MB on every node, of 8 ms, where no rank computes."""
    job = Job(2 * len(groups), per_node=2, groups=groups)
    for _ in range(STEPS):
        for _ in range(4):
            job.work("forward", 20 * MS)
            job.reduce(groups, 8 * MB, lambda name: 8 * MS * (factor if name == slow else 1))
        job.work("optimizer", 5 * MS)
    return job.report()


def test_group_that_is_slower_than_others_that_do_the_same_is_named():
    """8 MB among 2 ranks in 8 ms are a busbw of 1 GB/s. Group tp2 takes 24 ms: 64 of 180 ms would be saved."""
    (finding,) = of(split_layers("tp2", factor=3), "low_bandwidth")
    assert finding.title.startswith("allreduce of 8 MB in group tp2 (ranks 4,5) runs at a bus bandwidth of 33")
    assert finding.title.endswith("in other groups at 1 GB/s") or "in other groups at 99" in finding.title
    assert (finding.ranks, finding.groups, finding.where) == ((4, 5), ("tp2",), "group tp2")
    assert finding.lost_ns_per_step == pytest.approx(64 * MS, rel=0.03)
    assert {row.rank for row in finding.evidence} == {4, 5}


@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_groups_that_differ_little_are_healthy(factor):
    report = split_layers("tp2", factor=factor)
    assert of(report, "low_bandwidth") == []
    assert "low_bandwidth" in healthy(report)


def test_of_two_groups_that_do_the_same_the_slower_one_is_named():
    """The faster one shows what is possible: 24 against 8 ms."""
    (finding,) = of(
        split_layers("tp1", factor=3, groups={name: TENSOR[name] for name in ("tp0", "tp1")}), "low_bandwidth"
    )
    assert (finding.ranks, finding.groups) == ((2, 3), ("tp1",))


def between_nodes(rate, *, speed=12.5e9):
    """Two nodes of two ranks that reduce 75 MB after backward, at so many bytes per second of a ring."""
    job = Job(4, per_node=2, groups=WORLD, speed=speed)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.work("backward", 40 * MS)
        job.reduce(["0"], 75 * MB, 1.5 * 75 * MB / rate * 1e9)
        job.work("optimizer", 5 * MS)
    return job.report()


def test_network_that_is_far_below_its_interfaces_is_reported_with_both_speeds():
    """1.5 × 75 MB in 90 ms are 1.25 GB/s of 12.5: at 80 % of that it would be 11.25 ms."""
    (finding,) = of(between_nodes(1.25e9), "low_bandwidth")
    assert finding.title.startswith("Collectives between nodes (allreduce) send 1.25 GB/s, 10.0 % of the 12.5 GB/s of ")
    assert finding.lost_ns_per_step == pytest.approx((90 - 11.25) * MS, rel=0.03)


def test_network_near_its_interfaces_is_healthy_and_one_of_unknown_speed_is_not_checked():
    assert "low_bandwidth" in healthy(between_nodes(9e9))
    assert "speed of the links was not recorded" in not_checked(between_nodes(1.25e9, speed=None))["low_bandwidth"]


def test_slow_communication_that_is_hidden_costs_nothing():
    """The same 90 ms, of which backward hides all but 2 ms of a step of 120."""
    job = Job(4, per_node=2, groups=WORLD, speed=12.5e9)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.reduce(["0"], 75 * MB, 90 * MS, wait=False)
        job.work("backward", 90 * MS)
        job.join()
        job.work("optimizer", 5 * MS)
    assert "low_bandwidth" in healthy(job.report())


def congested(factor, *, steps=42, first=20, end=34):
    """Two nodes of two ranks reduce 75 MB after backward in 45 ms; from step 20 to 33 it takes longer."""
    job = Job(4, per_node=2, groups=WORLD)
    for step in range(steps):
        job.work("forward", 20 * MS)
        job.work("backward", 40 * MS)
        job.reduce(["0"], 75 * MB, 45 * MS * (factor if first <= step < end else 1))
        job.work("optimizer", 5 * MS)
    return job.report()


def test_steps_in_which_the_network_is_slower_are_the_cause_of_their_being_longer():
    """14 of 40 analyzed steps reduce in 135 ms instead of 45: 31.5 ms per step, and no slowdown that is unexplained."""
    report = congested(3)
    (finding,) = of(report, "low_bandwidth")
    assert finding.title.startswith("From step 20 to 33 transfers take 3.0 times as long as in the others: ")
    assert re.search(r"bus bandwidth of 8\d\d MB/s, else at 2\.5\d? GB/s", finding.title)
    assert finding.steps == tuple(range(20, 34))
    assert finding.lost_ns_per_step == pytest.approx(14 * 90 / 40 * MS, rel=0.05)
    assert [f.detector for f in report.findings if f.caused_by is None] == ["low_bandwidth"]


def test_a_network_a_little_slower_for_a_while_is_not_named():
    assert of(congested(1.3), "low_bandwidth") == []


# ---- layers that do not fit each other


def long_distance(*, limited=0.95, window=6 * MB, rtt_ms=20, speed=1.25e9):
    """Two nodes far apart that reduce 75 MB after backward, at 300 MB/s."""
    job = Job(4, per_node=2, groups=WORLD, speed=speed)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.work("backward", 40 * MS)
        job.reduce(["0"], 75 * MB, 375 * MS)
        job.work("optimizer", 5 * MS)
    job.sockets(rate=window / rtt_ms * 1e3 * 0.97, limited=limited, window=window, rtt_ms=rtt_ms)
    return job.report()


def test_window_smaller_than_bandwidth_times_round_trip_is_named_with_what_it_should_be():
    """6 MB per 20 ms are 300 MB/s of 1.25 GB/s; the socket sends 291. Of 375 ms 95 % × (1 - 291/1000) are lost."""
    report = long_distance()
    (finding,) = of(report, "tcp_window_limit")
    assert finding.title == (
        "TCP's window is too small from node 0 to node 1: 6 MB per round trip of 20.0 ms allow 300 MB/s per socket, "
        "and are the limit 95.0 % of the time"
    )
    assert "to 25 MB (bandwidth × round trip)" in finding.advice
    assert finding.lost_ns_per_step == pytest.approx(0.95 * (1 - 0.291) * 375 * MS, rel=0.02)
    assert finding.nodes == (0, 1)


def test_sockets_that_the_window_does_not_limit_are_healthy():
    assert "tcp_window_limit" in healthy(long_distance(limited=0.2))


def test_receiver_that_reads_too_slowly_has_window_enough():
    """The window was the limit, but 10 times what is sent had room in it."""
    job = Job(4, per_node=2, groups=WORLD, speed=1.25e9)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.reduce(["0"], 75 * MB, 375 * MS)
        job.work("optimizer", 5 * MS)
    job.sockets(rate=300e6, limited=0.9, window=60 * MB, rtt_ms=20)
    assert "tcp_window_limit" in healthy(job.report())


def test_without_the_interfaces_speed_the_window_is_named_and_no_gain_predicted():
    """It was the limit for 95 % of 375 ms; what a larger one brings depends on the link."""
    (finding,) = of(long_distance(speed=None), "tcp_window_limit")
    assert finding.lost_ns_per_step == pytest.approx(0.95 * 375 * MS, rel=0.02)
    assert (finding.gain_fraction, finding.gain_why) == (None, "the speed of the network interface was not recorded")


# ---- two levels

SHARDS = {f"shard{node}": [2 * node, 2 * node + 1] for node in range(2)}
REPLICAS = {f"replica{local}": [local, 2 + local] for local in range(2)}


def hybrid(*, size=64 * MB, left=32 * MB, at_once=False):
    """Two nodes of two ranks: a reduce-scatter of 20 ms within nodes, then an all-reduce of 30 ms between them."""
    job = Job(4, per_node=2, groups=SHARDS | REPLICAS)
    for _ in range(STEPS):
        job.work("forward", 30 * MS)
        job.work("backward", 60 * MS)
        job.reduce(SHARDS, size, 20 * MS, op="reduce_scatter_base", wait=not at_once)
        job.reduce(REPLICAS, left, 30 * MS, wait=not at_once)
        job.join()
        job.work("optimizer", 10 * MS)
    return job.report()


def test_levels_that_are_not_pipelined_get_what_pieces_would_hide():
    """Of 20 + 30 ms, four pieces would hide 15."""
    (finding,) = of(hybrid(), "unpipelined_hierarchy")
    assert re.sub(r"\d\d\.\d ms", "x", finding.title) == (
        "Hierarchical collective is not pipelined: ranks wait x per step while only reduce_scatter_base "
        "within nodes transfers, and x while only allreduce between nodes does"
    )
    assert finding.lost_ns_per_step == pytest.approx(15 * MS, rel=0.02)
    assert finding.groups == ("replica0", "replica1", "shard0", "shard1")


def test_levels_that_transfer_at_once_are_healthy():
    assert "unpipelined_hierarchy" in healthy(hybrid(at_once=True))


def test_groups_that_reduce_other_things_are_no_levels():
    """Sequence parallelism within a node and data parallelism between nodes: the bytes do not fit."""
    assert "no collectives of two levels" in not_checked(hybrid(left=20 * MB))["unpipelined_hierarchy"]


def test_where_ranks_are_missing_the_speed_of_transfers_is_not_judged():
    """It is not known how much of the time rank 3, whose rows are missing, kept the others waiting."""
    job = Job(4, groups=WORLD)
    for _ in range(STEPS):
        job.work("forward", 20 * MS)
        job.reduce(["0"], 75 * MB, 50 * MS)
        job.work("optimizer", 5 * MS)
    job.rows = {name: [row for row in rows if row.get("rank") != 3] for name, rows in job.rows.items()}
    unknown = not_checked(job.report())
    for detector in ("small_messages", "low_bandwidth", "unpipelined_hierarchy"):
        assert "cannot be split into waiting and transfer" in unknown[detector]


@pytest.mark.parametrize("checked", ["low_bandwidth", "small_messages"])
def test_transfers_of_unknown_size_are_not_judged_where_they_cost_time(checked):
    """Of a step of 15 ms 5 ms are transfer: that is much, and without its bytes it is not known whether it is slow."""

    def job(size, transfer_ns):
        job = Job(2, groups={"all": [0, 1]})
        for _ in range(STEPS):
            job.work("forward", 3 * MS)
            job.work("backward", 6 * MS)
            job.reduce(["all"], size, transfer_ns)
            job.work("optimizer", 1 * MS)
        return job.report()

    why = not_checked(job(None, 5 * MS))[checked]
    assert why.startswith("allreduce blocks the ranks for 3")
    assert why.endswith("% of the step, and how many bytes it moves was not recorded")
    assert checked in healthy(job(None, MS // 10))


def test_the_groups_table_holds_what_each_group_exposes():
    """Per step 5 ms of transfers in the group `mesh_tp`, 1 ms in `dp`, each 3 % more or less; no rank is late."""
    job = Job(2, groups={"mesh_tp": [0, 1], "dp": [0, 1]})
    for _ in range(STEPS):
        job.work("forward", 3 * MS)
        job.reduce(["mesh_tp"], 4 * MB, 5 * MS)
        job.work("backward", 6 * MS)
        job.reduce(["dp"], MB, 1 * MS)
        job.work("optimizer", 1 * MS)
    groups = job.report().groups
    assert [(group.group, group.kind, group.op) for group in groups] == [
        ("mesh_tp", "tensor", "allreduce"),
        ("dp", "data", "allreduce"),
    ]
    assert [group.exposed_ns / MS for group in groups] == pytest.approx([5, 1], rel=0.03)
    assert {group.wait_ns + group.unattributed_ns + group.overlapped_ns for group in groups} == {0}
