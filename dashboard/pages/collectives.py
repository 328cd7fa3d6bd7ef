"""How fast operations are, how far apart their ranks arrive, and which groups wait the most."""

from __future__ import annotations

import polars as pl
from dash import dcc, html

from rankscope.analysis.metrics.bandwidth import bus_factor, faster_than_ring, transfers
from rankscope.analysis.metrics.links import nic_speeds
from rankscope.analysis.model import digest
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.units import bytes_text, duration, percent
from rankscope.dashboard.figures import collectives as figures
from rankscope.dashboard.grids import Shown, table, tables_of
from rankscope.dashboard.page_kit import Children, Page, Query, Tables, address, card, empty, heading, plot, quiet
from rankscope.dashboard.run import Run

_MEANING = text(
    "Transfer is an operation's time once its last rank has arrived; waiting is what ranks spend in it before that."
)


def layout(run: Run, query: Query) -> Children:
    rows = run.timeline.collectives
    if rows.is_empty():
        why = run.trace.reader.cannot().get("collectives", text("No communication between ranks was recorded."))
        return html.Div([heading(page.title, _MEANING), empty(text("No collectives"), why)])
    found = tables_of(run)["collectives_by_size"]
    if found.is_empty():
        reasons = [group.why for group in digest.gap_groups(run.report) if group.table == "collectives"]
        why = text(
            "{rows:,} rows were recorded, but no operation could be put together from all its ranks.", rows=len(rows)
        )
        return html.Div([heading(page.title, _MEANING), empty(text("No whole operation"), why, joined("; ", reasons))])
    matched = run.timeline.matched_fraction
    said = (
        text("{matched} of the {rows:,} rows were matched on all their ranks", matched=percent(matched), rows=len(rows))
        if matched is not None
        else ""
    )
    bandwidth, spread = figures.bandwidth(found), figures.skews(tables_of(run)["operations"])
    no_size = text("The sizes of the operations were not recorded, or none took time.")
    no_clock = text("Arrivals of different nodes cannot be compared: the error of their clocks is too large.")
    return html.Div(
        [
            heading(page.title, text("{meaning} {said}.", meaning=_MEANING, said=said) if said else _MEANING),
            html.Div(
                [
                    card(text("Bandwidth by size"), plot(bandwidth) if bandwidth else quiet(no_size), note=_BUSBW),
                    card(text("Arrival skew"), plot(spread) if spread else quiet(no_clock), note=_SPREAD),
                ],
                className="columns",
            ),
            card(
                text("Operations, the longest first"),
                table(run, "operations", _OPERATIONS),
                note=_INSTANCES,
            ),
            _algorithms(run, query),
            card(text("Groups, the longest waits first"), table(run, "collectives_by_group", _GROUPS)),
            card(
                text("By group, operation and size, the longest transfers first"),
                table(run, "collectives_by_size", _KINDS),
            ),
        ]
    )


def _algorithms(run: Run, query: Query) -> Children:
    """Return the card of one operation in one group: measured, fitted, and what each algorithm would reach."""
    title = text("Bandwidth by algorithm")
    moved = transfers(run.timeline.collectives)
    found = figures.fits(moved)
    if not found:
        return card(title, quiet(text("In no group do operation sizes differ enough to measure latency.")))
    asked = query.get("of", "")
    number = int(asked) if asked.isdigit() and int(asked) < len(found) else 0
    fit = found[number]
    chosen = [
        dcc.Link(
            text("{op} in {group}", op=other.op, group=other.group),
            href=address("collectives", run.key, of=i),
            className="chip",
        )
        for i, other in enumerate(found[:_CHOICES])
    ]
    speed = _interface(run, fit.group_id)
    return card(
        title,
        html.Div(chosen, className="controls small") if len(chosen) > 1 else None,
        quiet(_said(fit, moved)),
        plot(figures.algorithms(fit, moved, speed)),
        note=_ALGORITHMS if speed else text("{meaning} The speed of the links was not recorded.", meaning=_ALGORITHMS),
    )


