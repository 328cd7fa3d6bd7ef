"""Show what a recorded run holds.

Its tables with their rows, ranks, time and size, and what is missing.

Example: rankscope ls runs/NAME
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.collectors.schema import TABLES
from rankscope.profiler.columns import aligned

if TYPE_CHECKING:
    import polars as pl

    from rankscope.analysis.model.finding import Gap
    from rankscope.analysis.runs.trace import Trace

__all__ = ["command"]

_HEAD = ("table", "rows", "ranks", "seconds", "size", "bytes/row")


def command(
    run: Annotated[list[Path], typer.Argument(help="The run; for nodes without shared storage, the folder of each.")],
) -> None:
    from rankscope.analysis.runs.trace import Trace

    trace = Trace.open(run)
    rows = [_row(trace, name) for name in trace.tables()]
    gaps = trace.gaps()
    print(aligned([_HEAD, *rows], right=range(1, len(_HEAD))))
    print(f"\n{len(gaps)} gaps" if gaps else "\nno gaps")
    for gap in gaps:
        print(f"  {_who(gap)}, {gap.table}: {gap.why}")


def _row(trace: Trace, name: str) -> tuple[str, ...]:
    held = _extent(trace, name)
    count, size_bytes = int(held["rows"].sum()), int(held["size_bytes"].sum())
    return (
        name,
        f"{count:,}",
        "" if TABLES[name].partition == "node" else str(held["rank"].drop_nulls().n_unique()),
        _seconds(held) if TABLES[name].order.endswith("_ns") else "",
        f"{size_bytes / 1e6:,.2f} MB",
        f"{size_bytes / count:,.1f}" if count else "",
    )


def _extent(trace: Trace, name: str) -> pl.DataFrame:
    """rank, node, rows, size_bytes, first and last of a table's files, also where only a part of the run is read."""
    import polars as pl

    from rankscope.analysis.readers.native import NativeReader

    if isinstance(trace.reader, NativeReader):
        return trace.reader.extent(name)
    rows, order = trace.table(name).collect(), pl.col(TABLES[name].order)
    by = [owner for owner in ("rank", "node") if owner in rows.columns]
    held = rows.group_by(by).agg(pl.len().alias("rows"), order.min().alias("first"), order.max().alias("last"))
    return held.with_columns(size_bytes=0)


def _seconds(held: pl.DataFrame) -> str:
    """From the first to the last row, on the node where that is longest; empty for a table without rows."""
    import polars as pl

    spans = held.group_by("node").agg(ns=pl.col("last").max() - pl.col("first").min())["ns"].drop_nulls()
    return f"{max(spans) / 1e9:,.1f}" if len(spans) else ""


def _who(gap: Gap) -> str:
    if gap.rank is not None:
        return f"rank {gap.rank}"
    return "run" if gap.node is None else f"node {gap.node}"
