"""Shared by the readers of foreign formats: rows to tables of the schema, and a reader that holds them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.tables import in_order, schema_of
from rankscope.analysis.readers.bounds import check_groups, check_ranks
from rankscope.analysis.text.message import text
from rankscope.collectors.schema import TABLES
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.run_folder import NativeReader

__all__ = [
    "NO_STEPS",
    "FrameReader",
    "OpenRun",
    "Reader",
    "by_name",
    "files_in",
    "fits",
    "gap",
    "in_one_line",
    "shaped",
    "table",
]

NO_STEPS = text("the format does not mark where steps begin")
_NUMBER = re.compile(r"([0-9]+)")

Row = Mapping[str, Any]


class OpenRun(Protocol):
    """A run that was opened, as a source of tables."""

    @property
    def run(self) -> dict[int, dict[str, Any]]:
        """The launch as each node's agent wrote it, by node."""
        ...

    @property
    def folder(self) -> NativeReader | None:
        """The run folder that it is, of which a part can be read; None: another tool's files, which are read whole."""
        ...

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that hold at least one file."""
        ...

    def read(self, name: str) -> pl.DataFrame:
        """Return the whole table, names resolved."""
        ...

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """Return the same rows in pieces, each of them in order, so that no more than one needs to be in memory."""
        ...

    def rows(self, name: str) -> int:
        """Return how many rows the table has, without reading it; those of files that were cut may not count."""
        ...

    def gaps(self) -> list[Gap]:
        """Everything known to be missing, by the collectors and by the reader."""
        ...

    def cannot(self) -> Mapping[str, str]:
        """Return what traces of this format cannot show, by name of the timeline's table or of a collector.

        Why, as a clause.

        `{"breakdown": "…"}` leaves the host's time uncut; `{"gc_pauses": "…"}` leaves unchecked what lives on that
        collector, however much else was seen.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """One format as the rest of rankscope sees it: `reader` in its module, whose name is the source's.

    recognises: whether this file or folder is of the format. Cheap and strict: another format's must not pass.
    open_run: the run that these paths hold. Raises `BadInput`.
    asked: its turn; higher than 0 where other formats are of this kind too, or lie beside it.
    """

    recognises: Callable[[Path], bool]
    open_run: Callable[[list[str]], OpenRun]
    asked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameReader:
    """A run whose tables are in memory, or can be made in pieces (`large`).

    `lacks` says by table what no trace of the format can show.
    """

    frames: Mapping[str, pl.DataFrame]
    missing: Sequence[Gap] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    large: Mapping[str, Callable[[], Iterator[pl.DataFrame]]] = field(default_factory=dict)
    large_rows: Mapping[str, int] = field(default_factory=dict)
    run: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise `BadInput` where the ranks cannot be."""
        for name in ("rank", "world_size"):
            check_ranks("the trace", self.read("ranks")[name])
        check_groups("the trace", self.read("groups")["members"])

    @property
    def folder(self) -> None:
        return None

    def tables(self) -> tuple[str, ...]:
        return tuple(name for name in TABLES if name in self.frames)

    def read(self, name: str) -> pl.DataFrame:
        return self.frames[name] if name in self.frames else pl.DataFrame(schema=schema_of(name))

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        return self.large[name]() if name in self.large else iter([self.read(name)])

    def rows(self, name: str) -> int:
        return self.large_rows[name] if name in self.large_rows else len(self.read(name))

    def gaps(self) -> list[Gap]:
        return list(self.missing)

    def cannot(self) -> Mapping[str, str]:
        return self.lacks


def fits(name: str, row: Row) -> bool:
    """Whether each whole number of the row is in the range of its column."""
    return all(
        np.iinfo(column.type).min <= value <= np.iinfo(column.type).max
        for column in TABLES[name].columns
        if "int" in column.type and type(value := row.get(column.name)) is int
    )


def table(name: str, rows: Sequence[Row]) -> pl.DataFrame:
    """Return the rows as a table of the schema, ordered; what a row lacks is null, but node and attempt are 0."""
    schema = schema_of(name)
    usual = {"node": 0, "attempt": 0}
    columns = {c: [row.get(c, usual.get(c)) for row in rows] for c in schema}
    try:
        return shaped(name, pl.DataFrame(columns, schema=schema))
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        raise BadInput(f"a value does not fit into its column of the table '{name}': the file is damaged") from None


def shaped(name: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame with the columns and types of the table, ordered as the schema says."""
    schema = schema_of(name)
    absent = {c: pl.lit(0 if c in ("node", "attempt") else None) for c in schema if c not in frame.columns}
    frame = frame.with_columns(**absent).select(pl.col(c).cast(t) for c, t in schema.items())
    order = "name" if TABLES[name].order == "name_id" else TABLES[name].order
    return in_order(frame, "rank" if "rank" in schema else "node", order)


def gap(table: str, why: str, *, rank: int | None = None, count: int | None = None) -> Gap:
    return Gap(table=table, rank=rank, node=None, count=count, why=why)


def files_in(paths: Sequence[str]) -> list[Path]:
    """Return these files, and the files that lie directly in these folders, in order of their names (2 before 10)."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted((f for f in path.iterdir() if f.is_file() and not f.name.startswith(".")), key=by_name)
        else:
            files.append(path)
    if not files:
        raise BadInput(f"{', '.join(paths)} holds no file")
    return files


def by_name(path: Path) -> tuple[int | str, ...]:
    """Sorts paths as people number them: `rank2` comes before `rank10`."""
    return tuple(int(part) if part.isdecimal() else part for part in _NUMBER.split(str(path)))


def in_one_line(error: Exception) -> str:
    """Return a library's message as one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
