"""One pipeline stage has more work than the others, and they wait for it.

**Signal.** The steps are replayed: as they were, with every operation taking the mean (a computation) or the median (a
communication) of its kind, and with that for one stage only. A stage is too long if

- making this stage ideal saves at least `min_saved` of an ideal step, and
- at least `min_share` of what making all ideal saves, and
- it is usually long, in every replica: the median over steps of what it takes longer than the other stages is at least
  `min_usual` of its mean excess, and
- what it costs (below) is `min_saved` of an ideal step too, and clear of its scatter over the steps.

A recorded run has these operations where its schedule is one of `torch.distributed.pipelining`: forward and backward of
each microbatch, and what its neighbours sent. Between nodes their clocks must be known to a tenth of a forward.

The cost is by how much the steps are longer than if this stage took as long as the others do (the median of theirs):
its computations keep their scatter, and transfers take what they took. The advice says what even layers would bring,
which is less where the work cannot be done away with. A single step is enough: then the scatter over its microbatches
says how sure the cost is.

There is no verdict if the replay of the steps as they were misses their measured length by more than `max_error`.

**Why it costs time.** A pipeline runs at the pace of its slowest stage: the others idle once per microbatch.

**False positives.** Where there is only one replica, a stage on slow hardware looks the same.

**What to try.** Give the stage fewer layers. The last stage also computes the loss and the output layer, the first the
embedding: count them when layers are distributed.

**Source.** ByteDance's what-if analysis of stragglers: its slowdown S and its share of one stage, of every stage here
and not of the last only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.parts import OWN_WORK
from rankscope.analysis.model.pipeline_ops import BACKWARD, COMPUTES, FORWARD
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.replay.pipeline import (
    Key,
    OpGrid,
    as_other_stages,
    communicates,
    even_stages,
    op_grid,
)
from rankscope.analysis.replay.pipeline_plan import Floats, WhatIf, ends, ideal
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotReplayable, NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    explains=("slow_rank", "load_imbalance"),
    parts=OWN_WORK,
    lost_as=AS_WAITING,
)


def detect(
    ops: pl.DataFrame,
    steps: pl.DataFrame | None = None,
    *,
    min_saved: float = 0.03,
    min_share: float = 0.5,
    min_usual: float = 0.5,
    max_error: float = 0.05,
) -> list[Finding]:
    """Name the stages that are too long, the costliest first. `steps` may be longer than their operations."""
    grid, whatif = _replayed(ops, max_error)
    if whatif.slowdown <= 1:
        return []
    length = grid.measured_ns if steps is None else (steps["end_ns"] - steps["start_ns"]).to_numpy()
    shares = {stage: whatif.share(_of_stage(grid, stage)) for stage in grid.stages}
    needed = max(min_share, min_saved / (whatif.slowdown - 1))
    long = [s for s in shares if shares[s] >= needed and _usually(grid, s, min_usual)]
    findings = (_finding(grid, whatif, s, long, float(np.mean(length))) for s in sorted(long, key=lambda s: -shares[s]))
    least = min_saved * whatif.ideal_step_ns
    return [f for f in findings if f.lost_ns_per_step > f.uncertainty_ns and f.lost_ns_per_step >= least]


def resolution_ns(ops: pl.DataFrame, *, min_saved: float = 0.03, max_error: float = 0.05) -> int:
    """Return the saving per step of the shortest stage that is named."""
    _, whatif = _replayed(ops, max_error)
    return round(min_saved * whatif.ideal_step_ns)


def _replayed(ops: pl.DataFrame, max_error: float) -> tuple[OpGrid, WhatIf]:
    """Return the steps and their replays, if those can be trusted."""
    try:
        grid = op_grid(ops)
    except NotReplayable as reason:
        raise NotResolvable(reason.args[0]) from None
    if len(grid.stages) < 2:
        raise NotResolvable(text("there is only one pipeline stage"))
    own = grid.duration_ns
    whatif = WhatIf(grid.plan, own, ideal(own, grid.kinds, communicates))
    measured = float(grid.measured_ns.mean())
    error = abs(whatif.actual_step_ns - measured) / measured
    if error > max_error:
        raise NotResolvable(
            text(
                "a replay of the steps misses their length by {error}: something that takes time was not recorded",
                error=percent(error),
            )
        )
    return grid, whatif


def _of_stage(grid: OpGrid, stage: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.array([key.stage == stage for key in grid.keys])[:, None, None]


def _usually(grid: OpGrid, stage: int, min_usual: float) -> bool:
    """Say whether the stage is long in most steps of every replica: else it is a slow rank, or a stall now and then."""
    own, others = _microbatch_ns(grid, stage, np.mean)
    usual_own, usual_others = _microbatch_ns(grid, stage, np.median)
    return bool((usual_own / usual_others - 1).min() >= min_usual * (own.mean() / others.mean() - 1))


def _finding(grid: OpGrid, whatif: WhatIf, stage: int, long: Sequence[int], step_ns: float) -> Finding:
    length = replayed_steps(whatif)
    saved = length - ends(grid.plan, as_other_stages(grid, whatif.actual_ns, stage))
    even = length - ends(grid.plan, even_stages(grid, whatif.actual_ns))
    lost = float(saved.mean())
    scatter = 1.96 * float(saved.std(ddof=1)) / len(saved) ** 0.5 if len(saved) > 1 else _of_microbatches(grid, stage)
    half_width = scatter if len(saved) > 1 else scatter * lost
    fraction = lost / step_ns
    own, others = (float(ns.mean()) for ns in _microbatch_ns(grid, stage, np.mean))
    ranks = tuple(sorted({int(r) for i, key in enumerate(grid.keys) if key.stage == stage for r in grid.ranks[i]}))
    return Finding(
        detector="stage_imbalance",
        severity=severity(fraction),
        title=text(
            "Pipeline stage {stage} is too long: {own} per microbatch, the others {others}",
            stage=stage,
            own=duration(own),
            others=duration(others),
        ),
        where=_where(grid, whatif, stage),
        advice=_advice(grid, stage, long, ranks, float(even.mean()), lost),
        ranks=ranks,
        lost_ns_per_step=round(lost),
        lost_ns_total=round(lost * len(grid.steps)),
        lost_fraction=fraction,
        uncertainty_ns=round(half_width),
        fix=str(Fix.numbered("stage", stage)),
        evidence=_longest(grid, stage),
    )


def _of_microbatches(grid: OpGrid, stage: int) -> float:
    """Return how sure it is by how much a stage is longer, as a share of that, from the scatter of its microbatches."""
    own, others = (_each_ns(grid, chosen) for chosen in ([stage], [s for s in grid.stages if s != stage]))
    apart = float(own.mean() - others.mean())
    error = float(np.hypot(own.std() / own.size**0.5, others.std() / others.size**0.5))
    return 1.96 * error / apart if apart > 0 else 1.0


def _each_ns(grid: OpGrid, stages: Sequence[int]) -> Floats:
    """Forward and backward of each microbatch on these stages, together."""
    length = grid.end_ns - grid.start_ns
    seqs = sorted({key.seq for key in grid.keys if key.kind == FORWARD})
    rows = [[i for i, key in enumerate(grid.keys) if key.stage in stages and key.seq == seq] for seq in seqs]
    computes = [[i for i in of_one if grid.keys[i].kind in COMPUTES] for of_one in rows]
    return np.array([length[of_one].sum(axis=0) / len(stages) for of_one in computes])


def _advice(
    grid: OpGrid, stage: int, long: Sequence[int], ranks: tuple[int, ...], even_ns: float, cost_ns: float
) -> str:
    """Return the advice; if all stages of a rank are long, the rank itself may be slow."""
    held = {key.stage for i, key in enumerate(grid.keys) if set(grid.ranks[i].tolist()) <= set(ranks)}
    if len(held) > 1 and held <= set(long):
        return text(
            "All stages of {ranks} are too long: see whether it is slow itself (clock speed, temperature, other "
            "processes) before layers are moved.",
            ranks=named("rank", ranks),
        )
    brings = text("; even stages would save {even} per step", even=duration(even_ns)) if even_ns > 0 else ""
    if 0 < even_ns < cost_ns:
        brings = text("{brings}, less than its cost, since the others then compute its layers", brings=brings)
    if stage == max(grid.stages):
        return text(
            "Move layers from stage {stage} to the others: the last stage also computes the output layer and the "
            "loss{brings}.",
            stage=stage,
            brings=brings,
        )
    return text("Move layers from stage {stage} to the others{brings}.", stage=stage, brings=brings)


def replayed_steps(whatif: WhatIf) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return the length of each step as replayed with what was measured."""
    return whatif.without_ns(np.zeros((1, 1, 1), dtype=bool))


