"""Clocks, matching, steps and the breakdown, with numbers that add up in the head. Times are small ns or ms."""

from __future__ import annotations

from unittest import mock

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import record
from rankscope.analysis.metrics.step_matrix import estimate_of_pieces, step_grid
from rankscope.analysis.model.finding import Clock
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline import host_breakdown
from rankscope.analysis.timeline.build import build_timeline
from rankscope.analysis.timeline.clocks import apply_clocks, fit_clocks
from rankscope.analysis.timeline.host_breakdown import PARTS, InvariantError, breakdown, check_phases, phases
from rankscope.analysis.timeline.steps import agreement, find_steps, judge, renumber
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import REGION_KINDS
from simulate import Job, healthy_resources, run
from support.rows import collectives, matched, regions, step_spans, table
from support.run_folder import COLLECTIVE, REGION, write, write_rank, write_run

MS = 1_000_000
WAIT = REGION_KINDS.index("wait")


def marks(*rows):
    return table("steps", *({"rank": r, "start_ns": None, "end_ns": e} for r, e in rows))


def parts_of(steps, region_rows, collective_rows):
    """Non-zero parts of the only step, all times in µs."""
    times = pl.col("^(start|issued|device_start|end|wait|transfer)_ns$")
    steps, region_rows, collective_rows = (t.with_columns(times * 1_000) for t in (steps, region_rows, collective_rows))
    cut = phases(steps, region_rows, collective_rows)
    check_phases(cut, steps)
    table = breakdown(cut, steps)
    assert table["ns"].sum() == (steps["end_ns"] - steps["start_ns"]).sum()
    return {part: ns / 1_000 for part, ns in table.select("part", "ns").iter_rows() if ns}


# ---------------------------------------------------------------- clocks


def pings(offset_ns, drift_ppm=0.0, bursts=(0,), each=100, seed=1, out_ns=20_000, queue_ns=0):
    """Node 1 pings node 0 over a link of at least 2 × `out_ns`; `queue_ns` delays every request, one way."""
    rng = np.random.default_rng(seed)
    rows = []
    for burst in bursts:
        for n in range(each):
            t1 = 10**15 + int(burst * 1e9) + n * 1_000_000
            there, back = out_ns + rng.exponential(200_000, 2)
            node0 = t1 + offset_ns + (t1 - 10**15) * drift_ppm * 1e-6 + there + queue_ns
            t2, t3 = int(node0), int(node0) + 5_000
            rows.append(
                {
                    "node": 1,
                    "peer": 0,
                    "t1_ns": t1,
                    "t2_ns": t2,
                    "t3_ns": t3,
                    "t4_ns": int(t1 + there + queue_ns + 5_000 + back),
                }
            )
    return table("clocks", *rows)


def test_an_offset_of_five_seconds_is_recovered_within_the_stated_error():
    clock = fit_clocks(pings(offset_ns=5_000_000_000), nodes=[0, 1])[1]
    assert clock.source == "pings"
    assert abs(clock.offset_ns - 5_000_000_000) <= clock.error_ns < 100_000


def test_drift_is_fitted_over_bursts_that_span_half_a_minute():
    clock = fit_clocks(pings(5_000_000_000, drift_ppm=40, bursts=range(0, 301, 30)), nodes=[1])[0]
    assert clock.drift_ppm == pytest.approx(40, abs=1)
    frame = pl.DataFrame({"node": [1], "start_ns": [10**15 + 300 * 10**9]}, schema_overrides={"node": pl.Int32})
    shifted = apply_clocks(frame, [clock])["start_ns"][0]
    truth = 10**15 + 300 * 10**9 + 5_000_000_000 + 300 * 40_000
    assert abs(shifted - truth) <= clock.error_ns < 200_000


def test_bursts_on_a_link_with_a_queue_do_not_count():
    idle = pings(0, bursts=(0, 120))
    loaded = pings(0, bursts=(30, 60, 90), queue_ns=20 * MS)
    clock = fit_clocks(pl.concat([idle, loaded]), nodes=[1])[0]
    assert abs(clock.offset_ns) <= clock.error_ns < 100_000
    assert abs(clock.drift_ppm) < 2


