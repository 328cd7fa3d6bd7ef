"""The tables of the schema as data frames: their columns, types and order."""

from __future__ import annotations

from typing import Any

import polars as pl

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

__all__ = ["CODES", "POLARS", "in_order", "is_id", "named_as", "schema_of"]

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
        named = name != "strings" and (is_id(column.name) or column.name in CODES)
        schema[named_as(column.name) if named else column.name] = pl.String if named else POLARS[column.type]
    return schema


def is_id(column: str) -> bool:
    return column.endswith("_id") and column != "group_id"


def named_as(column: str) -> str:
    return column.removesuffix("_id")


def in_order(frame: pl.DataFrame, owner: str, key: str) -> pl.DataFrame:
    """Return the rows by these two columns.

    Equal ones keep their order. A frame that is in order already is not copied.
    """
    if frame.is_empty():
        return frame
    by, at = frame[owner], frame[key]
    if not by.null_count() and not at.null_count() and by.is_sorted():
        changes = by[1:] != by[:-1]
        if (changes | (at[1:] >= at[:-1])).all():
            return frame
    return frame.sort(owner, key, maintain_order=True)
