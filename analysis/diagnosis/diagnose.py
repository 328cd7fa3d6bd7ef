"""From a run to the report on all of it."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.stretches import with_whole_run
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["diagnose", "new_report", "read_run"]

_READINGS = 3


def diagnose(trace: Trace, options: ReportOptions | None = None) -> Report:
    """Diagnose a run. The report lists what was not seen; a failing detector does not affect the rest."""
    timeline = build_timeline(trace)
    return with_whole_run(trace, report_on(trace, timeline, options), timeline, options)[0]


def new_report(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, recent: bool = False
) -> tuple[Report, bool]:
    """Return the report on the run at this path, and whether it is final: on all of a run that has ended.

    `recent` as in `report_of`. Raises BadInput.
    """
    trace, report, timeline = _read(path, options)
    if recent and trace.stretch is not None:
        return report, False
    report, is_complete = with_whole_run(trace, report, timeline, options)
    return report, is_complete and trace.has_ended


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
