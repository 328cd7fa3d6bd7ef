"""Runs with CUDA events (`device_marks`) and no profiler: recordings of a job whose hosts and devices are simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rankscope
from rankscope.analysis.report import terminal
from rankscope.analysis.timeline.build import build_timeline
from rankscope.analysis.timeline.cuda_events import by_marks, mark_phases, marked_steps
from rankscope.analysis.timeline.device_waits import known_waits, without_waits
from rankscope.analysis.timeline.host_breakdown import check_phases
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.schema import DEVICE_MARKS, OPS, REGION_KINDS
from support.command_line import MS, rankscope_
from support.counters import THERMAL, gpus, sampled
from support.rows import regions, step_spans, table
from support.run_folder import RANK_ROW, write_run

STEPS = 20  # the first 2 are warm-up
LATENCY_NS = 10_000  # from a mark to the device that has nothing else to do


@dataclass
class Job:
    """Data-parallel: ms of each phase on the device and on the host.

    The host enqueues a phase's work evenly and is at most a step ahead. Backward ends with one all-reduce.
    """

    ranks: int = 4
    slower: dict[int, float] = field(default_factory=dict)  # ranks whose device takes so many times as long for all
    forward: dict[int, float] = field(default_factory=dict)  # of single ranks; else 100. Backward 200, optimizer 10
    host: float = 20  # for each of forward and backward; 2 for the optimizer
    input: dict[int, float] = field(default_factory=dict)  # at the begin of the step
    gc: dict[int, float] = field(default_factory=dict)  # when half of forward is enqueued
    waits: bool = False  # the host waits for its device at the end of each step
    transfer: float = 10
    durations: bool = True
    in_forward: tuple[int, ...] = ()  # ranks that reduce something in forward, in group 8
    gloo: tuple[int, ...] = ()  # groups whose operations end on the hosts
    clock_error: int | None = 5_000
    unseen: tuple[tuple[int, int, str], ...] = ()  # rank, step, mark
    lost: tuple[tuple[int, int, str], ...] = ()
    no_calls: bool = False  # of collectives
    said: bool = True  # rankscope.step() ends the steps
    window: tuple[float, float] | None = None  # a deep window of rank 0
    waits_marked: bool = False  # the device's wait for the reduction
    waits_missed: tuple[tuple[int, int], ...] = ()  # rank, step
    sampled: bool = False  # where the host is, every 10 ms
    on_node_1: tuple[int, ...] = ()  # whose clock is 5 s behind
    length: Callable[[int, int], tuple[float, float]] = lambda rank, step: (1, 1)  # of the data: forward, backward


class Rank:
    def __init__(self, job, rank):
        self.job, self.rank = job, rank
        self.host = self.device = 0.0
        self.regions, self.calls, self.marks, self.steps, self.ends, self.waited = [], [], [], [], [], []

    def stop(self, kind, ms):
        if ms:
            self.regions.append((kind, self.host, self.host + ms))
            self.host += ms

    def work(self, host_ms, device_ms, stop=None):
        """`device_ms` of work that is enqueued within `host_ms`, in the middle of which the host may be stopped."""
        for _ in range(2):
            begin = max(self.device, self.host)
            self.host += host_ms / 2
            self.device = max(begin + device_ms * self.job.slower.get(self.rank, 1) / 2, self.host)
            if stop:
                self.stop(*stop)
                stop = None

    def mark(self, name, step):
        seen = None if (self.rank, step, name) in self.job.unseen else max(self.device, self.host + LATENCY_NS / MS)
        self.device = max(self.device, self.host)
        if (self.rank, step, name) not in self.job.lost:
            self.marks.append((self.host, seen, DEVICE_MARKS.index(name)))

    def wait(self, step, until):
        if self.job.waits_marked:
            self.mark("wait_start", step)
            self.host += 0.005
        self.device = until
        if self.job.waits_marked:
            self.mark("wait_end", step)
            self.host += 0.005

    def reduces(self, group=7, duration=None):
        if self.job.no_calls:
            return
        self.calls.append((self.host, group, duration))
        self.host += 0.02


def record(folder, job):
    """The job's run folder."""
    ranks = [Rank(job, rank) for rank in range(job.ranks)]
    for step in range(STEPS):
        for r in ranks:
            r.host = max(r.host, r.ends[-2] if len(r.ends) > 1 else 0)
            r.stop("input", job.input.get(r.rank, 0))
            if r.rank in job.in_forward:
                r.reduces(group=8)
            forward, backward = job.length(r.rank, step)
            r.work(job.host, forward * job.forward.get(r.rank, 100), ("gc", job.gc.get(r.rank, 0)))
            r.mark("backward_start", step)
            begun = r.host
            r.work(job.host, backward * 200)
            r.regions.append(("backward", begun, r.host + 0.03))
        computed = {r.rank: r.device for r in ranks}
        done = max(computed.values()) + job.transfer
        for r in ranks:
            r.reduces(duration=done - computed[r.rank] if job.durations else None)
            r.wait(step, done)
            r.mark("backward_end", step)
            r.mark("optimizer_start", step)
            begun = r.host
            r.work(2, 10)
            r.regions.append(("optimizer", begun, r.host))
            r.mark("optimizer_end", step)
            if job.said:
                r.mark("step_end", step)
                r.steps.append(r.host)
            if job.waits_marked:
                noted = "waits_missed" if (r.rank, step) in job.waits_missed else "waits_seen"
                r.marks.append((r.host, None, DEVICE_MARKS.index(noted)))
            r.ends.append(r.device)
            if job.waits:
                r.waited.append((r.host, r.device))
                r.host = r.device
    write_run(folder)
    if job.on_node_1:
        write_run(folder, node=1)
        part = Partition(RunFolder(folder), "node=00001", "")
        for at in range(0, 100 * MS, MS):  # exchanges with node 0, 10 µs each way
            there = {"t1_ns": at - 5000 * MS, "t4_ns": at - 5000 * MS + 20_000}
            part.add_row("clocks", {"peer": 0, "t2_ns": at + 10_000, "t3_ns": at + 10_000} | there)
        part.flush()
        part.close()
    for r in ranks:
        write(folder, r)
    return folder


