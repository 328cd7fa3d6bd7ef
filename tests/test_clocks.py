"""Clocks from causality, what the clocks' error allows to say, and ends that cannot be. Times are small ns or ms."""

from __future__ import annotations

import numpy as np
import polars as pl
from test_timeline import ONE_NODE, collectives, groups, matched

from rankscope.analysis.finding import Clock
from rankscope.analysis.timeline.matching import match_collectives

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


def test_within_the_clocks_error_the_durations_are_right_and_only_the_order_is_mended():
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


def test_the_arrival_spread_is_said_where_the_error_is_a_tenth_of_it():
    rows = on_two_nodes((0, 0, 100, 500), (1, 0, 300, 500))
    assert matched(rows, clocks=two_nodes(20))["arrival_spread_ns"].to_list() == [200, 200]
    assert matched(rows, clocks=two_nodes(21))["arrival_spread_ns"].to_list() == [None, None]


def test_a_broadcasts_wait_is_said_where_the_error_leaves_a_tenth_of_the_call_open():
    """The receiver's call lasts 500, the root arrived 300 after it began; who was last needs 10 % of those 300."""
    rows = on_two_nodes((0, 0, 400, 410, "broadcast"), (1, 0, 100, 600, "broadcast"))

    def said(error_ns):
        return matched(rows, clocks=two_nodes(error_ns)).select("wait_ns", "is_last").rows()

    assert said(30) == [(0, True), (300, False)]
    assert said(50) == [(0, None), (300, None)]
    assert said(51) == [(0, None), (None, None)]
    assert said(None) == [(None, None), (None, None)]


def test_of_a_wait_on_the_device_the_clock_free_form_is_taken_where_clocks_do_not_tell():
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
