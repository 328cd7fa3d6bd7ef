"""Every rank in every step at a glance: a slow rank is a dark row, a slow step a dark column."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from urllib.parse import urlencode

import polars as pl
from dash import Dash, html
from flask import Response, request

from rankscope.analysis.report import charts
from rankscope.analysis.report.view import view_of
from rankscope.analysis.text.message import spoken, text
from rankscope.analysis.text.units import duration, percent
from rankscope.dashboard.components import Chart, Raster
from rankscope.dashboard.figures.rank_step_heatmap import QUANTITIES, Grid, View, cell, grid, picture, rank_order
from rankscope.dashboard.page_kit import (
    Children,
    Page,
    Query,
    address,
    card,
    choice,
    empty,
    heading,
    quiet,
    section_body,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State
from rankscope.dashboard.timeline.groupings import groupings
from rankscope.dashboard.timeline.scene import spoken_title

_DATA = "/ranks-data"
_MEANING = text("One row per rank, one column per step. A row that stands out is a slow rank, a column a slow step.")
_OWN = text("own work: all but communication, input, garbage collection and compilation")
_MOST_PIXELS = 4096
_AROUND = 20  # steps whose timeline is named for one that is not held
_SLOWEST, _BY_RANK = "largest first", "rank"


def layout(run: Run, query: Query) -> Children:
    if run.timeline.steps.is_empty():
        why = next((gap.why for gap in run.timeline.gaps if gap.table == "steps"), text("this trace holds no steps"))
        return html.Div([heading(page.title, _MEANING), empty(text("No steps to show"), why)])
    default = "step" if run.timeline.breakdown.is_empty() else "own"
    orders = [_BY_RANK, _SLOWEST, *_groups(run)]
    quantity = query.get("quantity", default)
    quantity = quantity if quantity in QUANTITIES else default
    order = query.get("order", _BY_RANK)
    order = order if order in orders else _BY_RANK
    quantities = [{"value": name, "label": label} for name, label in QUANTITIES.items()]
    controls = [
        choice("quantity", text("Show"), quantities, quantity),
        choice("order", text("Order ranks by"), [_order(name) for name in orders], order),
    ]
    return html.Div(
        [
            heading(page.title, _MEANING),
            html.Div(controls, className="controls"),
            card("", html.Div(_raster(run, quantity, order))),
            card(text("Waited for others"), *_waits(run)),
        ]
    )


def _order(name: str) -> dict[str, str]:
    """One way to order the ranks, as a select shows it; its name is used in addresses."""
    own = {_SLOWEST: text("largest first"), _BY_RANK: text("rank")}
    return {"value": name, "label": own.get(name) or spoken_title(name)}


def register(app: Dash, state: State) -> None:
    app.server.add_url_rule(_DATA, "ranks_data", lambda: _data(state))


def _raster(run: Run, quantity: str, order: str) -> Children:
    found = _grid(run, quantity)
    if not found.values.size:
        missing = text("no operation was matched on all its ranks") if quantity == "last" else _why_no_parts(run)
        return empty(text("{quantity} is unknown", quantity=QUANTITIES[quantity]), missing)
    words = {"run": run.key, "quantity": quantity, "order": order, "at": run.read_at}
    raster = Raster(
        source=f"{_DATA}?{urlencode(words)}",
        rows=len(found.ranks),
        columns=len(found.steps),
        title=text(
            "{quantity}, {ranks} ranks, {steps} steps",
            quantity=QUANTITIES[quantity],
            ranks=len(found.ranks),
            steps=len(found.steps),
        ),
    )
    shades = [html.I(style={"background": f"var(--level{level})"}) for level in range(5)]
    legend = html.Li(
        [
            _value(found, found.low),
            text(" or less "),
            *shades,
            text(" {value} or more", value=_value(found, found.high)),
        ]
    )
    meaning = _OWN if quantity == "own" else QUANTITIES[quantity]
    how = text("Point for the value; click to open the moment in the timeline; drag to look closer.")
    stretch = run.trace.stretch
    only = stretch.said if stretch and not stretch.asked and not run.steps else ""
    if found.cut:
        only = text("Steps before {step} are too many to be shown here.", step=found.cut)
    return [
        quiet(text("{quantity}. {how}", quantity=meaning, how=how)),
        quiet(only) if only else None,
        raster,
        html.Ul([legend], className="levels"),
    ]


def _why_no_parts(run: Run) -> str:
    return run.trace.reader.cannot().get("breakdown", text("no step could be split into its parts"))


@lru_cache(maxsize=len(QUANTITIES))
def _grid(run: Run, quantity: str) -> Grid:
    return grid(run.timeline, quantity, run.steps)


def _groups(run: Run) -> dict[str, list[list[int]]]:
    """By the name of each way to put ranks together: the ranks in order."""
    return {found.title: [list(ranks) for ranks in found.groups.values()] for found in groupings(run.timeline)}


def _data(state: State) -> Response:
    """Return the raster's bytes, or what is known of one cell of it."""
    asked = request.args
    run = state.ready(asked.get("run", ""))
    quantity = asked.get("quantity", "")
    if run is None or quantity not in QUANTITIES:
        return Response("there is no such picture", 404)
    found = _grid(run, quantity)
    try:
        numbers = {name: int(asked[name]) for name in ("r0", "r1", "c0", "c1", "width", "height")}
        row, column = (int(asked[name]) if name in asked else -1 for name in ("row", "column"))
    except (KeyError, ValueError):
        return Response("r0, r1, c0, c1, width and height are whole numbers", 400)
    view = View(**numbers)
    fits = 0 <= view.r0 < view.r1 <= len(found.ranks) and 0 <= view.c0 < view.c1 <= len(found.steps)
    if not fits or not (0 < view.width <= _MOST_PIXELS and 0 < view.height <= _MOST_PIXELS):
        return Response("outside of the picture", 400)
    order = asked.get("order", _BY_RANK)
    groups = None if order == _SLOWEST else _groups(run).get(order, [found.ranks.tolist()])
    rows = rank_order(found, groups)
    if view.r0 <= row < view.r1 and view.c0 <= column < view.c1:
        return _about(run, found, *cell(found, rows, view, row, column))
    drawn = picture(found, rows, view)
    labels = {"shape": drawn.cells.shape, "rows": drawn.row_labels, "columns": drawn.column_labels}
    return Response(
        drawn.cells.tobytes(), mimetype="application/octet-stream", headers={"X-Labels": json.dumps(labels)}
    )


