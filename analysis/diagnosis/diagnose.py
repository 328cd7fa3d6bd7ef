"""From a run to the report on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps
from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.stretches import OverAll, whole_run
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["ReadRun", "diagnose", "read_run"]

_READINGS = 3


def diagnose(trace: Trace, options: ReportOptions | None = None) -> Report:
    """Diagnose a run. The report lists what was not seen; a failing detector does not affect the rest."""
    with whole_run(trace, options) as over_all:
        timeline = build_timeline(trace)
        return over_all(report_on(trace, timeline, options), timeline).report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """A run that was read and judged. Of one that is too long to be held at once the timeline has the last steps.

    `is_final`: the report is on all of a run that has ended. `analyzed` are the steps of all stretches of a long run.
    """

    report: Report
    timeline: Timeline
    is_final: bool
    analyzed: AnalyzedSteps | None


def read_run(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, recent: bool = False
) -> ReadRun:
    """Read and judge the run at this path; again where its older records are evicted meanwhile. Raises BadInput.

    `recent`: of a run that is too long to be held at once only its last steps are judged.
    """
    readings = 0
    while True:
        readings += 1
        trace = Trace.open(path)
        with nullcontext() if recent else whole_run(trace, options) as over_all:
            timeline = build_timeline(trace)
            last = report_on(trace, timeline, options)
            if readings < _READINGS and trace.reader.folder and trace.reader.folder.has_shrunk:
                continue
            found = over_all(last, timeline) if over_all else OverAll(last.report, trace.stretch is None)
            is_final = found.is_complete and trace.has_ended
            return ReadRun(report=found.report, timeline=timeline, is_final=is_final, analyzed=found.analyzed)