def _said(fit: figures.Fit, moved: pl.DataFrame) -> str:
    line, factor = fit.line, bus_factor(fit.op, fit.ranks)
    rate = (
        f"{bytes_text(factor * 1e9 / line.ns_per_byte)}/s" if line.ns_per_byte > 0 else text("no limit that was seen")
    )
    said = text(
        "{op} in group {group} of {ranks} ranks: {latency} latency, busbw up to {rate}",
        op=fit.op,
        group=fit.group,
        ranks=fit.ranks,
        latency=duration(line.latency_ns),
        rate=rate,
    )
    half = (
        text("; half of the time is latency at {size}", size=bytes_text(line.half_bytes))
        if line.ns_per_byte > 0
        else ""
    )
    sizes = moved.filter(pl.col("op") == fit.op, pl.col("group_id") == fit.group_id)
    size = float(sizes.sort("ns")["size_bytes"][-1])
    faster = faster_than_ring(fit.op, fit.ranks, line, size)
    wanted = (
        text(
            " For {size} {algorithm} would take {share} of a ring's time.",
            size=bytes_text(size),
            algorithm=faster[0],
            share=percent(faster[1]),
        )
        if faster
        else ""
    )
    return text("{said}{half}.{wanted}", said=said, half=half, wanted=wanted)


def _interface(run: Run, group_id: int) -> float | None:
    """Return the speed of the slowest node's network interfaces, if the group spans several nodes."""
    timeline = run.timeline
    ranks = timeline.collectives.filter(pl.col("group_id") == group_id)["rank"].unique()
    nodes = timeline.ranks.filter(pl.col("rank").is_in(ranks.implode()))["node"].unique().to_list()
    if len(nodes) < 2:
        return None
    speeds = nic_speeds(timeline.counters)
    return min(speeds[node] for node in nodes) if set(nodes) <= set(speeds) else None


_CHOICES = 12
_ALGORITHMS = text(
    "Dots: medians of what was measured. Broken lines: what other algorithms would reach if that was a ring."
)
_BUSBW = text(
    "Bytes over the busiest link per second, as nccl-tests counts them; from transfer alone, without waiting."
)
_SPREAD = text("Arrival skew: from the first to the last rank's arrival, by operation.")
_INSTANCES = text(
    "Every operation that was matched on all its ranks. Duration is that of its longest rank, wait the ranks' mean."
)

_TABLES: Tables = {
    "operations": lambda run: figures.operations(run.timeline.collectives),
    "collectives_by_size": lambda run: figures.kinds(tables_of(run)["operations"]),
    "collectives_by_group": lambda run: figures.by_group(run.timeline.collectives),
}
_OPERATIONS = {
    "op": Shown(text("operation")),
    "group": Shown(text("group")),
    "step": Shown(text("step")),
    "duration_ns": Shown(text("duration"), "time"),
    "wait_ns": Shown(text("wait, mean"), "time"),
    "skew_ns": Shown(text("skew"), "time"),
    "size_bytes": Shown(text("size"), "bytes"),
    "busbw_bytes_per_s": Shown(text("busbw"), "rate"),
    "last": Shown(text("last to arrive"), "moment"),
}
_GROUPS = {
    "group": Shown(text("group")),
    "group_size": Shown(text("ranks")),
    "operations": Shown(text("operations")),
    "waited_ns": Shown(text("waited, all ranks"), "time"),
    "transfer_ns": Shown(text("mean transfer"), "time"),
    "skew_ns": Shown(text("skew, median"), "time"),
    "often_last": Shown(text("most often last: rank")),
    "times_last": Shown(text("times")),
}
_KINDS = {
    "group": Shown(text("group")),
    "op": Shown(text("operation")),
    "size_bytes": Shown(text("size"), "bytes"),
    "count": Shown(text("count")),
    "transfer_ns": Shown(text("transfer, median"), "time"),
    "wait_ns": Shown(text("wait, mean"), "time"),
    "busbw_bytes_per_s": Shown(text("busbw"), "rate"),
    "skew_ns": Shown(text("skew, median"), "time"),
    "skew_max_ns": Shown(text("skew, largest"), "time"),
    "often_last": Shown(text("often last: rank")),
}


page = Page(title=text("Collectives"), order=40, layout=layout, tables=_TABLES)