def write(folder, r):
    node = int(r.rank in r.job.on_node_1)

    def ns(ms):
        return round((ms - 5000 * node) * MS)

    def spans(start, end):
        return {"start_ns": ns(start), "end_ns": ns(end)}

    part = Partition(RunFolder(folder), f"rank={r.rank:05}", "a0-")
    place = {"world_size": r.job.ranks, "local_rank": r.rank, "node": node, "device": "NVIDIA H200"}
    part.add_row("ranks", RANK_ROW | place)
    names = ("input", "gc", "backward", "optimizer")
    for number, name in enumerate(names):
        part.add_row("strings", {"name_id": number, "name": name})
    for number, members in ((7, f"0-{r.job.ranks - 1}"), (8, ",".join(map(str, r.job.in_forward)))):
        group = {"start_ns": 0, "group_id": number, "name": str(number), "backend": "nccl", "role": ""}
        part.add_row("groups", group | {"members": members})
    for kind, *span in r.regions:
        row = {"kind": REGION_KINDS.index(kind), "name_id": names.index(kind), "thread": 0}
        part.add_row("regions", row | spans(*span) | {"microbatch": None, "stage": None})
    if r.job.sampled:
        for frame, line in ((1, 5), (2, 9)):
            call = {"parent": frame - 1, "function": "launch" if frame == 1 else "wait", "file": "/train.py"}
            part.add_row("frames", call | {"frame": frame, "line": line})
        for at in range(0, int(r.ends[-1]), 10):
            waits = any(begin <= at < end for begin, end in r.waited)
            part.add_row("samples", {"time_ns": ns(at), "frame": 2 if waits else 1})
    for number, (start, group, duration) in enumerate(r.calls):
        op = {"issued_ns": ns(start + 0.01), "group_id": group, "op": OPS.index("allreduce"), "dtype": 2, "tag": 0}
        op |= {"seq": sum(g == group for _, g, _ in r.calls[:number]), "is_async": True, "peer": -1, "thread": 0}
        op |= {"device_start_ns": None, "size_bytes": 4096, "number": number + 1}
        op["end_ns"] = ns(start + 0.02) if group in r.job.gloo else None
        part.add_row("collectives", {"start_ns": ns(start)} | op)
        said = {"record": number, "group": str(group), "seq": number, "is_p2p": False, "name": "nccl:all_reduce"}
        took = None if duration is None else round(duration * MS)
        part.add_row("flight_records", {"start_ns": ns(start + 0.005), "duration_ns": took} | said)
    for end in r.steps:
        part.add_row("steps", {"end_ns": ns(end), "thread": 0, "start_ns": None})
    for recorded, seen, mark in r.marks:
        row = {"recorded_ns": ns(recorded), "device_ns": None if seen is None else ns(seen), "mark": mark}
        part.add_row("device_marks", row | {"device": r.rank, "clock_error_ns": r.job.clock_error})
    if r.job.window and r.rank == 0:
        window = {"window": 1, "first_step": 8, "steps": 1, "start_stall_ns": 0, "stop_stall_ns": 0, "reason": "asked"}
        part.add_row("windows", spans(*r.job.window) | window)
    part.flush()
    part.close()


