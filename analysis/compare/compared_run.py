"""A run as it is compared with others: by all its analyzed steps, held at once or in stretches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps, steps_of_timeline
from rankscope.analysis.diagnosis.diagnose import read_run
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
    def of(cls, report: Report, timeline: Timeline, analyzed: AnalyzedSteps | None) -> ComparedRun:
        """Return a run of which these are the steps of all its stretches; None: it is held as a whole."""
        return cls(report=report, timeline=timeline, steps=analyzed or steps_of_timeline(timeline))

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
            held=len(history.read.steps),
        )


def compared_run(path: PathLike | Sequence[PathLike]) -> ComparedRun:
    """Return the run at this path. Raises BadInput."""
    found = read_run(path)
    return ComparedRun.of(found.report, found.timeline, found.analyzed)
