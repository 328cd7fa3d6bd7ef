"""Show what a recorded run holds.

Its tables with their rows, ranks, time and size, and what is missing.

Example: rankscope ls runs/NAME
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.text.message import Text, plural, speaking, spoken, text
from rankscope.collectors.schema import TABLES
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Lang, Runs, Steps, World, part_of

if TYPE_CHECKING:
    import polars as pl

    from rankscope.analysis.model.finding import Gap
    from rankscope.analysis.runs.trace import Trace

__all__ = ["command"]

_HEAD = (text("table"), text("rows"), text("ranks"), text("seconds"), text("size"), text("bytes/row"))


def command(
    run: Runs,
    steps: Steps = None,
    world: World = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.runs.trace import Trace

    trace = Trace.open(part_of(run, steps, world))
    rows = [_row(trace, name) for name in trace.tables()]
    gaps = trace.gaps()
    with speaking(lang):
        print(aligned([_HEAD, *rows], right=range(1, len(_HEAD))))
        count = plural("{number} gap", "{number} gaps", len(gaps), number=len(gaps)) if gaps else text("no gaps")
        print(f"\n{spoken(count)}")
        for gap in gaps:
            print(f"  {spoken(text('{who}, {table}: {why}', who=_who(gap), table=gap.table, why=gap.why))}")


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

    if trace.reader.folder:
        return trace.reader.folder.extent(name)
    rows, order = trace.table(name).collect(), pl.col(TABLES[name].order)
    by = [owner for owner in ("rank", "node") if owner in rows.columns]
    held = rows.group_by(by).agg(pl.len().alias("rows"), order.min().alias("first"), order.max().alias("last"))
    return held.with_columns(size_bytes=0)


def _seconds(held: pl.DataFrame) -> str:
    """From the first to the last row, on the node where that is longest; empty for a table without rows."""
    import polars as pl

    spans = held.group_by("node").agg(ns=pl.col("last").max() - pl.col("first").min())["ns"].drop_nulls()
    return f"{max(spans) / 1e9:,.1f}" if len(spans) else ""


def _who(gap: Gap) -> Text:
    if gap.rank is not None:
        return text("rank {rank}", rank=gap.rank)
    return text("run") if gap.node is None else text("node {node}", node=gap.node)
