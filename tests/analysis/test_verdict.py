"""The headline, its color and the levels: none of them contradicts the tables below it."""

import itertools
from dataclasses import replace

import polars as pl
import pytest

from rankscope.analysis.compare.gate import gate
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.diagnosis.judged_tables import code_of
from rankscope.analysis.diagnosis.losses import losses_of
from rankscope.analysis.diagnosis.verdict import Seen, verdict_of
from rankscope.analysis.report import terminal
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from support.by_hand import not_checked, run
from support.kineto import kernel, launch, meta, step, write


@pytest.fixture(scope="module")
def even():
    return diagnose(run({0: 800, 1: 800, 2: 800}))


def test_losses_are_the_breakdowns_and_sum_over_ranks_to_its_parts():
    report = diagnose(run({0: 40, 1: 70, 2: 40}))
    shown = {"wait": "wait", "communication": "transfer"}
    assert {loss.kind for loss in report.losses} == set(shown)
    for loss in report.losses:
        of_part = [part for part in report.breakdown if part.part == shown[loss.kind]]
        assert loss.ns_per_step == round(sum(part.ns_per_step for part in of_part) / len(report.ranks))
        assert loss.fraction == pytest.approx(loss.ns_per_step / report.steps.mean_ns)
    wait = next(loss for loss in report.losses if loss.kind == "wait")
    assert (wait.least_rank, wait.least_ns) == (1, 0)
    assert (wait.explained_by, wait.unexplained_fraction) == (("slow_rank",), 0)


CALLS = pl.DataFrame(schema={"rank": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64})


