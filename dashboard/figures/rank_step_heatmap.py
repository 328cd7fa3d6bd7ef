"""A quantity of every rank in every step, as a raster of bytes at the resolution of a screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.diagnosis.step_summaries import StepSummaries, step_summaries
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
_ALWAYS = ["rank", "step", "step_ns", "judged"]
_PARTS = {"own": OWN, "wait": ("wait", "bubble"), "transfer": ("transfer",)}
_COLUMNS = {quantity: [f"{part}_ns" for part in parts] for quantity, parts in _PARTS.items()}
# Of a quantity: the other columns of summaries that it is made of, and how.
_VALUES = {
    **{name: (columns, pl.sum_horizontal(columns, ignore_nulls=False)) for name, columns in _COLUMNS.items()},
    "step": ([], pl.col("step_ns")),
    "last": (["matched", "came_last"], pl.when(pl.col("matched") > 0).then(pl.col("came_last") / pl.col("matched"))),
}
_MOST_CELLS = 20_000_000  # 24 bytes each while they are laid out
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
    cut: int = 0  # steps before it are left out, since they are too many; 0: none


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


def grid(timeline: Timeline, quantity: str, of_stretches: StepSummaries | None = None) -> Grid:
    """All steps, whether judged or not; of a long run those of its stretches too, the last ones if these are too many.

    Raises KeyError for a quantity that is not in QUANTITIES.
    """
    columns, value = _VALUES[quantity]
    here = step_summaries(timeline)
    cells = [here.select(_ALWAYS + columns)]
    most, first = _MOST_CELLS // max(here["rank"].n_unique(), 1), here["step"].min()
    cut = 0
    if of_stretches and isinstance(first, int):
        cut = first - most if first - most > min(of_stretches.files)[0] else 0
        before = of_stretches.read(*_ALWAYS, *columns, since=first - most)
        cells.append(before.filter(pl.col("step") < first))
    rows = pl.concat(cells).with_columns(value.alias("value")).drop_nulls("value")
    ranks, steps = (rows[name].unique().sort().to_numpy() for name in ("rank", "step"))
    if of_stretches and len(steps):
        steps = np.arange(steps[0], steps[-1] + 1)  # those of a stretch that could not be analyzed stay empty
    values = np.full((len(ranks), len(steps)), np.nan, np.float32)
    place = np.searchsorted(ranks, rows["rank"].to_numpy()), np.searchsorted(steps, rows["step"].to_numpy())
    values[place] = rows["value"].to_numpy()
    low, high = 0.0, 1.0
    if quantity != "last" and values.size:
        judged = rows.filter("judged") if rows["judged"].any() else rows
        # Warm-up would leave one colour for all else.
        typical = values[:, np.isin(steps, judged["step"].unique().to_numpy())]
        low, high = (float(v) for v in np.nanpercentile(typical, (1, 99)))
        high = max(high, low + _LEAST_RANGE * float(np.median(judged["step_ns"].to_numpy())), low + 1)
    return Grid(quantity, ranks, steps, values, low, high, cut)


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
