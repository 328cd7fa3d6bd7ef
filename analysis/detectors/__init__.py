"""One file, or a package, per thing that makes a job slow; being in this folder is the registration.

A detector is a module whose docstring is its manual page and which has

- `detector`, a `Detector`: its facts for the rest of rankscope
- `detect(<tables by name>, *, <thresholds>) -> list[Finding]`
- `resolution_ns(<tables by name>) -> int`: a loss per step below this could not have been seen

Both functions are pure. Parameters name the tables they read, which hold judged steps only; a table that a detector can
do without has the default None. A parameter of `detect` with the name of another detector gets its findings, or why it
was not checked. What detectors share is below.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TypedDict

import numpy as np
import polars as pl

from rankscope.analysis.metrics.exposed_communication import is_bounded
from rankscope.analysis.metrics.step_matrix import ENOUGH_STEPS, Estimate, StepGrid, step_grid, sums
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, how_to_profile, named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = [
    "ENOUGH_STEPS",
    "FEW_STEPS",
    "Price",
    "as_cause",
    "detectors",
    "judged_grid",
    "longest_regions",
    "longest_rows",
    "of_hosts",
    "peers_grid",
    "price",
    "refuse_unseen",
    "refuse_unsized",
    "severity",
    "spec_of",
    "specs",
    "transfer_grid",
    "visible",
]

FEW_STEPS = 2  # least number of steps for a mean, where it is very clear
_MOST_UNSPLIT = 0.1  # of the step: with more, transfer is not known
_MUCH_UNSPLIT = 0.03  # of the step: neither with more than that, if it is most of what ranks are blocked
_FOR_UNSEEN = 0.03  # of the step: so long ranks wait with others before these count
_VISIBLE = 0.5  # share of the step: if a larger loss could be hidden, silence proves nothing


class Price(TypedDict):
    """The fields of a finding that say what it costs."""

    severity: str
    lost_ns_per_step: int
    lost_ns_total: int
    lost_fraction: float
    uncertainty_ns: int
    gain_fraction: float | None


@cache
def detectors() -> Mapping[str, ModuleType]:
    """Every detector by its name, in alphabetical order."""
    names = sorted(m.name for m in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


@cache
def specs() -> Mapping[str, Detector]:
    """Give each detector's declaration."""
    return {name: module.detector for name, module in detectors().items()}


def spec_of(detector: str) -> Detector:
    """Give a detector's declaration; the default for other checks, such as "device_time"."""
    return specs().get(detector, Detector())


def judged_grid(breakdown: pl.DataFrame, least: int = ENOUGH_STEPS) -> StepGrid:
    """Return the breakdown by rank and step; not resolvable with fewer than `least` steps."""
    grid = step_grid(breakdown)
    if len(grid.steps) < least:
        raise NotResolvable(
            text("{steps}, at least {least} are needed", steps=counted(len(grid.steps), "analyzed step"), least=least),
            unclear=least <= ENOUGH_STEPS,
        )
    return grid


def peers_grid(breakdown: pl.DataFrame, least: int = ENOUGH_STEPS) -> StepGrid:
    """Return the same, for detectors that compare ranks which wait for each other."""
    grid = judged_grid(breakdown, least)
    if len(grid.ranks) < 2:
        raise NotResolvable(text("only one rank was seen; to compare ranks needs the traces of the others"))
    if not grid.maybe_blocked.any():
        raise NotResolvable(text("no rank was seen blocked on communication, so the waiting ranks are unknown"))
    return grid


def refuse_unseen(breakdown: pl.DataFrame, ranks: pl.DataFrame, collectives: pl.DataFrame | None = None) -> None:
    """Not resolvable where ranks wait, or may do so, for others that have no steps here; or most have none."""
    grid = step_grid(breakdown)
    world = max(ranks["world_size"].drop_nulls().to_list(), default=0)
    unseen = sorted({*range(world), *ranks["rank"]} - set(grid.ranks))
    if not unseen or not grid.steps or len(grid.ranks) < 2:
        return
    for_unseen = grid.of("unsplit")
    if collectives is not None:
        is_known = pl.col("instance_id").is_not_null()
        no_last = ~pl.col("is_last").any().over("instance_id")
        untimed = pl.lit(None)
        if "duration_ns" in collectives.columns:  # others that were not matched are unsplit
            untimed = pl.when(pl.col("end_ns").is_null()).then("duration_ns")
        waits = pl.when(is_known & no_last).then("wait_ns").when(~is_known).then(untimed)
        waited = sums(grid, collectives.with_columns(waits.alias("waited_ns")).drop_nulls("waited_ns"), "waited_ns")
        in_breakdown = grid.of("wait", "bubble", MIXED)
        for_unseen = for_unseen + (np.minimum(in_breakdown, waited) if in_breakdown.any() else waited)
    fraction = float(for_unseen.mean(axis=1).max()) / grid.step_ns
    if fraction >= _FOR_UNSEEN or len(unseen) > len(grid.ranks):
        raise NotResolvable(
            text(
                "ranks wait for up to {share} of the step with {unseen}, whose steps were not seen",
                share=percent(fraction),
                unseen=named("rank", unseen),
            ),
            unclear=True,
        )


