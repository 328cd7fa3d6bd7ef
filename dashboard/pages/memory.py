"""How much memory each rank holds, and whether it grows."""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import html

from rankscope.dashboard.figures import memory as figures
from rankscope.dashboard.page import Query, Shown, card, empty, heading, plot, table
from rankscope.dashboard.state import Run

TITLE, ORDER = "Memory", 80

_MEANING = "Readings at the ends of steps, at most one a second. Shown are the ranks whose memory grows most."
_ORDER = ("cuda_allocated_bytes", "cuda_reserved_bytes", "rss_bytes")


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001 - Dash's components are not typed
    memory = run.tables.get("memory")
    if memory is None:
        why = "No readings of memory were recorded: they come with rankscope run, at most one a second."
        return html.Div([heading(TITLE, _MEANING), empty("No memory", why)])
    names = sorted(
        memory["name"].unique(), key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)
    )
    first = int(str(memory["time_ns"].min()))
    cards = [
        card(name.removesuffix("_bytes").replace("_", " "), plot(figures.lines(memory, name, first), height=300))
        for name in names
    ]
    rows = figures.by_rank(memory).filter(pl.col("name").str.contains("bytes"))
    return html.Div([heading(TITLE, _MEANING), *cards, card("By rank", table(rows, _COLUMNS)) if len(rows) else None])


_COLUMNS = {
    "name": Shown("reading"),
    "rank": Shown("rank"),
    "first": Shown("first", "bytes"),
    "last": Shown("last", "bytes"),
    "largest": Shown("largest", "bytes"),
    "growth": Shown("growth", "bytes"),
}
