"""Tables of pipeline operations: slow workers, uneven microbatches and long stages, with what they cost."""

import json

import numpy as np
import polars as pl
import pytest

import rankscope
from support.paths import DATA

OPS = DATA / "ops"
STAGES, REPLICAS, MICROBATCHES = 3, 3, 6
FORWARD_MS, BACKWARD_MS = 10.0, 20.0


def order_of_1f1b(stage, microbatches):
    ahead = min(STAGES - stage - 1, microbatches)
    middle = [op for i in range(microbatches - ahead) for op in (("F", i + ahead), ("B", i))]
    return [("F", i) for i in range(ahead)] + middle + [("B", i) for i in range(microbatches - ahead, microbatches)]


def one_replica(factor):
    """(stage, kind, microbatch, start, end) in ms of a step; `factor` of a computation by (stage, microbatch)."""
    end, rows, free = {}, [], [0.0] * STAGES
    todo = [order_of_1f1b(stage, MICROBATCHES) for stage in range(STAGES)]
    while any(todo):
        for stage in range(STAGES):
            while todo[stage]:
                kind, i = todo[stage][0]
                first = stage == (0 if kind == "F" else STAGES - 1)
                source = ("F", i, stage) if kind == "B" and first else (kind, i, stage + (-1 if kind == "F" else 1))
                if source not in end and not (kind == "F" and first):
                    break
                start = max(free[stage], end.get(source, 0.0))
                free[stage] = start + (FORWARD_MS if kind == "F" else BACKWARD_MS) * factor(stage, i)
                end[kind, i, stage] = free[stage]
                rows.append((stage, "forward-compute" if kind == "F" else "backward-compute", i, start, free[stage]))
                todo[stage].pop(0)
    return rows