def diagnosed(folder, **job):
    """The report on the job; the parts of every step sum to it."""
    trace = rankscope.open(record(folder, Job(**job)))
    timeline = build_timeline(trace)
    check_phases(timeline.phases, timeline.steps)
    return rankscope.diagnose(trace)


def parts_of(report, rank):
    """ms per analyzed step of the parts that take any time."""
    return {p.part: round(p.ns_per_step / MS, 1) for p in report.breakdown if p.rank == rank and p.ns_per_step}


def reasons_of(report):
    return {check.detector: check.why for check in report.not_checked}


def costs_of(report):
    return [(f.detector, f.ranks, round(f.lost_ns_per_step / MS)) for f in report.findings]


# ---------------------------------------------------------------- steps and their parts


@pytest.mark.parametrize("said", [True, False], ids=["rankscope.step()", "optimizer"])
def test_a_step_is_what_the_device_takes_for_its_phases_and_not_what_the_host_needs(tmp_path, said):
    """Forward 100, backward 200 and 10 of reduction, optimizer 10: 320 ms, of which the host needs 42."""
    report = diagnosed(tmp_path, said=said)
    assert (report.steps.count, report.steps.median_ns) == (18, 320 * MS)
    assert parts_of(report, 2) == {"compute": 100, "mixed": 210, "optimizer": 10}
    phases = [(p.phase, p.ns_per_step, p.communication_ns_per_step) for p in report.phases if p.rank == 2][:2]
    assert phases == [("forward", 100 * MS, 0), ("backward", 210 * MS, 10 * MS)]
    assert report.findings == ()
    assert "in 65.6 % of the step compute and communication are not distinguished" in report.verdict
    healthy = {check.detector for check in report.healthy}
    assert {"slow_rank", "gc_stall", "host_bound"} <= healthy
    assert not {"device_time", "exposed_communication", "small_messages"} & healthy
    assert "device_time" not in reasons_of(report)


def test_waits_with_marks_separate_compute_from_communication(tmp_path):
    """Rank 2 computes 1.5 times as long: the others wait 155 ms a step for it; 10 are transfer."""
    report = diagnosed(tmp_path, slower={2: 1.5}, waits_marked=True)
    assert parts_of(report, 2) == {"compute": 450, "optimizer": 15, "transfer": 10}
    assert parts_of(report, 0) == {"compute": 300, "optimizer": 10, "unsplit": 155, "transfer": 10}
    assert costs_of(report) == [("slow_rank", (2,), 155)]


