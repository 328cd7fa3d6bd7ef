"""Every table of the run, to view, query in SQL, and download."""

from __future__ import annotations

from typing import Any

import polars as pl
from dash import Dash, Input, Output, ctx, dcc, html
from dash import State as Known

from rankscope.analysis.text.message import plural, text, translated
from rankscope.collectors.schema import TABLES
from rankscope.dashboard import grids
from rankscope.dashboard.page_kit import Children, Page, Query, empty, heading, quiet, select, with_choice
from rankscope.dashboard.run import Run
from rankscope.dashboard.sql import LIMIT
from rankscope.dashboard.state import State
from rankscope.errors import BadQuery

_MEANING = text("What was recorded, as the analysis reads it: times in ns on one clock, names instead of ids.")
_NARROW, _WIDE = 130, 190  # px
_DERIVED = {
    "phases": text("Each step cut into parts without gap or overlap: what the rank did when."),
    "breakdown": text("The parts of each step, in ns; they sum to the step."),
    "waits": text("How long each rank waited for the last one to arrive, over all that was read."),
}


def layout(run: Run, query: Query) -> Children:
    if not run.tables:
        why = text("The run holds no rows at all: a rank is recorded from its first process group on.")
        return html.Div([heading(page.title, _MEANING), empty(text("No tables"), why)])
    names = [
        {"value": name, "label": text("{name}  ({rows:,} rows)", name=name, rows=len(frame))}
        for name, frame in run.tables.items()
    ]
    names += [{"value": name, "label": name} for name in grids.tables_of(run) if name not in run.tables]
    first = "collectives" if "collectives" in run.tables else next(iter(run.tables))
    asked = query.get("sql") or grids.everything(first)
    whole = next((name["value"] for name in names if grids.everything(name["value"]) == asked), None)
    return html.Div(
        [
            heading(page.title, _MEANING),
            html.Div(
                [
                    select("data-table", text("Table"), names, whole, width_px=300),
                    html.Label(
                        [
                            html.Span(text("SQL (SELECT; joins, GROUP BY and WITH work too)")),
                            dcc.Textarea(id="data-sql", value=asked, rows=asked.count("\n") + 1),
                        ],
                        className="field sql",
                    ),
                    html.Button(text("Ask"), id="data-ask", className="main-button"),
                ],
                className="controls",
            ),
            html.Div(_shown(run, asked), id="data-answer"),
        ]
    )


def register(app: Dash, state: State) -> None:  # noqa: ARG001
    app.callback(
        Output("url", "search", allow_duplicate=True),
        Input("data-ask", "n_clicks"),
        Input("data-table", "value"),
        Known("data-sql", "value"),
        Known("url", "search"),
        prevent_initial_call=True,
    )(_asked)


def _asked(_: object, table: str, query: str, search: str) -> str:
    """Return the address with the question; a table that was chosen replaces the text in the box."""
    return with_choice(search, sql=grids.everything(table) if ctx.triggered_id == "data-table" else query)


def _shown(run: Run, query: str) -> Children:
    try:
        frame = grids.answered(run, query)
    except BadQuery as error:
        return html.P(str(error), className="error", role="alert")
    rows = (
        text("the first {limit:,} rows", limit=LIMIT)
        if len(frame) == LIMIT
        else plural("{rows:,} row", "{rows:,} rows", len(frame), rows=len(frame))
    )
    definitions = [_column(name, dtype) for name, dtype in frame.schema.items()]
    grid = grids.rows_grid(run, query, definitions, height="calc(100vh - 320px)")
    about = [html.Span(rows, id="data-count"), grids.away(run.key, query)]
    return [html.Div(about, className="controls small"), _about(query), html.Div(grid, key=f"{query} {run.read_at}")]


def _about(query: str) -> Children:
    """Return the table's description, if a whole table is asked for."""
    name = query.rpartition(" ")[2]
    if grids.everything(name) != query:
        return None
    return quiet(translated(TABLES[name].doc) if name in TABLES else _DERIVED.get(name, ""))


def _column(name: str, dtype: pl.DataType) -> dict[str, Any]:
    numeric = dtype.is_numeric()
    docs = {c.doc for table in TABLES.values() for c in table.columns if c.name == name}
    return {
        "field": name,
        "headerName": name,
        "width": _WIDE if name.endswith("_id") or dtype == pl.String else max(_NARROW, 9 * len(name) + 44),
        "type": "rightAligned" if numeric else None,
        "filter": "agNumberColumnFilter" if numeric else "agTextColumnFilter",
        "headerTooltip": docs.pop() if len(docs) == 1 else name,
    }


page = Page(title=text("Data"), order=120, layout=layout, register=register, keeps=True)