def test_without_pings_unix_time_serves_with_an_unknown_error():
    rows = [
        {"node": node, "peer": -1, "t1_ns": mono, "t2_ns": 5_000, "t3_ns": 5_000, "t4_ns": mono + 2}
        for node, mono in ((0, 1_000), (1, 3_000))
    ]
    clocks = fit_clocks(table("clocks", *rows), nodes=[0, 1, 2])
    assert [(c.node, c.offset_ns, c.error_ns, c.source) for c in clocks] == [
        (0, 0, 0, "reference"),
        (1, -2_000, None, "unix time"),
        (2, 0, None, "none"),
    ]


# ---------------------------------------------------------------- matching


def test_members_are_ranges():
    assert members_of("0-2,8") == [0, 1, 2, 8]


def test_the_last_arriver_does_not_wait():
    """Rank 1 comes 200 late: the transfer is its 100, rank 0 waits 200."""
    got = matched(collectives((0, 0, 100, 400), (1, 0, 300, 400)))
    assert got.select("rank", "transfer_ns", "wait_ns", "is_last", "arrival_spread_ns").rows() == [
        (0, 100, 200, False, 200),
        (1, 100, 0, True, 200),
    ]
    assert got["instance_id"].to_list() == [0, 0]
    assert got["group_size"].to_list() == [2, 2]


def test_what_is_not_whole_is_not_matched_and_says_why():
    rows = pl.concat(
        [
            collectives((0, 0, 100, 200)),
            collectives((0, 1, 100, 200), (1, 1, 100, None)),
            collectives((0, 2, 100, 200), (1, 2, 100, 200, "broadcast")),
            collectives((0, 3, 100, 200), (1, 3, 100, 200), group_id=99),
        ]
    )
    got = matched(rows)
    assert got["unmatched"].to_list() == [
        "peer missing",
        *["end missing"] * 2,
        *["operations differ"] * 2,
        *["group unknown"] * 2,
    ]
    assert got.select("instance_id", "transfer_ns", "wait_ns", "is_last").null_count().row(0) == (7, 7, 7, 7)


def test_a_send_and_its_receive_are_one_operation():
    """Same (group, sender, receiver, tag, seq): 0 → 1 and 1 → 0 do not mix, nor do the tags."""
    rows = pl.concat(
        [
            collectives((0, 0, 0, 50, "send"), peer=1),
            collectives((1, 0, 0, 60, "send"), peer=0),
            collectives((1, 0, 20, 50, "recv"), peer=0),
            collectives((0, 0, 20, 60, "recv_any_source"), peer=-1),
            collectives((1, 0, 20, 60, "recv"), peer=0, tag=5),
        ]
    )
    got = matched(rows)
    assert got["instance_id"].to_list() == [0, 1, 0, 1, None]
    assert got["wait_ns"].to_list() == [20, 20, 0, 0, None]


def test_a_broadcast_that_is_merely_slow_to_arrive_is_not_a_wait():
    """The root's call is over at once, the receiver's lasts as long as the transfer; both came at the same time."""
    got = matched(collectives((0, 0, 100, 110, "broadcast"), (1, 0, 100, 400, "broadcast")))
    assert got["wait_ns"].to_list() == [0, 0]
    unknown = [Clock(node=0, offset_ns=0, drift_ppm=0.0, error_ns=None, source="none")]
    rows = collectives((0, 0, 100, 110, "broadcast"), (1, 0, 100, 400, "broadcast"))
    rows = rows.with_columns(node=pl.col("rank"))
    assert matched(rows, clocks=unknown)["wait_ns"].to_list() == [None, None]


# ---------------------------------------------------------------- steps


def optimizer_cycle(*names, cycles, rank=0, first=0):
    """Each name's region lasts 2, one every 10."""
    calls = [n for _ in range(cycles) for n in names]
    return [(rank, "optimizer", first + 10 * i + 8, first + 10 * i + 10, n) for i, n in enumerate(calls)]


def ends(steps, rank=0):
    return steps.filter(pl.col("rank") == rank)["end_ns"].to_list()


def test_marks_of_the_script_come_before_optimizers():
    rows = regions((0, "forward", 5, 8), (0, "optimizer", 8, 10), (1, "optimizer", 8, 10))
    got = find_steps(marks((0, 20), (0, 40)), rows, collectives())
    assert got.drop("rank").rows() == [
        (0, 5, 20, "rankscope.step()"),
        (1, 20, 40, "rankscope.step()"),
        (0, 8, 10, "optimizer"),
    ]


