"""Show what a recorded run holds.

Its tables with their rows, ranks, time and size, and what is missing.

Example: rankscope ls runs/NAME
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rankscope.analysis.text.message import Text, plural, speaking, spoken, text
from rankscope.collectors.schema import TABLES
from rankscope.profiler.columns import aligned
from rankscope.profiler.options import Json, Lang, Runs, Steps, World, part_of, write

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
    json: Json = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.report.json_form import strict
    from rankscope.analysis.runs.trace import Trace

    trace = Trace.open(part_of(run, steps, world))
    held = [_held(trace, name) for name in trace.tables()]
    not_read = trace.stretch.said if trace.stretch else ""  # which is of tables; listed is all that the files hold
    gaps = [gap for gap in trace.gaps() if gap.why != not_read]
    if json:
        said = {"tables": [asdict(one) for one in held], "gaps": [asdict(gap) for gap in gaps]}
        write(json, strict({"schema_version": 1, "path": trace.path, **said}))
    if json == "-":
        return
    with speaking(lang):
        rows = list(map(_row, held))
        head = _HEAD[: max(map(len, rows), default=len(_HEAD))]
        print(aligned([head, *rows], right=range(1, len(head))))
        count = plural("{number} gap", "{number} gaps", len(gaps), number=len(gaps)) if gaps else text("no gaps")
        print(f"\n{spoken(count)}")
        for gap in gaps:
            print(f"  {spoken(text('{who}, {table}: {why}', who=_place(gap), table=gap.table, why=gap.why))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A table's content in a run; `seconds` from the first to the last row, on the node where that is longest."""

    table: str
    rows: int
    ranks: int | None  # None: of nodes
    seconds: float | None  # None: not in order of time
    size_bytes: int | None  # None: it is not stored, another tool's trace is read


def _held(trace: Trace, name: str) -> _Held:
    extent, table = _extent(trace, name), TABLES[name]
    return _Held(
        table=name,
        rows=int(extent["rows"].sum()),
        ranks=None if table.partition == "node" else extent["rank"].drop_nulls().n_unique(),
        seconds=_seconds(extent) if table.order.endswith("_ns") else None,
        size_bytes=int(extent["size_bytes"].sum()) if trace.reader.folder else None,
    )


def _row(held: _Held) -> tuple[str, ...]:
    return (
        held.table,
        f"{held.rows:,}",
        "" if held.ranks is None else str(held.ranks),
        "" if held.seconds is None else f"{held.seconds:,.1f}",
        *_sizes(held),
    )


def _sizes(held: _Held) -> tuple[str, ...]:
    from rankscope.analysis.text.units import bytes_text

    if held.size_bytes is None:
        return ()
    return bytes_text(held.size_bytes), f"{held.size_bytes / held.rows:,.1f}" if held.rows else ""


def _extent(trace: Trace, name: str) -> pl.DataFrame:
    """rank, node, rows, first and last of a table, and of a run folder's files, read in part or not, size_bytes."""
    import polars as pl

    if trace.reader.folder:
        return trace.reader.folder.extent(name)
    rows, order = trace.table(name).collect(), pl.col(TABLES[name].order)
    by = [owner for owner in ("rank", "node") if owner in rows.columns]
    return rows.group_by(by).agg(pl.len().alias("rows"), order.min().alias("first"), order.max().alias("last"))


def _seconds(extent: pl.DataFrame) -> float | None:
    import polars as pl

    spans = extent.group_by("node").agg(ns=pl.col("last").max() - pl.col("first").min())["ns"].drop_nulls()
    return max(spans) / 1e9 if len(spans) else None


def _place(gap: Gap) -> Text:
    if gap.rank is not None:
        return text("rank {rank}", rank=gap.rank)
    return text("run") if gap.node is None else text("node {node}", node=gap.node)
