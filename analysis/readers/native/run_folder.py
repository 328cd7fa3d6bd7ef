"""A run folder as a reader: its tables and gaps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.readers.native.arrow_files import at_once, count_rows, order_of, read_rows
from rankscope.analysis.readers.native.files import Part, run_files, windows_in
from rankscope.analysis.readers.native.gaps import (
    open_ends,
    other_worlds,
    recorded_gaps,
    removed_rows,
    silent_ranks,
    unclosed_nodes,
)
from rankscope.analysis.readers.native.resolve import with_codes, with_late_ends, with_names, with_node, with_peers
from rankscope.analysis.readers.native.stored_rows import StoredRows, Whole
from rankscope.analysis.readers.native.unpacked_rows import Shared, UnpackedRows
from rankscope.analysis.readers.native.worlds import of_world_only, one_that_trains, with_ranks_of, worlds_in
from rankscope.analysis.text.message import text
from rankscope.collectors.schema import TABLES
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["NativeReader"]

_ENDS_LATER = "completions"
_READ_BY_OTHERS = ("ranks", "strings", "gaps", _ENDS_LATER)  # by what makes the other tables
_NOT_KEPT = ("kernels", "launches", "collectives", "regions")  # readers keep what they need of them


class NativeReader:
    """Reads a table when it is first asked for, and keeps it, unless it is large, together with what it lacked."""

    def __init__(
        self,
        run: dict[int, dict[str, Any]],
        parts: list[Part],
        gaps: list[Gap],
        roots: list[Path],
        *,
        where: str,
        world: int | None,
        steps: tuple[int, int] | None,
    ) -> None:
        """Of several worlds this one, by number, is read; None: the one that trains. Raises `BadInput`."""
        self.where = where  # the run's folder, as it was given
        self.asked = steps  # the first and last step that were asked for
        self._roots = roots
        self._windows = windows_in(roots)
        self._worlds = worlds_in(run, parts)
        if world is not None and world >= len(self._worlds):
            raise BadInput(f"{where} has no world={world}: the last is world={len(self._worlds) - 1}")
        self._analyzed = one_that_trains(self._worlds) if world is None else world
        mine = self._worlds[self._analyzed]
        self._parts = [p for p in parts if p.rank is None or (p.world, p.attempt) == (mine.name, mine.attempt)]
        there = {part.table for part in self._parts}
        self._names = tuple(name for name in TABLES if name in there)
        self.run = {node: with_ranks_of(mine, launch) for node, launch in run.items()}
        self._of_files = gaps
        self._whole: Whole = {}
        self.counted: dict[str, Any] = {}  # what was counted of the whole run, for all of its parts
        self._unpacked: dict[str, UnpackedRows] = {}  # the last one, by its temporary folder
        self._begin()

    def _begin(self) -> None:
        """Set up the reader; nothing is read yet."""
        mine = self._worlds[self._analyzed]
        self._stored = StoredRows(self.run, self._parts, mine, [*self._of_files], self.where, self._whole)
        self._tables: dict[str, pl.DataFrame] = {}
        self._seen: set[str] = set()  # tables whose gaps are noted
        self._unended = pl.DataFrame(schema={"rank": pl.Int32})  # the rank of each collective without an end

    def part(self, steps: tuple[int, int]) -> NativeReader:
        """Return these steps of the same files, which are not looked for again."""
        other = copy(self)
        other.asked = steps
        other._begin()
        return other

    def read_shared(self) -> None:
        """Read what all parts of the run have in common, here or in a process to which this reader is sent."""
        self._stored.read_shared()

    def share(self, own: Sequence[NativeReader], shared: Shared, stretches: Callable[[], Sequence[Stretch]]) -> None:
        """Let the readers of some stretches of this run use what is unpacked once for all of `stretches()`."""
        if shared.folder not in self._unpacked:
            self._unpacked = {shared.folder: UnpackedRows(self._stored, stretches(), shared)}
        unpacked = self._unpacked[shared.folder]
        for part in own:
            if part.stretch:
                place = shared.stretches.index((part.stretch.first, part.stretch.last))
                part._stored.unpacked = partial(unpacked.of, place)

    @property
    def folder(self) -> NativeReader:
        return self

    @property
    def stretch(self) -> Stretch | None:
        """The part of the run that is read; None: all."""
        return self._stored.stretch

    @stretch.setter
    def stretch(self, stretch: Stretch | None) -> None:
        self._stored.stretch = stretch

    @cached_property
    def kept_since(self) -> dict[int, int]:
        """When complete records begin, by node, of this world's nodes that have removed rows."""
        return _kept_since(self.run, self._stored.read("ranks")["node"].to_list())

    @property
    def has_shrunk(self) -> bool:
        """Whether older records were evicted since it was opened, so that tables already read may lack rows."""
        if self._stored.all_closed:
            return False
        run, _ = run_files(self._roots)
        return _kept_since(run, self.run) != _kept_since(self.run, self.run)

    @property
    def imported(self) -> bool:
        """Whether the rows come from another tool's files."""
        return bool(self._stored.imports)

    def tables(self) -> tuple[str, ...]:
        return self._names

    def windows(self) -> list[list[Path]]:
        """Of each deep window the folders that hold its tables: a run of its own."""
        if len(self._worlds) < 2:
            return self._windows
        mine = self.read("windows")["window"].unique()
        return [folders for folders in self._windows if int(folders[0].name.removeprefix("window-")) in mine]

    def ranks(self) -> list[int]:
        """Ranks that left at least one file in the world and attempt that is read."""
        return self._stored.ranks()

    def read(self, name: str) -> pl.DataFrame:
        if name not in self._tables:
            stored = self._stored.read(name)
            frame = pl.DataFrame(schema=schema_of(name)) if stored.is_empty() else self._resolved(name, stored)
            if name not in _READ_BY_OTHERS:
                self._stored.forget(name)
            self._seen.add(name)
            if name == "collectives":
                self._unended = frame.filter(pl.col("end_ns").is_null()).select("rank")
            if name in _NOT_KEPT:
                return frame
            self._tables[name] = frame
        return self._tables[name]

    def _resolved(self, name: str, frame: pl.DataFrame) -> pl.DataFrame:
        """Return the rows with nodes, names instead of ids, and ends that came later."""
        if name == "collectives":
            frame = with_late_ends(frame, self._stored.read(_ENDS_LATER))
        if name == "ranks":
            frame = frame.unique("rank", keep="last", maintain_order=True)
        if "node" not in frame.columns:
            frame = with_node(frame, self._stored.read("ranks"), next(iter(self.run)) if len(self.run) == 1 else None)
        if name != "strings":
            frame = with_names(frame, self._stored.read("strings"))
        if name == "clocks":
            frame = with_peers(frame, self.run)
        if name == "counters":
            frame = of_world_only(frame, self._worlds[self._analyzed].name)
        return frame.select(*schema_of(name))

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        return iter([self.read(name)])

    def rows(self, name: str) -> int:
        files = [part.path for part in self._parts if part.table == name]
        return sum(map(count_rows, files))

    def estimated_rows(self) -> dict[str, float]:
        """How many rows each table has in the whole run, by the size of its files and the rows of the largest."""
        if "rows" not in self.counted:
            self.counted["rows"] = self._estimated_rows()
        found: dict[str, float] = self.counted["rows"]
        return found

    def _estimated_rows(self) -> dict[str, float]:
        largest: dict[str, tuple[int, Path]] = {}
        size: dict[str, int] = {}
        for part in self._parts:
            size[part.table] = size.get(part.table, 0) + part.size_bytes
            largest[part.table] = max(largest.get(part.table, (0, part.path)), (part.size_bytes, part.path))
        rows = {name: len(order_of(path, TABLES[name].order)) for name, (_, path) in largest.items()}
        return {name: rows[name] * size[name] / max(of_part, 1) for name, (of_part, _) in largest.items()}

    def extent(self, name: str, rank: int | None = None) -> pl.DataFrame:
        """Of each file of a table (or of one rank's) in the whole run: rank, node, rows, size_bytes, first, last."""
        order = TABLES[name].order
        node_of = dict(self._stored.read("ranks").select("rank", "node").iter_rows())
        parts = [part for part in self._parts if part.table == name and rank in (None, part.rank)]

        def held(part: Part) -> tuple[Any, ...]:
            rows = pa.table({order: order_of(part.path, order)})
            at = pl.DataFrame(pl.from_arrow(rows))[order]  # a Series of an array imports pyarrow.compute, 0.1 s
            node = node_of.get(part.rank) if part.node is None else part.node
            return (part.rank, node, len(at), part.size_bytes, at.min(), at.max())

        names = {"rank": pl.Int32, "node": pl.Int32, "rows": pl.Int64, "size_bytes": pl.Int64}
        return pl.DataFrame(at_once(held, parts), schema=names | {"first": pl.Int64, "last": pl.Int64}, orient="row")

    def sizes_of_ranks(self) -> dict[int, int]:
        """Return the size of each rank's files."""
        sizes: dict[int, int] = {}
        for part in self._parts:
            if part.rank is not None:
                sizes[part.rank] = sizes.get(part.rank, 0) + part.size_bytes
        return sizes

    def pieces_of_rank(self, name: str, rank: int, *columns: str) -> Iterator[pl.DataFrame]:
        """Yield these columns of one rank's rows in the whole run, file by file, after an empty piece.

        Names are numbers.
        """
        schema = {column: kind for column, kind in schema_of(name).items() if column in ("rank", *columns)}
        yield pl.DataFrame(schema=schema)
        stored = [f"{column}_id" if column == "name" else column for column in columns]
        for part in self._parts:
            if part.table == name and part.rank == rank:
                table, _ = read_rows(part.path, closed=False, columns=stored)
                if table is not None and set(stored) <= set(table.column_names):
                    rows = pl.DataFrame(pl.from_arrow(table.select(stored))).rename({"name_id": "name"}, strict=False)
                    yield with_codes(rows.with_columns(rank=rank)).select(pl.col(c).cast(t) for c, t in schema.items())

    def sparse_clocks(self) -> pl.DataFrame:
        """Of the table `clocks` in the whole run a few rows from both ends of each file: roughly how clocks run."""
        return with_peers(self._stored.ends_of_files("clocks"), self.run)

    def gaps(self) -> list[Gap]:
        for name in self.tables():
            if name not in self._seen:
                self.read(name)
        noted = self._stored.gaps
        if self._stored.imports:
            return [*noted, *(Gap(**gap) for launch in self._stored.imports for gap in launch.get("gaps", ()))]
        return [
            *noted,
            *unclosed_nodes(self._stored, self.read),
            *silent_ranks(self._stored),
            *removed_rows(self.run, self.kept_since, shrunk=self.has_shrunk),
            *other_worlds(self._worlds, self._analyzed, self.where),
            *open_ends(self._unended, self.read("flight_records")),
            *recorded_gaps(self._stored),
        ]

    def cannot(self) -> dict[str, str]:
        cannot = {table: why for launch in self._stored.imports for table, why in launch.get("cannot", {}).items()}
        if self.stretch and not self.stretch.is_to_the_end:
            cannot |= dict.fromkeys(("progress", "exits"), text("only steps before the end of the job were read"))
        return cannot

    def why_no_rank(self) -> str:
        """Return the agent's reason for ranks that never came."""
        said = [gap.why for gap in recorded_gaps(self._stored) if gap.table == "ranks"]
        return said[0] if said else "no rank reported: the job made no process group, or the agent ended before it"


def _kept_since(run: Mapping[int, Mapping[str, Any]], nodes: Container[int]) -> dict[int, int]:
    """Return when complete records begin, by node, of those that have removed rows."""
    since = {node: launch.get("kept_since_ns") for node, launch in run.items() if node in nodes}
    return {node: ns for node, ns in since.items() if isinstance(ns, int)}