@pytest.mark.parametrize(
    ("cycle", "step_ns"),
    [
        (["Adam#0"], 10),
        (["Adam#0"] * 5 + ["Adam#1"], 60),  # GAN: five steps of the critic, one of the generator
        (["SGD#0", "SGD#1", "SGD#2"], 30),  # an optimizer per parameter
    ],
)
def test_a_step_ends_with_the_optimizer_that_closes_the_cycle(cycle, step_ns):
    got = find_steps(marks(), regions(*optimizer_cycle(*cycle, cycles=8)), collectives((0, 0, 0, 1)))
    assert ends(got) == [step_ns * n for n in range(1, 9)]
    assert got["start_ns"].to_list() == [step_ns * n for n in range(8)]


def test_a_nested_optimizer_is_not_a_step_of_its_own():
    rows = [(0, "optimizer", 10 * n, 10 * n + 8, "Lookahead#0") for n in range(5)]
    rows += [(0, "optimizer", 10 * n + 2, 10 * n + 6, "Adam#1") for n in range(5)]
    assert ends(find_steps(marks(), regions(*rows), collectives())) == [8, 18, 28, 38, 48]


def test_two_phases_with_an_optimizer_each_are_both_counted():
    rows = optimizer_cycle("Adam#0", cycles=10) + optimizer_cycle("SGD#1", cycles=10, first=100)
    assert ends(find_steps(marks(), regions(*rows), collectives((0, 0, 0, 1)))) == [10 * n for n in range(1, 21)]


def test_runs_of_an_optimizer_after_one_backward_end_one_step():
    """Three after each: of DeepSpeed's third stage, one per group of weights. All begin with the backward before."""
    rows = optimizer_cycle("Adam#0", cycles=15) + [(0, "backward", 30 * n + 1, 30 * n + 5) for n in range(5)]
    assert ends(find_steps(marks(), regions(*rows), collectives())) == [30, 60, 90, 120, 150]
    calls = [(0, n, 10 * n + 1, 10 * n + 2) for n in range(15)]
    assert ends(find_steps(marks(), regions(*rows), collectives(*calls))) == [10 * n for n in range(1, 16)]


def test_backwards_in_a_graph_of_cuda_are_not_missed():
    """Three are seen while torch records the graph, then none; an operation is called in each tenth step."""
    rows = optimizer_cycle("Adam#0", cycles=40) + [(0, "backward", 10 * n + 1, 10 * n + 5) for n in range(3)]
    calls = collectives(*((0, n, 100 * n + 1, 100 * n + 2) for n in range(4)))
    assert ends(find_steps(marks(), regions(*rows), calls)) == [10 * n for n in range(1, 41)]


@pytest.mark.parametrize("name", ["step {}", "iteration{}", "train_step", "Batch: {}", "global_step={}"])
def test_without_an_optimizer_steps_end_where_ranges_do_that_are_named_as_steps(name):
    """A range of 8 every 10; what comes before each, input say, is part of it. Layers have numbers too."""
    rows = [(0, "user", 10 * n + 2, 10 * n + 10, name.format(n)) for n in range(3)]
    rows += [(0, "user", 10 * n + 3, 10 * n + 5, f"layer {n}") for n in range(3)]
    got = find_steps(marks(), regions(*rows), collectives())
    assert got.select("start_ns", "end_ns", "source").rows() == [
        (2, 10, "named ranges"),
        (10, 20, "named ranges"),
        (20, 30, "named ranges"),
    ]
    optimizers = optimizer_cycle("Adam#0", cycles=2)
    assert ends(find_steps(marks(), regions(*rows, *optimizers), collectives())) == [10, 20]


@pytest.mark.parametrize("name", ["optimizer.step", "microbatch 3", "DeepSpeedEngine.step", "epoch 1", "blocks.3"])
def test_other_ranges_are_no_steps(name):
    rows = [(0, "user", 10 * n + 2, 10 * n + 10, name) for n in range(3)]
    assert find_steps(marks(), regions(*rows), collectives()).is_empty()


