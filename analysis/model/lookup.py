"""Rows of another table by whole numbers that both have: a rank and its step, a rank and the id of a name."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    table, there = (frame.select(by) for frame in (table, rows))
    low, high = (np.array(of.row(0), np.int64) for of in (table.min(), table.max()))
    shape = tuple((high - low + 1).tolist())
    if math.prod(shape) > _SPARSE * (len(rows) + len(table)):
        last = table.with_row_index("_row").group_by(by).agg(pl.col("_row").max())
        found = there.join(last, on=by, how="left", maintain_order="left")["_row"]
        return np.asarray(found.cast(pl.Int64).fill_null(-1).to_numpy())
    place = np.zeros(len(table), np.int64)
    asked, inside = np.zeros(len(rows), np.int64), np.ones(len(rows), np.bool_)
    for column, first, size in zip(by, low.tolist(), shape, strict=True):
        place = place * size + (table[column].to_numpy() - first)
        at = there[column].fill_null(first - 1).to_numpy().astype(np.int64) - first
        inside &= (at >= 0) & (at < size)
        asked = asked * size + at
    of_place = np.full(math.prod(shape), -1)
    of_place[place] = np.arange(len(table))
    asked[~inside] = 0
    return np.where(inside, of_place[asked], -1)


def looked_up(rows: pl.DataFrame, table: pl.DataFrame, by: Sequence[str]) -> pl.DataFrame:
    """Return the rows that `table` has numbers for, in their order, with its other columns; it has each but once."""
    at = row_of(rows, table, by)
    found = at >= 0
    return rows.filter(found).hstack(table.drop(by)[at[found]])
