"""Operations by group, kind and size: how fast, the arrival skew of their ranks, and which came last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from rankscope.analysis.metrics.bandwidth import Line, bus_factor, busbw, costs, lines, link_of
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.collectors.schema import P2P_OPS
from rankscope.dashboard.figures.plots import Figure, axis, bytes_text, colour, figure, log_axis

__all__ = ["Fit", "algorithms", "bandwidth", "by_group", "fits", "kinds", "operations", "skews"]

_Numbers = Sequence[float] | np.ndarray

_MANY = 7  # operations that get a colour each
_BINS = 10  # of a decade
_LEAST_SKEW_NS = 1000
_CLEAR = 1.96  # standard errors, from which on a latency is not 0
_CURVE_POINTS = 40
_CEILING = "#8a929c"
_DASHES = ("dot", "dash", "dashdot", "longdash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Latency and bandwidth of one operation in one group, from its times by size."""

    op: str
    group_id: int
    group: str
    ranks: int
    line: Line


def operations(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row per whole operation, the longest first: group, time, length, the last rank, and its bandwidth.

    `duration_ns` is that of its longest rank, `wait_ns` the mean over its ranks, `skew_ns` from the first to the last
    arrival. The size is the largest tensor of any rank.
    """
    arrived = pl.coalesce("device_start_ns", "start_ns")
    return (
        collectives.filter(pl.col("instance_id").is_not_null())
        .group_by("instance_id")
        .agg(
            pl.col("op", "group", "group_size", "step", "seq").first(),
            (pl.col("end_ns") - arrived).max().alias("duration_ns"),
            pl.col("wait_ns").mean(),
            pl.col("arrival_spread_ns").max().alias("skew_ns"),
            pl.col("rank").filter("is_last").first().alias("last"),
            pl.col("size_bytes", "transfer_ns").max(),
            arrived.min().alias("start_ns"),
            pl.col("end_ns").max(),
        )
        .with_columns(busbw().alias("busbw_bytes_per_s"))
        .sort("duration_ns", "start_ns", descending=[True, False], nulls_last=True)
        .drop("instance_id")
    )


def kinds(operations: pl.DataFrame) -> pl.DataFrame:
    """One row per group, operation and size, over whole operations: count, median transfer and wait, busbw, skew."""
    return (
        operations.group_by("group", "op", "group_size", "size_bytes")
        .agg(
            pl.len().alias("count"),
            pl.col("transfer_ns").median(),
            pl.col("transfer_ns").sum().alias("transfer_total_ns"),
            pl.col("wait_ns").mean(),
            pl.col("skew_ns").median(),
            pl.col("skew_ns").max().alias("skew_max_ns"),
            pl.col("last").drop_nulls().mode().sort().first().alias("often_last"),
        )
        .with_columns(busbw().alias("busbw_bytes_per_s"))
        .sort("transfer_total_ns", descending=True)
    )


def bandwidth(found: pl.DataFrame) -> Figure | None:
    """Draw busbw against size, one colour per operation; None if no operation has both."""
    known = found.drop_nulls("busbw_bytes_per_s")
    if known.is_empty():
        return None
    traces: list[dict[str, Any]] = []
    for number, (op, rows) in enumerate(_by_op(known, "transfer_total_ns")):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": op,
                "x": rows["size_bytes"].to_list(),
                "y": rows["busbw_bytes_per_s"].to_list(),
                "marker": {"color": colour(number), "size": 9, "opacity": 0.8, "symbol": number % 8},
                "text": [_point(row) for row in rows.iter_rows(named=True)],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    x = log_axis(text("size of the largest tensor"), known["size_bytes"].to_list(), bytes_text)
    y = log_axis(text("busbw, median"), known["busbw_bytes_per_s"].to_list(), lambda rate: f"{bytes_text(rate)}/s")
    return figure(traces, x=x, y=y)


def _by_op(rows: pl.DataFrame, weight: str) -> list[tuple[str, pl.DataFrame]]:
    """Return the rows by operation, those that weigh most first; the rarest together."""
    ops = rows.group_by("op").agg(pl.col(weight).sum()).sort(weight, "op", descending=[True, False])["op"].to_list()
    found = [(str(op), rows.filter(pl.col("op") == op)) for op in ops[:_MANY]]
    others = rows.filter(pl.col("op").is_in(ops[_MANY:]))
    return [*found, (text("other operations"), others)] if len(others) else found


def fits(moved: pl.DataFrame) -> list[Fit]:
    """Return operations of groups whose `transfers` show latency and bandwidth, those that took most time first."""
    found = {key: line for key, line in lines(moved).items() if line.latency_ns > _CLEAR * line.latency_error_ns}
    order = moved.group_by("op", "group_id").agg(pl.col("group", "group_size").first(), pl.col("ns").sum())
    rows = order.sort("ns", "op", "group_id", descending=[True, False, False]).drop("ns").iter_rows()
    return [
        Fit(op=op, group_id=group_id, group=str(group), ranks=ranks, line=found[op, group_id])
        for op, group_id, group, ranks in rows
        if (op, group_id) in found
    ]


def algorithms(fit: Fit, moved: pl.DataFrame, interface_bytes_per_s: float | None) -> Figure:
    """Draw busbw against size: measured, fitted, and what each algorithm would reach if what was measured is a ring.

    The line of the interface is there where its speed is known.
    """
    own = moved.filter(pl.col("op") == fit.op, pl.col("group_id") == fit.group_id)
    measured = own.group_by("size_bytes").agg(pl.col("ns").median()).filter(pl.col("ns") > 0).sort("size_bytes")
    factor, models = bus_factor(fit.op, fit.ranks), costs(fit.op, fit.ranks)
    sizes = measured["size_bytes"].to_numpy().astype(np.float64)
    shown = np.geomspace(sizes[0] / 10, sizes[-1] * 10, _CURVE_POINTS)
    as_fitted = next(iter(models))  # the ring; of an all-to-all what is like one
    link = link_of(fit.line, models[as_fitted])
    curves = {name: [cost.ns(size, link) for size in shown] for name, cost in models.items()}
    traces: list[dict[str, Any]] = [
        _curve("measured", sizes, factor * sizes / measured["ns"].to_numpy() * 1e9, mode="markers", color=colour(0))
    ]
    for number, (name, ns) in enumerate(curves.items()):
        said, dash = (
            (text("fitted, as {name}", name=name), "solid")
            if name == as_fitted
            else (name, _DASHES[number % len(_DASHES)])
        )
        rate = factor * shown / np.array(ns) * 1e9
        traces.append(_curve(said, shown, rate, mode="lines", color=colour(number), dash=dash))
    if interface_bytes_per_s:
        edges, rate = shown[[0, -1]], np.full(2, interface_bytes_per_s)
        traces.append(_curve("network interface", edges, rate, mode="lines", color=_CEILING, dash="solid"))
    rates = [value for trace in traces for value in trace["y"]]
    return figure(
        traces,
        x=log_axis(text("size of the largest tensor"), shown.tolist(), bytes_text),
        y=log_axis(text("busbw"), rates, lambda rate: f"{bytes_text(rate)}/s"),
    )


def _curve(name: str, x: _Numbers, y: _Numbers, *, mode: str, color: str, dash: str = "solid") -> dict[str, Any]:
    said = [f"{name}: {bytes_text(size)} at {bytes_text(rate)}/s" for size, rate in zip(x, y, strict=True)]
    look = {"marker": {"color": color, "size": 9}} if mode == "markers" else {"line": {"color": color, "dash": dash}}
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": np.asarray(x).tolist(),
        "y": np.asarray(y).tolist(),
        "text": said,
        "hovertemplate": "%{text}<extra></extra>",
        **look,
    }


def _point(row: dict[str, object]) -> str:
    transfer, busbw_ = float(str(row["transfer_ns"])), float(str(row["busbw_bytes_per_s"]))
    return (
        f"{row['op']}, group {row['group']} of {row['group_size']}<br>"
        f"{bytes_text(float(str(row['size_bytes'])))}, {row['count']} times<br>"
        f"transfer {duration(transfer)}, busbw {bytes_text(busbw_)}/s"
    )


def skews(operations: pl.DataFrame) -> Figure | None:
    """Return how many operations had their ranks arrive how far apart, by operation; None where clocks do not say.

    Bins are equally wide on the logarithmic axis, `_BINS` to a decade; less than 1 µs counts as that.
    """
    known = operations.drop_nulls("skew_ns").with_columns(
        (pl.col("skew_ns").clip(_LEAST_SKEW_NS).log10() * _BINS).floor().cast(pl.Int64).alias("bin"),
        pl.lit(1).alias("one"),
    )
    if known.is_empty():
        return None
    edges = [10 ** (number / _BINS) for number in range(known["bin"].min(), known["bin"].max() + 2)]  # type: ignore[operator, arg-type]
    traces = []
    for number, (op, rows) in enumerate(_by_op(known, "one")):
        counts = dict(rows.group_by("bin").len().iter_rows())
        inside = [counts.get(int(known["bin"].min()) + i, 0) for i in range(len(edges) - 1)]  # type: ignore[arg-type]
        traces.append(
            {
                "type": "bar",
                "name": op,
                "x": [math.sqrt(low * high) for low, high in pairwise(edges)],
                "width": [high - low for low, high in pairwise(edges)],
                "y": inside,
                "marker": {"color": colour(number)},
                "text": [f"{duration(low)} – {duration(high)}" for low, high in pairwise(edges)],
                "textposition": "none",
                "hovertemplate": f"{op}: %{{y}} × %{{text}}<extra></extra>",
            }
        )
    x = log_axis(text("last minus first arrival"), edges, duration)
    return figure(traces, x=x, y=axis(text("operations")), barmode="stack", bargap=0)


def by_group(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row per group: its operations, their transfers, its ranks' waits in all, and how often each came last."""
    whole = collectives.filter(pl.col("instance_id").is_not_null() & ~pl.col("op").is_in(P2P_OPS))
    last = (
        whole.filter("is_last")
        .group_by("group", "rank")
        .len()
        .sort("len", "rank", descending=[True, False])
        .group_by("group", maintain_order=True)
        .first()
        .select("group", often_last="rank", times_last="len")
    )
    return (
        whole.group_by("group")
        .agg(
            pl.col("group_size").first(),
            pl.col("instance_id").n_unique().alias("operations"),
            pl.col("wait_ns").sum().alias("waited_ns"),
            pl.col("transfer_ns").mean(),
            pl.col("arrival_spread_ns").median().alias("skew_ns"),
        )
        .join(last, on="group", how="left")
        .sort("waited_ns", descending=True)
    )
