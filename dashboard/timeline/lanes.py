"""A run as lanes: which rows of the timeline are drawn where, under what name and in which colour.

Everything that grows with the events is a flat array of numbers, in memory or in a file (`lane_cache.py`): of the lanes
(`lane.…`), their strips (`strip.…`), the events of the strips one after the other (`event.…`), the strips' samples, and
of each table by row (`phases.start`, …, `phases.is.step`). The rest is one JSON object.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.report.lane_packing import pack_rows
from rankscope.analysis.text.phrases import group_title
from rankscope.analysis.timeline.build import Timeline
from rankscope.dashboard.timeline.drawn_rows import DRAWN, Drawn
from rankscope.dashboard.timeline.groupings import groupings, nodes_of
from rankscope.dashboard.timeline.lod import (
    Indices,
    Ints,
    Row,
    sample,
    strip,
)
from rankscope.dashboard.timeline.scene import Array, Scene, assemble, code_of_unknown

__all__ = ["Arrays", "build_scene", "events_of", "lay_out"]

_STEPS = 20_000
_MOST_ROWS = 16  # of one track; what would need more is counted, not drawn
_NOT_DRAWN = -1
_NO_MIDDLE = -1
_CHUNK = 2_000_000  # rows of a table that are laid out together, or one rank's
_FACTS = (  # what is shown of an event, beside its name and times, where its table has it
    *("step", "group", "seq", "peer", "tag", "dtype", "stream", "device", "thread", "stage", "replica", "microbatch"),
    *("unmatched", "size_bytes", "bytes", "wait_ns", "transfer_ns", "arrival_spread_ns", "instance_id", "is_last"),
)
_OPEN = "open"  # the fact that an event's end was not seen


class Arrays(Protocol):
    """Named arrays while they grow by pieces."""

    def add(self, name: str, piece: Array) -> None: ...

    def whole(self) -> Mapping[str, Array]:
        """All of them; nothing more is added."""
        ...


class _InMemory:
    """`Arrays` in memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Array]] = {}

    def add(self, name: str, piece: Array) -> None:
        self._pieces.setdefault(name, []).append(piece)

    def whole(self) -> dict[str, Array]:
        return {name: np.concatenate(self._pieces.pop(name)) for name in list(self._pieces)}


def events_of(timeline: Timeline) -> int:
    """Return how many rows of the timeline would be drawn."""
    return sum(len(getattr(timeline, name)) for name in DRAWN)


def build_scene(timeline: Timeline) -> Scene:
    """Every phase, region, operation and kernel of the run, in lanes of events that do not overlap."""
    return assemble(*lay_out(timeline, _InMemory()))


def lay_out(timeline: Timeline, arrays: Arrays) -> tuple[dict[str, Any], Mapping[str, Array]]:
    """Return the input of `assemble`: a JSON object and the arrays."""
    frames = {name: frame for name in DRAWN if len(frame := getattr(timeline, name))}
    if "collectives" in frames:
        titles = {name: group_title(name, role) for name, role in timeline.groups.select("name", "role").iter_rows()}
        named = pl.col("group").replace_strict(titles, default=pl.format("group {}", "group"), return_dtype=pl.String)
        frames["collectives"] = frames["collectives"].with_columns(named)
    drawn = {name: DRAWN[name](frame) for name, frame in frames.items()}
    origin, last = _span([frame.select(**drawn[name].times) for name, frame in frames.items()])
    end = max(last - origin, 1)
    making = _Making(arrays, end)
    tracks: dict[int, list[_Track]] = {rank: [] for rank in timeline.ranks["rank"].to_list()}
    names = list(frames)
    tables = [
        _lay_out(name, number, frames[name], drawn[name], (origin, last), making, tracks)
        for number, name in enumerate(names)
    ]
    making.finish()
    kernels = names.index("kernels") if "kernels" in names else None
    head = {
        "origin_ns": origin,
        "end": end,
        "tables": tables,
        "tracks": [
            [rank, [[track.title, track.table, track.lanes, track.hidden] for track in _ordered(tracks[rank], kernels)]]
            for rank in sorted(tracks)
        ],
        "groupings": [
            [one.title, [[title, list(ranks)] for title, ranks in one.groups.items()]] for one in groupings(timeline)
        ],
        "nodes": list(nodes_of(timeline).items()),
        "clocks": [[clock.node, clock.error_ns] for clock in timeline.clocks],
        "steps": _step_starts(timeline.steps, origin),
        "judged": _judged(timeline.steps, origin, end),
    }
    return head, arrays.whole()


