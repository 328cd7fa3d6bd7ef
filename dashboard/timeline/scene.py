"""A run as lanes, to be looked up: tables by row, tracks by rank, strips of events; and how it is read from arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.model.parts import PART_ORDER, part_name
from rankscope.analysis.text.message import text, translated
from rankscope.dashboard.timeline.lod import (
    Indices,
    Ints,
    Row,
    Samples,
    Strip,
    level_sizes,
)

__all__ = [
    "CODE",
    "KINDS",
    "Array",
    "Grouping",
    "Kind",
    "Lane",
    "Lanes",
    "Scene",
    "Table",
    "Track",
    "assemble",
    "code_of_unknown",
    "spoken_title",
]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of event: its place in KINDS is its code."""

    key: str
    label: str
    colour: str  # in the palette


KINDS = (
    *(Kind(part, part_name(part), part) for part in PART_ORDER),
    Kind("forward", text("forward"), "compute"),
    Kind("backward", text("backward"), "backward"),
    Kind("user", text("named region"), "region"),
    Kind("sync", text("synchronise"), "other"),
    Kind("operator", text("operator"), "column"),
    Kind("blocked", text("blocked on communication"), "unsplit"),
    Kind("communication", text("communication on the device"), "unsplit"),
)


_TITLES = (  # of tracks and groups of ranks
    *(text("main thread"), text("regions"), text("operations"), text("unknown group"), text("no stage")),
    *(text("in none of them"), text("node"), text("pipeline stage")),
)


_FIRST_WORDS = (text("thread"), text("stream"), text("device"), text("stage"), text("node"), text("group"))


CODE = {kind.key: code for code, kind in enumerate(KINDS)}


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
        if values is None or values[row] == code_of_unknown(values.dtype):
            return None
        value = int(values[row])
        return self.texts[name][value] if name in self.texts else value

    def known(self, name: str, rows: slice) -> NDArray[np.bool_]:
        values = self.facts[name][rows]
        known: NDArray[np.bool_] = values != code_of_unknown(values.dtype)
        return known


def code_of_unknown(dtype: np.dtype[Any]) -> int:
    """Return the code of what is not known: the least of signed numbers, the largest of others."""
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
        """All kinds that are drawn."""
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


def spoken_title(title: str) -> str:
    """Return a track's or group's title in the language that is spoken, for a stored lane's title, which is a str."""
    word, _, rest = title.partition(" ")
    if title in _TITLES:
        return translated(title)
    return f"{translated(word)} {rest}" if word in _FIRST_WORDS else title


def assemble(head: Mapping[str, Any], arrays: Mapping[str, Array]) -> Scene:
    """Return the scene of what `lay_out` gave."""
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
