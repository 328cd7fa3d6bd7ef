"""The steps that were excluded as outliers: how long they are, which rank the others wait for, and where it is."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from rankscope.analysis.model.finding import MANY_OUTLIERS, Gap, StepSummary
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.code_samples import Code

__all__ = ["outlier_steps", "why_outliers"]

_LISTED = 5
_MOSTLY = 0.5  # of what outliers take beyond the mean step: so much longer do others wait than the rank that is named
_FEW = 5  # samples of a rank in one step: a stop of it is in one place


def why_outliers(steps: StepSummary, timeline: Timeline, code: Code) -> str:
    """Return for which rank excluded steps take long, if they take much, and where in the code."""
    return _why(_outliers(timeline), steps, timeline, code) if steps.outliers_fraction >= MANY_OUTLIERS else ""


def outlier_steps(steps: StepSummary, timeline: Timeline, code: Code) -> list[Gap]:
    """Return the outliers, the longest first; of many how many more there are."""
    outliers = _outliers(timeline)
    lengths = outliers.group_by("step").agg(pl.col("ns").max()).sort("ns", "step", descending=[True, False])
    whys = [
        text(
            "step {step} was excluded as an outlier: it takes {length}{why}",
            step=step,
            length=duration(ns),
            why=_why(outliers.filter(pl.col("step") == step), steps, timeline, code),
        )
        for step, ns in lengths.head(_LISTED).iter_rows()
    ]
    if len(lengths) > _LISTED:
        more = counted(len(lengths) - _LISTED, "other step")
        whys.append(text("{more} excluded as outliers take no longer", more=more))
    return [Gap(table="steps", rank=None, node=None, count=None, why=why) for why in whys]


def _outliers(timeline: Timeline) -> pl.DataFrame:
    """Return (rank, step, ns) of the outliers."""
    outliers = timeline.steps.filter(pl.col("aside") == "outlier")
    return outliers.select("rank", "step", ns=pl.col("end_ns") - pl.col("start_ns"))


def _why(outliers: pl.DataFrame, steps: StepSummary, timeline: Timeline, code: Code) -> str:
    """Return which rank the others wait for in these steps, if it is one, and where it is, or else all ranks are."""
    is_wait = pl.col("part").cast(pl.String).is_in(["wait", "bubble"])
    parts = timeline.breakdown.join(outliers, on=["rank", "step"], how="semi")
    waits = parts.group_by("rank").agg(pl.col("ns").filter(is_wait).sum()).sort("ns", "rank")
    beyond_ns = float(outliers.group_by("rank").agg(pl.col("ns").sum())["ns"].mean() or 0)  # type: ignore[arg-type]
    beyond_ns -= outliers["step"].n_unique() * (steps.mean_ns or 0)
    said, samples = [], timeline.samples.join(outliers, on=["rank", "step"], how="semi")
    rank, own = _last(timeline.collectives.join(outliers, on=["rank", "step"], how="semi")), dict(waits.iter_rows())
    if len(waits) > 1 and rank in own and waits["ns"][-1] - own[rank] >= _MOSTLY * beyond_ns:
        said.append(text("; the others wait up to {most} for rank {rank}", most=duration(waits["ns"][-1]), rank=rank))
        samples = samples.filter(pl.col("rank") == rank)
    place = replace(code, samples=samples).most(_FEW)
    return joined("", [*said, text(", mostly at {place}", place=place) if place else ""])


def _last(collectives: pl.DataFrame) -> int | None:
    """Return the rank that was last in the operations for which ranks waited longest, together."""
    last = pl.col("rank").filter("is_last").first()
    by_operation = collectives.drop_nulls("instance_id").group_by("instance_id").agg(last, pl.col("wait_ns").sum())
    by_rank = by_operation.drop_nulls("rank").group_by("rank").agg(pl.col("wait_ns").sum()).sort("wait_ns", "rank")
    return by_rank["rank"].last() if len(by_rank) else None  # type: ignore[return-value]
