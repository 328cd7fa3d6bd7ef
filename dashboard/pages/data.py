"""Every table of the run, to look at, ask in SQL, and take away."""

from __future__ import annotations

import io
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode

import dash_ag_grid as dag
import dash_mantine_components as dmc
import polars as pl
from dash import Dash, Input, Output, ctx, dcc, html, no_update
from dash import State as Known
from flask import Response, request

from rankscope.analysis.text.message import text
from rankscope.collectors.schema import TABLES
from rankscope.dashboard.page_kit import Query, empty, heading, in_language, query_of, quiet
from rankscope.dashboard.sql import LIMIT, answer, narrowed
from rankscope.dashboard.state import Run, State
from rankscope.errors import BadQuery

TITLE, ORDER, KEEPS = text("Data"), 120, True

_DOWNLOAD = "/data-download"
_MEANING = text("What was recorded, as the analysis reads it: times in ns on one clock, names instead of ids.")
_EXACT_IN_JSON = 2**53  # a browser's numbers are exact up to here
_BLOCK_ROWS = 200
_NARROW, _WIDE = 130, 190  # px
_DERIVED = {
    "phases": text("Each step cut into parts without gap or overlap: what the rank did when."),
    "breakdown": text("The parts of each step, in ns; they sum to the step."),
    "waits": text("How long each rank waited for the last one to arrive, over the whole run."),
}


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001 - Dash's components are not typed
    if not run.tables:
        why = text("The run holds no rows at all: a rank is recorded from its first process group on.")
        return html.Div([heading(TITLE, _MEANING), empty(text("No tables"), why)])
    names = [
        {"value": name, "label": text("{name}  ({rows:,} rows)", name=name, rows=len(frame))}
        for name, frame in run.tables.items()
    ]
    first = "collectives" if "collectives" in run.tables else next(iter(run.tables))
    asked = _everything(first)
    return html.Div(
        [
            heading(TITLE, _MEANING),
            html.Div(
                [
                    dmc.Select(
                        id="data-table", label=text("Table"), data=names, value=first, allowDeselect=False, w=300
                    ),
                    dmc.Textarea(
                        id="data-sql",
                        label=text("SQL (SELECT; joins, GROUP BY and WITH work too)"),
                        value=asked,
                        autosize=True,
                        minRows=1,
                        maxRows=12,
                        className="sql",
                        style={"flex": 1, "minWidth": "320px"},
                    ),
                    dmc.Button("Ask", id="data-ask"),
                ],
                className="controls",
            ),
            dcc.Store(id="data-query", data=asked),
            html.Div(_shown(run, asked), id="data-answer"),
        ]
    )


def register(app: Dash, state: State) -> None:
    app.callback(
        Output("data-query", "data"),
        Output("data-sql", "value"),
        Input("data-ask", "n_clicks"),
        Input("data-table", "value"),
        Known("data-sql", "value"),
        prevent_initial_call=True,
    )(_asked)
    app.callback(
        Output("data-answer", "children"),
        Input("data-query", "data"),
        Known("url", "search"),
        prevent_initial_call=True,
    )(lambda query, search: in_language(_shown(_run(state, search), query)))
    app.callback(
        Output("data-grid", "getRowsResponse"),
        Input("data-grid", "getRowsRequest"),
        Known("data-query", "data"),
        Known("url", "search"),
        prevent_initial_call=True,
    )(lambda wanted, query, search: _rows(_run(state, search), query, wanted))
    app.server.add_url_rule(_DOWNLOAD, "data_download", lambda: _download(state))


def _run(state: State, search: str | None) -> Run | None:
    return state.ready(query_of(search).get("run", ""))


def _asked(_: object, table: str, query: str) -> tuple[Any, Any]:
    """The question, and what stands in the box: a table that was chosen replaces it."""
    if ctx.triggered_id == "data-table":
        return _everything(table), _everything(table)
    return query, no_update


def _everything(table: str) -> str:
    return f"SELECT * FROM {table}"


