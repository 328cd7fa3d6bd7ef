"""The rows of stretches of a run that follow each other, unpacked once for all of them.

A batch of a rank's file has 4,096 rows, of which a stretch of a wide run needs some hundred: to unpack all of it for
each stretch is a quarter of what such a run takes. Here the rows of each stretch lie in a temporary file of its own
until they are wanted, as they are in memory.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rankscope.analysis.readers.native.arrow_files import at_once, between
from rankscope.collectors.schema import TABLES

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.files import Part
    from rankscope.analysis.readers.native.stored_rows import Owner, Read

__all__ = ["LARGE", "UnpackedRows"]

LARGE = ("collectives", "regions")  # the tables for which it is worth it
_ROWS = 16_384  # that are written at once; until then what they were unpacked from is held


class UnpackedRows:
    """The rows of the largest tables that some stretches want, unpacked when the first of these is read."""

    def __init__(
        self,
        folder: str,
        within: Callable[[Owner], list[Read]],
        wanted: Mapping[str, Sequence[Sequence[Owner]]],
    ) -> None:
        """`folder` is where a temporary one may be. `within` reads an owner's rows; `wanted` has them by stretch."""
        self._folder = tempfile.TemporaryDirectory(dir=folder)
        self._within = within
        self._wanted = wanted
        self._files: dict[str, list[_File] | None] = {}

    def of(self, stretch: int, table: str) -> list[Read]:
        """Return the rows that this stretch wants. Where the disk has no room for all of them it unpacks for itself."""
        if table not in self._files:
            try:
                self._files[table] = self._unpacked(table)
            except OSError:
                self._files[table] = None
        files = self._files[table]
        if files is None:
            return [read for of_owner in at_once(self._within, self._wanted[table][stretch]) for read in of_owner]
        return files[stretch].read()

    def _unpacked(self, table: str) -> list[_File]:
        wanted = self._wanted[table]
        files = [_File(Path(self._folder.name, f"{table}-{number}.arrow")) for number in range(len(wanted))]
        one_at_a_time = threading.Lock()

        def unpack(numbered: tuple[int, tuple[Owner, ...]]) -> None:
            number, of_stretches = numbered
            spans = [(begin_ns, end_ns) for _, begin_ns, end_ns in of_stretches]
            every = of_stretches[0][0], min(begin for begin, _ in spans), max(end for _, end in spans)
            for part, rows, problem in self._within(every):
                pieces = [None] * len(spans) if rows is None else between(rows, TABLES[table].order, spans)
                with one_at_a_time:
                    for file, piece in zip(files, pieces, strict=True):
                        file.add(number, part, piece, problem)

        at_once(unpack, enumerate(zip(*wanted, strict=True)))
        for file in files:
            file.close()
        return files


class _File:
    """Rows of one stretch. Those with other columns than the first ones stay in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schema: pa.Schema | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0  # that are written or wait
        self._written = 0
        self._said: list[tuple[int, Part, pa.Table | slice | None, str | None]] = []

    def add(self, owner: int, part: Part, rows: pa.Table | None, problem: str | None) -> None:
        """Add what the owner's part has."""
        if rows is None or self._schema not in (None, rows.schema):
            self._said.append((owner, part, rows, problem))
            return
        self._schema = rows.schema
        self._said.append((owner, part, slice(self._rows, self._rows + rows.num_rows), problem))
        self._waiting.append(rows)
        self._rows += rows.num_rows
        if self._rows - self._written >= _ROWS:
            self._write()

    def close(self) -> None:
        """Write what waits: the file can be read."""
        if self._waiting:
            self._write()
        if self._writer:
            self._writer.close()

    def read(self) -> list[Read]:
        """Return each part with its rows, by owner."""
        written = pa.ipc.open_file(pa.memory_map(str(self._path))).read_all() if self._writer else None
        ordered = sorted(self._said, key=lambda said: said[0])
        return [
            (part, written[rows] if written is not None and isinstance(rows, slice) else rows, problem)
            for _, part, rows, problem in ordered
        ]

    def _write(self) -> None:
        self._writer = self._writer or pa.ipc.new_file(str(self._path), self._schema)
        self._writer.write_table(pa.concat_tables(self._waiting).combine_chunks())
        self._waiting, self._written = [], self._rows
