"""Slow workers and uneven work from tables of pipeline operations, without records of the hosts.

The sample is the operation, not the step: a forward or backward of one microbatch against the same one of the other
replicas. So a single step with enough microbatches is judged, and a long one widens nothing. What findings cost is what
the replay of the steps says, of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity
from rankscope.analysis.metrics.step_matrix import robust_deviation
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.pipeline_ops import BACKWARD, FORWARD
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.replay.pipeline import OpGrid, even_by, op_grid
from rankscope.analysis.replay.pipeline_plan import Floats, ends
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotReplayable, NotResolvable

__all__ = ["CHECKS", "resolution_of_slow_workers", "resolution_of_uneven_work", "slow_workers", "uneven_work"]

_LEAST = 0.02  # of the step: a fix that saves less is not reported
_MIN_Z = 5.0  # standard errors by which a worker must be longer than those that do the same
_PERSISTENT = 0.8  # share of the samples in which it must be
_AMONG_PEERS = 4.0  # standard deviations beyond the other workers' differences
_FEW, _MANY = 5, 10  # samples to judge at all; and from which a change in between is looked for
_MOST = 8  # slow workers of one run
_CORRELATED = 0.6  # forward and backward of uneven microbatches
_MAX_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class _Worker:
    """One rank, and by how much its computations are longer (logarithms): one value per sample, in order of time."""

    rank: int
    replica: int
    rows: list[int]
    excess: Floats
    first: int  # of the samples from which on, and until which, it is slow
    last: int
    per_step: bool

    @property
    def slow(self) -> Floats:
        return self.excess[self.first : self.last + 1]

    @property
    def factor(self) -> float:
        return float(np.exp(self.slow.mean()))

    @property
    def error(self) -> float:
        return float(self.slow.std(ddof=1) / len(self.slow) ** 0.5)


class _Cost(TypedDict):
    lost_ns_per_step: int
    lost_ns_total: int
    lost_fraction: float
    uncertainty_ns: int


def slow_workers(ops: pl.DataFrame, *, min_fraction: float = _LEAST) -> list[Finding]:
    """Name the ranks whose computations take longer than those of the same stage in other replicas."""
    grid, durations = _replayable(ops)
    found, _ = _slow(grid, durations, min_fraction)
    return [_slow_finding(grid, worker, saved) for worker, saved in sorted(found, key=lambda one: -one[1].mean())]


def resolution_of_slow_workers(ops: pl.DataFrame) -> int:
    """Return the cost of the largest slowness that would have been overlooked.

    Of the worker whose samples scatter most.
    """
    grid, durations = _replayable(ops)
    workers = _workers(grid, durations)
    step_ns = float(grid.measured_ns.mean())
    busy_ns = max(float(durations[worker.rows].sum(axis=0).mean()) for worker in workers)
    return round(max(_LEAST * step_ns, busy_ns * _MIN_Z * max(worker.error for worker in workers)))


def uneven_work(ops: pl.DataFrame, *, min_fraction: float = 0.03) -> list[Finding]:
    """Report microbatches whose work differs from one to the next, on all stages alike."""
    grid, durations = _replayable(ops)
    with suppress(NotResolvable):  # one replica, or too few operations: microbatches can be compared all the same
        _, durations = _slow(grid, durations, _LEAST)
    common, correlation = _common(grid, durations)
    even = _without(grid, durations, common)
    saved = ends(grid.plan, durations) - ends(grid.plan, even)
    step_ns, lost = float(grid.measured_ns.mean()), float(saved.mean())
    scatter = 1.96 * float(saved.std(ddof=1)) / len(saved) ** 0.5 if len(saved) > 1 else lost
    # That lengths vary, by how much from step to step, is what makes the loss: few steps show it, and not how much.
    half_width = min(scatter, lost) if len(saved) < _FEW else scatter
    sure = np.arctanh(min(correlation, 0.999)) * max(common.size - 3, 0) ** 0.5 > _MIN_Z
    if correlation < _CORRELATED or not sure or lost < min_fraction * step_ns:
        return []
    if lost <= half_width and len(saved) >= _FEW:
        return []
    worst = int(saved.argmax())
    start, longer = int(grid.step_start_ns[worst]), duration(float(saved[worst]))
    note = text("step {step}: uneven microbatches make it {lost} longer", step=grid.steps[worst], lost=longer)
    return [
        Finding(
            detector="load_imbalance",
            severity=severity(lost / step_ns),
            title=text(
                "Load imbalance: microbatches differ by {scatter} on all stages, and the pipeline waits for the "
                "longest",
                scatter=percent(float(common.std())),
            ),
            where=text("forward and backward"),
            advice=text(
                "Give every microbatch the same cost: bucket by length, or pack sequences to a token budget, over the "
                "microbatches of a step and over the replicas."
            ),
            ranks=tuple(sorted(set(grid.ranks.ravel().tolist()))),
            fix="balance",
            evidence=(Evidence(table="ops", start_ns=start, end_ns=start + round(grid.measured_ns[worst]), note=note),),
            **_cost(grid, saved, half_width),
        )
    ]


def resolution_of_uneven_work(ops: pl.DataFrame) -> int:
    """Return the smallest cost that is reported."""
    grid, durations = _replayable(ops)
    _common(grid, durations)
    return round(0.03 * float(grid.measured_ns.mean()))


CHECKS = {
    "slow_rank": (slow_workers, resolution_of_slow_workers),
    "load_imbalance": (uneven_work, resolution_of_uneven_work),
}


def _replayable(ops: pl.DataFrame) -> tuple[OpGrid, Floats]:
    """Return the operations and their own time. Not resolvable where a replay of them misses the steps."""
    try:
        grid = op_grid(ops)
    except NotReplayable as reason:
        raise NotResolvable(reason.args[0]) from None
    durations = grid.duration_ns
    error = float(np.median(np.abs(ends(grid.plan, durations) / grid.measured_ns - 1)))
    if error > _MAX_ERROR:
        raise NotResolvable(
            text(
                "a replay of the steps misses their length by {error}: something that takes time was not recorded",
                error=percent(error),
            )
        )
    return grid, durations


def _computing(grid: OpGrid) -> list[int]:
    return [i for i, key in enumerate(grid.keys) if key.kind in (FORWARD, BACKWARD)]


# ---------------------------------------------------------------- slow workers


def _slow(grid: OpGrid, durations: Floats, least: float) -> tuple[list[tuple[_Worker, Floats]], Floats]:
    """Return the slow workers, the costliest first, with what each step would save; and the durations without them."""
    found: list[tuple[_Worker, Floats]] = []
    step_ns = float(grid.measured_ns.mean())
    for _ in range(_MOST):
        workers = _workers(grid, durations)
        now = ends(grid.plan, durations)
        tried = []
        for worker in (one for one in workers if _clear(one, workers)):
            without = _like_peers(durations, worker)
            tried.append((worker, now - ends(grid.plan, without), without))
        tried = [one for one in tried if one[1].mean() >= least * step_ns]
        if not tried:
            break
        worker, saved, durations = max(tried, key=lambda one: float(one[1].mean()))
        found.append((worker, saved))
    return found, durations


def _workers(grid: OpGrid, durations: Floats) -> list[_Worker]:
    """All ranks that compute. Not resolvable without other replicas, or with too few operations.

    A long microbatch lengthens all stages of its replica: what the others of them have is taken away.
    """
    if grid.ranks.shape[1] < 2:
        raise NotResolvable(
            text("each pipeline stage has one rank only, so no rank has a peer that does the same work")
        )
    rows = _computing(grid)
    beyond = np.log(np.maximum(durations[rows], 1.0))
    beyond -= _of_others(beyond)
    ranks = grid.ranks[rows]
    places = [np.flatnonzero(ranks[:, 0] == rank) for rank in dict.fromkeys(ranks[:, 0].tolist())]
    seq, kind = np.array([grid.keys[i].seq for i in rows]), np.array([grid.keys[i].kind == FORWARD for i in rows])
    workers = []
    for place in places:
        context = np.zeros_like(beyond[place])
        others = np.setdiff1d(np.arange(len(rows)), place)
        for at, row in enumerate(place) if len(others) else ():
            same = others[(seq[others] == seq[row]) & (kind[others] == kind[row])]
            if len(same):
                context[at] = np.median(beyond[same], axis=0)
        for replica in range(ranks.shape[1]):
            # Two replicas of two stages do not show which is slow: it is the one that is longer than its peers itself.
            alone = (beyond[place] - context)[:, :, replica]
            samples, per_step = _samples(alone, seq[place])
            own, _ = _samples(beyond[place][:, :, replica], seq[place])
            first, last = _stretch(samples)
            if own[first : last + 1].mean() < 0.5 * samples[first : last + 1].mean():
                samples, first, last = np.zeros_like(samples), 0, len(samples) - 1
            rank = int(ranks[place[0], replica])
            workers.append(_Worker(rank, replica, [rows[i] for i in place], samples, first, last, per_step))
    return workers


def _of_others(values: Floats) -> Floats:
    """Return for each replica (last axis) the median of the others'."""
    size = values.shape[-1]
    return np.stack([np.median(np.delete(values, replica, axis=-1), axis=-1) for replica in range(size)], axis=-1)


