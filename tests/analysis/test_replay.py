"""Replay of pipeline steps: small ones that can be followed by hand, and the published what-if of a real job."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.detectors import pipeline_bubble, stage_imbalance
from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.model.pipeline_ops import BACKWARD, FORWARD
from rankscope.analysis.replay.pipeline import communicates, op_grid, pipeline, schedule, theory_fraction
from rankscope.analysis.replay.pipeline_plan import Group, WhatIf, ends, ideal, plan, replay, transfers
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.pipeline_ops import steps_of_ops
from rankscope.errors import NotReplayable, NotResolvable
from support.paths import DATA

STUDY = DATA / "ops" / "bytedance-st"
PRIMUS = DATA / "pipeline" / "primus-pp8"
MS = 1_000_000


def lanes(*durations):
    """One step of one replica."""
    return np.array(durations, dtype=float)[:, None, None]


def test_operation_starts_when_all_it_waits_for_have_ended():
    """0 takes 3, 1 takes 5; 2 waits for both and takes 1."""
    start, end = replay(plan({2: [0, 1]}, [], 3), lanes(3, 5, 1))
    assert (start.ravel().tolist(), end.ravel().tolist()) == ([0, 0, 5], [3, 5, 6])


def test_group_moves_data_when_its_last_member_has_started():
    """1 and 2 are a send and its receive: the send starts at 3, the receive at 0, both end 1 later than 3."""
    made = plan({1: [0]}, [Group((1, 2))], 3)
    start, end = replay(made, lanes(3, 1, 1))
    assert start.ravel().tolist() == [0, 3, 0]
    assert end.ravel().tolist() == [3, 4, 4]
    assert transfers(made, start, end).ravel().tolist() == [3, 1, 1]


def test_group_across_replicas_waits_for_the_slowest_replica():
    """Replica 0 computes 2, replica 1 computes 7; then both reduce for 1."""
    durations = np.array([[[2.0, 7.0]], [[1.0, 1.0]]])
    assert ends(plan({1: [0]}, [Group((1,), across_replicas=True)], 2), durations).tolist() == [8]


def test_operations_in_a_circle_are_refused():
    with pytest.raises(NotReplayable, match="circle"):
        plan({0: [1], 1: [0]}, [], 2)


def test_ideal_is_the_mean_of_computations_and_the_median_of_communication():
    durations = lanes(1, 3, 8, 1, 3, 8)
    kinds = [FORWARD] * 3 + ["forward-send"] * 3
    assert ideal(durations, kinds, communicates).ravel().tolist() == [4, 4, 4, 3, 3, 3]


def run(forward, backward, *, microbatches=4, steps=6, transfer=0.0, stall=0.0, early=0, order="1F1B"):
    """Table `ops` of a pipeline with one rank per stage; times in ms, one forward and backward time per stage.

    `stall` is what every stage loses before each computation and no operation shows; `early` is how many forwards
    more than 1F1B needs each stage does before its first backward.
    """
    stages = len(forward)
    warmup = [min(stages - s - 1 + early, microbatches) if order == "1F1B" else microbatches for s in range(stages)]
    todo = [
        [("F", i) for i in range(w)]
        + [step for i in range(w, microbatches) for step in (("F", i), ("B", i - w))]
        + [("B", i) for i in range(microbatches - w, microbatches)]
        for w in warmup
    ]
    end, free = {}, [0.0] * stages
    rows = []
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                kind, i = todo[stage][0]
                source = (kind, i, stage - 1 if kind == "F" else stage + 1)
                first = stage == (0 if kind == "F" else stages - 1)
                if not first and source not in end:
                    break
                begin = max(free[stage], 0 if first else end[source] + transfer) + stall
                free[stage] = end[kind, i, stage] = begin + (forward if kind == "F" else backward)[stage]
                rows.append((stage, FORWARD if kind == "F" else BACKWARD, i, begin, free[stage]))
                todo[stage].pop(0)
    length = max(row[4] for row in rows)
    table = [
        (stage, step, name, stage, 0, None, i, i, round((step * length + a) * MS), round((step * length + b) * MS))
        for step in range(steps)
        for stage, name, i, a, b in rows
    ]
    columns = ["rank", "step", "name", "stage", "replica", "chunk", "microbatch", "seq", "start_ns", "end_ns"]
    return pl.DataFrame(table, columns, orient="row").with_columns(pl.col("chunk").cast(pl.Int32))


def test_1f1b_of_two_stages_and_two_microbatches_idles_a_third():
    """Forward 1 ms, backward 2 ms: 2 × 3 ms of work in 9 ms on each stage, as (p - 1) / (m + p - 1) = 1 / 3 says."""
    found = pipeline(run([1, 1], [2, 2], microbatches=2))
    assert (found.schedule, found.stages, found.microbatches) == ("1F1B", 2, 2)
    assert found.theory_fraction == theory_fraction(2, 2) == pytest.approx(1 / 3)
    assert found.bubble == pytest.approx({0: 1 / 3, 1: 1 / 3})
    assert sum(found.excess.values()) == pytest.approx(0)


def interleaved(order, longer=()):
    """Six steps of two ranks with two chunks of the model each, stages 0 and 2, 1 and 3. Forward 1 ms, backward 2.

    Nothing is sent. Stages may take `longer`, by so many times.
    """
    end, free, rows = {}, [0, 0], []
    waiting = [list(mine) for mine in order]
    while any(waiting):
        for rank, mine in enumerate(waiting):
            while mine:
                name, stage, microbatch = mine[0]
                needs = (name, stage + (-1 if name == FORWARD else 1), microbatch)
                if 0 <= needs[1] < 4 and needs not in end:
                    break
                start = max(free[rank], end.get(needs, 0), end.get((FORWARD, stage, microbatch), 0))
                takes = (1 if name == FORWARD else 2) * dict(longer).get(stage, 1)
                free[rank] = end[mine.pop(0)] = start + takes
                rows.append((rank, stage, name, microbatch, round(start * MS), round(free[rank] * MS)))
    names = ["rank", "stage", "name", "seq", "start_ns", "end_ns"]
    steps = pl.DataFrame({"step": range(6)}).with_columns(replica=0, chunk=pl.lit(None, pl.Int32))
    one = pl.DataFrame(rows, names, orient="row")
    return one.join(steps, how="cross").with_columns(
        pl.col("start_ns", "end_ns") + pl.col("step") * one["end_ns"].max()
    )


def megatron(rank, ahead):
    """Its order: 4 microbatches in groups of 2 through the 2 chunks of the rank, `ahead` forwards before a backward."""
    groups = [(chunk, m) for first in (0, 2) for chunk in (0, 1) for m in (first, first + 1)]
    forwards = [(FORWARD, 2 * chunk + rank, m) for chunk, m in groups]
    backwards = [(BACKWARD, 2 * (1 - chunk) + rank, m) for chunk, m in groups]
    steady = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
    return [*forwards[:ahead], *steady, *backwards[8 - ahead :]]


def test_interleaved_stages_of_one_rank_run_one_after_the_other():
    """4 microbatches on 2 ranks with 2 chunks: 24 ms of work each in 27, as (p - 1) / (v m + p - 1) = 1 / 9 says.

    Rank 0 runs 4 forwards ahead, rank 1 runs 2.
    """
    ops = interleaved([megatron(0, 4), megatron(1, 2)])
    found = pipeline(ops)
    assert (found.schedule, found.stages, found.microbatches) == ("interleaved 1F1B", 2, 4)
    assert found.theory_fraction == theory_fraction(2, 4, 2) == pytest.approx(1 / 9)
    assert found.bubble == pytest.approx({0: 1 / 9, 1: 1 / 9})
    grid = op_grid(ops)
    assert grid.measured_ns.tolist() == ends(grid.plan, grid.duration_ns).tolist() == [27 * MS] * 6
    assert pipeline_bubble.detect(ops) == []


def test_a_rank_of_which_all_stages_are_long_may_be_slow_itself():
    """Stages 1 and 3, of rank 1, take half as long again; of stage 3 alone layers can be moved."""
    both = interleaved([megatron(0, 4), megatron(1, 2)], longer={1: 1.5, 3: 1.5})
    one = interleaved([megatron(0, 4), megatron(1, 2)], longer={3: 1.5})
    said = [[(f.ranks, f.where.split(",")[0], f.advice) for f in stage_imbalance.detect(ops)] for ops in (both, one)]
    assert {where for _, where, _ in said[0]} == {"stage 1", "stage 3"}
    assert all(advice.startswith("All stages of rank 1 are too long") for *_, advice in said[0])
    assert [(ranks, where, advice[:24]) for ranks, where, advice in said[1]] == [
        ((1,), "stage 3", "Move layers from stage 3")
    ]


def test_schedules_are_distinguished_by_the_order_of_their_computations():
    assert schedule({0: "FFBFBB", 1: "FBFBFB"}) == "1F1B"
    assert schedule({0: "FFFBBB", 1: "FFFBBB"}) == "GPipe"
    assert schedule({0: "FFBBFB", 1: "FBFBFB"}) == "unknown"
    assert schedule({0: "FFFFBBBB", 1: "FFFFBBBB"}, chunks=2) == "interleaved GPipe"
    assert schedule({0: "FFFFBFBBFBBB", 1: "FFFFBBFFBBFB"}, chunks=2) == "unknown"
    assert pipeline(run([1, 1, 1], [2, 2, 2], order="GPipe")).schedule == "GPipe"


def test_replay_of_a_recorded_step_gives_its_length():
    grid = op_grid(run([1, 2, 1], [2, 3, 4]))
    whatif = WhatIf(grid.plan, grid.duration_ns, grid.duration_ns)
    assert whatif.actual_step_ns == pytest.approx(grid.measured_ns.mean())
    assert whatif.slowdown == 1


def test_stage_with_more_work_is_named_with_what_it_costs():
    """Stage 2 takes 9 ms per microbatch, the others 6."""
    found = stage_imbalance.detect(run([2, 2, 3], [4, 4, 6], microbatches=8))
    assert [(f.ranks, f.severity, f.where) for f in found] == [((2,), "high", f"stage 2, {BACKWARD}")]
    assert found[0].title == "Pipeline stage 2 is too long: 9.00 ms per microbatch, the others 6.00 ms"
    # 8 × 9 ms and 6 ms on each side of it; with 6 ms everywhere 60 ms, with 7 ms everywhere 70.
    assert found[0].lost_fraction == pytest.approx((84 - 60) / 84)
    assert (
        "even stages would save 14.0 ms per step, less than its cost, since the others then compute its layers"
        in found[0].advice
    )
    assert found[0].fix == "stage:2"


def test_equal_stages_are_healthy_and_a_small_difference_stays_below_the_threshold():
    assert stage_imbalance.detect(run([2, 2, 2], [4, 4, 4])) == []
    assert stage_imbalance.detect(run([2, 2, 2.03], [4, 4, 4.06])) == []
    assert stage_imbalance.resolution_ns(run([2, 2, 2], [4, 4, 4])) == pytest.approx(0.03 * 6 * 6 * MS)


def test_no_result_for_one_stage_a_missing_stage_or_time_that_is_not_recorded():
    ops = run([2, 2, 2], [4, 4, 4])
    with pytest.raises(NotResolvable, match="only one pipeline stage"):
        stage_imbalance.detect(run([2], [4]))
    with pytest.raises(NotResolvable, match="no operations of stage 1"):
        stage_imbalance.detect(ops.filter(pl.col("stage") != 1))
    with pytest.raises(NotResolvable, match="misses their length"):
        stage_imbalance.detect(run([2, 2, 3], [4, 4, 6], stall=2))
    with pytest.raises(NotResolvable, match="what operations of type mystery wait for is unknown"):
        stage_imbalance.detect(ops.with_columns(name=pl.lit("mystery")))


def test_bubble_as_the_schedule_needs_it_is_no_finding():
    assert pipeline_bubble.detect(run([2, 2, 2], [4, 4, 4])) == []
    assert pipeline_bubble.detect(run([2, 2, 3], [4, 4, 6])) == []  # stage_imbalance says that
    with pytest.raises(NotResolvable, match="neither 1F1B nor GPipe"):
        pipeline_bubble.detect(run([2, 2], [4, 4], early=1))


def test_bubble_above_theory_is_reported_and_split():
    """Before each computation 2 ms pass that no operation shows, and 1 ms between neighbours."""
    found = pipeline_bubble.detect(run([2, 2, 2], [4, 4, 4], stall=2, transfer=1))
    assert [(f.severity, f.where) for f in found] == [("high", "stage 0")]
    cost = duration(found[0].lost_ns_per_step)
    assert found[0].title.startswith(f"Steps of the pipeline take {cost} longer than 1F1B needs with its transfers, ")
    assert found[0].title.endswith("mostly for waiting for what is not recorded")
    shape = pipeline(run([2, 2, 2], [4, 4, 4], stall=2, transfer=1))
    assert sum(shape.excess.values()) == pytest.approx(shape.bubble[shape.busiest_stage] - shape.theory_fraction)


def test_bubble_costs_the_mean_of_what_its_steps_are_longer():
    """Before each computation 2 ms pass in four steps, and 4 ms in two."""
    stalls = (run([2, 2, 2], [4, 4, 4], stall=2, steps=4), run([2, 2, 2], [4, 4, 4], stall=4, steps=2))
    short, long = (pipeline_bubble.detect(ops)[0].lost_ns_per_step for ops in stalls)
    length = stalls[0]["end_ns"].max()
    later = stalls[1].with_columns(pl.col("step") + 4, *(pl.col(c) + length for c in ("start_ns", "end_ns")))
    (found,) = pipeline_bubble.detect(pl.concat([stalls[0], later]))
    assert long == pytest.approx(2 * short, rel=0.01)
    assert found.lost_ns_per_step == pytest.approx((4 * short + 2 * long) / 6, rel=0.01)


def test_steps_that_differ_are_left_out_and_counted():
    """Of 6 steps one lacks an operation and one takes ten times as long."""
    ops = run([2, 2], [4, 4])
    ops = ops.filter(~((pl.col("step") == 3) & (pl.col("seq") == 0) & (pl.col("name") == BACKWARD)))
    grid = op_grid(ops)
    assert (grid.dropped, grid.steps) == (1, (0, 1, 2, 4, 5))
    slow = ops.with_columns(pl.when(pl.col("step") == 5).then(pl.col("end_ns") + 10**9).otherwise("end_ns"))
    steps = steps_of_ops(slow).filter(pl.col("rank") == 0)
    assert steps["aside"].to_list() == [None] * 5 + ["outlier"]


@pytest.mark.needs_data
def test_published_what_if_of_a_real_job_is_reproduced():
    """Every figure of the study's result files, to 1e-6."""
    grid = op_grid(Trace.open(STUDY / "trace-ST.parquet").table("ops").collect())
    result, ms, mw = (json.loads((STUDY / f"{name}-ST.json").read_text()) for name in ("result", "ms", "mw"))
    whatif = WhatIf(grid.plan, grid.duration_ns, ideal(grid.duration_ns, grid.kinds, communicates))
    actual, best = ends(grid.plan, whatif.actual_ns), ends(grid.plan, whatif.ideal_ns)

    def check(ours, theirs):
        assert math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6)

    def check_steps(ours, theirs):
        for step, value in zip(grid.steps, ours, strict=True):
            check(value, theirs[str(step)])

    check_steps(grid.measured_ns / 1e9, result["step_t_base"])
    check_steps(actual / 1e9, result["step_t_nodelay"])
    check_steps(best / 1e9, result["step_t_noblk"])
    check(whatif.slowdown, 1.1787021837)
    check(whatif.slowdown, result["blocking_slowdown"])
    check(grid.measured_ns.mean() / actual.mean(), result["launch_slowdown"])
    check_steps(actual / best, result["blocking_step_slowdown"])
    check_steps(grid.measured_ns / actual, result["launch_step_slowdown"])

    names = {f"{way}-{end}": f"{way}-pp-comm" for way in ("forward", "backward") for end in ("send", "recv")}
    replica = np.arange(grid.start_ns.shape[2])[None, None, :] + np.zeros((len(grid.keys), 1, 1))
    labels = {
        "stage": np.array([key.stage for key in grid.keys])[:, None, None],
        "dp_rank": replica,
        "optype": np.array([names.get(key.kind, key.kind) for key in grid.keys])[:, None, None],
    }
    for dimension, label in labels.items():
        overall = result[f"blocking_decompose_by_{dimension}"]
        per_step = result[f"blocking_decompose_by_{dimension}_per_step"]
        for value, theirs in overall.items():
            only = whatif.only_ns(label == (value if dimension == "optype" else int(value)))
            check(only.mean() / whatif.ideal_step_ns, theirs)
            check_steps(only / best, {step: by_value[value] for step, by_value in per_step.items()})

    last = labels["stage"] == 3
    worst = (grid.ranks == 7)[:, None, :]
    for chosen, theirs, share in ((last, ms, "Ms"), (worst, mw, "Mw")):
        check(whatif.actual_step_ns / 1e9, theirs["tori"])
        check(whatif.ideal_step_ns / 1e9, theirs["tideal"])
        check(whatif.without_ns(chosen).mean() / 1e9, theirs["trem"])
        check(whatif.only_ns(chosen).mean() / 1e9, theirs["tadd"])
        check(whatif.share(chosen), theirs["rem"])
        check(whatif.share(chosen), theirs[share])
        added = (whatif.only_ns(chosen).mean() - best.mean()) / (actual.mean() - best.mean())
        check(added, theirs["add"])


