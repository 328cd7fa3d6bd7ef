"""The links between nodes, from the TCP counters of the ranks' sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import polars as pl

__all__ = ["LINKS", "links"]

LINKS = pl.Schema(
    {
        "node": pl.Int64,
        "peer_node": pl.Int64,
        "sent_bytes": pl.Float64,
        "busy_s": pl.Float64,
        "rate_bytes_per_s": pl.Float64,
        "rtt_s": pl.Float64,
        "min_rtt_s": pl.Float64,
        "retransmits": pl.Float64,
    }
)
_COUNTED = ("bytes_sent", "busy_s", "retransmits")
_READ = (*_COUNTED, "rtt_s", "min_rtt_s")


def links(counters: pl.DataFrame, addresses: Mapping[int, Iterable[str]], start_ns: int, end_ns: int) -> pl.DataFrame:
    """What each node sent to each other node between `start_ns` and `end_ns`: one row per direction.

    `busy_s` is the time in which sockets had data under way, summed over sockets, so `rate_bytes_per_s` =
    `sent_bytes` / `busy_s` is what one socket gets through while it sends, however rarely it does. `rtt_s` is the
    mean round trip, weighted by the bytes that were sent at it; `min_rtt_s` the shortest that any socket ever saw.
    Addresses that no node has are left out.

    Source: Linux `tcp_info`, RFC 4898.
    """
    node_of = {address: node for node, own in addresses.items() for address in own}
    by_socket = ["node", "device"]
    peer = pl.col("device").str.extract(r"^rank\d+>(.*)$", 1)
    tcp = counters.filter(pl.col("source") == "tcp", pl.col("time_ns").is_between(start_ns, end_ns))
    tcp = tcp.with_columns(peer.replace_strict(node_of, default=None, return_dtype=pl.Int64).alias("peer_node")).filter(
        pl.col("peer_node").is_not_null(), pl.col("peer_node") != pl.col("node")
    )
    if tcp.is_empty():
        return LINKS.to_frame()
    readings = tcp.pivot("name", index=[*by_socket, "peer_node", "time_ns"], values="value", aggregate_function="last")
    absent = [pl.lit(None, dtype=pl.Float64).alias(name) for name in _READ if name not in readings.columns]
    # A counter falls when a socket closes; what the sockets that remain have is no news then.
    grown = [pl.col(name).diff().clip(lower_bound=0).fill_null(0).over(by_socket).alias(name) for name in _COUNTED]
    sent, busy = pl.col("bytes_sent"), pl.col("busy_s")
    return (
        readings.with_columns(absent)
        .sort(*by_socket, "time_ns")
        .with_columns(grown)
        .group_by(pl.col("node").cast(pl.Int64), "peer_node")
        .agg(
            sent.sum().alias("sent_bytes"),
            busy.sum(),
            (sent.sum() / busy.sum()).alias("rate_bytes_per_s"),
            ((pl.col("rtt_s") * sent).sum() / sent.sum()).alias("rtt_s"),
            pl.col("min_rtt_s").min(),
            pl.col("retransmits").sum(),
        )
        .filter(pl.col("sent_bytes") > 0)
        .sort("node", "peer_node")
        .select(LINKS.names())
        .cast(LINKS)
    )
