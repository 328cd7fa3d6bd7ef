"""The tables of a report: its steps, their parts, the waits between ranks, and the critical path."""

from __future__ import annotations

import math

import numpy as np
import polars as pl

from rankscope.analysis.diagnosis.savings import tried
from rankscope.analysis.metrics.arrival_skew import charged_to_last
from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.exposed_communication import by_group
from rankscope.analysis.metrics.wait_attribution import Delays, caused_by_rank, victims
from rankscope.analysis.model.finding import (
    REST,
    Blame,
    Finding,
    GroupTime,
    OthersWaited,
    Part,
    PathPart,
    Pipeline,
    StepSummary,
    Wait,
)
from rankscope.analysis.model.money import is_standstill
from rankscope.analysis.model.parts import QUEUED, in_order
from rankscope.analysis.replay.critical_path import critical_path
from rankscope.analysis.replay.device_graph import BETWEEN, device_graph, first_steps
from rankscope.analysis.replay.host_graph import HostGraph
from rankscope.analysis.replay.pipeline import pipeline
from rankscope.analysis.replay.protocol import Replay, Unreplayable
from rankscope.analysis.text.units import rounded
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.device_breakdown import OWN_GAP_NS
from rankscope.analysis.timeline.host_breakdown import PARTS
from rankscope.errors import NotReplayable

__all__ = [
    "blames",
    "group_times",
    "mean_parts",
    "mean_step",
    "others_waited",
    "path_parts",
    "pipeline_of",
    "step_lengths",
    "step_summary",
    "waits",
]

_LISTED = 20  # of the causes of waiting and of the critical path


def step_summary(steps: pl.DataFrame) -> StepSummary:
    """Return how many steps there were, and how long the judged ones took."""
    judged = steps.filter("judged")
    length = judged["end_ns"] - judged["start_ns"]
    mean, median, p90 = length.mean(), length.median(), length.quantile(0.9)
    aside = steps.filter(~pl.col("judged")).unique("step")["aside"]
    outliers = steps.filter(pl.col("aside") == "outlier")
    outliers_ns = (outliers["end_ns"] - outliers["start_ns"]).sum()
    beyond_ns = outliers_ns - len(outliers) * (mean or 0.0)
    return StepSummary(
        count=judged["step"].n_unique(),
        warmup=int((aside == "warm-up").sum()),
        outliers=int((aside == "outlier").sum()),
        outliers_fraction=max(beyond_ns, 0.0) / max(length.sum() + outliers_ns, 1),
        mean_ns=None if mean is None else round(mean),
        median_ns=None if median is None else round(median),
        p90_ns=None if p90 is None else round(p90),
        source=steps["source"][0] if steps.height else "none",
    )


def step_lengths(steps: pl.DataFrame) -> dict[int, tuple[int, ...]]:
    lengths = steps.sort("rank", "step").select("rank", ns=pl.col("end_ns") - pl.col("start_ns"))
    return {rank: tuple(ns) for rank, ns in lengths.group_by("rank", maintain_order=True).all().iter_rows()}


def mean_parts(breakdown: pl.DataFrame) -> tuple[Part, ...]:
    """Mean ns per judged step; a rank's parts sum exactly to its mean step, itself rounded to whole ns."""
    return tuple(Part(rank=rank, part=part, ns_per_step=ns) for rank, part, ns in _means(breakdown).iter_rows())


def mean_step(breakdown: pl.DataFrame) -> dict[str, int]:
    """Mean ns of each part of the judged step over ranks; they sum to it."""
    if breakdown.is_empty():
        return {}
    means = _means(breakdown)
    sums = dict(means.group_by("part").agg(pl.col("ns_per_step").sum()).filter(pl.col("ns_per_step") != 0).iter_rows())
    order = in_order(sums)
    return dict(zip(order, rounded([sums[part] for part in order], means["rank"].n_unique()), strict=True))


def _means(breakdown: pl.DataFrame) -> pl.DataFrame:
    """(rank, part, ns_per_step) of all ranks, in order, rounded as by `rounded`: the largest remainders up."""
    (ranks, rank), (steps, step) = (distinct(breakdown[column].to_numpy()) for column in ("rank", "step"))
    names, part = pl.Series(PARTS), breakdown["part"].to_physical().to_numpy()
    shape = len(ranks), len(names)
    cell = rank * len(names) + part
    sums = np.bincount(cell, breakdown["ns"].to_numpy(), math.prod(shape)).astype(np.int64).reshape(shape)
    there = np.bincount(cell, minlength=math.prod(shape)).reshape(shape) > 0
    seen = np.zeros((len(ranks), len(steps)), np.bool_)
    seen[rank, step] = True
    count = seen.sum(axis=1)[:, None]
    whole, rest = np.divmod(sums, np.maximum(count, 1))
    missing = (2 * sums.sum(axis=1, keepdims=True) + count) // (2 * count) - whole.sum(axis=1, keepdims=True)
    place = np.argsort(np.argsort(-rest, axis=1, kind="stable"), axis=1)
    of_rank, of_part = np.nonzero(there)
    means = (whole + (place < missing))[there]
    return pl.DataFrame({"rank": ranks[of_rank], "part": names[of_part], "ns_per_step": means})