def test_a_step_of_which_a_rank_missed_waits_stays_mixed_on_all(tmp_path):
    """In 9 of the 18 judged steps; no wait has one mark alone."""
    missed = tuple((1, step) for step in range(2, STEPS, 2))
    report = diagnosed(tmp_path / "missed", waits_marked=True, waits_missed=missed)
    assert parts_of(report, 0) == {"compute": 200, "mixed": 105, "optimizer": 10, "transfer": 5}
    lost = tuple((1, step, "wait_end") for step in range(2, STEPS, 2))
    report = diagnosed(tmp_path / "lost", waits_marked=True, lost=lost)
    assert parts_of(report, 0) == {"compute": 200, "mixed": 105, "optimizer": 10, "transfer": 5}


def test_a_phase_in_which_some_ranks_communicate_is_mixed_on_all(tmp_path):
    """Else ranks 2 and 3 would compute 100 ms longer than ranks 0 and 1, whose forward is not distinguished."""
    report = diagnosed(tmp_path, in_forward=(0, 1))
    assert [parts_of(report, rank) for rank in (0, 3)] == [{"mixed": 310, "optimizer": 10}] * 2
    assert report.findings == ()


def test_what_hosts_do_among_themselves_is_no_communication_of_their_devices(tmp_path):
    report = diagnosed(tmp_path, in_forward=(0, 1), gloo=(8,))
    assert [parts_of(report, rank) for rank in (0, 3)] == [{"compute": 100, "mixed": 210, "optimizer": 10}] * 2


def test_input_that_the_device_does_not_wait_for_costs_nothing(tmp_path):
    """150 ms of input on each rank, while the device has work for 278 ms more."""
    report = diagnosed(tmp_path, input=dict.fromkeys(range(4), 150))
    assert parts_of(report, 0) == {"compute": 100, "mixed": 210, "optimizer": 10}
    assert report.findings == ()


def test_input_costs_as_much_as_the_device_runs_dry_in_it(tmp_path):
    """Rank 3's host needs 442 ms a step, 400 of them for input, and its device 320: it idles for 122, in input."""
    report = diagnosed(tmp_path, input={3: 400})
    assert parts_of(report, 3) == {"compute": 100, "mixed": 210, "input": 122, "optimizer": 10}
    assert parts_of(report, 0) == {"compute": 100, "mixed": 332, "optimizer": 10}
    assert costs_of(report) == [("input_stall", (3,), 122)]
    assert "CUDA events alone give no dependency graph" in report.findings[0].gain_why


@pytest.mark.parametrize(("others", "named"), [(400, (0, 1, 2, 3)), (150, (3,))])
def test_ranks_that_load_as_long_as_the_one_behind_stall_for_the_same_reason(tmp_path, others, named):
    """Rank 3 loads for 440 ms, so that the job's steps take 482. Ranks that load for 400 get ahead by 40 ms in each."""
    report = diagnosed(tmp_path, input={0: others, 1: others, 2: others, 3: 440})
    assert costs_of(report) == [("input_stall", named, 162)]


def test_a_stop_in_the_middle_of_a_phase_costs_what_is_left_of_it_when_the_work_before_is_done(tmp_path):
    """All hosts stop for 300 ms in forward, which with the rest of their step is 342; their devices work for 320."""
    report = diagnosed(tmp_path, gc=dict.fromkeys(range(4), 300))
    assert parts_of(report, 1) == {"compute": 100, "mixed": 210, "gc": 22, "optimizer": 10}
    assert costs_of(report) == [("gc_stall", (0, 1, 2, 3), 22)]