def test_a_rank_whose_first_step_was_not_seen_is_renumbered():
    """Operation n is in step n of rank 0; rank 1 lacks step 0 and counts from it."""
    rows = optimizer_cycle("A#0", cycles=6) + optimizer_cycle("A#0", cycles=5, rank=1, first=10)
    calls = matched(collectives(*((r, n, 10 * n + 2, 10 * n + 4) for n in range(1, 6) for r in (0, 1))))
    steps = find_steps(marks(), regions(*rows), calls)
    assert agreement(steps, calls) == 0
    healed = renumber(steps, calls)
    assert agreement(healed, calls) == 1
    assert healed.filter(pl.col("rank") == 1)["step"].to_list() == [1, 2, 3, 4, 5]


def judged(lengths, compiles=(), saves=()):
    at = np.cumsum([0, *lengths])
    steps = step_spans(*((0, i, int(at[i]), int(at[i + 1])) for i in range(len(lengths))))
    rows = regions(
        *((0, "compile", int(at[i]), int(at[i]) + 1) for i in compiles),
        *((rank, "checkpoint", int(at[i]) + begin, int(at[i]) + end) for i, rank, begin, end in saves),
    )
    return judge(steps, rows)["aside"].to_list()


def test_a_grid_of_no_judged_step_is_empty():
    grid = step_grid(pl.DataFrame(schema={"rank": pl.Int32, "step": pl.Int32, "part": pl.String, "ns": pl.Int64}))
    assert (grid.ranks, grid.steps, grid.parts, grid.step_ns) == ((), (), {}, 0)


def test_warmup_lasts_until_the_steps_settle():
    assert judged([900, 300, *[100] * 18]) == ["warm-up"] * 2 + [None] * 18
    assert judged([900, 300, 200, *[100] * 17]) == ["warm-up"] * 3 + [None] * 17
    assert judged([100] * 20, compiles=[2]) == ["warm-up"] * 3 + [None] * 17
    assert judged([100] * 20, compiles=[10]) == ["warm-up"] * 2 + [None] * 18


def test_one_hiccup_is_set_aside_but_a_fault_that_comes_back_is_not():
    once = [100] * 60
    once[40] = 2_000
    assert judged(once)[40] == "outlier"
    assert judged(once).count(None) == 57
    assert judged(once, saves=[(40, 0, 0, 100), (40, 0, 20, 80)])[40] == "outlier"
    often = [100] * 60
    often[5::5] = [700] * len(often[5::5])
    assert judged(often).count("outlier") == 0


def test_step_that_a_checkpoint_made_long_is_judged():
    """1,900 of its 2,000 are two calls of its rank, or one of another rank, for which this one waits."""
    once = [100] * 60
    once[40] = 2_000
    for saves in ([(40, 0, 0, 1_000), (40, 0, 1_050, 1_950)], [(40, 1, 0, 1_900)]):
        assert judged(once, saves=saves)[40] is None


def test_only_steps_that_all_ranks_have_are_judged():
    steps = step_spans(*((r, i, 10 * i, 10 * i + 10) for r in (0, 1) for i in range(5 - r)))
    got = judge(steps, regions())
    assert got.filter("judged").select("rank", "step").rows() == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert got.filter(pl.col("step") == 4)["aside"].to_list() == ["incomplete"]


# ---------------------------------------------------------------- breakdown


def test_a_step_of_plain_training():
    """Forward comes before backward; backward 40–70 overlaps 10 with communication; then clipping, optimizer."""
    step = step_spans((0, 0, 0, 100))
    rows = regions(
        (0, "input", 0, 10),
        (0, "backward", 40, 70),
        (0, "optimizer", 80, 95),
        (0, "gc", 85, 90),
        (0, "compile", 12, 15),
    )
    calls = matched(collectives((0, 0, 50, 60), (1, 0, 50, 60)))
    assert parts_of(step, rows, calls) == {
        "input": 10,
        "compile": 3,
        "compute": 27 + 20,
        "overlapped": 10,
        "other": 10 + 5,
        "optimizer": 10,
        "gc": 5,
    }
    labels = phases(step, rows, calls).select("part", "label").unique().rows()
    assert {
        ("compute", "forward"),
        ("compute", "backward"),
        ("other", "after backward"),
        ("other", "after the optimizer"),
    } <= set(labels)


