"""Clocks from causality, what the clocks' error allows to say, and ends that cannot be. Times are small ns or ms."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.model.finding import Clock
from rankscope.analysis.timeline.clocks import apply_clocks, clocks_by_causality
from rankscope.analysis.timeline.matching import match_collectives
from support.rows import ONE_NODE, collectives, groups, matched, table

MS = 1_000_000
UNKNOWN = [Clock(node=n, offset_ns=0, drift_ppm=0.0, error_ns=None, source="none") for n in (0, 1)]


def two_nodes(error_ns):
    """Node 0, and node 1 whose clock is known to `error_ns`."""
    return [*ONE_NODE, Clock(node=1, offset_ns=0, drift_ppm=0.0, error_ns=error_ns, source="pings")]


def on_two_nodes(*rows):
    """(rank, seq, start, end[, op]); rank r is node r."""
    return collectives(*rows).with_columns(node=pl.col("rank"))


def test_an_end_before_the_last_arrival_is_moved_there_and_the_rest_stays():
    """Rank 0's end at 250 cannot be, since rank 1 comes at 300: the end is wrong, and the transfer is rank 1's 100."""
    got = matched(collectives((0, 0, 100, 250), (1, 0, 300, 400)))
    said = ["start_ns", "end_ns", "early_ns", "transfer_ns", "wait_ns"]
    assert got.select(said).rows() == [(100, 300, 50, 100, 100), (300, 400, None, 100, 0)]


def test_within_the_clocks_error_the_durations_are_right_and_only_the_order_is_repaired():
    """Node 1's clock is 60 ahead: rank 1 came at 240, and ended at 340. Local durations say so, 240 and 100."""
    got = matched(on_two_nodes((0, 0, 40, 280), (1, 0, 300, 400)), clocks=two_nodes(60))
    assert got.select("end_ns", "early_ns", "transfer_ns", "wait_ns").rows() == [
        (300, 20, 100, 140),
        (400, None, 100, 0),
    ]


def test_a_receive_ends_after_its_send_began_and_an_all_to_all_owes_nothing():
    rows = pl.concat(
        [
            collectives((0, 0, 100, 150, "send"), peer=1),
            collectives((1, 0, 20, 90, "recv"), peer=0),
            collectives((0, 0, 100, 150, "alltoall_base"), (1, 0, 300, 400, "alltoall_base")),
        ]
    )
    assert matched(rows)["early_ns"].to_list() == [None, 10, None, None]


def test_nothing_is_moved_where_clocks_are_unknown():
    got = matched(on_two_nodes((0, 0, 100, 250), (1, 0, 300, 400)), clocks=UNKNOWN)
    assert got.select("end_ns", "early_ns", "wait_ns", "arrival_spread_ns").rows() == [
        (250, None, 50, None),
        (400, None, 0, None),
    ]


def test_the_arrival_spread_is_known_where_the_error_is_a_tenth_of_it():
    rows = on_two_nodes((0, 0, 100, 500), (1, 0, 300, 500))
    assert matched(rows, clocks=two_nodes(20))["arrival_spread_ns"].to_list() == [200, 200]
    assert matched(rows, clocks=two_nodes(21))["arrival_spread_ns"].to_list() == [None, None]


def test_a_broadcasts_wait_is_known_where_the_error_leaves_a_tenth_of_the_call_open():
    """The receiver's call lasts 500, the root arrived 300 after it began; naming the last needs 10 % of those 300."""
    rows = on_two_nodes((0, 0, 400, 410, "broadcast"), (1, 0, 100, 600, "broadcast"))

    def said(error_ns):
        return matched(rows, clocks=two_nodes(error_ns)).select("wait_ns", "is_last").rows()

    assert said(30) == [(0, True), (300, False)]
    assert said(50) == [(0, None), (300, None)]
    assert said(51) == [(0, None), (None, None)]
    assert said(None) == [(None, None), (None, None)]


def test_a_wait_on_the_device_has_the_clock_free_form_where_clocks_do_not_show_it():
    """They began on the device at 110 and 310, and ended together: by the clocks 200 of waiting, by durations 190."""
    rows = on_two_nodes((0, 0, 100, 510), (1, 0, 100, 520))
    rows = rows.with_columns(device_start_ns=pl.Series([110, 310]))
    assert matched(rows, clocks=two_nodes(20))["wait_ns"].to_list() == [200, 0]
    assert matched(rows, clocks=two_nodes(21))["wait_ns"].to_list() == [190, 0]