def _span(times: Sequence[pl.DataFrame]) -> tuple[int, int]:
    """Return the first start and the last known time, at which events without an end are cut."""
    if not times:
        return 0, 1
    ends = [
        frame.select(pl.col("start_ns").min(), last=pl.max_horizontal("start_ns", "end_ns").max()) for frame in times
    ]
    start, last = pl.concat(ends).select(pl.col("start_ns").min(), pl.col("last").max()).row(0)
    return int(start), int(last)


@dataclass(frozen=True, slots=True)
class _Track:
    """A track while lanes are made; `table` is a number."""

    title: str
    table: int
    lanes: list[int]
    hidden: int
    events: int


class _Making:
    """Puts lanes into the arrays, one after the other."""

    def __init__(self, arrays: Arrays, end: int) -> None:
        self.arrays = arrays
        self._end = end
        self._lanes: list[tuple[int, int, int, int, int]] = []
        self._strips: list[tuple[int, int, int, int, int, int]] = []
        self._events = self._samples = 0
        for name, dtype in (("event.start", "<i8"), ("event.done", "<i8"), ("event.source", "<u4"), ("samples", "<i8")):
            arrays.add(name, np.zeros(0, dtype))

    @property
    def lanes(self) -> int:
        return len(self._lanes)

    def add(self, table: int, rank: int, row: Row) -> None:
        bin_ns, bins, samples = sample(row, self._end)
        self._lanes.append((table, rank, len(self._strips), bin_ns, bins))
        for number, events in enumerate(row):
            self._strips.append(
                (events.kind, self._events, len(events.start), events.longest, events.instants, self._samples)
            )
            self._events += len(events.start)
            self.arrays.add("event.start", events.start)
            self.arrays.add("event.done", events.done)
            self.arrays.add("event.source", events.source)
            for level in (*samples[number].done, *samples[number].begun) if samples else ():
                self.arrays.add("samples", level)
                self._samples += len(level)

    def finish(self) -> None:
        for name, rows, dtypes in (
            ("lane", self._lanes, {"table": "u1", "rank": "<i4", "strip": "<i8", "bin_ns": "<i8", "bins": "<i8"}),
            (
                "strip",
                self._strips,
                {"kind": "u1", "event": "<i8", "events": "<i8", "longest": "<i8", "instants": "u1", "sample": "<i8"},
            ),
        ):
            columns = np.array(rows, np.int64).reshape(-1, len(dtypes)).T
            for (column, dtype), values in zip(dtypes.items(), columns, strict=True):
                self.arrays.add(f"{name}.{column}", values.astype(dtype))


class _Codes:
    """Numbers for texts, in the order in which they come."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def of(self, texts: pl.Series) -> Indices:
        """Return the texts' numbers; null has the code for unknown."""
        texts = texts.cast(pl.String)
        different = texts.drop_nulls().unique().sort()
        mine = [self.texts.setdefault(text, len(self.texts)) for text in different.to_list()]
        codes = np.array([*mine, code_of_unknown(np.dtype(np.uint32))], np.uint32)
        here: Indices = texts.cast(pl.Enum(different)).to_physical().cast(pl.UInt32).fill_null(len(mine)).to_numpy()
        return codes[here]


def _lay_out(
    name: str,
    number: int,
    frame: pl.DataFrame,
    drawn: Drawn,
    span: tuple[int, int],
    making: _Making,
    tracks: dict[int, list[_Track]],
) -> dict[str, Any]:
    """Add this table's lanes and tracks, some whole ranks at a time, and give its part of the JSON object."""
    ranks, first = np.unique(frame["rank"].to_numpy(), return_index=True)
    facts = [fact for fact in _FACTS if fact in frame.columns and frame[fact].null_count() < len(frame)]
    texts = {fact: _Codes() for fact in facts if isinstance(frame.schema[fact], (pl.String, pl.Enum))}
    titles, names = _Codes(), _Codes()
    ends_unseen = frame["end_ns"].null_count() > 0
    for a, z in _chunks(first.tolist(), len(frame)):
        rows = frame[a:z]
        put = rows.select("rank", **drawn.columns)
        piece = _lanes_of(put, span, a, number, titles, making, tracks)
        piece["name"] = names.of(put["name"])
        piece |= {f"is.{fact}": texts[fact].of(rows[fact]) if fact in texts else _numbers(rows[fact]) for fact in facts}
        if ends_unseen:
            piece[f"is.{_OPEN}"] = _numbers(rows["end_ns"].is_null())
        for column, values in piece.items():
            making.arrays.add(f"{name}.{column}", values)
    return {
        "name": name,
        "ranks": ranks.tolist(),
        "first": first.tolist(),
        "names": list(names.texts),
        "facts": [*facts, *([_OPEN] if ends_unseen else [])],
        "texts": {fact: list(codes.texts) for fact, codes in texts.items()},
    }


