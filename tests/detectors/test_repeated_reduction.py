"""Gradients that are reduced in every backward pass of a step, though the last one's sum would do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import rankscope
from rankscope.analysis.detectors import repeated_reduction
from rankscope.errors import NotResolvable
from support.paths import SCRIPTS

RANKSCOPE = Path(sys.executable).with_name("rankscope")
MS, MB, STEPS = 1_000_000, 2**20, 10
GROUPS = pl.DataFrame(
    {"group_id": [0, 1], "name": ["0", "1"], "role": ["default_pg", "mesh_tp"], "members": ["0-3", "0,1"]}
)
LAST = [(1, 0, 10 * MB, 20)]  # in the second pass, of all ranks, 10 MB, in 20 ms that block


def tables(first, last=LAST, *, extra=(), forward=True, wait_ms=0):
    """Two ranks whose steps of 200 ms have two microbatches of 100: 30 of forward, 40 of backward, 30 for transfers.

    `first`, `last` and `extra` are reductions in the first and second backward and in the first forward: how often, in
    which group, bytes, and for how many ms each blocks.
    """
    parts, phases, regions, calls = [], [], [], []
    for rank in range(2):
        for step in range(STEPS):
            for half, (within, ahead) in enumerate(((first, extra), (last, ()))):
                begin = 200 * step + 100 * half
                if forward or not half:
                    regions.append((rank, step, "forward", begin, begin + 30, 0))
                regions.append((rank, step, "backward", begin + 30, begin + 100, 0))
                at = {"ahead": begin + 1, "within": begin + 70}
                phases.append((rank, step, "compute", "", begin, begin + 70))
                for place, ops in (("ahead", ahead), ("within", within)):
                    for count, group, size, ms in ops:
                        for _ in range(count):
                            phases += [(rank, step, "transfer", "allreduce", at[place], at[place] + ms)] if ms else []
                            span = (at[place], at[place] + ms, wait_ms)
                            calls.append((rank, step, "allreduce", group, str(group), size, *span))
                            at[place] += ms
            blocked = sum(
                end - start for r, s, part, _, start, end in phases if (r, s, part) == (rank, step, "transfer")
            )
            parts += [(rank, step, "compute", (200 - blocked) * MS), (rank, step, "transfer", blocked * MS)]
    span = ["start_ns", "end_ns"]
    columns = ["rank", "step", "op", "group_id", "group", "size_bytes", *span, "wait_ns"]
    frames = (
        pl.DataFrame(phases, ["rank", "step", "part", "label", *span], orient="row"),
        pl.DataFrame(regions, ["rank", "step", "kind", *span, "thread"], orient="row"),
        pl.DataFrame(calls, columns, orient="row", schema_overrides={"wait_ns": pl.Int64}).with_columns(
            device_start_ns=pl.lit(None, pl.Int64)
        ),
    )
    in_ns = [frame.with_columns(pl.col(c) * MS for c in (*span, "wait_ns") if c in frame.columns) for frame in frames]
    return pl.DataFrame(parts, ["rank", "step", "part", "ns"], orient="row"), *in_ns, GROUPS


def test_all_reductions_but_those_of_the_last_pass_are_the_loss():
    """20 ms in each of two passes: one of them, 10 % of the step, would not be needed."""
    (finding,) = repeated_reduction.detect(*tables([(1, 0, 10 * MB, 20)]))
    assert finding.title == (
        "Gradients are reduced in each of 2 backward passes per step: all but the last cost 20.0 ms"
    )
    assert (finding.lost_ns_per_step, finding.lost_fraction, finding.severity) == (20 * MS, 0.1, "high")
    assert (finding.groups, finding.gain_fraction) == (("0",), 0.1)
    assert {seen.start_ns % (200 * MS) for seen in finding.evidence} == {70 * MS}  # in the first pass


@pytest.mark.parametrize(
    "healthy",
    [
        tables([]),  # within no_sync
        tables([(1, 0, 10 * MB, 0)]),  # hidden
        tables([(2, 0, 16_384, 5)]),  # SyncBatchNorm within no_sync
        tables([(20, 0, 16_384, 1)], [(20, 0, 16_384, 1)]),  # SyncBatchNorm, and gradients by reduce-scatter
        tables([(1, 1, 10 * MB, 20)], [(1, 1, 10 * MB, 20)]),  # tensor parallelism, by the group's name
        tables([(1, 0, 10 * MB, 20)], extra=[(1, 0, 10 * MB, 20)]),  # the same, by its reductions in forward
        tables([(1, 0, 10 * MB, 20)], forward=False),  # backward in two calls
    ],
    ids=["no_sync", "hidden", "statistics", "statistics only", "tensor", "activations", "one pass"],
)
def test_reductions_that_are_needed_or_cost_nothing_are_no_finding(healthy):
    assert repeated_reduction.detect(*healthy) == []


@pytest.mark.parametrize(("ms", "found"), [(5, 0), (7, 1)])
def test_it_reports_from_its_detection_limit_on(ms, found):
    seen = tables([(1, 0, 10 * MB, ms)])
    assert repeated_reduction.resolution_ns(seen[0]) == 6 * MS  # 3 % of 200 ms
    assert len(repeated_reduction.detect(*seen)) == found


def test_what_cannot_be_seen_is_not_checked():
    breakdown, phases, regions, collectives, groups = tables([(1, 0, 10 * MB, 20)])
    with pytest.raises(NotResolvable, match="no backward pass"):
        repeated_reduction.detect(breakdown, phases, regions.filter(kind="forward"), collectives, groups)
    unknown = breakdown.with_columns(part=pl.col("part").replace("transfer", "unsplit"))
    with pytest.raises(NotResolvable, match="cannot be split"):  # a rank is missing: the last one is not known
        repeated_reduction.detect(unknown, phases, regions, collectives, groups)


@pytest.mark.real_job
@pytest.mark.parametrize("sync", [True, False], ids=["each pass", "no_sync"])
def test_real_job_that_accumulates_gradients_without_no_sync_is_found(sync, tmp_path):
    launcher = [RANKSCOPE, "run", "--no-report", "--out", tmp_path / "run", "--standalone", "--nproc-per-node", "2"]
    script = [SCRIPTS / "gradients.py", "--accumulate", *([] if sync else ["--no-sync"])]
    subprocess.run([str(word) for word in (*launcher, *script)], check=True, capture_output=True, timeout=200)
    report = rankscope.diagnose(rankscope.open(tmp_path / "run"))
    assert "repeated_reduction" not in [check.detector for check in report.not_checked]
    found = [finding.title for finding in report.findings if finding.detector == "repeated_reduction"]
    assert [title.partition(": ")[0] for title in found] == (
        ["Gradients are reduced in each of 2 backward passes per step"] if sync else []
    )
