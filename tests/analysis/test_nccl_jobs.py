"""Jobs on GPUs as they are recorded: no end of any collective, but how long each took on the device, by NCCL."""

from __future__ import annotations

import random

import polars as pl
import pytest

import rankscope
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.collectors.schema import DTYPES, NCCL_EVENTS, OPS, REGION_KINDS, TABLES
from support.by_hand import Tables, not_checked
from support.run_folder import RANK_ROW, write, write_run

US, MS, MB = 1_000, 1_000_000, 1_000_000
STEPS = 14  # the first 2 are warm-up
FORWARD, BACKWARD, OPTIMIZER = 40 * MS, 80 * MS, 5 * MS


class Job:
    """Training; times are ns. Hosts run ahead, and their steps are as long as the devices'.

    Each bucket of a step is ready at the same time on all ranks, but for `late(rank, step)`, by which a rank's device
    is late with its backward. A bucket is reduced in all `groups`; in each the operations queue on a stream, begin when
    the last rank is there and take `takes(group)`. Those within a node are waited for, as all are with `late_each`.
    """

    def __init__(self, ranks=8, per_node=8, *, groups=None, buckets=4, late=None, takes=lambda group: 6 * MS, **more):
        self.rows = {name: [] for name in TABLES}
        self.at_once = "late_each" in more  # all is in forward and waits for each operation, to which ranks are late
        self.waits_for_all = self.at_once or "waits_for_all" in more
        self.late_each = more.get("late_each")
        self.ranks, self.buckets = range(ranks), buckets
        self.node = {rank: rank // per_node for rank in self.ranks}
        self.groups = dict(enumerate((groups or {"0": list(self.ranks)}).items()))
        self.size = more.get("size", 25 * MB)
        self.random = random.Random(more.get("seed", 0))
        self.wire = more.get("wire")  # ns in which the network has the data of one operation, by rank and peer
        self.number, self.calls = dict.fromkeys(self.ranks, 0), dict.fromkeys(self.ranks, 0)
        for rank in self.ranks:
            by = self.by(rank) | {"start_ns": 0}
            self.rows["ranks"].append(by | {"local_rank": rank % per_node, "world_size": ranks, "device": "H100"})
            for number, (name, members) in self.groups.items():
                if rank in members:
                    about = {"group_id": number, "name": name, "backend": "nccl", "role": ""}
                    self.rows["groups"].append(by | about | {"members": ",".join(map(str, members))})
        at = 0
        for step in range(STEPS):
            at = self.step(step, at, late or (lambda rank, step: 0), takes)

    def by(self, rank):
        return {"rank": rank, "node": self.node[rank], "attempt": 0}

    def region(self, rank, kind, start, end):
        span = {"start_ns": start, "end_ns": end, "kind": kind, "name": kind, "thread": 0}
        self.rows["regions"].append(self.by(rank) | span)

    def node_of(self, members):
        return {self.node[rank] for rank in members}

    def step(self, step, at, late, takes):
        begun = {r: at + FORWARD + self.random.uniform(0, 0.4 * MS) + late(r, step) for r in self.ranks}
        free, held = dict.fromkeys(self.groups, 0), dict.fromkeys(self.ranks, at)
        computed = {rank: begun[rank] + BACKWARD for rank in self.ranks}
        for bucket in range(self.buckets):
            for number, (name, members) in self.groups.items():
                ready = {r: max(begun[r] + BACKWARD * (bucket + 1) / self.buckets, held[r]) for r in members}
                if self.at_once:
                    ready = {r: held[r] + BACKWARD / self.buckets + self.late_each(r, step) for r in members}
                begin = {r: max(ready[r], free[number]) for r in members}
                lasts = takes(name) * self.random.uniform(0.98, 1.02)
                end = free[number] = max(begin.values()) + lasts
                for rank in members:
                    self.operation(rank, number, step, bucket, at, end - begin[rank])
                    self.proxies(rank, number, at, begin, lasts)
                    held[rank] = end if self.waits_for_all or len(self.node_of(members)) == 1 else held[rank]
        done = round(max(*held.values(), *free.values(), *computed.values()) + OPTIMIZER)
        for rank in self.ranks:
            self.region(rank, "forward", at, at + 10 * MS)
            self.region(rank, "backward", at + 10 * MS, at + 20 * MS)
            self.region(rank, "optimizer", done - MS, done)
        return done

    def operation(self, rank, group, step, bucket, at, lasts):
        """The host calls it early in the step."""
        start = at + (1 if self.at_once else 11) * MS + (bucket * len(self.groups) + group) * 100 * US
        self.number[rank] += 1
        call = {"start_ns": start, "issued_ns": start + 50 * US, "end_ns": None, "device_start_ns": None}
        what = {"op": "allreduce", "dtype": "bfloat16", "is_async": True, "peer": -1, "tag": 0, "thread": 65535}
        seq = step * self.buckets + bucket
        row = {"group_id": group, "seq": seq, "size_bytes": self.size, "number": self.number[rank]}
        self.rows["collectives"].append(self.by(rank) | call | what | row)
        record = {"start_ns": start + 20 * US, "record": self.number[rank] - 1, "group": self.groups[group][0]}
        record |= {"seq": seq + 1, "is_p2p": False, "name": "nccl:all_reduce", "duration_ns": round(lasts)}
        self.rows["flight_records"].append(self.by(rank) | record)

    def proxies(self, rank, group, at, begin, lasts):
        """One channel: a ring, of which the plugin records what goes to other nodes and comes from there."""
        if self.wire is None:
            return
        _, members = self.groups[group]
        self.calls[rank] += 1
        place = members.index(rank)
        by = self.by(rank) | {"start_ns": at + 11 * MS, "call": self.calls[rank]}
        about = {"communicator": group, "nccl_rank": place, "nccl_size": len(members), "op": "allreduce", "peer": -1}
        self.rows["nccl_calls"].append(by | about | {"size_bytes": self.size, "channels": 1})
        for event, step in (("send", 1), ("recv", -1)):
            other = (place + step) % len(members)
            peer = members[other]
            if self.node[peer] == self.node[rank]:
                continue
            none = dict.fromkeys(("gpu_wait_ns", "peer_wait_ns", "network_wait_ns", "flush_wait_ns"), 0)
            waits = {"network_wait_ns": self.wire(rank, peer)}
            if event == "recv":  # what its peer sent early lies there until the kernel begins
                early = begin[rank] - min(begin.values())
                waits = {"gpu_wait_ns": early, "network_wait_ns": max(begin.values()) - begin[rank] + lasts}
            end = by["start_ns"] + 30 * MS
            what = {"event": event, "channel": 0, "peer": other, "size_bytes": self.size, "end_ns": end}
            self.rows["nccl_events"].append(by | none | what | {k: round(v) for k, v in waits.items()})

    def write(self, root):
        """As the agents write it: one folder of files."""
        codes = {"kind": REGION_KINDS, "op": OPS, "dtype": DTYPES, "event": NCCL_EVENTS}
        for rank in self.ranks:
            for name in ("groups", "regions", "collectives", "flight_records", "nccl_calls", "nccl_events"):
                mine = [row for row in self.rows[name] if row["rank"] == rank]
                named = [{k: codes[k].index(v) if k in codes else v for k, v in row.items()} for row in mine]
                text = {} if name in ("groups", "flight_records") else {"name_id": 1, "algorithm": 2, "protocol": 3}
                write(root, name, f"rank={rank}", [text | row for row in named])
            write(root, "ranks", f"rank={rank}", [RANK_ROW | {"world_size": len(self.ranks), "node": self.node[rank]}])
            write(root, "strings", f"rank={rank}", [{"name_id": 1, "name": "train"}])
        for node in set(self.node.values()):
            write_run(root, node)
        return root

    def trace(self):
        return Trace(paths=("by hand",), source="native", run={}, reader=Tables(self.rows))

    def report(self):
        return diagnose(self.trace())


def late_by(ns, *ranks):
    return lambda rank, step: ns if rank in ranks else 0


def found(report):
    return [(f.detector, f.ranks, f.nodes) for f in report.findings]


def test_wait_and_transfer_of_an_operation_come_from_durations():
    """Rank 1 begins its one bucket 20 ms late and does not wait; 6 ms are transfer. When that was is not known."""
    job = Job(4, buckets=1, late=late_by(20 * MS, 1))
    rows = build_timeline(job.trace()).collectives
    assert rows["instance_id"].null_count() == 0
    assert rows.filter(rank=1)["wait_ns"].to_list() == [0] * STEPS
    assert rows.filter(rank=0)["wait_ns"].mean() == pytest.approx(20 * MS, rel=0.05)
    assert rows["transfer_ns"].mean() == pytest.approx(6 * MS, rel=0.05)
    assert rows.filter("is_last")["rank"].unique().to_list() == [1]
    assert rows["arrival_spread_ns"].null_count() == len(rows)


def test_healthy_job_has_no_finding_and_slow_rank_was_checked():
    for ranks in (8, 16):
        report = Job(ranks).report()
        assert report.findings == ()
        assert "slow_rank" in {check.detector for check in report.healthy}


def test_rank_that_is_late_once_a_step_costs_what_the_others_wait():
    report = Job(16, buckets=1, late=late_by(20 * MS, 5)).report()
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.fix) == ("slow_rank", (5,), None)
    assert finding.lost_ns_per_step == pytest.approx(20 * MS, rel=0.05)
    assert finding.title.startswith("Rank 5 is late: it begins 12 of 12 collectives last, at a cost of ")
    assert finding.gain_fraction is None


