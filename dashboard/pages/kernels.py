"""Which kernels take the devices' time, and on which rank they take more."""

from __future__ import annotations

from typing import Any

from dash import html

from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.dashboard.figures.kernels import by_name
from rankscope.dashboard.grids import Shown, table
from rankscope.dashboard.page_kit import Page, Query, Tables, card, empty, heading
from rankscope.dashboard.run import Run

_MEANING = text(
    "Device work by name, the longest first. Communication kernels include the time they wait for other ranks."
)
_TABLES: Tables = {"kernels_by_name": lambda run: by_name(run.timeline.kernels)}


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001 - Dash's components are not typed
    kernels = run.timeline.kernels
    if kernels.is_empty():
        why = text("No device rows were recorded: ")
        why += run.trace.reader.cannot().get(
            "kernels", text("this version's collectors record the host, not the device.")
        )
        what = text("Traces of torch.profiler and Nsight Systems hold them: rankscope ui TRACE.")
        return html.Div([heading(page.title, _MEANING), empty(text("No kernels"), why, what)])
    columns = COLUMNS if kernels["rank"].n_unique() > 1 else {name: COLUMNS[name] for name in _OF_ONE_RANK}
    return html.Div(
        [
            heading(
                page.title,
                text(
                    "{meaning} {rows:,} rows of {ranks}.",
                    meaning=_MEANING,
                    rows=len(kernels),
                    ranks=counted(kernels["rank"].n_unique(), "rank"),
                ),
            ),
            card("", table(run, "kernels_by_name", columns, height="calc(100vh - 250px)")),
        ]
    )


COLUMNS = {
    "name": Shown(text("kernel")),
    "work": Shown(text("kind")),
    "count": Shown(text("count")),
    "total_ns": Shown(text("time, all ranks"), "time"),
    "share": Shown(text("share"), "share"),
    "mean_ns": Shown(text("mean"), "time"),
    "longest_rank": Shown(text("longest one"), "moment"),
    "least_ns": Shown(text("least of a rank"), "time"),
    "most_ns": Shown(text("most of a rank"), "time"),
    "most_rank": Shown(text("which rank")),
    "excess": Shown(text("most above median"), "share"),
}
_OF_ONE_RANK = ("name", "work", "count", "total_ns", "share", "mean_ns", "longest_rank")


page = Page(title=text("Kernels"), order=90, layout=layout, tables=_TABLES)
