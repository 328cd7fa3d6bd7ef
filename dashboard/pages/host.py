"""Input, garbage collection, compilation, checkpoints and a host that is too slow for its device."""

from __future__ import annotations

import polars as pl
from dash import html

from rankscope.analysis.report.phrases import lead_line
from rankscope.analysis.text.message import text
from rankscope.dashboard.figures import host as figures
from rankscope.dashboard.figures.kernels import launch_delays
from rankscope.dashboard.grids import Shown, table, tables_of
from rankscope.dashboard.page_kit import Children, Page, Query, Tables, card, empty, heading, plot, quiet
from rankscope.dashboard.run import Run

_MEANING = text(
    "Host-side stalls (input, garbage collection, compilation, checkpoints, late launches) and host run-ahead."
)


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    timeline = run.timeline
    judged, marks = _judged(run, timeline.breakdown), _judged(run, timeline.marks)
    delays = tables_of(run)["launch_delays"]
    if judged.is_empty() and timeline.regions.is_empty() and delays.is_empty():
        why = run.trace.reader.cannot().get("breakdown", text("Nothing of what the host did was recorded."))
        return html.Div([heading(page.title, _MEANING), empty(text("Nothing of the host"), why)])
    no_parts = run.trace.reader.cannot().get(
        "breakdown", text("No step was analyzed, so none could be split into parts.")
    )
    over_steps = empty(text("No steps to show"), no_parts)
    if len(judged):
        taken = judged.filter(pl.col("part").is_in(figures.PARTS))["ns"].sum() > 0
        over_steps = plot(figures.over_steps(judged)) if taken else quiet(text("None of these took any time."))
    return html.Div(
        [
            heading(page.title, _MEANING),
            card(text("Over the analyzed steps"), over_steps),
            card(text("By rank, mean per analyzed step"), table(run, "host_by_rank", _RANKS)) if len(judged) else None,
            *_of_devices(run, marks),
            card(text("From launch to start on the device"), table(run, "launch_delays", _DELAYS), note=_DELAY)
            if len(delays)
            else None,
            card(
                text("What the host's threads did, the longest first"),
                table(run, "regions_by_name", _REGIONS),
            )
            if len(timeline.regions)
            else None,
        ]
    )


def _judged(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.join(run.timeline.steps.filter("judged"), on=["rank", "step"], how="semi")


_TABLES: Tables = {
    "host_by_rank": lambda run: figures.by_rank(_judged(run, run.timeline.breakdown)),
    "launch_delays": lambda run: launch_delays(run.timeline.kernels),
    "regions_by_name": lambda run: figures.by_name(run.timeline.regions),
    "device_phases_by_rank": lambda run: figures.phases_by_rank(_judged(run, run.timeline.marks)),
}


def _of_devices(run: Run, marks: pl.DataFrame) -> list[Children]:
    """Return what CUDA events measure: the depth of the launch queue, and the length of the devices' phases."""
    if run.report.lead is None:
        return []
    return [
        card(
            text("Host run-ahead"),
            quiet(lead_line(run.report.lead, run.report.windows)),
            plot(figures.ahead_over_steps(marks)),
            note=_AHEAD,
        ),
        card(text("What the devices' phases took"), plot(figures.phases_over_steps(marks)), note=_PHASES),
        card(text("Phases by rank, mean per analyzed step"), table(run, "device_phases_by_rank", _OF_PHASES)),
    ]


_AHEAD = text(
    "Mean over ranks, where phases end: the work that is enqueued and not done. At 0 the device waits for the host."
)
_PHASES = text("Mean over ranks, between CUDA events: kernels, gaps between them and waiting in one.")
_OF_PHASES = {
    "rank": Shown(text("rank")),
    "phase": Shown(text("phase")),
    "ns": Shown(text("device time"), "time"),
    "least_ns": Shown(text("host run-ahead, least"), "time"),
    "median_ns": Shown(text("host run-ahead, median"), "time"),
}
_DELAY = text("Long: the launch queue is full. Short: the device waits for the host.")
_RANKS = {
    "rank": Shown(text("rank")),
    "input": Shown(text("input"), "time"),
    "gc": Shown(text("garbage collection"), "time"),
    "compile": Shown(text("compile"), "time"),
    "checkpoint": Shown(text("checkpoint"), "time"),
    "host": Shown(text("host-bound"), "time"),
    "other": Shown(text("other"), "time"),
}
_DELAYS = {
    "rank": Shown(text("rank")),
    "count": Shown(text("launches")),
    "p5_ns": Shown(text("shortest 5 %"), "time"),
    "median_ns": Shown(text("median"), "time"),
    "p95_ns": Shown(text("longest 5 %"), "time"),
}
_REGIONS = {
    "kind": Shown(text("kind")),
    "name": Shown(text("name")),
    "count": Shown(text("count")),
    "ns": Shown(text("time, all ranks"), "time"),
    "longest_ns": Shown(text("longest"), "time"),
    "ranks": Shown(text("ranks")),
    "most_rank": Shown(text("longest on rank")),
}


page = Page(title=text("Host"), order=60, layout=layout, tables=_TABLES)
