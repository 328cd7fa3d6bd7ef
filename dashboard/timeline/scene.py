"""A run as lanes: which rows of the timeline are drawn where, under what name and in which colour."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.report.texts import PART_ORDER, part_label
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.matching import members_of
from rankscope.dashboard.timeline.lod import Indices, Ints, Row, pack_rows, strip

__all__ = ["KINDS", "Grouping", "Kind", "Lane", "Scene", "Table", "Track", "build_scene", "groupings"]

_STEPS = 20_000
_MOST_ROWS = 16  # of one track; what would need more is counted, not drawn
_NOT_DRAWN = -1
_NO_MIDDLE = -1


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


@dataclass(frozen=True, slots=True)
class Table:
    """One frame of the timeline, ready to be looked up by row."""

    frame: pl.DataFrame
    start: Ints
    end: Ints
    kind: NDArray[np.uint8]
    name: Indices  # position in names
    names: Sequence[str]
    lane: NDArray[np.int32]  # of each row; -1: not drawn


@dataclass(frozen=True, slots=True)
class Lane:
    table: str
    rank: int
    row: Row


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
    lanes: Sequence[Lane]
    tracks: Mapping[int, Sequence[Track]]  # by rank; the first one stands for the rank where only one has room
    groupings: Sequence[Grouping]
    nodes: Mapping[int, int]  # of each rank
    clocks: Mapping[int, int | None]  # error of each node's clock, ns
    steps: tuple[Sequence[int], Sequence[int]]  # number and start of each, on the first rank
    judged: tuple[int, int]  # from the first step that is judged to the last; the whole run if there is none


def build_scene(timeline: Timeline) -> Scene:
    """Every phase, region, operation and kernel of the run, in lanes of events that do not overlap."""
    frames = {name: getattr(timeline, name) for name in _DRAWN}
    drawn = {name: _DRAWN[name](frame) for name, frame in frames.items() if len(frame)}
    origin, last = _span(drawn.values())
    lanes: list[Lane] = []
    tables: dict[str, Table] = {}
    tracks: dict[int, list[Track]] = {rank: [] for rank in timeline.ranks["rank"].to_list()}
    for name, frame in drawn.items():
        tables[name] = _lay_out(name, frames[name], frame, origin, last, lanes, tracks)
    return Scene(
        origin_ns=origin,
        end=max(last - origin, 1),
        tables=tables,
        lanes=lanes,
        tracks={rank: _ordered(tracks[rank], lanes) for rank in sorted(tracks)},
        groupings=groupings(timeline),
        nodes=_nodes(timeline),
        clocks={clock.node: clock.error_ns for clock in timeline.clocks},
        steps=_step_starts(timeline.steps, origin),
        judged=_judged(timeline.steps, origin, max(last - origin, 1)),
    )


# What is drawn of each frame, row by row: rank, track, start_ns, middle_ns, end_ns, kind, then, name.
# An event is `kind` up to its middle and `then` from there on.


def _phases(phases: pl.DataFrame) -> pl.DataFrame:
    name = pl.when(pl.col("label") == "").then("part").otherwise(pl.coalesce("label", "part"))
    return _drawn(phases, track=pl.lit("main thread"), kind=_code(pl.col("part")), name=name)


def _regions(regions: pl.DataFrame) -> pl.DataFrame:
    kind = pl.col("kind").replace("wait", "blocked")
    track = pl.when(pl.col("thread") == 0).then(pl.lit("regions")).otherwise(pl.format("thread {}", "thread"))
    return _drawn(regions, track=track, kind=_code(kind), name=pl.coalesce("name", "kind"))


def _collectives(collectives: pl.DataFrame) -> pl.DataFrame:
    """Waiting and transfer of an operation apart, where they are known."""
    start = pl.coalesce("device_start_ns", "start_ns")
    known = pl.col("wait_ns").is_not_null()
    return _drawn(
        collectives,
        track=pl.format("group {}", pl.coalesce("group", pl.lit("unknown"))),
        start=start,
        middle=pl.when(known).then(pl.min_horizontal(start + pl.col("wait_ns"), "end_ns")),
        kind=pl.when(known).then(_CODE["wait"]).otherwise(_CODE["unsplit"]),
        then=pl.lit(_CODE["transfer"]),
        name=pl.col("op"),
    )


def _kernels(kernels: pl.DataFrame) -> pl.DataFrame:
    many = kernels.group_by("rank").agg(pl.col("device").n_unique())["device"].max() if len(kernels) else 1
    stream = pl.format("stream {}", pl.col("stream").cast(pl.String).fill_null("?"))
    track = pl.format("device {} {}", "device", stream) if isinstance(many, int) and many > 1 else stream
    return _drawn(kernels, track=track, kind=_code(pl.col("work")), name=pl.col("name"))


def _ops(ops: pl.DataFrame) -> pl.DataFrame:
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
    return _drawn(ops, track=pl.lit("operations"), kind=kind, name=name)


_DRAWN: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
    "phases": _phases,
    "ops": _ops,
    "kernels": _kernels,
    "collectives": _collectives,
    "regions": _regions,
}


def _drawn(
    frame: pl.DataFrame,
    *,
    track: pl.Expr,
    kind: pl.Expr,
    name: pl.Expr,
    start: pl.Expr | None = None,
    middle: pl.Expr | None = None,
    then: pl.Expr | None = None,
) -> pl.DataFrame:
    return frame.select(
        "rank",
        track.alias("track"),
        (pl.col("start_ns") if start is None else start).alias("start_ns"),
        (pl.lit(None, pl.Int64) if middle is None else middle).alias("middle_ns"),
        "end_ns",
        kind.cast(pl.UInt8).alias("kind"),
        (pl.lit(0) if then is None else then).cast(pl.UInt8).alias("then"),
        name.replace("unknown", "communication").fill_null("?").alias("name"),
    )


def _code(key: pl.Expr) -> pl.Expr:
    return key.replace_strict(_CODE, default=_CODE["other"], return_dtype=pl.UInt8)


def _span(drawn: Collection[pl.DataFrame]) -> tuple[int, int]:
    """From the first start to the last thing that is known, which is where what has no end is cut."""
    if not drawn:
        return 0, 1
    times = pl.concat(
        [frame.select(pl.col("start_ns").min(), last=pl.max_horizontal("start_ns", "end_ns").max()) for frame in drawn]
    )
    start, last = times.select(pl.col("start_ns").min(), pl.col("last").max()).row(0)
    return int(start), int(last)


def _lay_out(
    table: str,
    source: pl.DataFrame,
    drawn: pl.DataFrame,
    origin: int,
    last: int,
    lanes: list[Lane],
    tracks: dict[int, list[Track]],
) -> Table:
    """Appends this table's lanes and tracks, and gives the table for look-ups."""
    start = drawn["start_ns"].to_numpy() - origin
    end = np.maximum(drawn["end_ns"].fill_null(last).to_numpy() - origin, start)
    middle = (drawn["middle_ns"] - origin).fill_null(_NO_MIDDLE).to_numpy()
    kind, then = drawn["kind"].to_numpy(), drawn["then"].to_numpy()
    rank = drawn["rank"].to_numpy()
    track, titles = _coded(drawn["track"])
    name, names = _coded(drawn["name"])
    lane = np.full(len(drawn), _NOT_DRAWN, np.int32)
    for mine in _of_tracks(rank, track, start, end):
        row = pack_rows(start[mine], end[mine], _MOST_ROWS)
        owner = int(rank[mine[0]])
        numbers = []
        for depth in range(min(int(row.max()) + 1, _MOST_ROWS)):
            here = mine[row == depth]
            numbers.append(len(lanes))
            lane[here] = len(lanes)
            a, z, turn = start[here], end[here], middle[here]
            split = turn != _NO_MIDDLE
            turn = np.where(split, np.clip(turn, a, z), z)
            first = ~split | (turn > a)
            rest = split & ((turn < z) | (turn == a))  # without a duration it is drawn all the same
            pieces = _strips(
                np.concatenate([a[first], turn[rest]]),
                np.concatenate([turn[first], z[rest]]),
                np.concatenate([kind[here][first], then[here][rest]]),
                np.concatenate([here[first], here[rest]]),
            )
            lanes.append(Lane(table, owner, pieces))
        hidden = int((row == _MOST_ROWS).sum())
        tracks.setdefault(owner, []).append(Track(titles[track[mine[0]]], table, numbers, hidden))
    return Table(source, start, end, kind, name, names, lane)


