"""Where each rank's steps begin and end, and which of them are judged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.annotations import STEP
from rankscope.analysis.model.segments import latest, reached_before
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.timeline.device_time import by_rank

__all__ = [
    "CAPTURE",
    "MARKERS",
    "NAMED",
    "OPTIMIZER",
    "PROFILER",
    "STEP_COLUMNS",
    "UPDATES",
    "agreement",
    "find_steps",
    "in_steps",
    "judge",
    "last_begun",
    "misnumbered",
    "names_step",
    "number_by_operations",
    "number_by_time",
    "on_device",
    "renumber",
    "whole_captures",
]

MARKERS = "rankscope.step()"
PROFILER = "ProfilerStep"
OPTIMIZER = "optimizer"
NAMED = "named ranges"
UPDATES = "optimizer's kernels"
CAPTURE = "capture"

STEP_COLUMNS = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
    "source": pl.String,
}

_IDLE_NS = 100_000  # work that is queued begins sooner after what was before it
_FAR = 2  # times
_NEVER, _AFTER_ALL = np.iinfo(np.int64).min, np.iinfo(np.int64).max
_NOBODY = -1
_MAIN_THREAD = 0
_LENGTH = pl.col("end_ns") - pl.col("start_ns")
_RARE = 20  # an optimizer that runs less often than 1 in 20 of the most frequent one does not make steps
_NEARLY_ALL, _MOST, _SEVERAL = 0.9, 0.75, 1.5
_COVERS = 0.8  # share of the optimizers' time from first to last in which the anchor must be seen
_WARMUP_MIN, _WARMUP_SHARE, _SETTLED = 2, 0.2, 1.5
_OUTLIER_RATIO, _OUTLIER_MADS, _OUTLIER_SHARE, _OUTLIER_STEPS = 5, 10, 0.02, 5


def find_steps(steps: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Each rank's steps: (rank, step, start_ns, end_ns, source), ordered, numbered from 0 on each rank.

    Steps end where the script said so (`rankscope.step()`); on a rank without such marks, where the anchor's optimizer
    region ends. With several optimizers the anchor is the one that runs least often, of equals the last in the cycle.
    Runs of it with neither a backward nor a communication between them end one step (DeepSpeed's, by group of weights).
    On a rank without an optimizer too, steps end where the user's ranges do that are named so (`step 12`, `iteration`).
    A step starts where the one before ended; the first at the rank's first region or collective. A profiler's steps
    have a start of their own.
    What comes after the last end belongs to no step.
    """
    source = pl.when(pl.col("start_ns").is_null()).then(pl.lit(MARKERS)).otherwise(pl.lit(PROFILER)).alias("source")
    marks = _on_main_or_all(steps).select("rank", "start_ns", "end_ns", source)
    unmarked = _of_others(regions, marks)
    anchors = _anchor_ends(unmarked, collectives).select("rank", "end_ns", pl.lit(OPTIMIZER).alias("source"))
    ends = pl.concat([marks, anchors, _named_steps(_of_others(unmarked, anchors))], how="diagonal")
    seen = pl.concat([regions.select("rank", "start_ns"), collectives.select("rank", "start_ns")])
    first = seen.group_by("rank").agg(pl.col("start_ns").min().alias("_first"))
    previous = pl.col("end_ns").shift(1).over("rank")
    return (
        ends.unique(["rank", "end_ns"])
        .sort("rank", "end_ns")
        .join(first, on="rank", how="left", maintain_order="left")
        .with_columns(pl.coalesce("start_ns", previous, "_first").alias("start_ns"))
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .with_columns(pl.int_range(pl.len()).over("rank").alias("step"))
        .select(pl.col(c).cast(t) for c, t in STEP_COLUMNS.items())
    )


def names_step(regions: pl.DataFrame) -> pl.Expr:
    """Return which of these regions are ranges of the user's that are named as steps are."""
    names = regions["name"].filter(regions["kind"] == "user").unique()
    steps = names.filter(names.cast(pl.String).str.contains(STEP))
    return (pl.col("kind") == "user") & pl.col("name").is_in(steps.implode())