def _samples(beyond: Floats, seq: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> tuple[Floats, bool]:
    """One value per step of [operation, step]; of few steps one per stretch of microbatches. The second: per step."""
    if beyond.shape[1] >= _FEW:
        return beyond.mean(axis=0), True
    each = beyond[np.argsort(seq, kind="stable")].T.ravel()
    blocks = min(max(round(len(each) ** 0.5), _FEW), len(each))
    if blocks < _FEW:
        raise NotResolvable(
            text("{n} operations of each rank are too few to compare it with others", n=len(each)), unclear=True
        )
    return np.array([block.mean() for block in np.array_split(each, blocks)]), False


def _stretch(samples: Floats) -> tuple[int, int]:
    """Return the samples in which a worker is slow: all, or those before or after a clear change."""
    size = len(samples)
    whole = (0, size - 1)
    if size < _MANY:
        return whole
    cuts = range(_FEW, size - _FEW + 1)
    apart = [_difference(samples[:cut], samples[cut:]) for cut in cuts]
    at = int(np.abs(apart).argmax())
    cut = cuts[at]
    before, after = float(np.median(samples[:cut])), float(np.median(samples[cut:]))
    if abs(apart[at]) < _MIN_Z or min(before, after) > 0.5 * max(before, after):
        return whole
    return (cut, size - 1) if after > before else (0, cut - 1)


def _difference(before: Floats, after: Floats) -> float:
    """Return the difference of two means in standard errors."""
    error = (before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after)) ** 0.5
    return float((after.mean() - before.mean()) / max(error, 1e-9))


