"""The links between nodes, from the TCP counters of the ranks' sockets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import Floats, Ints

__all__ = [
    "ATTAINABLE",
    "LINKS",
    "PairsOfNodes",
    "busy_links",
    "busy_time",
    "judged_links",
    "link_rates",
    "links",
    "links_of_sends",
    "nic_speeds",
    "nodes_of_groups",
    "pairs_of_nodes",
]

ATTAINABLE = 0.8  # of an interface's speed
_CARRIES = 0.1  # share of a node's traffic from which an interface counts
_ALIKE = 1.5  # times as many bytes, or sockets, as the next pair of nodes has: beyond, it does something else
_TRAFFIC = 0.05  # a direction with less than this share of the busiest one's bytes says nothing about its speed

Bools = NDArray[np.bool_]

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
        "rwnd_limited_s": pl.Float64,
        "window_bytes": pl.Float64,
        "pairs": pl.Float64,
        "since_ns": pl.Int64,
        "until_ns": pl.Int64,
    }
)
_COUNTED = ("bytes_sent", "busy_s", "retransmits", "rwnd_limited_s")
_READ = (*_COUNTED, "rtt_s", "min_rtt_s", "window_bytes")


def links(counters: pl.DataFrame, addresses: Mapping[int, Iterable[str]], start_ns: int, end_ns: int) -> pl.DataFrame:
    """Return the traffic of each node to each other node between `start_ns` and `end_ns`: one row per direction.

    Counters are read now and then: the first reading before and the first one after belong to it. Each begins at 0.
    `busy_s` is the time in which sockets had data under way, summed over sockets, so `rate_bytes_per_s` =
    `sent_bytes` / `busy_s` is what one socket gets through while it sends, however rarely it does. `rtt_s` is the
    mean round trip, weighted by the bytes that were sent at it; `min_rtt_s` the shortest that any socket ever saw.
    In `rwnd_limited_s` of the busy time the receiver's window was the limit; `window_bytes` is the largest that one
    offered. `pairs` of a rank and an address would send as much if all sent alike: (Σ bytes)² / Σ bytes². Addresses
    that no node has are left out. All that is from `since_ns`, null where a socket is new, to `until_ns`.

    Source: Linux `tcp_info`, RFC 4898; the effective number of shares by Laakso and Taagepera 1979.
    """
    node_of = {address: node for node, own in addresses.items() for address in own}
    by_socket = ["node", "device"]
    peer = pl.col("device").str.extract(r"^rank\d+>(.*)$", 1)
    tcp = counters.filter(pl.col("source") == "tcp")
    tcp = tcp.with_columns(peer.replace_strict(node_of, default=None, return_dtype=pl.Int64).alias("peer_node")).filter(
        pl.col("peer_node").is_not_null(), pl.col("peer_node") != pl.col("node")
    )
    if tcp.is_empty():
        return LINKS.to_frame()
    readings = tcp.pivot("name", index=[*by_socket, "peer_node", "time_ns"], values="value", aggregate_function="last")
    absent = [pl.lit(None, dtype=pl.Float64).alias(name) for name in _READ if name not in readings.columns]
    # A counter falls when a socket closes; what the sockets that remain have is no news then.
    grown = [
        (pl.col(name) - pl.col(name).shift(1, fill_value=0).over(by_socket)).clip(lower_bound=0) for name in _COUNTED
    ]
    since = pl.col("time_ns").shift(1).over(by_socket)
    sent, busy = pl.col("bytes_sent"), pl.col("busy_s")
    return (
        readings.with_columns(absent)
        .sort(*by_socket, "time_ns")
        .with_columns(*grown, since_ns=since)
        .filter(pl.col("time_ns") > start_ns, (pl.col("since_ns") < end_ns) | pl.col("since_ns").is_null())
        .with_columns(_of_pair=sent.sum().over(by_socket))
        .group_by(pl.col("node").cast(pl.Int64), "peer_node")
        .agg(
            sent.sum().alias("sent_bytes"),
            busy.sum(),
            (sent.sum() / busy.sum()).alias("rate_bytes_per_s"),
            ((pl.col("rtt_s") * sent).sum() / sent.sum()).alias("rtt_s"),
            pl.col("min_rtt_s").min(),
            pl.col("retransmits").sum(),
            pl.col("rwnd_limited_s").sum(),
            pl.col("window_bytes").max(),
            (sent.sum() ** 2 / (sent * pl.col("_of_pair")).sum()).alias("pairs"),
            pl.when(~pl.col("since_ns").has_nulls()).then(pl.col("since_ns").min()).alias("since_ns"),
            pl.col("time_ns").max().alias("until_ns"),
        )
        .filter(pl.col("sent_bytes") > 0)
        .sort("node", "peer_node")
        .select(LINKS.names())
        .cast(LINKS)
    )


def links_of_sends(sends: pl.DataFrame) -> pl.DataFrame:
    """Return the same columns from what NCCL's proxies sent (`nccl.sends`); what only TCP reports is null."""
    sent = pl.col("sent_bytes")
    known = (
        sends.group_by("node", "peer_node")
        .agg(pl.col("sent_bytes", "busy_s").sum(), (sent.sum() ** 2 / (sent**2).sum()).alias("pairs"))
        .with_columns(rate_bytes_per_s=pl.col("sent_bytes") / pl.col("busy_s"))
        .sort("node", "peer_node")
    )
    absent = [pl.lit(None).alias(name) for name in LINKS.names() if name not in known.columns]
    return known.with_columns(absent).select(LINKS.names()).cast(LINKS)


