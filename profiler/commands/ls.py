"""Show what a recorded run holds.

Its tables with their rows, ranks, time and size, and what is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankscope.collectors.schema import TABLES
from rankscope.profiler.columns import aligned
from rankscope.profiler.errors import clear_input_errors

if TYPE_CHECKING:
    import polars as pl

    from rankscope.analysis.finding import Gap
    from rankscope.analysis.trace import Trace

__all__ = ["command"]

_HEAD = ("table", "rows", "ranks", "seconds", "size", "bytes/row")


def command(
    run: Annotated[list[Path], typer.Argument(help="The run; for nodes without shared storage, the folder of each.")],
) -> None:
    from rankscope.analysis.trace import Trace

    with clear_input_errors():
        trace = Trace.open(run)
        rows = [_row(trace, name) for name in trace.tables()]
        gaps = trace.gaps()
    print(aligned([_HEAD, *rows], right=range(1, len(_HEAD))))
    print(f"\n{len(gaps)} gaps" if gaps else "\nno gaps")
    for gap in gaps:
        print(f"  {_who(gap)}, {gap.table}: {gap.why}")


def _row(trace: Trace, name: str) -> tuple[str, ...]:
    from rankscope.analysis.readers.native import NativeReader

    size_bytes = trace.reader.size_bytes(name) if isinstance(trace.reader, NativeReader) else 0
    frame = trace.table(name).collect()
    of_nodes = TABLES[name].partition == "node"
    owners = frame["node" if of_nodes else "rank"].drop_nulls().n_unique()
    return (
        name,
        f"{frame.height:,}",
        "" if of_nodes else str(owners),
        _seconds(frame, TABLES[name].order),
        f"{size_bytes / 1e6:,.2f} MB",
        f"{size_bytes / frame.height:,.1f}" if frame.height else "",
    )


def _seconds(frame: pl.DataFrame, order: str) -> str:
    """From the first to the last row, on the node where that is longest; empty for a table without times."""
    import polars as pl

    if not order.endswith("_ns"):
        return ""
    spans = frame.group_by("node").agg(pl.col(order).max() - pl.col(order).min())[order].drop_nulls()
    return f"{max(spans) / 1e9:,.1f}" if len(spans) else ""


def _who(gap: Gap) -> str:
    if gap.rank is not None:
        return f"rank {gap.rank}"
    return "run" if gap.node is None else f"node {gap.node}"
