"""The link of one node, or between two nodes, is slower than the other links.

**Signal.** Blocked time in transfer, after the last rank has arrived, is above `min_fraction` of the step, and the
sockets between some nodes get through less than 1 / `min_ratio` of the bytes per busy second that they do between
others. A node is named when all of its links are slow and those among the other nodes are not; otherwise the link
between two nodes is. With two nodes there is one link only, and it is named where one of its directions is slow.

**Why it costs time.** A collective is as fast as the slowest link it uses, so all ranks get slower at once, and
each one's own view shows nothing but long communication. A slow rank is different: its own communication is the
shortest.

**False alarms.** Links that differ by design (nodes in two racks, mixed NICs). A node whose processors are
overloaded sends slowly as well. Links that are all slow alike are no finding here: there is no healthy one to
compare with.

**What to try.** Compare the node's link speed, duplex and error counters with the others (`ethtool`), look for
other traffic on it, for a wrong interface (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`) and for shaping; retransmits
point at a cable or a switch port.

**Source.** Slow links by aligned arrivals and long transfers: Greyhound. Locating by intersection of the slow
edges. Busy time and round trips: Linux `tcp_info`. Thresholds were measured between network namespaces with a
shaped link.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, NotResolvable, price, transfer_grid, visible
from rankscope.analysis.finding import Evidence, Finding
from rankscope.analysis.phrases import named
from rankscope.analysis.report.quantities import duration, percent
from rankscope.analysis.timeline.links import busy_links, pair_rates
from rankscope.analysis.timeline.own import Estimate, StepGrid, estimate

__all__ = ["collectors", "detect", "resolution_ns"]

collectors = ("collectives", "tcp")

_MODEL_ERROR = 0.25  # of the loss: transfer is not bytes alone, so it does not shrink quite as the rate grows


@dataclass(frozen=True, slots=True)
class _Slow:
    """The nodes named (one: all of its links; two: the link between them) and the rates that show it."""

    nodes: tuple[int, ...]
    rate: float
    healthy_rate: float


def detect(
    breakdown: pl.DataFrame,
    links: pl.DataFrame,
    ranks: pl.DataFrame,
    steps: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_ratio: float = 2.0,
) -> list[Finding]:
    """Name the node or the link that is slower than the others, if transfer costs the job time."""
    grid, transfer = _transfer(breakdown, ranks)
    busy = busy_links(links)
    if busy.is_empty():
        raise NotResolvable("no traffic between nodes was seen in TCP sockets")
    slow = _slow_node(busy, min_ratio) or _slow_pair(busy, min_ratio)
    if slow is None:
        if len(pair_rates(busy)) == 1 and transfer.ns >= min_fraction * grid.step_ns:
            raise NotResolvable(
                f"the one link between the nodes is alike in both directions; transfer takes {duration(transfer.ns)} "
                f"({percent(transfer.ns / grid.step_ns)}) of the step, but no other link tells what would be normal"
            )
        return []
    share = 1 - slow.rate / slow.healthy_rate
    lost = Estimate(transfer.ns * share, transfer.half_width_ns * share + _MODEL_ERROR * transfer.ns * share)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    rates = f"{slow.rate / 1e6:.0f} MB/s against {slow.healthy_rate / 1e6:.0f} MB/s"
    one = len(slow.nodes) == 1
    what = f"node {slow.nodes[0]}" if one else f"the link between node {slow.nodes[0]} and node {slow.nodes[1]}"
    subject = f"The link of {what}" if one else what[0].upper() + what[1:]
    return [
        Finding(
            detector="slow_link",
            title=f"{subject} is slow ({rates} elsewhere): "
            f"all ranks are blocked {duration(transfer.ns)} per step while bytes move",
            where=what,
            advice=f"Compare interface, link speed and error counters of {named('node', slow.nodes)} with the others "
            "(ethtool); look for other traffic, shaping, or a wrong GLOO_SOCKET_IFNAME / NCCL_SOCKET_IFNAME.",
            ranks=tuple(ranks.filter(pl.col("node").is_in(slow.nodes))["rank"].unique().sort().to_list())
            if one
            else (),
            nodes=slow.nodes,
            evidence=_evidence(links, slow, steps),
            fix=f"link:{'-'.join(f'node{node}' for node in slow.nodes)}",
            **price(grid, lost),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, ranks: pl.DataFrame, *, min_fraction: float = 0.03) -> int:
    """The smallest loss by a slow link that would have been reported."""
    grid, transfer = _transfer(breakdown, ranks)
    return visible(grid, max(min_fraction * grid.step_ns, transfer.half_width_ns))


def _transfer(breakdown: pl.DataFrame, ranks: pl.DataFrame) -> tuple[StepGrid, Estimate]:
    """The grid, and the time per step in which a rank is blocked while bytes move (median over ranks)."""
    if ranks["node"].n_unique() < 2:
        raise NotResolvable("all ranks that were seen run on one node")
    grid = transfer_grid(breakdown, FEW_STEPS)
    return grid, estimate(np.median(grid.of("transfer"), axis=0), 0.1)


def _slow_node(busy: pl.DataFrame, min_ratio: float) -> _Slow | None:
    """The node of which even the fastest link is slower than those among the others."""
    pairs = pair_rates(busy)
    candidates = []
    for node in sorted({node for pair in pairs for node in pair}):
        of_node = [rate for pair, rate in pairs.items() if node in pair]
        among_others = [rate for pair, rate in pairs.items() if node not in pair]
        if len(of_node) > 1 and among_others and float(np.median(among_others)) >= min_ratio * max(of_node):
            candidates.append(_Slow((node,), float(np.median(of_node)), float(np.median(among_others))))
    return max(candidates, key=lambda slow: slow.healthy_rate / slow.rate, default=None)


def _slow_pair(busy: pl.DataFrame, min_ratio: float) -> _Slow | None:
    """The pair of nodes whose link is slower than those of all other pairs; of two nodes, than its other direction."""
    pairs = pair_rates(busy)
    if len(pairs) == 1 and len(busy) == 2:
        slow, healthy = sorted(busy["rate_bytes_per_s"])
        pair = next(iter(pairs))
        return _Slow(pair, slow, healthy) if healthy >= min_ratio * slow else None
    pair = min(pairs, key=lambda p: pairs[p])
    others = [rate for p, rate in pairs.items() if p != pair]
    if not others or float(np.median(others)) < min_ratio * pairs[pair]:
        return None
    return _Slow(pair, pairs[pair], float(np.median(others)))


def _evidence(links: pl.DataFrame, slow: _Slow, steps: pl.DataFrame) -> tuple[Evidence, ...]:
    """Each direction that starts at a named node, over the judged steps."""
    start_ns, end_ns = steps["start_ns"].min(), steps["end_ns"].max()
    rows = links.filter(pl.col("node").is_in(slow.nodes)).select("node", "peer_node", "rate_bytes_per_s", "rtt_s")
    assert isinstance(start_ns, int)
    assert isinstance(end_ns, int)
    return tuple(
        Evidence(
            table="counters",
            node=node,
            start_ns=start_ns,
            end_ns=end_ns,
            note=f"to node {peer}: {rate / 1e6:.0f} MB/s while it sends, round trip {duration((rtt or 0) * 1e9)}",
        )
        for node, peer, rate, rtt in rows.iter_rows()
    )
