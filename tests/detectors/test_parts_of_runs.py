"""What acts in a part of a run only, from some step on or until one: who, in which steps, at what cost."""

from __future__ import annotations

import numpy as np
import pytest

import rankscope
from record import write
from simulate import Job, healthy_resources, run, step_ns

STEPS = 60


def slower_ranks(can, inside, ranks):
    can.slowness[np.ix_(inside, ranks)] *= 1.3


def slower_link(can, inside, node):
    can.nic[inside, node] /= 15


def longer_stage(can, inside, stage):
    can.stage_work[inside, stage] *= 1.6


def recorded(job, folder, change, inside, which):
    """The report, and the true cost: what the mean step takes longer than without the change."""
    can = healthy_resources(job)
    without = step_ns(run(job, can))
    change(can, np.arange(*inside), which)
    log = run(job, can)
    return rankscope.diagnose(rankscope.open(write(log, folder / "run"))), step_ns(log) - without


@pytest.mark.parametrize(
    ("parallel", "change", "which", "detector", "named"),
    [
        ("fsdp", slower_ranks, [5], "slow_rank", {"ranks": (5,)}),
        ("ddp-nccl", slower_ranks, [5], "slow_rank", {"ranks": (5,)}),
        ("ddp-rccl", slower_ranks, [5], "slow_rank", {"ranks": (5,)}),
        ("moe", slower_ranks, range(8, 16), "slow_rank", {"ranks": tuple(range(8, 16)), "nodes": (1,)}),
        ("fsdp", slower_link, 2, "slow_link", {"nodes": (2,)}),
        ("pp-1f1b", longer_stage, 2, "stage_imbalance", {"ranks": tuple(range(16, 24))}),
    ],
)
@pytest.mark.parametrize("inside", [(20, STEPS), (2, 45), (30, 50)])
def test_what_acts_in_a_part_of_the_run_is_named_with_its_steps(
    parallel, change, which, detector, named, inside, tmp_path
):
    job = Job(parallel=parallel, ranks=32, steps=STEPS, seed=3)
    report, cost_ns = recorded(job, tmp_path, change, inside, which)
    roots = [finding for finding in report.findings if not finding.caused_by]
    assert [finding.detector for finding in roots] == [detector]
    assert {key: getattr(roots[0], key) for key in named} == named
    # The first fifth of the steps is left out where it is longer than the others.
    first = max(inside[0], STEPS - report.steps.count)
    assert abs(roots[0].steps[0] - first) <= 2
    assert abs(roots[0].steps[-1] - (inside[1] - 1)) <= 2
    assert roots[0].lost_ns_per_step == pytest.approx(cost_ns, rel=0.25)


def test_a_change_of_all_ranks_names_none(tmp_path):
    report, cost_ns = recorded(
        Job(parallel="fsdp", ranks=16, steps=STEPS, seed=3), tmp_path, slower_ranks, (30, STEPS), range(16)
    )
    (finding,) = report.findings
    assert (finding.detector, finding.ranks, finding.steps) == ("step_change", (), tuple(range(30, STEPS)))
    assert finding.lost_ns_per_step == pytest.approx(cost_ns, rel=0.1)


def test_a_rank_that_is_always_slow_does_not_explain_that_all_become_slower(tmp_path):
    """Rank 5 costs a quarter of 120 ms in all steps, the change of all ranks as much in half of them."""
    can = healthy_resources(job := Job(parallel="fsdp", ranks=16, steps=STEPS, seed=3))
    can.slowness[:, 5] *= 1.25
    can.slowness[30:] *= 1.25
    report = rankscope.diagnose(rankscope.open(write(run(job, can), tmp_path / "run")))
    found = {finding.detector: finding for finding in report.findings if not finding.caused_by}
    assert found.keys() == {"slow_rank", "step_change"}
    assert (found["slow_rank"].ranks, found["slow_rank"].steps) == ((5,), ())
    assert found["step_change"].steps == tuple(range(30, STEPS))
