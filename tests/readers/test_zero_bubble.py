"""Schedules that split backward: files as Primus writes them, made in virtual time, through reader and report."""

from __future__ import annotations

import json

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.replay.pipeline import op_grid, pipeline, schedule
from rankscope.analysis.replay.pipeline_plan import ends
from rankscope.analysis.runs.trace import Trace

STAGES, MICROBATCHES = 4, 8
LENGTH = {"fwd": 10.0, "bwd": 10.0, "wgrad": 10.0}  # ms


def played(orders, chunks=1):
    """(start, end) of every (rank, kind, chunk, microbatch), each rank in its order, each input as soon as it is there.

    The second chunk begins on the last rank and goes back: it is reached from the first on the same rank.
    """
    end, free, found, todo = {}, [0.0] * STAGES, {}, [list(order) for order in orders]
    while any(todo):
        before = len(found)
        for rank, mine in enumerate(todo):
            while mine and all(need in end for need in needs(rank, chunks, *mine[0])):
                kind, chunk, n = mine.pop(0)
                start = max([free[rank], *(end[need] for need in needs(rank, chunks, kind, chunk, n))])
                free[rank] = end[rank, kind, chunk, n] = start + LENGTH[kind]
                found[rank, kind, chunk, n] = (start, free[rank])
        assert len(found) > before, "these orders wait for each other"
    return found


