"""A run as it is compared with others: by means over all its analyzed steps, held at once or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.diagnosis.diagnose import read_run
from rankscope.analysis.diagnosis.step_summaries import StepSummaries, step_summaries
from rankscope.analysis.metrics.step_matrix import estimates, lasting_half_widths
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.model.parts import PARTS, in_order
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import ranges, rounded
from rankscope.analysis.timeline.build import Timeline

__all__ = ["AnalyzedSteps", "ComparedRun", "compared_run"]

_COLUMNS = {name: f"{name}_ns" for name in PARTS}
_FEWEST = 2  # steps, for an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedSteps:
    """Means over the analyzed steps of a run, ns.

    `by_rank` has each rank's mean step by part, and `parts` that over ranks; they sum to the step. Both are empty where
    steps could not be cut. The errors are 95 % half widths of means over ranks; None, or empty, with too few steps.
    """

    count: int
    mean_ns: int
    error_ns: float | None
    by_rank: dict[int, dict[str, int]]
    part_errors: dict[str, float]

    @property
    def parts(self) -> dict[str, int]:
        names = in_order(*({part for part, ns in of.items() if ns} for of in self.by_rank.values()))
        sums = [sum(of[part] for of in self.by_rank.values()) for part in names]
        return dict(zip(names, rounded(sums, len(self.by_rank)), strict=True)) if names else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run, what is held of it, and means over all its analyzed steps; `cut`: they are more than what is held."""

    report: Report
    timeline: Timeline
    steps: AnalyzedSteps
    cut: bool

    @classmethod
    def of(cls, report: Report, timeline: Timeline, kept: StepSummaries | None) -> ComparedRun:
        """Return a run of which these steps are `kept`; None: it is held as a whole."""
        if kept is None:
            return cls(report=report, timeline=timeline, steps=_analyzed([step_summaries(timeline)]), cut=False)
        wanted = ("rank", "step", "step_ns", "judged", *_COLUMNS.values())
        return cls(report=report, timeline=timeline, steps=_analyzed(kept.each(*wanted)), cut=True)

    @property
    def findings(self) -> Sequence[Finding]:
        """What was found; of a run that is not held as a whole the root causes over all its analyzed steps."""
        history = self.report.history
        if not self.cut or history is None:
            return self.report.findings
        count = max(self.steps.count, 1)
        return [
            Finding(
                detector=one.detector,
                severity=one.severity,
                confidence=one.confidence,
                title=one.title
                if one.stretches == history.stretches
                else text("{what} (in steps {steps})", what=one.title, steps=_ranges(one.steps)),
                where=text("steps {steps}", steps=_ranges(one.steps)),
                advice="",
                ranks=one.ranks,
                nodes=one.nodes,
                groups=one.groups,
                lost_ns_per_step=round(one.lost_ns_total / count),
                lost_ns_total=one.lost_ns_total,
                lost_fraction=one.lost_fraction,
                uncertainty_ns=round(one.uncertainty_ns / count),
            )
            for one in history.findings
        ]

    @property
    def said(self) -> str:
        """Which of its steps are compared by what; empty: all by everything."""
        history = self.report.history
        if history is None or (self.timeline.stretch and self.timeline.stretch.asked):
            return ""
        held = history.read.last - history.read.first + 1
        if not self.cut:
            return text("of {steps} the last {held} are compared", steps=counted(history.count, "step"), held=held)
        return text(
            "of {steps} {analyzed} are compared; communication and kernels are those of the last {held}",
            steps=counted(history.count, "step"),
            analyzed=self.steps.count,
            held=held,
        )


def compared_run(path: PathLike | Sequence[PathLike]) -> ComparedRun:
    """Return the run at this path. Raises BadInput."""
    found = read_run(path)
    return ComparedRun.of(found.report, found.timeline, found.steps)


def _ranges(steps: tuple[int, int]) -> str:
    return ranges(range(steps[0], steps[1] + 1))


def _analyzed(stretches: Iterable[pl.DataFrame]) -> AnalyzedSteps:
    """Return the means over stretches of a run, each with these columns of `step_summaries`."""
    names = list(_COLUMNS.values())
    counts = [pl.len().alias("steps"), pl.col(names[0]).is_not_null().sum().cast(pl.Int64).alias("cut")]
    judged = [stretch.filter("judged") for stretch in stretches]
    of_ranks = [one.group_by("rank").agg(*counts, pl.sum("step_ns", *names)) for one in judged]
    by_rank = pl.concat(of_ranks).group_by("rank").sum().sort("rank")
    by_step = pl.concat([one.group_by("step").agg(*counts, pl.mean("step_ns", *names)) for one in judged]).sort("step")
    lengths = by_step.filter(pl.col("steps") == len(by_rank))
    parts = by_step.filter(pl.col("cut") == (by_rank["cut"] > 0).sum())
    is_long = len(judged) > 1
    return AnalyzedSteps(
        count=len(by_step),
        mean_ns=round(int(by_rank["step_ns"].sum()) / max(int(by_rank["steps"].sum()), 1)),
        error_ns=_errors(lengths, ["step_ns"], is_long=is_long).get("step_ns"),
        by_rank={
            row["rank"]: dict(zip(PARTS, rounded([row[name] for name in names], row["cut"]), strict=True))
            for row in by_rank.filter(pl.col("cut") > 0).iter_rows(named=True)
        },
        part_errors={name.removesuffix("_ns"): error for name, error in _errors(parts, names, is_long=is_long).items()},
    )


def _errors(by_step: pl.DataFrame, names: Sequence[str], *, is_long: bool) -> dict[str, float]:
    """By column the 95 % half width of its mean, or none with too few steps.

    In a long run what happens to a step happens to the next ones, too: the larger one of both kinds counts.
    """
    if len(by_step) < _FEWEST:
        return {}
    values = by_step.select(names).to_numpy().T.astype(float)
    _, errors = estimates(values)
    errors = np.maximum(errors, lasting_half_widths(values)) if is_long else errors
    return dict(zip(names, errors.tolist(), strict=True))
