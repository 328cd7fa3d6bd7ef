"""The nodes' counters over the run."""

from __future__ import annotations

import polars as pl
from dash import Dash, Input, Output, html
from dash import State as Known

from rankscope.analysis.model import digest
from rankscope.analysis.report import phrases
from rankscope.analysis.report.labels import say
from rankscope.analysis.text.message import joined, text, translated
from rankscope.dashboard.figures import counters as figures
from rankscope.dashboard.page_kit import (
    Children,
    Page,
    Query,
    card,
    empty,
    heading,
    in_language,
    plot,
    query_of,
    quiet,
    select,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State

_MEANING = text("The nodes' counters over time. Cumulative counters are shown as rates. Faint lines are ends of steps.")
_AT_FIRST = 8
_MOST_MARKS = 80


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    missing = [
        say("gaps.where", phrases.gap_extent(group), group.why)
        for group in digest.gap_groups(run.report)
        if group.table == "counters"
    ]
    unseen = quiet(text("Not recorded. {missing}.", missing=joined("; ", missing))) if missing else None
    counters = run.timeline.counters
    if counters.is_empty():
        why = text("No node counters were recorded: rankscope's agent on each node records them.")
        return html.Div(
            [
                heading(page.title, _MEANING),
                empty(text("No counters"), why, text("Start the job with rankscope run.")),
                unseen,
            ]
        )
    names, still = figures.changing(counters)
    shown = [name for name in names if name in figures.HEADLINES][:_AT_FIRST] or names[:_AT_FIRST]
    choices = [{"value": f"{source}/{name}", "label": figures.title_of(source, name)} for source, name in names]
    constant = ", ".join(f"{source} {translated(figures.words_of(name))}" for source, name in still)
    return html.Div(
        [
            heading(page.title, _MEANING),
            html.Div([_card(run, source, name) for source, name in shown], className="columns"),
            card(
                text("Another counter"),
                select("nodes-counter", text("Counter"), choices, None, width_px=420),
                html.Div(id="nodes-chosen"),
            ),
            quiet(text("Never changed: {counters}.", counters=constant)) if constant else None,
            unseen,
        ]
    )


def register(app: Dash, state: State) -> None:
    app.callback(
        Output("nodes-chosen", "children"),
        Input("nodes-counter", "value"),
        Known("url", "search"),
        prevent_initial_call=True,
    )(lambda chosen, search: in_language(_chosen(state.ready(query_of(search).get("run", "")), chosen)))


def _chosen(run: Run | None, chosen: str | None) -> Children:
    if run is None or not chosen:
        return None
    source, _, name = chosen.partition("/")
    return _plot(run, source, name, height=320)


def _card(run: Run, source: str, name: str) -> Children:
    return card(figures.title_of(source, name), _plot(run, source, name, height=300))


def _plot(run: Run, source: str, name: str, *, height: int) -> Children:
    timeline = run.timeline
    frames = [timeline.steps, timeline.collectives, timeline.regions, timeline.counters.rename({"time_ns": "start_ns"})]
    first, last = (
        pl.concat([frame.select("start_ns") for frame in frames])
        .select(first=pl.col("start_ns").min(), last=pl.col("start_ns").max())
        .row(0)
    )
    ends = timeline.steps.group_by("step").agg(pl.col("end_ns").max())["end_ns"].sort()
    marks = ends.to_list() if len(ends) <= _MOST_MARKS else []
    found = figures.series(timeline.counters, source, name)
    count, shown = found.select("node", "device").n_unique(), figures.MOST_LINES
    few = text("Shown: {shown} of {count} lines, those that change most.", shown=shown, count=count)
    return html.Div(
        [
            plot(figures.lines(found, name, first, last, marks), height=height),
            quiet(few) if count > shown else None,
        ]
    )


page = Page(title=text("Nodes"), order=70, layout=layout, register=register)
