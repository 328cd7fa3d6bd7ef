"""Open a run: its tables, what was launched, and what was not seen."""

from __future__ import annotations

import importlib
import itertools
import os
import pickle
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.analysis import readers
from rankscope.analysis.model.address import PathLike
from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.base import OpenRun, Reader
from rankscope.analysis.readers.bounds import check_regular
from rankscope.analysis.readers.native import reader as native
from rankscope.analysis.readers.native.unpacked_rows import Shared
from rankscope.analysis.runs.memory_budget import check_memory
from rankscope.analysis.runs.step_range import Stretch, stretch_of
from rankscope.analysis.runs.storage import local_path
from rankscope.collectors.schema import TABLES
from rankscope.errors import BadInput

__all__ = ["Trace"]

_UNEXPECTED = (
    *(ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError),
    *(pl.exceptions.PolarsError, pl.exceptions.PanicException),
)

_OWN = "native"
_NAMED, _LOOKED_INTO = 5, 100  # folders that are named, and looked into, where the one that was given is no run


@dataclass(frozen=True, slots=True)
class Trace:
    """One run. Tables of a rank have the columns `rank`, `node` and `attempt` first, tables of a node `node`.

    `run` is what each node's agent wrote about the launch, by node.
    """

    paths: tuple[str, ...]
    source: str
    run: dict[int, dict[str, Any]]
    reader: OpenRun

    @classmethod
    def open(cls, path: PathLike | Iterable[PathLike]) -> Trace:
        """Return the run in this folder or file, or in these: one per node where the nodes share no storage.

        The format is that of the first reader that recognises them; an imported run has the source that it came from.
        What lies in object storage is copied first. Raises `BadInput`.
        A file that was cut anywhere is read as far as it is good, and `gaps()` says so.
        """
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        given = [os.fspath(p) for p in paths]
        names = [local_path(name) for name in given]
        with _damaged(", ".join(given)):
            source, chosen = _choose(names)
            reader = chosen.open_run(names)
            if folder := reader.folder:
                folder.stretch = stretch_of(folder, folder.asked)
        origin = next((str(launch["source"]) for launch in reader.run.values() if "source" in launch), source)
        return cls(paths=tuple(given), source=origin, run=reader.run, reader=reader)

    @classmethod
    def from_file(cls, file: Path) -> Trace:
        """Return what `to_file` left there: the run's files are not looked for again."""
        trace = pickle.loads(file.read_bytes())
        assert isinstance(trace, cls)
        return trace

    def to_file(self, file: Path) -> None:
        """Leave the opened run to other processes, with the tables that all parts of it have in common.

        Raises `BadInput` where these cannot be read, and OSError.
        """
        with _damaged(self.path):
            if self.reader.folder:
                self.reader.folder.read_shared()
        file.write_bytes(pickle.dumps(self, pickle.HIGHEST_PROTOCOL))

    @property
    def path(self) -> str:
        return ", ".join(self.paths)

    @property
    def has_ended(self) -> bool:
        """Whether each node's agent has closed its files: they will not change."""
        return bool(self.run) and all(launch.get("state") == "closed" for launch in self.run.values())

    @property
    def is_running(self) -> bool:
        """Whether the agent of a node still writes, as far as its files say."""
        return any(launch.get("state") == "running" for launch in self.run.values())

    def __contains__(self, name: object) -> bool:
        return name in self.reader.tables()

    @property
    def stretch(self) -> Stretch | None:
        """The steps that are read of a run that rankscope recorded; None: everything."""
        return self.reader.folder.stretch if self.reader.folder else None

    def part(self, first: int, last: int) -> Trace:
        """Return these steps of a run that rankscope recorded, both included. Raises `BadInput`."""
        with _damaged(self.path):
            assert self.reader.folder
            reader = self.reader.folder.part((first, last))
            reader.stretch = stretch_of(reader, reader.asked)
        return replace(self, reader=reader)

    def parts(self, stretches: Sequence[tuple[int, int]], shared: Shared | None) -> list[Trace]:
        """Return these stretches of the run, each as `part` does; they may share with others what is unpacked."""
        parts = [self.part(first, last) for first, last in stretches]
        if shared:
            self._share(parts, shared)
        return parts

    def share(self, shared: Shared) -> None:
        """Use what is unpacked once for stretches of a run, of which this is one. Raises `BadInput`."""
        self._share([self], shared)

    def _share(self, own: Sequence[Trace], shared: Shared) -> None:
        def stretches() -> list[Stretch]:
            return [stretch for of in shared.stretches if (stretch := self.part(*of).stretch)]

        if self.reader.folder:
            self.reader.folder.share([one.reader.folder for one in own if one.reader.folder], shared, stretches)

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
        """Return the rows of `table` in pieces, for callers that need no more than one in memory."""
        return self.reader.pieces(name)

    def check_memory(self) -> None:
        """Raise `BadInput` if its timeline does not fit into memory."""
        check_memory(self)

    def gaps(self) -> list[Gap]:
        """Return the gaps: reads every table, since a cut file shows only then."""
        with _damaged(self.path):
            found = self.reader.gaps()
        if self.stretch and self.stretch.said:
            found = [*found, Gap(table="*", rank=None, node=None, count=None, why=self.stretch.said)]
        return found


