"""Open a run: its tables, what was launched, and what was not seen."""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.native.reader import NativeReader
from rankscope.analysis.runs.memory_budget import check_memory
from rankscope.analysis.runs.step_range import Stretch, stretch_of
from rankscope.analysis.runs.storage import local_path
from rankscope.collectors.schema import TABLES
from rankscope.errors import BadInput

__all__ = ["Reader", "Trace"]

_UNEXPECTED = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError),
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException),
)
PathLike = str | os.PathLike[str]

_OWN = "native"
_NAMED, _LOOKED_INTO = 5, 100  # folders that are named, and looked into, where the one that was given is no run
_ASKED_LAST = ("kineto", "chakra")  # other formats are Chrome traces too; execution traces lie beside profiles


class Reader(Protocol):
    """What a source of tables offers.

    One module of `readers/` per format; being in that folder is the registration, and the module's name is the
    source's. It has `recognises(path: Path) -> bool`, cheap and strict, and `open_run(paths: list[str]) -> Reader`,
    which raises `BadInput`. A module whose name starts with `_`, or that has no `recognises`, is no reader.
    """

    run: dict[int, dict[str, Any]]

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that hold at least one file."""
        ...

    def read(self, name: str) -> pl.DataFrame:
        """The whole table, names resolved."""
        ...

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """The same rows in pieces, each of them in order, so that no more than one needs to be in memory."""
        ...

    def rows(self, name: str) -> int:
        """How many rows the table has, without reading it; those of files that were cut may not count."""
        ...

    def gaps(self) -> list[Gap]:
        """Everything known to be missing, what the collectors said and what the reader found."""
        ...

    def cannot(self) -> Mapping[str, str]:
        """What no trace of this format allows, by name of the timeline's table or of a collector: why, as a clause.

        `{"breakdown": "…"}` leaves the host's time uncut; `{"gc_pauses": "…"}` leaves unchecked what lives on that
        collector, however much else was seen.
        """
        ...


@dataclass(frozen=True, slots=True)
class Trace:
    """One run. Tables of a rank have the columns `rank`, `node` and `attempt` first, tables of a node `node`.

    `run` is what each node's agent wrote about the launch, by node.
    """

    paths: tuple[str, ...]
    source: str
    run: dict[int, dict[str, Any]]
    reader: Reader

    @classmethod
    def open(cls, path: PathLike | Iterable[PathLike]) -> Trace:
        """The run in this folder or file, or in these: one per node where the nodes share no storage.

        The format is that of the first reader that recognises them; an imported run has the source that it came from.
        What lies in object storage is copied first. Raises `BadInput`.
        A file that was cut anywhere is read as far as it is good, and `gaps()` says so.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        given = [os.fspath(p) for p in paths]
        names = [local_path(name) for name in given]
        with _damaged(", ".join(given)):
            source, module = _choose(names)
            reader = module.open_run(names)
            if isinstance(reader, NativeReader):
                reader.stretch = stretch_of(reader, reader.asked)
        origin = next((str(launch["source"]) for launch in reader.run.values() if "source" in launch), source)
        return cls(paths=tuple(given), source=origin, run=reader.run, reader=reader)

    @property
    def path(self) -> str:
        return ", ".join(self.paths)

    def __contains__(self, name: object) -> bool:
        return name in self.reader.tables()

    @property
    def stretch(self) -> Stretch | None:
        """The steps that are read of a run that rankscope recorded; None: everything."""
        return getattr(self.reader, "stretch", None)

    def tables(self) -> tuple[str, ...]:
        """Names of the tables that this run has."""
        return self.reader.tables()

    def table(self, name: str) -> pl.LazyFrame:
        """One table of the schema, ids and codes replaced by names; empty, with its columns, if the run has none."""
        if name not in TABLES:
            raise BadInput(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        with _damaged(self.path):
            return self.reader.read(name).lazy()

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        """The rows of `table` in pieces, for those who need no more than one in memory."""
        return self.reader.pieces(name)

    def check_memory(self) -> None:
        """Raise `BadInput` where its timeline does not fit into memory."""
        check_memory(self)

    def gaps(self) -> list[Gap]:
        """What was not seen: reads every table, since a cut file shows only then."""
        with _damaged(self.path):
            return self.reader.gaps()


@contextmanager
def _damaged(where: str) -> Iterator[None]:
    """Raise `BadInput` in place of what a reader meets in a file in which anything may stand."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{where} cannot be read: {error}") from error
    except _UNEXPECTED as error:
        said = " ".join(str(error).split())[:200]
        raise BadInput(f"{where} cannot be read, it is damaged: {type(error).__name__}: {said}") from error


def _readers() -> dict[str, ModuleType]:
    """Every format's module by name, rankscope's own first and the least particular last."""
    from rankscope.analysis import readers  # they need BadInput

    names = [m.name for m in pkgutil.iter_modules(readers.__path__) if not m.name.startswith("_")]
    modules = {name: _reader(name) for name in sorted(names)}
    formats = {name: module for name, module in modules.items() if hasattr(module, "recognises")}
    last = {name: formats.pop(name) for name in _ASKED_LAST if name in formats}
    return {_OWN: formats.pop(_OWN), **formats, **last}


def _reader(name: str) -> ModuleType:
    return importlib.import_module(f"rankscope.analysis.readers.{name}")


def _choose(names: list[str]) -> tuple[str, ModuleType]:
    """The format in which all these paths are."""
    from rankscope.analysis.readers.bounds import check_regular  # it needs BadInput

    paths = [Path(name) for name in names]
    for path in paths:
        check_regular(path)
    own = _reader(_OWN)
    if paths and all(own.recognises(path) for path in paths):
        return _OWN, own  # the others need not be imported
    readers = _readers()
    for path in paths:
        if not path.exists() and not readers[_OWN].recognises(path):  # a world of a run need be no folder
            raise BadInput(f"{path} does not exist")
    for source, module in readers.items():
        if paths and all(module.recognises(path) for path in paths):
            return source, module
    for path in paths:
        if path.is_file():
            empty = path.stat().st_size == 0
            why = "is empty" if empty else f"is in no format that can be read here ({', '.join(readers)})"
            raise BadInput(f"{path} {why}")
        foreign = [module for source, module in readers.items() if source != _OWN]
        runs = [sub.name for sub in _folders(path) if any(module.recognises(sub) for module in foreign)]
        if runs:
            more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
            raise BadInput(f"{path} is no run, but these in it can be read: {', '.join(runs[:_NAMED])}{more}; give one")
    return _OWN, readers[_OWN]  # it says best what a run folder must hold


def _folders(path: Path) -> list[Path]:
    """The first folders in this one."""
    found = (sub for sub in sorted(path.iterdir()) if sub.is_dir() and not sub.name.startswith("."))
    return list(itertools.islice(found, _LOOKED_INTO))
