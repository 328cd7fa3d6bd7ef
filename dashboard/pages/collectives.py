"""How fast operations are, how far apart their ranks arrive, and which groups wait the most."""

from __future__ import annotations

from typing import Any

from dash import html

from rankscope.analysis.report import digest
from rankscope.analysis.report.quantities import percent
from rankscope.dashboard.figures import collectives as figures
from rankscope.dashboard.page import Query, Shown, card, empty, heading, plot, quiet, table
from rankscope.dashboard.state import Run

TITLE, ORDER = "Collectives", 40

_MEANING = (
    "Transfer is an operation's time once its last rank has arrived; waiting is what ranks spend in it before that."
)
_ROWS = 200


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001 - Dash's components are not typed
    rows = run.timeline.collectives
    if rows.is_empty():
        why = run.trace.reader.cannot().get("collectives", "No communication between ranks was recorded.")
        return html.Div([heading(TITLE, _MEANING), empty("No collectives", why)])
    found = figures.kinds(rows)
    if found.is_empty():
        reasons = [group.why for group in digest.gap_groups(run.report) if group.table == "collectives"]
        why = f"{len(rows):,} rows were recorded, but no operation could be put together from all its ranks."
        return html.Div([heading(TITLE, _MEANING), empty("No whole operation", why, "; ".join(reasons))])
    matched = run.timeline.matched_fraction
    said = (
        f"{percent(matched)} of the {len(rows):,} rows were matched on all their ranks" if matched is not None else ""
    )
    bandwidth, spread = figures.bandwidth(found), figures.arrival_spread(rows)
    no_size = "The sizes of the operations were not recorded, or none took time."
    no_clock = "Arrivals of different nodes cannot be compared: their clocks are not known well enough."
    return html.Div(
        [
            heading(TITLE, f"{_MEANING} {said}."),
            html.Div(
                [
                    card("Bandwidth by size", plot(bandwidth) if bandwidth else quiet(no_size), note=_BUSBW),
                    card("How far apart ranks arrive", plot(spread) if spread else quiet(no_clock), note=_SPREAD),
                ],
                className="columns",
            ),
            card("Groups, the longest waits first", table(figures.by_group(rows).head(_ROWS), _GROUPS)),
            card("By group, operation and size, the longest transfers first", table(found.head(_ROWS), _KINDS)),
        ]
    )


_BUSBW = "Bytes over the busiest link per second, as nccl-tests counts them; from transfer alone, without waiting."
_SPREAD = "From the first to the last rank's arrival. What grows towards the right are rare, late arrivals."

_GROUPS = {
    "group": Shown("group"),
    "group_size": Shown("ranks"),
    "operations": Shown("operations"),
    "waited_ns": Shown("waited, all ranks", "time"),
    "transfer_ns": Shown("mean transfer", "time"),
    "spread_ns": Shown("arrival spread, median", "time"),
    "often_last": Shown("most often last: rank"),
    "times_last": Shown("times"),
}
_KINDS = {
    "group": Shown("group"),
    "op": Shown("operation"),
    "size_bytes": Shown("size", "bytes"),
    "count": Shown("count"),
    "transfer_ns": Shown("transfer, median", "time"),
    "wait_ns": Shown("wait, mean", "time"),
    "busbw_bytes_per_s": Shown("busbw", "rate"),
    "spread_ns": Shown("spread, median", "time"),
    "spread_max_ns": Shown("spread, largest", "time"),
    "often_last": Shown("often last: rank"),
}