@lru_cache(maxsize=4)
def _answer(run: Run, query: str) -> pl.DataFrame:
    return answer(run.tables, query)


def _shown(run: Run | None, query: str) -> Any:  # noqa: ANN401
    if run is None:
        return None
    try:
        frame = _answer(run, query)
    except BadQuery as error:
        return html.P(str(error), className="error", role="alert")
    rows = (
        text("the first {limit:,} rows", limit=LIMIT)
        if len(frame) == LIMIT
        else f"{len(frame):,} {'row' if len(frame) == 1 else 'rows'}"
    )
    links = [
        html.A(
            text("download {name}", name=name),
            href=f"{_DOWNLOAD}?{urlencode({'run': run.key, 'format': name, 'query': query})}",
        )
        for name in ("csv", "arrow")
    ]
    grid = dag.AgGrid(
        id="data-grid",
        rowModelType="infinite",
        columnDefs=[_column(name, dtype) for name, dtype in frame.schema.items()],
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 90, "floatingFilter": True},
        dashGridOptions={
            "cacheBlockSize": _BLOCK_ROWS,
            "infiniteInitialRowCount": min(len(frame), _BLOCK_ROWS),
            "maxBlocksInCache": 20,
            "rowHeight": 30,
            "headerHeight": 34,
            "enableCellTextSelection": True,
            "tooltipShowDelay": 300,
        },
        className="ag-theme-quartz grid",
        style={"height": "calc(100vh - 300px)", "minHeight": "360px"},
    )
    about = [html.Span(rows, id="data-count"), *links]
    return [html.Div(about, className="controls small"), _about(query), html.Div(grid, key=f"{query} {run.read_at}")]


def _about(query: str) -> Any:  # noqa: ANN401
    """What the table holds, if a whole table is asked for."""
    name = query.rpartition(" ")[2]
    if _everything(name) != query:
        return None
    return quiet(TABLES[name].doc if name in TABLES else _DERIVED.get(name, ""))


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


def _rows(run: Run | None, query: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """The block of rows that the grid asks for, and how many there are."""
    if run is None:
        return {"rowData": [], "rowCount": 0}
    try:
        frame = narrowed(_answer(run, query), wanted.get("filterModel") or {}, wanted.get("sortModel") or [])
    except BadQuery:
        return {"rowData": [], "rowCount": 0}
    block = frame.slice(wanted["startRow"], wanted["endRow"] - wanted["startRow"])
    return {"rowData": block.with_columns(_as_json(block)).to_dicts(), "rowCount": len(frame)}


def _as_json(frame: pl.DataFrame) -> list[pl.Expr]:
    """What JSON cannot hold exactly, as text: long numbers, infinities, and what is made of several values."""
    exact = []
    for name, dtype in frame.schema.items():
        column = pl.col(name)
        if dtype.is_integer():
            largest = frame.select(column.cast(pl.Float64).abs().max()).item()
            exact += [column.cast(pl.String)] if largest is not None and largest > _EXACT_IN_JSON else []
        elif dtype.is_float():
            exact.append(pl.when(column.is_finite()).then(column))
        elif dtype.is_nested():
            exact.append(column.map_elements(str, return_dtype=pl.String))
    return exact


def _download(state: State) -> Response:
    """The whole answer as a file."""
    run = state.ready(request.args.get("run", ""))
    if run is None:
        return Response("there is no such run", 404)
    try:
        frame = _answer(run, request.args.get("query", ""))
    except BadQuery as error:
        return Response(str(error), 400, mimetype="text/plain")
    if request.args.get("format") == "csv":
        content, kind, ending = frame.write_csv().encode(), "text/csv", "csv"
    else:
        buffer = io.BytesIO()
        frame.write_ipc(buffer, compression="zstd")
        content, kind, ending = buffer.getvalue(), "application/vnd.apache.arrow.file", "arrow"
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(run.name)}.{ending}"}
    return Response(content, mimetype=kind, headers=headers)
