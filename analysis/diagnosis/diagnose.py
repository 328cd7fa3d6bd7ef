"""From a run to the report on all of it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.diagnosis.kept_report import KeptReport
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.stretches import with_whole_run
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["diagnose", "read_run", "report_of"]

_READINGS = 3


def diagnose(trace: Trace, options: ReportOptions | None = None) -> Report:
    """Diagnose a run. The report lists what was not seen; a failing detector does not affect the rest."""
    timeline = build_timeline(trace)
    return with_whole_run(trace, report_on(trace, timeline, options), timeline, options)[0]


def report_of(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, recent: bool = False
) -> Report:
    """Return the report, as by `diagnose`, on the run at this path. Raises BadInput.

    That on a run that has ended is kept in its folder, and read again as long as its files and this code are the same.
    `recent`: of a run that is too long to be held at once only on the last steps, which is not kept.
    """
    place = KeptReport([path] if isinstance(path, (str, os.PathLike)) else path, options or ReportOptions())
    known = None if recent else place.load()
    if known is not None:
        return known
    trace, report, timeline = _read(path, options)
    if recent and trace.stretch is not None:
        return report
    report, is_complete = with_whole_run(trace, report, timeline, options)
    if is_complete and trace.has_ended:
        place.keep(report)
    return report


def read_run(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, whole: bool = True
) -> tuple[Report, Timeline]:
    """Return the report, as by `diagnose`, and the timeline of the run at this path. Raises BadInput.

    Of a run that is too long to be held at once the timeline has the last steps; only these are judged unless `whole`.
    """
    trace, report, timeline = _read(path, options)
    return with_whole_run(trace, report, timeline, options)[0] if whole else report, timeline


def _read(path: PathLike | Sequence[PathLike], options: ReportOptions | None) -> tuple[Trace, Report, Timeline]:
    """Return the report on what is held of a run; one whose older records are evicted meanwhile is read again."""
    for _ in range(_READINGS):
        trace = Trace.open(path)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline, options)
        if not (trace.reader.folder and trace.reader.folder.has_shrunk):
            break
    return trace, report, timeline
