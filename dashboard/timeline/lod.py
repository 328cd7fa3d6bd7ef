"""One view of the timeline at the level of detail that its pixels allow: pure functions over sorted arrays.

A row of a lane holds events that do not overlap. Its strips hold the events of one kind each, with the time that they
cover so far, so that what a kind covers of a pixel is two binary searches and a difference, however many events lie
there. Long strips also have that time at regular instants, for views in which many events share a pixel: these read
next to nothing of the events, which may lie on disk. Times are ns since the start of the picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Event",
    "Row",
    "Samples",
    "Strip",
    "event_at",
    "heights",
    "level_sizes",
    "occupancy",
    "sample",
    "sampled",
    "strip",
    "tally",
    "view",
]

Ints = NDArray[np.int64]
Indices = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

_SCANNED = 20_000  # events in view up to which a lane is searched for those that are wide enough to be drawn one by one
_RECTS = 3_000  # rectangles in one view: 13 bytes each
_MOST_RECTS = 3 * _RECTS  # where even wide ones are more: the widest
_WIDTHS = (2, 6, 24)  # px from which an event becomes a rectangle: the least at which the view keeps to _RECTS
_RASTER_BYTES = 312_000  # before packing, which leaves a fifth to a third of them
_RECT_BYTES = 25  # of these, that a rectangle takes the room of
_TICKS = 32  # of a pixel: how exactly rectangles are placed
_SAMPLED_FROM = 4_096  # events of a row
_PER_BIN = 16  # events between two samples, on average
_COARSER = 4  # times: each level of samples, over the one before
_FEWEST_BINS = 1_000  # of a level
_BINS_OF_PIXEL = 4  # at least: so no edge of a pixel moves by more than an eighth of it


@dataclass(frozen=True, slots=True)
class Samples:
    """A strip's covered time up to every multiple of `bin_ns`; each level has every fourth sample of the one before.

    `begun` is the number of events that have started before these instants; without levels where each takes time.
    """

    bin_ns: int
    done: tuple[Ints, ...]
    begun: tuple[Ints, ...]


@dataclass(frozen=True, slots=True)
class Strip:
    """The events of one kind in one row of a lane, in order of time. All strips of a row have samples, or none."""

    kind: int
    start: Ints
    done: Ints  # one longer than start: the time that the first i events cover
    source: Indices  # row of the table that the event comes from
    longest: int
    instants: bool  # some of the events take no time
    samples: Samples | None = None


Row = tuple[Strip, ...]


@dataclass(frozen=True, slots=True)
class Event:
    kind: int
    source: int
    start: int
    end: int


def strip(kind: int, start: Ints, end: Ints, source: NDArray[np.integer]) -> Strip:
    """Events that do not overlap, in order of time, as a strip."""
    done = np.zeros(len(start) + 1, np.int64)
    np.cumsum(end - start, out=done[1:])
    length = np.diff(done)
    return Strip(
        kind,
        np.ascontiguousarray(start),
        done,
        source.astype(np.uint32, copy=False),
        longest=int(length.max(initial=0)),
        instants=bool((length == 0).any()),
    )


def occupancy(row: Row, edges: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the time that each strip covers between neighbouring edges, in ns, and whether it has an event there."""
    covered = np.empty((len(row), len(edges)), np.int64)
    instants = []
    for i, events in enumerate(row):
        covered[i], begun = _covered(events, edges)
        if events.instants:
            instants.append((i, np.diff(begun) > 0))
    ns = np.diff(covered, axis=1)
    present = ns > 0
    for i, there in instants:
        present[i] |= there
    return ns, present


def _covered(events: Strip, edges: Ints) -> tuple[Ints, Ints]:
    """Return the time that the strip covers before each edge, and how many of its events start before it."""
    # "left": an event that starts on an edge belongs to the pixel that follows.
    after = events.start.searchsorted(edges, "left")
    last = after - 1
    inside = edges - events.start.take(last, mode="clip")
    inside += events.done.take(last, mode="clip")
    np.minimum(inside, events.done.take(after), out=inside)
    inside[: int(np.searchsorted(after, 1))] = 0  # before the first event
    return inside, after