def needs(rank, chunks, kind, chunk, n):
    """What an operation waits for."""
    if kind == "wgrad":
        return [(rank, "bwd", chunk, n)]
    place = chunk * STAGES + (rank if chunk == 0 else STAGES - 1 - rank)
    other = place + (1 if kind == "bwd" else -1)
    own = [(rank, "fwd", chunk, n)] if kind == "bwd" else []
    if not 0 <= other < chunks * STAGES:
        return own
    at = other % STAGES if other < STAGES else 2 * STAGES - 1 - other
    return [*own, (at, kind, other // STAGES, n)]


def written(folder, found, chunks=1, iterations=4):
    folder.mkdir(exist_ok=True)
    for rank in range(STAGES):
        said = {"total": 1.0, "memory": 1.0}
        for kind in LENGTH:
            mine = sorted((times, c, n) for (r, k, c, n), times in found.items() if (r, k) == (rank, kind))
            said |= {f"{kind}_start": [t[0] for t, *_ in mine], f"{kind}_end": [t[1] for t, *_ in mine]}
            said |= {f"{kind}_chunk": [c for _, c, _ in mine], f"{kind}_minibatch": [n for *_, n in mine]}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({str(i + 1): said for i in range(iterations)}))
    config = {"world_size": STAGES, "pp_size": STAGES, "vp_size": chunks, "num_mbs": MICROBATCHES}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def zb_h1(rank):
    """1F1B whose gradients of weights come `rank` microbatches late, so that each rank keeps as much as the first."""
    ahead = STAGES - rank - 1
    order = [("fwd", 0, n) for n in range(ahead)]
    for n in range(MICROBATCHES):
        order += [("fwd", 0, n + ahead)] if n + ahead < MICROBATCHES else []
        order += [("bwd", 0, n)] + ([("wgrad", 0, n - rank)] if n >= rank else [])
    return order + [("wgrad", 0, n) for n in range(MICROBATCHES - rank, MICROBATCHES)]


def zbv():
    """Orders in which each rank does what is ready: backward first, then forward while it keeps at most 2 p, then W."""
    done, orders, now = {}, [[] for _ in range(STAGES)], 0
    todo = [{(k, c, n) for k in LENGTH for c in (0, 1) for n in range(MICROBATCHES)} for _ in range(STAGES)]
    while any(todo):
        for rank in range(STAGES):
            kept = sum({"fwd": 1, "wgrad": -1}.get(kind, 0) for kind, *_ in orders[rank])
            ready = [
                one
                for one in todo[rank]
                if all(done.get(need, now + 1) <= now for need in needs(rank, 2, *one))
                and (one[0] != "fwd" or kept < 2 * STAGES)
            ]
            ready.sort(key=lambda one: (("bwd", "fwd", "wgrad").index(one[0]), -one[1], one[2]))
            if ready:
                todo[rank].remove(ready[0])
                orders[rank].append(ready[0])
                done[(rank, *ready[0])] = now + 1
        now += 1
    return orders


def test_zb_h1_is_recognized_and_idles_as_its_formula_says(tmp_path):
    """4 stages, 8 microbatches, F = B = W = 10 ms: 240 ms of work and (p - 1) (F + B - W) = 30 ms of bubble."""
    trace = Trace.open(written(tmp_path / "run", played([zb_h1(rank) for rank in range(STAGES)])))
    ops = trace.table("ops").collect()
    found = pipeline(ops)
    assert (found.schedule, found.stages, found.microbatches) == ("ZB-H1", 4, 8)
    assert found.theory_fraction == pytest.approx(30 / 270)
    assert found.bubble == pytest.approx(dict.fromkeys(range(4), 30 / 270))
    grid = op_grid(ops)
    assert ends(grid.plan, grid.duration_ns).tolist() == [270e6] * 4
    assert "ZB-H1" in diagnose(trace).pipeline.explanation


def test_zbv_turns_back_on_the_last_stage_and_only_idles_until_that_begins(tmp_path):
    """8 microbatches through 2 chunks of each of 4 ranks: 480 ms of work; the last rank begins after 30 ms."""
    trace = Trace.open(written(tmp_path / "run", played(zbv(), chunks=2), chunks=2))
    ops = trace.table("ops").collect()
    assert sorted(ops.filter(rank=0)["stage"].unique()) == [0, 7]
    found = pipeline(ops)
    assert (found.schedule, found.stages, found.microbatches) == ("ZBV", 4, 8)
    assert found.theory_fraction == pytest.approx(30 / 510)
    grid = op_grid(ops)
    assert ends(grid.plan, grid.duration_ns).tolist() == grid.measured_ns.tolist()


def test_backward_that_is_only_split_is_no_other_schedule():
    assert schedule({0: "FFBWFBWBW", 1: "FBWFBWFBW"}) == "1F1B"
    assert schedule({0: "FFBWFBWBW", 1: "FBFBWFBWW"}) == "ZB-H1"
    assert schedule({0: "FFBBFWBWW", 1: "FBFBWFBWW"}) == "unknown"


def test_dual_pipe_is_recognized_and_its_bubble_measured_not_replayed(tmp_path):
    """4 ranks from both ends. Each has two pairs F&B of 30 ms, a forward of 10, a backward of inputs and of weights of
    10 each: 90 ms of work in 120. Needed are (4 / 2 - 1) (30 + 20 - 3 * 10) = 20 ms: 20 / 110."""
    found = {}
    for rank in range(STAGES):
        near, far = (0, 1) if rank < 2 else (1, 0)  # whose first stage is nearer
        late = min(rank, 3 - rank) * 10.0
        found |= {
            (rank, "fwd", near, 0): (late, late + 10),
            (rank, "fwd", far, 0): (30.0, 60.0),
            (rank, "bwd", near, 0): (30.0, 60.0),
            (rank, "fwd", near, 1): (60.0, 90.0),
            (rank, "bwd", far, 0): (60.0, 90.0),
            (rank, "bwd", near, 1): (100.0, 110.0),
            (rank, "wgrad", near, 1): (110.0, 120.0),
        }
    trace = Trace.open(written(tmp_path / "run", found, chunks=2))
    report = diagnose(trace)
    assert (report.pipeline.schedule, report.pipeline.stages) == ("DualPipe", 4)
    assert report.pipeline.bubble == pytest.approx(dict.fromkeys(range(4), 30 / 120))
    assert report.pipeline.theory_fraction == pytest.approx(20 / 110)
    assert "Rank 0 idles 25.0 % where DualPipe needs 18.2 %" in report.pipeline.explanation
    why = {check.detector: check.why for check in report.not_checked}
    assert "(DualPipe): what each takes alone is not recorded" in why["pipeline_bubble"]
