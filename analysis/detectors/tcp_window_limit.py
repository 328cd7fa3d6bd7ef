"""The layers below a collective are set for another network than this one: TCP's window is too small for it.

**Signal.** In the sockets between two nodes the receiver's window was the limit for `min_limited` of the time in which
data was under way, as the kernel counts it, and they send at least half of what the largest window that was offered
allows: window / round trip. The loss is what ranks wait for in collectives between nodes, times the limited
share; where the speed of the interfaces is known, without what the bytes take at four fifths of it, over the sockets
that share it. Above `min_fraction` of the step it is reported.

**Why it costs time.** A sender may have no more under way than the window; then it waits for a round trip. To fill a
link, the window must hold bandwidth × round trip: 10 Gb/s over 20 ms are 25 MB, and Linux allows 6 MB by default.

**False positives.** None known: a receiver that reads too slowly has a large window that is full, and is not named.

**What to try.** Raise `net.core.rmem_max` and the last number of `net.ipv4.tcp_rmem` (on the sender that of
`net.ipv4.tcp_wmem`) to bandwidth × round trip; or share it among more sockets: `NCCL_NSOCKS_PERTHREAD`,
`NCCL_SOCKET_NTHREADS`.

**Source.** Linux `tcp_info`: tcpi_rwnd_limited, tcpi_snd_wnd; RFC 7323 for window and round trip. How NCCL cuts what it
sends into channels and chunks is not recorded and not analyzed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from rankscope.analysis.detectors import longest_rows, price, transfer_grid
from rankscope.analysis.metrics.exposed_communication import held_up, is_bounded
from rankscope.analysis.metrics.links import ATTAINABLE, busy_links, nic_speeds, nodes_of_groups
from rankscope.analysis.metrics.step_matrix import TRIM, Estimate, StepGrid, estimate, sums
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import bytes_text, duration, percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives", "tcp"),
    explains=("low_bandwidth", "exposed_communication"),
    lost_as=AS_EXPOSED,
)

_OF_THE_WINDOW = 0.5


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    ranks: pl.DataFrame,
    links: pl.DataFrame,
    counters: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_limited: float = 0.5,
) -> list[Finding]:
    """Name the direction between two nodes whose window holds it back the most."""
    grid = transfer_grid(breakdown, collectives=collectives)
    several = nodes_of_groups(collectives, ranks).filter(pl.col("nodes") > 1)["group_id"]
    rows = held_up(collectives, phases).filter(pl.col("group_id").is_in(several.implode()))
    exposed, least = (np.median(sums(grid, rows, column), axis=0) for column in ("exposed_ns", "least_ns"))
    if estimate(exposed, TRIM).ns < min_fraction * grid.step_ns:
        return []
    limited = busy_links(links).filter(pl.col("rwnd_limited_s") >= min_limited * pl.col("busy_s"))
    if limited.is_empty():
        return []
    worst = limited.sort("rate_bytes_per_s").row(0, named=True)
    said = text(
        "the receiver's window is the limit {share} of the time",
        share=percent(worst["rwnd_limited_s"] / worst["busy_s"]),
    )
    if worst["window_bytes"] is None or not worst["rtt_s"]:
        raise NotResolvable(
            text("between the nodes {said}, but its size was not recorded (Linux reports it from 5.4 on)", said=said)
        )
    allowed = worst["window_bytes"] / worst["rtt_s"]
    if worst["rate_bytes_per_s"] < _OF_THE_WINDOW * allowed:
        return []
    speed = None if counters is None else nic_speeds(counters).get(worst["node"])
    share = worst["rwnd_limited_s"] / worst["busy_s"]
    if speed is not None:
        share *= max(0.0, 1 - worst["rate_bytes_per_s"] * worst["pairs"] / (ATTAINABLE * speed))
    most = estimate(share * exposed, TRIM)
    if not most.clear or most.ns < min_fraction * grid.step_ns:
        return []
    return [_finding(worst, speed, rows, grid, estimate(share * least, TRIM))]


def resolution_ns(
    breakdown: pl.DataFrame, collectives: pl.DataFrame | None = None, *, min_fraction: float = 0.05
) -> int:
    """Return the smallest loss per step that would have been reported."""
    return round(min_fraction * transfer_grid(breakdown, collectives=collectives).step_ns)


def _finding(worst: dict[str, Any], speed: float | None, rows: pl.DataFrame, grid: StepGrid, lost: Estimate) -> Finding:
    window, rtt_s = worst["window_bytes"], worst["rtt_s"]
    where = text("from node {node} to node {peer}", node=worst["node"], peer=worst["peer_node"])
    limited = percent(worst["rwnd_limited_s"] / worst["busy_s"])
    needed = (
        text("{size} (bandwidth × round trip)", size=bytes_text(speed * rtt_s))
        if speed
        else text("bandwidth × round trip")
    )
    why = None if speed else text("the speed of the network interface was not recorded")
    if is_bounded(rows):
        why = text("for how long transfers block ranks was not recorded")
    return Finding(
        detector="tcp_window_limit",
        title=text(
            "TCP's window is too small {where}: {window} per round trip of {rtt} allow {rate}/s "
            "per socket, and are the limit {limited} of the time",
            where=where,
            window=bytes_text(window),
            rtt=duration(rtt_s * 1e9),
            rate=bytes_text(window / rtt_s),
            limited=limited,
        ),
        where=where,
        advice=text(
            "Raise net.core.rmem_max and the last number of net.ipv4.tcp_rmem on node {peer} to "
            "{needed}, tcp_wmem on node {node}; or use more sockets (NCCL_NSOCKS_PERTHREAD, "
            "NCCL_SOCKET_NTHREADS).",
            peer=worst["peer_node"],
            needed=needed,
            node=worst["node"],
        ),
        nodes=(worst["node"], worst["peer_node"]),
        gain_why=why,
        evidence=longest_rows(rows, "collectives"),
        **price(grid, lost, lost.ns if why is None else None),
    )
