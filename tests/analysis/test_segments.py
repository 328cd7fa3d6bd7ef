"""Running maxima of segments: of times that fit on one axis, and of those that do not."""

import numpy as np
import polars as pl
import pytest

from rankscope.analysis.model.segments import reached_before, running_max


@pytest.mark.parametrize("scale", [1, 1 << 40, 1 << 58])
def test_what_a_rank_had_reached_is_asked_of_its_own_rows(scale):
    """With the largest times the segments do not fit on one axis; after a row without an end it is not known."""
    rank, group = [0, 0, 0, 1, 1, 4, 4], [7, 7, 8, 7, 7, 7, 7]
    ends = [5 * scale, 3 * scale, 4 * scale, 2 * scale, 6 * scale, -scale, 0]
    rows = pl.DataFrame({"rank": rank, "group_id": group, "end_ns": ends})
    assert running_max(np.array(ends), np.array([0, 3, 5, 7])).tolist() == [
        *(5 * scale, 5 * scale, 5 * scale),
        *(2 * scale, 6 * scale),
        *(-scale, 0),
    ]
    by_rank = [None, 5 * scale, 5 * scale, None, 2 * scale, None, -scale]
    assert reached_before(rows, "rank").to_list() == by_rank
    by_group = [None, 5 * scale, None, None, 2 * scale, None, -scale]
    assert reached_before(rows, "rank", "group_id").to_list() == by_group
    with_null = rows.with_columns(pl.when(pl.col("end_ns") != 3 * scale).then("end_ns").alias("end_ns"))
    assert reached_before(with_null, "rank").to_list() == [*by_rank[:2], None, *by_rank[3:]]
    assert reached_before(rows.clear(), "rank").to_list() == []
