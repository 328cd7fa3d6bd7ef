"""Tables on pages: of the run, or made of it. A grid can be filtered, queried in SQL, and downloaded.

A page names the tables that it makes of a run (`Page.tables`), a function of the run each; they are made when they are
asked for, and SQL knows them like the run's own.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlencode

import dash_ag_grid as dag
import polars as pl
from dash import MATCH, Dash, Input, Output, ctx, dcc, html
from flask import Response, request

from rankscope.analysis.model.tables import as_texts
from rankscope.analysis.text.message import Text, language, spoken, text
from rankscope.dashboard.page_kit import Children, address, all_pages, in_language
from rankscope.dashboard.run import Run
from rankscope.dashboard.sql import answer, narrowed, written
from rankscope.dashboard.state import State
from rankscope.errors import BadQuery

__all__ = [
    "Shown",
    "answered",
    "away",
    "everything",
    "plain_table",
    "plainly_away",
    "register",
    "rows_grid",
    "table",
    "tables_of",
]

_DOWNLOAD = "/data-download"
_EXACT_IN_JSON = 2**53  # a browser's numbers are exact up to here
_BLOCK_ROWS = 200
_KEPT = 64  # tables of pages
_SENT_ROWS = 100  # a longer table is sent as it is scrolled, and has fields to filter by
_ROWS_AT_ONCE = 12  # longer tables scroll
_LETTER_PX, _PADDING_PX, _FILTER_PX = 8.0, 24, 26
_LEAST_LETTERS, _MOST_LETTERS = 8, 60  # of a column
_WRITTEN_LETTERS = {"flops": 10, "flops_rate": 12, "rate": 10}  # of values of these kinds, as `Shown` has them

_HEADS: Mapping[str, Any] = {"wrapHeaderText": True, "autoHeaderHeight": True}
_LOOK: Mapping[str, Any] = {"rowHeight": 30, "tooltipShowDelay": 300, "enableCellTextSelection": True}
_WORDS: Mapping[str, Text] = {  # of AG Grid, which speaks English by itself
    "filterOoo": text("Filter…"),
    "equals": text("Equals"),
    "notEqual": text("Does not equal"),
    "blank": text("Blank"),
    "notBlank": text("Not blank"),
    "contains": text("Contains"),
    "notContains": text("Does not contain"),
    "startsWith": text("Begins with"),
    "endsWith": text("Ends with"),
    "lessThan": text("Less than"),
    "lessThanOrEqual": text("Less than or equal to"),
    "greaterThan": text("Greater than"),
    "greaterThanOrEqual": text("Greater than or equal to"),
    "inRange": text("Between"),
    "inRangeStart": text("From"),
    "inRangeEnd": text("To"),
    "andCondition": text("AND"),
    "orCondition": text("OR"),
    "loadingOoo": text("Loading…"),
    "noRowsToShow": text("No rows"),
    "noMatchingRows": text("No rows match"),
}


@dataclass(frozen=True, slots=True)
class Shown:
    """How a column is headed and written: as it is, as a "time" (ns), "bytes", a "rate" (bytes/s) or a "share".

    "flops" and "flops_rate" are such numbers too.

    "moment": a link to the timeline, from the row's `start_ns`, `end_ns` and the rank in this column.
    """

    title: str
    kind: str = ""


class Tables(Mapping[str, pl.DataFrame]):
    """The tables of a run by name, those that are made of it too."""

    def __init__(self, run: Run) -> None:
        self._run, self._held = run, dict(run.tables)
        self._made: dict[str, Callable[[Run], pl.DataFrame]] = {
            name: make for page in all_pages().values() for name, make in page.tables.items()
        }

    def __getitem__(self, name: str) -> pl.DataFrame:
        if name not in self._held:
            self._held[name] = as_texts(self._made[name](self._run))
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._held, **self._made})

    def __len__(self) -> int:
        return len({**self._held, **self._made})


@lru_cache(maxsize=4)
def tables_of(run: Run) -> Mapping[str, pl.DataFrame]:
    return Tables(run)


def everything(table: str) -> str:
    return f"SELECT * FROM {table}"


class _Pages:
    """The rows that pages show and that are no table of one run, by what they hold; those that were shown last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._frames: OrderedDict[str, pl.DataFrame] = OrderedDict()

    def keep(self, frame: pl.DataFrame) -> str:
        """Return the name by which they can be asked for."""
        name = f"shown_{hashlib.blake2s(frame.write_csv().encode(), digest_size=6).hexdigest()}"
        with self._lock:
            self._frames[name] = frame
            self._frames.move_to_end(name)
            while len(self._frames) > _KEPT:
                self._frames.popitem(last=False)
        return name

    def named_in(self, query: str) -> dict[str, pl.DataFrame]:
        with self._lock:
            return {name: self._frames[name] for name in re.findall(r"shown_\w+", query) if name in self._frames}


