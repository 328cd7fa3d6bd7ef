"""The rows of a run's files as they were written, with ids and codes; damage is noted once."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.tables import POLARS
from rankscope.analysis.readers.bounds import check_groups, check_ranks
from rankscope.analysis.readers.native.arrow_files import AT_THE_END, Within, at_once, read_rows, time_in_the_middle
from rankscope.analysis.readers.native.files import Part
from rankscope.analysis.readers.native.unpacked_rows import LARGE
from rankscope.analysis.readers.native.worlds import World, is_of, on_nodes
from rankscope.analysis.text.message import joined, text
from rankscope.collectors.schema import TABLES

if TYPE_CHECKING:
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["Owner", "Read", "StoredRows", "Whole"]

_WHOLE = ("ranks", "groups", "gaps", "windows", "ras", "exits")  # also where only some steps of a run are read
_BESIDE_NS = {"clocks": 300_000_000_000, "completions": 60_000_000_000}  # what is read before and after a stretch
_SPARSE = 40  # rows
_OWNERS = 256  # whose rows are unpacked before what is not wanted of them is given up
# What a file's folder and name add to its rows; `node` of a rank's rows comes from `ranks`.
_WRITTEN_BY = {"rank": ("rank", "attempt"), "node": ("node",), "rank or node": ("rank", "node", "attempt")}
Whole = dict[str, tuple[pl.DataFrame, list[Gap]]]  # by table, with what was wrong with its files
Owner = tuple[list[Part], int, int]  # a rank's or node's parts of a table, and from when to when their rows are wanted
Read = tuple[Part, pa.Table | None, str | None]  # its rows, and what is wrong with it


class StoredRows:
    """The rows of one world's files, and `gaps`: what was wrong with those that were read so far.

    `run` is each node's JSON, with the ranks of this world only. Where there is a `stretch`, only its rows are read.
    """

    def __init__(
        self, run: dict[int, dict[str, Any]], parts: list[Part], world: World, gaps: list[Gap], where: str, whole: Whole
    ) -> None:
        """`where` is the run's folder, for errors; `gaps` is added to.

        `whole` has the tables that are read whole for every part of a run, and is added to.
        """
        self.run = run
        self.parts = parts
        self.world = world
        self.gaps = gaps
        self.where = where
        self.stretch: Stretch | None = None  # what is read of the run; None: all
        self.imports = [launch for launch in run.values() if "source" in launch]  # what the source's reader knew
        self.all_closed = bool(run) and all(launch.get("state") == "closed" for launch in run.values())
        self.unpacked: Callable[[str], list[Read]] | None = None  # of `LARGE`, where other stretches share them
        self._whole = whole
        self._kept: dict[str, pl.DataFrame] = {}

    def ranks(self) -> list[int]:
        """Ranks that left at least one file."""
        return sorted({p.rank for p in self.parts if p.rank is not None})

    def read(self, name: str) -> pl.DataFrame:
        """Return the table with ids and codes as written, kept until it is forgotten.

        What is wrong with it is noted once.
        """
        if name not in self._kept:
            self._kept[name] = self._made(name) if _is_cut(name) else self._shared(name)
        return self._kept[name]

    def _shared(self, name: str) -> pl.DataFrame:
        """Return a table that all parts of the run have in common, and note what was wrong with it."""
        if name not in self._whole:
            known = len(self.gaps)
            frame = self._made(name)
            self._whole[name] = frame, self.gaps[known:]
        frame, noted = self._whole[name]
        self.gaps += [gap for gap in noted if gap not in self.gaps]
        return frame

    def _made(self, name: str) -> pl.DataFrame:
        frame = self._together(name, self._read(self._of(name)))
        if name == "groups":
            frame = frame.with_columns(_each_once(frame["members"]))
            check_groups(f"{self.where}/groups", frame["members"].unique())
        if name == "ranks":
            check_ranks(f"{self.where}/ranks", frame["world_size"])
            frame = self._with_listed(on_nodes(frame, self.run, self.world.name, self.world.attempt))
        return frame

    def read_shared(self) -> None:
        """Read the tables that all parts of the run have in common, of which the parts then have them."""
        for name in dict.fromkeys(part.table for part in self.parts):
            if not _is_cut(name):
                self.read(name)

    def forget(self, name: str) -> None:
        """Free the memory of a table that was read."""
        del self._kept[name]

    def ends_of_files(self, name: str) -> pl.DataFrame:
        """Of a table in the whole run a few rows from both ends of each file."""
        read = self._read(self._of(name))
        ends = [(part, pa.concat_tables([t[:_SPARSE], t[max(len(t) - _SPARSE, _SPARSE) :]])) for part, t in read]
        return self._together(name, ends)

    def started_ns(self, which: pl.Expr) -> int | None:
        """Return when the first of these rows of `ranks` began, on its node's clock."""
        start = self.read("ranks").filter(which)["start_ns"].min()
        return start if isinstance(start, int) else None

    def _of(self, name: str) -> list[Part]:
        return [part for part in self.parts if part.table == name]

    def _with_listed(self, ranks: pl.DataFrame) -> pl.DataFrame:
        """Return the ranks, with those that left other files only, as far as their nodes' JSON describes them."""
        lost = set(self.ranks()) - set(ranks["rank"])
        rows = [
            {name: entry.get(name) for name in ("rank", "attempt", "pid", "world_size", "start_ns")} | {"node": node}
            for node, launch in self.run.items()
            for entry in launch.get("ranks", ())
            if entry.get("rank") in lost and is_of(entry, self.world.name, self.world.attempt)
        ]
        why = text("the rank's own description was lost; its node's JSON says where it ran")
        self.gaps += [Gap(table="ranks", rank=row["rank"], node=row["node"], count=None, why=why) for row in rows]
        return pl.concat([ranks, pl.DataFrame(rows)], how="diagonal_relaxed") if rows else ranks

    def _together(self, name: str, read: list[tuple[Part, pa.Table]]) -> pl.DataFrame:
        """Return the rows of these parts, and whose they are."""
        alike = itertools.groupby(read, key=lambda one: one[1].schema)
        frames = [self._whole_rows(name, list(of_schema)) for _, of_schema in alike]
        schema: dict[str, Any] = dict.fromkeys(_WRITTEN_BY[TABLES[name].partition], pl.Int32)
        schema |= {c.name: POLARS[c.type] for c in TABLES[name].columns}
        return pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=schema)

    def _read(self, parts: list[Part]) -> list[tuple[Part, pa.Table]]:
        """Return the rows of a table's parts, of a stretch of the run those that it needs.

        What is not good is noted.
        """
        if self.stretch and parts and _is_cut(parts[0].table):
            if self.unpacked and parts[0].table in LARGE:
                found = self.unpacked(parts[0].table)
            else:
                owners = self.by_owner(parts[0].table)
                some = (owners[first : first + _OWNERS] for first in range(0, len(owners), _OWNERS))
                found = [read for of_some in some for read in _alone(itertools.chain(*at_once(self.within, of_some)))]
        else:
            found = at_once(lambda part: (part, *read_rows(part.path, closed=self._is_closed(part))), parts)
        return [(part, rows) for part, table, problem in found if (rows := self._good_rows(part, table, problem))]

    def by_owner(self, name: str) -> list[Owner]:
        """Return each owner's parts of a table, as they were written, and from when to when their rows are wanted."""
        assert self.stretch
        node_of = dict(self.read("ranks").select("rank", "node").iter_rows())
        beside_ns = _BESIDE_NS.get(name, 0)
        found = []
        for (rank, node), of_owner in itertools.groupby(self._of(name), key=lambda part: (part.rank, part.node)):
            begin, end = self.stretch.span_on(node_of.get(rank) if node is None else node)
            in_order = sorted(of_owner, key=lambda part: part.number)
            found.append((in_order, begin - beside_ns, end + beside_ns))
        return found

    def within(self, owner: Owner) -> list[Read]:
        """Return the rows of one owner's parts between two times, both included, and what is wrong with the parts."""
        parts, begin_ns, end_ns = owner
        order = TABLES[parts[0].table].order

        def middle_ns(number: int) -> int:
            at_ns = time_in_the_middle(parts[number].path, order)
            if at_ns == AT_THE_END and number < len(parts) - 1:  # it cannot be read
                return middle_ns(number - 1) if number else -AT_THE_END
            return at_ns

        # Of parts that follow each other these and one on either side, since their times overlap a little.
        numbers = range(len(parts))
        if len(parts) > 1:
            first, last = bisect_left(numbers, begin_ns, key=middle_ns), bisect_right(numbers, end_ns, key=middle_ns)
            numbers = numbers[max(first - 1, 0) : last + 1]
        found = []
        for part in (parts[number] for number in numbers):
            rows, problem = read_rows(part.path, closed=self._is_closed(part), within=Within(order, begin_ns, end_ns))
            found.append((part, rows, problem))
        return found

    def _good_rows(self, part: Part, table: pa.Table | None, problem: str | None) -> pa.Table | None:
        """Return the part's rows, if it has any; what was wrong with it is noted."""
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
        there = set(table.column_names)
        missing = [c.name for c in TABLES[part.table].columns if c.name not in there and not c.nullable]
        if missing:
            self._note(
                part,
                table.num_rows,
                text("{name} has no column {column}: it was not read", name=part.path.name, column=missing[0]),
            )
            return None
        return table.replace_schema_metadata()

    def _whole_rows(self, name: str, parts: list[tuple[Part, pa.Table]]) -> pl.DataFrame:
        """Return the rows of these parts, all with the same columns, and whose they are.

        Together, since there may be many.
        """
        columns = TABLES[name].columns
        of_part = np.repeat(np.arange(len(parts)), [table.num_rows for _, table in parts])
        owners = (
            pl.Series(by, [getattr(part, by) for part, _ in parts], pl.Int32).gather(of_part)
            for by in _WRITTEN_BY[TABLES[name].partition]
        )
        frame = pl.DataFrame(pl.from_arrow(pa.concat_tables([table for _, table in parts]).combine_chunks()))
        frame = frame.with_columns(pl.lit(None).alias(c.name) for c in columns if c.name not in frame.columns)
        frame = frame.select(*owners, *(pl.col(c.name).cast(POLARS[c.type]) for c in columns))
        needed = [] if self.imports else [c.name for c in columns if not c.nullable]
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

    def _good_until(self, part: Part, table: pa.Table | None) -> str:
        """Return the place where the good rows of a cut file end, as the end of a sentence."""
        order = TABLES[part.table].order
        if table is None or order not in table.column_names or part.table == "ranks":
            return text("; nothing of it is good") if table is None else ""
        start = self.started_ns(pl.col("rank") == part.rank if part.rank is not None else pl.col("node") == part.node)
        last = pl.DataFrame(pl.from_arrow(table.select([order])))[order].max()
        if start is None or not isinstance(last, int) or not order.endswith("_ns"):
            return ""
        return text("; it is good until {last:.1f} s after the start", last=(last - start) / 1e9)

    def _is_closed(self, part: Part) -> bool:
        """Say whether every agent that could still be writing this file has ended its run properly."""
        return self.all_closed if part.node is None else self.run.get(part.node, {}).get("state") == "closed"

    def _note(self, part: Part, count: int | None, why: str) -> None:
        gap = Gap(table=part.table, rank=part.rank, node=part.node, count=count, why=why)
        if gap not in self.gaps:  # large tables may be read again
            self.gaps.append(gap)


def _alone(read: Iterable[Read]) -> list[Read]:
    """Return the same rows without those that were unpacked with them: a slice holds all that it was cut from."""
    read = [(part, None if rows is None else rows.replace_schema_metadata(), problem) for part, rows, problem in read]
    tables = [rows for _, rows, _ in read if rows is not None]
    if not tables or any(rows.schema != tables[0].schema for rows in tables):
        return read
    whole, ends = pa.concat_tables(tables).combine_chunks(), itertools.accumulate(map(len, tables))
    pieces = (whole[end - len(rows) : end] for rows, end in zip(tables, ends, strict=True))
    return [(part, None if rows is None else next(pieces), problem) for part, rows, problem in read]


def _each_once(texts: pl.Series) -> pl.Series:
    """Return the same texts, of which equal ones share memory: every rank of a group writes who its members are."""
    different = texts.unique().drop_nulls()
    return different.gather(texts.cast(pl.Enum(different)).to_physical())


def _is_cut(name: str) -> bool:
    """Say whether only those rows of a table are read that belong to a stretch of the run."""
    return name not in _WHOLE and TABLES[name].order.endswith("_ns")
