"""The tables of the schema as data frames: their columns, types and order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.collectors.schema import (
    DEVICE_MARKS,
    DEVICE_WORK,
    DTYPES,
    NCCL_ALGORITHMS,
    NCCL_EVENTS,
    NCCL_PROTOCOLS,
    OPS,
    REGION_KINDS,
    TABLES,
)

__all__ = ["CODES", "POLARS", "WORDS", "as_texts", "in_order", "is_id", "is_like", "named_as", "numbers", "schema_of"]

# Columns of codes: the word for each code, and for an unknown one.
CODES = {
    "kind": (REGION_KINDS, "user"),
    "op": (OPS, "unknown"),
    "dtype": (DTYPES, "unknown"),
    "work": (DEVICE_WORK, "compute"),
    "event": (NCCL_EVENTS, "unknown"),
    "algorithm": (NCCL_ALGORITHMS, "unknown"),
    "protocol": (NCCL_PROTOCOLS, "unknown"),
    "mark": (DEVICE_MARKS, "unknown"),
}
# The types of those in large tables: to compare, group or copy them costs a tenth of what strings do.
WORDS: dict[str, Any] = {column: pl.Enum(CODES[column][0]) for column in ("kind", "op", "dtype", "work")}
POLARS = {
    "int32": pl.Int32,
    "int64": pl.Int64,
    "uint8": pl.UInt8,
    "uint16": pl.UInt16,
    "uint32": pl.UInt32,
    "uint64": pl.UInt64,
    "float64": pl.Float64,
    "bool": pl.Boolean,
    "string": pl.String,
}


def schema_of(name: str) -> dict[str, Any]:
    """Columns of a table as `Trace.table` gives it, with their polars types."""
    table = TABLES[name]
    by = ("node",) if table.partition == "node" else ("rank", "node", "attempt")
    schema: dict[str, Any] = dict.fromkeys(by, pl.Int32)
    for column in table.columns:
        if name != "strings" and is_id(column.name):
            schema[named_as(column.name)] = pl.String
        else:
            schema[column.name] = WORDS.get(column.name, pl.String if column.name in CODES else POLARS[column.type])
    return schema


def numbers(words: pl.Series, code: Mapping[str, int]) -> NDArray[np.int64]:
    """Return the number of each word, none of which may lack one."""
    kind = words.dtype if isinstance(words.dtype, pl.Enum) else pl.Enum([*code])
    known, place = kind.categories.to_list(), words.cast(kind).to_physical().to_numpy()
    of_word = np.zeros(len(known), np.int64)
    for each in np.flatnonzero(np.bincount(place, minlength=len(known))).tolist():
        of_word[each] = code[known[each]]
    return np.asarray(of_word[place])


def is_like(column: str, pattern: str) -> pl.Expr:
    """Say whether the column of words has one in which this regular expression is found."""
    return pl.col(column).is_in([word for word in CODES[column][0] if re.search(pattern, word)])


def as_texts(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the table with words as texts, which can be compared with any other and sort by their letters."""
    return frame.cast({pl.Enum: pl.String})


def is_id(column: str) -> bool:
    return column.endswith("_id") and column != "group_id"


def named_as(column: str) -> str:
    return column.removesuffix("_id")


def in_order(frame: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Return the rows by these columns of whole numbers.

    Equal ones keep their order. A frame that is in order already is not copied.
    """
    if frame.is_empty():
        return frame
    equal = np.ones(len(frame) - 1, np.bool_)
    for column in by:
        values = frame[column]
        if values.null_count():
            break
        earlier, later = values.to_numpy()[:-1], values.to_numpy()[1:]
        if (equal & (later < earlier)).any():
            break
        equal &= later == earlier
    else:
        return frame
    return frame.sort(by, maintain_order=True)
