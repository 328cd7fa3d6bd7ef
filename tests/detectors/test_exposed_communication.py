"""Gradients that are reduced after backward, and those that are hidden behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import exposed_communication
from rankscope.errors import NotResolvable
from support.kineto import ALLREDUCE, event, kernel, launch, meta, write
from support.kineto import step as profiler_step
from support.paths import SCRIPTS

JOB = SCRIPTS / "gradients.py"
RANKSCOPE = Path(sys.executable).with_name("rankscope")
MS, MB, STEPS = 1_000_000, 2**20, 10
FORWARD, BACKWARD = 40, 80  # ms


def tables(*buckets, step_ms=200, wait_ms=0):
    """Two ranks; `buckets` are (issued, end) in ms after backward began, 10 MB each; what ends after it blocks."""
    parts, phases, regions, calls = [], [], [], []
    for rank in range(2):
        for step in range(STEPS):
            begin = step * step_ms
            back, computed = begin + FORWARD, begin + FORWARD + BACKWARD
            reduced = max(computed, back + max(end for _, end in buckets))
            spans = [("compute", "forward", begin, back), ("compute", "backward", back, computed)]
            spans += [
                ("wait", "allreduce", computed, computed + wait_ms),
                ("transfer", "allreduce", computed + wait_ms, reduced),
                ("optimizer", "Adam", reduced, begin + step_ms),
            ]
            spans = [(part, label, a * MS, b * MS) for part, label, a, b in spans if b > a]
            phases += [(rank, step, *span) for span in spans]
            parts += [(rank, step, part, b - a) for part, _, a, b in spans]
            regions.append((rank, step, "backward", back * MS, reduced * MS, 0))
            regions.append((rank, step, "optimizer", reduced * MS, (begin + step_ms) * MS, 0))
            calls += [
                (rank, step, "allreduce", (back + issued) * MS, (back + end) * MS, wait_ms * MS, 10 * MB)
                for issued, end in buckets
            ]
    span = ["start_ns", "end_ns"]
    return (
        pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(phases, ["rank", "step", "part", "label", *span], orient="row"),
        pl.DataFrame(calls, ["rank", "step", "op", *span, "wait_ns", "size_bytes"], orient="row"),
        pl.DataFrame(regions, ["rank", "step", "kind", *span, "thread"], orient="row"),
    )


def test_one_bucket_after_backward_would_mostly_be_hidden():
    """40 ms after 80 of backward; of 8 buckets of 5 ms the last is left. The fewest as good within 10 % count."""
    (finding,) = exposed_communication.detect(*tables((80, 120)))
    assert finding.lost_ns_per_step == pytest.approx((40 - 40 / 5) * MS, rel=0.1)
    assert finding.lost_fraction == pytest.approx(0.16, abs=0.02)
    assert "Of 40.0 ms per step for reducing gradients, 40.0 ms come after backward" in finding.title
    assert "bucket_cap_mb to about 1." in finding.advice or "bucket_cap_mb to about 2" in finding.advice


@pytest.mark.parametrize(
    "buckets",
    [
        [(20, 30), (40, 50), (60, 70), (80, 90)],  # all but the last hidden
        [(80, 84)],  # little to hide
        [(10, 90), (20, 180), (40, 200)],  # far more than backward can hide, begun as early as can be
    ],
    ids=["hidden", "little", "more than can be hidden"],
)
def test_what_cannot_be_hidden_better_is_no_finding(buckets):
    assert exposed_communication.detect(*tables(*buckets, step_ms=400)) == []


def gathers(steps, transfer_ms, *, ops=("allgather",) * 4, compute_ms=5):
    """Two ranks that gather parameters 4 times a step, `transfer_ms` each, and compute 5 ms after each."""
    parts, phases, calls = [], [], []
    for rank in range(2):
        at = 0
        for step in range(steps):
            for number, op in enumerate(ops):
                met, end = at * MS, (at + transfer_ms) * MS
                phases += [(rank, step, "transfer", op, met, end)]
                phases += [(rank, step, "compute", "mm", end, end + compute_ms * MS)]
                calls += [(rank, step, len(ops) * step + number, op, met, met, end, 0)]
                at += transfer_ms + compute_ms
            parts += [(rank, step, "transfer", len(ops) * transfer_ms * MS)]
            parts += [(rank, step, "compute", len(ops) * compute_ms * MS)]
    rows = ["rank", "step", "instance_id", "op", "start_ns", "device_start_ns", "end_ns", "wait_ns"]
    return (
        pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(phases, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row"),
        pl.DataFrame(calls, rows, orient="row").with_columns(
            group_id=pl.lit(0), group=pl.lit("fsdp"), group_size=pl.lit(2), size_bytes=pl.lit(10 * MB)
        ),
        None,
        None,
        pl.DataFrame({"group_id": [0], "name": ["fsdp"], "role": [""], "members": ["0-3"]}),
    )


@pytest.mark.parametrize("steps", [1, 3])
def test_what_no_computation_can_hide_costs_all_the_same(steps):
    """The first and the last of four gathers do not count. Of the 60 ms of the others 20 can be hidden at most."""
    (finding,) = exposed_communication.detect(*gathers(steps, 30))
    assert finding.lost_ns_per_step == 60 * MS
    assert finding.fix == "overlap:fsdp:allgather"
    assert "20.0 ms per step are computed with nothing in flight, so no more than that can be hidden" in finding.advice
    healthy = gathers(steps, 0.5)
    assert exposed_communication.detect(*healthy) == []
    assert exposed_communication.resolution_ns(*healthy[:4], groups=healthy[5]) == 0.05 * 22 * MS


@pytest.mark.parametrize(("compute_ms", "found"), [(20, True), (80, False)])
def test_two_kinds_of_operations_of_one_purpose_cost_together_what_neither_does_alone(compute_ms, found):
    """Of 10 + 10 operations of 4 ms the first and last of each do not count: 32 + 32 of 480 ms, 6.7 % each of them."""
    tables_ = gathers(3, 4, ops=("allgather", "reduce_scatter") * 10, compute_ms=compute_ms)
    groups = pl.DataFrame({"group_id": [0], "name": ["tp"], "role": [""], "members": ["0-3"]})
    findings = exposed_communication.detect(*tables_[:5], groups)
    assert [(one.lost_ns_per_step, one.where, one.fix) for one in findings] == (
        [(64 * MS, "allgather, reduce_scatter", "overlap:fsdp")] if found else []
    )


def test_one_operation_per_step_does_not_show_that_nothing_could_be_hidden():
    """It has nothing before and after it: no backward was seen, and its 30 of 50 ms may be all gradients."""
    breakdown, phases, collectives, regions, _, groups = gathers(3, 30)
    only_one = collectives.filter(pl.col("instance_id") % 4 == 0)
    for check in (exposed_communication.detect, exposed_communication.resolution_ns):
        with pytest.raises(NotResolvable, match="backward"):
            check(breakdown, phases, only_one, regions, groups=groups)


@pytest.mark.parametrize(
    ("buckets", "found"),
    [([(80, 100)], 1), ([(20, 45), (45, 70), (70, 100)], 0)],
    ids=["nothing hidden", "most hidden"],
)
def test_4_percent_of_the_step_are_found_where_hardly_anything_is_hidden(buckets, found):
    """20 of 400 ms come after backward both times; 16 of them would be hidden in 5 buckets."""
    assert len(exposed_communication.detect(*tables(*buckets, step_ms=400))) == found


@pytest.mark.parametrize(("role", "percent"), [("dp", 5), ("tp", 10), ("ep", 10)])
def test_the_limit_is_that_of_the_groups_there_are(role, percent):
    """Beside gradients, 2 of 200 ms per step are exposed in the middle of three gathers of another group."""
    breakdown, phases, collectives, regions = tables((20, 30), (60, 84))
    gathers = [
        (rank, step, 3 * step + n, (200 * step + at) * MS, (200 * step + at + 2) * MS)
        for rank in range(2)
        for step in range(STEPS)
        for n, at in enumerate((5, 15, 25))
    ]
    rows = ["rank", "step", "instance_id", "start_ns", "end_ns"]
    more = pl.DataFrame(gathers, rows, orient="row").with_columns(
        op=pl.lit("allgather"),
        wait_ns=pl.lit(0, pl.Int64),
        size_bytes=pl.lit(MB, pl.Int64),
        group_id=pl.lit(1, pl.Int64),
    )
    spans = more.select("rank", "step", "start_ns", "end_ns", part=pl.lit("transfer"), label=pl.lit("allgather"))
    reduced = collectives.with_row_index("instance_id", 1000).with_columns(
        pl.col("instance_id").cast(pl.Int64), pl.col("wait_ns").cast(pl.Int64), group_id=pl.lit(0, pl.Int64)
    )
    calls = pl.concat([reduced, more], how="diagonal").with_columns(
        device_start_ns="start_ns", group=pl.col("group_id").cast(pl.String), group_size=pl.lit(2)
    )
    groups = pl.DataFrame({"group_id": [0, 1], "name": ["0", "1"], "role": ["", role], "members": ["0-3", "0,1"]})
    seen = breakdown, pl.concat([phases, spans], how="diagonal"), calls, regions, None, groups
    assert exposed_communication.detect(*seen) == []
    assert exposed_communication.resolution_ns(*seen) == 2 * percent * MS


def test_waiting_for_a_slow_peer_is_not_exposed_communication():
    assert exposed_communication.detect(*tables((80, 124), wait_ms=40)) == []


def test_without_backward_or_reductions_it_is_not_judged():
    breakdown, phases, collectives, regions = tables((80, 120))
    with pytest.raises(NotResolvable, match="backward"):
        exposed_communication.detect(breakdown, phases, collectives, regions.filter(kind="optimizer"))
    with pytest.raises(NotResolvable, match="reduction"):
        exposed_communication.detect(breakdown, phases, collectives.clear(), regions)


@pytest.mark.parametrize(("lasts", "found"), [(19_000, True), (2_400, False)])
def test_gradients_that_take_longer_than_backward_cost_all_that_comes_after_it(tmp_path, lasts, found):
    """Two ranks, steps of 100 ms: forward until 15, backward until 25 with four reductions in a row from 16 on, each of
    19 ms: 67 ms come after it, and more buckets hide no more."""
    for rank in (0, 1):
        events = []
        for number in range(6):
            at, first = 100_000 * number, 100 * number
            events.append(profiler_step(number, at, 99_990))
            spans = [("forward", 0, 15_000, 1), ("backward", 15_000, 10_000, 2)]
            for n, (name, since, length, thread) in enumerate(spans, 1):
                events.append(launch(at + 100 * n, 5, first + n, tid=thread))
                events.append(kernel(name, at + since, length, first + n, device=rank))
            for bucket in range(4):
                words = {"device": rank, "stream": 20, **meta(elements=10 * MB, Seq=4 * number + bucket)}
                events.append(launch(at + 300 + bucket, 1, first + 10 + bucket, tid=2))
                events.append(kernel(ALLREDUCE, at + 16_000 + lasts * bucket, lasts, first + 10 + bucket, **words))
            events.append(event("user_annotation", "Optimizer.step#SGD.step", at + 1_500, 200))
            events += [launch(at + 1_600, 5, first + 9), kernel("sgd", at + 93_000, 6_990, first + 9, device=rank)]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    report = rankscope.diagnose(rankscope.open(tmp_path))
    findings = [finding for finding in report.findings if finding.detector == "exposed_communication"]
    assert len(findings) == found
    for finding in findings:
        assert finding.title.startswith(
            "Gradients take 76.0 ms per step to reduce, longer than backward computes: 67.0 ms"
        )
        assert finding.lost_ns_per_step == pytest.approx(67 * MS, rel=0.01)


@pytest.mark.parametrize("begin", [70, 51])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_on_devices_backward_is_what_autograds_thread_has_launched(tmp_path, begin, microbatches):
    """Two ranks, steps of 100 ms: forward until 30, backward until 70, optimizer from 90 on; the gradients' reduction
    takes 20 ms, from `begin` on. Hosts launch all of a step in its first 2 ms. With two microbatches forward and
    backward come twice in that time, and the second backward takes 20 ms."""
    spans = [("forward", 0, 30, 1), ("backward", 30, 70, 2)]
    if microbatches == 2:
        spans = [("forward", 0, 15, 1), ("backward", 15, 35, 2), ("forward", 35, 50, 1), ("backward", 50, 70, 2)]
    for rank in (0, 1):
        events = []
        for number in range(6):
            at, first = 100_000 * number, 100 * number
            events.append(profiler_step(number, at, 99_990))
            words = {"device": rank, "stream": 20, **meta(elements=10 * MB, Seq=number)}
            events += [launch(at + 1_000, 5, first), kernel(ALLREDUCE, at + 1000 * begin, 20_000, first, **words)]
            for n, (name, since, until, thread) in enumerate(spans, 1):
                events.append(launch(at + 100 * n, 5, first + n, tid=thread))
                events.append(kernel(name, at + 1000 * since, 1000 * (until - since), first + n, device=rank))
            events.append(event("user_annotation", "Optimizer.step#SGD.step", at + 1_500, 200))
            events += [launch(at + 1_600, 5, first + 9), kernel("sgd", at + 90_000, 9_990, first + 9, device=rank)]
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 2})
    report = rankscope.diagnose(rankscope.open(tmp_path))
    assert "exposed_communication" not in [check.detector for check in report.not_checked]
    found = [finding for finding in report.findings if finding.detector == "exposed_communication"]
    if begin == 51:
        assert found == []
        return
    (finding,) = found
    assert finding.title.startswith("Of 20.0 ms per step for reducing gradients, 20.0 ms come after backward")
    assert finding.lost_ns_per_step == pytest.approx((20 - 20 / 5) * MS, rel=0.1)


@pytest.mark.alone
@pytest.mark.real_job
@pytest.mark.parametrize("late", [False, True], ids=["DDP", "by hand after backward"])
def test_real_job_that_reduces_after_backward_gets_that_advice(late, tmp_path):
    launcher = [
        RANKSCOPE,
        "run",
        "--no-report",
        "--out",
        tmp_path / "run",
        "--standalone",
        "--nproc-per-node",
        "2",
        JOB,
    ]
    launcher += ["--late"] if late else []
    subprocess.run([str(word) for word in launcher], check=True, capture_output=True, timeout=200)
    report = rankscope.diagnose(rankscope.open(tmp_path / "run"))
    assert ("exposed_communication" in {finding.detector for finding in report.findings}) == late
