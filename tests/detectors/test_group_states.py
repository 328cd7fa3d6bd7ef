"""Progress of each rank when the job hung: the table in the report, its HTML and its JSON."""

from __future__ import annotations

import json
import re

import pytest

from rankscope.analysis.diagnosis.diagnose import diagnose
from rankscope.analysis.report import html, json_form
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.phrases import some_ranges
from support.flight_dumps import dump, write_dumps


@pytest.fixture
def hung(tmp_path):
    """Rank 0 is in all-reduce 5, which train.py:12 called; rank 1 has begun nothing after operation 4."""
    here, torch = (
        {"name": "step", "filename": "/job/train.py", "line": 12},
        {
            "name": "all_reduce",
            "filename": "/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py",
            "line": 9,
        },
    )
    waits = dump(0)
    waits["entries"][0]["frames"] = [torch, here]
    waits["pg_status"]["0"]["last_started_collective"] = 5
    return diagnose(Trace.open(write_dumps(tmp_path, waits, dump(1, enqueued=4, entries=False))))


def test_a_hang_says_how_far_each_rank_had_come_the_culprit_first(hung):
    assert [
        (s.rank, s.group, s.enqueued, s.started, s.completed, s.op, s.seq, s.state, s.frame) for s in hung.states
    ] == [
        (1, "group 0", 4, None, 4, "", None, "behind", ""),
        (0, "group 0", 5, 5, 4, "allreduce", 5, "enqueued", "train.py:12 (step)"),
    ]
    assert json.loads(json_form.render(hung))["states"][0]["state"] == "behind"


def test_the_html_report_has_the_table_and_one_line_for_checks_with_the_same_reason(hung):
    page = html.render(hung)
    assert "did not reach it" in page
    assert "train.py:12 (step)" in page
    (row,) = re.findall(r"<tr><td>[^<]*slow rank[^<]*</td>", page)
    assert row.count(", ") > 6  # of checks


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (range(8), "0-7"),
        (range(1, 127, 2), "odd 1-125 (63)"),
        (range(0, 128, 2), "even 0-126 (64)"),
        (range(0, 64, 4), "0-60 in steps of 4 (16)"),
        ([n for n in range(64) if n % 4], "1-3,5-7,9-11,13-15 … 61-63 (48)"),
        ([1, 3, 5], "1,3,5"),
    ],
)
def test_long_lists_of_ranks_are_written_short(numbers, said):
    assert some_ranges(list(numbers)) == said