def test_marks_of_nodes_with_other_clocks_are_brought_to_that_of_the_run(tmp_path):
    """Ranks 2 and 3 run on a node whose clock is 5 s behind; their steps lie where those of the others do."""
    trace = rankscope.open(record(tmp_path, Job(on_node_1=(2, 3))))
    ends = build_timeline(trace).steps.group_by("step").agg(pl.col("end_ns").max() - pl.col("end_ns").min())
    assert len(ends) == STEPS
    assert ends["end_ns"].max() <= 20_000  # what the clock may be wrong by


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"clock_error": 50 * MS}, "the clock of the device of ranks 0-3 is known only to within 50.0 ms"),
        ({"clock_error": None}, "the clock of the device of ranks 0-3 is unknown"),
        ({"gloo": (7,)}, "most operations end on the hosts, as gloo's do"),
        (
            {"unseen": tuple((1, step, "step_end") for step in range(STEPS))},
            "the device was not seen at the end of most steps of rank 1",
        ),
    ],
    ids=["clock", "no clock", "gloo", "not seen"],
)
def test_marks_that_show_nothing_are_not_used_and_reported(tmp_path, job, why):
    report = diagnosed(tmp_path, **job)
    assert f"{why}: its marks are not used, and steps are those of the hosts" in [gap.why for gap in report.gaps]
    assert report.lead is None
    assert "mixed" not in parts_of(report, 0)
    assert "device_time" in reasons_of(report)
    assert reasons_of(report)["host_bound"] == "no work of a device was recorded"


@pytest.mark.parametrize("how", ["unseen", "lost"])
def test_steps_without_an_end_on_the_device_are_left_out_and_a_lost_mark_joins_two_phases(tmp_path, how):
    """Step 7 has no end on rank 1, so 8 has no begin. On rank 2 it is not known when backward of step 12 ended."""
    report = diagnosed(tmp_path, **{how: ((1, 7, "step_end"), (2, 12, "backward_end"))})
    assert report.steps.count == 16
    said = [gap.why for gap in report.gaps]
    assert "2 steps of single ranks left out, whose begin or end on the device was not seen" in said
    assert parts_of(report, 2) == {"compute": 100, "mixed": 210, "optimizer": 10}
    assert [p.ns_per_step for p in report.phases if p.phase == "marks not seen"] == [round(210 * MS / 16)]


def test_what_a_graph_holds_is_one_phase_that_may_be_anything(tmp_path):
    """A captured backward has no marks and hides its reductions: 310 ms of computing, waiting or transfer."""
    graph = tuple((rank, step, mark) for rank in range(4) for step in range(STEPS) for mark in DEVICE_MARKS[:2])
    report = diagnosed(tmp_path, lost=graph, no_calls=True)
    assert parts_of(report, 2) == {"mixed": 310, "optimizer": 10}
    assert {phase.phase for phase in report.phases} == {"forward and backward", "optimizer", "after the optimizer"}
    assert "slow_rank" not in {check.detector for check in report.healthy}


def test_steps_of_a_deep_window_are_not_judged(tmp_path):
    """The host's window lies from 2.9 to 3.3 s: in steps 9 and 10 of the devices, each of which takes 0.32 s."""
    report = diagnosed(tmp_path, window=(2900, 3300))
    assert report.steps.count == 16
    assert any("profiled window" in gap.why for gap in report.gaps)


# ---------------------------------------------------------------- root causes


@pytest.mark.parametrize("durations", [True, False], ids=["NCCL's durations", "marks only"])
def test_a_rank_whose_device_takes_longer_for_forward_is_slow_though_its_host_is_not(tmp_path, durations):
    """Rank 5 takes 120 ms for forward instead of 100; the others wait for it in backward."""
    report = diagnosed(tmp_path, ranks=8, forward={5: 120}, durations=durations)
    (slow,) = report.findings
    assert (slow.detector, slow.ranks, slow.where, slow.lost_ns_per_step) == ("slow_rank", (5,), "forward", 20 * MS)
    assert slow.evidence[0].rank == 5
    assert slow.gain_why


def test_without_nccls_durations_a_rank_may_be_slow_where_it_communicates(tmp_path):
    """A slow backward looks like the others' waiting for it: nothing is found, and nothing is called healthy."""
    report = diagnosed(tmp_path, durations=False)
    assert report.findings == ()
    assert reasons_of(report)["slow_rank"] == (
        "in 65.6 % of the step CUDA events do not show whether ranks compute or wait"
    )


LENGTHS = 1 + 0.1 * np.random.default_rng(1).standard_normal((2, 8, STEPS))  # of two batches, by rank and step


