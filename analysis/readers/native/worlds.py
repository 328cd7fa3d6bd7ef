"""The worlds of a run, groups of ranks that know each other, and which one of several is analyzed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from rankscope.analysis.readers.native.arrow_files import read_rows
from rankscope.analysis.readers.native.files import Part
from rankscope.collectors.schema import REGION_KINDS

__all__ = ["World", "is_of", "of_world_only", "on_nodes", "one_that_trains", "with_ranks_of", "worlds_in"]

_OF_RANK = r"^(rank\d+)@([0-9a-f]+)"  # what a rank's readings are called: its world is behind the @
_OPTIMIZER = REGION_KINDS.index("optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One attempt of one world: ranks that know each other. A job may have several at once, with the same ranks."""

    name: str
    attempt: int
    ranks: list[int]
    nodes: frozenset[int]
    start_ns: int  # by the clock of its first node
    end_ns: float  # infinite while it runs
    trains: bool

    def is_beside(self, other: World) -> bool:
        """Say whether both ran at once, as far as is known; on different nodes the clocks do not say."""
        if not self.nodes & other.nodes:
            return self.attempt == other.attempt
        return self.start_ns < other.end_ns and other.start_ns < self.end_ns


def worlds_in(run: Mapping[int, Mapping[str, Any]], parts: list[Part]) -> list[World]:
    """All attempts of all worlds, in the order in which they began; never empty. Of one alone nothing is read."""
    of: dict[tuple[str, int], list[Part]] = {}
    for part in parts:
        if part.attempt is not None:
            of.setdefault((part.world, part.attempt), []).append(part)
    if len(of) < 2:
        name, attempt = next(iter(of), ("", 0))
        empty: dict[str, Any] = {"ranks": [], "nodes": frozenset(), "start_ns": 0, "end_ns": 0}
        return [World(name=name, attempt=attempt, trains=True, **empty)]
    worlds = [_world(run, name, attempt, of_world) for (name, attempt), of_world in of.items()]
    return sorted(worlds, key=lambda world: (world.attempt, min(world.nodes, default=0), world.start_ns, world.name))


def _world(run: Mapping[int, Mapping[str, Any]], name: str, attempt: int, parts: list[Part]) -> World:
    rows = pl.concat(
        [
            _columns(part, "start_ns", "node").with_columns(pl.lit(part.rank, pl.Int32).alias("rank"))
            for part in parts
            if part.table == "ranks"
        ]
        or [pl.DataFrame(schema={"start_ns": pl.Int64, "node": pl.Int32, "rank": pl.Int32})]
    )
    rows = on_nodes(rows, run, name, attempt)
    nodes = frozenset(rows["node"].to_list())
    start_ns = rows.filter(pl.col("node") == min(nodes, default=0))["start_ns"].min()
    begun = start_ns if isinstance(start_ns, int) else 0
    ends = [
        entry.get("end_ns", begun)
        for launch in run.values()
        for entry in launch.get("ranks", ())
        if is_of(entry, name, attempt)
    ]
    ranks = sorted({part.rank for part in parts if part.rank is not None})
    first = [part for part in parts if part.rank == ranks[0]]
    return World(
        name=name,
        attempt=attempt,
        ranks=ranks,
        nodes=nodes,
        start_ns=begun,
        end_ns=max((math.inf if end is None else end for end in ends), default=begun),
        trains=any(part.table == "steps" for part in first)
        or any(_OPTIMIZER in _columns(part, "kind")["kind"] for part in first if part.table == "regions"),
    )


def _columns(part: Part, *names: str) -> pl.DataFrame:
    """Return these columns of a part's good rows."""
    table, _ = read_rows(part.path, closed=False)
    schema = {name: pl.Int64 if name.endswith("_ns") else pl.Int32 for name in names}
    if table is None or not set(names) <= set(table.column_names):
        return pl.DataFrame(schema=schema)
    return pl.DataFrame(pl.from_arrow(table.select(list(names)))).cast(schema)  # type: ignore[arg-type]


def one_that_trains(worlds: list[World]) -> int:
    """Of those that train, and ran when the one that began last did, the one with most ranks: its number.

    What ended before is an attempt that was restarted, even if the last one never came to train, or another job.
    """
    newest = [world for world in worlds if world.attempt == max(world.attempt for world in worlds)]
    training = [world for world in worlds if world.trains and any(world.is_beside(other) for other in newest)]
    judged = training or [world for world in newest if world.trains] or newest
    last = max(judged, key=lambda world: (world.attempt, world.start_ns))
    beside = [world for world in judged if world is last or world.is_beside(last)]
    return worlds.index(max(beside, key=lambda world: len(world.ranks)))


def is_of(entry: Mapping[str, Any], world: str, attempt: int) -> bool:
    """Say whether this rank of a run's JSON is of that world."""
    return (entry.get("world") or "", entry.get("attempt", 0)) == (world, attempt)


def on_nodes(rows: pl.DataFrame, run: Mapping[int, Mapping[str, Any]], world: str, attempt: int) -> pl.DataFrame:
    """Rows of this world's ranks on the nodes that list them, which may have got their number after their ranks."""
    entries = [(entry, node) for node, launch in run.items() for entry in launch.get("ranks", ())]
    node_of = {entry["rank"]: node for entry, node in entries if "rank" in entry and is_of(entry, world, attempt)}
    node = pl.col("rank").replace_strict(node_of, default=pl.col("node"), return_dtype=pl.Int32)
    return rows.with_columns(node.alias("node")) if node_of else rows


def with_ranks_of(world: World, launch: dict[str, Any]) -> dict[str, Any]:
    """Return a node's JSON with the ranks of this world only."""
    if "ranks" not in launch:
        return launch
    return launch | {"ranks": [r for r in launch["ranks"] if is_of(r, world.name, world.attempt)]}


def of_world_only(counters: pl.DataFrame, world: str) -> pl.DataFrame:
    """Without the readings of other worlds' ranks (`rank0@WORLD`); those of this one are called `rank0`."""
    whose = pl.col("device").str.extract(_OF_RANK, 2)
    mine = counters.filter(whose.is_null() | (whose == world))
    return mine.with_columns(pl.col("device").str.replace(_OF_RANK, "$1"))
