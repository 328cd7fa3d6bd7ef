"""One run that was opened, read and judged: what pages and figures are made of."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from rankscope.analysis.diagnosis.step_summaries import StepSummaries
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline

__all__ = ["Run"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """One run, read and judged. `running`: the job has not ended, as far as the run says."""

    key: str
    name: str
    trace: Trace
    timeline: Timeline
    report: Report
    tables: dict[str, pl.DataFrame]  # for the page of tables: those of the timeline, and the trace's others
    running: bool
    read_at: float  # unix time
    pending: bool = False  # of a long run: the other steps are being analyzed
    steps: StepSummaries | None = None  # of a long run those of all stretches that are analyzed