def transfer_grid(
    breakdown: pl.DataFrame, least: int = ENOUGH_STEPS, collectives: pl.DataFrame | None = None
) -> StepGrid:
    """Return the same, for detectors of slow transfers.

    With `collectives` also where only their durations are known, which bound what ranks wait (`held_up`).
    """
    grid = judged_grid(breakdown, least)
    if collectives is not None and is_bounded(collectives):
        return grid
    if grid.of(MIXED).any():
        raise NotResolvable(text("CUDA events do not distinguish transfers from computation that overlaps them"))
    if not grid.blocked.any():
        raise NotResolvable(text("no rank was seen blocked on communication"))
    unsplit = float(grid.of("unsplit").mean())
    most = _MUCH_UNSPLIT if 2 * unsplit > grid.blocked.mean() else _MOST_UNSPLIT
    if unsplit > most * grid.step_ns:
        raise NotResolvable(text("too much of the blocked time cannot be split into waiting and transfer"))
    return grid


def refuse_unsized(rows: pl.DataFrame, grid: StepGrid, min_fraction: float) -> None:
    """Not resolvable where transfers of unknown size (rows with `exposed_ns`) block the median rank for so much."""
    unsized = rows.filter(pl.col("size_bytes").is_null())
    lost_ns = float(np.median(sums(grid, unsized, "exposed_ns"), axis=0).mean())
    if lost_ns < min_fraction * grid.step_ns or unsized.is_empty():
        return
    op = unsized.group_by("op").agg(pl.col("exposed_ns").sum()).sort("exposed_ns", "op")["op"][-1]
    raise NotResolvable(
        text(
            "{op} blocks the ranks for {lost} of the step, and how many bytes it moves was not recorded",
            op=op,
            lost=percent(lost_ns / grid.step_ns),
        )
    )


def of_hosts(found: Callable[[pl.DataFrame | None], list[Finding]], waits: pl.DataFrame | None) -> list[Finding]:
    """Return the stops of the hosts that certainly delay the job if only hosts were seen (`waits`); else all of them.

    Not resolvable where they matter only if no device had work meanwhile.
    """
    sure = found(waits)
    if sure or waits is None:
        return sure
    for possible in found(None):
        raise NotResolvable(
            text(
                "{stop}, up to {share} of the step, and whether the launch queue drained meanwhile was not "
                "recorded; a profiled window shows it ({how})",
                stop=possible.title,
                share=percent(possible.lost_fraction),
                how=how_to_profile(),
            )
        )
    return []


def price(grid: StepGrid, lost: Estimate, gain_ns: float | None = None) -> Price:
    """Return the cost fields of a finding that loses `lost` per step.

    `gain_ns` per step is for those that have no fix to replay.

    Shares are of the mean step. Severity is high from 10 % of it, medium from 5 %.
    """
    fraction = float(lost.ns / grid.step_ns)  # a number of NumPy is nothing that JSON has
    return Price(
        severity=severity(fraction),
        lost_ns_per_step=round(lost.ns),
        lost_ns_total=round(lost.ns * len(grid.steps)),
        lost_fraction=fraction,
        uncertainty_ns=round(lost.half_width_ns),
        gain_fraction=None if gain_ns is None else float(min(max(gain_ns, 0.0), lost.ns) / grid.step_ns),
    )


def as_cause(
    slow: Finding, share: float, *, detector: str, title: str, where: str, advice: str, evidence: tuple[Evidence, ...]
) -> Finding:
    """Return the cause of a finding as a finding of its own, with the same fix, that costs this share of it."""
    fraction = share * slow.lost_fraction
    return replace(
        slow,
        detector=detector,
        title=title,
        where=where,
        advice=advice,
        evidence=evidence,
        severity=severity(fraction),
        lost_ns_per_step=round(share * slow.lost_ns_per_step),
        lost_ns_total=round(share * slow.lost_ns_total),
        lost_fraction=fraction,
    )


def severity(fraction: float) -> str:
    """Return the severity of losing this fraction of the step."""
    return "high" if fraction >= 0.10 else "medium" if fraction >= 0.05 else "low"


def visible(grid: StepGrid, resolution_ns: float) -> int:
    """Return the resolution in whole ns; not resolvable where the steps differ so much that silence says nothing."""
    if resolution_ns > _VISIBLE * grid.step_ns:
        seen = counted(len(grid.steps), "analyzed step")
        if resolution_ns >= grid.step_ns:
            raise NotResolvable(text("in {seen} nothing could be distinguished from chance", seen=seen), unclear=True)
        raise NotResolvable(
            text(
                "in {seen} nothing below {resolution} per step could be distinguished from chance",
                seen=seen,
                resolution=duration(resolution_ns),
            ),
            unclear=True,
        )
    return round(resolution_ns)


def longest_regions(regions: pl.DataFrame, kind: str, ranks: tuple[int, ...]) -> tuple[Evidence, ...]:
    """Return the longest region of `kind` on each of the first four of `ranks`."""
    return longest_rows(regions.filter(pl.col("kind") == kind, pl.col("rank").is_in(ranks)), "regions")


def longest_rows(rows: pl.DataFrame, table: str) -> tuple[Evidence, ...]:
    """Return the longest of the rows on each of their first four ranks, to be shown in `table`."""
    length = pl.col("end_ns") - pl.col("start_ns")
    if "duration_ns" in rows.columns:  # an unknown end: show the operation's call
        length = pl.coalesce(length, "duration_ns")
        rows = rows.with_columns(pl.coalesce("end_ns", "issued_ns").alias("end_ns"))
    rows = rows.with_columns(length.alias("_length_ns"))
    longest = (
        rows.sort("_length_ns", descending=True).unique("rank", keep="first", maintain_order=True).sort("rank").head(4)
    )
    return tuple(
        Evidence(
            table=table,
            rank=rank,
            start_ns=start,
            end_ns=end,
            note=text("longest: {length}", length=duration(length_ns)),
        )
        for rank, start, end, length_ns in longest.select("rank", "start_ns", "end_ns", "_length_ns").iter_rows()
    )