@pytest.mark.needs_data
@pytest.mark.parametrize("name", ["", "trace-ST.parquet"])
def test_long_stage_of_a_real_job_is_found(name):
    """The last stage takes 0.171 s on average of forward and backward, the others 0.105 s."""
    report = diagnose(Trace.open(STUDY / name))
    assert [(f.detector, f.ranks, f.severity) for f in report.findings] == [("stage_imbalance", (6, 7), "high")]
    assert "343 ms per microbatch, the others 211 ms" in report.findings[0].title
    assert report.steps.count == 32
    assert "slow_rank" in {check.detector for check in report.healthy}


@pytest.mark.needs_data
def test_bubble_of_a_real_pipeline_is_as_its_schedule_needs_it():
    """8 stages, 16 microbatches: 7 / 23 = 30.4 % in theory, 30.0 % on the last stage, which has 9 % more work."""
    report = diagnose(Trace.open(PRIMUS))
    found = report.pipeline
    assert (found.schedule, found.stages, found.microbatches, found.busiest_stage) == ("1F1B", 8, 16, 7)
    assert found.theory_fraction == pytest.approx(7 / 23)
    assert found.bubble[7] == pytest.approx(0.3002, abs=2e-4)
    assert sum(found.excess.values()) == pytest.approx(found.bubble[7] - 7 / 23)
    assert found.explanation.startswith("Stage 7 idles 30.0 % where 1F1B needs 30.4 %")
    assert "pipeline_bubble" in {healthy.detector for healthy in report.healthy}
    # What is to be gained is small and true: 142 ms per microbatch on stage 7 against 130 ms.
    assert [(f.detector, f.ranks, f.severity) for f in report.findings] == [("stage_imbalance", (7,), "low")]
