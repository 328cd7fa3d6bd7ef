"""Reads the run folders that rankscope's own agent writes (layout: docs/architecture.md)."""

from __future__ import annotations

import itertools
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.tables import CODES, POLARS, is_id, named_as, schema_of
from rankscope.analysis.readers.arrow_lengths import decoded_bytes
from rankscope.analysis.readers.bounds import check_bytes, check_groups, check_ranks
from rankscope.analysis.readers.typed import launch_of
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import bytes_text, duration
from rankscope.collectors.schema import (
    NO_PEER,
    REGION_KINDS,
    SCHEMA_VERSION,
    TABLES,
)
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["NativeReader", "open_run", "read_rows", "recognises", "run_folder"]

_OF_RANK = r"^(rank\d+)@([0-9a-f]+)"  # what a rank's readings are called: its world is behind the @
_OPTIMIZER = REGION_KINDS.index("optimizer")
_MAGIC = b"ARROW1"
_NAMED_WORLDS = 4  # besides the one that is read; engines that generate for a job may each have their own
_HEADER = 8  # the magic, padded
_PARTITION = re.compile(r"(rank|node)=(\d+)")
_FILE = re.compile(r"(?:(?:w([0-9a-f]+)-)?a(\d+)-)?part-(\d+)\.arrow")
_WORLD = re.compile(r"world=(\d+)")  # one world of a run, and one of its steps or more: after the run's folder
_STEPS = re.compile(r"steps=(\d+)(?:-(\d+))?")
_RUN_FILE = re.compile(r"node=(\d+)\.json")
_ENDS_LATER = "completions"
_WHOLE = ("ranks", "groups", "gaps", "windows", "ras")  # also where only some steps of a run are read
_BESIDE_NS = {"clocks": 300_000_000_000, "completions": 60_000_000_000}  # what is read before and after a stretch
_SPARSE = 40  # rows
_FILES_AT_ONCE = 16
_AT_THE_END = 1 << 62
_READ_BY_OTHERS = ("ranks", "strings", "gaps", _ENDS_LATER)  # by what makes the other tables
_LARGE = ("kernels", "launches")  # whoever reads them keeps what is needed of them
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)
_DAMAGED = (pa.ArrowException, OSError, IndexError, KeyError, ValueError)  # as pyarrow says it
# What a file's folder and name add to its rows; `node` of a rank's rows comes from `ranks`.
_WRITTEN_BY = {"rank": ("rank", "attempt"), "node": ("node",), "rank or node": ("rank", "node", "attempt")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One file: a piece of `table` from one rank's attempt, or from one node."""

    path: Path
    table: str
    rank: int | None
    node: int | None
    world: str
    attempt: int | None
    number: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """What a path names: the folders of a run, and of it perhaps one world by its number, and steps."""

    folders: list[str]
    world: int | None
    steps: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """One attempt of one world: ranks that know each other. A job may have several at once, with the same ranks."""

    name: str
    attempt: int
    ranks: list[int]
    nodes: frozenset[int]
    start_ns: int  # by the clock of its first node
    end_ns: float  # infinite while it runs
    trains: bool

    def is_beside(self, other: _World) -> bool:
        """Whether both ran at once, as far as is known; on different nodes the clocks do not say."""
        if not self.nodes & other.nodes:
            return self.attempt == other.attempt
        return self.start_ns < other.end_ns and other.start_ns < self.end_ns


def recognises(path: Path) -> bool:
    """Whether this is a run folder: it says what was launched, or holds at least one table."""
    path = run_folder(path)
    return path.is_dir() and (any(path.glob("run/node=*.json")) or any(map(_parts_in, _partitions(path))))


def run_folder(path: Path) -> Path:
    """The folder of a run; `path` may also be one of its worlds, or some of its steps, which need be no folder."""
    return Path(*_address([str(path)]).folders)


def open_run(folders: list[str]) -> NativeReader:
    """Everything that these folders hold of one run. Raises `BadInput` if that is nothing."""
    address = _address(folders)
    roots = list(dict.fromkeys(_existing_folder(folder) for folder in address.folders))
    run, torn = _run_files(roots)
    parts = [part for root in roots for of_one in _at_once(_parts_in, _partitions(root)) for part in of_one]
    _refuse_two_runs(parts)
    where = ", ".join(folders)
    if not run and not torn and not parts:
        raise BadInput(_no_run(roots[0], where) if roots else "no run folder was given")
    for node, launch in run.items():
        version = launch.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise BadInput(
                f"{where}: node {node} wrote schema version {version}, this rankscope reads up to {SCHEMA_VERSION}: "
                "update rankscope"
            )
    reader = NativeReader(run, parts, torn, roots, where=address.folders[0], world=address.world)
    if not reader.ranks():
        raise BadInput(f"{where}: no rank reported{reader.why_no_rank()}")
    from rankscope.analysis.runs.step_range import stretch_of  # it knows the timeline, which knows readers

    reader.stretch = stretch_of(reader, address.steps)
    return reader


class NativeReader:
    """Reads a table when it is first asked for, and keeps it, unless it is large, together with what it lacked."""

    def __init__(
        self,
        run: dict[int, dict[str, Any]],
        parts: list[_Part],
        gaps: list[Gap],
        roots: list[Path],
        *,
        where: str,
        world: int | None,
    ) -> None:
        """Of several worlds this one, by number, is read; None: the one that trains. Raises `BadInput`."""
        self._all_closed = bool(run) and all(launch.get("state") == "closed" for launch in run.values())
        self._windows = _windows(roots)
        self._roots = roots
        self.where = where  # the run's folder, as it was given
        self._worlds = _worlds(run, parts)
        if world is not None and world >= len(self._worlds):
            raise BadInput(f"{where} has no world={world}: the last is world={len(self._worlds) - 1}")
        self._world = _that_trains(self._worlds) if world is None else world
        mine = self._worlds[self._world]
        self._parts = [p for p in parts if p.rank is None or (p.world, p.attempt) == (mine.name, mine.attempt)]
        self.run = {node: _with_ranks_of(mine, launch) for node, launch in run.items()}
        self._raw: dict[str, pl.DataFrame] = {}
        self._tables: dict[str, pl.DataFrame] = {}
        self._seen: set[str] = set()  # tables whose gaps are noted
        self._gaps = gaps
        self._imports = [launch for launch in run.values() if "source" in launch]  # what the source's reader knew
        self.stretch: Stretch | None = None  # what is read of the run; None: all

    @cached_property
    def kept_since(self) -> dict[int, int]:
        """From when on all is there, by node, of those of this world's nodes that have removed rows."""
        return _kept_since(self.run, self._read_raw("ranks")["node"].to_list())

    @property
    def has_shrunk(self) -> bool:
        """Whether older records have made room since it was opened, so that what was read may lack rows."""
        if self._all_closed:
            return False
        run, _ = _run_files(self._roots)
        return _kept_since(run, self.run) != _kept_since(self.run, self.run)

    @property
    def imported(self) -> bool:
        """Whether the rows come from another tool's files."""
        return bool(self._imports)

    def tables(self) -> tuple[str, ...]:
        return tuple(name for name in TABLES if any(p.table == name for p in self._parts))

    def windows(self) -> list[list[Path]]:
        """Of each deep window the folders that hold its tables: a run of its own."""
        if len(self._worlds) < 2:
            return self._windows
        mine = self.read("windows")["window"].unique()
        return [folders for folders in self._windows if int(folders[0].name.removeprefix("window-")) in mine]

    def ranks(self) -> list[int]:
        """Ranks that left at least one file in the world and attempt that is read."""
        return sorted({p.rank for p in self._parts if p.rank is not None})

    def read(self, name: str) -> pl.DataFrame:
        if name not in self._tables:
            frame = self._read_raw(name)
            if name == "collectives":
                frame = _with_late_ends(frame, self._read_raw(_ENDS_LATER))
            if name == "ranks":
                frame = frame.unique("rank", keep="last", maintain_order=True)
            if "node" not in frame.columns:
                frame = self._with_node(frame)
            if name != "strings":
                frame = self._with_names(frame)
            if name == "clocks":
                frame = _with_peers(frame, self.run)
            if name == "counters":
                frame = _of_world_only(frame, self._worlds[self._world].name)
            if name not in _READ_BY_OTHERS:
                del self._raw[name]
            self._seen.add(name)
            if name in _LARGE:
                return frame.select(*schema_of(name))
            self._tables[name] = frame.select(*schema_of(name))
        return self._tables[name]

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        return iter([self.read(name)])

    def rows(self, name: str) -> int:
        files = [part.path for part in self._parts if part.table == name]
        return sum(map(_rows_in, files))

    def estimated_rows(self) -> dict[str, float]:
        """How many rows each table has in the whole run, by the size of its files and the rows of the largest."""
        largest: dict[str, tuple[int, Path]] = {}
        size: dict[str, int] = {}
        for part in self._parts:
            size[part.table] = size.get(part.table, 0) + part.size_bytes
            largest[part.table] = max(largest.get(part.table, (0, part.path)), (part.size_bytes, part.path))
        rows = {name: len(_order_of(path, TABLES[name].order)) for name, (_, path) in largest.items()}
        return {name: rows[name] * size[name] / max(of_part, 1) for name, (of_part, _) in largest.items()}

    def extent(self, name: str, rank: int | None = None) -> pl.DataFrame:
        """Of each file of a table (or of one rank's) in the whole run: rank, node, rows, size_bytes, first, last."""
        order = TABLES[name].order
        node_of = dict(self._read_raw("ranks").select("rank", "node").iter_rows())
        parts = [part for part in self._parts if part.table == name and rank in (None, part.rank)]

        def held(part: _Part) -> tuple[int | None, ...]:
            at = _order_of(part.path, order)
            node = node_of.get(part.rank) if part.node is None else part.node
            return (part.rank, node, len(at), part.size_bytes, *pc.min_max(at).as_py().values())

        names = {"rank": pl.Int32, "node": pl.Int32, "rows": pl.Int64, "size_bytes": pl.Int64}
        return pl.DataFrame(_at_once(held, parts), schema=names | {"first": pl.Int64, "last": pl.Int64}, orient="row")

    def sizes_of_ranks(self) -> dict[int, int]:
        """What each rank's files take on the disk."""
        sizes: dict[int, int] = {}
        for part in self._parts:
            if part.rank is not None:
                sizes[part.rank] = sizes.get(part.rank, 0) + part.size_bytes
        return sizes

    def pieces_of_rank(self, name: str, rank: int, *columns: str) -> Iterator[pl.DataFrame]:
        """These columns of one rank's rows in the whole run, file by file, after an empty piece; names are numbers."""
        schema = {column: kind for column, kind in schema_of(name).items() if column in ("rank", *columns)}
        yield pl.DataFrame(schema=schema)
        stored = [f"{column}_id" if column == "name" else column for column in columns]
        for part in self._parts:
            if part.table == name and part.rank == rank:
                table, _ = read_rows(part.path, closed=False, columns=stored)
                if table is not None and set(stored) <= set(table.column_names):
                    rows = pl.DataFrame(pl.from_arrow(table.select(stored))).rename({"name_id": "name"}, strict=False)
                    yield _with_codes(rows.with_columns(rank=rank)).select(pl.col(c).cast(t) for c, t in schema.items())

    def sparse_clocks(self) -> pl.DataFrame:
        """Of the table `clocks` in the whole run a few rows from both ends of each file: roughly how clocks run."""
        read = self._read([part for part in self._parts if part.table == "clocks"])
        ends = [(part, pa.concat_tables([t[:_SPARSE], t[max(len(t) - _SPARSE, _SPARSE) :]])) for part, t in read]
        return _with_peers(self._together("clocks", ends), self.run)

    def gaps(self) -> list[Gap]:
        for name in self.tables():
            if name not in self._seen:
                self.read(name)
        if self._imports:
            return [*self._gaps, *(Gap(**gap) for launch in self._imports for gap in launch.get("gaps", ()))]
        return [*self._gaps, *self._run_gaps(), *self._end_gaps(), *self._said_gaps()]

    def cannot(self) -> dict[str, str]:
        cannot = {table: why for launch in self._imports for table, why in launch.get("cannot", {}).items()}
        if self.stretch and not self.stretch.is_to_the_end:
            cannot["progress"] = text("only steps before the end of the job were read")
        return cannot

    def why_no_rank(self) -> str:
        """What the agent wrote about the ranks that never came, as the end of a sentence."""
        said = [gap.why for gap in self._said_gaps() if gap.table == "ranks"]
        return f": {said[0]}" if said else ": the job made no process group, or ended before it"

    def _read_raw(self, name: str) -> pl.DataFrame:
        """The table with ids and codes as written; every gap that shows while reading is noted once."""
        if name not in self._raw:
            frame = self._together(name, self._read([part for part in self._parts if part.table == name]))
            if name == "groups":
                check_groups(f"{self.where}/groups", frame["members"])
            if name == "ranks":
                check_ranks(f"{self.where}/ranks", frame["world_size"])
                mine = self._worlds[self._world]
                frame = self._with_listed(_on_nodes(frame, self.run, mine.name, mine.attempt))
            self._raw[name] = frame
        return self._raw[name]

    def _with_listed(self, ranks: pl.DataFrame) -> pl.DataFrame:
        """The ranks, with those that left other files only, as far as their nodes' JSON describes them."""
        mine = self._worlds[self._world]
        lost = set(self.ranks()) - set(ranks["rank"])
        rows = [
            {name: entry.get(name) for name in ("rank", "attempt", "pid", "world_size", "start_ns")} | {"node": node}
            for node, launch in self.run.items()
            for entry in launch.get("ranks", ())
            if entry.get("rank") in lost and _is_of(entry, mine.name, mine.attempt)
        ]
        why = text("the rank's own description was lost; its node's JSON says where it ran")
        self._gaps += [Gap(table="ranks", rank=row["rank"], node=row["node"], count=None, why=why) for row in rows]
        return pl.concat([ranks, pl.DataFrame(rows)], how="diagonal_relaxed") if rows else ranks

    def _together(self, name: str, read: list[tuple[_Part, pa.Table]]) -> pl.DataFrame:
        """The rows of these parts, and whose they are."""
        alike = itertools.groupby(read, key=lambda one: one[1].schema)
        frames = [self._whole_rows(name, list(of_schema)) for _, of_schema in alike]
        schema: dict[str, Any] = dict.fromkeys(_WRITTEN_BY[TABLES[name].partition], pl.Int32)
        schema |= {c.name: POLARS[c.type] for c in TABLES[name].columns}
        return pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=schema)

    def _read(self, parts: list[_Part]) -> list[tuple[_Part, pa.Table]]:
        """The rows of a table's parts, of a stretch of the run those that it needs; what is not good is noted."""
        if self.stretch and parts and _is_cut(parts[0].table):
            found = [read for of_owner in _at_once(self._within, self._by_owner(parts)) for read in of_owner]
        else:
            found = _at_once(lambda part: (part, *read_rows(part.path, closed=self._closed(part))), parts)
        return [(part, rows) for part, table, problem in found if (rows := self._good_rows(part, table, problem))]

    def _by_owner(self, parts: list[_Part]) -> list[tuple[list[_Part], int, int]]:
        """Each owner's parts, in the order in which they were written, and from when to when their rows are wanted."""
        assert self.stretch
        node_of = dict(self._read_raw("ranks").select("rank", "node").iter_rows())
        beside_ns = _BESIDE_NS.get(parts[0].table, 0)
        found = []
        for (rank, node), of_owner in itertools.groupby(parts, key=lambda part: (part.rank, part.node)):
            begin, end = self.stretch.span_on(node_of.get(rank) if node is None else node)
            in_order = sorted(of_owner, key=lambda part: part.number)
            found.append((in_order, begin - beside_ns, end + beside_ns))
        return found

    def _within(self, owner: tuple[list[_Part], int, int]) -> list[tuple[_Part, pa.Table | None, str | None]]:
        """The rows of one owner's parts that are between two times, both included, and what is wrong with the parts."""
        parts, begin_ns, end_ns = owner
        order = TABLES[parts[0].table].order

        @cache
        def middle_ns(number: int) -> int:
            at_ns = _middle_ns(parts[number].path, order)
            if at_ns == _AT_THE_END and number < len(parts) - 1:  # it cannot be read
                return middle_ns(number - 1) if number else -_AT_THE_END
            return at_ns

        # Of parts that follow each other these and one on either side, since their times overlap a little.
        first = bisect_left(range(len(parts)), begin_ns, key=lambda number: middle_ns(number))
        last = bisect_right(range(len(parts)), end_ns, key=lambda number: middle_ns(number))
        found = []
        for part in parts[max(first - 1, 0) : last + 1]:
            rows, problem = read_rows(part.path, closed=self._closed(part))
            if rows is not None and order in rows.column_names:
                at = rows[order]
                rows = rows.filter(pc.and_(pc.greater_equal(at, begin_ns), pc.less_equal(at, end_ns)))
            found.append((part, rows, problem))
        return found

    def _good_rows(self, part: _Part, table: pa.Table | None, problem: str | None) -> pa.Table | None:
        """The part's rows, if it has any; what was wrong with it is noted."""
        if problem:
            self._note(
                part,
                None,
                joined(
                    "", (text("{name} {problem}", name=part.path.name, problem=problem), self._good_until(part, table))
                ),
            )
        if table is None or not table.num_rows:
            return None
        columns = TABLES[part.table].columns
        missing = [c.name for c in columns if c.name not in table.column_names and not c.nullable]
        if missing:
            self._note(
                part,
                table.num_rows,
                text("{name} has no column {column}: it was not read", name=part.path.name, column=missing[0]),
            )
            return None
        return table.replace_schema_metadata()

    def _whole_rows(self, name: str, parts: list[tuple[_Part, pa.Table]]) -> pl.DataFrame:
        """The rows of these parts, all with the same columns, and whose they are: together, since there may be many."""
        columns = TABLES[name].columns
        of_part = np.repeat(np.arange(len(parts)), [table.num_rows for _, table in parts])
        owners = (
            pl.Series(by, [getattr(part, by) for part, _ in parts], pl.Int32).gather(of_part)
            for by in _WRITTEN_BY[TABLES[name].partition]
        )
        frame = pl.DataFrame(pl.from_arrow(pa.concat_tables([table for _, table in parts])))
        frame = frame.with_columns(pl.lit(None).alias(c.name) for c in columns if c.name not in frame.columns)
        frame = frame.select(*owners, *(pl.col(c.name).cast(POLARS[c.type]) for c in columns))
        needed = [] if self._imports else [c.name for c in columns if not c.nullable]
        if not any(frame[column].null_count() for column in needed):
            return frame
        lacking = frame.select(pl.any_horizontal(pl.col(needed).is_null())).to_series()
        for number, lost in enumerate(np.bincount(of_part[lacking.to_numpy()]).tolist()):
            if lost:
                part = parts[number][0]
                why = text(
                    "{name}: {lost} rows lack a value that must be there; they were left out",
                    name=part.path.name,
                    lost=lost,
                )
                self._note(part, lost, why)
        return frame.filter(~lacking)

    def _good_until(self, part: _Part, table: pa.Table | None) -> str:
        """Where the good rows of a cut file end, as the end of a sentence."""
        order = TABLES[part.table].order
        if table is None or order not in table.column_names or part.table == "ranks":
            return text("; nothing of it is good") if table is None else ""
        start = self._started_ns(pl.col("rank") == part.rank if part.rank is not None else pl.col("node") == part.node)
        last = pl.DataFrame(pl.from_arrow(table.select([order])))[order].max()
        if start is None or not isinstance(last, int) or not order.endswith("_ns"):
            return ""
        return text("; it is good until {last:.1f} s after the start", last=(last - start) / 1e9)

    def _started_ns(self, which: pl.Expr) -> int | None:
        start = self._read_raw("ranks").filter(which)["start_ns"].min()
        return start if isinstance(start, int) else None

    def _closed(self, part: _Part) -> bool:
        """Whether every agent that could still be writing this file has ended its run properly."""
        return self._all_closed if part.node is None else self.run.get(part.node, {}).get("state") == "closed"

    def _note(self, part: _Part, count: int | None, why: str) -> None:
        gap = Gap(table=part.table, rank=part.rank, node=part.node, count=count, why=why)
        if gap not in self._gaps:  # large tables may be read again
            self._gaps.append(gap)

    def _with_node(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The node of each row's rank; null where the rank's own row was lost and there are several nodes."""
        nodes = self._read_raw("ranks").select("rank", "node").unique("rank", keep="last")
        frame = frame.join(nodes, on="rank", how="left", maintain_order="left")
        return frame.with_columns(pl.col("node").fill_null(next(iter(self.run)))) if len(self.run) == 1 else frame

    def _with_names(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Ids become names; an id whose name was lost becomes `#id`."""
        ids = [c for c in frame.columns if is_id(c)]
        owner = "rank" if "rank" in frame.columns else "node"
        if ids:
            names = self._read_raw("strings").filter(pl.col("attempt").is_null() == (owner == "node"))
            names = names.select(owner, "name_id", pl.col("name").alias("_name"))
            names = names.unique([owner, "name_id"], keep="last")
            for column in ids:
                different = (
                    frame.select(owner, column)
                    .unique()
                    .join(names, how="left", left_on=[owner, column], right_on=[owner, "name_id"])
                    .select(owner, column, pl.coalesce("_name", pl.format("#{}", column)).alias(named_as(column)))
                )
                frame = frame.join(different, how="left", on=[owner, column], maintain_order="left").drop(column)
        return _with_codes(frame)

    def _run_gaps(self) -> list[Gap]:
        """Nodes that did not close, ranks that left nothing, attempts that are not analysed."""
        ranks = self._read_raw("ranks")
        world = max(ranks["world_size"].to_list(), default=0)
        gaps = [
            Gap(table="run", rank=None, node=node, count=None, why=self._open_node(node))
            for node, launch in sorted(self.run.items())
            if launch.get("state") != "closed"
        ]
        missing = sorted(set(range(world)) - set(self.ranks()))
        if missing:
            why = text(
                "{missing} of {world} left no trace: if they ran on another node, give its folder "
                "too, else they never joined",
                missing=named("rank", missing),
                world=world,
            )
            rank = missing[0] if len(missing) == 1 else None
            gaps.append(Gap(table="ranks", rank=rank, node=None, count=len(missing), why=why))
        return [*gaps, *self._removed(), *self._other_worlds()]

    def _removed(self) -> Iterator[Gap]:
        """That old records made room; one line, whatever the number of nodes."""
        since = [ns - self.run[node].get("start_ns", ns) for node, ns in self.kept_since.items()]
        sizes = [self.run[node].get("keep_bytes", 0) for node in self.kept_since]
        if since:
            why = text(
                "records of the first {removed} made room, to keep within {size} a node (rankscope run --keep)",
                removed=duration(max(since)),
                size=bytes_text(min(sizes)),
            )
            yield Gap(table="*", rank=None, node=None, count=None, why=why)
        if self.has_shrunk:
            why = text(
                "more records made room while this was read, so rows of the first steps may be missing: read it again"
            )
            yield Gap(table="*", rank=None, node=None, count=None, why=why)

    def _other_worlds(self) -> list[Gap]:
        """A line for each other attempt and world; of very many, how many more there are."""
        mine = self._worlds[self._world]
        others = [(number, world) for number, world in enumerate(self._worlds) if number != self._world]
        whys = [self._not_analysed(number, world, mine) for number, world in others[:_NAMED_WORLDS]]
        if len(others) > _NAMED_WORLDS:
            whys.append(text("{count} further worlds are not analysed either", count=len(others) - _NAMED_WORLDS))
        return [Gap(table="ranks", rank=None, node=None, count=None, why=why) for why in whys]

    def _not_analysed(self, number: int, world: _World, mine: _World) -> str:
        address = f"{self.where.rstrip('/')}/world={number}"
        if world.is_beside(mine):
            return text(
                "{ranks} of another world ran at the same time ({what}) and {en_are} not analysed here: "
                "rankscope report {it}",
                ranks=named("rank", world.ranks),
                en_are="is" if len(world.ranks) == 1 else "are",
                what=text("they train") if world.trains else text("no optimizer ran there"),
                it=address,
            )
        if world.attempt < mine.attempt:
            return text(
                "attempt {attempt} was restarted and is not analysed, only the last attempt ({last}) is",
                attempt=world.attempt,
                last=mine.attempt,
            )
        if world.attempt > mine.attempt:
            return text(
                "attempt {attempt}, which came later, is not analysed here: rankscope report {it}",
                attempt=world.attempt,
                it=address,
            )
        return text(
            "another job of {count} in this run is not analysed here: rankscope report {it}",
            count=counted(len(world.ranks), "rank"),
            it=address,
        )

    def _open_node(self, node: int) -> str:
        start = self._started_ns(pl.col("node") == node)
        last = self.read("regions").filter(pl.col("node") == node)["end_ns"].max()
        until = (
            text("; nothing after {last:.1f} s", last=(last - start) / 1e9)
            if start is not None and isinstance(last, int)
            else ""
        )
        return text(
            "node {node} has not closed its run: it is still recording, or its agent was killed{until}",
            node=node,
            until=until,
        )

    def _end_gaps(self) -> list[Gap]:
        collectives = self.read("collectives")
        timed = self.read("flight_records").drop_nulls("duration_ns")["rank"].unique()  # what lacks one is unmatched
        unseen = collectives.filter(pl.col("end_ns").is_null(), ~pl.col("rank").is_in(timed.implode()))
        open_ends = unseen.group_by("rank").len().sort("rank")
        return [
            Gap(
                table="collectives",
                rank=rank,
                node=None,
                count=n,
                why=text("the end of {n} collectives was never seen", n=n),
            )
            for rank, n in open_ends.iter_rows()
        ]

    def _said_gaps(self) -> list[Gap]:
        """What collectors, session and agent recorded themselves."""
        said = self._read_raw("gaps").select("table", "rank", "node", "count", "why")
        return [replace(Gap(**row), why=_as_recorded(row["why"])) for row in said.iter_rows(named=True)]


def _with_codes(frame: pl.DataFrame) -> pl.DataFrame:
    """Codes become what they stand for."""
    for column, (known, default) in CODES.items():
        if column in frame.columns:
            codes = dict(enumerate(known))
            name = pl.col(column).replace_strict(codes, default=default, return_dtype=pl.String)
            frame = frame.with_columns(pl.when(pl.col(column).is_not_null()).then(name).alias(column))
    return frame


def _as_recorded(why: str) -> str:
    """What a rank or an agent wrote down in English, with what it quotes behind a colon; known words are translated."""
    head, _, quoted = why.partition(": ")
    return text("{file}: {why}", file=Text(head, {}), why=Text(quoted, {})) if quoted else Text(why, {})


def _existing_folder(folder: str) -> Path:
    path = Path(folder)
    if not path.exists():
        raise BadInput(f"{folder} does not exist")
    if not path.is_dir():
        raise BadInput(f"{folder} is a file, not a run folder: give the folder that holds run/ and collectives/")
    return path.resolve()


def _no_run(root: Path, where: str) -> str:
    inner = sorted(p.name for p in root.iterdir() if (p / "run").is_dir())
    if inner:
        return f"{where} is not a run, but holds {len(inner)}: give one of them, the newest is {root / inner[-1]}"
    if (root / "run").is_dir():
        return (
            f"{where} holds no rank yet: a rank is recorded from its first process group on; "
            "if the job is over, it made none"
        )
    return (
        f"{where} is not a run: it holds no run/node=*.json and no table; `rankscope run` prints the folder it writes"
    )


def _run_files(roots: list[Path]) -> tuple[dict[int, dict[str, Any]], list[Gap]]:
    """The launch as each node wrote it, and a gap for each such file that is not whole."""
    run: dict[int, dict[str, Any]] = {}
    gaps = []
    for root in roots:
        for path in sorted((root / "run").glob("node=*.json")):
            if not (match := _RUN_FILE.fullmatch(path.name)):
                continue
            node = int(match[1])
            try:
                run[node] = launch_of(path.read_bytes())
            except (OSError, ValueError):
                gaps.append(
                    Gap(table="run", rank=None, node=node, count=None, why=text("{name} is not whole", name=path.name))
                )
    return run, gaps


def _kept_since(run: Mapping[int, Mapping[str, Any]], nodes: Container[int]) -> dict[int, int]:
    """From when on all is there, by node, of those of them that have removed rows."""
    since = {node: launch.get("kept_since_ns") for node, launch in run.items() if node in nodes}
    return {node: ns for node, ns in since.items() if isinstance(ns, int)}


def _partitions(root: Path) -> Iterator[Path]:
    """The folders of each table's ranks or nodes, in order."""
    for name in sorted(TABLES):
        yield from sorted(Path(entry) for entry in _entries(root / name) if _PARTITION.fullmatch(entry.name))


def _parts_in(partition: Path) -> list[_Part]:
    """The parts of one rank's or node's table, in order."""
    owned = _PARTITION.fullmatch(partition.name)
    parts = []
    for entry in _entries(partition):
        file = _FILE.fullmatch(entry.name)
        if owned and file and (size_bytes := _size(entry)) is not None:
            of_rank, owner = owned[1] == "rank", int(owned[2])
            check_ranks(partition, [owner])
            part = _Part(
                path=partition / entry.name,
                table=partition.parent.name,
                rank=owner if of_rank else None,
                node=None if of_rank else owner,
                world=file[1] or "",
                attempt=int(file[2] or 0) if of_rank else None,
                number=int(file[3]),
                size_bytes=size_bytes,
            )
            parts.append(part)
    return sorted(parts, key=lambda part: (part.world, part.attempt or 0, part.number))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it is not there, or is being moved by its agent."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _size(entry: os.DirEntry[str]) -> int | None:
    """Of a file; None: it is none, or has made room in this moment."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except OSError:
        return None


def _at_once(do: Callable[[_In], _Out], items: Iterable[_In]) -> list[_Out]:
    """What it does with each item, in their order; on shared storage most of the time is spent waiting for files."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        return list(pool.map(do, items))


def _address(paths: list[str]) -> _Address:
    """The folders of a run, and what of it is named: `runs/…/world=1`, `runs/…/steps=100-200`, or both."""
    found = [_named_by(Path(path)) for path in paths]
    of = {(world, steps) for _, world, steps in found}
    if len(of) > 1:
        raise BadInput(f"{', '.join(paths)}: these are several parts of a run, give the folders of one")
    world, steps = next(iter(of), (None, None))
    return _Address(folders=[str(folder) for folder, *_ in found], world=world, steps=steps)


def _named_by(path: Path) -> tuple[Path, int | None, tuple[int, int] | None]:
    steps = None
    if match := _STEPS.fullmatch(path.name):
        steps = int(match[1]), int(match[2] or match[1])
        if steps[1] < steps[0]:
            raise BadInput(f"{path}: the last of these steps is before the first")
        path = path.parent
    match = _WORLD.fullmatch(path.name)
    return (path.parent, int(match[1]), steps) if match else (path, None, steps)


def _worlds(run: Mapping[int, Mapping[str, Any]], parts: list[_Part]) -> list[_World]:
    """All attempts of all worlds, in the order in which they began; never empty. Of one alone nothing is read."""
    of: dict[tuple[str, int], list[_Part]] = {}
    for part in parts:
        if part.attempt is not None:
            of.setdefault((part.world, part.attempt), []).append(part)
    if len(of) < 2:
        name, attempt = next(iter(of), ("", 0))
        nobody: dict[str, Any] = {"ranks": [], "nodes": frozenset(), "start_ns": 0, "end_ns": 0}
        return [_World(name=name, attempt=attempt, trains=True, **nobody)]
    worlds = [_world(run, name, attempt, of_world) for (name, attempt), of_world in of.items()]
    return sorted(worlds, key=lambda world: (world.attempt, min(world.nodes, default=0), world.start_ns, world.name))


def _world(run: Mapping[int, Mapping[str, Any]], name: str, attempt: int, parts: list[_Part]) -> _World:
    rows = pl.concat(
        [
            _columns(part, "start_ns", "node").with_columns(pl.lit(part.rank, pl.Int32).alias("rank"))
            for part in parts
            if part.table == "ranks"
        ]
        or [pl.DataFrame(schema={"start_ns": pl.Int64, "node": pl.Int32, "rank": pl.Int32})]
    )
    rows = _on_nodes(rows, run, name, attempt)
    nodes = frozenset(rows["node"].to_list())
    start_ns = rows.filter(pl.col("node") == min(nodes, default=0))["start_ns"].min()
    begun = start_ns if isinstance(start_ns, int) else 0
    ends = [
        entry.get("end_ns", begun)
        for launch in run.values()
        for entry in launch.get("ranks", ())
        if _is_of(entry, name, attempt)
    ]
    ranks = sorted({part.rank for part in parts if part.rank is not None})
    first = [part for part in parts if part.rank == ranks[0]]
    return _World(
        name=name,
        attempt=attempt,
        ranks=ranks,
        nodes=nodes,
        start_ns=begun,
        end_ns=max((math.inf if end is None else end for end in ends), default=begun),
        trains=any(part.table == "steps" for part in first)
        or any(_OPTIMIZER in _columns(part, "kind")["kind"] for part in first if part.table == "regions"),
    )


def _columns(part: _Part, *names: str) -> pl.DataFrame:
    """These columns of a part's good rows."""
    table, _ = read_rows(part.path, closed=False)
    schema = {name: pl.Int64 if name.endswith("_ns") else pl.Int32 for name in names}
    if table is None or not set(names) <= set(table.column_names):
        return pl.DataFrame(schema=schema)
    return pl.DataFrame(pl.from_arrow(table.select(list(names)))).cast(schema)  # type: ignore[arg-type]


def _that_trains(worlds: list[_World]) -> int:
    """Of those that train, and ran when the one that began last did, the one with most ranks: its number.

    What ended before is an attempt that was restarted, even if the last one never came to train, or another job.
    """
    newest = [world for world in worlds if world.attempt == max(world.attempt for world in worlds)]
    training = [world for world in worlds if world.trains and any(world.is_beside(other) for other in newest)]
    judged = training or [world for world in newest if world.trains] or newest
    last = max(judged, key=lambda world: (world.attempt, world.start_ns))
    beside = [world for world in judged if world is last or world.is_beside(last)]
    return worlds.index(max(beside, key=lambda world: len(world.ranks)))


def _is_of(entry: Mapping[str, Any], world: str, attempt: int) -> bool:
    """Whether this rank of a run's JSON is of that world."""
    return (entry.get("world") or "", entry.get("attempt", 0)) == (world, attempt)


def _on_nodes(rows: pl.DataFrame, run: Mapping[int, Mapping[str, Any]], world: str, attempt: int) -> pl.DataFrame:
    """Rows of this world's ranks on the nodes that list them, which may have got their number after their ranks."""
    entries = [(entry, node) for node, launch in run.items() for entry in launch.get("ranks", ())]
    node_of = {entry["rank"]: node for entry, node in entries if "rank" in entry and _is_of(entry, world, attempt)}
    node = pl.col("rank").replace_strict(node_of, default=pl.col("node"), return_dtype=pl.Int32)
    return rows.with_columns(node.alias("node")) if node_of else rows


def _with_peers(clocks: pl.DataFrame, run: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """Which node each one pinged: that may have got another number since it was asked for it."""
    number = {launch["agent"]: node for node, launch in run.items() if "agent" in launch}
    pinged = {node: number[launch["peer"]] for node, launch in run.items() if launch.get("peer") in number}
    peer = pl.col("node").replace_strict(pinged, default=pl.col("peer"), return_dtype=pl.Int32)
    is_ping = pl.col("peer") != NO_PEER
    return clocks.with_columns(pl.when(is_ping).then(peer).otherwise("peer").alias("peer")) if pinged else clocks


def _with_ranks_of(world: _World, launch: dict[str, Any]) -> dict[str, Any]:
    """A node's JSON with the ranks of this world only."""
    if "ranks" not in launch:
        return launch
    return launch | {"ranks": [r for r in launch["ranks"] if _is_of(r, world.name, world.attempt)]}


def _of_world_only(counters: pl.DataFrame, world: str) -> pl.DataFrame:
    """Without the readings of other worlds' ranks (`rank0@WORLD`); those of this one are called `rank0`."""
    whose = pl.col("device").str.extract(_OF_RANK, 2)
    mine = counters.filter(whose.is_null() | (whose == world))
    return mine.with_columns(pl.col("device").str.replace(_OF_RANK, "$1"))


def _windows(roots: list[Path]) -> list[list[Path]]:
    """The windows' folders by window; one that is still being converted has no `run/node=*.json` yet."""
    folders: dict[str, list[Path]] = {}
    for root in roots:
        for file in sorted(root.glob("window-*/run/node=*.json")):
            of_window = folders.setdefault(file.parents[1].name, [])
            if file.parents[1] not in of_window:
                of_window.append(file.parents[1])
    return [folders[name] for name in sorted(folders)]


def _refuse_two_runs(parts: list[_Part]) -> None:
    """The same partition in two folders means two runs, not two nodes of one."""
    seen: dict[tuple[str, int | None, int | None], Path] = {}
    for part in parts:
        root = part.path.parents[2]
        first = seen.setdefault((part.table, part.rank, part.node), root)
        if first != root:
            who = f"rank {part.rank}" if part.rank is not None else f"node {part.node}"
            raise BadInput(f"{who} is in both {first} and {root}: these are two runs, give the folders of one")


def _is_cut(name: str) -> bool:
    """Whether only those rows of a table are read that belong to a stretch of the run."""
    return name not in _WHOLE and TABLES[name].order.endswith("_ns")


def _middle_ns(path: Path, order: str) -> int:
    """A time in the midst of a file's rows; that of a file without rows is at its end, where one may be written."""
    rows = _order_of(path, order)
    return rows[len(rows) // 2].as_py() if len(rows) else _AT_THE_END


def _order_of(path: Path, order: str) -> pa.ChunkedArray:
    """What a file's rows are ordered by; nothing where it has none that are good. The part being written has some."""
    table, _ = read_rows(path, closed=False, columns=[order])
    return table[order] if table is not None and order in table.column_names else pa.chunked_array([], pa.int64())


def _rows_in(path: Path) -> int:
    """What the file's footer says; 0 where it has none."""
    from pyarrow import dataset  # 3 MB

    try:
        return int(dataset.dataset(path, format="ipc").count_rows())
    except (OSError, pa.ArrowException):
        return 0


def read_rows(path: Path, *, closed: bool, columns: Sequence[str] | None = None) -> tuple[pa.Table | None, str | None]:
    """The good rows of an Arrow file, and what is wrong with it; of a whole file only these columns, if it has them.

    The part that is being written has no footer: it is read as a stream. So is a file that was cut.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return None, text("could not be read ({error})", error=error.strerror)
    check_bytes(path, decoded_bytes(data[_HEADER:]), len(data))
    if data.startswith(_MAGIC) and data.endswith(_MAGIC) and len(data) > 2 * _HEADER:
        try:
            return _checked(_read_file(data, columns)), None
        except _DAMAGED:
            pass  # what is good of it may still be read as a stream
    batches: list[pa.RecordBatch] = []
    problem = text("has no footer although the run was closed: its last rows may be missing") if closed else None
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(data[_HEADER:]))
        while True:
            batches.append(_checked(stream.read_next_batch()))
    except StopIteration:
        pass
    except _DAMAGED:
        problem = text("was cut off: its last rows are lost")
    return (pa.Table.from_batches(batches) if batches else None), problem


def _checked(rows: _Rows) -> _Rows:
    """The rows, whose texts and lengths are what they claim. Raises an Arrow error."""
    rows.validate(full=True)
    return rows


def _read_file(data: bytes, columns: Sequence[str] | None) -> pa.Table:
    file = pa.ipc.open_file(pa.BufferReader(data))
    if columns is not None:
        wanted = [number for number, name in enumerate(file.schema.names) if name in columns]
        file = pa.ipc.open_file(pa.BufferReader(data), options=pa.ipc.IpcReadOptions(included_fields=wanted))
    return file.read_all()


def _with_late_ends(collectives: pl.DataFrame, completions: pl.DataFrame) -> pl.DataFrame:
    """Ends that came after the row had been written."""
    keys = ["rank", "attempt", "number"]
    late = completions.select(*keys, pl.col("end_ns").alias("_late")).unique(keys)
    return (
        collectives.join(late, on=keys, how="left", maintain_order="left")
        .with_columns(pl.coalesce("end_ns", "_late").alias("end_ns"))
        .drop("_late")
    )
