"""Two ranks side by side, of one run or of two: parts of the step, work by name, lines of code, and a step of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.compare.two_runs import work_per_step
from rankscope.analysis.diagnosis.summary import mean_parts
from rankscope.analysis.metrics.step_matrix import error_of_change, estimate, part_errors
from rankscope.analysis.model.comparison import PartChange, StepChange
from rankscope.analysis.model.finding import Report
from rankscope.analysis.model.parts import MAYBE_BLOCKED, in_order
from rankscope.analysis.model.pipeline_ops import COMPUTES, OPTIMIZER
from rankscope.analysis.text.phrases import place_in_code
from rankscope.analysis.timeline.build import Timeline

__all__ = ["RankSide", "code_changes", "median_rank", "part_changes", "pieces", "steps_of_both", "work_changes"]

_Z95 = 1.96
_WORK = ("kernels", "ops")  # what is compared by name: the first of these that both sides have

_PART_OF_OPERATION = (
    pl.when(pl.col("name").is_in(COMPUTES))
    .then(pl.lit("compute"))
    .when(pl.col("name").str.contains(OPTIMIZER))
    .then(pl.lit("optimizer"))
    .otherwise(pl.lit("unsplit"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSide:
    """One rank of a run."""

    rank: int
    report: Report
    timeline: Timeline

    def rows(self, table: str) -> pl.DataFrame:
        frame: pl.DataFrame = getattr(self.timeline, table)
        return frame.filter(pl.col("rank") == self.rank)

    def steps(self) -> pl.DataFrame:
        """Return the analyzed steps, or all where none was analyzed."""
        steps = self.rows("steps")
        return judged if len(judged := steps.filter("judged")) else steps


def median_rank(report: Report, but: int | None = None) -> int | None:
    """Return the rank, other than `but`, whose compute time per step is the median of the others'.

    None: there is no other.

    Where steps were not split into parts, by the length of its step.
    """
    compute_ns: dict[int, float] = dict.fromkeys(report.ranks, 0.0)
    for part in report.breakdown:
        compute_ns[part.rank] += 0 if part.part in MAYBE_BLOCKED else part.ns_per_step
    if not report.breakdown:
        compute_ns |= {rank: float(np.mean(lengths)) for rank, lengths in report.step_ns.items() if lengths}
    others = sorted((rank for rank in report.ranks if rank != but), key=lambda rank: (compute_ns[rank], rank))
    return others[(len(others) - 1) // 2] if others else None


def part_changes(a: RankSide, b: RankSide) -> tuple[StepChange, tuple[PartChange, ...]]:
    """Return the change from A's mean step to B's, whole and by part; no parts where one side has none."""
    means, errors, wholes = [], [], []
    for side in (a, b):
        judged = side.timeline.steps.filter("judged")
        rows = side.rows("breakdown").join(judged, on=["rank", "step"], how="semi")
        is_cut = len(rows) > 0 and len(side.report.breakdown) > 0
        means.append({part.part: part.ns_per_step for part in mean_parts(rows)} if is_cut else {})
        errors.append(part_errors(rows))
        lengths = np.array(side.report.step_ns.get(side.rank, ()), np.float64)
        wholes.append(estimate(lengths).half_width_ns if len(lengths) > 1 else None)
    parts = tuple(
        PartChange(
            part=part,
            a_ns=means[0].get(part, 0),
            b_ns=means[1].get(part, 0),
            uncertainty_ns=error_of_change(*(of.get(part, 0.0) if of else None for of in errors)),
        )
        for part in (in_order(*means) if all(means) else ())
        if any(of.get(part, 0) for of in means)
    )
    sums = [sum(of.values()) if parts else _mean_step(side) for side, of in zip((a, b), means, strict=True)]
    return StepChange(a_ns=sums[0], b_ns=sums[1], uncertainty_ns=error_of_change(*wholes)), parts


def _mean_step(side: RankSide) -> int:
    return round(side.steps().select((pl.col("end_ns") - pl.col("start_ns")).mean()).item() or 0)


def work_changes(a: RankSide, b: RankSide) -> pl.DataFrame:
    """name, work, a_ns, b_ns, a_per_step, b_per_step, change_ns: of the devices, or operations of a pipeline.

    Per step, the largest change first. Empty where the two sides have no such table in common.
    """
    for table in _WORK:
        rows = [side.rows(table) for side in (a, b)]
        if all(map(len, rows)):
            if table == "ops":
                rows = [frame.with_columns(work=pl.lit("")) for frame in rows]
            per_step = [work_per_step(frame, side.steps()) for frame, side in zip(rows, (a, b), strict=True)]
            return _side_by_side(per_step, ["name", "work"], ["ns", "per_step"])
    return pl.DataFrame()


def code_changes(a: RankSide, b: RankSide) -> pl.DataFrame:
    """place, a_ns, b_ns, change_ns, error_ns: the innermost line of the job's code in which the main thread was.

    Per step, from samples; the lines of a rank add up to its mean step. `error_ns` is the change's 95 % half width.
    Empty where one of the two was not sampled.
    """
    sides = [_lines(side) for side in (a, b)]
    if not all(map(len, sides)):
        return pl.DataFrame()
    both = _side_by_side(sides, ["place"], ["ns", "variance"])
    error = _Z95 * (pl.col("a_variance") + pl.col("b_variance")).sqrt()
    return both.select("place", "a_ns", "b_ns", "change_ns", error.alias("error_ns"))


def _lines(side: RankSide) -> pl.DataFrame:
    """place, ns per step, variance of that."""
    samples = side.rows("samples").join(side.steps(), on=["rank", "step"], how="semi")
    counts = samples.join(side.timeline.places, on="place").group_by("function", "file", "line").len()
    named = [place_in_code(*line) for line in counts.select("function", "file", "line").iter_rows()]
    share, step_ns = pl.col("len").sum() / len(samples), _mean_step(side)
    return (
        counts.with_columns(pl.Series("place", named, pl.String))
        .group_by("place")
        .agg((share * step_ns).alias("ns"), (share * (1 - share) / len(samples) * step_ns**2).alias("variance"))
    )


def _side_by_side(sides: list[pl.DataFrame], keys: list[str], values: list[str]) -> pl.DataFrame:
    a, b = (
        side.select(*keys, *(pl.col(value).alias(f"{letter}_{value}") for value in values))
        for letter, side in zip("ab", sides, strict=True)
    )
    both = a.join(b, on=keys, how="full", coalesce=True).with_columns(pl.col(pl.Float64).fill_null(0.0))
    return both.with_columns((pl.col("b_ns") - pl.col("a_ns")).alias("change_ns")).sort(
        pl.col("change_ns").abs(), *keys, descending=[True, *(False for _ in keys)]
    )


def steps_of_both(a: RankSide, b: RankSide) -> list[int]:
    """Return the numbers of the steps that can be laid side by side."""
    steps = set(a.steps()["step"].to_list()) & set(b.steps()["step"].to_list())
    return sorted(steps)


def pieces(side: RankSide, step: int) -> pl.DataFrame:
    """part, label, start_ns, end_ns since this step's start: its phases, or the operations in it where it has none."""
    start_ns = side.rows("steps").filter(pl.col("step") == step)["start_ns"].min()
    rows = side.rows("phases").filter(pl.col("step") == step)
    if rows.is_empty():
        rows = side.rows("ops").filter(pl.col("step") == step)
        rows = rows.with_columns(_PART_OF_OPERATION.alias("part"), pl.col("name").alias("label"))
    return rows.select("part", "label", pl.col("start_ns") - start_ns, pl.col("end_ns") - start_ns)