_PAGES = _Pages()


@lru_cache(maxsize=8)
def answered(run: Run, query: str) -> pl.DataFrame:
    """Return the answer to a query on the run's tables and the rows of pages. Raises BadQuery."""
    tables, name = ChainMap(_PAGES.named_in(query), tables_of(run)), query.rpartition(" ")[2]  # type: ignore[arg-type]
    return tables[name] if query == everything(name) and name in tables else answer(tables, query)


def table(run: Run, name: str, columns: Mapping[str, Shown], *, height: str = "auto") -> Children:
    """Return a table of the run in a grid, with its downloads: a file, or SQL."""
    frame, query = tables_of(run)[name], everything(name)
    definitions = _definitions(frame, columns, run.key)
    if len(frame) > _SENT_ROWS:
        numbers = {"filter": "agNumberColumnFilter", "headerTooltip": spoken(text("Filters count in ns and bytes."))}
        for definition in definitions:
            definition |= {} if definition["filter"] or definition["field"] not in columns else numbers
        grid = rows_grid(run, query, definitions, height="420px" if height == "auto" else height)
    else:
        grid = _grid(frame, columns, definitions, height, id=_known("grid", run.key, query))
    return html.Div([away(run.key, query), grid])


def plain_table(run: str, frame: pl.DataFrame, columns: Mapping[str, Shown]) -> Children:
    """Return a grid of rows that are no table of one run, on a page of this one, with their downloads."""
    frame = as_texts(frame)
    query = everything(_PAGES.keep(frame.select(list(columns))))
    grid = _grid(frame, columns, _definitions(frame, columns, ""), "auto", id=_known("grid", run, query))
    return html.Div([away(run, query), grid])


def rows_grid(run: Run, query: str, definitions: list[dict[str, Any]], *, height: str) -> Children:
    """Return a grid that asks for an answer's rows as it is scrolled."""
    return dag.AgGrid(
        id=_known("rows", run.key, query),
        rowModelType="infinite",
        columnDefs=definitions,
        defaultColDef={"sortable": True, "resizable": True, "minWidth": 90, "floatingFilter": True, **_HEADS},
        dashGridOptions={
            **_look(),
            "cacheBlockSize": _BLOCK_ROWS,
            "infiniteInitialRowCount": min(len(answered(run, query)), _BLOCK_ROWS),
            "maxBlocksInCache": 20,
        },
        className="ag-theme-quartz grid",
        style={"height": height, "minHeight": "300px"},
    )


def _grid(
    frame: pl.DataFrame,
    columns: Mapping[str, Shown],
    definitions: list[dict[str, Any]],
    height: str,
    *,
    id: Mapping[str, str],
) -> Children:
    """Return a grid that has all its rows. It can be sorted by the values, not by how they are written."""
    fits = height == "auto" and len(frame) <= _ROWS_AT_ONCE
    needed = [name for name in frame.columns if name in columns or name in ("start_ns", "end_ns")]
    written_ = frame.select(needed)
    return dag.AgGrid(
        rowData=written_.with_columns(_as_json(written_)).to_dicts(),
        columnDefs=definitions,
        defaultColDef={"sortable": True, "resizable": True, **_HEADS},
        dashGridOptions={**_look(), "domLayout": "autoHeight" if fits else "normal"},
        className="ag-theme-quartz grid",
        style={"height": None if fits else "420px" if height == "auto" else height},
        id=id,
    )


def _look() -> dict[str, Any]:
    return {**_LOOK, "localeText": spoken(dict(_WORDS))} if language() != "en" else dict(_LOOK)


def _known(kind: str, run: str, query: str) -> dict[str, str]:
    """Ids of a grid and its downloads, for the callbacks."""
    return {"kind": kind, "run": run, "query": query}


def _definitions(frame: pl.DataFrame, columns: Mapping[str, Shown], run: str) -> list[dict[str, Any]]:
    texts = {name for name in columns if frame.schema[name] == pl.String}
    longest = {name: _WRITTEN_LETTERS.get(shown.kind, 0) for name, shown in columns.items()}
    longest |= {name: min(max(map(len, frame[name].drop_nulls().unique()), default=0), _MOST_LETTERS) for name in texts}
    definitions = []
    for name, shown in columns.items():
        definition: dict[str, Any] = {
            "field": name,
            "headerName": shown.title,
            "filter": "agTextColumnFilter" if name in texts else False,
            "type": None if name in texts else "rightAligned",
            "valueFormatter": {"function": f"rankscope_{shown.kind}(params.value)"} if shown.kind else None,
            "flex": max(longest.get(name, 0), _LEAST_LETTERS),
            "minWidth": _width(spoken(shown.title), longest.get(name, 0), filtered=name in texts),
            "tooltipField": name if name in texts else None,
        }
        if shown.kind == "moment":
            link = {"run": run, "label": spoken(text("rank {rank}: show"))}
            definition["minWidth"] = _width(spoken(shown.title), len(link["label"]), filtered=False)
            definition |= {"valueFormatter": None, "cellRenderer": "RankscopeMoment", "cellRendererParams": link}
        definitions.append(definition)
    return definitions