def agreement(steps: pl.DataFrame, collectives: pl.DataFrame) -> float | None:
    """Share of the operations that all their ranks started in the step of the same number; None if there are none.

    Ranks number their steps on their own: this is the proof that equal numbers are the same step.
    `collectives` has `instance_id`.
    """
    placed = in_steps(collectives.select("rank", "start_ns", "instance_id"), steps).drop_nulls("instance_id")
    instance = placed["instance_id"].to_numpy()
    step = placed["step"].cast(pl.Int64).fill_null(_NEVER).to_numpy()
    count = np.bincount(instance)
    low, high = np.full(len(count), _AFTER_ALL), np.full(len(count), _NEVER)
    np.minimum.at(low, instance, step)
    np.maximum.at(high, instance, step)
    inside = (count > 1) & (low > _NEVER)
    return float((low == high)[inside].mean()) if inside.any() else None


def renumber(steps: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with each rank's numbers shifted to those of the rank that has most steps.

    By the operations they share, one shift per rank: the most frequent difference. It heals a rank whose first steps
    were not seen.
    """
    counts = steps.group_by("rank").len().sort(["len", "rank"], descending=[True, False])
    if not len(counts):
        return steps
    placed = in_steps(collectives, steps).filter(pl.col("instance_id").is_not_null() & pl.col("step").is_not_null())
    reference = placed.filter(pl.col("rank") == counts["rank"][0]).select("instance_id", pl.col("step").alias("_there"))
    shift = (
        placed.join(reference, on="instance_id")
        .group_by("rank")
        .agg((pl.col("_there") - pl.col("step")).mode().min().alias("_shift"))
    )
    return (
        steps.join(shift, on="rank", how="left", maintain_order="left")
        .with_columns(pl.col("step") + pl.col("_shift").fill_null(0))
        .drop("_shift")
    )


def misnumbered(steps: pl.DataFrame, collectives: pl.DataFrame, lossy: set[int]) -> set[int]:
    """Return those of `lossy` ranks that have a step whose operations are not nearly all in it on the others too."""
    if not lossy:
        return set()
    placed = _numbered_elsewhere(steps, collectives, lossy)
    wrong = placed.group_by("rank", "step").agg((pl.col("number") == pl.col("step")).mean().alias("_same"))
    return set(wrong.filter(pl.col("_same") < _NEARLY_ALL)["rank"])


def number_by_operations(
    steps: pl.DataFrame, collectives: pl.DataFrame, lossy: set[int]
) -> tuple[pl.DataFrame, dict[int, int]]:
    """Return the steps, those of `lossy` ranks with the numbers that their operations have on the others.

    Where the records of an optimizer were lost, what a rank takes for a step is two of them, and all that follow have
    too low a number. A step whose operations have nearly all the same gets that, unless it lasts longer than on the
    others, as several do of which one has operations; the other steps of these ranks are left out. By rank also how
    many. A rank of which that would be more than a quarter has other steps than its peers, and stays as it is.
    """
    by = ["rank", "step"]
    is_lossy = pl.col("rank").is_in(lossy)
    there = _numbered_elsewhere(steps, collectives, lossy)
    is_usual = pl.col("number") == pl.col("number").mode().min().over(by)
    known = there.filter(is_usual.mean().over(by) >= _NEARLY_ALL, is_usual).unique()
    known = known.filter(pl.len().over("rank", "number") == 1)
    usual = steps.filter(~is_lossy).group_by(number="step").agg(_LENGTH.median().alias("_usual"))
    fixed = steps.join(known, on=by).join(usual, on="number", how="left")
    fixed = fixed.filter((_SEVERAL * pl.col("_usual") >= _LENGTH).fill_null(True)).drop("_usual")
    counts = steps.group_by("rank").len("steps").join(fixed.group_by("rank").len("kept"), on="rank")
    counts = counts.filter(pl.col("kept") >= _MOST * pl.col("steps")).sort("rank")
    is_fixed = pl.col("rank").is_in(counts["rank"].implode())
    fixed = fixed.filter(is_fixed).with_columns(pl.col("number").cast(STEP_COLUMNS["step"]).alias("step"))
    numbered = pl.concat([steps.filter(~is_fixed), fixed.drop("number")]).sort(by)
    return numbered, dict(counts.select("rank", pl.col("steps") - pl.col("kept")).iter_rows())


def _numbered_elsewhere(steps: pl.DataFrame, collectives: pl.DataFrame, lossy: set[int]) -> pl.DataFrame:
    """(rank, step, number) of each operation of `lossy` ranks: the number of the step in which it is on the others.

    Those of only such ranks have the highest, since steps of which one was lost have too low a number.
    """
    placed = in_steps(collectives, steps).drop_nulls(["instance_id", "step"])
    is_lossy = pl.col("rank").is_in(lossy)
    of_others = pl.col("step").filter(~is_lossy).max().over("instance_id")
    number = pl.coalesce(of_others, pl.col("step").max().over("instance_id"))
    return placed.select("rank", "step", number.alias("number")).filter(is_lossy)


def number_by_time(steps: pl.DataFrame, counted: pl.DataFrame) -> pl.DataFrame:
    """Return the steps with each rank's numbers shifted to those of `counted`, one rank's, on the same clock.

    A step has the number of the counted one that it shares most time with; one shift per rank, the most frequent. Where
    none is counted none is left.
    """
    if counted.is_empty():
        return steps.clear()
    begin, end = counted["start_ns"].to_numpy(), counted["end_ns"].to_numpy()
    middle = ((steps["start_ns"] + steps["end_ns"]) // 2).to_numpy()
    at = np.clip(np.searchsorted(begin, middle, side="right") - 1, 0, len(begin) - 1)
    there = np.where(middle < end[at], counted["step"].to_numpy()[at], -1)
    shift = pl.Series("_shift", there) - steps["step"]
    known = steps.select("rank", shift).filter(pl.Series(there >= 0))
    shifts = known.group_by("rank").agg(pl.col("_shift").mode().min())
    return (
        steps.join(shifts, on="rank", maintain_order="left")
        .with_columns((pl.col("step") + pl.col("_shift")).cast(STEP_COLUMNS["step"]))
        .drop("_shift")
    )


def whole_captures(*tables: pl.DataFrame) -> pl.DataFrame:
    """One step per rank, from the first start to the last end of these tables' rows."""
    spans = pl.concat([table.select("rank", "start_ns", "end_ns") for table in tables])
    return (
        spans.group_by("rank")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .sort("rank")
        .with_columns(step=0, source=pl.lit(CAPTURE))
        .select(pl.col(c).cast(t) for c, t in STEP_COLUMNS.items())
    )


def on_device(steps: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the steps as the device goes through them, which is behind the host: one follows the other without a gap.

    A step ends when the host's step has ended and all device work that was launched in it; there the next one begins.
    The first begins with the host's, or when what was launched before it has ended: a device was busy with others until
    it began with the first kernel that was seen, if that had been launched long before. `kernels` has `launch_ns`.

    Source: PyTorch's TensorBoard plugin, where a step begins no earlier than the host's, and the first with it.
    """
    work = dict(by_rank(kernels.select("rank", "stream", "launch_ns", "start_ns", "end_ns")))
    of_ranks = [
        rows.with_columns(**_launched_in(rows, work.get(rank, kernels.clear())))
        for rank, rows in by_rank(steps.sort("rank", "start_ns"))
    ]
    if not of_ranks:
        return steps
    previous = pl.col("end_ns").shift(1).over("rank")
    return (
        pl.concat(of_ranks)
        .with_columns(pl.max_horizontal("end_ns", "_done").cum_max().over("rank").alias("end_ns"))
        .with_columns(pl.coalesce(previous, pl.max_horizontal("start_ns", "_left_over")).alias("start_ns"))
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .drop("_done", "_left_over")
    )


def _launched_in(steps: pl.DataFrame, kernels: pl.DataFrame) -> dict[str, pl.Series]:
    """Of one rank: when all was done that was launched in each step, and all that was launched before the first."""
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    begin = steps["start_ns"].to_numpy()
    until = np.append(begin[1:], steps["end_ns"].to_numpy()[-1:])
    launched = kernels["launch_ns"].fill_null(_NEVER).to_numpy()
    step = np.searchsorted(begin, launched, side="right") - 1
    known = step >= 0
    within = known & (launched < until[step])
    done = np.full(len(begin), _NEVER)
    np.maximum.at(done, step[within], end[within])
    # A stream keeps its order: what it did before the first row launched in a step was launched before.
    stream = kernels["stream"].rank("dense").fill_null(0).to_numpy()
    first = np.full(int(stream.max(initial=0)) + 1, _AFTER_ALL)
    np.minimum.at(first, stream[known], start[known])
    first[first == _AFTER_ALL] = _NEVER  # nothing of it was launched in a step
    before = start < first[stream]
    if not _is_too_much(int(before.sum()), int(begin[0]), launched[known]):
        before &= start < _idle_from(begin[0], start, end)
    left_over = end[before].max(initial=_NEVER)
    if len(start) and known[0] and start[0] - launched[0] > max(_IDLE_NS, launched[0] - begin[0]):
        left_over = max(left_over, start[0])
    return {"_done": pl.Series(done), "_left_over": pl.repeat(left_over, len(steps), dtype=pl.Int64, eager=True)}


def _is_too_much(count: int, begin: int, launched: NDArray[np.int64]) -> bool:
    """Say whether a host that launches so many kernels takes far longer than until its first launch that was seen."""
    if len(launched) < 2:
        return False
    pace = (launched.max() - launched.min()) / (len(launched) - 1)
    return bool(count * pace > _FAR * (launched.min() - begin))


def _idle_from(begin: int, start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """When a device first has nothing to do after the host's first step began: what it does later was not queued then.

    The launch of its work may be missing from the trace all the same. Rows are in order of start.
    """
    until = np.maximum.accumulate(np.append(begin, end))
    idle = start - until[:-1] >= _IDLE_NS
    return int(until[:-1][idle][0]) if idle.any() else _AFTER_ALL


def in_steps(rows: pl.DataFrame, steps: pl.DataFrame, at: pl.Series | None = None) -> pl.DataFrame:
    """Return the rows, in their order, with the `step` for which start_ns ≤ `at` < end_ns; null outside.

    `at` is the rows' own start_ns where it is not given.
    """
    at = rows["start_ns"] if at is None else at
    begun = last_begun(steps, rows["rank"], at)
    end = np.append(steps["end_ns"].to_numpy(), _NEVER)[begun]
    inside = pl.Series(at.fill_null(_AFTER_ALL).to_numpy() < end)
    step = steps["step"].extend_constant(None, 1)[begun]
    return rows.with_columns(pl.when(inside).then(step).alias("step"))


def last_begun(spans: pl.DataFrame, rank: pl.Series, at: pl.Series) -> NDArray[np.int64]:
    """Return for each time the row of `spans` (rank, start_ns) that began last on its rank by then; -1: none had."""
    ordered = in_order(spans.select("rank", "start_ns", row=pl.int_range(pl.len())), "rank", "start_ns")
    of, begin, row = (ordered[column].to_numpy() for column in ("rank", "start_ns", "row"))
    if not len(of):
        return np.full(len(at), -1)
    highest = int(of[-1])
    bounds = np.searchsorted(of, np.arange(_NOBODY, highest + 3))  # nobody, each rank, and all beyond, who have none
    segment = np.clip(rank.fill_null(_NOBODY).to_numpy().astype(np.int64), _NOBODY, highest + 1) - _NOBODY
    last = latest(begin, bounds, segment, at.fill_null(_NEVER).to_numpy())
    return np.where(last >= bounds[segment], row[last], -1)


def judge(
    steps: pl.DataFrame, regions: pl.DataFrame, warmup: Sequence[int] | None = None, *, of_capture: bool = False
) -> pl.DataFrame:
    """Return the steps with `judged` and, where it is false, `aside`: "warm-up", "outlier" or "incomplete".

    One verdict per step number, for all ranks. Incomplete: not all ranks that have steps have it. Warm-up: the first
    steps, at least 2, at most a fifth, until one is neither 1.5 × as long as the median of all nor compiles; none where
    a profiler made the steps, whose schedule has warmed up, or where the capture is the step. A profiler's capture that
    names no steps (`of_capture`) seldom begins with the job: none of it need be warm-up. Outlier: longer than
    5 × the median and than the median + 10 MAD, if no more than 2 % of the steps (or a single one) are so: a hiccup,
    not a fault that comes back; of fewer than 5 steps none is known to be one. The time of a checkpoint does not count
    there: saving one is meant.
    Of part of a run it must be said which steps are `warmup`.
    """
    ranks = steps["rank"].n_unique()
    compiles = (
        in_steps(regions.filter((pl.col("kind") == "compile") & (pl.col("thread") == _MAIN_THREAD)), steps)["step"]
        .drop_nulls()
        .unique()
    )
    table = (
        steps.group_by("step")
        .agg(
            _LENGTH.max().alias("_length"),
            (pl.len() == ranks).alias("_complete"),
            pl.col("source").is_in([PROFILER, CAPTURE]).all().alias("_warmed"),
        )
        .join(_saving(steps, regions), on="step", how="left")
        .sort("step")
    )
    complete = table.filter("_complete")
    settled = (pl.col("_length") <= _SETTLED * pl.col("_length").median()) & ~pl.col("step").is_in(compiles.implode())
    least = 0 if of_capture else _WARMUP_MIN
    limit = max(least, int(_WARMUP_SHARE * len(complete)))
    index = pl.int_range(pl.len())
    first = (index < least) | ((index < limit) & ~(settled & (index >= least)).cum_max())
    known = first if warmup is None else pl.col("step").is_in(warmup)
    warm = complete.with_columns((~pl.col("_warmed") & known).alias("_warmup"))
    verdict = warm.join(_outliers(warm.filter(~pl.col("_warmup"))), on="step", how="left").select(
        "step",
        pl.when("_warmup").then(pl.lit("warm-up")).when("_outlier").then(pl.lit("outlier")).alias("aside"),
        pl.lit(True).alias("_known"),
    )
    return (
        steps.join(verdict, on="step", how="left", maintain_order="left")
        .with_columns(pl.when(pl.col("_known").is_null()).then(pl.lit("incomplete")).otherwise("aside").alias("aside"))
        .with_columns(pl.col("aside").is_null().alias("judged"))
        .drop("_known")
    )


def _outliers(settled: pl.DataFrame) -> pl.DataFrame:
    """(step, _outlier) of the steps after warm-up."""
    length = pl.col("_length") - pl.col("_saving").fill_null(0)
    median = length.median()
    mad = (length - median).abs().median()
    extreme = (length > _OUTLIER_RATIO * median) & (length > median + _OUTLIER_MADS * mad)
    few = extreme.sum() <= pl.max_horizontal(pl.lit(1), pl.len() * _OUTLIER_SHARE)
    return settled.select("step", (extreme & few & (pl.len() >= _OUTLIER_STEPS)).alias("_outlier"))


def _saving(steps: pl.DataFrame, regions: pl.DataFrame) -> pl.DataFrame:
    """(step, _saving): ns that the rank which saves longest saves a checkpoint while any rank is in the step.

    The others wait for it, where the script marks its steps after saving in their next one.
    """
    spans = steps.group_by("step").agg(pl.col("start_ns").min().alias("_first"), pl.col("end_ns").max().alias("_last"))
    saves = _outermost(regions, "checkpoint").select("rank", "start_ns", "end_ns")
    during = spans.join_where(saves, pl.col("start_ns") < pl.col("_last"), pl.col("end_ns") > pl.col("_first"))
    return (
        during.group_by("step", "rank").agg(_LENGTH.sum()).group_by("step").agg(pl.col("end_ns").max().alias("_saving"))
    )


def _on_main_or_all(steps: pl.DataFrame) -> pl.DataFrame:
    """Return marks of the main thread; where a rank has none there, those of the thread it marks on."""
    return steps.filter(pl.col("thread") == pl.col("thread").min().over("rank"))


def _anchor_ends(regions: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """(rank, end_ns): where the anchor's regions end, the outermost on the main thread; of a series', the last one.

    A series begins after a backward, and has neither one nor communication in it. As graphs of CUDA's hide both, those
    that are longer than usual are single runs.
    """
    optimizers = _outermost(regions, "optimizer")
    runs = optimizers.join(_anchors(optimizers), on=["rank", "name"]).sort("rank", "end_ns")
    since = pl.col("end_ns").shift(1).over("rank").fill_null(_NEVER)
    for name, work in (("_backward", regions.filter(pl.col("kind") == "backward")), ("_called", collectives)):
        begun = last_begun(work, runs["rank"], runs["start_ns"])
        runs = runs.with_columns(work["start_ns"].extend_constant(None, 1)[begun].alias(name))
    runs = (
        runs.with_columns((pl.col("_backward") > since).fill_null(False), (pl.col("_called") > since).fill_null(False))
        .with_columns((pl.col("_backward") | pl.col("_called")).cum_sum().over("rank").alias("_series"))
        .with_columns(
            pl.len().over("rank", "_series").alias("_runs"), pl.col("_backward").first().over("rank", "_series")
        )
    )
    series = runs.filter("_backward").unique(["rank", "_series"])
    usual = series.group_by("rank").agg(pl.col("_runs").median().alias("_usual"))
    last = pl.col("end_ns") == pl.col("end_ns").max().over("rank", "_series")
    one_step = (pl.col("_backward") & (pl.col("_runs") <= pl.col("_usual"))).fill_null(False)
    return runs.join(usual, on="rank", how="left", maintain_order="left").filter(last | ~one_step)


def _of_others(regions: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return the regions of the ranks that have no such ends."""
    if ends.is_empty():
        return regions
    others = set(regions["rank"].unique()) - set(ends["rank"].unique())
    return regions.filter(pl.col("rank").is_in(others))


def _named_steps(regions: pl.DataFrame) -> pl.DataFrame:
    """(rank, start_ns, end_ns, source) of steps that the user's ranges name: each goes on where the one before ended.

    What lies between two ranges, input perhaps, is part of the later one.
    """
    begins = pl.coalesce(pl.col("end_ns").shift(1).over("rank"), "start_ns").alias("start_ns")
    named = _outermost(regions.filter(names_step(regions)), "user")
    return named.select("rank", begins, "end_ns", pl.lit(NAMED).alias("source"))


def _outermost(regions: pl.DataFrame, kind: str) -> pl.DataFrame:
    """Return the regions of a kind on main threads that lie in no other one of that kind."""
    of_kind = regions.filter((pl.col("kind") == kind) & (pl.col("thread") == _MAIN_THREAD))
    of_kind = of_kind.sort("rank", "start_ns", "end_ns", descending=[False, False, True])
    inside = of_kind["end_ns"] <= reached_before(of_kind, "rank")
    return of_kind.filter(~inside.fill_null(False))


def _anchors(optimizers: pl.DataFrame) -> pl.DataFrame:
    """(rank, name) of the optimizer that closes a step; all names of a rank where none runs throughout."""
    names = optimizers.group_by("rank", "name").agg(
        pl.len().alias("runs"), pl.col("start_ns").min().alias("first"), pl.col("start_ns").max().alias("last")
    )
    span = (pl.col("last").max() - pl.col("first").min()).over("rank")
    # n evenly spaced runs reach over (n - 1) / n of the time.
    reaches = pl.col("last") - pl.col("first") >= _COVERS * span * (pl.col("runs") - 1) / pl.col("runs")
    frequent = pl.col("runs") * _RARE >= pl.col("runs").max().over("rank")
    candidates = names.with_columns((reaches & frequent).alias("throughout"))
    # The recording may end in the middle of a cycle: counts that differ by one are equal.
    rarest = pl.col("runs") <= pl.col("runs").min().over("rank") + 1
    chosen = (
        candidates.filter("throughout").filter(rarest).sort("rank", "first").group_by("rank").agg(pl.col("name").last())
    )
    rest = candidates.join(chosen.select("rank"), on="rank", how="anti").select("rank", "name")
    return pl.concat([chosen.select("rank", "name"), rest])
