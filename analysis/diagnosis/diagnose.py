"""From a run to the report on all of it."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.diagnosis.conclude import ReportOptions, report_on
from rankscope.analysis.diagnosis.whole_run import with_whole_run
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import PathLike, Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["diagnose", "read_run"]

_READINGS = 3


def diagnose(trace: Trace, options: ReportOptions | None = None) -> Report:
    """Judge a run. What was not seen is part of the report, and a detector that fails does not take the rest down."""
    timeline = build_timeline(trace)
    return with_whole_run(trace, report_on(trace, timeline, options), timeline, options)


def read_run(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, whole: bool = True
) -> tuple[Report, Timeline]:
    """Return the report, as by `diagnose`, and the timeline of the run at this path. Raises BadInput.

    Of a run that is too long to be held at once the timeline has the last steps; only these are judged unless `whole`.
    A running job whose older records make room meanwhile is read again.
    """
    for _ in range(_READINGS):
        trace = Trace.open(path)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline, options)
        if not (trace.reader.folder and trace.reader.folder.has_shrunk):
            break
    return with_whole_run(trace, report, timeline, options) if whole else report, timeline
