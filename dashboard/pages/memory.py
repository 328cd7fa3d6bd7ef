"""How much memory each rank holds, and whether it grows."""

from __future__ import annotations

import polars as pl
from dash import html

from rankscope.analysis.text.message import text
from rankscope.dashboard.figures import memory as figures
from rankscope.dashboard.grids import Shown, table, tables_of
from rankscope.dashboard.page_kit import Children, Page, Query, Tables, card, empty, heading, plot
from rankscope.dashboard.run import Run

_MEANING = text("Readings at the ends of steps, at most one a second. Shown are the ranks whose memory grows most.")
_ORDER = ("cuda_allocated_bytes", "cuda_reserved_bytes", "rss_bytes")


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    memory = run.tables.get("memory")
    if memory is None:
        why = text("No memory readings were recorded: rankscope run records at most one a second.")
        return html.Div([heading(page.title, _MEANING), empty(text("No memory"), why)])
    names = sorted(
        memory["name"].unique(), key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
    )
    first = int(str(memory["time_ns"].min()))
    cards = [
        card(name.removesuffix("_bytes").replace("_", " "), plot(figures.lines(memory, name, first), height=300))
        for name in names
    ]
    rows = tables_of(run)["memory_by_rank"]
    return html.Div(
        [
            heading(page.title, _MEANING),
            *cards,
            card(text("By rank"), table(run, "memory_by_rank", _COLUMNS)) if len(rows) else None,
        ]
    )


def _by_rank(run: Run) -> pl.DataFrame:
    return figures.by_rank(run.tables["memory"]).filter(pl.col("name").str.contains("bytes"))


_TABLES: Tables = {"memory_by_rank": _by_rank}
_COLUMNS = {
    "name": Shown(text("reading")),
    "rank": Shown(text("rank")),
    "first": Shown(text("first"), "bytes"),
    "last": Shown(text("last"), "bytes"),
    "largest": Shown(text("largest"), "bytes"),
    "growth": Shown(text("growth"), "bytes"),
}


page = Page(title=text("Memory"), order=80, layout=layout, tables=_TABLES)
