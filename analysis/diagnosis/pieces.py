"""Checks of a profiler's capture, from what its devices compute in pieces of equally many kernels.

**Uneven work** in two to four steps, or where forward is not named: what changes from step to step of how much longer a
rank computes than its peers.

**Long stages** of a pipeline: a capture has their kernels, and does not say which microbatch is whose. What a stage
computes in a step is compared with the mean of the other stages. In a pipeline that is full a step takes as long as its
longest stage computes, and the passage of one microbatch through the others: so what a stage computes longer than they
do is what it costs, but no more than they wait longer than it. The last stage of most has the output layer: less than
5 % of the step is not reported.

**Bubbles.** The stage that waits least for others is the one that limits the step: what it waits goes away with more
microbatches only, or another schedule.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import (
    FEW_STEPS,
    judged_grid,
    load_imbalance,
    longest_rows,
    peers_grid,
    price,
    visible,
)
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, Ints, StepGrid, estimate
from rankscope.analysis.metrics.uneven_pieces import pieces_of_steps, uneven_pieces
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.replay.pipeline import theory_fraction
from rankscope.analysis.text.message import joined, plural, text
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.parallelism import roles, roles_of, schedule
from rankscope.errors import NotResolvable

__all__ = ["BUBBLES", "STAGES", "UNEVEN"]

_MOVED = 3.0  # standard errors by which ranks differ from themselves in other steps
_OF_SLOW_RANKS = 0.6  # of the loss: with more that goes away with what ranks always take longer, it is theirs
_MORE_MICROBATCHES = 4  # times
_IN_EACH_REPLICA = 0.5  # of the mean excess: so much longer is each rank of a stage that is too long


def uneven_work(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    kernels: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Report work that is uneven in a way that changes from step to step."""
    grid, role = _with_peers(breakdown, collectives, groups, regions)
    few = uneven_pieces(kernels, steps, grid, role)
    longer = few.of_uneven_work(role)
    error = few.error.mean() * few.own.max(axis=0).mean() / len(longer) ** 0.5
    lost = Estimate(float(longer.mean()), 1.96 * float(error))
    if few.moved < _MOVED or lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    changes = len(np.unique(few.own.argmax(axis=0))) > 1
    is_no_ranks_own = changes and few.of_slow_ranks().sum() < _OF_SLOW_RANKS * longer.sum()
    return [load_imbalance.finding_of(grid, few.own, lost, steps)] if is_no_ranks_own else []


