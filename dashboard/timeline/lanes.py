"""A run as lanes: which rows of the timeline are drawn where, under what name and in which colour.

Everything that grows with the events is a flat array of numbers, in memory or in a file (`stored.py`): of the lanes
(`lane.…`), their strips (`strip.…`), the events of the strips one after the other (`event.…`), the strips' samples, and
of each table by row (`phases.start`, …, `phases.is.step`). The rest is one JSON object.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.report.lane_packing import pack_rows
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.matching import members_of
from rankscope.dashboard.timeline.lod import (
    Indices,
    Ints,
    Row,
    Samples,
    Strip,
    level_sizes,
    sample,
    strip,
)

__all__ = [
    "KINDS",
    "Arrays",
    "Grouping",
    "Kind",
    "Lane",
    "Lanes",
    "Scene",
    "Table",
    "Track",
    "assemble",
    "build_scene",
    "events_of",
    "groupings",
    "lay_out",
]

Array = NDArray[Any]

_STEPS = 20_000
_MOST_ROWS = 16  # of one track; what would need more is counted, not drawn
_NOT_DRAWN = -1
_NO_MIDDLE = -1
_CHUNK = 2_000_000  # rows of a table that are laid out together, or one rank's
_FACTS = (  # what is told of an event, beside its name and times, where its table has it
    *("step", "group", "seq", "peer", "tag", "dtype", "stream", "device", "thread", "stage", "replica", "microbatch"),
    *("unmatched", "size_bytes", "wait_ns", "transfer_ns", "arrival_spread_ns", "instance_id", "is_last"),
)
_OPEN = "open"  # the fact that an event's end was not seen


@dataclass(frozen=True, slots=True)
class Kind:
    """What an event is: its place in KINDS is its code."""

    key: str
    label: str
    colour: str  # in the palette


KINDS = (
    *(Kind(part, part_label(part), part) for part in PART_ORDER),
    Kind("forward", "forward", "compute"),
    Kind("backward", "backward", "backward"),
    Kind("user", "named region", "region"),
    Kind("sync", "synchronise", "other"),
    Kind("operator", "operator", "column"),
    Kind("blocked", "blocked on communication", "unsplit"),
    Kind("communication", "communication on the device", "unsplit"),
)
_CODE = {kind.key: code for code, kind in enumerate(KINDS)}


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


@dataclass(frozen=True, slots=True)
class Table:
    """One frame of the timeline, ready to be looked up by row; rows are in order of rank."""

    ranks: Ints
    first: Ints  # row of each of these ranks
    start: Ints
    end: Ints
    kind: NDArray[np.uint8]
    name: Indices  # position in names
    names: Sequence[str]
    lane: NDArray[np.int32]  # of each row; -1: not drawn
    facts: Mapping[str, Array]  # codes of texts, or numbers; what is not known has the type's own code for it
    texts: Mapping[str, Sequence[str]]  # of the facts that are texts

    def rank(self, row: int) -> int:
        return int(self.ranks[np.searchsorted(self.first, row, "right") - 1])

    def rows_of(self, rank: int) -> slice:
        at = int(np.searchsorted(self.ranks, rank))
        if at == len(self.ranks) or self.ranks[at] != rank:
            return slice(0, 0)
        last = self.first[at + 1] if at + 1 < len(self.first) else len(self.start)
        return slice(int(self.first[at]), int(last))

    def fact(self, name: str, row: int) -> int | str | None:
        """None: not known, or this table does not have it."""
        values = self.facts.get(name)
        if values is None or values[row] == _unknown(values.dtype):
            return None
        value = int(values[row])
        return self.texts[name][value] if name in self.texts else value

    def known(self, name: str, rows: slice) -> NDArray[np.bool_]:
        values = self.facts[name][rows]
        known: NDArray[np.bool_] = values != _unknown(values.dtype)
        return known


def _unknown(dtype: np.dtype[Any]) -> int:
    """The code of what is not known: the least of signed numbers, the largest of others."""
    limits = np.iinfo(dtype)
    return int(limits.min if limits.min < 0 else limits.max)


@dataclass(frozen=True, slots=True)
class Lane:
    table: str
    rank: int
    row: Row


class Lanes:
    """The lanes by number. Each is put together from the arrays when it is first asked for."""

    def __init__(self, tables: Sequence[str], arrays: Mapping[str, Array]) -> None:
        self._tables = tables
        self._arrays = arrays
        self._made: dict[int, Lane] = {}

    def __len__(self) -> int:
        return len(self._arrays["lane.rank"])

    def __iter__(self) -> Iterator[Lane]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Lane:
        if number not in self._made:
            self._made[number] = self._make(number)
        return self._made[number]

    def kinds(self) -> list[int]:
        """All that are drawn somewhere."""
        return [int(kind) for kind in np.unique(self._arrays["strip.kind"])]

    def _make(self, number: int) -> Lane:
        of = self._arrays
        first = int(of["lane.strip"][number])
        end = int(of["lane.strip"][number + 1]) if number + 1 < len(self) else len(of["strip.kind"])
        row = tuple(
            self._strip(one, int(of["lane.bin_ns"][number]), int(of["lane.bins"][number])) for one in range(first, end)
        )
        return Lane(self._tables[of["lane.table"][number]], int(of["lane.rank"][number]), row)

    def _strip(self, number: int, bin_ns: int, bins: int) -> Strip:
        of = self._arrays
        a, z = int(of["strip.event"][number]), int(of["strip.event"][number]) + int(of["strip.events"][number])
        instants = bool(of["strip.instants"][number])
        return Strip(
            int(of["strip.kind"][number]),
            of["event.start"][a:z],
            of["event.done"][a + number : z + number + 1],  # each strip before this one has one more than events
            of["event.source"][a:z],
            longest=int(of["strip.longest"][number]),
            instants=instants,
            samples=_samples(of["samples"], int(of["strip.sample"][number]), bin_ns, bins, instants) if bins else None,
        )


def _samples(values: Ints, at: int, bin_ns: int, bins: int, instants: bool) -> Samples:
    bounds = list(itertools.accumulate(level_sizes(bins) * (1 + instants), initial=at))
    levels = tuple(values[a:z] for a, z in itertools.pairwise(bounds))
    half = len(level_sizes(bins))
    return Samples(bin_ns, levels[:half], levels[half:])


@dataclass(frozen=True, slots=True)
class Track:
    """The lanes of one thread, group or stream of a rank; `hidden` of its events lie too deep to be drawn."""

    title: str
    table: str
    lanes: Sequence[int]
    hidden: int


@dataclass(frozen=True, slots=True)
class Grouping:
    """One way to put ranks together: title of each group and its ranks."""

    title: str
    groups: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Scene:
    """All times are ns since `origin_ns`, which is on the run's clock."""

    origin_ns: int
    end: int
    tables: Mapping[str, Table]
    lanes: Lanes
    tracks: Mapping[int, Sequence[Track]]  # by rank; the first one stands for the rank where only one has room
    groupings: Sequence[Grouping]
    nodes: Mapping[int, int]  # of each rank
    clocks: Mapping[int, int | None]  # error of each node's clock, ns
    steps: tuple[Sequence[int], Sequence[int]]  # number and start of each, on the first rank
    judged: tuple[int, int]  # from the first step that is judged to the last; the whole run if there is none