def of_data(rank, step):
    """What a batch takes longer in forward it takes longer in backward."""
    return LENGTHS[0, rank, step], LENGTHS[0, rank, step]


def of_chance(rank, step):
    return LENGTHS[0, rank, step], LENGTHS[1, rank, step]


def test_sequences_of_uneven_length_cost_what_the_longest_is_above_the_mean(tmp_path):
    """Of 300 ms of forward and backward."""
    report = diagnosed(tmp_path, ranks=8, length=of_data)
    judged = LENGTHS[0][:, 2:]
    (uneven,) = report.findings
    assert (uneven.detector, uneven.ranks) == ("load_imbalance", tuple(range(8)))
    lost_ns = 300 * MS * (judged.max(axis=0) - judged.mean(axis=0)).mean()
    assert uneven.lost_ns_per_step == pytest.approx(lost_ns, rel=0.05)
    assert uneven.gain_why == "CUDA events alone give no dependency graph; a profiled window does"


def test_ranks_that_are_long_by_chance_now_in_forward_and_now_in_backward_have_even_data(tmp_path):
    report = diagnosed(tmp_path, ranks=8, length=of_chance)
    assert report.findings == ()
    assert "load_imbalance" in {check.detector for check in report.healthy}


@pytest.mark.parametrize("slow", [{"forward": {5: 120}}, {"slower": {5: 1.2}}], ids=["forward", "all"])
def test_slow_rank_is_no_uneven_work(tmp_path, slow):
    assert [f.detector for f in diagnosed(tmp_path, ranks=8, **slow).findings] == ["slow_rank"]


def test_without_nccls_durations_uneven_work_is_not_checked(tmp_path):
    report = diagnosed(tmp_path, ranks=8, length=of_data, durations=False)
    assert "load_imbalance" not in {f.detector for f in report.findings}
    assert reasons_of(report)["load_imbalance"].startswith("backward is not distinguished from communication")


def test_throttled_device_is_the_cause_of_its_slow_rank(tmp_path):
    """All phases of rank 2 take 1.5 times as long: the others wait 150 ms in backward, and 5 more in the next one."""
    record(tmp_path, Job(slower={2: 1.5}))
    report = sampled(tmp_path, gpus([1.8, 1.8, 1.2, 1.8], {2: THERMAL}))
    cause, slow = report.findings
    assert (cause.detector, cause.ranks, cause.caused_by) == ("throttling", (2,), None)
    assert (slow.detector, slow.where, slow.caused_by) == ("slow_rank", "all that it computes", "throttling")
    assert slow.lost_ns_per_step == pytest.approx(155 * MS, rel=0.01)


# ---------------------------------------------------------------- host or device


def test_device_that_is_never_waited_for_by_its_host_is_the_limit(tmp_path):
    """The host is a step ahead: where its forward ends, 400 ms of work are left to be done."""
    report = diagnosed(tmp_path)
    assert report.lead.idle_fraction == 0
    shown = " ".join(terminal.render(report).split())
    assert "Device-bound: host run-ahead is 590 ms (median), and a device idles without work for at most 0 %" in shown
    assert "forward 100 ms 100 ms (0) 100 ms (0) 0 ns 400 ms" in shown


def test_host_that_sets_the_pace_is_named_with_its_possible_cost_and_how_to_know(tmp_path):
    """A host that needs 250 ms each for forward and backward, and waits for its device at the end of each step."""
    report = diagnosed(tmp_path, host=250, waits=True)
    assert report.findings == ()
    said = reasons_of(report)["host_bound"]
    assert said.startswith("host-bound in 96.2 % of the step")
    assert "devices may be idle for up to 96.2 % of the step" in said
    assert said.endswith("rankscope run --profile-steps A-B, or rankscope trigger RUN while the job runs")
    assert "; devices may be idle for up to 96.2 % of the step" in report.verdict
    sampled = diagnosed(tmp_path / "sampled", host=250, waits=True, sampled=True)
    assert "--profile-steps A-B measures (the hosts are mostly at train.py:5 (launch))" in sampled.verdict
    assert "Host-bound in 96.2 % of the step" in rankscope_("report", tmp_path).stdout
    assert "Host-bound in 96.2 % of the step" in (tmp_path / "report.html").read_text()