def test_blocked_time_is_wait_until_the_last_rank_arrives_and_transfer_after():
    """Rank 0 calls at 20, rank 1 at 50, both end at 60: of rank 0's blocked 20–60 30 are wait and 10 transfer."""
    calls = matched(collectives((0, 0, 20, 60), (1, 0, 50, 60)))
    rows = regions((0, "wait", 20, 61))
    # The thread wakes up 1 late: that is still the transfer.
    assert parts_of(step_spans((0, 0, 0, 100)), rows, calls) == {"wait": 30, "transfer": 11, "other": 59}


def test_blocked_time_with_an_unmatched_operation_is_charged_to_no_rank():
    calls = matched(collectives((0, 0, 20, 60)))
    rows = regions((0, "wait", 20, 60), (0, "wait", 70, 85))
    assert parts_of(step_spans((0, 0, 0, 100)), rows, calls) == {"unsplit": 55, "other": 45}


def test_ddp_waits_at_the_end_of_backward_without_a_call():
    """The last bucket is issued at 60, the buckets are done at 90, backward ends at 92. Rank 1 issues it at 80."""
    step = step_spans((0, 0, 0, 100))
    rows = regions((0, "backward", 10, 92))
    calls = matched(
        collectives((0, 0, 30, 70), (1, 0, 30, 70), (0, 1, 60, 90), (1, 1, 80, 90)).filter(pl.col("rank") < 2)
    )
    # forward 0–10, backward 10–30 alone, 30–60 overlapped, 60–80 wait, 80–90 transfer, 90–92 backward alone
    assert parts_of(step, rows, calls) == {
        "compute": 10 + 20 + 2,
        "overlapped": 30,
        "wait": 20,
        "transfer": 10,
        "other": 8,
    }
    # A wait that was seen there knows better.
    seen = pl.concat([rows, regions((0, "wait", 80, 90))])
    assert parts_of(step, seen, calls) == {"compute": 10 + 20 + 2, "overlapped": 50, "transfer": 10, "other": 8}


def test_time_before_a_forward_that_was_seen_is_not_compute():
    rows = regions((0, "forward", 30, 40), (0, "backward", 50, 80))
    cut = phases(step_spans((0, 0, 0, 100)), rows, matched(collectives()))
    assert cut.select("part", "label", "start_ns").rows() == [
        ("other", "before forward", 0),
        ("compute", "forward", 30),
        ("other", "after forward", 40),
        ("compute", "backward", 50),
        ("other", "no region", 80),
    ]


@pytest.mark.parametrize(
    ("is_async", "end", "blocked"),
    [
        (False, 30, 15),
        (True, 30, 0),  # the thread had no CPU: an asynchronous call does not wait
        (None, 30, 0),
        (None, 25, 15),  # done when it returned
    ],
)
def test_a_call_that_is_not_asynchronous_blocks_until_it_returns(is_async, end, blocked):
    calls = collectives((0, 0, 10, end), (1, 0, 10, end)).with_columns(
        issued_ns=pl.lit(25, pl.Int64), is_async=pl.lit(is_async, pl.Boolean)
    )
    got = parts_of(step_spans((0, 0, 0, 100)), regions(), matched(calls))
    assert got == {"transfer": blocked, "other": 100 - blocked} if blocked else {"other": 100}


def test_a_wait_that_returns_at_once_has_not_blocked():
    rows = regions((0, "wait", 20, 25))
    assert parts_of(step_spans((0, 0, 0, 100)), rows, matched(collectives())) == {"other": 100}


def test_user_regions_are_compute_and_name_it_innermost_first():
    rows = regions((0, "user", 0, 50, "model"), (0, "user", 10, 20, "attention"), (0, "checkpoint", 60, 80, "save"))
    cut = phases(step_spans((0, 3, 0, 100)), rows, matched(collectives()))
    assert cut.select("step", "part", "label", "start_ns", "end_ns").rows() == [
        (3, "compute", "model", 0, 10),
        (3, "compute", "attention", 10, 20),
        (3, "compute", "model", 20, 50),
        (3, "other", "no region", 50, 60),
        (3, "checkpoint", "save", 60, 80),
        (3, "other", "no region", 80, 100),
    ]


