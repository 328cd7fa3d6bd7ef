"""What pages are made of: the pieces that all of them use, and the list of pages.

A page is a module of `pages/`; being in that folder is the registration. It has

- `TITLE`, and `ORDER`, its place in the navigation,
- `layout(run: Run, query: Query) -> Component`: the page of a run that is ready,
- `register(app: Dash, state: State) -> None` if it has callbacks or routes of its own,
- `MADE`, the tables that it makes of a run: a function of the run each, by name,
- `early(key: str) -> Component` if it has something to show as soon as the run's lanes are there.

Its address is `/` and the module's name. What a page shows is renewed when the run is, unless it says `KEEPS = True`;
one that says `OF_TWO = True` is in the navigation where two runs are open.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlencode

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from rankscope.analysis.text.message import Text, speaking, spoken, text
from rankscope.dashboard import pages
from rankscope.dashboard.run import Run

__all__ = [
    "HOME",
    "Query",
    "address",
    "all_pages",
    "card",
    "choice",
    "choice_of_text",
    "empty",
    "facts",
    "heading",
    "in_language",
    "plot",
    "query_of",
    "quiet",
    "run_in_language",
    "sentence",
    "with_choice",
]

Query = Mapping[str, str]
Children = Any  # Dash's components are not typed
HOME = "overview"
_FEW_OPTIONS = 10  # of a select; among more one is found by typing
_SELECT_PX = 230


@cache
def all_pages() -> dict[str, ModuleType]:
    """Every page by name, in the order of the navigation."""
    found = [import_module(f"{pages.__name__}.{module.name}") for module in pkgutil.iter_modules(pages.__path__)]
    return {page.__name__.rpartition(".")[2]: page for page in sorted(found, key=lambda page: int(page.ORDER))}


def in_language(page: Any) -> Any:  # noqa: ANN401 - a component, or what holds some
    """The page with its texts in the language that is spoken."""
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
    """The run with its report in this language. The same one each time, since pages keep what they made of it."""
    with speaking(language):
        return replace(run, report=spoken(run.report))


def address(page: str, run: str = "", **query: object) -> str:
    """The page's address within this server; the first run needs no name."""
    words = {name: str(value) for name, value in query.items()} | ({"run": run} if run else {})
    return f"/{'' if page == HOME else page}" + (f"?{urlencode(words)}" if words else "")


def query_of(search: str | None) -> Query:
    """The words behind the `?` of an address."""
    return dict(parse_qsl((search or "").lstrip("?")))


def with_choice(search: str | None, **chosen: str) -> str:
    """The words behind the `?` with what was chosen; what is empty goes."""
    words = {name: word for name, word in ({**query_of(search), **chosen}).items() if word}
    return f"?{urlencode(words)}" if words else ""


def heading(title: str, meaning: str = "") -> Children:
    """A page's title, and in one line what it shows."""
    return html.Div([html.H1(title), quiet(meaning) if meaning else None], className="page-title")


def card(title: str, *children: Children, note: str = "", className: str = "") -> Children:  # noqa: N803 - as Dash has it
    head = html.Div([html.H2(title), quiet(note) if note else None], className="card-head") if title else None
    return dmc.Paper([head, *children], withBorder=True, radius="md", className=f"card {className}")


def choice(name: str, label: str, options: Sequence[Any], value: str, *, drops: str = "") -> Children:
    """A select whose value is this word of the address, so that the page is shown anew with it.

    `drops` are words of the address that mean nothing any more once another is chosen.
    """
    return dmc.Select(
        id={"kind": "choice", "name": name, "shown": value, "drops": drops},
        label=label,
        data=list(options),
        value=value,
        allowDeselect=False,
        searchable=len(options) > _FEW_OPTIONS,
        w=_SELECT_PX,
    )


def choice_of_text(name: str, label: str, value: str, placeholder: str) -> Children:
    """The same with a field to write into; Enter asks for it."""
    return dmc.TextInput(
        id={"kind": "choice", "name": name, "shown": value, "drops": ""},
        label=label,
        value=value,
        placeholder=placeholder,
        debounce=True,
        w=_SELECT_PX,
    )


def quiet(text: Children) -> Children:
    return html.P(text, className="quiet")


def facts(*items: str) -> Children:
    return html.Ul([html.Li(item) for item in items if item], className="facts")


def empty(title: str, why: str, what_to_do: str = "") -> Children:
    """In place of a chart that would have nothing to show: why, and how to get it."""
    return dmc.Alert(
        [html.P(why), html.P(what_to_do) if what_to_do else None], title=title, color="gray", variant="light"
    )


def plot(figure: dict[str, Any], *, height: int = 320) -> Children:
    """A plotly figure; plotly is fetched only by pages that have one."""
    config: Any = {"displaylogo": False, "responsive": True, "displayModeBar": False, "doubleClick": "reset"}
    return dcc.Graph(figure=figure, config=config, style={"height": f"{height}px"}, className="plot")