def _width(title: str, letters: int, *, filtered: bool) -> int:
    """Px of a column that shows this many letters, and the longest word of its heading."""
    head = max(map(len, title.split()), default=0) * _LETTER_PX + (_FILTER_PX if filtered else 0)
    return round(max(head, letters * _LETTER_PX, _LEAST_LETTERS * _LETTER_PX) + _PADDING_PX)


def _as_json(frame: pl.DataFrame) -> list[pl.Expr]:
    """Return values that JSON cannot hold exactly as text: long numbers, infinities, and nested values."""
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


# ---------------------------------------------------------------- downloads


def away(run: str, query: str) -> Children:
    """Return the downloads of a grid's rows of the run with this key, as it filters and sorts them."""
    return html.Div(_taken_away(run, query), id=_known("away", run, query), className="controls small")


def plainly_away(run: str, frame: pl.DataFrame) -> Children:
    """Return the downloads of rows that a page shows in no grid, and that are no table of one run."""
    return away(run, everything(_PAGES.keep(as_texts(frame))))


def _taken_away(run: str, query: str) -> list[Any]:
    """Links to files with what the query asks, to the query itself, and a button that copies it."""
    files = [
        html.A(
            text("download {name}", name=name),
            href=f"{_DOWNLOAD}?{urlencode({'run': run, 'format': name, 'query': query})}",
        )
        for name in ("csv", "parquet")
    ]
    copied = dcc.Clipboard(content=query, title=text("copy as SQL"), className="copy")
    return [*files, dcc.Link(text("as SQL"), href=address("data", run, sql=query), title=query), copied]


def register(app: Dash, state: State) -> None:
    known = {"run": MATCH, "query": MATCH}
    app.callback(
        Output({"kind": "rows", **known}, "getRowsResponse"),
        Output({"kind": "away", **known}, "children"),
        Input({"kind": "rows", **known}, "getRowsRequest"),
        prevent_initial_call=True,
    )(lambda wanted: _rows(state, ctx.triggered_id, wanted))
    app.callback(
        Output({"kind": "away", **known}, "children", allow_duplicate=True),
        Input({"kind": "grid", **known}, "filterModel"),
        Input({"kind": "grid", **known}, "columnState"),
        prevent_initial_call=True,
    )(lambda filters, columns: _away(ctx.triggered_id, filters, [c for c in columns or () if c.get("sort")]))
    app.server.add_url_rule(_DOWNLOAD, "data_download", lambda: _download(state))


def _away(known: Mapping[str, str], filters: dict[str, Any] | None, order: list[Any] | None) -> Children:
    return in_language(_taken_away(known["run"], written(known["query"], filters or {}, order or [])))


def _rows(state: State, known: Mapping[str, str], wanted: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the block of rows that the grid asks for, how many there are, and the downloads of all."""
    run = state.ready(known["run"])
    filters, order = wanted.get("filterModel") or {}, wanted.get("sortModel") or []
    try:
        frame = pl.DataFrame() if run is None else narrowed(answered(run, known["query"]), filters, order)
    except BadQuery:
        frame = pl.DataFrame()
    block = frame.slice(wanted["startRow"], wanted["endRow"] - wanted["startRow"])
    rows = {"rowData": block.with_columns(_as_json(block)).to_dicts(), "rowCount": len(frame)}
    return rows, _away(known, filters, order)


def _download(state: State) -> Response:
    """Return the whole answer as a file."""
    run = state.ready(request.args.get("run", ""))
    if run is None:
        return Response("there is no such run", 404)
    try:
        frame = answered(run, request.args.get("query", ""))
    except BadQuery as error:
        return Response(str(error), 400, mimetype="text/plain")
    ending = "csv" if request.args.get("format") == "csv" else "parquet"
    if ending == "csv":
        content, kind = frame.write_csv().encode(), "text/csv"
    else:
        buffer = io.BytesIO()
        frame.write_parquet(buffer)
        content, kind = buffer.getvalue(), "application/vnd.apache.parquet"
    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(run.name)}.{ending}"}
    return Response(content, mimetype=kind, headers=headers)
