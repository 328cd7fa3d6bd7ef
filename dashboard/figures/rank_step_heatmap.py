"""A quantity of every rank in every step, as a raster of bytes at the resolution of a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.parts import OWN
from rankscope.analysis.text.message import spoken, text
from rankscope.analysis.timeline.build import Timeline

__all__ = ["MISSING", "QUANTITIES", "Grid", "Picture", "View", "cell", "grid", "picture", "rank_order"]

QUANTITIES = {
    "own": text("own work"),
    "step": text("step time"),
    "wait": text("waiting for peers"),
    "transfer": text("transfer"),
    "last": text("how often the rank came last"),
}
_PARTS = {"own": OWN, "wait": ("wait", "bubble"), "transfer": ("transfer",)}
MISSING = 255
_HIGHEST = 254
_LEAST_RANGE = 0.1  # of the median step: smaller differences are not stretched over all colours
_ROW_LABELS, _COLUMN_LABELS = 24, 10
_ROW_PX, _COLUMN_PX = 18, 90  # between two labels

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Grid:
    """`values[i, j]` belongs to `ranks[i]` and `steps[j]`, in ns or as a share; NaN: not recorded."""

    quantity: str
    ranks: NDArray[np.int32]
    steps: NDArray[np.int64]
    values: Floats
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Rows r0 to r1 and columns c0 to c1 of a grid, the last ones not included, in at most that many pixels."""

    r0: int
    r1: int
    c0: int
    c1: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Picture:
    """Bytes from 0 (low) to 254 (high), 255: nothing; labels as (place from 0 to 1, text)."""

    cells: Bytes
    row_labels: list[tuple[float, str]]
    column_labels: list[tuple[float, str]]


def grid(timeline: Timeline, quantity: str) -> Grid:
    """All steps, whether judged or not. Raises KeyError for a quantity that is not in QUANTITIES."""
    length = pl.col("end_ns") - pl.col("start_ns")
    if quantity == "step":
        cells = timeline.steps.select("rank", "step", value=length)
    elif quantity == "last":
        known = timeline.collectives.drop_nulls(["step", "is_last"])
        cells = known.group_by("rank", "step").agg(value=pl.col("is_last").mean())
    else:
        of_parts = timeline.breakdown.filter(pl.col("part").is_in(_PARTS[quantity]))
        cells = of_parts.group_by("rank", "step").agg(value=pl.col("ns").sum())
    ranks, steps = (cells[name].unique().sort().to_numpy() for name in ("rank", "step"))
    values = np.full((len(ranks), len(steps)), np.nan, np.float32)
    row = np.searchsorted(ranks, cells["rank"].to_numpy())
    values[row, np.searchsorted(steps, cells["step"].to_numpy())] = cells["value"].to_numpy()
    low, high = 0.0, 1.0
    if quantity != "last" and values.size:
        judged = timeline.steps.filter("judged") if timeline.steps["judged"].any() else timeline.steps
        typical = values[
            :, np.isin(steps, judged["step"].unique().to_numpy())
        ]  # warm-up would leave one colour for all else
        low, high = (float(v) for v in np.nanpercentile(typical, (1, 99)))
        high = max(high, low + _LEAST_RANGE * (judged.select(length.median()).item() or 0.0), low + 1)
    return Grid(quantity, ranks, steps, values, low, high)


def rank_order(found: Grid, groups: Sequence[Sequence[int]] | None) -> NDArray[np.intp]:
    """Return the grid's rows in the order of these groups of ranks; None: the largest mean first."""
    if groups is None:
        mean = np.nanmean(found.values, axis=1)
        return np.argsort(-mean, kind="stable")
    place = {rank: i for i, rank in enumerate(rank for group in groups for rank in group)}
    return np.argsort([place.get(int(rank), len(place)) for rank in found.ranks], kind="stable")


def picture(found: Grid, order: NDArray[np.intp], view: View) -> Picture:
    """Each cell of the picture shows the largest of the values that fall into it."""
    rows, columns = _edges(view.r0, view.r1, view.height), _edges(view.c0, view.c1, view.width)
    part = found.values[order[view.r0 : view.r1], view.c0 : view.c1]
    largest = np.fmax.reduceat(part, rows - view.r0, axis=0)
    largest = np.fmax.reduceat(largest, columns - view.c0, axis=1)
    scaled = np.clip((largest - found.low) / (found.high - found.low), 0, 1) * _HIGHEST
    cells = np.where(np.isnan(scaled), MISSING, np.nan_to_num(scaled)).astype(np.uint8)
    names = [spoken(text("step {step}", step=step)) for step in found.steps[view.c0 : view.c1]]
    return Picture(
        cells,
        _labels([str(found.ranks[i]) for i in order[view.r0 : view.r1]], min(view.height // _ROW_PX, _ROW_LABELS)),
        _labels(names, min(view.width // _COLUMN_PX, _COLUMN_LABELS)),
    )


def cell(found: Grid, order: NDArray[np.intp], view: View, row: int, column: int) -> tuple[int, int, float]:
    """Rank, step and value of the largest in the picture's cell in which this row and column of the grid lie."""
    rows, columns = _edges(view.r0, view.r1, view.height), _edges(view.c0, view.c1, view.width)
    first_row, last_row = _around(rows, row, view.r1)
    first_column, last_column = _around(columns, column, view.c1)
    part = found.values[order[first_row:last_row], first_column:last_column]
    if np.isnan(part).all():
        return int(found.ranks[order[row]]), int(found.steps[column]), float("nan")
    i, j = np.unravel_index(np.nanargmax(part), part.shape)
    rank, step = found.ranks[order[first_row + i]], found.steps[first_column + j]
    return int(rank), int(step), float(part[i, j])


def _edges(start: int, end: int, pixels: int) -> NDArray[np.int64]:
    """Return the start of each cell of the picture: one per row or column of the grid, or per pixel."""
    count = max(1, min(end - start, pixels))
    return start + (np.arange(count) * (end - start)) // count


def _around(edges: NDArray[np.int64], place: int, end: int) -> tuple[int, int]:
    i = int(np.searchsorted(edges, place, side="right")) - 1
    return int(edges[i]), int(edges[i + 1]) if i + 1 < len(edges) else end


def _labels(texts: Sequence[str], room: int) -> list[tuple[float, str]]:
    every = max(1, -(-len(texts) // max(room, 1)))
    return [((i + 0.5) / len(texts), text) for i, text in enumerate(texts) if i % every == 0]