def resolution_of_uneven_work(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    kernels: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> int:
    """Return the smallest cost that would have been reported."""
    grid, role = _with_peers(breakdown, collectives, groups, regions)
    few = uneven_pieces(kernels, steps, grid, role)
    return visible(grid, max(min_fraction * grid.step_ns, _MOVED * float((few.error * few.own).max())))


def _with_peers(
    breakdown: pl.DataFrame, collectives: pl.DataFrame, groups: pl.DataFrame, regions: pl.DataFrame | None
) -> tuple[StepGrid, Ints]:
    """Return the ranks that have peers, and the role of each."""
    grid = peers_grid(breakdown, FEW_STEPS)
    role = roles_of(grid.ranks, groups, regions, collectives)
    has_peers = np.bincount(role)[role] > 1
    if not has_peers.any():
        raise NotResolvable(load_imbalance.NO_PEERS)
    return grid.only(has_peers), role[has_peers]


def long_stage(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    kernels: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name the stage that computes longer than the others, if they wait for it."""
    grid, stage, pieces = _of_stages(breakdown, steps, kernels, collectives, groups, regions)
    rows = {number: stage == number for number in np.unique(stage)}
    excess = {number: pieces[mine].mean(axis=0) - pieces[~mine].mean(axis=0) for number, mine in rows.items()}
    worst = max(excess, key=lambda number: float(excess[number].sum()))
    mine = rows[worst]
    ns, error = _mean(excess[worst], len(grid.steps))
    own = pieces.sum(axis=(1, 2)) / len(grid.steps)
    others = float(own[~mine].mean())
    blocked = grid.blocked.mean(axis=1)
    lost = Estimate(min(ns, float(np.median(blocked[~mine]) - np.median(blocked[mine]))), 1.96 * error)
    in_each = (own[mine] - others).min() >= _IN_EACH_REPLICA * ns
    if ns < min_z * error or lost.ns < min_fraction * grid.step_ns or not lost.clear or not in_each:
        return []
    ranks = tuple(rank for rank, is_mine in zip(grid.ranks, mine, strict=True) if is_mine)
    even_ns = lost.ns * (1 - 1 / len(rows))
    brings = text("; even stages would save up to {even} per step", even=duration(even_ns))
    return [
        Finding(
            detector="stage_imbalance",
            title=text(
                "Pipeline stage {stage} is too long: it computes {own} per step, the others {others}",
                stage=int(worst),
                own=duration(float(own[mine].mean())),
                others=duration(others),
            ),
            where=text("stage {stage}", stage=int(worst)),
            advice=text("Move layers from stage {stage} to the others{brings}.", stage=int(worst), brings=brings),
            ranks=ranks,
            fix=str(Fix.numbered("stage", int(worst))),
            evidence=longest_rows(kernels.filter(pl.col("rank").is_in(ranks), pl.col("work") == "compute"), "kernels"),
            **price(grid, lost, even_ns),
        )
    ]


def resolution_of_long_stage(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    kernels: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_z: float = 5.0,
) -> int:
    """Return the shortest excess of a stage that would have been named."""
    grid, stage, pieces = _of_stages(breakdown, steps, kernels, collectives, groups, regions)
    errors = []
    for number in np.unique(stage):
        mine = stage == number
        errors.append(_mean(pieces[mine].mean(axis=0) - pieces[~mine].mean(axis=0), len(grid.steps))[1])
    return visible(grid, max(min_fraction * grid.step_ns, min_z * max(errors)))


def bubbles(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.3,
) -> list[Finding]:
    """Report a pipeline of which every stage waits for others for a large part of the step."""
    grid, lost = _of_bubbles(breakdown, collectives, groups, regions)
    if lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    planned = schedule(groups, regions, collectives)
    said: str = text(
        "A step idles so long until the pipeline is full, and until it has drained: {times} times as many microbatches "
        "would save three quarters of it, an interleaved or zero-bubble schedule a part.",
        times=_MORE_MICROBATCHES,
    )
    if planned is not None:
        stages, microbatches = planned
        share = percent(theory_fraction(stages, microbatches))
        theory = plural(
            "With {number} microbatch on {stages} stages 1F1B idles {share} of its time.",
            "With {number} microbatches on {stages} stages 1F1B idles {share} of its time.",
            microbatches,
            number=microbatches,
            stages=stages,
            share=share,
        )
        said = joined(" ", (theory, said))
    of_ranks = phases.filter(pl.col("rank").is_in(grid.ranks), pl.col("part").is_in(["bubble", "wait"]))
    return [
        Finding(
            detector="pipeline_bubble",
            title=text(
                "Pipeline bubble: every stage waits for others for {lost} per step or more", lost=duration(lost.ns)
            ),
            where=text("all stages"),
            advice=said,
            evidence=longest_rows(of_ranks, "collectives"),
            **price(grid, lost, lost.ns * (1 - 1 / _MORE_MICROBATCHES)),
        )
    ]


def resolution_of_bubbles(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.3,
) -> int:
    """Return the least wait of every stage that would have been reported."""
    grid, lost = _of_bubbles(breakdown, collectives, groups, regions)
    return visible(grid, max(min_fraction * grid.step_ns, lost.half_width_ns))


def _of_bubbles(
    breakdown: pl.DataFrame, collectives: pl.DataFrame, groups: pl.DataFrame, regions: pl.DataFrame | None
) -> tuple[StepGrid, Estimate]:
    """Return the ranks of the pipelines, and how long the one waits that waits least.

    What was not matched across ranks counts as far as the schedule has such a bubble by itself.
    """
    grid, _ = _in_stages(breakdown, collectives, groups, regions)
    planned = schedule(groups, regions, collectives)
    theory = 0.0 if planned is None else theory_fraction(*planned)
    waits = grid.of("bubble") + grid.of("wait")
    waits += np.clip(theory * grid.step_ns - waits, 0, grid.of("unsplit"))
    least = waits[waits.mean(axis=1).argmin()]
    if len(least) > 1:
        return grid, estimate(least)
    return grid, Estimate(float(least[0]), 1.96 * float(waits.std()))


UNEVEN = (uneven_work, resolution_of_uneven_work)
STAGES = (long_stage, resolution_of_long_stage)
BUBBLES = (bubbles, resolution_of_bubbles)


def _of_stages(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    kernels: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame | None,
) -> tuple[StepGrid, Ints, Floats]:
    """Return the ranks of the pipelines, the stage of each, and what they compute, (rank, step, piece) in ns."""
    grid, stage = _in_stages(breakdown, collectives, groups, regions)
    return grid, stage, pieces_of_steps(kernels, steps, grid)


def _in_stages(
    breakdown: pl.DataFrame, collectives: pl.DataFrame, groups: pl.DataFrame, regions: pl.DataFrame | None
) -> tuple[StepGrid, Ints]:
    """Return the ranks of the pipelines, and the stage of each."""
    held = roles(groups, regions, collectives)
    grid = judged_grid(breakdown, 1)
    grid = grid.only(np.array([rank in held for rank in grid.ranks], dtype=bool))
    if len({held[rank] for rank in grid.ranks}) < 2:
        raise NotResolvable(text("there is only one pipeline stage"))
    return grid, np.array([held[rank][0] for rank in grid.ranks])


def _mean(excess: Floats, steps: int) -> tuple[float, float]:
    """Return ns per step of (step, piece), and the standard error by the scatter of the pieces."""
    values = excess.ravel()
    return float(values.sum()) / steps, float(values.std(ddof=1)) * len(values) ** 0.5 / steps