def _clear(worker: _Worker, workers: Sequence[_Worker]) -> bool:
    """Say whether it is slower than its peers in most samples, and by more than others differ from theirs by chance."""
    slow = worker.slow
    mean = float(slow.mean())
    others = np.array([one.excess.mean() for one in workers if one.rank != worker.rank])
    by_chance = float(robust_deviation(others)) if len(others) > 2 else 0.0
    return (
        mean > _MIN_Z * worker.error
        and mean > _AMONG_PEERS * by_chance
        and float((slow > 0).mean()) >= _PERSISTENT
        and float(np.median(slow)) > 0.5 * mean
    )


def _like_peers(durations: Floats, worker: _Worker) -> Floats:
    """Return the durations with the worker as fast as its peers while it is slow: its microbatches stay unequal.

    Another rank's times in their place would also bring that one's luck with its microbatches.
    """
    changed: Floats = durations.copy()
    when = slice(worker.first, worker.last + 1) if worker.per_step else slice(None)
    changed[worker.rows, when, worker.replica] /= worker.factor
    return changed


def _slow_finding(grid: OpGrid, worker: _Worker, saved: Floats) -> Finding:
    lost, step_ns = float(saved.mean()), float(grid.measured_ns.mean())
    whole = len(worker.slow) == len(worker.excess)
    steps = () if whole or not worker.per_step else grid.steps[worker.first : worker.last + 1]
    of_slow = saved[worker.first : worker.last + 1] if worker.per_step else saved
    share = len(of_slow) / len(saved)
    scatter = 1.96 * float(of_slow.std(ddof=1)) / len(of_slow) ** 0.5 * share if len(of_slow) > 1 else 0.0
    half_width = max(scatter, 1.96 * worker.error / max(float(worker.slow.mean()), 1e-9) * lost)
    stage = grid.keys[worker.rows[0]].stage
    if not steps:
        since = ""
    elif worker.first:
        since = text(" from step {step} on", step=steps[0])
    else:
        since = text(" until step {step}", step=steps[-1])
    return Finding(
        detector="slow_rank",
        severity=severity(lost / step_ns),
        title=text(
            "Rank {rank} computes {factor:.2f} × as long as the other ranks of its stage{since}",
            rank=worker.rank,
            factor=worker.factor,
            since=since,
        ),
        where=text("forward and backward of stage {stage}", stage=stage),
        advice=text(
            "See what is different on {ranks}: clock speed, temperature, other processes on the host, a part that "
            "fails. Move the worker to another machine to be sure.",
            ranks=named("rank", (worker.rank,)),
        ),
        ranks=(worker.rank,),
        steps=tuple(steps),
        fix=str(Fix.numbered("rank", worker.rank)),
        evidence=_longest(grid, worker),
        **_cost(grid, saved, half_width),
    )