def _chunks(first: list[int], rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole ranks, of which the n-th starts in row `first[n]`, each with at least `_CHUNK` rows."""
    begun = 0
    for end in [*first[1:], rows]:
        if end - begun >= _CHUNK or end == rows:
            yield begun, end
            begun = end


def _numbers(values: pl.Series) -> Array:
    """Numbers, or 0 and 1, with the type's own code for what is not known."""
    whole = values.cast(pl.UInt8) if values.dtype == pl.Boolean else values
    return whole.fill_null(code_of_unknown(whole.clear().to_numpy().dtype)).to_numpy()


def _lanes_of(
    drawn: pl.DataFrame,
    span: tuple[int, int],
    before: int,
    table: int,
    titles: _Codes,
    making: _Making,
    tracks: dict[int, list[_Track]],
) -> dict[str, Array]:
    """Add the lanes of some ranks, of which the first row is row `before` of its table; start, end, kind, lane."""
    origin, last = span
    start = drawn["start_ns"].to_numpy() - origin
    end = np.maximum(drawn["end_ns"].fill_null(last).to_numpy() - origin, start)
    middle = (drawn["middle_ns"] - origin).fill_null(_NO_MIDDLE).to_numpy()
    kind, then = drawn["kind"].to_numpy(), drawn["then"].to_numpy()
    rank, track = drawn["rank"].to_numpy(), titles.of(drawn["track"])
    title = list(titles.texts)
    lane = np.full(len(drawn), _NOT_DRAWN, np.int32)
    for mine in _of_tracks(rank, track, start, end):
        row = pack_rows(start[mine], end[mine], _MOST_ROWS)
        owner = int(rank[mine[0]])
        numbers = []
        events = 0
        for depth in range(min(int(row.max()) + 1, _MOST_ROWS)):
            here = mine[row == depth]
            numbers.append(making.lanes)
            lane[here] = making.lanes
            a, z, turn = start[here], end[here], middle[here]
            split = turn != _NO_MIDDLE
            turn = np.where(split, np.clip(turn, a, z), z)
            begins = ~split | (turn > a)
            rest = split & ((turn < z) | (turn == a))  # without a duration it is drawn all the same
            pieces = _strips(
                np.concatenate([a[begins], turn[rest]]),
                np.concatenate([turn[begins], z[rest]]),
                np.concatenate([kind[here][begins], then[here][rest]]),
                np.concatenate([here[begins], here[rest]]) + before,
            )
            making.add(table, owner, pieces)
            events += sum(len(one.start) for one in pieces)
        hidden = int((row == _MOST_ROWS).sum())
        tracks.setdefault(owner, []).append(_Track(title[track[mine[0]]], table, numbers, hidden, events))
    return {"start": start, "end": end, "kind": kind, "lane": lane}


def _of_tracks(rank: NDArray[np.int32], track: Indices, start: Ints, end: Ints) -> Iterator[NDArray[np.intp]]:
    """Yield the rows of each track of each rank, by start, longer ones first.

    Frames are in order of rank, then time.
    """
    bounds = [0, *(np.flatnonzero(np.diff(rank)) + 1).tolist(), len(rank)]
    for first, last in itertools.pairwise(bounds):
        here = slice(first, last)
        in_order = first + np.lexsort((-end[here], start[here], track[here]))
        yield from np.split(in_order, np.flatnonzero(np.diff(track[in_order])) + 1)


def _ordered(tracks: list[_Track], kernels: int | None) -> list[_Track]:
    """Streams with the most events first; the rest as the tables come, by title."""

    def key(track: _Track) -> tuple[int, int, int, str]:
        return (track.table, -track.events if track.table == kernels else 0, len(track.title), track.title)

    return sorted(tracks, key=key)


def _strips(start: Ints, end: Ints, kind: NDArray[np.uint8], source: NDArray[np.intp]) -> Row:
    """One strip per kind. The pieces of an event come from two lists, each in order: sorting by start merges them."""
    row = []
    for code in np.unique(kind):
        of_kind = np.flatnonzero(kind == code)
        if (np.diff(start[of_kind]) < 0).any():
            of_kind = of_kind[np.argsort(start[of_kind], kind="stable")]
        row.append(strip(int(code), start[of_kind], end[of_kind], source[of_kind]))
    return tuple(row)


def _step_starts(steps: pl.DataFrame, origin: int) -> tuple[list[int], list[int]]:
    first = steps.filter(pl.col("rank") == pl.col("rank").min()).head(_STEPS)
    return first["step"].to_list(), (first["start_ns"] - origin).to_list()


def _judged(steps: pl.DataFrame, origin: int, end: int) -> tuple[int, int]:
    judged = steps.filter(pl.col("judged"))
    if judged.is_empty():
        return 0, end
    start, stop = judged.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    return max(start - origin, 0), min(stop - origin, end)
