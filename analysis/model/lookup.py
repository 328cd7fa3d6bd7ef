"""Rows of another table by whole numbers that both have: a rank and its step, a rank and the id of a name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["gathered", "looked_up", "row_of"]

_SPARSE = 4  # of the places between the least and the largest numbers, more for each row are not laid out

Ints = NDArray[np.int64]


def gathered(values: pl.Series, rows: Ints) -> pl.Series:
    """Return the values of these rows, null for -1."""
    missing = rows < 0
    if not missing.any():
        return values.gather(rows)
    return values.extend_constant(None, 1).gather(np.where(missing, len(values), rows))


def row_of(rows: pl.DataFrame, table: pl.DataFrame, by: Sequence[str]) -> Ints:
    """Return for each row where `table` has the same numbers in the columns `by`; the last place, -1 if nowhere.

    Ten times as fast as a join where the numbers are dense.
    """
    if table.is_empty() or rows.is_empty():
        return np.full(len(rows), -1)
    known = [table[column].to_numpy() for column in by]
    low, high = ([int(of) for of in ends] for ends in zip(*((of.min(), of.max()) for of in known), strict=True))
    shape = [end - begin + 1 for begin, end in zip(low, high, strict=True)]
    if math.prod(shape) > _SPARSE * (len(rows) + len(table)):
        latest = table.select(by).with_row_index("_row").group_by(by).agg(pl.col("_row").max())
        found = rows.select(by).join(latest, on=by, how="left", maintain_order="left")["_row"]
        return np.asarray(found.cast(pl.Int64).fill_null(-1).to_numpy())
    of_place = np.full(math.prod(shape), -1)
    of_place[_places(known, low, shape)] = np.arange(len(table))
    asked = [_filled(rows[column], first - 1) for column, first in zip(by, low, strict=True)]
    outside = np.zeros(0, np.bool_)
    for of, first, last in zip(asked, low, high, strict=True):
        if of.min() < first or of.max() > last:  # most often all are inside
            beyond = (of < first) | (of > last)
            outside = outside | beyond if len(outside) else beyond
    place = _places(asked, low, shape)
    if not len(outside):
        return np.asarray(of_place[place])
    place[outside] = 0
    return np.where(outside, -1, of_place[place])


def _places(columns: Sequence[NDArray[Any]], low: Sequence[int], shape: Sequence[int]) -> Ints:
    """Return the place of each row in a table of this shape, whose first place has the lowest numbers."""
    place = columns[0].astype(np.int64)
    place -= low[0]
    for column, first, size in zip(columns[1:], low[1:], shape[1:], strict=True):
        place *= size
        place += column
        place -= first
    return place


def _filled(numbers: pl.Series, otherwise: int) -> NDArray[Any]:
    return (numbers.fill_null(otherwise) if numbers.null_count() else numbers).to_numpy()


def looked_up(rows: pl.DataFrame, table: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Return the rows that `table` has numbers for, in their order, with its other columns; it has each but once."""
    at = row_of(rows, table, by)
    if (at < 0).any():
        found = at >= 0
        rows, at = rows.filter(found), at[found]
    return rows.hstack(table.drop(by)[at])
