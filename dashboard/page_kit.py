"""Building blocks of pages, and the list of pages.

A page is a module of `pages/` with `page`, a `Page`; being in that folder is the registration. Its address is `/` and
the module's name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl, urlencode

import polars as pl
from dash import Dash, dcc, html
from dash.development.base_component import Component

from rankscope.analysis.model.finding import Report
from rankscope.analysis.report.view import Section, ShownTable
from rankscope.analysis.text.message import Text, speaking, spoken, text
from rankscope.dashboard import pages
from rankscope.dashboard.components import Select
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State

__all__ = [
    "HOME",
    "Children",
    "Page",
    "Query",
    "Tables",
    "address",
    "all_pages",
    "card",
    "choice",
    "choice_of_text",
    "empty",
    "exports",
    "facts",
    "heading",
    "in_language",
    "plot",
    "query_of",
    "quiet",
    "run_in_language",
    "select",
    "sentence",
    "with_choice",
]

Query = Mapping[str, str]
Tables = Mapping[str, Callable[[Run], pl.DataFrame]]
Children = Any  # Dash's components are not typed
HOME = "overview"
_FIELD_PX = 230


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page as the app sees it.

    order: its place in the navigation.
    layout: what it shows of a run that is ready.
    register: adds callbacks or routes of its own.
    early: what it shows of the run with this key as soon as its lanes are there.
    of_report: the same as soon as its report is there.
    tables: the tables that it makes of a run, by name; they are made when they are asked for.
    keeps: the screen stays as it is when the run is refreshed.
    of_two: it is in the navigation where two runs are open only.
    """

    title: Text
    order: int
    layout: Callable[[Run, Query], Children]
    register: Callable[[Dash, State], None] | None = None
    early: Callable[[str], Children] | None = None
    of_report: Callable[[Report, str], Children] | None = None
    tables: Tables = field(default_factory=dict)
    keeps: bool = False
    of_two: bool = False


@cache
def all_pages() -> dict[str, Page]:
    """Every page by name, in the order of the navigation."""
    names = [module.name for module in pkgutil.iter_modules(pages.__path__)]
    found: dict[str, Page] = {name: import_module(f"{pages.__name__}.{name}").page for name in names}
    return dict(sorted(found.items(), key=lambda named: named[1].order))


def in_language(page: Children) -> Children:
    """Return the page with its texts in the language that is spoken."""
    if isinstance(page, Component):
        for name, value in page.to_plotly_json()["props"].items():  # type: ignore[no-untyped-call]
            setattr(page, name, in_language(value))
        return page
    if isinstance(page, dict):
        return {name: in_language(value) for name, value in page.items()}
    if isinstance(page, (list, tuple)) and page and not isinstance(page[0], (int, float)):
        return type(page)(in_language(value) for value in page)
    return spoken(page) if isinstance(page, Text) else page


def sentence(clause: str) -> Text:
    """`No step was seen.` for `no step was seen`."""
    said = spoken(clause)
    return text("{clause}.", clause=said[:1].upper() + said[1:])


@lru_cache(maxsize=8)
def run_in_language(run: Run, language: str) -> Run:
    """Return the run with its report in this language.

    The same one each time, since pages keep what they made of it.
    """
    with speaking(language):
        return replace(run, report=spoken(run.report))


def address(page: str, run: str = "", **query: object) -> str:
    """Return the page's address within this server; the first run needs no name."""
    words = {name: str(value) for name, value in query.items()} | ({"run": run} if run else {})
    return f"/{'' if page == HOME else page}" + (f"?{urlencode(words)}" if words else "")


def query_of(search: str | None) -> Query:
    """Return the words behind the `?` of an address."""
    return dict(parse_qsl((search or "").lstrip("?")))


def with_choice(search: str | None, **chosen: str) -> str:
    """Return the words behind the `?` with what was chosen; what is empty goes."""
    words = {name: word for name, word in ({**query_of(search), **chosen}).items() if word}
    return f"?{urlencode(words)}" if words else ""


def heading(title: str, meaning: str = "") -> Children:
    """Return a page's title, and in one line what it shows."""
    return html.Div([html.H1(title), quiet(meaning) if meaning else None], className="page-title")


def card(title: str, *children: Children, note: str = "", className: str = "") -> Children:  # noqa: N803 - as Dash has it
    head = html.Div([html.H2(title), quiet(note) if note else None], className="card-head") if title else None
    return html.Div([head, *children], className=f"card {className}")


def choice(name: str, label: str, options: Sequence[Any], value: str, *, drops: str = "") -> Children:
    """Return a select whose value is this word of the address; a choice reloads the page.

    `drops` are words of the address that mean nothing any more once another is chosen.
    """
    return select({"kind": "choice", "name": name, "shown": value, "drops": drops}, label, options, value)


def select(
    key: str | dict[str, str], label: str, options: Sequence[Any], value: str | None, *, width_px: int = _FIELD_PX
) -> Children:
    """Return a select of this id with its label."""
    return _labelled(label, Select(key, options, value, text("choose")), width_px=width_px)


def _labelled(label: str, field: Children, *, width_px: int = _FIELD_PX) -> Children:
    return html.Label([html.Span(label), field], className="field", style={"width": f"min({width_px}px, 100%)"})


def choice_of_text(name: str, label: str, value: str, placeholder: str) -> Children:
    """Return the same with a field to write into; Enter asks for it."""
    key = {"kind": "choice", "name": name, "shown": value, "drops": ""}
    return _labelled(label, dcc.Input(id=key, type="text", value=value, placeholder=placeholder, debounce=True))


def quiet(text: Children) -> Children:
    return html.P(text, className="quiet")


def section_body(section: Section) -> list[Children]:
    """Return the body of a section of the report."""
    shown = [html.P(line) for line in section.lines]
    if section.means:
        shown.append(quiet(section.means))
    return [*shown, _table(section.key, section.table)] if section.table else shown


def _table(key: str, table: ShownTable) -> Children:
    classes = ["number" if column.is_number else "" for column in table.columns]
    heads = [html.Th(column.title, className=of) for column, of in zip(table.columns, classes, strict=True)]
    rows = [html.Tr([html.Td(cell, className=of) for cell, of in zip(row, classes, strict=True)]) for row in table.rows]
    return html.Table([html.Thead(html.Tr(heads)), html.Tbody(rows)], className=f"plain {key}")


def facts(*items: str) -> Children:
    return html.Ul([html.Li(item) for item in items if item], className="facts")


def empty(title: str, why: str, what_to_do: str = "") -> Children:
    """In place of a chart that would have nothing to show: why, and how to get it."""
    return html.Div(
        [html.H2(title), html.P(why), html.P(what_to_do) if what_to_do else None], className="notice", role="status"
    )


def plot(figure: dict[str, Any], *, height: int = 320) -> Children:
    """Return a plotly figure; plotly is fetched only by pages that have one."""
    config: Any = {"displaylogo": False, "responsive": True, "displayModeBar": False, "doubleClick": "reset"}
    drawn = dcc.Graph(figure=figure, config=config, style={"height": f"{height}px"}, className="plot")
    return html.Div([drawn, exports()], className="figure")


def exports() -> Children:
    """Return the buttons that save the chart beside them, of the class `figure`; `exports.js` does it."""
    return html.Div(
        [html.Button(format, title=text("Save the chart as {format}", format=format)) for format in ("PNG", "SVG")],
        className="exports",
    )