def _microbatch_ns(grid: OpGrid, stage: int, over_steps: Callable[..., Floats]) -> tuple[Floats, Floats]:
    """Forward and backward of one microbatch, by replica: on this stage, and on the mean of the others."""
    length = over_steps(grid.end_ns - grid.start_ns, axis=1)

    def per_microbatch(of: int) -> Floats:
        rows = [[i for i, key in enumerate(grid.keys) if key == Key(of, kind, key.seq)] for kind in COMPUTES]
        return np.asarray(sum(length[of_kind].mean(axis=0) for of_kind in rows if of_kind))

    return per_microbatch(stage), np.mean([per_microbatch(s) for s in grid.stages if s != stage], axis=0)


def _where(grid: OpGrid, whatif: WhatIf, stage: int) -> str:
    """Return the kind of operation that exceeds its ideal most on this stage."""
    excess = (whatif.actual_ns - whatif.ideal_ns).mean(axis=(1, 2))
    per_kind: dict[str, float] = {}
    for i, key in enumerate(grid.keys):
        if key.stage == stage:
            per_kind[key.kind] = per_kind.get(key.kind, 0.0) + float(excess[i])
    return text("stage {stage}, {kind}", stage=stage, kind=max(per_kind, key=lambda kind: per_kind[kind]))


def _longest(grid: OpGrid, stage: int) -> tuple[Evidence, ...]:
    """Return the stage's longest forward and backward in the middle one of the steps."""
    middle = int(np.argsort(grid.measured_ns)[len(grid.steps) // 2])
    start = grid.step_start_ns[middle]
    rows = []
    for kind in (FORWARD, BACKWARD):
        ops = [i for i, key in enumerate(grid.keys) if key.stage == stage and key.kind == kind]
        length = (grid.end_ns - grid.start_ns)[ops, middle]
        op, replica = (int(n) for n in np.unravel_index(int(length.argmax()), length.shape))
        rows.append(
            Evidence(
                table="ops",
                rank=int(grid.ranks[ops[op], replica]),
                start_ns=int(start + grid.start_ns[ops[op], middle, replica]),
                end_ns=int(start + grid.end_ns[ops[op], middle, replica]),
                note=text(
                    "longest {kind} of step {step}: {length}",
                    kind=kind,
                    step=grid.steps[middle],
                    length=duration(float(length.max())),
                ),
            )
        )
    return tuple(rows)
