"""Open a run: its tables, what was launched, and what was not seen."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from rankscope.analysis.finding import Gap
from rankscope.collectors.schema import TABLES

__all__ = ["BadInput", "Reader", "Trace"]

PathLike = str | os.PathLike[str]


class BadInput(Exception):  # noqa: N818
    """What was given cannot be analysed; the message is one line: what, where, next step."""


class Reader(Protocol):
    """What a source of tables offers; one per format, in `readers/`."""

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that hold at least one file."""
        ...

    def read(self, name: str) -> pl.DataFrame:
        """The whole table, names resolved."""
        ...

    def gaps(self) -> list[Gap]:
        """Everything known to be missing, what the collectors said and what the reader found."""
        ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One run. Tables of a rank have the columns `rank`, `node` and `attempt` first, tables of a node `node`.

    `run` is what each node's agent wrote about the launch, by node.
    """

    path: str
    source: str
    run: dict[int, dict[str, Any]]
    reader: Reader

    @classmethod
    def open(cls, path: PathLike | Iterable[PathLike]) -> Trace:
        """The run in this folder, or in these: one per node where the nodes share no storage.

        Raises `BadInput`. A file that was cut anywhere is read as far as it is good, and `gaps()` says so.
        """
        from rankscope.analysis.readers import native  # it needs BadInput

        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        folders = [os.fspath(p) for p in paths]
        reader = native.open_run(folders)
        return cls(path=", ".join(folders), source="native", run=reader.run, reader=reader)

    def __contains__(self, name: object) -> bool:
        return name in self.reader.tables()

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that this run has."""
        return self.reader.tables()

    def table(self, name: str) -> pl.LazyFrame:
        """One table of the schema, ids and codes replaced by names; empty, with its columns, if the run has none."""
        if name not in TABLES:
            raise BadInput(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return self.reader.read(name).lazy()

    def gaps(self) -> list[Gap]:
        """What was not seen: reads every table, since a cut file shows only then."""
        return self.reader.gaps()
