"""Which kernels take the devices' time, and on which rank they take more."""

from __future__ import annotations

import polars as pl
from dash import html

from rankscope.analysis.metrics.mfu import flops_of_kernels
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.timeline.clocks import apply_clocks
from rankscope.dashboard.figures.kernels import by_name, bytes_moved
from rankscope.dashboard.grids import Shown, table, tables_of
from rankscope.dashboard.page_kit import Children, Page, Query, Tables, card, empty, heading
from rankscope.dashboard.run import Run

_MEANING = text(
    "Device work by name, the longest first. Communication kernels include the time they wait for other ranks."
)


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    kernels = run.timeline.kernels
    if kernels.is_empty():
        why = text("No device rows were recorded: ")
        why += run.trace.reader.cannot().get(
            "kernels", text("this version's collectors record the host, not the device.")
        )
        what = text("Traces of torch.profiler and Nsight Systems hold them: rankscope ui TRACE.")
        return html.Div([heading(page.title, _MEANING), empty(text("No kernels"), why, what)])
    rows = tables_of(run)["kernels_by_name"]
    lacking = {name for name in _IF_KNOWN if rows[name].is_null().all()}
    lacking |= set() if kernels["rank"].n_unique() > 1 else _OF_SEVERAL
    columns = {name: shown for name, shown in COLUMNS.items() if name not in lacking}
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
    "flops": Shown(text("FLOPs, by shapes"), "flops"),
    "flops_per_s": Shown(text("FLOP/s"), "flops_rate"),
    "bytes": Shown(text("bytes"), "bytes"),
    "bytes_per_s": Shown(text("bytes/s"), "rate"),
    "longest_rank": Shown(text("longest one"), "moment"),
    "least_ns": Shown(text("least of a rank"), "time"),
    "most_ns": Shown(text("most of a rank"), "time"),
    "most_rank": Shown(text("which rank")),
    "excess": Shown(text("most above median"), "share"),
}
_OF_SEVERAL = {"least_ns", "most_ns", "most_rank", "excess"}
_IF_KNOWN = {"flops", "flops_per_s", "bytes", "bytes_per_s"}


def _by_name(run: Run) -> pl.DataFrame:
    """Return the kernels with their FLOPs, where the trace has the shapes of operators, and the bytes of copies."""
    operators = apply_clocks(run.trace.table("operators").collect(), run.timeline.clocks)
    flops, moved = flops_of_kernels(operators, run.timeline.kernels), bytes_moved(run.timeline.kernels)
    return (
        by_name(run.timeline.kernels)
        .join(flops, on="name", how="left", maintain_order="left")
        .join(moved, on=["name", "work"], how="left", maintain_order="left")
    )


_TABLES: Tables = {"kernels_by_name": _by_name}


page = Page(title=text("Kernels"), order=90, layout=layout, tables=_TABLES)