def test_lateness_in_each_of_several_operations_costs_between_the_longest_and_their_sum():
    """Buckets are ready every 20 ms: in the first the others wait 20 ms, in the next three 14, as they queue 6 ms."""
    report = Job(16, late=late_by(20 * MS, 5)).report()
    (finding,) = report.findings
    assert finding.lost_ns_per_step == pytest.approx(20 * MS, rel=0.05)
    assert "20.0 to 6" in finding.title or "19." in finding.title
    assert sum(w.caused_ns for w in report.waits) == sum(w.waited_ns for w in report.waits)


def test_all_ranks_of_a_late_node_are_one_finding():
    report = Job(16, late=late_by(20 * MS, *range(8, 16))).report()
    assert found(report) == [("slow_rank", tuple(range(8, 16)), (1,))]


def test_a_rank_a_little_behind_in_many_buckets_is_neither_named_nor_called_healthy():
    """1.5 ms of a 131 ms step, in 40 operations 2 ms apart: it costs 1 %, though all waits together are 30 %."""
    report = Job(16, buckets=40, late=late_by(1.5 * MS, 5), takes=lambda group: 0.1 * MS).report()
    assert report.findings == ()
    assert not_checked(report)["slow_rank"].startswith(
        "rank 5 arrives last at 480 of 480 collectives and the others wait 1."
    )


