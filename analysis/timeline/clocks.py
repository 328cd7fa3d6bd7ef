"""One clock for the run: how far each node's monotonic clock is from node 0's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Clock
from rankscope.analysis.model.lookup import row_of
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.collectors.schema import NO_PEER, P2P_OPS

__all__ = ["TIME_COLUMNS", "apply_clocks", "clocks_by_causality", "fit_clocks"]

TIME_COLUMNS = ("start_ns", "issued_ns", "device_start_ns", "end_ns", "time_ns", "bye_ns", "raised_ns")

_BURST_GAP_NS = 5_000_000_000  # pings closer than this belong to one burst
_KEPT = 0.1  # share of a burst's pings, those with the lowest round trip
_DRIFT_SPAN_NS = 30_000_000_000  # shorter spans do not show a drift of a few ppm
_GOOD_RTT, _GOOD_RTT_NS = 2, 20_000  # a burst counts if its best round trip is at most 2 × the best + 20 µs
_MOST_DRIFT = 100e-6  # of two quartzes at their worst, 50 ppm each; where NTP steers them it is far less
_WRONG = 0.05  # share of bounds that may be wrong; with more, the clock is no straight line
_NEARLY_ALL = 0.9  # of the ends of operations
_BUCKETS, _FINE_BUCKETS, _IN_BUCKET = 32, 1024, 100

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Bursts:
    """Per burst: when (node's clock), offset to node 0 and best round trip, ns."""

    at_ns: Ints
    offset_ns: Floats
    rtt_ns: Ints


def fit_clocks(clocks: pl.DataFrame, nodes: Iterable[int]) -> list[Clock]:
    """One `Clock` per node, in order; the node that the others ping is the reference: node 0, if it has ranks.

    From pings, `theta = ((t2 - t1) + (t3 - t4)) / 2`: the lowest round trips of each burst; bursts on a
    loaded link, whose best round trip is far above the best of all, are left out, since a queue delays one way only.
    Drift by least squares where good bursts span 30 s, else 0. `error_ns` is half the best round trip plus the
    largest residual. Without pings, from both nodes' unix time, whose error is not known (None).

    Source: RFC 5905 (NTP), sections 8 and 10: offset from four stamps, the sample with the least delay is the best.
    """
    own = sorted(set(nodes))
    peers = clocks.filter(pl.col("node").is_in(own), pl.col("peer") != NO_PEER)["peer"]
    reference = min(peers.mode().to_list() or own, default=0)
    bursts = _good_bursts(clocks.filter(peer=reference).sort("node", "t1_ns"))
    anchors = clocks.filter(peer=NO_PEER).partition_by("node", as_dict=True)

    def unix_minus_monotonic(node: int) -> int | None:
        return _unix_minus_monotonic(anchors.get((node,), clocks.clear()))

    return [_fit_node(bursts.get(node), node, reference, unix_minus_monotonic) for node in own]


def clocks_by_causality(matched: pl.DataFrame, clocks: Iterable[Clock]) -> list[Clock]:
    """Return the clocks, those of unknown error placed by causality where operations bound them.

    `matched` has times on the nodes' own clocks. No rank ends an operation in which all give to all before the last
    arrived, no receive ends before its send began: each such pair bounds the offset of one node's clock to another's,
    from above or from below. The lines that keep within all bounds are a corridor; the clock is its middle, and
    `error_ns` half its width where it is widest between the first and the last bound. So a node is placed
    to within about half of the fastest operation that it shares with nodes whose clocks are known, whose own errors
    are part of the bounds. Bounds that fit no line are left out, the fewest; were they more than 5 %, the clock stays
    unknown.

    On devices such an operation ends on all ranks within the time of one of its parts, some tens of µs. Where the ends
    show the clock to within less than the corridor, they place it: `error_ns` is what 9 in 10 of them are off by.

    Source: Duda, Harrus, Haddad and Bernard, "Estimating global time in distributed systems" (ICDCS 1987).
    """
    placed = {c.node: c for c in clocks}
    if all(c.error_ns is not None for c in placed.values()):
        return list(placed.values())
    events = _events(matched)
    while True:
        known = [c for c in placed.values() if c.error_ns is not None]
        bounds = _bounds(events, known)
        ends = {node: rows for (node,), rows in _ends(events, known).group_by("node")}
        found = [
            _by_ends(_clock_between(node, rows), ends.get(node))
            for (node,), rows in bounds.group_by("node", maintain_order=True)
        ]
        new = {c.node: c for c in found if c is not None and c.node in placed}
        if not new:
            return list(placed.values())
        placed |= new


def apply_clocks(rows: pl.DataFrame, clocks: Iterable[Clock]) -> pl.DataFrame:
    """Return the rows with every time column on node 0's clock.

    They need the column `node`. Other columns are unchanged.
    """
    clocks = list(clocks)
    if not any(c.offset_ns or c.drift_ppm for c in clocks):  # large traces mostly come from one node
        return rows
    of = row_of(rows, pl.DataFrame({"node": [clock.node for clock in clocks]}, {"node": pl.Int32}), ["node"])
    # One more for rows of a node whose clock is not known.
    offset, at = (np.array([*values, 0]) for values in zip(*((c.offset_ns, c.at_ns) for c in clocks), strict=True))
    drift = np.array([*(clock.drift_ppm for clock in clocks), 0.0])
    offset, at, drift = offset[of], at[of], drift[of]
    shifted = []
    for column in rows.columns:
        if column in TIME_COLUMNS and rows[column].null_count() < len(rows):
            ahead = (rows[column].fill_null(0).to_numpy() - at) * drift
            ahead *= 1e-6
            shifted.append(rows[column] + pl.Series(offset + np.rint(ahead, out=ahead).astype(np.int64)))
    return rows.with_columns(shifted)


def _fit_node(bursts: _Bursts | None, node: int, reference: int, anchor: Callable[[int], int | None]) -> Clock:
    """Return a node's clock by its pings of the reference, else by what its unix time is ahead of it."""
    if node == reference:
        return Clock(node=node, offset_ns=0, drift_ppm=0.0, error_ns=0, source="reference")
    if bursts is not None:
        return _fit_bursts(node, bursts)
    own, other = anchor(node), anchor(reference)
    if own is None or other is None:
        return Clock(node=node, offset_ns=0, drift_ppm=0.0, error_ns=None, source="none")
    return Clock(node=node, offset_ns=own - other, drift_ppm=0.0, error_ns=None, source="unix time")


def _good_bursts(pings: pl.DataFrame) -> dict[int, _Bursts]:
    """Return the bursts of each node that count. Pings are in order of node and time, and taken together."""
    node, t1, t2, t3, t4 = (pings[column].to_numpy() for column in ("node", "t1_ns", "t2_ns", "t3_ns", "t4_ns"))
    real = (t4 - t1) - (t3 - t2) > 0
    node, t1, t2, t3, t4 = (of[real] for of in (node, t1, t2, t3, t4))
    rtt, theta = (t4 - t1) - (t3 - t2), ((t2 - t1) + (t3 - t4)) / 2
    begins = (np.diff(node, prepend=-1) != 0) | (np.diff(t1, prepend=0) > _BURST_GAP_NS)
    first, burst = np.flatnonzero(begins), np.cumsum(begins) - 1
    length = np.diff(first, append=len(t1))
    kept = np.maximum(1, (length * _KEPT).astype(np.int64))
    of_burst = np.arange(len(t1)) - first[burst]
    best = np.lexsort((rtt, burst))[of_burst < kept[burst]]  # by burst those with the lowest round trips
    begin = np.cumsum(kept) - kept
    ordered = theta[best][np.lexsort((theta[best], burst[best]))]
    at = (np.add.reduceat(t1[best].astype(np.float64), begin) / kept).astype(np.int64) if len(begin) else begin
    offset = (ordered[begin + (kept - 1) // 2] + ordered[begin + kept // 2]) / 2
    rtt, of_node = rtt[best[begin]], node[first]
    nodes = np.flatnonzero(np.diff(of_node, prepend=-1))
    found = {}
    for low, high in pairwise([*nodes.tolist(), len(of_node)]):
        good = rtt[low:high] <= _GOOD_RTT * rtt[low:high].min() + _GOOD_RTT_NS
        of = (column[low:high][good] for column in (at, offset, rtt))
        found[int(of_node[low])] = _Bursts(*of)
    return found


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


def _unix_minus_monotonic(anchors: pl.DataFrame) -> int | None:
    """Median over the anchors of one node, since unix time may jump; None without anchors."""
    between = anchors["t2_ns"] - (anchors["t1_ns"] + (anchors["t4_ns"] - anchors["t1_ns"]) // 2)
    return int(between.sort()[len(between) // 2]) if len(between) else None


def _events(matched: pl.DataFrame) -> pl.DataFrame:
    """instance_id, node, came_ns (the last that must have happened before any end), ended_ns (the first end).

    And done_ns: the same of operations that end at once on all devices.
    """
    op, arrival = pl.col("op"), pl.coalesce("device_start_ns", "start_ns")
    return (
        matched.lazy()
        .filter(pl.col("instance_id").is_not_null() & op.is_in([*MUTUAL_OPS, *P2P_OPS]))
        .select(
            "instance_id",
            "node",
            came_ns=pl.when(~op.is_in(P2P_OPS) | (op == "send")).then(arrival),
            ended_ns=pl.when(op != "send").then("end_ns"),
            done_ns=pl.when(op.is_in(MUTUAL_OPS), pl.col("device_start_ns").is_not_null()).then("end_ns"),
        )
        .group_by("instance_id", "node")
        .agg(pl.col("came_ns").max(), pl.col("ended_ns", "done_ns").min())
        .collect()
    )


def _bounds(events: pl.DataFrame, known: list[Clock]) -> pl.DataFrame:
    """node, at_ns, offset_ns, is_upper: a node's clock plus its offset is node 0's, at that time of its own clock."""
    errors = pl.LazyFrame(
        [(c.node, c.error_ns) for c in known], schema={"node": pl.Int32, "error_ns": pl.Int64}, orient="row"
    )
    renamed = events.rename({"came_ns": "start_ns", "ended_ns": "end_ns"})
    there = (
        apply_clocks(renamed, known)
        .lazy()
        .join(errors, on="node")
        .group_by("instance_id")
        .agg(
            (pl.col("start_ns") - pl.col("error_ns")).max().alias("came_there_ns"),
            (pl.col("end_ns") + pl.col("error_ns")).min().alias("ended_there_ns"),
        )
    )
    here = events.lazy().join(errors, on="node", how="anti").join(there, on="instance_id")
    upper = here.select("node", at_ns="came_ns", offset_ns=pl.col("ended_there_ns") - pl.col("came_ns"), is_upper=True)
    lower = here.select(
        "node", at_ns="ended_ns", offset_ns=pl.col("came_there_ns") - pl.col("ended_ns"), is_upper=False
    )
    return pl.concat([upper, lower]).drop_nulls().sort("node", "at_ns", "is_upper", "offset_ns").collect()


def _ends(events: pl.DataFrame, known: list[Clock]) -> pl.DataFrame:
    """node, at_ns, offset_ns, error_ns: by ends of operations, as the known node that errs least has them."""
    errors = {c.node: c.error_ns for c in known}
    done = events.select("instance_id", "node", end_ns="done_ns").drop_nulls()
    is_known = pl.col("node").is_in(list(errors))
    there = apply_clocks(done.filter(is_known), known).with_columns(
        error_ns=pl.col("node").replace_strict(errors, return_dtype=pl.Int64)
    )
    there = there.sort("error_ns", "node").unique("instance_id", keep="first")
    there = there.select("instance_id", "error_ns", there_ns="end_ns")
    here = done.filter(~is_known).join(there, on="instance_id")
    return here.select("node", "error_ns", at_ns="end_ns", offset_ns=pl.col("there_ns") - pl.col("end_ns"))


def _by_ends(clock: Clock | None, ends: pl.DataFrame | None) -> Clock | None:
    """Return the clock that the ends of operations show, if that errs less and lies within the error of this one."""
    if clock is None or clock.error_ns is None or ends is None:
        return clock
    ends = ends.sort("at_ns")
    since, offset = ends["at_ns"].to_numpy() - clock.at_ns, ends["offset_ns"].to_numpy() - clock.offset_ns
    drift = 0.0
    if since[-1] - since[0] >= _DRIFT_SPAN_NS:
        third = max(len(since) // 3, 1)
        (first, middle), (last, end) = (
            (np.median(since[of]), np.median(offset[of])) for of in (slice(third), slice(-third, None))
        )
        drift = float((end - middle) / (last - first))
    ahead = float(np.median(offset - drift * since))
    error = ends["error_ns"].to_numpy().max() + np.quantile(np.abs(offset - ahead - drift * since), _NEARLY_ALL)
    apart = np.abs(ahead + (drift - clock.drift_ppm * 1e-6) * since).max()
    if error >= clock.error_ns or apart > clock.error_ns:
        return clock
    return replace(
        clock,
        offset_ns=clock.offset_ns + round(ahead),
        drift_ppm=drift * 1e6,
        error_ns=int(np.ceil(error)) + 1,
        source="ends",
    )


def _clock_between(node: int, bounds: pl.DataFrame) -> Clock | None:
    """Return the clock in the middle of the lines that keep within the bounds.

    None if they do not hold it from both sides.
    """
    upper = bounds["is_upper"].to_numpy()
    if upper.all() or not upper.any():
        return None
    at, offset = bounds["at_ns"].to_numpy(), bounds["offset_ns"].to_numpy()
    first, middle = int(at[0]), int(np.median(offset))  # keep the numbers small, so that floats lose no digits
    span = max(float(at[-1] - first), 1.0)
    corridor = _corridor((at - first) / span, (offset - middle).astype(np.float64), upper, _MOST_DRIFT * span)
    if corridor is None:
        return None
    low, high = corridor.min(axis=0), corridor.max(axis=0)
    begin, end = (low + high) / 2
    return Clock(
        node=node,
        offset_ns=middle + round(begin),
        drift_ppm=float(end - begin) / span * 1e6,
        at_ns=first,
        error_ns=int(np.ceil((high - low).max() / 2)) + 1,
        source="causality",
    )


def _corridor(at: Floats, offset: Floats, upper: Bools, most: float) -> Floats | None:
    """Corners of the set of lines within the bounds, each line as its values at 0 and at 1, which differ by `most`.

    Bounds are ranked by how far a line is beyond them, and the first of the ranking are left out, the fewest that
    leave any line: of a rough line first, then of the middle of what that leaves. None: that are too many.
    """
    side = np.where(upper, 1.0, -1.0)
    line = _rough_line(at, offset, upper)
    corners = None
    for _ in range(2):
        beyond = side * (line[0] + (line[1] - line[0]) * at - offset)
        ranked = np.sort(beyond)[::-1]
        kept = corners
        few, many = -1, int(_WRONG * len(at))  # `many` left out suffice, `few` do not
        kept = _within(at, offset, side, beyond, ranked[many], line, most)
        if kept is None:
            return corners
        while many - few > 1:
            half = (few + many) // 2
            found = _within(at, offset, side, beyond, ranked[half], line, most)
            few, many, kept = (few, half, found) if found is not None else (half, many, kept)
        corners = kept
        line = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return corners


def _rough_line(at: Floats, offset: Floats, upper: Bools) -> Floats:
    """Values at 0 and 1 of a line between the bounds that one in ten of them may miss."""
    count = int(np.clip(len(at) // _IN_BUCKET, 1, _BUCKETS))
    bucket = np.minimum((at * count).astype(np.int64), count - 1)
    points = []
    for n in np.unique(bucket):
        above, below = offset[(bucket == n) & upper], offset[(bucket == n) & ~upper]
        if len(above) and len(below):
            points.append(((n + 0.5) / count, (np.quantile(above, 0.1) + np.quantile(below, 0.9)) / 2))
    if not points:
        points = [(0.5, (np.quantile(offset[upper], 0.1) + np.quantile(offset[~upper], 0.9)) / 2)]
    x, y = np.array(points).T
    fit = np.polyfit(x, y, 1 if len(x) > 2 else 0)
    return np.asarray(np.polyval(fit, [0.0, 1.0]))


def _within(
    at: Floats, offset: Floats, side: Floats, beyond: Floats, limit: float, line: Floats, most: float
) -> Floats | None:
    """Corners of the lines within the bounds that `line` is no further beyond than `limit`; None if there is none.

    Of many bounds close to each other in time only the tightest count: the corridor is no narrower for it.
    """
    place = np.minimum((at * _FINE_BUCKETS).astype(np.int64), _FINE_BUCKETS - 1) * 2 + (side > 0)
    tightest = np.full(2 * _FINE_BUCKETS, -np.inf)
    kept = np.flatnonzero(beyond <= limit)
    np.maximum.at(tightest, place[kept], beyond[kept])
    chosen = kept[beyond[kept] == tightest[place[kept]]]
    chosen = chosen[np.argsort(-beyond[chosen], kind="stable")]
    reach = float(np.abs(offset).max() + np.abs(line).max()) + most
    corners: list[tuple[float, float]] = [
        (-reach, -reach - most),
        (reach, reach - most),
        (reach, reach + most),
        (-reach, most - reach),
    ]
    for a, o, s in zip(at[chosen].tolist(), offset[chosen].tolist(), side[chosen].tolist(), strict=True):
        corners = _cut(corners, s * (1 - a), s * a, s * o)
        if not corners:
            return None
    return np.array(corners)


def _cut(corners: list[tuple[float, float]], x: float, y: float, most: float) -> list[tuple[float, float]]:
    """Return the part of a convex polygon where x × first + y × second is at most `most`.

    Source: Sutherland and Hodgman.
    """
    beyond = [x * u + y * v - most for u, v in corners]
    if max(beyond) <= 0:
        return corners
    left = []
    for i, (u, v) in enumerate(corners):
        here, before = beyond[i], beyond[i - 1]
        if (here <= 0) != (before <= 0):
            share = before / (before - here)
            other = corners[i - 1]
            left.append((other[0] + share * (u - other[0]), other[1] + share * (v - other[1])))
        if here <= 0:
            left.append((u, v))
    return left
