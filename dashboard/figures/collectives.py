"""Operations by group, kind and size: how fast, how far apart their ranks arrived, and who came last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rankscope.analysis.metrics.bandwidth import Line, bus_factor, busbw, costs, lines, link_of
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.collectors.schema import P2P_OPS
from rankscope.dashboard.figures.plots import Figure, axis, bytes_text, colour, figure, log_axis

__all__ = ["Fit", "algorithms", "arrival_spread", "bandwidth", "by_group", "fits", "kinds"]

_MANY = 8  # groups that get a colour each
_CURVE_POINTS = 40
_CEILING = "#8a929c"
_DASHES = ("dot", "dash", "dashdot", "longdash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the times of one operation in one group by size say: latency and bandwidth."""

    op: str
    group_id: int
    group: str
    ranks: int
    line: Line


def kinds(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row per group, operation and size, over whole operations: count, median transfer and wait, busbw, spread.

    A transfer is that of the operation, a wait the mean over its ranks. The size is the largest tensor of any rank.
    """
    whole = collectives.filter(pl.col("instance_id").is_not_null())
    operations = whole.group_by("instance_id").agg(
        pl.col("group", "op", "group_size").first(),
        pl.col("size_bytes", "transfer_ns", "arrival_spread_ns").max(),
        pl.col("wait_ns").mean(),
        pl.col("rank").filter("is_last").first().alias("last"),
    )
    return (
        operations.group_by("group", "op", "group_size", "size_bytes")
        .agg(
            pl.len().alias("count"),
            pl.col("transfer_ns").median(),
            pl.col("transfer_ns").sum().alias("transfer_total_ns"),
            pl.col("wait_ns").mean(),
            pl.col("arrival_spread_ns").median().alias("spread_ns"),
            pl.col("arrival_spread_ns").max().alias("spread_max_ns"),
            pl.col("last").drop_nulls().mode().sort().first().alias("often_last"),
        )
        .with_columns(busbw().alias("busbw_bytes_per_s"))
        .sort("transfer_total_ns", descending=True)
    )


def bandwidth(found: pl.DataFrame) -> Figure | None:
    """busbw against size, one colour per group; None if no operation has both."""
    known = found.drop_nulls("busbw_bytes_per_s")
    if known.is_empty():
        return None
    groups = known.group_by("group").agg(pl.col("transfer_total_ns").sum()).sort("transfer_total_ns", descending=True)
    traces: list[dict[str, Any]] = []
    names = groups["group"].head(_MANY).to_list()
    for number, name in enumerate([*names, None] if len(groups) > _MANY else names):
        rows = (
            known.filter(pl.col("group") == name) if name is not None else known.filter(~pl.col("group").is_in(names))
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": text("group {name}", name=name) if name is not None else text("other groups"),
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


def fits(moved: pl.DataFrame) -> list[Fit]:
    """The operations of groups whose `transfers` tell latency and bandwidth, those that took most time first."""
    found = lines(moved)
    order = moved.group_by("op", "group_id").agg(pl.col("group", "group_size").first(), pl.col("ns").sum())
    rows = order.sort("ns", "op", "group_id", descending=[True, False, False]).drop("ns").iter_rows()
    return [
        Fit(op=op, group_id=group_id, group=str(group), ranks=ranks, line=found[op, group_id])
        for op, group_id, group, ranks in rows
        if (op, group_id) in found
    ]


def algorithms(fit: Fit, moved: pl.DataFrame, interface_bytes_per_s: float | None) -> Figure:
    """busbw against size: measured, fitted, and what each algorithm would reach if what was measured is a ring.

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


def _curve(name: str, x: Any, y: Any, *, mode: str, color: str, dash: str = "solid") -> dict[str, Any]:  # noqa: ANN401
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


def arrival_spread(collectives: pl.DataFrame) -> Figure | None:
    """How many operations had their ranks arrive how far apart, one line per group; None where clocks do not tell."""
    known = collectives.drop_nulls(["instance_id", "arrival_spread_ns"]).unique("instance_id")
    if known.is_empty():
        return None
    largest = known.group_by("group").len().sort("len", "group", descending=[True, False])["group"].head(_MANY)
    traces: list[dict[str, Any]] = []
    for number, name in enumerate(largest.to_list()):
        spread = known.filter(pl.col("group") == name)["arrival_spread_ns"].sort()
        at = [int(spread.quantile(i / 100, "nearest") or 0) for i in range(101)]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": text("group {name}", name=name),
                "x": list(range(101)),
                "y": [max(ns, 1) for ns in at],
                "line": {
                    "color": colour(number),
                    "width": 2,
                    "dash": ("solid", "dash", "dot")[number // len(largest) % 3],
                },
                "text": [duration(ns) for ns in at],
                "hovertemplate": f"group {name}: %{{x}} % of its operations within %{{text}}<extra></extra>",
            }
        )
    x = axis(text("% of the group's operations"), range=[0, 100])
    y = log_axis(text("last minus first arrival"), [value for trace in traces for value in trace["y"]], duration)
    return figure(traces, x=x, y=y)


def by_group(collectives: pl.DataFrame) -> pl.DataFrame:
    """One row per group: its operations, their transfers, its ranks' waits in all, and who came last how often."""
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
            pl.col("arrival_spread_ns").median().alias("spread_ns"),
        )
        .join(last, on="group", how="left")
        .sort("waited_ns", descending=True)
    )