def _of_tracks(rank: NDArray[np.int32], track: Indices, start: Ints, end: Ints) -> Iterator[NDArray[np.intp]]:
    """The rows of each track of each rank, by start, longer ones first. Frames are in order of rank, then time."""
    bounds = [0, *(np.flatnonzero(np.diff(rank)) + 1).tolist(), len(rank)]
    for first, last in itertools.pairwise(bounds):
        here = slice(first, last)
        in_order = first + np.lexsort((-end[here], start[here], track[here]))
        yield from np.split(in_order, np.flatnonzero(np.diff(track[in_order])) + 1)


def _ordered(tracks: list[Track], lanes: list[Lane]) -> list[Track]:
    """Streams with the most events first; the rest as the tables come, by title."""

    def key(track: Track) -> tuple[int, int, int, str]:
        events = sum(len(events.start) for lane in track.lanes for events in lanes[lane].row)
        return (order.index(track.table), -events if track.table == "kernels" else 0, len(track.title), track.title)

    order = list(dict.fromkeys(track.table for track in tracks))
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


def _coded(texts: pl.Series) -> tuple[Indices, list[str]]:
    """Each text's position in the list of different ones."""
    different = texts.unique().sort()
    codes = texts.cast(pl.Enum(different)).to_physical()
    return codes.cast(pl.UInt32).to_numpy(), different.to_list()


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
