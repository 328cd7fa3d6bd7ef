"""Tick fixes, see the predicted step."""

from __future__ import annotations

from dash import Dash, Input, Output, html
from dash import State as Known

from rankscope.analysis.replay.protocol import Unreplayable
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.units import duration, duration_with_error, percent
from rankscope.dashboard.components import Ticks
from rankscope.dashboard.page_kit import (
    Children,
    Page,
    Query,
    card,
    empty,
    heading,
    in_language,
    query_of,
    quiet,
    sentence,
)
from rankscope.dashboard.run import Run
from rankscope.dashboard.state import State
from rankscope.dashboard.whatif_session import TriedFix, fixes, gain, replayable

_MEANING = text("The recorded steps are replayed with what you tick fixed; everything else stays as it was.")
_ROWS = 40


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    ready = replayable(run)
    if isinstance(ready, Unreplayable):
        return html.Div(
            [heading(page.title, _MEANING), empty(text("Nothing can be predicted"), sentence(ready.reason))]
        )
    found, untried = fixes(run)
    if not found:
        return html.Div(
            [heading(page.title, _MEANING), empty(text("Nothing to fix"), text("This run allows no fix to be tried."))]
        )
    met = ready.fidelity
    trust = text(
        "Replayed with no fix, {steps} steps are met within {median} (median) and {p90} (90th "
        "percentile). ± is a 95 % confidence interval.",
        steps=met.steps,
        median=percent(met.median_error),
        p90=percent(met.p90_error),
    )
    more = text("{count} more were not tried here: rankscope whatif --fix.", count=untried) if untried else ""
    first = found[:_ROWS]
    rows = Ticks(
        "what-if-ticked", [_row(run, fix, ready.step_ns, found[0]) for fix in first], [fix.key for fix in first]
    )
    return html.Div(
        [
            heading(page.title, _MEANING),
            card("", html.Div(_together(run, []), id="what-if-together"), className="together"),
            card(text("What each alone would bring"), rows, quiet(joined(" ", (trust, more)) if more else trust)),
        ]
    )


def register(app: Dash, state: State) -> None:
    app.callback(
        Output("what-if-together", "children"),
        Input("what-if-ticked", "value"),
        Known("url", "search"),
        prevent_initial_call=True,
    )(lambda ticked, search: in_language(_together(state.ready(query_of(search).get("run", "")), ticked)))


def _together(run: Run | None, ticked: list[str]) -> Children:
    """Return the mean step now, and with all that is ticked."""
    ready = None if run is None else replayable(run)
    if run is None or ready is None or isinstance(ready, Unreplayable):
        return None
    now = [html.Span(text("now"), className="quiet"), html.Strong(duration(ready.step_ns))]
    if not ticked:
        return html.Div([*now, quiet(text("mean step; tick something below"))], className="steps-now")
    found = gain(run, ticked)
    if found is None:
        return html.Div([*now, quiet(text("this cannot be predicted"))], className="steps-now")
    saved = duration_with_error(round(found.gain_ns), round(found.uncertainty_ns))
    return html.Div(
        [
            *now,
            html.Span("→", className="quiet"),
            html.Strong(duration(found.step_ns), id="what-if-step"),
            quiet(text("mean step; {saved} less, {gain}", saved=saved, gain=percent(found.gain_ns / ready.step_ns))),
        ],
        className="steps-now",
    )


def _row(run: Run, fix: TriedFix, step_ns: float, best: TriedFix) -> Children:
    saved = duration_with_error(round(fix.gain.gain_ns), round(fix.gain.uncertainty_ns))
    share = max(fix.gain.gain_ns, 0) / max(best.gain.gain_ns, 1)
    return html.Div(
        [
            html.Span([html.Span(fix.text), quiet(_costs_other(run, fix))]),
            html.Div(html.Div(className="bar", style={"width": f"{share * 100:.1f}%"}), className="track"),
            html.Span(text("{saved} less", saved=saved), className="number"),
            html.Span(percent(fix.gain.gain_ns / step_ns), className="number"),
        ],
        className="fix",
    )


def _costs_other(run: Run, fix: TriedFix) -> str | None:
    """Return the cost of the finding with this fix, if it differs from the fix's gain."""
    for number, finding in enumerate(run.report.findings, 1):
        lost = duration(finding.lost_ns_per_step)
        if finding.fix == fix.key and finding.lost_ns_per_step and lost != duration(round(fix.gain.gain_ns)):
            return text(
                "finding {number} costs {lost} as measured; the replay predicts what a fix saves",
                number=number,
                lost=lost,
            )
    return None


page = Page(title=text("What if"), order=100, layout=layout, register=register)
