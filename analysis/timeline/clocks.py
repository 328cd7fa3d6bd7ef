"""One clock for the run: how far each node's monotonic clock is from node 0's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.finding import Clock
from rankscope.collectors.schema import NO_PEER

__all__ = ["TIME_COLUMNS", "apply_clocks", "fit_clocks"]

TIME_COLUMNS = ("start_ns", "issued_ns", "device_start_ns", "end_ns", "time_ns")

_REFERENCE = 0
_BURST_GAP_NS = 5_000_000_000  # pings closer than this belong to one burst
_KEPT = 0.1  # share of a burst's pings, those with the lowest round trip
_DRIFT_SPAN_NS = 30_000_000_000  # shorter spans do not show a drift of a few ppm
_GOOD_RTT, _GOOD_RTT_NS = 2, 20_000  # a burst counts if its best round trip is at most 2 × the best + 20 µs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Bursts:
    """Per burst: when (node's clock), offset to node 0 and best round trip, ns."""

    at_ns: Ints
    offset_ns: Floats
    rtt_ns: Ints


def fit_clocks(clocks: pl.DataFrame, nodes: Iterable[int]) -> list[Clock]:
    """One `Clock` per node, in order; node 0 is the reference.

    From pings of node 0, `theta = ((t2 - t1) + (t3 - t4)) / 2`: the lowest round trips of each burst; bursts on a
    loaded link, whose best round trip is far above the best of all, are left out, since a queue delays one way only.
    Drift by least squares where good bursts span 30 s, else 0. `error_ns` is half the best round trip plus the
    largest residual. Without pings, from both nodes' unix time, whose error nobody knows (None).

    Source: RFC 5905 (NTP), sections 8 and 10: offset from four stamps, the sample with the least delay is the best.
    """
    anchors = {node: _unix_minus_monotonic(clocks, node) for node in {_REFERENCE, *nodes}}
    return [_fit_node(clocks, node, anchors) for node in sorted(set(nodes))]


def apply_clocks(frame: pl.LazyFrame, clocks: Iterable[Clock]) -> pl.LazyFrame:
    """The frame with every time column on node 0's clock; it needs the column `node`. Other rows are unchanged."""
    table = pl.LazyFrame(
        [(c.node, c.offset_ns, c.drift_ppm, c.at_ns) for c in clocks],
        schema={"node": pl.Int32, "_offset": pl.Int64, "_drift": pl.Float64, "_at": pl.Int64},
        orient="row",
    )
    times = [c for c in frame.collect_schema().names() if c in TIME_COLUMNS]

    def shifted(column: str) -> pl.Expr:
        drift = ((pl.col(column) - pl.col("_at")) * pl.col("_drift") * 1e-6).round().cast(pl.Int64)
        return (pl.col(column) + pl.col("_offset").fill_null(0) + drift.fill_null(0)).alias(column)

    joined = frame.join(table, on="node", how="left", maintain_order="left")
    return joined.with_columns(shifted(c) for c in times).drop("_offset", "_drift", "_at")


def _fit_node(clocks: pl.DataFrame, node: int, anchors: dict[int, int | None]) -> Clock:
    if node == _REFERENCE:
        return Clock(node=node, offset_ns=0, drift_ppm=0.0, error_ns=0, source="reference")
    pings = clocks.filter((pl.col("node") == node) & (pl.col("peer") == _REFERENCE)).sort("t1_ns")
    bursts = _good_bursts(pings)
    if bursts is not None:
        return _fit_bursts(node, bursts)
    own, reference = anchors[node], anchors[_REFERENCE]
    if own is None or reference is None:
        return Clock(node=node, offset_ns=0, drift_ppm=0.0, error_ns=None, source="none")
    return Clock(node=node, offset_ns=own - reference, drift_ppm=0.0, error_ns=None, source="unix time")


def _good_bursts(pings: pl.DataFrame) -> _Bursts | None:
    t1, t2, t3, t4 = (pings[c].to_numpy() for c in ("t1_ns", "t2_ns", "t3_ns", "t4_ns"))
    rtt = (t4 - t1) - (t3 - t2)
    real = rtt > 0
    t1, t2, t3, t4, rtt = (a[real] for a in (t1, t2, t3, t4, rtt))
    if not len(rtt):
        return None
    theta = ((t2 - t1) + (t3 - t4)) / 2
    found = []
    for burst in np.split(np.arange(len(t1)), np.flatnonzero(np.diff(t1) > _BURST_GAP_NS) + 1):
        best = burst[np.argsort(rtt[burst], kind="stable")][: max(1, int(len(burst) * _KEPT))]
        found.append((int(t1[best].mean()), float(np.median(theta[best])), int(rtt[best[0]])))
    at, offset, best_rtt = (np.array(column) for column in zip(*found, strict=True))
    good = best_rtt <= _GOOD_RTT * best_rtt.min() + _GOOD_RTT_NS
    return _Bursts(at_ns=at[good], offset_ns=offset[good].astype(np.float64), rtt_ns=best_rtt[good])


def _fit_bursts(node: int, bursts: _Bursts) -> Clock:
    at = int(bursts.at_ns[0])
    elapsed = (bursts.at_ns - at).astype(np.float64)
    weights = 1 / bursts.rtt_ns.astype(np.float64)  # polyfit squares them
    first = bursts.offset_ns[0]  # keeps the numbers small, so that the fit loses no digits
    degree = 1 if elapsed[-1] >= _DRIFT_SPAN_NS else 0
    fit = np.polyfit(elapsed / 1e9, bursts.offset_ns - first, degree, w=weights)
    residual = float(np.abs(np.polyval(fit, elapsed / 1e9) - (bursts.offset_ns - first)).max())
    return Clock(
        node=node,
        offset_ns=round(float(first)) + round(float(fit[-1])),
        drift_ppm=float(fit[0]) / 1e3 if degree else 0.0,
        at_ns=at,
        error_ns=int(np.ceil(bursts.rtt_ns.min() / 2 + residual)),
        source="pings",
    )


def _unix_minus_monotonic(clocks: pl.DataFrame, node: int) -> int | None:
    """Median over the anchors, since unix time may jump; None without anchors."""
    anchors = clocks.filter((pl.col("node") == node) & (pl.col("peer") == NO_PEER))
    between = anchors["t2_ns"] - (anchors["t1_ns"] + (anchors["t4_ns"] - anchors["t1_ns"]) // 2)
    return int(between.sort()[len(between) // 2]) if len(between) else None