def test_each_wait_of_reductions_whose_result_is_wanted_at_once_counts():
    """Tensor parallelism: 40 reductions in forward, and rank 5 is 0.5 ms late in each. That costs 20 ms."""
    job = Job(8, buckets=40, takes=lambda group: 0.1 * MS, late_each=late_by(0.5 * MS, 5))
    (finding,) = job.report().findings
    assert (finding.detector, finding.ranks) == ("slow_rank", (5,))
    assert finding.lost_ns_per_step == pytest.approx(20 * MS, rel=0.15)


def test_rank_that_is_late_because_others_are_is_not_named():
    """Rank 5 holds up its node in the groups within it; so all of that node come late to those between nodes."""
    nodes = {"node0": list(range(8)), "node1": list(range(8, 16))}
    report = Job(16, groups=nodes | rails(), late=late_by(20 * MS, 5)).report()
    assert found(report) == [("slow_rank", (5,), ())]


def test_rank_that_is_late_now_and_then_is_named_with_its_steps():
    job = Job(8, buckets=1, late=lambda rank, step: 60 * MS if rank == 2 and step % 3 == 0 else 0)
    (finding,) = job.report().findings
    assert (finding.ranks, finding.steps) == ((2,), (3, 6, 9, 12))
    assert finding.lost_ns_per_step == pytest.approx(20 * MS, rel=0.05)


def test_operation_of_which_a_rank_lost_its_record_is_unmatched_and_counted():
    job = Job(4, buckets=1)
    job.rows["flight_records"] = [r for r in job.rows["flight_records"] if (r["rank"], r["record"]) != (2, 5)]
    timeline = build_timeline(job.trace())
    assert timeline.collectives.filter(pl.col("instance_id").is_null())["unmatched"].to_list() == ["end missing"] * 4
    assert "slow_rank" in {check.detector for check in diagnose(job.trace()).healthy}
    assert f"4 of {4 * STEPS} collectives were not matched across ranks: end missing" in {g.why for g in timeline.gaps}


def test_rank_whose_records_are_lost_leaves_nothing_to_be_called_healthy():
    """All that rank 2 takes part in is unmatched, which is all but the operations within node 1."""
    job = Job(16, groups={"0": list(range(16)), "node1": list(range(8, 16))})
    job.rows["flight_records"] = [r for r in job.rows["flight_records"] if r["rank"] != 2]
    assert not_checked(job.report())["slow_rank"].startswith("66.7 % of the collectives were not matched across ranks")


