"""The longest rank changes from step to step: the work itself is uneven.

**Signal.** Forward and backward grow and shrink together on a rank: rank correlation of at least `min_correlation`
after each rank's and each step's median (in a pipeline that of its stage) is taken away. Work that follows the data
lengthens both; a preempted process lengthens whatever it was doing. What the two have in common is taken to be the
data, and the loss is by how much it makes the longest rank of a step longer: more than `min_fraction` of the step, and
no single rank is the root cause of most of it (`persistence`).

That is `max(own) - max(own - x)` per step. `x` is by how much a rank is above the mean of the step (and stage), less
what noise makes of it: without uneven data the ranks would still differ, and by how much is inferred from how far
forward and backward disagree. Where they do by 3 standard deviations, the smaller of what the two say is the data's.
What a rank clearly takes longer in all steps is not the data's.

CUDA events time forward by itself, and backward with its communication. How long the others wait in the first reduction
of a step, and what passes on each rank since all ended the last one of the step before, give how long a rank computed
until then: that stands for backward, and all of backward is taken to be as uneven. It needs data parallelism over all
ranks, no communication in forward, and NCCL's durations.

Of a profiler's capture of two to four steps, and of one that does not name forward, the sample is a piece of a step:
its kernels in their order, in up to 16 pieces. By how much a rank computes longer than its peers is the median over
pieces. The work is uneven if that changes from step to step by 3 standard errors, if not the same rank is the longest
in all steps, and if no more than `persistence` of the loss goes away with the least factor by which each rank is longer
in all steps.

Of a table of pipeline operations the sample is a microbatch: by how much it is longer on all stages alike (median over
them) than the others of its step. Its cost is what the steps take longer in the replay than with equal microbatches and
as much work on each stage.

**Why it costs time.** Every step lasts as long as its longest rank. With random lengths the loss grows with the
number of ranks, and no machine is the root cause.

**False positives.** Where forward and backward are not distinguished, this is not checked. Other load on the host, or
clocks of a device, that last through forward and backward of single steps can look the same.

**What to try.** Give every rank batches of equal cost: bucket by length, pack sequences to a token budget, balance
the sum of squared lengths where attention dominates, sort within a window and deal out to the ranks.

**Source.** Forward-backward correlation as the mark of uneven sequences: ByteDance's analysis of stragglers, there
Pearson's of 0.9 and more, which a few preempted steps break. Two halves of one measurement give its noise as in test
theory's split-half reliability. Thresholds are measured on healthy jobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, peers_grid, price, visible
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import (
    TRIM,
    Estimate,
    Floats,
    Ints,
    StepGrid,
    estimate,
    estimates,
    own_by_label,
    robust_deviation,
    sums,
)
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.parts import MIXED, OWN_WORK
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.analysis.timeline.parallelism import roles_of
from rankscope.errors import NotResolvable

__all__ = ["NO_PEERS", "detect", "detector", "finding_of", "resolution_ns"]

detector = Detector(
    needs=("collectives", "backward"),
    per_rank=True,
    explains=("pipeline_bubble",),
    cost="bounded",
    parts=OWN_WORK,
    lost_as=AS_WAITING,
)

NO_PEERS = text("each pipeline stage has one rank only, so no rank has a peer that does the same work")
_DISAGREE = 3.0  # standard deviations between what forward and backward say: one of them was preempted
_CLEARLY = 2.5  # half widths of a 95 % interval: a rank that is so clearly longer in all steps is slow, not unlucky
_AT_ONCE = 0.1  # of a transfer: an operation that waits less after it may have queued behind it


@dataclass(frozen=True, slots=True)
class _Work:
    """The ranks' computation, arrays of (rank, step) in ns: own time, and two parts of it that the data lengthen alike.

    `whole_ns` is the mean of all of forward and backward, of which the two parts may be less; of that `open_fraction`,
    more or less, may be no computation.
    """

    grid: StepGrid
    own: Floats
    forward: Floats
    backward: Floats
    whole_ns: float
    role: Ints
    open_fraction: float = 0.0


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.6,
    min_correlation: float = 0.6,
) -> list[Finding]:
    """Report work that is spread unevenly over the ranks in a way that changes from step to step."""
    work, correlation, longer = _imbalance(breakdown, phases, collectives, regions, groups)
    grid, lost = work.grid, estimate(longer)
    lost = Estimate(lost.ns, lost.half_width_ns + work.open_fraction * lost.ns)
    by_rank = np.bincount(work.own.argmax(axis=0), weights=longer)
    if correlation < min_correlation or lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    if by_rank.max() >= persistence * longer.sum():
        return []
    return [finding_of(grid, work.own, lost, steps)]


def finding_of(grid: StepGrid, own: Floats, lost: Estimate, steps: pl.DataFrame) -> Finding:
    """Give the finding for work that costs this; `own` is what ranks compute, (rank, step) in ns."""
    return Finding(
        detector="load_imbalance",
        title=text(
            "Load imbalance: a different rank is slowest in each step; with balanced work a step would compute "
            "{lost} less",
            lost=duration(lost.ns),
        ),
        where=text("forward and backward"),
        advice=text("Give every rank batches of equal cost: bucket by length, or pack sequences to a token budget."),
        ranks=grid.ranks,
        evidence=_widest_step(grid, own, steps),
        fix="balance",
        **price(grid, lost),
    )


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_correlation: float = 0.6,
) -> int:
    """Return the smallest imbalance that would have been reported: what is smaller may hide in the noise."""
    work = _work(breakdown, phases, collectives, regions, groups)
    said, noise = _halves(work)
    # With as much noise in what each of the two says, uneven data of this scatter have the correlation.
    data = robust_deviation(said[0] - said[1]) * (min_correlation / (1 - min_correlation) / 2) ** 0.5
    deviation = _beyond(work.own, work.role)
    longest = deviation.max(axis=0).mean() / max(robust_deviation(deviation), 1.0)
    least_ns = max(min_fraction * work.grid.step_ns, float(longest * (np.hypot(noise, data) - noise)))
    return visible(work.grid, least_ns)


def _imbalance(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> tuple[_Work, float, Floats]:
    """Return the work, how forward and backward go together, and how much longer uneven data make each step, ns."""
    work = _work(breakdown, phases, collectives, regions, groups)
    longer = work.own.max(axis=0) - _even(work).max(axis=0)
    return work, _correlation(work), longer


@once
def _work(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    groups: pl.DataFrame | None,
) -> _Work:
    grid = peers_grid(breakdown)
    labels = own_by_label(phases, grid)
    role = roles_of(grid.ranks, groups, regions, collectives)
    if "forward" not in labels or ("backward" not in labels and not grid.of(MIXED).any()):
        raise NotResolvable(
            text("forward and backward are not distinguished, so load imbalance cannot be distinguished from noise")
        )
    if len(np.unique(role)) == len(role):
        raise NotResolvable(NO_PEERS)
    if "backward" in labels:
        whole_ns = float(labels["forward"].mean() + labels["backward"].mean())
        return _Work(grid, grid.own, labels["forward"], labels["backward"], whole_ns, role)
    return _by_marks(grid, labels["forward"], phases, collectives, regions, role)


def _by_marks(
    grid: StepGrid,
    forward: Floats,
    phases: pl.DataFrame,
    collectives: pl.DataFrame | None,
    regions: pl.DataFrame | None,
    role: Ints,
) -> _Work:
    """Return the work where backward includes communication: forward, and backward until its first reduction.

    All ranks come out of the last reduction of a step together. What passes on a rank's own clock from there until it
    begins the next backward, and how long the others wait for it in that one's first reduction, show how much longer
    than the others it computed in between. The scatter of both gives the length of that part of backward. All of
    backward is as long as on the rank that has least of it, since that waited least, without transfers that it may not
    hide.
    """
    reductions = _reductions(grid, collectives, regions)
    is_backward = (pl.col("part") == MIXED) & (pl.col("label") == "backward")
    spans = phases.filter(is_backward).group_by("rank", "step").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    begun, ended = (_at(grid, spans, column) for column in ("start_ns", "end_ns"))
    waits, exposed, maybe = (_at(grid, reductions, column) for column in ("wait_ns", "exposed_ns", "maybe_ns"))
    since = begun - np.concatenate([np.full((len(begun), 1), np.nan), ended[:, :-1]], axis=1)
    since[:, np.diff(grid.steps, prepend=grid.steps[0] - 2) != 1] = np.nan
    beyond = -waits - since
    known = np.isfinite(beyond + ended + exposed).all(axis=0)
    if known.sum() < ENOUGH_STEPS:
        raise NotResolvable(text("backward is not distinguished from communication, nor which ranks wait in it"))
    grid = grid.at(known)
    forward, beyond = forward[:, known], _beyond(beyond[:, known], role)
    computed = (ended - begun - exposed - maybe / 2)[:, known]
    least, steps = computed.argmin(axis=0), np.arange(len(grid.steps))
    ratio = float(np.median(computed[least, steps] / forward[least, steps]))
    part = robust_deviation(beyond) / max(robust_deviation(_beyond(forward, role)), 1.0) * forward.mean()
    part = float(np.clip(part, 1.0, max(ratio * forward.mean(), 1.0)))
    whole_ns, both = (1 + ratio) * float(forward.mean()), forward + part + beyond
    open_fraction = float(np.median(maybe[:, known][least, steps])) / 2 / whole_ns
    return _Work(grid, both * whole_ns / both.mean(), forward, part + beyond, whole_ns, role, open_fraction)


def _reductions(grid: StepGrid, collectives: pl.DataFrame | None, regions: pl.DataFrame | None) -> pl.DataFrame:
    """By rank and step the wait in the first reduction of all ranks in backward, and the transfers that blocked it.

    `exposed_ns`: the last one's. `maybe_ns`: of those after which no rank waited in the next one, so that it may have
    queued behind them.
    """
    columns = ("wait_ns", "exposed_ns", "maybe_ns")
    if collectives is None or regions is None:
        return pl.DataFrame(schema={"rank": pl.Int32, "step": pl.Int32, **dict.fromkeys(columns, pl.Int64)})
    backward = regions.filter(pl.col("kind") == "backward").select("rank", begun_ns="start_ns", until_ns="end_ns")
    most = pl.col("wait_ns").max().over("instance_id").shift(-1).over("rank", "step")
    return (
        collectives.filter(
            pl.col("end_ns").is_null() & pl.col("wait_ns").is_not_null(),
            pl.col("op").is_in(MUTUAL_OPS) & (pl.col("group_size") == len(grid.ranks)),
        )
        .sort("start_ns")
        .join_asof(
            backward.sort("begun_ns"), left_on="start_ns", right_on="begun_ns", by="rank", check_sortedness=False
        )
        .filter(pl.col("start_ns") < pl.col("until_ns"))
        .with_columns(_queued=most < _AT_ONCE * pl.col("transfer_ns"))
        .group_by("rank", "step", maintain_order=True)
        .agg(
            *(pl.col("instance_id").first(), pl.col("wait_ns").first()),
            exposed_ns=pl.col("transfer_ns").last(),
            maybe_ns=pl.col("transfer_ns").filter("_queued").sum(),
        )
        .filter(pl.col("instance_id").n_unique().over("step") == 1)
    )


def _at(grid: StepGrid, rows: pl.DataFrame, column: str) -> Floats:
    """Return the column by (rank, step), not a number where there is no row."""
    known = sums(grid, rows.with_columns(_known=1), "_known") > 0
    return np.where(known, sums(grid, rows, column), np.nan)


def _halves(work: _Work) -> tuple[list[Floats], float]:
    """Return the data's distance from the mean by either part, ns of both together.

    And the noise of both together.

    Noise that grows with the square root of time makes the two differ by so much more than it makes their sum scatter.
    """
    first, second = work.forward.mean(), work.backward.mean()
    said = [_beyond(label, work.role) * work.whole_ns / label.mean() for label in (work.forward, work.backward)]
    return said, float(robust_deviation(said[0] - said[1]) * (first * second) ** 0.5 / (first + second))


def _even(work: _Work) -> Floats:
    """Own time as it would be with even data, (rank, step) in ns: what ranks of a role do together stays the same."""
    said, noise = _halves(work)
    difference, deviation = said[0] - said[1], _beyond(work.own, work.role)
    without = min(noise / max(robust_deviation(deviation), 1.0), 1.0)
    smaller = np.where(np.abs(said[0]) < np.abs(said[1]), *said)
    data = np.where(np.abs(difference) > _DISAGREE * robust_deviation(difference), smaller, deviation)
    always, half_widths = estimates(deviation, TRIM)
    data = data - np.where(np.abs(always) > _CLEARLY * half_widths, always, 0.0)[:, np.newaxis]
    return np.asarray(work.own - (1 - without) * _beyond(data, work.role))


def _beyond(values: Floats, role: Ints, usual: Callable[..., Floats] = np.mean) -> Floats:
    """Each (rank, step) minus what is usual in the step among the ranks of its role."""
    beyond = np.empty_like(values)
    for each in np.unique(role):
        beyond[role == each] = values[role == each] - usual(values[role == each], axis=0)
    return beyond


def _correlation(work: _Work) -> float:
    """Rank correlation over (rank, step) of what is neither the rank's nor the step's median; 0 where nothing varies.

    Ranks and medians, since a few preempted steps would otherwise decide; logarithms, since all sequences of a step may
    be long, and then a rank that is always slow is slow by more.
    """
    halves = (np.log(np.maximum(half, 1.0)) for half in (work.forward, work.backward))
    logs = (_beyond(half, work.role, np.median) for half in halves)
    x, y = (_order(beyond - np.median(beyond, axis=1, keepdims=True)) for beyond in logs)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def _order(values: Floats) -> Floats:
    """Each value's place in the order of all, equal ones at their mean place, centred on 0."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean_place = np.cumsum(count) - (count + 1) / 2
    return np.asarray(mean_place[place.ravel()] - (values.size - 1) / 2)


def _widest_step(grid: StepGrid, own: Floats, steps: pl.DataFrame) -> tuple[Evidence, ...]:
    """Return the step with the largest imbalance, on its longest rank."""
    column = int((own.max(axis=0) - own.mean(axis=0)).argmax())
    rank, step = grid.ranks[int(own[:, column].argmax())], grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    return tuple(
        Evidence(
            table="steps",
            rank=rank,
            start_ns=start,
            end_ns=end,
            note=text("step {step}: this rank is the longest", step=step),
        )
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