def _about(run: Run, found: Grid, rank: int, step: int, value: float) -> Response:
    """Return what to say of a cell, and where the timeline shows it."""
    node = run.timeline.ranks.filter(pl.col("rank") == rank)["node"].to_list()
    lines = [
        text("rank {rank}", rank=rank)
        + (text(" on node {node}", node=node[0]) if node and node[0] is not None else "")
        + text(", step {step}", step=step)
    ]
    span = run.timeline.steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    if not math.isnan(value):
        lines.append(text("{quantity}: {value}", quantity=QUANTITIES[found.quantity], value=_value(found, value)))
    else:  # steps before those that are held are of a stretch that could not be analyzed
        lines.append(text("not analyzed") if run.steps and span.is_empty() else text("not recorded"))
    href = ""
    if len(span):
        lines += [text("not analyzed: {aside}", aside=aside) for aside in span["aside"].drop_nulls()]
        href = address("timeline", run.key, t0=span["start_ns"][0], t1=span["end_ns"][0], rank=rank)
    elif not math.isnan(value) and run.trace.stretch and step >= run.trace.stretch.kept:  # records of others are gone
        steps = f"{max(step - _AROUND, run.trace.stretch.kept)}-{step + _AROUND}"
        lines.append(text("its timeline: rankscope ui {run}/steps={steps}", run=run.trace.path, steps=steps))
    return Response(json.dumps({"text": "\n".join(spoken(lines)), "href": href}), mimetype="application/json")


def _value(found: Grid, value: float) -> str:
    return percent(value) if found.quantity == "last" else duration(value)


def _waits(run: Run) -> list[Children]:
    (shown,) = view_of(run.report).of("waits")
    chart = charts.waited(run.report)
    if chart is None:
        return section_body(shown)
    return [html.Div([Chart(chart, title=shown.title), quiet(shown.means)], className="picture")]


page = Page(title=text("Ranks"), order=30, layout=layout, register=register)