def group_times(collectives: pl.DataFrame, phases: pl.DataFrame, groups: pl.DataFrame) -> tuple[GroupTime, ...]:
    """Return the time of each group's communication by what it is."""
    if collectives.is_empty() or phases.is_empty():
        return ()
    return tuple(GroupTime(**row) for row in by_group(collectives, phases, groups).iter_rows(named=True))


def pipeline_of(ops: pl.DataFrame) -> Pipeline | None:
    """Return the pipeline's schedule and bubble; None where there is none, and the detectors say why."""
    if ops.is_empty():
        return None
    try:
        return pipeline(ops)
    except NotReplayable:
        return None


def others_waited(costs: Delays, finding: Finding) -> OthersWaited | None:
    """Return the ranks that waited for the finding's ranks; those with at least a hundredth of the longest wait.

    Nothing where the job came to an end by it: earlier waits have other causes.
    """
    if is_standstill(finding):
        return None
    rows = victims(costs, finding.ranks).filter(~pl.col("rank").is_in(finding.ranks))
    rows = rows.filter(pl.col("blocked_ns") > 0, pl.col("blocked_ns") >= 0.01 * pl.col("blocked_ns").max())
    return OthersWaited(ranks=tuple(rows["rank"]), ns=int(rows["blocked_ns"].sum())) if len(rows) else None


def waits(timeline: Timeline, costs: Delays) -> tuple[Wait, ...]:
    """Return how long each rank waited for others, and they for it."""
    caused, to_last = caused_by_rank(costs), charged_to_last(timeline.collectives)
    return tuple(
        Wait(rank=rank, waited_ns=ns, caused_ns=caused.get(rank, 0) + to_last.get(rank, 0))
        for rank, ns in timeline.waits.select("rank", "waited_ns").iter_rows()
    )


def blames(costs: Delays) -> tuple[Blame, ...]:
    """Return the causes of the longest waits, over all that was read."""
    rows = costs.charges.group_by("rank", "part", "label").agg(
        (pl.col("direct_ns") + pl.col("indirect_ns")).sum().alias("waited_ns"), pl.col("blocked_ns").sum()
    )
    order = ["blocked_ns", "waited_ns", "rank", "part", "label"]
    rows = rows.sort(order, descending=[True, True, False, False, False])
    listed = tuple(Blame(**row) for row in rows.head(_LISTED).iter_rows(named=True))
    rest = rows.slice(_LISTED).select(pl.col("waited_ns", "blocked_ns").sum()).row(0)
    if not any(rest):
        return listed
    return (*listed, Blame(rank=None, part=REST, label="", waited_ns=rest[0], blocked_ns=rest[1]))


def path_parts(run: Replay | Unreplayable, timeline: Timeline) -> tuple[PathPart, ...]:
    """Return the critical path.

    Mean per judged step, the largest parts and the rest. Empty where no replay is trusted.
    """
    judged = timeline.steps.filter("judged")["step"].unique()
    host = (None if isinstance(run, Unreplayable) else run.host) or _graph_of_one_step(timeline, len(judged))
    if host is None:
        return ()
    judged = judged.filter(judged.is_in(host.steps["step"].unique().implode()))
    path = critical_path(host).filter(pl.col("step").is_in(judged.implode()))
    length = pl.col("end_ns") - pl.col("start_ns")
    is_queued = (pl.col("part") == "other") & (pl.col("label") == BETWEEN) & (length > OWN_GAP_NS)
    path = path.with_columns(label=pl.when(is_queued).then(pl.lit(QUEUED)).otherwise("label"))
    rows = path.group_by("rank", "part", "label").agg(length.sum().alias("ns"))
    rows = rows.sort(["ns", "rank", "part", "label"], descending=[True, False, False, False])
    if rows.is_empty():
        return ()
    largest, rest = rows.head(_LISTED), int(rows["ns"].slice(_LISTED).sum())
    means = rounded([*largest["ns"].to_list(), rest], len(judged))
    parts = [
        PathPart(rank=rank, part=part, label=label, ns_per_step=ns)
        for (rank, part, label), ns in zip(largest.select("rank", "part", "label").iter_rows(), means, strict=False)
    ]
    return (*parts, PathPart(rank=None, part=REST, label="", ns_per_step=means[-1]))


def _graph_of_one_step(timeline: Timeline, judged: int) -> HostGraph | None:
    """Trust the replay of a single step, too: it cannot show how well it predicts, but what the step waited for."""
    if judged != 1 or timeline.kernels.is_empty():
        return None
    graph = tried(lambda: device_graph(first_steps(timeline)))
    return None if isinstance(graph, Unreplayable) else graph
