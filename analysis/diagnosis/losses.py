"""Where time is lost, from the same breakdown that the report shows, and how much of it the findings explain."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.metrics.intervals import covered_ns
from rankscope.analysis.metrics.step_matrix import StepGrid, nearly_all_in, step_grid, sums
from rankscope.analysis.model.finding import Finding, Loss
from rankscope.analysis.model.parts import QUEUED, UNSEEN
from rankscope.analysis.timeline.device_time import by_rank

__all__ = ["LABEL", "LOST", "losses_of", "lost_fraction", "unexplained_fraction"]

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
_MUCH = 1 / 3  # of the devices' idle time: a call that takes more is said
LABEL = {"queued": QUEUED, "unseen": UNSEEN}  # the rows of the part that are lost so; elsewhere all of them


def losses_of(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    launches: pl.DataFrame,
    findings: Sequence[Finding],
    scheduled: float = 0.0,
) -> tuple[Loss, ...]:
    """Return the losses of the mean step, the largest first, each with what the `findings` leave unexplained.

    A finding that follows from another one explains nothing besides it. `scheduled` is the share of the step that the
    schedule of a pipeline needs as its bubble. While a device waits for its host, `launches` say which call it makes.
    """
    grid = step_grid(breakdown)
    if not grid.steps or not grid.step_ns:
        return ()
    roots = [finding for finding in findings if finding.caused_by is None and finding.lost_ns_per_step]
    lengths = phases.with_columns(ns=pl.col("end_ns") - pl.col("start_ns"))
    known = {"bubble": scheduled}
    found = [
        _loss(kind, grid, lengths, launches, roots, known.get(kind, 0.0)) for kind in LOST if grid.of(LOST[kind]).any()
    ]
    return tuple(sorted((loss for loss in found if loss.most_ns), key=lambda loss: -loss.fraction))


def _call_in(gaps: pl.DataFrame, launches: pl.DataFrame) -> str:
    """Return the runtime call that takes most of these gaps' time, if it takes much of it; else an empty name."""
    total_ns, by_name = int(gaps["ns"].sum()), launches.select("rank", "name", "start_ns", "end_ns")
    lasts = by_name.group_by("name").agg(ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
    covered = dict.fromkeys(lasts.filter(pl.col("ns") > _MUCH * total_ns)["name"].sort(), 0.0)
    of_rank = dict(by_rank(gaps.sort("rank", "start_ns")))
    for rank, calls in by_rank(by_name.filter(pl.col("name").is_in([*covered])).sort("rank", "start_ns")):
        if rank in of_rank:
            start, end = (of_rank[rank][column].to_numpy() for column in ("start_ns", "end_ns"))
            for (name,), rows in calls.group_by("name"):
                covered[str(name)] += float(covered_ns(start, end, rows).sum())
    most = max(covered, key=lambda name: covered[name], default="")
    return most if most and covered[most] > _MUCH * total_ns else ""


def _loss(
    kind: str,
    grid: StepGrid,
    phases: pl.DataFrame,
    launches: pl.DataFrame,
    roots: Sequence[Finding],
    known: float,
) -> Loss:
    part = LOST[kind]
    rows = phases.filter(pl.col("part") == part)
    if kind in LABEL:
        rows = rows.filter(pl.col("label") == LABEL[kind])
    lost = sums(grid, rows, "ns") if kind in LABEL else grid.of(part)
    of_rank = lost.mean(axis=1)
    least, most = int(of_rank.argmin()), int(of_rank.argmax())
    fraction = float(of_rank.mean()) / grid.step_ns
    causes = [finding for finding in roots if kind in (spec_of(finding.detector).lost_as or LOST)]
    labels = rows.group_by("label").agg(pl.col("ns").sum()).sort("ns", "label", descending=[True, False])["label"]
    return Loss(
        kind=kind,
        ns_per_step=round(float(of_rank.mean())),
        fraction=fraction,
        where=labels[0] if len(labels) and kind not in LABEL else "",
        least_rank=grid.ranks[least],
        least_ns=round(float(of_rank[least])),
        most_rank=grid.ranks[most],
        most_ns=round(float(of_rank[most])),
        call=_call_in(rows, launches) if kind == "idle" else "",
        steps=tuple(grid.steps[at] for at in nearly_all_in(lost.mean(axis=0))),
        explained_by=tuple(dict.fromkeys(finding.detector for finding in causes)),
        unexplained_fraction=max(fraction - known - sum(finding.lost_fraction for finding in causes), 0.0),
    )


def lost_fraction(losses: Sequence[Loss]) -> float:
    """Return the share of the mean step that is lost in any way."""
    return sum(loss.fraction for loss in losses)


def unexplained_fraction(losses: Sequence[Loss]) -> float:
    """Return the share of the mean step that is lost for no known reason."""
    return sum(loss.unexplained_fraction for loss in losses)