def judged_links(counters: pl.DataFrame, steps: pl.DataFrame, addresses: Mapping[int, Iterable[str]]) -> pl.DataFrame:
    """Return the same over the judged steps; empty where there are none or no counters."""
    judged = steps.filter("judged")
    if judged.is_empty() or counters.is_empty():
        return LINKS.to_frame()
    return links(counters, addresses, *judged.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0))


@once
def nodes_of_groups(collectives: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """On how many `nodes` the ranks of each `group_id` run, and which its `members` are, in order."""
    groups, group = distinct(collectives["group_id"].to_numpy())
    known, rank = distinct(collectives["rank"].to_numpy())
    pairs, _ = distinct(group * len(known) + rank)
    members = pl.DataFrame({"group_id": groups[pairs // len(known)], "rank": known[pairs % len(known)]})
    on = ranks.select("rank", "node").unique("rank")
    of_group = members.join(on, on="rank", how="left", maintain_order="left").group_by("group_id")
    found = of_group.agg(pl.col("node").drop_nulls().n_unique().alias("nodes"), members="rank")
    return found.filter(pl.col("nodes") > 0)


def nic_speeds(counters: pl.DataFrame) -> dict[int, float]:
    """Bytes per second that each node's network allows: of the interfaces that carried its traffic, together.

    RDMA ports count where they sent more than the interfaces did. A node is left out where one of those that carried a
    tenth of its traffic does not report its speed.

    Source: Linux `sysfs-class-net`, `sysfs-class-infiniband`.
    """
    sent, speed = ("tx_bytes", "port_xmit_data_bytes"), ("speed_bytes_per_s", "rate_bytes_per_s")
    ports = (
        counters.filter(pl.col("source").is_in(["nic", "rdma"]), pl.col("name").is_in([*sent, *speed]))
        .group_by("node", "source", "device")
        .agg(
            sent=(pl.col("value").filter(pl.col("name").is_in(sent)).max()).sub(
                pl.col("value").filter(pl.col("name").is_in(sent)).min()
            ),
            speed=pl.col("value").filter(pl.col("name").is_in(speed)).max(),
        )
        .filter(pl.col("sent") > 0)
    )
    way = ports.group_by("node", "source").agg(pl.col("sent").sum().alias("all")).sort("all").group_by("node").last()
    carrying = ports.join(way, on=["node", "source"]).filter(pl.col("sent") >= _CARRIES * pl.col("all"))
    known = carrying.group_by("node").agg(pl.col("speed").sum(), pl.col("speed").null_count().alias("unknown"))
    return dict(known.filter(pl.col("unknown") == 0).sort("node").select("node", "speed").iter_rows())


@once
def busy_links(links: pl.DataFrame) -> pl.DataFrame:
    """Return the directions that sent enough to measure their bandwidth."""
    return links.filter(pl.col("sent_bytes") >= _TRAFFIC * pl.col("sent_bytes").max(), pl.col("busy_s") > 0)


@dataclass(frozen=True, slots=True)
class PairsOfNodes:
    """Pairs of nodes between which enough was sent, in order.

    Their slower direction's rate, and their kind: those that carry about as many bytes over as many sockets do the same
    for the job. What a socket gets through differs by kind: those of a pipeline may share a card, and that of a ring
    has one for itself.
    """

    nodes: Ints  # [pair, 2], the lower number first
    rate: Floats  # bytes per second
    kind: Ints

    def __len__(self) -> int:
        return len(self.rate)

    def of(self, *nodes: int, is_pair: bool = False) -> Bools:
        """Say which pairs have one of these nodes, or both of two."""
        has = [(self.nodes == node).any(axis=1) for node in nodes]
        return np.asarray(np.all(has, axis=0) if is_pair else np.any(has, axis=0))

    def nodes_below(self, most: float) -> list[int]:
        """Return the nodes of which every link may have less than this share of the usual rate of its kind.

        That is the median of the others of the kind, which is no higher than if the node's own were all below it. Links
        of a kind that no other node has do not count.
        """
        nodes, node = distinct(self.nodes.ravel())
        rate, kind = np.repeat(self.rate, 2), np.repeat(self.kind, 2)
        kinds = int(kind.max(initial=-1)) + 1
        ordered = self.rate[np.lexsort((self.rate, self.kind))]
        count = np.bincount(self.kind, minlength=kinds)
        own = np.bincount(node * kinds + kind, minlength=len(nodes) * kinds)[node * kinds + kind]
        place = np.minimum((count[kind] + own) // 2, count[kind] - 1)
        least = rate / ordered[(np.cumsum(count) - count)[kind] + place]
        fastest = np.zeros(len(nodes))
        np.maximum.at(fastest, node, np.where(own < count[kind], least, 0.0))
        found: list[int] = nodes[fastest <= most * (1 + 1e-9)].tolist()
        return found

    def against_others(self, chosen: Bools) -> tuple[float, Floats, Floats]:
        """Return the median rate of the chosen pairs; and the rates of these, and of all others, over the usual one.

        That is the median of the others of their kind; chosen pairs of a kind that no other has are left out. Without
        any, the median is nan.
        """
        usual = np.full(int(self.kind.max(initial=-1)) + 1, np.nan)
        for kind in range(len(usual)):
            others = self.rate[(self.kind == kind) & ~chosen]
            if len(others):
                usual[kind] = np.median(others)
        relative = self.rate / usual[self.kind]
        known = chosen & ~np.isnan(relative)
        rate = float(np.median(self.rate[known])) if known.any() else np.nan
        return rate, relative[known], relative[~chosen]


@once
def pairs_of_nodes(busy: pl.DataFrame) -> PairsOfNodes:
    """Return the pairs of the nodes of `busy_links`."""
    low, high = (
        busy.select(f("node", "peer_node")).to_series().to_numpy() for f in (pl.min_horizontal, pl.max_horizontal)
    )
    width = int(high.max(initial=0)) + 1
    keys, pair = distinct(low * width + high)
    rate = np.full(len(keys), np.inf)
    np.minimum.at(rate, pair, busy["rate_bytes_per_s"].to_numpy())
    alike = []  # by bytes, and by sockets
    for column in ("sent_bytes", "pairs"):
        most = np.zeros(len(keys))
        np.maximum.at(most, pair, busy[column].to_numpy())
        order, of = np.argsort(most, kind="stable"), np.empty(len(keys), np.int64)
        of[order] = np.cumsum(np.diff(np.log(most[order]), prepend=np.log(most[order[:1]])) > np.log(_ALIKE))
        alike.append(of)
    _, kind = distinct(alike[0] * (1 + len(keys)) + alike[1])
    return PairsOfNodes(np.stack([keys // width, keys % width], axis=1), rate, kind)


def busy_time(links: pl.DataFrame, nodes: tuple[int, ...], *, is_pair: bool = False) -> tuple[float, int, int]:
    """For how long, ns, the links of a node, or between two, had data under way, in the direction that had it longer.

    Of several nodes that of which it was longest. Second and third, between which times on the run's clock; 0 stands
    for its beginning.
    """
    node, peer = pl.col("node"), pl.col("peer_node")
    of = [(node == one, peer == one) for one in nodes]
    if is_pair:
        of = [((node == nodes[0]) & (peer == nodes[1]), (peer == nodes[0]) & (node == nodes[1]))]
    ways = [busy_links(links).filter(way) for both in of for way in both]
    busy_s = max(float(way["busy_s"].sum()) for way in ways)
    both = pl.concat(ways)
    since = both.select(pl.when(~pl.col("since_ns").has_nulls()).then(pl.col("since_ns").min())).item()
    return busy_s * 1e9, since or 0, both.select(pl.col("until_ns").max()).item() or 0


def link_rates(links: pl.DataFrame, nodes: tuple[int, ...], *, is_pair: bool = False) -> tuple[float, float] | None:
    """Bytes per second over the links of nodes, or between two, and over the others; None where either is unknown.

    The others' is that of their kind (`PairsOfNodes`). Of two nodes alone the one link's slower direction is compared
    with the other.
    """
    busy = busy_links(links)
    pairs = pairs_of_nodes(busy)
    chosen = pairs.of(*nodes, is_pair=is_pair)
    if len(pairs) == 1 and len(busy) == 2:
        low, high = sorted(busy["rate_bytes_per_s"])
        return (low, high) if chosen.all() else None
    rate, mine, others = pairs.against_others(chosen)
    return (rate, rate * float(np.median(others) / np.median(mine))) if len(mine) and len(others) else None