def test_waiting_for_the_other_side_of_a_send_is_a_bubble():
    """Rank 1 waits from 10 to 60 for what rank 0 sends at 40: 30 until it is sent, 20 until it is here."""
    calls = pl.concat([collectives((0, 0, 40, 60, "send"), peer=1), collectives((1, 0, 10, 60, "recv"), peer=0)])
    got = parts_of(step_spans((1, 0, 0, 100)), regions((1, "wait", 10, 60)), matched(calls))
    assert got == {"bubble": 30, "transfer": 20, "other": 50}


def test_a_hole_in_the_phases_is_found():
    steps = step_spans((0, 0, 0, 100))
    cut = phases(steps, regions((0, "user", 10, 20)), matched(collectives()))
    with pytest.raises(InvariantError, match="step 0 of rank 0"):
        check_phases(cut.filter(pl.col("label") != "user"), steps)


# ---------------------------------------------------------------- from the folder


def write_two_nodes(root, end_1=True):
    """Ten steps of 100 ms; rank 1, on a node whose clock is 5 s behind, comes 30 ms late to each all-reduce."""
    late, behind = 30 * MS, 5_000 * MS
    for rank in (0, 1):
        write_run(root, node=rank)
        write_rank(root, rank, node=rank)
        shift = behind * rank
        calls, waits, marks = [], [], []
        for n in range(10):
            at, end = 10_000 * MS + 100 * MS * n, 10_000 * MS + 100 * MS * n + 60 * MS
            start = at + 20 * MS + late * rank
            calls.append({**COLLECTIVE, "seq": n, "number": n, "start_ns": start - shift, "issued_ns": start - shift})
            calls[-1]["end_ns"] = end - shift if rank == 0 or end_1 else None
            waits.append({**REGION, "kind": WAIT, "start_ns": start - shift, "end_ns": end - shift})
            marks.append({"end_ns": at + 100 * MS - shift, "thread": 0})
        write(root, "collectives", f"rank={rank}", calls)
        write(root, "regions", f"rank={rank}", waits)
        write(root, "steps", f"rank={rank}", marks)
        group = {"start_ns": 0, "group_id": 7, "name": "dp", "backend": "gloo", "role": "", "members": "0-1"}
        write(root, "groups", f"rank={rank}", [group])
    ping = {"peer": 0, "t1_ns": 0, "t2_ns": behind + 1_000, "t3_ns": behind + 1_000, "t4_ns": 2_000}
    write(root, "clocks", "node=1", [ping])


def test_a_run_of_two_nodes_from_its_folder_to_the_timeline(tmp_path):
    write_two_nodes(tmp_path)
    timeline = build_timeline(Trace.open(tmp_path))
    assert timeline.gaps == []
    assert timeline.matched_fraction == 1
    assert timeline.waits.rows() == [(0, 10 * 30 * MS), (1, 0)]
    assert timeline.collectives["arrival_spread_ns"].unique().to_list() == [30 * MS]
    assert timeline.steps.filter("judged").group_by("rank").len().sort("rank").rows() == [(0, 8), (1, 8)]
    fifth = timeline.breakdown.filter((pl.col("step") == 5) & (pl.col("ns") > 0)).sort(
        "rank", pl.col("part").cast(pl.String)
    )
    assert fifth.select("rank", "part", "ns").rows() == [
        (0, "other", 60 * MS),
        (0, "transfer", 10 * MS),
        (0, "wait", 30 * MS),
        (1, "other", 90 * MS),
        (1, "transfer", 10 * MS),
    ]


def test_what_a_run_lacks_is_reported_and_charged_to_no_rank(tmp_path):
    write_two_nodes(tmp_path, end_1=False)
    timeline = build_timeline(Trace.open(tmp_path))
    assert timeline.matched_fraction == 0
    assert timeline.waits.is_empty()
    assert timeline.breakdown.filter(pl.col("part").is_in(["wait", "transfer"]))["ns"].sum() == 0
    assert "20 of 20 collectives were not matched across ranks: end missing" in [g.why for g in timeline.gaps]


