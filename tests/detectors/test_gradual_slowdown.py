"""Steps that become longer little by little: a line through them shows it."""

from __future__ import annotations

import random

import numpy as np
import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import gradual_slowdown, step_change
from rankscope.errors import NotResolvable
from record import write
from simulate import Job, healthy_resources, run
from support import by_hand

MS = 1_000_000


def tables(parts_ms, *, ranks=4):
    """A synchronous job: `parts_ms` maps a part to a function of (rank, step), ms; ranks that are done early wait."""
    steps = 60
    busy = [[sum(ms(rank, step) for ms in parts_ms.values()) for step in range(steps)] for rank in range(ranks)]
    rows, spans, at = [], [], 0
    for step in range(steps):
        longest = max(values[step] for values in busy)
        for rank in range(ranks):
            values = {part: ms(rank, step) for part, ms in parts_ms.items()} | {"wait": longest - busy[rank][step]}
            rows += [(rank, step, part, round(ms * MS)) for part, ms in values.items()]
            spans.append((rank, step, at, at + round(longest * MS)))
        at += round(longest * MS)
    return (
        pl.DataFrame(rows, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(spans, ["rank", "step", "start_ns", "end_ns"], orient="row"),
    )


def noise(sigma, seed=0):
    rng = random.Random(seed)
    values = {(rank, step): rng.gauss(0, sigma) for rank in range(4) for step in range(60)}
    return lambda rank, step: values[rank, step]


def test_compute_that_grows_by_20_percent_costs_a_tenth_of_the_first_step():
    """From 100 to 120 ms in 59 equal steps: 110 ms on average, 10 more than at first."""
    (finding,) = gradual_slowdown.detect(
        *tables({"compute": lambda _, step: 90 + 20 * step / 59, "transfer": lambda *_: 10})
    )
    assert (finding.where, finding.ranks) == ("compute", ())
    assert finding.lost_ns_per_step == pytest.approx(10 * MS, rel=1e-6)
    assert finding.title == (
        "Steps become longer throughout the run, from 100 ms to 120 ms (20.0 %); what grows is compute"
    )
    assert [seen.note for seen in finding.evidence] == ["step 0: 100 ms", "step 59: 120 ms"]


def test_what_grew_before_the_first_judged_step_is_lost_too():
    """Judged are steps 10 to 59: on average step 34.5, at half a ms more in each."""
    breakdown, steps = tables({"compute": lambda _, step: 90 + step / 2})
    (finding,) = gradual_slowdown.detect(*(frame.filter(pl.col("step") >= 10) for frame in (breakdown, steps)))
    assert finding.lost_ns_per_step == pytest.approx(34.5 / 2 * MS, rel=1e-6)


def test_of_one_rank_it_costs_what_it_is_beyond_the_others():
    """Rank 2 takes 80 ms at first and 1 more in each step, the others 90: from step 10 on they wait for it."""
    (finding,) = gradual_slowdown.detect(*tables({"compute": lambda rank, step: 80 + step if rank == 2 else 90}))
    assert finding.ranks == (2,)
    assert finding.lost_ns_per_step == pytest.approx(sum(range(50)) / 60 * MS, rel=0.02)


def test_ranks_on_which_it_grows_are_named_and_waiting_is_not_what_grows():
    (finding,) = gradual_slowdown.detect(
        *tables({"compute": lambda *_: 90, "input": lambda rank, step: 1 + (step / 2 if rank == 2 else 0)})
    )
    assert (finding.where, finding.ranks) == ("input", (2,))


def test_under_noise_its_cost_is_within_its_error():
    jitter = noise(4)
    (finding,) = gradual_slowdown.detect(
        *tables({"compute": lambda rank, step: 90 + 20 * step / 59 + jitter(rank, step)})
    )
    assert abs(finding.lost_ns_per_step - 10 * MS) < finding.uncertainty_ns < 3 * MS


def test_lengths_that_vary_on_all_ranks_alike_do_not_hide_the_rank_that_falls_behind():
    """Lengths scatter by 20 of 90 ms; rank 1's growth by 30 ms is not seen in the steps, only beyond its peers."""
    alike = [random.Random(step).gauss(0, 20) for step in range(60)]
    (finding,) = gradual_slowdown.detect(
        *tables({"compute": lambda rank, step: 90 + alike[step] + (step / 2 if rank == 1 else 0)}), min_z=7
    )
    assert (finding.where, finding.ranks) == ("compute", (1,))
    assert finding.title.startswith("Rank 1 becomes slower than its peers, by 29.5 ms at the end")
    assert finding.lost_ns_per_step == pytest.approx(29.5 / 2 * MS, rel=1e-6)


def test_a_line_is_a_drift_and_a_shift_is_a_slowdown_never_both():
    line = tables({"compute": lambda rank, step: 90 + step})
    shift = tables({"compute": lambda rank, step: 90 if step < 35 else 140})
    said = [[f.detector for d in (gradual_slowdown, step_change) for f in d.detect(*t)] for t in (line, shift)]
    assert said == [["gradual_slowdown"], ["step_change"]]


@pytest.mark.parametrize(
    "ms",
    [
        lambda step: 90,
        lambda step: 90 + 4 * step / 59,
        lambda step: 120 - step / 2,
        lambda step: 250 if step % 10 == 0 else 90,
        lambda step: 90 if step < 30 else 95,
        lambda step: 90 + 10 * np.sin(step / 4),
    ],
    ids=["even", "4 percent", "shorter", "every 10th", "shift", "waves"],
)
def test_healthy_history_is_silent(ms):
    assert gradual_slowdown.detect(*tables({"compute": lambda _, step: ms(step)})) == []


def test_lengths_that_vary_or_wander_by_chance_are_silent():
    """Each length is like the one before: the uncorrected test finds a drift in many of these."""
    unsure = 0
    for seed in range(100):
        rng = random.Random(seed)
        wander = [0.0]
        for _ in range(59):
            wander.append(0.9 * wander[-1] + rng.gauss(0, 4))
        try:
            assert (
                gradual_slowdown.detect(*tables({"compute": lambda _, step, at=wander: 90 + at[step]}, ranks=1)) == []
            )
        except NotResolvable:
            unsure += 1
    assert unsure <= 5


def test_a_rise_that_chance_hardly_makes_is_not_called_healthy():
    """Lengths scatter by 20 ms around a line that rises by 30, which by itself costs 15."""
    varies = np.random.default_rng(0).normal(0, 20, 60)
    breakdown, steps = tables({"compute": lambda _, step: 100 + 30 * step / 59 + varies[step]})
    with pytest.raises(NotResolvable, match=r"seem to become longer, which costs 20\.8 ms ± 8\.60 ms"):
        gradual_slowdown.detect(breakdown, steps)


def test_short_run_is_not_judged():
    breakdown, steps = tables({"compute": lambda *_: 90})
    with pytest.raises(NotResolvable, match="20 analyzed steps, at least 30 are needed"):
        gradual_slowdown.detect(breakdown.filter(pl.col("step") < 20), steps)


def test_lengths_that_would_hide_a_drift_of_half_the_step_leave_it_unchecked():
    """Every other step takes 2 s, the others 0.1 s: no drift that a job can have would stand out."""
    report = rankscope.diagnose(by_hand.run({0: [20, 1900], 1: [20, 1900]}, steps=60))
    assert "gradual_slowdown" not in {healthy.detector for healthy in report.healthy}
    assert by_hand.not_checked(report)["gradual_slowdown"].startswith("in 58 analyzed steps nothing ")


@pytest.mark.parametrize("slower", [[], [5], list(range(8))], ids=["healthy", "one rank", "all ranks"])
def test_drift_is_the_one_verdict_on_a_job_whose_processors_slow_down(slower, tmp_path):
    """40 % slower at the end, with which a slow rank is no finding of its own."""
    job = Job(parallel="ddp", ranks=8, steps=60, compute_ns=90e6)
    can = healthy_resources(job)
    can.slowness = can.slowness * (1 + 0.4 * np.outer(np.arange(60) / 59, np.isin(np.arange(8), slower)))
    report = rankscope.diagnose(rankscope.open(write(run(job, can), tmp_path / "run")))
    roots = [(f.detector, f.ranks) for f in report.findings if f.caused_by is None]
    assert roots == ([("gradual_slowdown", () if len(slower) == 8 else (5,))] if slower else [])
    if slower:
        assert report.findings[0].lost_ns_per_step == pytest.approx(0.2 * 94e6, rel=0.15)