def events_of(timeline: Timeline) -> int:
    """How many rows of the timeline would be drawn."""
    return sum(len(getattr(timeline, name)) for name in _DRAWN)


def build_scene(timeline: Timeline) -> Scene:
    """Every phase, region, operation and kernel of the run, in lanes of events that do not overlap."""
    return assemble(*lay_out(timeline, _InMemory()))


def lay_out(timeline: Timeline, arrays: Arrays) -> tuple[dict[str, Any], Mapping[str, Array]]:
    """What `assemble` makes a scene of: a JSON object and the arrays."""
    frames = {name: frame for name in _DRAWN if len(frame := getattr(timeline, name))}
    drawn = {name: _DRAWN[name](frame) for name, frame in frames.items()}
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
        "nodes": list(_nodes(timeline).items()),
        "clocks": [[clock.node, clock.error_ns] for clock in timeline.clocks],
        "steps": _step_starts(timeline.steps, origin),
        "judged": _judged(timeline.steps, origin, end),
    }
    return head, arrays.whole()


def assemble(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Scene:
    """The scene of what `lay_out` gave."""
    names = [table["name"] for table in head["tables"]]
    steps, judged = head["steps"], head["judged"]
    return Scene(
        origin_ns=head["origin_ns"],
        end=head["end"],
        tables={table["name"]: _table(table, arrays) for table in head["tables"]},
        lanes=Lanes(names, arrays),
        tracks={
            rank: [Track(title, names[table], lanes, hidden) for title, table, lanes, hidden in of_rank]
            for rank, of_rank in head["tracks"]
        },
        groupings=[Grouping(title, dict(groups)) for title, groups in head["groupings"]],
        nodes=dict(head["nodes"]),
        clocks=dict(head["clocks"]),
        steps=(steps[0], steps[1]),
        judged=(judged[0], judged[1]),
    )


def _table(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Table:
    name = head["name"]
    columns = {column: arrays[f"{name}.{column}"] for column in ("start", "end", "kind", "name", "lane")}
    return Table(
        ranks=np.array(head["ranks"], np.int64),
        first=np.array(head["first"], np.int64),
        **columns,
        names=head["names"],
        facts={fact: arrays[f"{name}.is.{fact}"] for fact in head["facts"]},
        texts=head["texts"],
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What is drawn of a frame, row by row. An event is `kind` up to its middle and `then` from there on."""

    track: pl.Expr
    kind: pl.Expr
    name: pl.Expr
    start: pl.Expr | None = None
    end: pl.Expr | None = None
    middle: pl.Expr | None = None
    then: pl.Expr | None = None

    @property
    def times(self) -> dict[str, pl.Expr]:
        start = pl.col("start_ns") if self.start is None else self.start
        return {"start_ns": start, "end_ns": pl.col("end_ns") if self.end is None else self.end}

    @property
    def columns(self) -> dict[str, pl.Expr]:
        return self.times | {
            "track": self.track,
            "middle_ns": pl.lit(None, pl.Int64) if self.middle is None else self.middle,
            "kind": self.kind.cast(pl.UInt8),
            "then": (pl.lit(0) if self.then is None else self.then).cast(pl.UInt8),
            "name": self.name.replace("unknown", "communication").fill_null("?"),
        }


def _phases(_: pl.DataFrame) -> _Drawn:
    name = pl.when(pl.col("label") == "").then("part").otherwise(pl.coalesce("label", "part"))
    return _Drawn(track=pl.lit("main thread"), kind=_code(pl.col("part")), name=name)


def _regions(_: pl.DataFrame) -> _Drawn:
    kind = pl.col("kind").replace("wait", "blocked")
    track = pl.when(pl.col("thread") == 0).then(pl.lit("regions")).otherwise(pl.format("thread {}", "thread"))
    return _Drawn(track=track, kind=_code(kind), name=pl.coalesce("name", "kind"))


def _collectives(_: pl.DataFrame) -> _Drawn:
    """Waiting and transfer of an operation apart, where they are known, and when; where only how long, its call."""
    start = pl.coalesce("device_start_ns", "start_ns")
    known = pl.col("wait_ns").is_not_null() & pl.col("end_ns").is_not_null()
    called = pl.col("transfer_ns").is_not_null()
    return _Drawn(
        track=pl.format("group {}", pl.coalesce("group", pl.lit("unknown"))),
        start=start,
        end=pl.coalesce("end_ns", pl.when(called).then("issued_ns")),
        middle=pl.when(known).then(pl.min_horizontal(start + pl.col("wait_ns"), "end_ns")),
        kind=pl.when(known).then(_CODE["wait"]).otherwise(_CODE["unsplit"]),
        then=pl.lit(_CODE["transfer"]),
        name=pl.col("op"),
    )


def _kernels(kernels: pl.DataFrame) -> _Drawn:
    many = kernels.group_by("rank").agg(pl.col("device").n_unique())["device"].max() if len(kernels) else 1
    stream = pl.format("stream {}", pl.col("stream").cast(pl.String).fill_null("?"))
    track = pl.format("device {} {}", "device", stream) if isinstance(many, int) and many > 1 else stream
    return _Drawn(track=track, kind=_code(pl.col("work")), name=pl.col("name"))


def _ops(_: pl.DataFrame) -> _Drawn:
    name = pl.col("name")
    kind = (
        pl.when(name.str.contains("forward-compute"))
        .then(_CODE["forward"])
        .when(name.str.contains("backward-compute"))
        .then(_CODE["backward"])
        .when(name.str.contains("optimizer"))
        .then(_CODE["optimizer"])
        .otherwise(_CODE["unsplit"])
    )
    return _Drawn(track=pl.lit("operations"), kind=kind, name=name)


_DRAWN: dict[str, Callable[[pl.DataFrame], _Drawn]] = {
    "phases": _phases,
    "ops": _ops,
    "kernels": _kernels,
    "collectives": _collectives,
    "regions": _regions,
}


def _code(key: pl.Expr) -> pl.Expr:
    return key.replace_strict(_CODE, default=_CODE["other"], return_dtype=pl.UInt8)


def _span(times: Sequence[pl.DataFrame]) -> tuple[int, int]:
    """From the first start to the last thing that is known, which is where what has no end is cut."""
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
        """What is null has the code for what is not known."""
        different = texts.drop_nulls().unique().sort()
        mine = [self.texts.setdefault(text, len(self.texts)) for text in different.to_list()]
        codes = np.array([*mine, _unknown(np.dtype(np.uint32))], np.uint32)
        here: Indices = texts.cast(pl.Enum(different)).to_physical().cast(pl.UInt32).fill_null(len(mine)).to_numpy()
        return codes[here]


def _lay_out(
    name: str,
    number: int,
    frame: pl.DataFrame,
    drawn: _Drawn,
    span: tuple[int, int],
    making: _Making,
    tracks: dict[int, list[_Track]],
) -> dict[str, Any]:
    """Adds this table's lanes and tracks, some whole ranks at a time, and gives its part of the JSON object."""
    ranks, first = np.unique(frame["rank"].to_numpy(), return_index=True)
    facts = [fact for fact in _FACTS if fact in frame.columns and frame[fact].null_count() < len(frame)]
    texts = {fact: _Codes() for fact in facts if frame.schema[fact] == pl.String}
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
    return whole.fill_null(_unknown(whole.clear().to_numpy().dtype)).to_numpy()


def _lanes_of(
    drawn: pl.DataFrame,
    span: tuple[int, int],
    before: int,
    table: int,
    titles: _Codes,
    making: _Making,
    tracks: dict[int, list[_Track]],
) -> dict[str, Array]:
    """Adds the lanes of some ranks, of which the first row is row `before` of its table; start, end, kind, lane."""
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
    """The rows of each track of each rank, by start, longer ones first. Frames are in order of rank, then time."""
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


def groupings(timeline: Timeline) -> list[Grouping]:
    """By node, by pipeline stage, by the process groups that share a role; only where that parts the ranks."""
    nodes = _nodes(timeline)
    ranks = sorted(nodes)
    hosts = dict(timeline.ranks.select("node", "hostname").unique("node").iter_rows())
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        node = nodes.get(rank, 0)
        title = f"node {node}" + (f"  {hosts[node]}" if hosts.get(node) else "")
        by_node.setdefault(title, []).append(rank)
    found = [Grouping("node", by_node)]
    stages = _stages(timeline)
    if len(set(stages.values())) > 1:
        by_stage: dict[str, list[int]] = {}
        for rank in sorted(ranks, key=lambda r: (stages.get(r, -1), r)):
            by_stage.setdefault(f"stage {stages[rank]}" if rank in stages else "no stage", []).append(rank)
        found.append(Grouping("pipeline stage", by_stage))
    families: dict[str, dict[str, list[int]]] = {}
    for name, role, members in timeline.groups.select("name", "role", "members").unique("members").iter_rows():
        mine = members_of(members)
        if 1 < len(mine) < len(ranks):
            family = role or f"groups of {len(mine)}"
            families.setdefault(family, {})[f"{role or 'group'} {name}"] = mine
    for family, groups in sorted(families.items()):
        inside = [rank for mine in groups.values() for rank in mine]
        if len(inside) == len(set(inside)) and len(groups) > 1:
            rest = sorted(set(ranks) - set(inside))
            ordered = dict(sorted(groups.items(), key=lambda item: item[1]))
            found.append(Grouping(family, ordered | ({"in none of them": rest} if rest else {})))
    return found


def _step_starts(steps: pl.DataFrame, origin: int) -> tuple[list[int], list[int]]:
    first = steps.filter(pl.col("rank") == pl.col("rank").min()).head(_STEPS)
    return first["step"].to_list(), (first["start_ns"] - origin).to_list()


def _judged(steps: pl.DataFrame, origin: int, end: int) -> tuple[int, int]:
    judged = steps.filter(pl.col("judged"))
    if judged.is_empty():
        return 0, end
    start, stop = judged.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    return max(start - origin, 0), min(stop - origin, end)


def _nodes(timeline: Timeline) -> dict[int, int]:
    """The node of each rank."""
    return dict(timeline.ranks.select("rank", pl.col("node").fill_null(0)).iter_rows())


def _stages(timeline: Timeline) -> dict[int, int]:
    """The pipeline stage of each rank that has exactly one."""
    seen = (
        pl.concat([frame.select("rank", "stage") for frame in (timeline.ops, timeline.regions)]).drop_nulls().unique()
    )
    return dict(seen.filter(pl.len().over("rank") == 1).iter_rows())
