"""A job that slows down as a whole: only its own other steps show it."""

from __future__ import annotations

import random

import polars as pl
import pytest

from rankscope.analysis.detectors import step_change
from rankscope.errors import NotResolvable

MS = 1_000_000


def tables(steps_ms, *, part="compute", ranks=4, waits=None):
    """A job whose ranks all spend the same time in `part`, beside 10 ms of transfer; all `waits` are for rank 0."""
    waits = waits or [0] * len(steps_ms)
    rows, steps, at = [], [], 0
    for step, (ms, wait) in enumerate(zip(steps_ms, waits, strict=True)):
        for rank in range(ranks):
            parts = {"compute": 0, "transfer": 10, "wait": wait if rank else 0, part: ms + (0 if rank else wait)}
            parts["transfer"] += ms if part == "transfer" else 0
            rows += [(rank, step, name, round(value * MS)) for name, value in parts.items()]
            steps.append((rank, step, at, at + round((ms + 10 + wait) * MS)))
        at += round((ms + 10 + wait) * MS)
    return (
        pl.DataFrame(rows, ["rank", "step", "part", "ns"], orient="row"),
        pl.DataFrame(steps, ["rank", "step", "start_ns", "end_ns"], orient="row"),
    )


def noisy(mean, count, *, sigma, seed=0):
    rng = random.Random(seed)
    return [rng.gauss(mean, sigma) for _ in range(count)]


def test_last_third_20_percent_slower_costs_a_third_of_that():
    (finding,) = step_change.detect(*tables([90] * 40 + [110] * 20))
    assert (finding.ranks, finding.steps, finding.where) == ((), tuple(range(40, 60)), "compute")
    assert finding.lost_ns_per_step == pytest.approx(20 * MS / 3)
    assert finding.evidence[0].note == "step 40: the first slow one"


def test_an_episode_in_the_middle_is_found_with_its_end():
    (finding,) = step_change.detect(*tables([90] * 20 + [130] * 15 + [90] * 25, part="transfer"))
    assert (finding.steps[0], finding.steps[-1], finding.where) == (20, 34, "transfer")


def test_under_noise_the_borders_are_found_within_three_steps():
    (finding,) = step_change.detect(*tables(noisy(90, 60, sigma=5) + noisy(115, 40, sigma=5, seed=1)))
    assert abs(finding.steps[0] - 60) <= 3
    assert finding.steps[-1] == 99
    assert finding.lost_ns_per_step == pytest.approx(0.4 * 25 * MS, rel=0.15)


@pytest.mark.parametrize(
    "steps_ms",
    [
        [90] * 60,
        [90] * 40 + [97] * 20,
        [90] * 55 + [130] * 5,
        [90 if step % 10 else 250 for step in range(100)],
        [90] * 59 + [5000],
    ],
    ids=["even", "8 percent", "5 steps", "every 10th", "one hiccup"],
)
def test_healthy_history_is_silent(steps_ms):
    assert step_change.detect(*tables(steps_ms)) == []


def test_lengths_that_vary_by_a_quarter_at_random_are_silent():
    for seed in range(200):
        assert step_change.detect(*tables(noisy(90, 80, sigma=22, seed=seed), ranks=1)) == []


def test_one_rank_that_makes_the_others_wait_is_not_uniform():
    assert step_change.detect(*tables([90] * 60, waits=[0] * 30 + [40] * 30)) == []


def test_short_run_is_not_judged():
    with pytest.raises(NotResolvable, match="30 analyzed steps, at least 35 are needed"):
        step_change.detect(*tables([90] * 30))
