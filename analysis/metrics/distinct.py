"""Distinct values and membership in columns of numbers, faster than numpy's."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

__all__ = ["among", "distinct", "distinct_in_order"]

Codes = TypeVar("Codes", bound=np.integer)
_SPARSE = 4  # times as many possible values as there are rows
_FEW = 16  # rows have the same value, about


def distinct(values: NDArray[Codes]) -> tuple[NDArray[Codes], NDArray[np.int64]]:
    """Return the different values in order, and the place of each row's value among them.

    As `np.unique(values, return_inverse=True)`, which sorts: where values lie close together a table is faster, and
    where there are few of them to search for each.
    """
    if not len(values):
        return values, np.empty(0, np.int64)
    low, high = int(values.min()), int(values.max())
    if high - low > _SPARSE * len(values):
        found = np.sort(pl.Series(values).unique().to_numpy())
        if len(found) * _FEW < len(values):
            return found, np.searchsorted(found, values)
        found, place = np.unique(values, return_inverse=True)
        return found, place
    at = values - low
    is_there = np.zeros(high - low + 1, bool)
    is_there[at] = True
    place = np.cumsum(is_there) - 1
    return (np.flatnonzero(is_there) + low).astype(values.dtype), place[at]


def distinct_in_order(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the different values in order, as `np.unique`, which hashes them first; quick where much is in order."""
    ordered = np.sort(values, kind="stable")
    return np.asarray(ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]])


def among(values: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say whether each value is one of those that are known, as `np.isin`: quick where both are nearly in order."""
    if not len(known):
        return np.zeros(len(values), bool)
    ordered = np.sort(known, kind="stable")
    at = np.searchsorted(ordered, values)
    return np.asarray(ordered[np.minimum(at, len(ordered) - 1)] == values)
