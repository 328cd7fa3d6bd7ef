"""What one view of the timeline shows, at the level of detail that its pixels allow: pure functions over sorted arrays.

A row of a lane holds events that do not overlap. Its strips hold the events of one kind each, with the time that they
cover so far, so that what a kind covers of a pixel is two binary searches and a difference, however many events lie
there. Times are ns since the start of the picture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Event", "Row", "Strip", "event_at", "heights", "occupancy", "pack_rows", "strip", "tally", "view"]

Ints = NDArray[np.int64]
Indices = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

_SCANNED = 20_000  # events in view up to which a lane is searched for those that are wide enough to be drawn one by one
_RECTS = 4_000  # rectangles in one view: 13 bytes each
_WIDTHS = (2, 6, 24)  # px from which an event becomes a rectangle: the least at which the view keeps to _RECTS
_TICKS = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Strip:
    """The events of one kind in one row of a lane, in order of time."""

    kind: int
    start: Ints
    done: Ints  # one longer than start: the time that the first i events cover
    source: Indices  # row of the table that the event comes from

    @property
    def end(self) -> Ints:
        return self.start + np.diff(self.done)


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
    return Strip(kind, start, done, source.astype(np.uint32, copy=False))


def pack_rows(start: Ints, end: Ints, most: int) -> NDArray[np.intp]:
    """For each event the first row in which nothing before it is still there; nested events lie below their parents.

    Events are ordered by start, longer ones first. Those that find no room in the first `most` rows have row `most`.
    """
    row = np.zeros(len(start), np.intp)
    left = np.arange(len(start))
    for _ in range(most):
        if not len(left):
            break
        kept = _chain(start[left], end[left])
        left = left[~kept]
        row[left] += 1
    return row


def _chain(start: Ints, end: Ints) -> NDArray[np.bool_]:
    """The first event, the first one after its end, and so on."""
    if (start[1:] >= end[:-1]).all():
        return np.ones(len(start), np.bool_)
    beyond = len(start)
    jump = np.append(np.searchsorted(start, np.maximum(end, start), "left"), beyond)
    # Of events without a duration each would find itself: what starts and ends at once is followed by its neighbour.
    jump[:-1] = np.maximum(jump[:-1], np.arange(1, beyond + 1))
    reached = np.zeros(beyond + 1, np.bool_)
    reached[0] = True
    # Jumps of 1, 2, 4, … events: after each the chain is known twice as far.
    while jump[0] < beyond:
        reached[jump[reached]] = True
        jump = jump[jump]
    reached[jump[reached]] = True
    return reached[:-1]


def occupancy(row: Row, edges: Ints) -> tuple[Ints, Ints]:
    """What each strip covers between neighbouring edges, in ns, and how many of its events start there."""
    covered = np.zeros((len(row), len(edges)), np.int64)
    begun = np.zeros((len(row), len(edges)), np.int64)
    for i, events in enumerate(row):
        # "left": an event that starts on an edge belongs to the pixel that follows.
        after = np.searchsorted(events.start, edges, "left")
        begun[i] = after
        last = np.maximum(after - 1, 0)
        length = events.done[last + 1] - events.done[last]
        inside = np.minimum(edges - events.start[last], length)
        covered[i] = np.where(after > 0, events.done[last] + inside, 0)
    return np.diff(covered, axis=1), np.diff(begun, axis=1)


def heights(covered: Ints, present: NDArray[np.bool_], pixel_ns: NDArray[np.float64], levels: int) -> Bytes:
    """How high each kind stands in each pixel of a lane that is `levels` high: (kinds, pixels).

    A kind that is there has at least 1, so that none is hidden by another, and together they are no higher than the
    lane: where rounding up would make them so, the highest give way. Needs no more kinds than levels.
    """
    tall = np.rint(covered * (levels / pixel_ns)).astype(np.int16)
    np.maximum(tall, present, out=tall)
    over = np.flatnonzero(tall.sum(0) > levels)
    while len(over):
        tall[tall[:, over].argmax(0), over] -= 1
        over = over[tall[:, over].sum(0) > levels]
    return tall.astype(np.uint8)


def event_at(row: Row, t: int, slack: int) -> Event | None:
    """The event of this row at this time, else the nearest one no further than `slack` ns away."""
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
class _Wide:
    """Events of one strip that are drawn as rectangles of their own."""

    kind: int
    start: Ints
    end: Ints
    source: Indices


def view(
    lanes: Sequence[Sequence[Row]],
    t0: int,
    t1: int,
    pixels: int,
    levels: int,
    names: Callable[[int, Indices], Sequence[str]],
) -> bytes:
    """What [t0, t1) of these lanes looks like on `pixels` columns: a JSON header, then typed arrays.

    A lane of several rows is their mean. `names(lane, sources)` names the events that become rectangles: those of a
    single row that are wide enough to be told apart. Each lane with an event that is no rectangle has a raster:
    for each of its kinds one byte per pixel, its height. The header says where everything lies:
    `rects` many of u32 start and u32 duration in units of `tick` ns from t0, u16 name (in `names`), u16 lane, u8 kind;
    then per entry of `rasters` (lane, kinds, levels) `pixels` bytes for each kind.
    """
    edges = t0 + (np.arange(pixels + 1, dtype=np.int64) * (t1 - t0)) // pixels
    widest = np.diff(edges)
    pixel_ns = np.maximum(widest, 1).astype(np.float64)
    visible = [[_visible(events, t0, t1) for row in rows for events in row] for rows in lanes]
    counts = [sum(last - first for first, last in spans) for spans in visible]
    single = [len(rows) == 1 and count <= _SCANNED for rows, count in zip(lanes, counts, strict=True)]
    for width in _WIDTHS:
        least = width * (t1 - t0) // pixels
        wide = [
            _wide(rows[0], spans, least) if one else [] for rows, spans, one in zip(lanes, visible, single, strict=True)
        ]
        drawn = [sum(len(w.start) for w in of_lane) for of_lane in wide]
        if sum(drawn) <= _RECTS:
            break
    rasters, raster_bytes = [], []
    for i, rows in enumerate(lanes):
        if drawn[i] == counts[i]:
            continue
        kinds, tall, high = _raster(rows, edges, pixel_ns, levels)
        if kinds:
            rasters.append([i, kinds, high])
            raster_bytes.append(tall.tobytes())
    tick = -(-(t1 - t0) // _TICKS)
    parts = [(i, w) for i, of_lane in enumerate(wide) for w in of_lane]
    start = _joined([np.maximum(w.start, t0) - t0 for _, w in parts]) // tick
    end = -(-(_joined([np.minimum(w.end, t1) - t0 for _, w in parts])) // tick)
    said = [name for i, w in parts for name in names(i, w.source)]
    table = {name: code for code, name in enumerate(dict.fromkeys(said))}
    arrays = (
        start.astype("<u4"),
        (end - start).astype("<u4"),
        np.array([table[name] for name in said], "<u2"),
        np.repeat(np.array([i for i, _ in parts], "<u2"), [len(w.start) for _, w in parts]).astype("<u2"),
        np.repeat(np.array([w.kind for _, w in parts], "u1"), [len(w.start) for _, w in parts]).astype("u1"),
    )
    header = {
        "t0": t0,
        "t1": t1,
        "pixels": pixels,
        "tick": tick,
        "rects": len(said),
        "events": sum(counts),
        "names": list(table),
        "rasters": rasters,
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)  # typed arrays of 4 bytes start at a multiple of 4
    body = b"".join(a.tobytes() for a in arrays)
    return len(head).to_bytes(4, "little") + head + body + b"".join(raster_bytes)


def tally(row: Row, t0: int, t1: int) -> Iterable[tuple[int, Indices, Ints]]:
    """Per strip: kind, the sources of the events in [t0, t1), and how much of each lies inside."""
    for events in row:
        first, last = _visible(events, t0, t1)
        start = events.start[first:last]
        end = start + np.diff(events.done[first : last + 1])
        yield events.kind, events.source[first:last], np.minimum(end, t1) - np.maximum(start, t0)


def _visible(events: Strip, t0: int, t1: int) -> tuple[int, int]:
    """The range of events that touch [t0, t1)."""
    first, last = (int(i) for i in np.searchsorted(events.start, (t0, t1), "left"))
    if first and events.start[first - 1] + events.done[first] - events.done[first - 1] > t0:
        first -= 1
    return first, last


def _wide(row: Row, spans: Sequence[tuple[int, int]], least: int) -> list[_Wide]:
    found = []
    for events, (first, last) in zip(row, spans, strict=True):
        length = np.diff(events.done[first : last + 1])
        keep = np.flatnonzero(length >= max(least, 1))
        if len(keep):
            start = events.start[first:last][keep]
            found.append(_Wide(events.kind, start, start + length[keep], events.source[first:last][keep]))
    return found


def _raster(
    rows: Sequence[Row], edges: Ints, pixel_ns: NDArray[np.float64], levels: int
) -> tuple[list[int], Bytes, int]:
    """The kinds that these rows show in view, how high they stand in each pixel on the mean of the rows, and of what
    height: at least one level for each kind."""
    covered: dict[int, Ints] = {}
    begun: dict[int, Ints] = {}
    for row in rows:
        for events, ns, count in zip(row, *occupancy(row, edges), strict=True):
            covered[events.kind] = covered.get(events.kind, 0) + ns
            begun[events.kind] = begun.get(events.kind, 0) + count
    kinds = sorted(kind for kind in covered if covered[kind].any() or begun[kind].any())
    if not kinds:
        return [], np.zeros((0, len(pixel_ns)), np.uint8), levels
    ns = np.stack([covered[kind] for kind in kinds])
    present = (ns > 0) | (np.stack([begun[kind] for kind in kinds]) > 0)
    levels = max(levels, len(kinds))
    return kinds, heights(ns, present, pixel_ns * len(rows), levels), levels


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