def level_sizes(bins: int) -> list[int]:
    """Return how many samples each level has over so many bins."""
    sizes = [bins + 1]
    while bins % _COARSER == 0 and bins // _COARSER >= _FEWEST_BINS:
        bins //= _COARSER
        sizes.append(bins + 1)
    return sizes


def sample(row: Row, end: int) -> tuple[int, int, list[Samples]]:
    """Return the samples of each strip up to `end`, their distance and the number of bins between.

    None of a short row.
    """
    events = sum(len(one.start) for one in row)
    if events < _SAMPLED_FROM:
        return 0, 0, []
    bins = events // _PER_BIN
    coarsest = _COARSER ** max(0, int(np.log2(bins / _FEWEST_BINS) / np.log2(_COARSER)))
    bins = -(-bins // coarsest) * coarsest
    bin_ns = -(-end // bins)
    edges = np.arange(bins + 1, dtype=np.int64) * bin_ns
    levels = range(len(level_sizes(bins)))
    made = []
    for one in row:
        done, begun = _covered(one, edges)
        thin = [done[:: _COARSER**level] for level in levels]
        made.append(Samples(bin_ns, tuple(thin), tuple(begun[:: _COARSER**level] for level in levels if one.instants)))
    return bin_ns, bins, made


def sampled(row: Row, edges: Ints) -> tuple[Ints, NDArray[np.bool_]] | None:
    """As `occupancy`, each edge moved to the nearest sample; None where a pixel has too few of them.

    What is covered is given as the share of the moved pixel times the width of the pixel.
    """
    if not row or row[0].samples is None:
        return None
    known = row[0].samples
    pixel_ns = (int(edges[-1]) - int(edges[0])) // (len(edges) - 1)
    levels = [n for n in range(len(known.done)) if known.bin_ns * _COARSER**n * _BINS_OF_PIXEL <= pixel_ns]
    if not levels:
        return None
    level, apart = levels[-1], known.bin_ns * _COARSER ** levels[-1]
    nearest = (edges + apart // 2) // apart
    at = np.clip(nearest, 0, len(known.done[level]) - 1)
    wider = np.diff(edges) / (np.diff(nearest) * apart)
    ns = np.empty((len(row), len(edges) - 1), np.int64)
    present = np.empty(ns.shape, np.bool_)
    for i, events in enumerate(row):
        assert events.samples is not None
        covered = np.diff(events.samples.done[level].take(at))
        np.greater(covered, 0, out=present[i])
        ns[i] = covered * wider
        if events.instants:
            present[i] |= np.diff(events.samples.begun[level].take(at)) > 0
    return ns, present


def heights(covered: Ints, present: NDArray[np.bool_], pixel_ns: NDArray[np.float64], levels: int) -> Bytes:
    """Return how high each kind stands in each pixel of a lane that is `levels` high: (kinds, pixels).

    A kind that is there has at least 1, so that none is hidden by another; together they are as high as the busy share
    of the lane, but for that, and never higher than it. What rounding takes or gives is the highest kind's. Needs no
    more kinds than levels.
    """
    tall = np.rint(covered * (levels / pixel_ns)).astype(np.int16)
    np.maximum(tall, present, out=tall)
    short = np.rint(covered.sum(0) * (levels / pixel_ns)).astype(np.int16) - tall.sum(0, dtype=np.int16)
    under = np.flatnonzero(short > 0)
    tall[tall[:, under].argmax(0), under] += short[under]
    over = np.flatnonzero(tall.sum(0) > levels)
    while len(over):
        tall[tall[:, over].argmax(0), over] -= 1
        over = over[tall[:, over].sum(0) > levels]
    return tall.astype(np.uint8)


def event_at(row: Row, t: int, slack: int) -> Event | None:
    """Return the event of this row at this time, else the nearest one no further than `slack` ns away."""
    best, best_distance = None, slack + 1
    for events in row:
        i = int(np.searchsorted(events.start, t, "right"))
        for j in (i - 1, i):
            if not 0 <= j < len(events.start):
                continue
            start = int(events.start[j])
            end = start + int(events.done[j + 1] - events.done[j])
            distance = max(start - t, t - end + 1, 0)
            if distance < best_distance:
                best, best_distance = Event(events.kind, int(events.source[j]), start, end), distance
    return best


@dataclass(frozen=True, slots=True)
class _Rects:
    """Events that are drawn one by one, in order of their lanes."""

    lane: Ints
    kind: Ints
    start: Ints
    end: Ints
    source: Indices

    def where(self, keep: NDArray[np.bool_]) -> _Rects:
        return _Rects(self.lane[keep], self.kind[keep], self.start[keep], self.end[keep], self.source[keep])


def view(
    lanes: Sequence[Sequence[Row]],
    t0: int,
    t1: int,
    pixels: int,
    levels: int,
    names: Callable[[int, Indices], Sequence[str]],
    coarser: int = 0,
) -> bytes:
    """Return the view of [t0, t1) of these lanes on `pixels` columns: a JSON header, then typed arrays.

    A lane of several rows is their mean. `names(lane, sources)` names the events that become rectangles: those of a
    single row that are wide enough to be distinct. Each lane with an event that is no rectangle has a raster:
    for each of its kinds one byte per bin, its height. A bin is one pixel, or some where the view would be too large,
    and `coarser` more where it still is. The header says where everything lies: `rects` many of u32 start and u32
    duration in units of `tick` ns from t0, u16 name (in `names`), u16 lane, u8 kind; then per entry of `rasters` (lane,
    kinds, levels) `bins` bytes for each kind. So that they pack well, starts are differences, modulo 2^32, and
    of each array the low bytes of all values come first, then the next ones.
    """
    visible = [[_visible(events, t0, t1) for row in rows for events in row] for rows in lanes]
    counts = np.array([sum(last - first for first, last in spans) for spans in visible], np.int64)
    rects = _wide_enough(lanes, visible, counts, t1 - t0, pixels)
    dense = np.flatnonzero(np.bincount(rects.lane, minlength=len(lanes)) < counts).tolist()
    strips = sum(len({events.kind for row in lanes[i] for events in row}) for i in dense)
    bins = _bins(strips, len(rects.lane), pixels, coarser)
    edges = t0 + (np.arange(bins + 1, dtype=np.int64) * (t1 - t0)) // bins
    rasters, raster_bytes = [], []
    for i in dense:
        kinds, tall, high = _raster(lanes[i], edges, levels, many=bool(counts[i] > _SCANNED))
        rasters.append([i, kinds, high])
        raster_bytes.append(tall.tobytes())
    tick = max(1, (t1 - t0) // (pixels * _TICKS))
    start = (np.maximum(rects.start, t0) - t0) // tick
    end = -(-(np.minimum(rects.end, t1) - t0) // tick)
    lane_starts = np.flatnonzero(np.diff(rects.lane, prepend=-1))
    said = [
        name
        for i, sources in zip(rects.lane[lane_starts], np.split(rects.source, lane_starts[1:]), strict=False)
        for name in names(int(i), sources)
    ]
    table = {name: code for code, name in enumerate(dict.fromkeys(said))}
    header = {
        "t0": t0,
        "t1": t1,
        "bins": bins,
        "tick": tick,
        "rects": len(said),
        "events": int(counts.sum()),
        "names": list(table),
        "rasters": rasters,
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    arrays = (
        np.diff(start, prepend=0).astype("<u4"),
        (end - start).astype("<u4"),
        np.array([table[name] for name in said], "<u2"),
        rects.lane.astype("<u2"),
        rects.kind.astype("u1"),
    )
    planes = (array.view("u1").reshape(len(array), array.itemsize).T.tobytes() for array in arrays)
    return b"".join([len(head).to_bytes(4, "little"), head, *planes, *raster_bytes])


def _bins(strips: int, rects: int, pixels: int, coarser: int) -> int:
    """Return as many as there are pixels, or fewer where lanes with so many kinds would make too large a picture.

    Bins of two or more pixels are too dense to be distinguished anyway.
    """
    room = max(_RASTER_BYTES - _RECT_BYTES * rects, _RASTER_BYTES // 4)
    return -(-pixels // (max(1, -(-strips * pixels // room)) + coarser))


def tally(row: Row, t0: int, t1: int) -> Iterable[tuple[int, Indices, Ints]]:
    """Per strip: kind, the sources of the events in [t0, t1), and how much of each lies inside."""
    for events in row:
        first, last = _visible(events, t0, t1)
        start = events.start[first:last]
        end = start + np.diff(events.done[first : last + 1])
        yield events.kind, events.source[first:last], np.minimum(end, t1) - np.maximum(start, t0)


def _visible(events: Strip, t0: int, t1: int) -> tuple[int, int]:
    """Return the range of events that touch [t0, t1)."""
    first, last = int(events.start.searchsorted(t0)), int(events.start.searchsorted(t1))
    if first and events.start[first - 1] + events.done[first] - events.done[first - 1] > t0:
        first -= 1
    return first, last


def _wide_enough(
    lanes: Sequence[Sequence[Row]], visible: Sequence[Sequence[tuple[int, int]]], counts: Ints, span: int, pixels: int
) -> _Rects:
    """Return the events that become rectangles.

    Of lanes of one row, as narrow ones as there is room for in the view.
    """
    parts = []
    least = max(_WIDTHS[0] * span // pixels, 1)
    for i, rows in enumerate(lanes):
        if len(rows) != 1 or counts[i] > _SCANNED:
            continue
        for events, (first, last) in zip(rows[0], visible[i], strict=True):
            if events.longest < least or first == last:
                continue
            length = np.diff(events.done[first : last + 1])
            keep = np.flatnonzero(length >= least)
            start = events.start[first:last][keep]
            labels = np.full((2, len(keep)), [[i], [events.kind]], np.int64)
            parts.append((labels[0], labels[1], start, start + length[keep], events.source[first:last][keep]))
    if not parts:
        none = np.zeros(0, np.int64)
        return _Rects(none, none, none, none, none.astype(np.uint32))
    rects = _Rects(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    for width in _WIDTHS[1:]:
        if len(rects.lane) <= _RECTS:
            break
        rects = rects.where(rects.end - rects.start >= width * span // pixels)
    if len(rects.lane) > _MOST_RECTS:
        widest = np.zeros(len(rects.lane), np.bool_)
        widest[np.argsort(rects.start - rects.end, kind="stable")[:_MOST_RECTS]] = True
        rects = rects.where(widest)
    return rects


def _raster(rows: Sequence[Row], edges: Ints, levels: int, *, many: bool) -> tuple[list[int], Bytes, int]:
    """Return the kinds that these rows show in view, how high they are in each bin on the mean of rows, and of what.

    At least one level for each kind. Where there are many events samples may do.
    """
    bin_ns = np.maximum(np.diff(edges), 1).astype(np.float64) * len(rows)
    covered: dict[int, Ints] = {}
    present: dict[int, NDArray[np.bool_]] = {}
    for row in rows:
        shown = (sampled(row, edges) if many else None) or occupancy(row, edges)
        for events, ns, there in zip(row, *shown, strict=True):
            if events.kind in covered:
                covered[events.kind] += ns
                present[events.kind] |= there
            else:
                covered[events.kind], present[events.kind] = ns, there
    kinds = sorted(kind for kind, there in present.items() if there.any())
    levels = max(levels, len(kinds))
    if not kinds:
        return [], np.zeros((0, len(bin_ns)), np.uint8), levels
    ns, there = np.stack([covered[kind] for kind in kinds]), np.stack([present[kind] for kind in kinds])
    return kinds, heights(ns, there, bin_ns, levels), levels
