"""What the What if page calls the fixes that it tries."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import rankscope
from captures.planted import Case, simulated
from captures.write import write
from rankscope.analysis.timeline.build import build_timeline
from rankscope.dashboard import whatif_session
from rankscope.dashboard.run import Run
from rankscope.dashboard.whatif_session import fixes
from support.ddp_run import record


def names(run_path):
    trace = rankscope.open(run_path)
    timeline, report = build_timeline(trace), rankscope.diagnose(trace)
    run = Run(key="0", name="run", trace=trace, timeline=timeline, report=report, tables={}, running=False, read_at=0.0)
    named = {fix.key: str(fix.text) for fix in fixes(run)[0]}
    assert not [key for key, name in named.items() if key == name]
    return named


def test_fixes_of_a_slow_rank_have_names_in_words(tmp_path):
    assert names(record(tmp_path / "run", {0: 90, 1: 60}))["rank:0"] == "rank 0 as fast as the others"


def test_where_time_is_short_nodes_are_tried_last(tmp_path, monkeypatch):
    """There may be a thousand of them. Four fixes are tried, by a clock that goes on by 1 s at each look."""
    monkeypatch.setattr(whatif_session, "time", SimpleNamespace(monotonic=count().__next__))
    tried = names(record(tmp_path / "run", {0: 90, 1: 60, 2: 60, 3: 60}, ranks_per_node=2))
    assert set(tried) == {"rank:0", "node:0", "balance", "op:allreduce=0"}, "those of the finding, and no other node"


def test_fixes_of_the_schedule_of_communication_have_names_in_words(tmp_path):
    """A capture of FSDP without prefetch."""
    named = names(write(simulated(Case("exposed_communication", "loud", 3, 2, "tuning")), tmp_path / "capture"))
    assert named["prefetch:1"] == "prefetch depth 1"
    assert named["overlap:not named in the trace:allgather_base"] == (
        "allgather_base overlaps compute (group: not named in the trace)"
    )
