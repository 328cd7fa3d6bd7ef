"""Which ranks do the same work: pipeline stages by the schedule's names, by groups, and by sends and receives."""

from __future__ import annotations

import polars as pl
import pytest

from rankscope.analysis.timeline.parallelism import role_codes, roles


def groups(*rows):
    columns = {"group_id": pl.Int64, "name": pl.String, "role": pl.String, "members": pl.String}
    return pl.DataFrame(rows, columns, orient="row")


def regions(*rows):
    columns = {"rank": pl.Int64, "stage": pl.Int32, "microbatch": pl.Int32}
    return pl.DataFrame(rows, columns, orient="row")


def sends(group_id, *pairs):
    columns = {"rank": pl.Int64, "peer": pl.Int64, "op": pl.String, "group_id": pl.Int64, "group_size": pl.UInt32}
    return pl.DataFrame([(rank, peer, "send", group_id, 8) for rank, peer in pairs], columns, orient="row")


def exchanges(*pairs):
    """What two ranks do with each other is not known."""
    rows = [(rank, None, "unknown", number, 2) for number, pair in enumerate(pairs) for rank in pair]
    return pl.DataFrame(rows, sends(0).schema, orient="row")


WORLD = (0, "0", "", "0-7")


def test_schedule_names_the_stages():
    """Two stages on each of two ranks, interleaved."""
    seen = regions((0, 0, 1), (0, 2, 1), (1, 1, 1), (1, 3, 1), (1, 3, 2), (1, None, None))
    assert roles(groups(WORLD), seen, sends(0)) == {0: (0, 2), 1: (1, 3)}


@pytest.mark.parametrize("named", [("pp0", ""), ("12", "mesh_pp"), ("7", "PIPELINE_MODEL_PARALLEL_GROUP")])
def test_place_in_a_pipelines_group_is_the_stage(named):
    pipelines = groups(WORLD, (1, *named, "0,2,4"), (2, *named, "1,3,5"))
    calls = pl.concat([sends(1, (0, 2), (2, 4)), sends(2, (1, 3), (3, 5))])
    found = roles(pipelines, regions(), calls)
    assert found == {0: (0,), 2: (1,), 4: (2,), 1: (0,), 3: (1,), 5: (2,)}
    assert role_codes(found, (0, 1, 2, 3, 9)).tolist() == [1, 1, 2, 2, 0]


def test_group_that_only_sounds_like_a_pipelines_is_none():
    mapped = groups(WORLD, (1, "mapped", "apply", "0-1"))
    assert roles(mapped, regions(), sends(1, (0, 1))) == {}


def test_chains_of_neighbours_are_pipelines_and_rings_are_none():
    """Gradients come back the way that activations went."""
    chains = [(0, 2), (2, 4), (4, 2), (2, 0), (1, 3), (3, 5), (5, 3)]
    assert roles(groups(WORLD), regions(), sends(0, *chains)) == {0: (0,), 2: (1,), 4: (2,), 1: (0,), 3: (1,), 5: (2,)}
    assert roles(groups(WORLD), regions(), sends(0, (0, 1), (1, 2), (2, 0))) == {}
    assert roles(groups(WORLD), regions(), sends(0, (0, 1), (1, 2), (3, 4))) == {}  # lengths differ


def test_what_neighbours_do_without_a_name_makes_a_pipeline_too():
    """Pairs without a neighbour in common may exchange anything."""
    found = roles(groups(WORLD), regions(), exchanges((0, 2), (2, 4), (1, 3), (3, 5)))
    assert found == {0: (0,), 2: (1,), 4: (2,), 1: (0,), 3: (1,), 5: (2,)}
    assert roles(groups(WORLD), regions(), exchanges((0, 1), (2, 3))) == {}


def test_two_ranks_are_a_pipeline_if_they_go_through_microbatches():
    pair = sends(0, (0, 1), (1, 0))
    assert roles(groups(WORLD), regions((0, None, None)), pair) == {}
    assert roles(groups(WORLD), regions((0, None, 3)), pair) == {0: (0,), 1: (1,)}


def test_without_a_pipeline_all_ranks_are_alike():
    assert roles(groups(WORLD), regions((0, None, None)), sends(0)) == {}
    assert role_codes({}, (0, 1, 2)).tolist() == [0, 0, 0]
