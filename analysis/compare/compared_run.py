"""A run as it is compared with others: by all its analyzed steps, held at once or in stretches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps, analyzed_steps, steps_of_timeline
from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.diagnosis.step_summaries import StepSummaries
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Report
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.timeline.build import Timeline

__all__ = ["ComparedRun", "compared_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, what is held of it, and means over all its analyzed steps."""

    report: Report
    timeline: Timeline
    steps: AnalyzedSteps

    @classmethod
    def of(cls, report: Report, timeline: Timeline, steps: StepSummaries | None) -> ComparedRun:
        """Return a run whose `steps` are those of all its stretches; None: it is held as a whole."""
        analyzed = analyzed_steps(steps) if steps else steps_of_timeline(timeline)
        return cls(report=report, timeline=timeline, steps=analyzed)

    @property
    def said(self) -> str:
        """Which of a long run's steps are compared, and by what; empty: all, by everything."""
        history = self.report.history
        if history is None or not history.analyzed:
            return ""
        return text(
            "of {steps} {analyzed} are compared; communication and kernels are those of the last {held}",
            steps=counted(history.count, "step"),
            analyzed=self.steps.count,
            held=history.read.last - history.read.first + 1,
        )


def compared_run(path: PathLike | Sequence[PathLike]) -> ComparedRun:
    """Return the run at this path. Raises BadInput."""
    found = read_run(path)
    return ComparedRun.of(found.report, found.timeline, found.steps)
