"""Fixes are read and written in one place."""

from __future__ import annotations

import pytest

from rankscope.analysis.replay.fixes import Fix, check_form, together
from rankscope.errors import BadFix


@pytest.mark.parametrize(
    ("written", "kind", "numbers", "amount"),
    [
        ("rank:2", "rank", (2,), 2.0),
        ("rank:2,5", "rank", (2, 5), None),
        ("stage:3", "stage", (3,), 3.0),
        ("link:node1", "link", (1,), None),
        ("link:node1-node12", "link", (1, 12), None),
        ("link:node1,node12", "link", (1, 12), None),
        ("op:allreduce=0.5", "op", (), 0.5),
        ("bucket-mb:12.5", "bucket-mb", (), 12.5),
        ("overlap:dp:allreduce", "overlap", (), None),
        ("reshard:off", "reshard", (), None),
        ("gc", "gc", (), None),
        ("rank:x", "rank", (), None),
    ],
)
def test_fix_is_read_and_written_alike(written, kind, numbers, amount):
    fix = Fix.parse(written)
    assert (str(fix), fix.kind, fix.numbers, fix.amount) == (written, kind, numbers, amount)


def test_fixes_are_made_of_numbers():
    assert [
        str(Fix.numbered("rank", 2, 5)),
        str(Fix.link(0)),
        str(Fix.link(0, 3)),
        str(Fix.link(0, 3, is_pair=True)),
    ] == [
        "rank:2,5",
        "link:node0",
        "link:node0,node3",
        "link:node0-node3",
    ]


def test_single_ranks_are_fixed_together():
    assert together(["rank:3", "gc", "rank:5"]) == ["gc", "rank:3,5"]


@pytest.mark.parametrize("written", ["link:node0-node1", "link:node0,node2", "balance:stages", "overlap:dp:allreduce"])
def test_what_some_run_can_have_passes(written):
    check_form(written)


@pytest.mark.parametrize("written", ["rank:", "rank:x", "node:1,2", "link:1", "op:allreduce", "prefetch:0", "speed"])
def test_what_no_run_can_have_is_refused(written):
    with pytest.raises(BadFix, match="no fix is written"):
        check_form(written)