def test_recorder_without_timing_says_what_to_do():
    job = Job(4)
    for record in job.rows["flight_records"]:
        record["duration_ns"] = None
    report = job.report()
    assert report.findings == ()
    assert "the waiting ranks are unknown" in not_checked(report)["slow_rank"]
    (why,) = (gap.why for gap in report.gaps if gap.table == "flight_records")
    assert "TORCH_NCCL_ENABLE_TIMING=1" in why


# ---- hosts that are stopped, and no CUDA events


def stopped(job, kind, ns, *, ranks, every=1):
    """The job with hosts that stop for so long at the begin of every n-th step."""
    begins = {(r["rank"], r["start_ns"]) for r in job.rows["regions"] if r["kind"] == "forward"}
    steps = sorted({start for _, start in begins})
    for rank, start in sorted(begins):
        if rank in ranks and steps.index(start) % every == 0:
            job.region(rank, kind, start, start + ns)
    return job


@pytest.mark.parametrize(("kind", "detector"), [("gc", "gc_stall"), ("compile", "recompile")])
def test_stop_that_makes_a_device_late_is_one_finding_and_costs_what_others_waited(kind, detector):
    """Rank 5 stops for 30 ms in every third step, and its device is late by 20 ms there."""
    job = Job(8, late=lambda rank, step: 20 * MS if rank == 5 and step % 3 == 0 else 0)
    (finding,) = stopped(job, kind, 30 * MS, ranks=[5], every=3).report().findings
    assert (finding.detector, finding.ranks, finding.steps) == (detector, (5,), (3, 6, 9, 12))
    assert finding.lost_ns_per_step == pytest.approx(20 * MS / 3, rel=0.05)
    assert finding.gain_fraction is None
    assert finding.gain_why == "what the devices did was not recorded; a profiled window does that"


@pytest.mark.parametrize("ranks", [[5], [1, 12], range(8, 16)], ids=["rank", "two", "node"])
def test_ranks_whose_devices_are_late_because_of_their_input_are_one_finding(ranks):
    job = Job(16, late=late_by(20 * MS, *ranks))
    report = stopped(job, "input", 30 * MS, ranks=ranks).report()
    assert found(report) == [("input_stall", tuple(ranks), ())]
    assert report.findings[0].lost_ns_per_step == pytest.approx(20 * MS, rel=0.05)


@pytest.mark.parametrize("ranks", [[5], range(8)], ids=["one", "all"])
def test_stop_that_no_device_is_known_to_wait_for_is_neither_priced_nor_called_healthy(ranks):
    """30 ms of input in a step of 132 ms."""
    report = stopped(Job(8), "input", 30 * MS, ranks=ranks).report()
    assert report.findings == ()
    assert (
        ", up to 22.8 % of the step, and whether the launch queue drained meanwhile was not recorded"
        in (not_checked(report)["input_stall"])
    )
    said = "hosts are busy with input, garbage collection, compilation or checkpoints for 22.8 % of the step"
    assert (said in report.verdict) == (len(ranks) == 8)


@pytest.mark.parametrize("longer", [200 * MS, 0], ids=["held up", "hidden"])
def test_stop_of_all_ranks_in_the_same_steps_costs_what_these_are_longer(longer):
    """No rank waits. Hosts compile for 100 ms in every fourth step."""
    job = Job(8, late=lambda rank, step: longer if step % 4 == 0 else 0)
    report = stopped(job, "compile", 100 * MS, ranks=range(8), every=4).report()
    if longer:
        (finding,) = report.findings
        assert (finding.detector, finding.lost_ns_per_step) == ("recompile", pytest.approx(25 * MS, rel=0.05))
    else:
        assert report.findings == ()
        assert "whether the launch queue drained" in not_checked(report)["recompile"]


# ---- the network


def rails(nodes=2, per_node=8):
    """Each rank reduces with those of its place in the other nodes, through a card of its own."""
    return {f"rail{r}": [r + per_node * n for n in range(nodes)] for r in range(per_node)}


def slow_from(*ranks, factor=3):
    """The network needs 6 ms for what a rank sends in an operation, three times as long from these."""
    return lambda rank, peer: 6 * MS * (factor if rank in ranks else 1)


def of(report, detector):
    return [finding for finding in report.findings if finding.detector == detector]


