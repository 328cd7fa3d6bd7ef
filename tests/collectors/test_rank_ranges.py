"""Lists of ranks are written and read in one way."""

from __future__ import annotations

import pytest

from rankscope.collectors.rank_ranges import as_ranges, members_of


@pytest.mark.parametrize(
    ("ranks", "written"),
    [([0, 1, 2, 3, 8], "0-3,8"), ([5, 6], "5,6"), ([4, 0], "4,0"), ([7], "7"), ([], ""), ([9, 0, 1, 2], "9,0-2")],
)
def test_ranks_are_written_and_read_back(ranks, written):
    assert as_ranges(ranks) == written
    assert members_of(written) == ranks


@pytest.mark.parametrize("written", ["x", "3-1", "-1", "0-99999999999"])
def test_what_are_no_ranks_is_refused(written):
    with pytest.raises(ValueError, match=r"."):
        members_of(written)
