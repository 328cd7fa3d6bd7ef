"""The rows of a run's files as they were written, with ids and codes; damage is noted once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.tables import POLARS
from rankscope.analysis.readers.bounds import check_groups, check_ranks
from rankscope.analysis.readers.native.arrow_files import at_once, read_rows
from rankscope.analysis.readers.native.files import Part
from rankscope.analysis.readers.native.unpacked_rows import OwnersRows, Read, Rows
from rankscope.analysis.readers.native.worlds import World, is_of, on_nodes
from rankscope.analysis.text.message import joined, text
from rankscope.collectors.schema import TABLES

if TYPE_CHECKING:
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["StoredRows", "Whole"]

_WHOLE = ("ranks", "groups", "gaps", "windows", "ras", "exits")  # also where only some steps of a run are read
_BESIDE_NS = {"clocks": 300_000_000_000, "completions": 60_000_000_000}  # what is read before and after a stretch
_SPARSE = 40  # rows
_OWNERS = 256  # whose rows are unpacked before what is not wanted of them is given up
# What a file's folder and name add to its rows; `node` of a rank's rows comes from `ranks`.
_WRITTEN_BY = {"rank": ("rank", "attempt"), "node": ("node",), "rank or node": ("rank", "node", "attempt")}
Whole = dict[str, tuple[pl.DataFrame, list[Gap]]]  # by table, with what was wrong with its files


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
        self.unpacked: Callable[[str], list[Read] | None] | None = None  # where stretches share what is unpacked
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
        frame = self._together(name, self._read(name))
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
        read = self._whole_files(name)
        ends = [pa.concat_tables([r[:_SPARSE], r[max(len(r) - _SPARSE, _SPARSE) :]]) for _, _, r in read]
        return self._together(name, [Rows(one.parts, [len(end)], end) for one, end in zip(read, ends, strict=True)])

    def started_ns(self, which: pl.Expr) -> int | None:
        """Return when the first of these rows of `ranks` began, on its node's clock."""
        start = self.read("ranks").filter(which)["start_ns"].min()
        return start if isinstance(start, int) else None

    def _of(self, name: str) -> list[Part]:
        return [part for part in self.parts if part.table == name]

    def _with_listed(self, ranks: pl.DataFrame) -> pl.DataFrame:
        """Return the ranks, with those that left other files only, described as far as their nodes' JSON does."""
        lost = set(self.ranks()) - set(ranks["rank"])
        rows = [
            {name: entry.get(name) for name in ("rank", "attempt", "pid", "world_size", "start_ns")} | {"node": node}
            for node, launch in self.run.items()
            for entry in launch.get("ranks", ())
            if entry.get("rank") in lost and is_of(entry, self.world.name, self.world.attempt)
        ]
        why = text("the rank's own description was lost; its node's JSON says where it ran")
        self.gaps += [Gap(table="ranks", rank=row["rank"], node=row["node"], count=None, why=why) for row in rows]
        undescribed = [{"rank": rank, "node": None} for rank in sorted(lost - {row["rank"] for row in rows})]
        why = text("nothing describes the rank: neither its own files nor its node's JSON")
        self.gaps += [Gap(table="ranks", **row, count=None, why=why) for row in undescribed]
        rows += undescribed
        return pl.concat([ranks, pl.DataFrame(rows)], how="diagonal_relaxed") if rows else ranks

    def _together(self, name: str, read: list[Rows]) -> pl.DataFrame:
        """Return the rows of these parts, and whose they are."""
        frames = [self._whole_rows(name, one) for one in _joined(read)]
        schema: dict[str, Any] = dict.fromkeys(_WRITTEN_BY[TABLES[name].partition], pl.Int32)
        schema |= {c.name: POLARS[c.type] for c in TABLES[name].columns}
        return pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=schema)

    def _read(self, name: str) -> list[Rows]:
        """Return the rows of a table's parts, of a stretch of the run those that it needs.

        What is not good is noted.
        """
        if not self.stretch or not _is_cut(name):
            return self._whole_files(name)
        shared = self.unpacked(name) if self.unpacked else None
        if shared is not None:
            return self._good(shared)
        owners = self.owners(name)
        spans, found = self.spans(name, self.nodes(owners), self.stretch), []
        wanted = list(zip(owners, spans, strict=True))
        for first in range(0, len(wanted), _OWNERS):
            some = self._good(itertools.chain(*at_once(self._within, wanted[first : first + _OWNERS])))
            # Without the rows that were unpacked with them: a slice holds all that it was cut from.
            found += [one._replace(table=one.table.combine_chunks()) for one in _joined(some)]
        return found

    def _whole_files(self, name: str) -> list[Rows]:
        def read(part: Part) -> Read:
            return Read.of(part, *read_rows(part.path, closed=self.is_closed(part)))

        return self._good(at_once(read, self._of(name)))

    def owners(self, name: str) -> list[list[Part]]:
        """Return each rank's or node's parts of a table, as they were written."""
        alike = itertools.groupby(self._of(name), key=lambda part: (part.rank, part.node))
        return [sorted(of_owner, key=lambda part: part.number) for _, of_owner in alike]

    def nodes(self, owners: Sequence[Sequence[Part]]) -> list[int | None]:
        """Return the node of each; None: it is not known."""
        node_of = dict(self.read("ranks").select("rank", "node").iter_rows())
        return [node_of.get(part.rank) if part.node is None else part.node for part, *_ in owners]

    @staticmethod
    def spans(name: str, nodes: Sequence[int | None], stretch: Stretch) -> list[tuple[int, int]]:
        """Return from when to when a stretch needs the rows of a table of owners on these nodes."""
        beside_ns, on = _BESIDE_NS.get(name, 0), {node: stretch.span_on(node) for node in set(nodes)}
        return [(on[node][0] - beside_ns, on[node][1] + beside_ns) for node in nodes]

    def _within(self, wanted: tuple[Sequence[Part], tuple[int, int]]) -> list[Read]:
        """Return the rows of one owner between two times, and what is wrong with the parts."""
        parts, span = wanted
        return OwnersRows(parts, span, self.is_closed).within(*span)

    def _good(self, read: Iterable[Read]) -> list[Rows]:
        """Return those that have good rows; what is wrong with the others, and with their parts, is noted."""
        found = []
        for parts, counts, rows, problem in read:
            if problem:
                said = text("{name} {problem}", name=parts[0].path.name, problem=problem)
                self._note(parts[0], None, joined("", (said, self._good_until(parts[0], rows))))
            if rows is not None and rows.num_rows and self._is_whole(parts, counts, rows):
                found.append(Rows(parts, counts, rows))
        return found

    def _is_whole(self, parts: Sequence[Part], counts: Sequence[int], rows: pa.Table) -> bool:
        """Say whether no column is missing that must be there; else that is noted."""
        there = set(rows.column_names)
        missing = [c.name for c in TABLES[parts[0].table].columns if c.name not in there and not c.nullable]
        for part, count in zip(parts, counts, strict=True) if missing else ():
            why = text("{name} has no column {column}: it was not read", name=part.path.name, column=missing[0])
            self._note(part, count, why)
        return not missing

    def _whole_rows(self, name: str, read: Rows) -> pl.DataFrame:
        """Return these rows, and whose they are."""
        columns = TABLES[name].columns
        of_part = np.repeat(np.arange(len(read.parts)), read.counts)
        owners = (
            pl.Series(by, [getattr(part, by) for part in read.parts], pl.Int32).gather(of_part)
            for by in _WRITTEN_BY[TABLES[name].partition]
        )
        frame = pl.DataFrame(pl.from_arrow(read.table.combine_chunks()))
        frame = frame.with_columns(pl.lit(None).alias(c.name) for c in columns if c.name not in frame.columns)
        frame = frame.select(*owners, *(pl.col(c.name).cast(POLARS[c.type]) for c in columns))
        needed = [] if self.imports else [c.name for c in columns if not c.nullable]
        if not any(frame[column].null_count() for column in needed):
            return frame
        lacking = frame.select(pl.any_horizontal(pl.col(needed).is_null())).to_series()
        for number, lost in enumerate(np.bincount(of_part[lacking.to_numpy()]).tolist()):
            if lost:
                part = read.parts[number]
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

    def is_closed(self, part: Part) -> bool:
        """Say whether every agent that could still be writing this file has ended its run properly."""
        return self.all_closed if part.node is None else self.run.get(part.node, {}).get("state") == "closed"

    def _note(self, part: Part, count: int | None, why: str) -> None:
        gap = Gap(table=part.table, rank=part.rank, node=part.node, count=count, why=why)
        if gap not in self.gaps:  # large tables may be read again
            self.gaps.append(gap)


def _joined(read: Iterable[Rows]) -> Iterator[Rows]:
    """Join what follows each other and has the same columns."""
    for _, alike in itertools.groupby(read, key=lambda one: one.table.schema):
        some = list(alike)
        parts = [part for one in some for part in one.parts]
        counts = [count for one in some for count in one.counts]
        yield Rows(parts, counts, pa.concat_tables([one.table.replace_schema_metadata() for one in some]))


def _each_once(texts: pl.Series) -> pl.Series:
    """Return the same texts, of which equal ones share memory: every rank of a group writes who its members are."""
    different = texts.unique().drop_nulls()
    return different.gather(texts.cast(pl.Enum(different)).to_physical())


def _is_cut(name: str) -> bool:
    """Say whether only those rows of a table are read that belong to a stretch of the run."""
    return name not in _WHOLE and TABLES[name].order.endswith("_ns")
