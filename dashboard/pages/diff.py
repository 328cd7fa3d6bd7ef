"""What changed from the first run that was opened to the second."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import polars as pl
from dash import Dash, Input, Output, dcc, html, no_update

from rankscope.analysis.compare.compared_run import ComparedRun
from rankscope.analysis.compare.two_runs import compare, step_change
from rankscope.analysis.diagnosis.analyzed_steps import analyzed_steps
from rankscope.analysis.model.comparison import Comparison
from rankscope.analysis.report.diff_text import arrow, finding_row
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, signed
from rankscope.dashboard.figures.diff_waterfall import change_table, from_a_to_b
from rankscope.dashboard.figures.report_tables import frame_of
from rankscope.dashboard.grids import Shown, plain_table, plainly_away
from rankscope.dashboard.page_kit import (
    Children,
    Page,
    Query,
    address,
    card,
    empty,
    facts,
    heading,
    in_language,
    quiet,
    sentence,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State
from rankscope.errors import NotComparable

_MEANING = text("Run B against run A. ± is a 95 % confidence interval over the analyzed steps of both.")
_TICK_MS = 700
_ROWS = 200


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    return html.Div(
        [
            heading(page.title, _MEANING),
            html.Div(quiet(text("Opening both runs …")), id="diff"),
            dcc.Interval(id="diff-tick", interval=_TICK_MS),
        ]
    )


def register(app: Dash, state: State) -> None:
    app.callback(Output("diff", "children"), Output("diff-tick", "disabled"), Input("diff-tick", "n_intervals"))(
        lambda _: in_language(_when_ready(state))
    )


def _when_ready(state: State) -> tuple[Any, bool]:
    """Return the comparison, and whether there is nothing more to wait for."""
    if len(state.keys) < 2:
        return empty(
            text("One run"), text("Only one run is open."), text("To compare two: rankscope ui RUN_A RUN_B.")
        ), True
    progress = [state.progress(key) for key in state.keys[:2]]
    failed = next((one for one in progress if one.error), None)
    if failed is not None:
        return empty(
            text("Nothing to compare"), text("{name} cannot be read: {error}", name=failed.name, error=failed.error)
        ), True
    a, b = (one.run for one in progress)
    if a is None or b is None or a.pending or b.pending:
        return no_update, False
    return _page(a, b), not (a.running or b.running)


def _page(a: Run, b: Run) -> Children:
    found = _compared(a, b)
    if isinstance(found, str):
        return empty(text("Nothing to compare"), sentence(found))
    return html.Div(
        [
            _head(found, a, b),
            card(text("From A to B"), *_parts(b, found)),
            card(text("Findings"), *_findings(b, found)),
            card(text("Ranks that changed differently from the others"), _ranks(b, found)) if found.ranks else None,
            card(text("Communication"), _operations(b, found), note=text("Mean over analyzed steps."))
            if found.operations
            else None,
            card(text("Kernels"), _kernels(b, found), note=text("Time of a rank per analyzed step."))
            if found.kernels
            else None,
        ]
    )


@lru_cache(maxsize=2)
def _compared(a: Run, b: Run) -> Comparison | str:
    """Return the comparison, or why there is none."""
    try:
        return compare(_all_of(a), _all_of(b))
    except NotComparable as reason:
        why: str = reason.args[0]
        return why


def _all_of(run: Run) -> ComparedRun:
    return ComparedRun.of(run.report, run.timeline, analyzed_steps(run.steps) if run.steps else None)


def _head(found: Comparison, a: Run, b: Run) -> Children:
    times = f"{duration(found.step.a_ns)} → {duration(found.step.b_ns)}"
    severity = "" if not found.step.clear else "medium" if found.step.change_ns > 0 else "good"
    runs = [
        html.Li([f"{letter}: ", dcc.Link(run.name, href=address("overview", run.key)), f": {run.report.verdict}"])
        for letter, run in (("A", a), ("B", b))
    ]
    return html.Div(
        [
            html.H1(text("Mean step {times}: {change}", times=times, change=step_change(found.step))),
            html.Ul(runs, className="facts"),
            facts(*found.notes) if found.notes else None,
        ],
        className=f"verdict {severity}",
    )


def _parts(b: Run, found: Comparison) -> list[Children]:
    if not found.parts:
        return [html.P(text("The parts of the step are not compared; see the reason above."))]
    bars, unit = from_a_to_b(found.step, found.parts, ("A", "B"))
    return [change_table(bars, unit, ("A", "B")), plainly_away(b.key, frame_of(found.parts))]


def _findings(b: Run, found: Comparison) -> list[Children]:
    if not found.findings:
        return [html.P(text("None in either run."))]
    rows = [finding_row(change) for change in found.findings]
    head = html.Tr([html.Th(), html.Th(text("cost per step")), html.Th()])
    cells = [html.Tr([html.Td(status, className="name"), html.Td(cost), html.Td(what)]) for status, cost, what in rows]
    taken = pl.DataFrame([[str(cell) for cell in row] for row in rows], ["change", "cost", "finding"], orient="row")
    return [html.Table([html.Thead(head), html.Tbody(cells)], className="plain"), plainly_away(b.key, taken)]


def _ranks(b: Run, found: Comparison) -> Children:
    rows = [
        {
            "rank": one.rank,
            "a": one.a_ns,
            "b": one.b_ns,
            "change": signed(one.b_ns - one.a_ns),
            "part": part_label(one.part),
            "usual": signed(one.usual_ns),
        }
        for one in found.ranks
    ]
    shown = {
        "rank": Shown(text("rank")),
        "a": Shown(text("time outside communication in A"), "time"),
        "b": Shown(text("in B"), "time"),
    }
    return plain_table(
        b.key,
        pl.DataFrame(rows),
        shown
        | {
            "change": Shown(text("change")),
            "part": Shown(text("difference mostly in")),
            "usual": Shown(text("usual change of a rank")),
        },
    )


def _operations(b: Run, found: Comparison) -> Children:
    rows = [
        {
            "op": one.op,
            "group": one.group,
            "count": arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}"),
            "bytes": arrow(one.a_bytes, one.b_bytes, lambda size: f"{size:,.0f}"),
            "transfer": arrow(one.a_transfer_ns, one.b_transfer_ns, duration),
            "a": one.a_time_ns,
            "b": one.b_time_ns,
            "change": one.b_time_ns - one.a_time_ns,
        }
        for one in found.operations[:_ROWS]
    ]
    shown = {
        "op": Shown(text("operation")),
        "group": Shown(text("group")),
        "count": Shown(text("per step")),
        "bytes": Shown(text("bytes")),
    }
    times = {
        "a": Shown(text("time of a rank in A"), "time"),
        "b": Shown(text("in B"), "time"),
        "change": Shown(text("change"), "time"),
    }
    return plain_table(b.key, pl.DataFrame(rows), shown | {"transfer": Shown(text("transfer"))} | times)


def _kernels(b: Run, found: Comparison) -> Children:
    rows = [
        {
            "name": one.name,
            "count": arrow(one.a_per_step, one.b_per_step, lambda count: f"{count:.3g}"),
            "a": one.a_ns,
            "b": one.b_ns,
            "change": one.b_ns - one.a_ns,
        }
        for one in found.kernels[:_ROWS]
    ]
    shown = {
        "name": Shown(text("kernel")),
        "count": Shown(text("per step")),
        "a": Shown("A", "time"),
        "b": Shown("B", "time"),
    }
    return plain_table(b.key, pl.DataFrame(rows), shown | {"change": Shown(text("change"), "time")})


page = Page(title=text("Diff"), order=105, layout=layout, register=register, of_two=True)