def test_errors_of_two_nodes_add_up_and_ranks_of_one_node_share_a_clock():
    """Nodes 1 and 2 are each known to 10, so that their difference is to 20; ranks 1 and 3 are both on node 1."""
    clocks = [*two_nodes(10), Clock(node=2, offset_ns=0, drift_ppm=0.0, error_ns=10, source="pings")]

    def spread(ranks, gap_ns):
        rows = collectives((ranks[0], 0, 0, 900), (ranks[1], 0, gap_ns, 900))
        rows = rows.with_columns(node=pl.col("rank").replace({3: 1}))
        members = groups(",".join(map(str, ranks)))
        return match_collectives(rows, members, clocks)["arrival_spread_ns"][0]

    assert [spread((1, 2), 200), spread((1, 2), 199)] == [200, None]
    assert [spread((0, 1), 100), spread((0, 1), 99)] == [100, None]
    assert spread((1, 3), 1) == 1


def test_ordinals_with_holes_as_large_as_they_can_be_are_matched_without_places_for_the_holes():
    far = np.iinfo(np.uint32).max
    rows = collectives((0, 0, 0, 10), (1, 0, 0, 10), (0, far, 20, 30), (1, far, 25, 30), (0, 7, 11, 12))
    assert matched(rows)["instance_id"].to_list() == [0, 0, 1, 1, None]


def test_a_rank_that_is_no_member_or_comes_twice_does_not_make_an_operation_whole():
    assert set(matched(collectives((0, 0, 0, 10), (2, 0, 0, 10)))["unmatched"]) == {"peer missing"}
    assert set(matched(collectives((0, 0, 0, 10), (0, 0, 0, 10)))["unmatched"]) == {"peer missing"}


# ---------------------------------------------------------------- clocks from causality


BEGIN = 10**15


def true_operations(seconds, *, every_ms=100, seed=1):
    """Two ranks, on node 0's clock: starts up to 5 ms apart, a transfer of 0.2 ms or more, late ends by up to 1 ms."""
    rng = np.random.default_rng(seed)
    count = seconds * 1_000 // every_ms
    start = BEGIN + np.arange(count)[:, None] * every_ms * 1_000_000 + rng.integers(0, 5_000_000, (count, 2))
    end = start.max(axis=1, keepdims=True) + 200_000 + rng.exponential(300_000, (count, 2)).astype(np.int64)
    return start, end


def seen(start, end, offset_ns, drift_ppm, op="allreduce"):
    """The rows, rank 1 on node 1, whose clock plus offset and drift is node 0's."""
    rows = []
    for n in range(len(start)):
        for rank in (0, 1):
            a, e = int(start[n, rank]), int(end[n, rank])
            if rank:
                a, e = (BEGIN - offset_ns + round((t - BEGIN) / (1 + drift_ppm * 1e-6)) for t in (a, e))
            rows.append((rank, n, a, e, op))
    return on_two_nodes(*rows)


def placed(rows):
    return clocks_by_causality(matched(rows, clocks=()), [ONE_NODE[0], UNKNOWN[1]])[1]


def furthest(clock, offset_ns, drift_ppm, seconds):
    """By how much the clock is wrong at most, from the first to the last operation."""
    own = [BEGIN - offset_ns, BEGIN - offset_ns + seconds * 10**9]
    frame = pl.DataFrame({"node": [1, 1], "start_ns": own}, schema_overrides={"node": pl.Int32})
    got = apply_clocks(frame, [clock])["start_ns"].to_list()
    return max(abs(g - (BEGIN + s * 10**9 * (1 + drift_ppm * 1e-6))) for g, s in zip(got, (0, seconds), strict=True))


@pytest.mark.parametrize(("offset_ns", "drift_ppm"), [(7 * MS, 0), (-3 * MS, 20), (5_000 * MS, -20), (10**18, 20)])
def test_offset_and_drift_are_recovered_within_the_bound_without_pings(offset_ns, drift_ppm):
    clock = placed(seen(*true_operations(600), offset_ns, drift_ppm))
    assert clock.source == "causality"
    assert furthest(clock, offset_ns, drift_ppm, 599) <= clock.error_ns < 1 * MS
    assert clock.drift_ppm == pytest.approx(drift_ppm, abs=2)


