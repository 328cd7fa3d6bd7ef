"""Operations by group, kind and size: how fast, how far apart their ranks arrived, and who came last."""

from __future__ import annotations

from typing import Any

import polars as pl

from rankscope.analysis.report.quantities import duration
from rankscope.collectors.schema import P2P_OPS
from rankscope.dashboard.figures.plots import Figure, axis, bytes_text, colour, figure, log_axis

__all__ = ["arrival_spread", "bandwidth", "busbw", "by_group", "kinds"]

_MANY = 8  # groups that get a colour each


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


def busbw() -> pl.Expr:
    """Bytes per second over the busiest link, from size_bytes, transfer_ns, op and group_size; null: cannot be said.

    A barrier moves no bytes, and of a transfer that took no time nothing can be said.
    Source: nccl-tests, doc/PERFORMANCE.md, with the size of the whole tensor.
    """
    n = pl.col("group_size").cast(pl.Float64)
    factor = (
        pl.when(pl.col("op").str.starts_with("allreduce"))
        .then(2 * (n - 1) / n)
        .when(pl.col("op").str.contains("^(allgather|reduce_scatter|alltoall)"))
        .then((n - 1) / n)
        .otherwise(1.0)
    )
    moved = (pl.col("size_bytes") > 0) & (pl.col("transfer_ns") > 0)
    return pl.when(moved).then(factor * pl.col("size_bytes") / pl.col("transfer_ns") * 1e9)


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
                "name": f"group {name}" if name is not None else "other groups",
                "x": rows["size_bytes"].to_list(),
                "y": rows["busbw_bytes_per_s"].to_list(),
                "marker": {"color": colour(number), "size": 9, "opacity": 0.8, "symbol": number % 8},
                "text": [_point(row) for row in rows.iter_rows(named=True)],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    x = log_axis("size of the largest tensor", known["size_bytes"].to_list(), bytes_text)
    y = log_axis("busbw, median", known["busbw_bytes_per_s"].to_list(), lambda rate: f"{bytes_text(rate)}/s")
    return figure(traces, x=x, y=y)


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
                "name": f"group {name}",
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
    x = axis("% of the group's operations", range=[0, 100])
    y = log_axis("last minus first arrival", [value for trace in traces for value in trace["y"]], duration)
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
