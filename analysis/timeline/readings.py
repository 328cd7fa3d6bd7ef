"""What the nodes' counters say about the judged steps."""

from __future__ import annotations

import polars as pl

__all__ = ["during", "growth"]


def during(counters: pl.DataFrame, source: str, steps: pl.DataFrame) -> pl.DataFrame:
    """The rows of one source that were read between the first start and the last end of these steps, in order."""
    first, last = steps.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    rows = counters.filter(pl.col("source") == source, pl.col("time_ns").is_between(first, last))
    return rows.sort("node", "device", "name", "time_ns")


def growth(rows: pl.DataFrame) -> pl.DataFrame:
    """(node, device, name, grown, over_ns): by how much each cumulative counter grew from its first to its last row."""
    value, time = pl.col("value"), pl.col("time_ns")
    return (
        rows.group_by("node", "device", "name", maintain_order=True)
        .agg((value.last() - value.first()).alias("grown"), (time.last() - time.first()).alias("over_ns"))
        .filter(pl.col("over_ns") > 0, pl.col("grown") >= 0)
    )
