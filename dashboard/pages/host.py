"""Input, garbage collection, compilation, checkpoints and a host that is too slow for its device."""

from __future__ import annotations

from typing import Any

from dash import html

from rankscope.dashboard.figures import host as figures
from rankscope.dashboard.figures.kernels import launch_delays
from rankscope.dashboard.page import Query, Shown, card, empty, heading, plot, table
from rankscope.dashboard.state import Run

TITLE, ORDER = "Host", 60

_MEANING = (
    "What keeps the host from its work: fetching input, garbage collection, compilation, checkpoints, "
    "launching too late."
)
_ROWS = 200


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001 - Dash's components are not typed
    timeline = run.timeline
    judged = timeline.breakdown.join(timeline.steps.filter("judged"), on=["rank", "step"], how="semi")
    delays = launch_delays(timeline.kernels)
    if judged.is_empty() and timeline.regions.is_empty() and delays.is_empty():
        why = run.trace.reader.cannot().get("breakdown", "Nothing of what the host did was recorded.")
        return html.Div([heading(TITLE, _MEANING), empty("Nothing of the host", why)])
    no_parts = run.trace.reader.cannot().get("breakdown", "No step was judged, so none could be split into parts.")
    over_steps = plot(figures.over_steps(judged)) if len(judged) else empty("No steps to show", no_parts)
    return html.Div(
        [
            heading(TITLE, _MEANING),
            card("Over the judged steps", over_steps),
            card("By rank, mean per judged step", table(figures.by_rank(judged), _RANKS)) if len(judged) else None,
            card("From launch to start on the device", table(delays, _DELAYS), note=_DELAY) if len(delays) else None,
            card(
                "What the host's threads did, the longest first",
                table(figures.by_name(timeline.regions).head(_ROWS), _REGIONS),
            )
            if len(timeline.regions)
            else None,
        ]
    )


_DELAY = "Long: the device has work queued up. Short: it waits for the host."
_RANKS = {
    "rank": Shown("rank"),
    "input": Shown("input", "time"),
    "gc": Shown("garbage collection", "time"),
    "compile": Shown("compile", "time"),
    "checkpoint": Shown("checkpoint", "time"),
    "host": Shown("host too slow", "time"),
    "other": Shown("other", "time"),
}
_DELAYS = {
    "rank": Shown("rank"),
    "count": Shown("launches"),
    "p5_ns": Shown("shortest 5 %", "time"),
    "median_ns": Shown("median", "time"),
    "p95_ns": Shown("longest 5 %", "time"),
}
_REGIONS = {
    "kind": Shown("kind"),
    "name": Shown("name"),
    "count": Shown("count"),
    "ns": Shown("time, all ranks", "time"),
    "longest_ns": Shown("longest", "time"),
    "ranks": Shown("ranks"),
    "most_rank": Shown("longest on rank"),
}