def _cost(grid: OpGrid, saved: Floats, half_width: float) -> _Cost:
    lost = float(saved.mean())
    return _Cost(
        lost_ns_per_step=round(lost),
        lost_ns_total=round(lost * len(saved)),
        lost_fraction=lost / float(grid.measured_ns.mean()),
        uncertainty_ns=round(half_width),
    )


def _longest(grid: OpGrid, worker: _Worker) -> tuple[Evidence, ...]:
    """Return the worker's longest computation beside those of its peers."""
    length = grid.end_ns - grid.start_ns
    beyond = length[worker.rows, :, worker.replica] - np.median(
        np.delete(length[worker.rows], worker.replica, axis=2), axis=2
    )
    op, step = (int(n) for n in np.unravel_index(int(beyond.argmax()), beyond.shape))
    row, begin = worker.rows[op], int(grid.step_start_ns[step])
    return (
        Evidence(
            table="ops",
            rank=worker.rank,
            start_ns=begin + int(grid.start_ns[row, step, worker.replica]),
            end_ns=begin + int(grid.end_ns[row, step, worker.replica]),
            note=text(
                "{kind} of step {step}: {length}, {beyond} longer than on its peers",
                kind=grid.keys[row].kind,
                step=grid.steps[step],
                length=duration(float(length[row, step, worker.replica])),
                beyond=duration(float(beyond[op, step])),
            ),
        ),
    )


# ---------------------------------------------------------------- uneven microbatches


def _common(grid: OpGrid, durations: Floats) -> tuple[Floats, float]:
    """Return the excess of each microbatch (microbatch, step, replica) on all stages alike, as a logarithm.

    And how forward and backward of a microbatch go together: data lengthens both, noise does not.
    """
    rows = _computing(grid)
    seqs = sorted({grid.keys[i].seq for i in rows})
    if len(seqs) < 2:
        raise NotResolvable(text("a step has one microbatch only, so microbatches cannot be compared"))
    halves, whole = [], []
    for kind in (FORWARD, BACKWARD):
        of_stages = []
        for stage in grid.stages:
            mine = {grid.keys[i].seq: i for i in rows if grid.keys[i].stage == stage and grid.keys[i].kind == kind}
            if sorted(mine) == seqs:
                logs = np.log(np.maximum(durations[[mine[seq] for seq in seqs]], 1.0))
                of_stages.append(_centred(logs))
        if not of_stages:
            raise NotResolvable(
                text("forward and backward are not distinguished, so load imbalance cannot be distinguished from noise")
            )
        halves.append(np.median(of_stages, axis=0))
        whole += of_stages
    x, y = (half.ravel() for half in halves)
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return np.asarray(np.median(whole, axis=0)), float((x * y).sum() / scale) if scale > 0 else 0.0


def _centred(logs: Floats) -> Floats:
    """Without what is usual in the step and, with enough steps, what a replica or a place in it always has."""
    beyond: Floats = logs - logs.mean(axis=(0, 2), keepdims=True)
    if logs.shape[1] >= _FEW:
        beyond -= np.median(beyond, axis=(1, 2), keepdims=True)
        beyond -= beyond.mean(axis=(0, 1), keepdims=True)
    return beyond


def _without(grid: OpGrid, durations: Floats, common: Floats) -> Floats:
    """Return the durations with even microbatches: each stage has as much to do in the step as before."""
    seqs = sorted({grid.keys[i].seq for i in _computing(grid)})
    factor = np.ones_like(durations)
    for i in _computing(grid):
        factor[i] = np.exp(-common[seqs.index(grid.keys[i].seq)])
    return even_by(grid, durations, factor)