def test_devices_that_idle_with_work_queued_lose_it_and_short_gaps_between_kernels_do_not():
    spans = (
        ("compute", "no region", 0, 20),
        ("unsplit", "allreduce", 20, 35),
        ("other", "queued, not started", 35, 90),
        ("other", "launch not in the trace", 90, 98),
        ("other", "between kernels", 98, 100),
    )
    rows = [(0, 0, *span) for span in spans]
    phases = pl.DataFrame(rows, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row")
    length = (pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")
    losses = losses_of(phases.group_by("rank", "step", "part").agg(length), phases, CALLS.clear(), ())
    assert [(loss.kind, loss.fraction) for loss in losses] == [
        ("queued", pytest.approx(0.55)),
        ("unattributed", pytest.approx(0.15)),
        ("unseen", pytest.approx(0.08)),
    ]


def idle_in(*idle_ns):
    """Return the loss of a device that waits so long for its host in each step of 100 ns, where cudaFree takes 60 %."""
    rows, calls = [], []
    for number, idle in enumerate(idle_ns):
        begin = 100 * number
        rows += [
            (0, number, "host", "aten::cat", begin, begin + idle),
            (0, number, "compute", "no region", begin + idle, begin + 100),
        ]
        calls += [("cudaFree", begin - 5, begin + 6 * idle // 10), ("cudaLaunchKernel", begin + 90, begin + 99)]
    columns = ["rank", "step", "part", "label", "start_ns", "end_ns"]
    phases = pl.DataFrame([row for row in rows if row[5] > row[4]], columns, orient="row")
    length = (pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns")
    launches = pl.DataFrame(calls, ["name", "start_ns", "end_ns"], orient="row").with_columns(rank=0)
    (loss,) = losses_of(phases.group_by("rank", "step", "part").agg(length), phases, launches, ())
    return loss


def test_a_loss_says_the_call_that_takes_most_of_it_and_the_few_steps_that_hold_it():
    once, always = idle_in(80, 2, 2, 0, 0, 0), idle_in(30, 30, 20, 30, 20, 30)
    assert (once.where, once.call, once.steps) == ("aten::cat", "cudaFree", (0,))
    assert (always.where, always.call, always.steps) == ("aten::cat", "cudaFree", ())


def test_no_bottleneck_only_where_little_is_lost_and_little_could_be_overlooked(even):
    assert sum(loss.fraction for loss in even.losses) < 0.05
    assert (even.findings, even.status) == ((), "green")
    assert even.verdict == "No bottleneck above 1.1 % of the step in 10 analyzed steps of 3 ranks."


def test_time_that_is_lost_and_not_explained_is_the_headline_and_nothing_is_green():
    report = diagnose(run({0: [40, 80, 40], 1: [40, 40, 80], 2: [80, 40, 40]}, steps=5))
    assert report.status == "amber"
    assert "wait for peers takes " in report.verdict


def test_a_check_is_not_healthy_while_its_own_loss_is_the_unexplained_one():
    """The single all-reduce of a step has nothing to hide behind, so the check of exposed communication skips it."""
    report = diagnose(run({0: 40, 1: 40, 2: 40}))
    assert report.verdict.startswith("Unexplained: exposed communication takes 8.3 % of the 120 ms step ")
    assert "exposed_communication" not in {check.detector for check in report.healthy}
    why = "exposed communication takes 8.3 % of the step for no known reason"
    assert not_checked(report)["exposed_communication"] == why
    assert why not in report.verdict
    assert gate(report).unseen == (f"exposed communication: {why}",)


def test_where_statistics_and_replay_agree_a_finding_is_confirmed_and_of_few_steps_it_is_likely():
    sure = diagnose(run({0: 40, 1: 70, 2: 40}))
    assert [(f.detector, f.confidence) for f in sure.findings] == [("slow_rank", "confirmed")]
    assert not sure.verdict.startswith("Likely")
    assert sure.status == "red"
    few = diagnose(run({0: 40, 1: 70, 2: 40}, steps=5))
    assert [(f.detector, f.confidence) for f in few.findings] == [("slow_rank", "likely")]
    assert few.verdict.startswith("Likely: Rank 1 ")


def test_a_long_stall_of_one_rank_is_named_with_its_step_and_does_not_pass():
    """3 s in step 11, which is an outlier of 17 steps of 120 ms or so."""
    stall = [40] * 11 + [3040] + [40] * 8
    report = diagnose(run({0: 40, 1: stall, 2: 40}, steps=20))
    assert (report.status, report.findings, report.steps.outliers) == ("amber", (), 1)
    said = "; the others wait up to 3.00 s for rank 1"
    assert report.verdict.startswith(f"1 step, excluded as an outlier, takes 58.1 % of the time{said}. Unexplained: ")
    assert "outliers (1)" not in report.verdict
    assert f"step 11 was excluded as an outlier: it takes 3.12 s{said}" in [gap.why for gap in report.gaps]
    assert "why steps excluded as outliers (1) take 58.1 % of the time" in gate(report).unseen


def test_a_stall_that_takes_less_than_a_finding_costs_comes_after_it():
    """Of 57 steps of 150 ms one takes 1.35 s; rank 1 costs 30 ms of each."""
    report = diagnose(run({0: 40, 1: [70] * 11 + [1270] + [70] * 48, 2: 40}, steps=60))
    assert report.verdict.startswith("Rank 1 is slow")
    assert "; steps excluded as outliers (1) take " in report.verdict


@pytest.mark.parametrize(("status", "code"), [("green", "32"), ("amber", "33"), ("red", "31")])
def test_the_terminals_headline_has_the_color(even, status, code):
    shown = terminal.render(replace(even, status=status, verdict="The headline."), color=True)
    line = next(line for line in shown.splitlines() if "The headline." in line)
    assert line.startswith(f"\x1b[1;{code}m")


def test_what_a_finding_explains_of_a_loss_is_not_called_unexplained():
    """Of the wait rank 1 explains what it costs, and 25 % of the step is left."""
    trace = run({0: 40, 1: 70, 2: 40})
    report, timeline = diagnose(trace), build_timeline(trace)
    (finding,) = report.findings
    wait = next(loss for loss in report.losses if loss.kind == "wait")
    seen = Seen(
        ranks=report.ranks,
        world_size=report.world_size,
        steps=report.steps,
        rate=report.rate,
        breakdown=timeline.breakdown,
        waits=timeline.waits,
        lead=None,
        device_waits=None,
        waits_unseen=False,
        profiled=False,
        schedule=None,
        is_running=False,
        code=code_of(timeline),
        outliers="",
        aside="",
    )
    partly = replace(wait, fraction=0.25 + finding.lost_fraction, unexplained_fraction=0.25)
    verdict = verdict_of([finding], [], [], [partly], seen)
    assert "; unexplained: wait for peers takes 25.0 % of the step, most in allreduce (rank 1 waits" in verdict


def test_what_a_pipelines_schedule_takes_by_itself_is_said_of_a_capture(tmp_path):
    """Stage s of 3 computes microbatch n of 5 from 10 (s + n) ms on, for 10 ms: 2 / 7 of that time it must idle."""
    ends = {"send": "Dst Rank", "recv": "Src Rank"}
    for stage in range(3):
        events, number = [step(0, 0, 71_000)], itertools.count()
        waited = 0
        for microbatch in range(5):
            begin = 10_000 * (stage + microbatch)
            work = [("recv", stage - 1, waited, begin - waited), ("gemm", None, begin, 9_000)]
            work.append(("send", stage + 1, begin + 9_000, 1_000))
            for name, peer, at, length in work:
                if peer is None or 0 <= peer < 3:
                    told = {} if peer is None else meta(name, group="pp", ranks="[0, 1, 2]", **{ends[name]: peer})
                    kind = "gemm" if peer is None else "ncclDevKernel_SendRecv"
                    stream = {"recv": 20, "send": 21}.get(name, 7)
                    events += [
                        launch(at // 100, 5, launched := next(number)),
                        kernel(kind, max(at, 100), length, launched, stream=stream, **told),
                    ]
            waited = begin + 10_000
        reduced = meta("allreduce", group="all", ranks="[0, 1, 2]")
        events.append(launch(900, 5, 99))
        events.append(kernel("ncclDevKernel_AllReduce", waited, 71_000 - waited, 99, stream=22, **reduced))
        write(tmp_path / f"rank{stage}.json", events)
    verdict = diagnose(Trace.open(tmp_path)).verdict
    assert "with 5 microbatches on 3 stages 1F1B idles 28.6 % of its time by itself" in verdict