spans = st.tuples(st.integers(-20, 120), st.integers(0, 60)).map(lambda s: (s[0], s[0] + s[1]))
kinds = st.sampled_from(
    ["user", "forward", "backward", "optimizer", "input", "gc", "compile", "wait", "checkpoint", "sync"]
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(kinds, spans), max_size=12),
    st.lists(st.tuples(spans, spans, st.booleans()), max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_parts_sum_to_the_step_whatever_the_intervals(region_rows, calls, lengths):
    edges = np.cumsum([0, *lengths])
    steps = step_spans(*((0, i, int(edges[i]), int(edges[i + 1])) for i in range(len(lengths))))
    rows = regions(*((0, kind, *span) for kind, span in region_rows))
    both = [(r, n, *(a, b)[r]) for n, (a, b, peer) in enumerate(calls) for r in ((0, 1) if peer else (0,))]
    cut = phases(steps, rows, matched(collectives(*both)))
    check_phases(cut, steps)
    table = breakdown(cut, steps)
    assert table["part"].to_list() == list(PARTS) * len(lengths)
    assert table.group_by("step").agg(pl.col("ns").sum()).sort("step")["ns"].to_list() == lengths


compiled = pytest.mark.skipif(host_breakdown._phases is None, reason="it was built without a C compiler")


def cut_twice(steps, rows, calls):
    """Phases by the compiled sweep and by its twin."""
    swept = phases(steps, rows, calls)
    with mock.patch.object(host_breakdown, "_phases", None):
        return swept, phases(steps, rows, calls)


def nesting(rows):
    """Rows whose spans do not cross those before them, as of one thread."""
    kept = []
    for rank, kind, start, end in rows:
        if all(
            r != rank or (a <= start and end <= b) or (start <= a and b <= end) or end <= a or b <= start
            for r, _, a, b in kept
        ) and (rank, start, end) not in [(r, a, b) for r, _, a, b in kept]:
            kept.append((rank, kind, start, end))
    return kept


@compiled
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), kinds, spans), max_size=24),
    st.lists(st.tuples(spans, spans, st.booleans()), max_size=12),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 7])), min_size=1, max_size=4),
)
def test_compiled_sweep_and_its_python_twin_agree(region_rows, calls, lengths_and_gaps):
    unit = 10_000  # ns: a shorter wait did not block
    begin = np.cumsum([0, *(sum(step) for step in lengths_and_gaps)])
    spans_of_steps = [
        (unit * int(at), unit * (int(at) + length))
        for at, (length, _) in zip(begin[:-1], lengths_and_gaps, strict=True)
    ]
    steps = step_spans(*((r, i, *span) for r in (0, 1) for i, span in enumerate(spans_of_steps)))
    rows = regions(*nesting((rank, kind, unit * a, unit * b) for rank, kind, (a, b) in region_rows))
    ops = ("allreduce", "send", "allgather")
    both = [
        (r, n, unit * at[r][0], unit * at[r][1], ops[n % 3])
        for n, (*at, peer) in enumerate(calls)
        for r in range(1 + peer)
    ]
    swept, twin = cut_twice(steps, rows, matched(collectives(*both)))
    check_phases(swept, steps)
    assert swept.equals(twin)


@compiled
@pytest.mark.parametrize("parallel", ["3d", "pp-1f1b"])
def test_compiled_sweep_and_its_python_twin_agree_on_a_job(parallel, tmp_path):
    job = Job(parallel=parallel, ranks=16, steps=6, seed=1, nic_bytes_per_s=20e9)
    timeline = build_timeline(Trace.open(record.write(run(job, healthy_resources(job)), tmp_path / "run")))
    ended = timeline.collectives.filter(pl.col("wait_ns").is_not_null())
    swept, twin = cut_twice(timeline.steps, timeline.regions, timeline.collectives)
    assert len(ended) > 100
    assert swept.equals(twin)
    assert swept.equals(timeline.phases)


@pytest.mark.parametrize(
    ("of_steps", "usual", "clear"),
    [
        ([9.0], 9, True),  # in 16 gaps of one length: 1.96 / 4 of it either way
        ([30.0, 9, 8], 9, True),  # the first step of a capture is often longer
        ([0.0, 9], 0, False),  # one of two may be an event of that step
        ([0.0, 9, 9, 9, 9], 7.2, True),  # from five on steps are the sample
        ([0.0, 0, 0, 0, 9], 0, False),
        ([60.0, 9, 8, 9, 9], 9, True),  # whose mean is not clear of zero
    ],
)
def test_of_few_steps_the_gaps_are_the_sample_and_the_median_step_counts(of_steps, usual, clear):
    found = estimate_of_pieces(np.array(of_steps), np.ones(16))
    assert (found.ns, found.clear) == (pytest.approx(usual), clear)