def table(folder, steps=12, *, factor=lambda step, replica, stage, i: 1.0, apart=1, noise=0.01, seed=0):
    """A file of operations of `STAGES` × `REPLICAS` workers whose computations scatter by `noise`."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(steps):
        for replica in range(REPLICAS):
            scatter = 1 + noise * rng.standard_normal((STAGES, MICROBATCHES))
            for stage, kind, i, start, end in one_replica(
                lambda s, i, r=replica, n=step, x=scatter: factor(n, r, s, i) * x[s, i]
            ):
                rank = (stage * REPLICAS + replica) * apart
                rows.append((replica, stage, rank, step, kind, start / 1e3, (end - start) / 1e3, i, 0, i))
    names = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id"]
    folder.mkdir(parents=True, exist_ok=True)
    pl.DataFrame(rows, names, orient="row").write_parquet(folder / "ops.parquet")
    return rankscope.diagnose(rankscope.open(folder / "ops.parquet"))


def test_equal_workers_are_healthy_and_both_checks_were_made(tmp_path):
    for steps in (1, 3, 12):
        report = table(tmp_path / str(steps), steps)
        assert report.findings == ()
        assert {"slow_rank", "load_imbalance", "stage_imbalance"} <= {check.detector for check in report.healthy}


def test_ranks_of_which_one_per_group_was_recorded_make_the_whole_world(tmp_path):
    assert table(tmp_path, apart=4).world_size == 4 * STAGES * REPLICAS
    assert table(tmp_path).world_size == STAGES * REPLICAS


@pytest.mark.parametrize("steps", [1, 3, 12])
def test_slow_worker_is_named_with_what_it_costs(steps, tmp_path):
    """Stage 1 of replica 2, rank 5, takes half as long again.

    Without it a step takes (6 + 2) × 30 ms. It has six microbatches, and waits for the last stage during one of them.
    """
    report = table(tmp_path, steps, factor=lambda step, replica, stage, i: 1.5 if (replica, stage) == (2, 1) else 1.0)
    (finding,) = (f for f in report.findings if f.caused_by is None)
    assert (finding.detector, finding.ranks, finding.fix, finding.steps) == ("slow_rank", (5,), "rank:5", ())
    assert finding.lost_ns_per_step == pytest.approx(5 * 15e6, rel=0.05)
    assert finding.lost_fraction == pytest.approx(75 / 315, rel=0.05)
    factor = float(finding.title.split(" × ")[0].split()[-1])
    assert factor == pytest.approx(1.5, abs=0.02)


def test_worker_that_is_slow_from_a_step_on_costs_what_those_steps_lose(tmp_path):
    def factor(step, replica, stage, i):
        return 1.5 if step >= 6 and (replica, stage) == (2, 1) else 1.0

    report = table(tmp_path, 12, factor=factor)
    (finding,) = (f for f in report.findings if f.caused_by is None)
    assert (finding.detector, finding.ranks, finding.steps) == ("slow_rank", (5,), tuple(range(6, 12)))
    assert finding.lost_ns_per_step == pytest.approx(75e6 / 2, rel=0.05)
    assert "from step 6 on" in finding.title


def test_stall_in_one_step_is_no_slow_worker(tmp_path):
    def factor(step, replica, stage, i):
        return 4.0 if (step, replica, stage, i) == (4, 1, 1, 3) else 1.0

    assert table(tmp_path, 12, factor=factor).findings == ()


@pytest.mark.parametrize("steps", [3, 12])
def test_uneven_microbatches_are_priced_by_even_ones_and_no_worker_is_blamed(steps, tmp_path):
    rng = np.random.default_rng(5)
    factors = np.exp(0.3 * rng.standard_normal((12, REPLICAS, MICROBATCHES)))

    report = table(tmp_path, steps, factor=lambda step, replica, stage, i: factors[step, replica, i])
    (finding,) = (f for f in report.findings if f.caused_by is None)
    assert (finding.detector, finding.fix) == ("load_imbalance", "balance")
    even_ns = 30e6 * (MICROBATCHES + STAGES - 1) * factors[:steps].mean()
    assert finding.lost_ns_per_step == pytest.approx(report.steps.mean_ns - even_ns, rel=0.1)


def test_long_stage_of_a_single_step_is_named(tmp_path):
    """Stage 1 takes 10 % longer: six microbatches, less one during which it waits for the last stage."""
    report = table(tmp_path, 1, factor=lambda step, replica, stage, i: 1.1 if stage == 1 else 1.0)
    (finding,) = report.findings
    assert (finding.detector, finding.where.split(",")[0]) == ("stage_imbalance", "stage 1")
    assert finding.lost_ns_per_step == pytest.approx(5 * 3e6, rel=0.15)


# ---------------------------------------------------------------- published tables


def judged(path):
    return rankscope.diagnose(rankscope.open(path))


TRUTH = OPS / "derived-st" / "truth.json"
SETS = json.loads(TRUTH.read_text())["sets"] if TRUTH.exists() else {}
KINDS = {"none": None, "long last stage": "stage_imbalance", "uneven sequence lengths": "load_imbalance"}


@pytest.mark.needs_data
@pytest.mark.parametrize("name", SETS or [""])
def test_derived_tables_have_the_fault_and_the_cost_that_were_put_in(name):
    truth = SETS[name]
    report = judged(TRUTH.parent / truth["file"])
    roots = [f for f in report.findings if f.caused_by is None]
    kind = KINDS.get(truth["kind"], "slow_rank")
    assert [f.detector for f in roots] == ([kind] if kind else [])
    assert report.world_size == truth["world_size"]
    for finding in roots:
        if kind == "slow_rank":
            assert list(finding.ranks) == truth["culprit_ranks"]
        assert finding.lost_fraction == pytest.approx(truth["loss_share"], abs=0.005)


@pytest.mark.needs_data
def test_published_slow_worker_doubles_the_step():
    """S = 1.973: without rank 0 the job takes 0.507 of its time."""
    report = judged(OPS / "bytedance-ar" / "trace-AR.parquet")
    assert (report.world_size, report.findings[0].detector, report.findings[0].ranks) == (64, "slow_rank", (0,))
    assert report.findings[0].lost_fraction == pytest.approx(1 - 1 / 1.973, abs=0.02)
