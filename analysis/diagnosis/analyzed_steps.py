"""Means over all analyzed steps of a run, held at once or in stretches, with their errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.diagnosis.step_summaries import StepSummaries, step_summaries
from rankscope.analysis.metrics.step_matrix import estimates, lasting_half_widths
from rankscope.analysis.model.finding import Part
from rankscope.analysis.model.parts import PARTS, in_order
from rankscope.analysis.text.units import rounded
from rankscope.analysis.timeline.build import Timeline

__all__ = ["AnalyzedSteps", "analyzed_steps", "steps_of_timeline"]

_COLUMNS = {name: f"{name}_ns" for name in PARTS}
_FEWEST = 2  # steps, for an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedSteps:
    """Means over the analyzed steps of a run, ns; and the median and the 90th percentile of their means over ranks.

    `by_step` has these by part, as a breakdown (rank, step, part, ns) of a single rank, of steps that all ranks have;
    `by_rank` has each rank's mean step by part, and `parts` that over ranks; they sum to the step. Both are empty where
    steps could not be cut. The errors are 95 % half widths of means over ranks; None, or empty, with too few steps.
    """

    count: int
    mean_ns: int
    median_ns: int
    p90_ns: int
    error_ns: float | None
    by_step: pl.DataFrame
    by_rank: dict[int, dict[str, int]]
    part_errors: dict[str, float]

    @property
    def parts(self) -> dict[str, int]:
        names = in_order(*({part for part, ns in of.items() if ns} for of in self.by_rank.values()))
        sums = [sum(of[part] for of in self.by_rank.values()) for part in names]
        return dict(zip(names, rounded(sums, len(self.by_rank)), strict=True)) if names else {}

    @property
    def breakdown(self) -> tuple[Part, ...]:
        """The mean step of each rank by part, without parts that no rank has."""
        used = {part for of in self.by_rank.values() for part, ns in of.items() if ns}
        return tuple(
            Part(rank=rank, part=part, ns_per_step=ns)
            for rank, of in self.by_rank.items()
            for part, ns in of.items()
            if part in used
        )


def steps_of_timeline(timeline: Timeline) -> AnalyzedSteps:
    """Return the analyzed steps of a run that is held at once."""
    return _analyzed([step_summaries(timeline)])


def analyzed_steps(steps: StepSummaries) -> AnalyzedSteps:
    """Return the analyzed steps of a run in stretches."""
    return _analyzed(steps.each("rank", "step", "step_ns", "judged", *_COLUMNS.values()))


def _analyzed(stretches: Iterable[pl.DataFrame]) -> AnalyzedSteps:
    names = list(_COLUMNS.values())
    counts = [pl.len().alias("steps"), pl.col(names[0]).is_not_null().sum().cast(pl.Int64).alias("cut")]
    of_ranks, of_steps = [], []
    for stretch in stretches:
        judged = stretch.filter("judged")
        of_ranks.append(judged.group_by("rank").agg(*counts, pl.sum("step_ns", *names)))
        of_steps.append(judged.group_by("step").agg(*counts, pl.mean("step_ns", *names)))
    by_rank, by_step = pl.concat(of_ranks).group_by("rank").sum().sort("rank"), pl.concat(of_steps).sort("step")
    whole = by_step.filter(pl.col("steps") == len(by_rank))
    whole_parts = by_step.filter(pl.col("cut") == (by_rank["cut"] > 0).sum())
    is_long = len(of_steps) > 1
    errors = _errors(whole_parts, names, is_long=is_long)
    return AnalyzedSteps(
        count=len(by_step),
        mean_ns=round(int(by_rank["step_ns"].sum()) / max(int(by_rank["steps"].sum()), 1)),
        median_ns=_whole_ns(by_step["step_ns"].median()),
        p90_ns=_whole_ns(by_step["step_ns"].quantile(0.9)),
        error_ns=_errors(whole, ["step_ns"], is_long=is_long).get("step_ns"),
        by_step=_as_breakdown(whole_parts),
        by_rank={
            row["rank"]: dict(zip(PARTS, rounded([row[name] for name in names], row["cut"]), strict=True))
            for row in by_rank.filter(pl.col("cut") > 0).iter_rows(named=True)
        },
        part_errors={name.removesuffix("_ns"): error for name, error in errors.items()},
    )


def _as_breakdown(by_step: pl.DataFrame) -> pl.DataFrame:
    names = {column: part for part, column in _COLUMNS.items()}
    long = by_step.rename(names).unpivot(list(PARTS), index="step", variable_name="part", value_name="ns")
    return long.select(pl.lit(0, pl.Int32).alias("rank"), "step", "part", pl.col("ns").round().cast(pl.Int64))


def _whole_ns(ns: object) -> int:
    return round(ns) if isinstance(ns, float) else 0


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
