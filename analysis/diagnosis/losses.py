"""Where time is lost, from the same breakdown that the report shows, and how much of it the findings explain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, step_grid, sums
from rankscope.analysis.model.finding import Finding, Loss
from rankscope.analysis.model.parts import QUEUED, UNSEEN

__all__ = ["LOST", "losses_of", "lost_fraction", "unexplained_fraction"]

LOST = {  # kind -> the part of the breakdown
    "wait": "wait",
    "bubble": "bubble",
    "idle": "host",
    "queued": "other",
    "unseen": "other",
    "communication": "transfer",
    "unattributed": "unsplit",
    "input": "input",
    "gc": "gc",
    "compile": "compile",
    "checkpoint": "checkpoint",
}
_FEW, _AT_MOST = 1 / 3, 5  # of the steps
_NEARLY_ALL = 0.9  # of a loss
_LABEL = {"queued": QUEUED, "unseen": UNSEEN}  # the rows of the part that are lost so; elsewhere all of them


def losses_of(
    breakdown: pl.DataFrame, phases: pl.DataFrame, findings: Sequence[Finding], scheduled: float = 0.0
) -> tuple[Loss, ...]:
    """Return the losses of the mean step, the largest first, each with what the `findings` leave unexplained.

    A finding that follows from another one explains nothing besides it. `scheduled` is the share of the step that the
    schedule of a pipeline needs as its bubble.
    """
    grid = step_grid(breakdown)
    if not grid.steps or not grid.step_ns:
        return ()
    roots = [finding for finding in findings if finding.caused_by is None and finding.lost_ns_per_step]
    lengths = phases.with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    known = {"bubble": scheduled}
    found = [_loss(kind, grid, lengths, roots, known.get(kind, 0.0)) for kind in LOST if grid.of(LOST[kind]).any()]
    return tuple(sorted((loss for loss in found if loss.most_ns), key=lambda loss: -loss.fraction))


def _loss(kind: str, grid: StepGrid, phases: pl.DataFrame, roots: Sequence[Finding], known: float) -> Loss:
    part = LOST[kind]
    rows = phases.filter(pl.col("part") == part)
    if kind in _LABEL:
        rows = rows.filter(pl.col("label") == _LABEL[kind])
    lost = sums(grid, rows, "ns") if kind in _LABEL else grid.of(part)
    of_rank = lost.mean(axis=1)
    least, most = int(of_rank.argmin()), int(of_rank.argmax())
    fraction = float(of_rank.mean()) / grid.step_ns
    causes = [finding for finding in roots if kind in (spec_of(finding.detector).lost_as or LOST)]
    labels = rows.group_by("label").agg(pl.col("ns").sum()).sort("ns", "label", descending=[True, False])["label"]
    return Loss(
        kind=kind,
        ns_per_step=round(float(of_rank.mean())),
        fraction=fraction,
        where=labels[0] if len(labels) and kind not in _LABEL else "",
        least_rank=grid.ranks[least],
        least_ns=round(float(of_rank[least])),
        most_rank=grid.ranks[most],
        most_ns=round(float(of_rank[most])),
        steps=tuple(grid.steps[at] for at in _few(lost.mean(axis=0))),
        explained_by=tuple(dict.fromkeys(finding.detector for finding in causes)),
        unexplained_fraction=max(fraction - known - sum(finding.lost_fraction for finding in causes), 0.0),
    )


def _few(of_step: Floats) -> list[int]:
    """Return the steps that hold nearly all of a loss, where they are few: so that it may be none of every step."""
    most = np.sort(np.argsort(-of_step, kind="stable")[: min(int(_FEW * len(of_step)), _AT_MOST)])
    held = most[of_step[most] >= (1 - _NEARLY_ALL) * of_step.max(initial=0.0)]
    return held.tolist() if of_step[held].sum() >= _NEARLY_ALL * of_step.sum() else []


def lost_fraction(losses: Sequence[Loss]) -> float:
    """Return the share of the mean step that is lost in any way."""
    return sum(loss.fraction for loss in losses)


def unexplained_fraction(losses: Sequence[Loss]) -> float:
    """Return the share of the mean step that is lost for no known reason."""
    return sum(loss.unexplained_fraction for loss in losses)
