"""From a run to the report on all of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.stretches import whole_run
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["diagnose", "new_report", "read_run"]

_READINGS = 3


def diagnose(trace: Trace, options: ReportOptions | None = None) -> Report:
    """Diagnose a run. The report lists what was not seen; a failing detector does not affect the rest."""
    with whole_run(trace, options) as over_all:
        timeline = build_timeline(trace)
        return over_all(report_on(trace, timeline, options), timeline).report


def new_report(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, recent: bool = False
) -> tuple[Report, bool]:
    """Return the report on the run at this path, and whether it is final: on all of a run that has ended.

    `recent` as in `report_of`. Raises BadInput.
    """
    trace, _, report, is_complete = _read(path, options, whole=not recent)
    return report, is_complete and trace.has_ended


def read_run(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None = None, *, whole: bool = True
) -> tuple[Report, Timeline]:
    """Return the report, as by `diagnose`, and the timeline of the run at this path. Raises BadInput.

    Of a run that is too long to be held at once the timeline has the last steps; only these are judged unless `whole`.
    """
    _, timeline, report, _ = _read(path, options, whole=whole)
    return report, timeline


def _read(
    path: PathLike | Sequence[PathLike], options: ReportOptions | None, *, whole: bool
) -> tuple[Trace, Timeline, Report, bool]:
    """Return the report, on all of the run or on what is held of it, and whether all steps are judged.

    A run whose older records are evicted meanwhile is read again.
    """
    readings = 0
    while True:
        readings += 1
        trace = Trace.open(path)
        with whole_run(trace, options) if whole else nullcontext() as over_all:
            timeline = build_timeline(trace)
            report, is_complete = report_on(trace, timeline, options), trace.stretch is None
            if readings < _READINGS and trace.reader.folder and trace.reader.folder.has_shrunk:
                continue
            if over_all:
                whole_report = over_all(report, timeline)
                report, is_complete = whole_report.report, whole_report.is_complete
            return trace, timeline, report, is_complete
