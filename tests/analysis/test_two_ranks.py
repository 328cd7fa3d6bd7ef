"""Two ranks side by side: what one does longer adds up to its step, by part, by kernel and by line of code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.compare import two_ranks
from rankscope.analysis.compare.two_ranks import RankSide
from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.analysis.timeline.code_samples import PLACES, SAMPLES
from record import write
from simulate import Job, healthy_resources, run

JOB = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)
MS = 1_000_000


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankSide, RankSide]:
    """A usual rank, and rank 2, which takes half again as long: 45 ms of 90 and 2 of the optimizer's 4."""
    can = healthy_resources(JOB)
    can.slowness = can.slowness * np.where(np.arange(4) == 2, 1.5, 1.0)
    trace = Trace.open(write(run(JOB, can), tmp_path_factory.mktemp("two") / "slow"))
    timeline = build_timeline(trace)
    report = report_on(trace, timeline).report
    usual = two_ranks.median_rank(report, but=2)
    assert usual in (0, 1, 3)
    a, b = (RankSide(rank=rank, report=report, timeline=timeline) for rank in (usual, 2))
    return a, b


def test_a_slow_rank_computes_longer_and_waits_less_and_that_adds_up(sides):
    step, parts = two_ranks.part_changes(*sides)
    change = {part.part: part.change_ns for part in parts}
    assert sum(change[part] for part in ("compute", "overlapped", "optimizer")) == pytest.approx(47 * MS, rel=0.1)
    assert change["wait"] == pytest.approx(-47 * MS, rel=0.1)
    assert sum(change.values()) == step.change_ns
    assert abs(step.change_ns) < MS  # they leave each step together


def test_the_median_is_that_of_the_others(sides):
    report = sides[0].report
    own = dict.fromkeys(range(4), 0)
    for part in report.breakdown:
        own[part.rank] += part.ns_per_step if part.part in ("compute", "overlapped") else 0
    others = sorted((0, 1, 3), key=lambda rank: own[rank])
    assert two_ranks.median_rank(report, but=2) == others[1]
    assert two_ranks.median_rank(replace(report, ranks=(2,), breakdown=(), step_ns={}), but=2) is None


def test_pieces_begin_with_their_ranks_step(sides):
    for side in sides:
        step = two_ranks.steps_of_both(*sides)[3]
        rows = two_ranks.pieces(side, step)
        (length,) = side.rows("steps").filter(pl.col("step") == step).select(pl.col("end_ns") - pl.col("start_ns"))
        assert (rows["start_ns"].min(), rows["end_ns"].max()) == (0, length.item())


def test_work_is_that_of_each_rank_per_step(sides):
    """Every step a kernel of 3 ms on rank 2 and of 1 ms on the other; the analyzed steps are as many on both."""

    def with_kernels(side: RankSide) -> RankSide:
        rows = side.rows("steps").select("rank", "start_ns", name=pl.lit("gemm"), work=pl.lit("compute"))
        length = pl.lit(3 * MS if side.rank == 2 else MS)
        kernels = rows.with_columns((pl.col("start_ns") + length).alias("end_ns"))
        return replace(side, timeline=replace(side.timeline, kernels=kernels))

    (gemm,) = two_ranks.work_changes(*map(with_kernels, sides)).to_dicts()
    assert (gemm["name"], gemm["a_ns"], gemm["b_ns"], gemm["change_ns"]) == ("gemm", MS, 3 * MS, 2 * MS)


def test_lines_of_code_add_up_to_the_step(sides):
    """Of 100 samples of each rank, `slow` has 50 on rank 2 and 10 on the other, and `usual` the rest."""
    lines = [(1, 0, "slow", "/job/train.py", 7), (2, 0, "usual", "/job/train.py", 9)]
    places = pl.DataFrame(lines, PLACES, orient="row")

    def sampled(side: RankSide) -> RankSide:
        step = side.steps()["step"][0]
        share = 50 if side.rank == 2 else 10
        rows = [(side.rank, step, "compute", at, 1 if at < share else 2) for at in range(100)]
        samples = pl.DataFrame(rows, SAMPLES, orient="row")
        return replace(side, timeline=replace(side.timeline, samples=samples, places=places))

    changes = two_ranks.code_changes(*map(sampled, sides))
    step_ns = [(side.steps()["end_ns"] - side.steps()["start_ns"]).mean() for side in sides]
    changes = changes.sort("place")
    assert changes["place"].to_list() == ["train.py:7 (slow)", "train.py:9 (usual)"]
    assert changes["a_ns"].sum() == pytest.approx(step_ns[0], abs=1)
    assert changes["b_ns"].sum() == pytest.approx(step_ns[1], abs=1)
    assert changes["change_ns"][0] == pytest.approx(0.4 * step_ns[0], rel=0.01)
    assert changes["error_ns"][0] == pytest.approx(1.96 * (0.0009 + 0.0025) ** 0.5 * step_ns[0], rel=0.01)