def test_samples_say_where_the_host_is_that_sets_the_pace(tmp_path):
    """It needs 42 ms for a step of 320 ms, and waits for its device at the end; parts of the step are the device's."""
    launch, wait = diagnosed(tmp_path, waits=True, sampled=True).code
    assert (launch.function, launch.fraction, launch.part, launch.depth) == ("launch", 1, None, 0)
    assert (wait.function, wait.fraction, wait.depth) == ("wait", pytest.approx(278 / 320, abs=1 / 32), 1)


def test_host_that_loses_its_lead_each_step_is_not_called_healthy(tmp_path):
    """It waits for the device at the end of each step, and needs 20 ms for forward, in which that may idle: 6.3 %."""
    report = diagnosed(tmp_path, waits=True)
    assert report.findings == ()
    assert "devices may be idle for up to 6.3 % of the step" in reasons_of(report)["host_bound"]


def test_page_of_the_host_shows_how_far_it_is_ahead(tmp_path):
    pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")
    from rankscope.dashboard.figures.host import ahead_over_steps, phases_over_steps
    from rankscope.dashboard.pages.host import layout
    from rankscope.dashboard.state import State

    state = State([record(tmp_path / "run", Job(forward={1: 110}))])
    state.start()
    state.wait(60)
    run = state.ready("")
    state.stop()
    shown = str(layout(run, {}))
    assert "Device-bound: host run-ahead is" in shown
    assert "Phases by rank" in shown
    marks = run.timeline.marks.join(run.timeline.steps.filter("judged"), on=["rank", "step"], how="semi")
    forward, backward, optimizer = phases_over_steps(marks)["data"]
    assert [forward["name"], forward["x"][0], forward["y"][0] / MS] == ["forward", 2, (3 * 100 + 110) / 4]
    assert forward["y"][0] + backward["y"][0] + optimizer["y"][0] == 330 * MS
    assert [line["name"] for line in ahead_over_steps(marks)["data"]][:2] == ["end of forward", "end of backward"]


# ---------------------------------------------------------------- whatever the marks


times = st.lists(st.tuples(st.integers(1, 40), st.integers(-3, 60)), min_size=5, max_size=25)
stops = st.tuples(st.sampled_from(["input", "gc", "compile"]), st.integers(0, 300), st.integers(0, 80))


@settings(max_examples=60, deadline=None)
@given(times, st.lists(stops, max_size=5), st.lists(st.integers(0, 24), max_size=4))
def test_parts_sum_to_the_step_whatever_the_times(lengths, stopped, unseen):
    """Marks in the order of a step, one after the other; the device is behind, or ahead by its clock's error."""
    recorded = np.cumsum([length for length, _ in lengths])
    rows = [
        {"rank": 0, "recorded_ns": at, "device_ns": None if n in unseen else at + behind, "clock_error_ns": 0}
        | {"mark": DEVICE_MARKS[n % len(DEVICE_MARKS)], "device": 0}
        for n, (at, (_, behind)) in enumerate(zip(recorded.tolist(), lengths, strict=True))
    ]
    of_phases, of_waits = without_waits(table("device_marks", *rows))
    ends = [0, *recorded[4::5].tolist()]
    hosts = step_spans(*((0, n, *span) for n, span in enumerate(pairwise(ends))))
    hosts = hosts.with_columns(source=pl.lit("rankscope.step()"))
    steps, marks, _ = marked_steps(hosts, of_phases, table("collectives"))
    rows_of_regions = regions(*((0, kind, start, start + length) for kind, start, length in stopped))
    waits = known_waits(of_waits, hosts)
    phases = by_marks(marks, steps, hosts, rows_of_regions, table("collectives"), waits)
    if len(marks):
        check_phases(mark_phases(phases, steps, rows_of_regions, waits), steps)
