"""What a report leaves out, and why: steps that a rank lacks, devices, and too many kernels for a replay."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.finding import (
    Gap,
    NotChecked,
)
from rankscope.analysis.replay.protocol import Replay, Unreplayable
from rankscope.analysis.runs.memory_budget import ENOUGH_ROWS, MOST_ROWS
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, how_to_profile
from rankscope.analysis.timeline.build import Timeline

__all__ = ["incomplete_steps", "left_out", "not_observed"]


def incomplete_steps(steps: pl.DataFrame) -> list[Gap]:
    """Return the steps that were excluded because a rank lacks them, or a part of them."""
    count = steps.filter(pl.col("aside") == "incomplete")["step"].n_unique()
    why = text("{count} not analyzed, since not all ranks have all of them", count=counted(count, "step"))
    return [Gap(table="steps", rank=None, node=None, count=count, why=why)] if count else []


def not_observed(timeline: Timeline) -> list[NotChecked]:
    """Return what this version cannot see of these ranks."""
    devices = timeline.ranks.filter(pl.col("device") != "cpu")["device"].unique().sort().to_list()
    if not devices or len(timeline.kernels) or len(timeline.marks):
        return []
    why = text(
        "ranks run on {devices}; what these do is recorded in profiled windows only ({how})",
        devices=", ".join(devices),
        how=how_to_profile(),
    )
    return [NotChecked(detector="device_time", why=why)]


def left_out(run: Replay | Unreplayable, timeline: Timeline) -> list[Gap]:
    """Return what is left out since the graph is not of all kernels and launches."""
    rows, steps = len(timeline.kernels) + len(timeline.launches), timeline.steps["step"].n_unique()
    if timeline.kernels.is_empty():
        return []
    if not isinstance(run, Unreplayable) and run.host:
        first = run.host.steps["step"].n_unique()
        if first == steps or rows <= ENOUGH_ROWS:
            return []
        done = text(
            "the critical path and predicted speedups are those of the first {first} of {steps}",
            first=first,
            steps=counted(steps, "step"),
        )
    elif rows <= MOST_ROWS:
        return []
    else:
        why_none = run.reason if isinstance(run, Unreplayable) else text("a pipeline")
        done = text("there is no critical path and no predicted speedup ({why})", why=why_none)
    why = text("not all {rows:,} kernels and launches are replayed: {done}", rows=rows, done=done)
    return [Gap(table="kernels", rank=None, node=None, count=None, why=why)]