@contextmanager
def _damaged(where: str) -> Iterator[None]:
    """Raise `BadInput` in place of a reader's errors on an arbitrary file."""
    try:
        yield
    except OSError as error:
        raise BadInput(f"{where} cannot be read: {error}") from error
    except _UNEXPECTED as error:
        said = " ".join(str(error).split())[:200]
        raise BadInput(f"{where} cannot be read, it is damaged: {type(error).__name__}: {said}") from error


def _readers() -> dict[str, Reader]:
    """Every format's reader by name, in the order in which they are asked."""
    found = {m.name: _reader(m.name) for m in pkgutil.iter_modules(readers.__path__) if not m.name.startswith("_")}
    formats = {name: reader for name, reader in sorted(found.items()) if reader is not None}
    return dict(sorted(formats.items(), key=lambda named: named[1].asked))


def _reader(name: str) -> Reader | None:
    """Return the reader of the format, None for a module that helps others."""
    module = importlib.import_module(f"rankscope.analysis.readers.{name}")
    return getattr(module, "reader", None)


def _choose(names: list[str]) -> tuple[str, Reader]:
    """Return the format in which all these paths are."""
    paths = [Path(name) for name in names]
    for path in paths:
        check_regular(path)
    if paths and all(native.recognises(path) for path in paths):
        return _OWN, native  # the others need not be imported
    formats = _readers()
    for path in paths:
        if not path.exists() and not native.recognises(path):  # a world of a run need be no folder
            raise BadInput(f"{path} does not exist")
    for source, reader in formats.items():
        if paths and all(reader.recognises(path) for path in paths):
            return source, reader
    for path in paths:
        if path.is_file():
            empty = path.stat().st_size == 0
            why = "is empty" if empty else f"is in no format that can be read here ({', '.join(formats)})"
            raise BadInput(f"{path} {why}")
        foreign = [reader for source, reader in formats.items() if source != _OWN]
        runs = [sub.name for sub in _folders(path) if any(reader.recognises(sub) for reader in foreign)]
        if runs:
            more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
            raise BadInput(f"{path} is no run, but these in it can be read: {', '.join(runs[:_NAMED])}{more}; give one")
    return _OWN, native  # it says best what a run folder must hold


def _folders(path: Path) -> list[Path]:
    """Return the first folders in this one."""
    found = (sub for sub in sorted(path.iterdir()) if sub.is_dir() and not sub.name.startswith("."))
    return list(itertools.islice(found, _LOOKED_INTO))
