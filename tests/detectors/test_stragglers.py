"""Which rank the others wait for, from few steps of many operations; and nothing where ranks are alike."""

import numpy as np
import polars as pl
import pytest

import rankscope
from rankscope.analysis.metrics.step_matrix import step_grid
from rankscope.analysis.metrics.stragglers import MOST_CHANCE, charged, stragglers
from rankscope.analysis.metrics.wait_attribution import delays
from support.kineto import ALLREDUCE, event, kernel, launch, meta, write
from support.kineto import step as profiler_step

MS = 1_000_000
TRANSFER_MS = 1


def job(work_ms):
    """Tables of ranks that all meet after each piece of work: `work_ms` is [step, operation, rank]."""
    now, rows, phases, breakdown = 0, [], [], []
    for step, operations in enumerate(work_ms):
        spent = np.zeros((len(operations[0]), 2))
        for work in operations:
            last = max(work)
            for rank, ms in enumerate(work):
                came, met, end = (round((now + at) * MS) for at in (ms, last, last + TRANSFER_MS))
                rows.append((rank, step, len(rows) // len(work), came, end, met - came))
                spans = [("compute", "work", round(now * MS), came), ("wait", "sum", came, met)]
                phases += [(rank, step, *span) for span in (*spans, ("transfer", "sum", met, end)) if span[3] > span[2]]
                spent[rank] += ms + TRANSFER_MS, last - ms
            now += last + TRANSFER_MS
        for rank, (busy, wait) in enumerate(spent):
            breakdown += [(rank, step, "compute", round(busy * MS)), (rank, step, "wait", round(wait * MS))]
    columns = ["rank", "step", "instance_id", "start_ns", "end_ns", "wait_ns"]
    collectives = pl.DataFrame(rows, columns, orient="row").with_columns(
        group_id=pl.lit(7), op=pl.lit("allreduce"), device_start_ns=pl.col("start_ns")
    )
    spans = pl.DataFrame(phases, ["rank", "step", "part", "label", "start_ns", "end_ns"], orient="row")
    grid = step_grid(pl.DataFrame(breakdown, ["rank", "step", "part", "ns"], orient="row"))
    return spans, collectives, grid


def found(work_ms, units=()):
    phases, collectives, grid = job(work_ms)
    costs = delays(phases, collectives)
    seen = charged(costs, phases, collectives, grid)
    return None if seen is None else stragglers(seen, units)


def noisy(steps, operations, ranks, seed=0, mean_ms=10.0):
    rng = np.random.default_rng(seed)
    return mean_ms * np.exp(0.05 * rng.standard_normal((steps, operations, ranks)))


def test_a_rank_that_is_late_in_one_operation_of_each_step_is_found_from_three_steps():
    work = noisy(3, 8, 4)
    work[:, 2, 1] += 20
    late = found(work)
    assert late.rows == (1,)
    assert late.cost.ns == pytest.approx(20 * MS, rel=0.1)
    assert late.cost.half_width_ns < 0.2 * late.cost.ns


def test_a_slow_rank_is_found_from_a_single_step():
    work = noisy(1, 12, 8)
    work[:, :, 5] *= 1.3
    late = found(work)
    assert late.rows == (5,)
    assert late.chance <= MOST_CHANCE
    assert late.recurs


def test_one_long_step_widens_nothing():
    even, long = noisy(3, 8, 4), noisy(3, 8, 4)
    long[0] += 30  # of all ranks alike
    for work in (even, long):
        work[:, :, 2] += 3
    one, other = found(even), found(long)
    assert (one.rows, other.rows) == ((2,), (2,))
    assert other.cost.half_width_ns < 2 * one.cost.half_width_ns


def test_the_cost_is_no_more_than_any_other_rank_waits():
    work = noisy(2, 10, 4)
    work[:, :, 1] += 6
    work[:, :, 3] += 4  # fixed next
    assert found(work).cost.ns <= 10 * 2.5 * MS


def test_who_is_last_most_often_is_not_blamed_for_what_another_costs():
    work = np.full((2, 9, 4), 10.0)
    work[:, :, 0] += 0.05
    work[:, ::3, 1] += 8
    assert found(work).rows == (1,)


def test_two_ranks_that_are_late_together_are_named_together():
    work = noisy(3, 8, 8)
    work[:, :, (2, 6)] += 6
    assert found(work).rows == (2, 6)


def test_a_node_is_named_though_one_of_its_ranks_is_always_the_last():
    work = noisy(3, 8, 6)
    work[:, :, 2:4] += 6
    work[:, :, 3] += 1
    late = found(work, [(0, 1), (2, 3), (4, 5)])
    assert late.rows == (2, 3)


def test_a_stall_in_one_operation_of_three_steps_names_its_step_and_is_one_that_chance_may_make():
    work = noisy(3, 8, 4)
    work[1, 4, 3] += 60
    late = found(work)
    assert (late.rows, late.when.tolist()) == ((3,), [False, True, False])
    assert late.cost.ns == pytest.approx(20 * MS, rel=0.1)
    assert late.chance > MOST_CHANCE
    work[0, 2, 1] += 50  # of which rank is it then?
    assert found(work) is None


def test_a_rank_that_is_always_a_little_late_and_stalls_once_is_found():
    """Late in every operation chance cannot explain; nor is it data that one operation has nearly all of."""
    work = np.full((3, 8, 4), 10.0)
    work[:, :, 2] += 0.1
    work[1, 4, 2] += 200
    late = found(work)
    assert late.rows == (2,)
    assert late.when.tolist() == [False, True, False]


def test_a_stall_in_the_only_step_is_one_that_chance_may_make():
    work = noisy(3, 8, 4)
    work[1, 4, 3] += 60
    late = found(work[1:2])
    assert late.rows == (3,)
    assert late.chance > MOST_CHANCE


def test_of_three_operations_no_rank_is_named():
    work = noisy(1, 3, 4)
    work[:, :, 2] += 50
    assert found(work) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("steps", "operations"), [(1, 8), (2, 12), (4, 14)])
def test_ranks_that_are_alike_have_no_straggler(ranks, steps, operations):
    for seed in range(10):
        work = noisy(steps, operations, ranks, seed)
        work[0] *= 2.5  # the first step is longer
        rng = np.random.default_rng(seed)
        work += rng.exponential(3, work.shape) * (rng.random(work.shape) < 0.02)
        assert found(work) is None


@pytest.mark.parametrize(("loads", "detector"), [(4, "slow_rank"), (60, "input_stall")])
def test_a_host_that_is_slow_in_all_it_does_is_slow_in_its_input_too(tmp_path, loads, detector):
    """Three ranks, 6 steps: 0.2 ms for a batch, 100 calls each 20 µs that begin a kernel of as long, then a reduction
    of 0.1 ms that the host waits for. Rank 2 takes 4 times as long from call to call, `loads` times for its batch."""
    name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    slow = 200 * loads + 100 * 80
    for rank in range(3):
        events, times = [], (4, loads) if rank == 2 else (1, 1)
        for number in range(6):
            at, first = number * (slow + 200), 1000 * number
            events.append(profiler_step(number, at, slow + 200))
            events.append(event("user_annotation", name, at, 200 * times[1]))
            begin = at + 200 * times[1]
            for call in range(100):
                events.append(launch(begin, 5, first + call))
                events.append(kernel("mm", begin + 6, 20, first + call, device=rank))
                begin += 20 * times[0]
            over = at + slow + 106
            words = {"device": rank, "stream": 20, **meta(Seq=number, ranks="[0, 1, 2]")}
            events += [
                launch(begin, 5, first + 900),
                kernel(ALLREDUCE, begin + 6, over - begin - 6, first + 900, **words),
            ]
            events.append(launch(begin + 10, over - begin, first + 901, name="cudaStreamSynchronize"))
        write(tmp_path / f"rank{rank}.json", events, distributedInfo={"rank": rank, "world_size": 3})
    found = rankscope.diagnose(rankscope.open(tmp_path)).findings[0]
    assert (found.detector, found.ranks) == (detector, (2,))
    if detector == "slow_rank":
        assert found.lost_ns_per_step == pytest.approx(100 * 60 * 1_000, rel=0.02)
        assert found.advice.startswith("Its host takes 3.9 times as long from call to call as the others.")