def test_gpu_that_comes_late_is_the_guilty_layer():
    report = Job(16, late=late_by(20 * MS, 5), groups=rails(), wire=slow_from()).report()
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.where) == ("slow_rank", (5,), "before collectives, on its GPU")
    assert finding.title.startswith("Rank 5 is late: its GPU begins 48 of 48 collectives last, at a cost of ")


def test_run_folder_of_such_a_job_gives_the_same_verdict(tmp_path):
    job = Job(16, late=late_by(20 * MS, 5), groups=rails(), wire=slow_from())
    report = rankscope.diagnose(rankscope.open(job.write(tmp_path)))
    assert report.verdict == job.report().verdict
    assert report.verdict.startswith("Likely: Rank 5 is late: its GPU begins 48 of 48 collectives last, at a cost of ")


def test_healthy_network_is_no_finding():
    report = Job(24, groups=rails(3), wire=slow_from()).report()
    assert report.findings == ()
    assert {"slow_rank", "slow_link"} <= {check.detector for check in report.healthy}


def test_node_whose_link_runs_at_a_third_is_named_from_what_proxies_sent():
    """What node 1 sends and what is sent to it takes 18 ms for 25 MB, elsewhere 6 ms."""
    on_1 = lambda rank, peer: 6 * MS * (3 if 1 in (rank // 8, peer // 8) else 1)  # noqa: E731
    report = Job(32, groups=rails(4), wire=on_1, takes=lambda group: 18 * MS).report()
    (finding,) = of(report, "slow_link")
    assert finding.nodes == (1,)
    assert finding.title.startswith("The link of node 1 is slow (1.39 GB/s against 4.17 GB/s elsewhere)")


def test_of_two_nodes_the_slower_direction_is_named():
    report = Job(16, groups=rails(), wire=slow_from(*range(8, 16)), takes=lambda group: 18 * MS).report()
    (finding,) = of(report, "slow_link")
    assert finding.nodes == (0, 1)
    assert finding.caused_by is None


def test_one_card_of_eight_is_named_by_the_way_that_is_slow():
    slow = lambda group: 18 * MS if group == "rail3" else 6 * MS  # noqa: E731
    report = Job(16, groups=rails(), wire=slow_from(11), takes=slow).report()
    (finding,) = of(report, "slow_link")
    assert finding.ranks == (11, 3)
    assert finding.title.startswith(
        "The network from rank 11 (node 1) to rank 3 (node 0) is slow (1.39 GB/s against 4.17 GB/s elsewhere): "
        "transfers between nodes take 7"
    )
    assert finding.lost_ns_per_step == pytest.approx(
        12 * MS, rel=0.05
    )  # of the last of four buckets, 18 ms, two thirds
    assert found(report) == [("slow_link", (11, 3), (0, 1))]


def test_without_the_plugin_the_slow_rail_is_found_by_its_group():
    slow = lambda group: 18 * MS if group == "rail3" else 6 * MS  # noqa: E731
    report = Job(16, groups=rails(), takes=slow).report()
    (finding,) = report.findings
    assert (finding.detector, finding.groups, finding.ranks) == ("low_bandwidth", ("rail3",), (3, 11))
    assert "in group rail3 (ranks 3,11) runs at a bus bandwidth of 1.39 GB/s, in other groups at 4.1" in finding.title
    assert "48." in finding.title.split("up to")[1] or "47." in finding.title.split("up to")[1]
    assert finding.gain_fraction is None


def test_ranks_that_are_late_because_their_rail_is_slow_are_not_named():
    """Reduced over rails, then within nodes: ranks 3 and 11 come 12 ms late to their nodes."""
    nodes = {"node0": list(range(8)), "node1": list(range(8, 16))}
    slow = lambda group: 18 * MS if group == "rail3" else 6 * MS  # noqa: E731
    report = Job(16, groups=rails() | nodes, takes=slow, waits_for_all=True).report()
    assert [(f.detector, f.groups) for f in report.findings] == [("low_bandwidth", ("rail3",))]


def test_two_nodes_linked_alike_at_a_third_are_not_called_healthy():
    """Nothing says what would be normal: neither another link nor the cards' speed."""
    report = Job(16, groups=rails(), wire=slow_from(*range(16)), takes=lambda group: 18 * MS).report()
    assert report.findings == ()
    assert "equally fast in both directions; transfer takes 7" in not_checked(report)["slow_link"]
    assert "no other groups do the same" not in not_checked(report).get("low_bandwidth", "")
