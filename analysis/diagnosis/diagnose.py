"""From a run to the report on all of it."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.diagnosis.conclude import Asked, report_on
from rankscope.analysis.diagnosis.whole_run import with_whole_run
from rankscope.analysis.model.finding import Report
from rankscope.analysis.runs.trace import PathLike, Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline

__all__ = ["diagnose", "read_run"]

_READINGS = 3


def diagnose(
    trace: Trace,
    *,
    flops_per_step: float | None = None,
    peak_tflops: float | None = None,
    price: float | None = None,
) -> Report:
    """Judge a run. What was not seen is part of the report, and a detector that fails does not take the rest down.

    `flops_per_step` are those that the model needs, on all ranks together; `peak_tflops` those of one device per second
    (None: by its name). `price` is that of an hour of one GPU, for ranks on CPUs of one rank.
    """
    asked = Asked(flops_per_step=flops_per_step, peak_tflops=peak_tflops, price=price)
    timeline = build_timeline(trace)
    return with_whole_run(trace, report_on(trace, timeline, asked), timeline, asked)


def read_run(
    path: PathLike | Sequence[PathLike], asked: Asked | None = None, *, whole: bool = True
) -> tuple[Report, Timeline]:
    """Return the report, as by `diagnose`, and the timeline of the run at this path. Raises BadInput.

    Of a run that is too long to be held at once the timeline has the last steps; only these are judged unless `whole`.
    A running job whose older records make room meanwhile is read again.
    """
    for _ in range(_READINGS):
        trace = Trace.open(path)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline, asked)
        if not (trace.reader.folder and trace.reader.folder.has_shrunk):
            break
    return with_whole_run(trace, report, timeline, asked) if whole else report, timeline