@pytest.mark.parametrize(("apart_ns", "source"), [(30_000, "ends"), (60 * MS, "causality")])
def test_devices_end_an_operation_together_which_places_a_clock_where_one_rank_is_always_late(apart_ns, source):
    """Rank 1 begins each of 50 operations 20 ms late, or its clock is behind: that of 0.2 ms then takes 20.2 ms."""
    rng = np.random.default_rng(3)
    start = BEGIN + np.arange(50)[:, None] * 100 * MS + np.array([0, 20 * MS])
    end = start[:, 1:] + 200_000 + rng.integers(0, apart_ns, (50, 2))
    rows = seen(start, end, 7 * MS, 0).with_columns(device_start_ns=pl.col("start_ns"))
    clock = placed(rows)
    assert clock.source == source
    assert abs(clock.offset_ns - 7 * MS) <= clock.error_ns
    assert (clock.error_ns < 40_000) == (source == "ends")
    assert placed(rows.with_columns(device_start_ns=None)).error_ns > 5 * MS


def test_two_percent_of_wrong_ends_do_not_move_the_clock_and_are_repaired_and_counted():
    """120 of 6,000 operations end on rank 1 by 2 to 50 ms too early."""
    start, end = true_operations(600)
    rng = np.random.default_rng(2)
    wrong = rng.choice(len(end), 120, replace=False)
    by = rng.integers(7 * MS, 50 * MS, 120)  # more than starts and ends are apart: these cannot be
    end[wrong, 1] -= by
    rows = seen(start, end, 7 * MS, 20)
    clock = placed(rows)
    assert furthest(clock, 7 * MS, 20, 599) <= clock.error_ns < 1 * MS
    clocks = [ONE_NODE[0], clock]
    repaired = matched(apply_clocks(rows, clocks), clocks=clocks)
    early = repaired.filter(pl.col("early_ns") > 0)
    assert set(early["seq"]) == set(wrong.tolist())
    assert early["early_ns"].max() < 50 * MS + clock.error_ns
    assert repaired.filter(pl.col("transfer_ns") < 0).is_empty()


def test_a_clock_that_is_no_line_stays_unknown():
    """In the middle of the run it jumps by 100 ms: no line holds half of the bounds."""
    start, end = true_operations(60)
    start[300:, 1] += 100 * MS
    end[300:, 1] += 100 * MS
    assert placed(seen(start, end, 7 * MS, 0)) == UNKNOWN[1]


def test_sends_one_way_bound_a_clock_from_one_side_only():
    """Of 0 → 1 alone nothing follows; with 1 → 0 the offset of 1,000 is known to half of 20 and 40."""
    there = pl.concat(
        [
            collectives((0, 0, 5_000, 5_010, "send"), peer=1),
            collectives((1, 0, 4_000, 4_020, "recv"), peer=0),
        ]
    ).with_columns(node=pl.col("rank"))
    back = pl.concat(
        [
            collectives((1, 0, 4_100, 4_110, "send"), peer=0),
            collectives((0, 0, 5_100, 5_140, "recv"), peer=1),
        ]
    ).with_columns(node=pl.col("rank"))
    assert placed(there) == UNKNOWN[1]
    clock = placed(pl.concat([there, back]))
    assert abs(clock.offset_ns - 1_010) <= 2
    assert 30 <= clock.error_ns <= 35


def test_a_node_is_placed_through_another_with_both_errors():
    """Node 2 shares operations with node 1 only. Each takes 100, so that a node's offset is known to 100."""
    rows = []
    for n in range(50):
        at = 10_000 * n
        rows += [(0, n, at, at + 100, 1), (1, n, at - 7_000, at - 6_900, 1)]
        rows += [(1, n, at - 4_000, at - 3_900, 2), (2, n, at + 2_000, at + 2_100, 2)]
    calls = table(
        "collectives",
        *(
            {"rank": r, "node": r, "seq": s, "start_ns": a, "issued_ns": a, "end_ns": e, "group_id": g}
            for r, s, a, e, g in rows
        ),
        op="allreduce",
    )
    members = table("groups", {"name": "a", "members": "0-1"}, {"name": "b", "members": "1-2", "group_id": 2})
    unknown = [Clock(node=n, offset_ns=0, drift_ppm=0.0, error_ns=None, source="none") for n in (1, 2)]
    clocks = clocks_by_causality(match_collectives(calls, members, ()), [ONE_NODE[0], *unknown])
    assert [abs(c.offset_ns - truth) <= 2 for c, truth in zip(clocks, (0, 7_000, 1_000), strict=True)] == [True] * 3
    assert 95 <= clocks[1].error_ns <= 105
    assert 190 <= clocks[2].error_ns <= 210
