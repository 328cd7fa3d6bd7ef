"""Arrow files that can be read at any moment: a live part grows batch by batch, a full one is sealed.

A live part is an Arrow IPC file without its footer: skip 8 bytes of magic and read a stream up to the torn batch.
A sealed part is a whole Arrow IPC file, sorted, with a checksum, in batches of which a reader needs few. A disk that
is full costs rows, which are counted, never the files that are there already; what the count takes is reserved
beforehand.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc

from rankscope.collectors.checksum import METADATA, is_intact, with_checksum
from rankscope.collectors.schema import TABLES, Table
from rankscope.collectors.untyped import Foreign

__all__ = ["SEAL_ROWS", "Partition", "RunFolder", "Sealed", "batch_of", "read_live", "write_sealed"]

SEAL_ROWS = 65_536
_BATCH_ROWS = 4_096  # fewer take longer to read all, more to read some; the file is as large
MAGIC_BYTES = 8
RETRY_S = 5.0
KEPT_BATCHES = 10_000
RESERVE_BYTES = 65_536

# Small and irreplaceable: kept in memory until the disk takes them. Of the others, rows are dropped and counted.
_KEPT = ("ranks", "groups", "strings", "gaps", "exits")

_SCHEMAS = {
    table.name: pa.schema([pa.field(c.name, pa.type_for_alias(c.type), nullable=c.nullable) for c in table.columns])
    for table in TABLES.values()
}
_LIVE = pa.ipc.IpcWriteOptions(compression=pa.Codec("lz4"), use_threads=False)  # of few rows in a fifth of zstd's time
_SEALED = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 3), use_threads=False)  # once per part
_SMALL = pa.ipc.IpcWriteOptions(use_threads=False)
_SMALL_ROWS = 16  # or fewer are as small without compression, and read in a tenth of the time


class RunFolder:
    """The folder of a run; it may be renamed while files in it are open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused: list[tuple[_TableWriter, str]] = []  # with the partition: small tables that found no space
        self._reserve = ""
        self._is_spent = False

    def reserve(self) -> None:
        """Reserve space for rows that a full disk must not cost. Raises OSError if nothing can be written at all."""
        folder = self.path / "run"
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".reserve-", dir=folder)
        self._reserve = Path(name).name
        with open(handle, "wb", buffering=0) as file, contextlib.suppress(OSError):  # then there is none
            file.write(os.urandom(RESERVE_BYTES))

    def spend_reserve(self) -> None:
        """Free the reserved space for what must be written now. Raises OSError."""
        os.truncate(self.path / "run" / self._reserve, 0)
        self._is_spent = True

    def refill_reserve(self) -> None:
        """Reserve the space again, if there is any."""
        if self._is_spent:
            path = self.path / "run" / self._reserve
            try:
                path.write_bytes(os.urandom(RESERVE_BYTES))
                self._is_spent = False
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)

    @property
    def gone(self) -> bool:
        """Whether the folder was removed: one under its name now belongs to another run."""
        try:
            os.stat(self.path / "run" / self._reserve)
        except FileNotFoundError:
            return True
        except OSError:
            pass  # a file system that does not answer now
        return False

    def close(self) -> None:
        """Write what the partitions still hold, in the space that was kept for it."""
        with contextlib.suppress(OSError):
            (self.path / "run" / self._reserve).unlink()
        self._reserve = ""
        for writer, key in self.refused:
            folder = self.path / writer.table.name / key
            writer.flush(folder, at_any_rate=True)
            writer.seal(folder)

    def rename(self, old: str, new: str) -> None:
        """Turn what the partition `old` ("node=00000") has written into that of `new`. Raises OSError."""
        for path in self.path.glob(f"*/*{old}*"):
            os.rename(path, path.with_name(path.name.replace(old, new)))

    def move(self, name: str) -> None:
        """Move all files to `name` beside the old folder, which is removed if it is empty. Raises OSError."""
        old, new = self.path, self.path.parent / name
        if old == new:
            return
        new.mkdir(exist_ok=True)
        folders, reserve, self._reserve = [], self._reserve, ""  # if this fails halfway, its place is unknown
        for folder, _, files in os.walk(old):
            target = new / Path(folder).relative_to(old)
            target.mkdir(exist_ok=True)
            for file in files:
                os.rename(Path(folder) / file, target / file)
            folders.append(folder)
        self.path, self._reserve = new, reserve
        for folder in reversed(folders):
            try:
                os.rmdir(folder)
            except OSError:
                break  # it is not empty


def batch_of(table: str, columns: Mapping[str, Any]) -> pa.RecordBatch:
    """One batch of `table` from arrays, masked arrays or lists by column name; what may be null may be left out.

    Raises ValueError or TypeError (pyarrow's are both) when a value does not fit, or is null where none may be.
    """
    schema = _SCHEMAS[table]
    rows = len(next(iter(columns.values())))
    arrays = [
        pa.nulls(rows, field.type)
        if field.nullable and field.name not in columns
        else _array(columns[field.name], field.type)
        for field in schema
    ]
    for field, array in zip(schema, arrays, strict=True):
        if array.null_count and not field.nullable:
            raise ValueError(f"{table}.{field.name} is null")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Foreign, kind: pa.DataType) -> pa.Array:  # whatever pyarrow takes
    if isinstance(values, np.ma.MaskedArray):
        return pa.array(values.data, type=kind, mask=np.ma.getmaskarray(values))
    return pa.array(values, type=kind)


def read_live(path: Path) -> pa.Table:
    """All whole batches of a part that has no footer yet."""
    batches = []
    with pa.OSFile(str(path)) as source:
        source.seek(MAGIC_BYTES)
        with pa.ipc.open_stream(source) as stream:
            while True:
                try:
                    batches.append(stream.read_next_batch())
                except (StopIteration, OSError, pa.ArrowInvalid):
                    return pa.Table.from_batches(batches, schema=stream.schema)


def write_sealed(folder: Path, prefix: str, rows: pa.Table, first: int = 0) -> int:
    """Write the rows as sealed parts, in the order they have; return the number after the last. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for begin in range(0, rows.num_rows, SEAL_ROWS):
        _write_file(folder / _part_name(prefix, first), rows.slice(begin, SEAL_ROWS).combine_chunks())
        first += 1
    return first


def _part_name(prefix: str, number: int) -> str:
    return f"{prefix}part-{number:04d}.arrow"


def _write_file(path: Path, rows: pa.Table) -> None:
    rows, sink = rows.replace_schema_metadata(METADATA), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema, options=_SEALED if rows.num_rows > _SMALL_ROWS else _SMALL) as file:
        file.write_table(rows, max_chunksize=_BATCH_ROWS)
    path.write_bytes(with_checksum(sink.getvalue().to_pybytes()))


@dataclass(frozen=True, slots=True)
class Sealed:
    """A finished file: its number, its size, and the first value of the column that orders its rows.

    `last` is the last value in it and the files before. `reduced`: some of its rows were removed.
    """

    number: int
    size_bytes: int
    first: int
    last: int
    reduced: bool = False


def _replace_file(path: Path, number: int, rows: pa.Table, order: str, *, reduced: bool = False) -> Sealed:
    """Replace the file's rows by these, in the order they have. On OSError it is unchanged."""
    unfinished = path.with_name(f".{path.name}.sealing")
    try:
        _write_file(unfinished, rows.combine_chunks())
        size_bytes = unfinished.stat().st_size
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    first, last = (rows[order][at].as_py() or 0 for at in (0, -1))  # null in `gaps` only
    return Sealed(number, size_bytes, first, last, reduced)


class _Part:
    """One file while it is written. Raises OSError when the disk does not take it."""

    def __init__(self, folder: Path, prefix: str, number: int, schema: pa.Schema) -> None:
        for inside in (folder.parent, folder):  # not the run's own: where that has been removed nothing is written
            inside.mkdir(exist_ok=True)
        while True:
            self.name = _part_name(prefix, number)
            try:
                os.close(os.open(folder / self.name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                break
            except FileExistsError:
                number += 1
        self.number = number
        self.rows = 0
        self.whole_bytes = 0
        self._times: list[int] = []  # the first and the last of each batch, as far as known
        self._sink = pa.OSFile(str(folder / self.name), "wb")  # unbuffered: written bytes are in the kernel
        self._writer = pa.ipc.new_file(self._sink, schema, options=_LIVE)

    def write(self, batch: pa.RecordBatch, order: str) -> None:
        self._writer.write_batch(batch)
        self.whole_bytes = self._sink.tell()
        self.rows += batch.num_rows
        ends = pc.min_max(batch[order])
        self._times += [ends[end].as_py() or 0 for end in ("min", "max")]  # null in `gaps` only

    def abandon(self, folder: Path) -> Sealed | None:
        """Cut the file after its last whole batch, or remove it if it has none. Nothing may be appended any more."""
        self._close()
        try:
            if self.rows:
                os.truncate(folder / self.name, self.whole_bytes)
            else:
                os.unlink(folder / self.name)
        except OSError:
            pass  # a torn batch at the end is what readers expect anyway
        return self._as_it_is()

    def seal(self, folder: Path, order: str) -> Sealed | None:
        """Complete and sort the file; where the disk refuses, it stays as it is, without a footer."""
        self._close()
        try:
            rows = read_live(folder / self.name).sort_by(order)
            return _replace_file(folder / self.name, self.number, rows, order)
        except (OSError, pa.ArrowInvalid):
            return self._as_it_is()

    def _as_it_is(self) -> Sealed | None:
        if not self.rows:
            return None
        return Sealed(self.number, self.whole_bytes, min(self._times), max(self._times))

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._sink.close()


class _TableWriter:
    """One table of one partition."""

    def __init__(self, table: Table, prefix: str) -> None:
        self.table = table
        self.lost = 0
        self.lost_since_ns = 0
        self.why = ""
        self.sealed: list[Sealed] = []
        self._prefix = prefix
        self._pending: list[pa.RecordBatch] = []
        self._part: _Part | None = None
        self._next_part = 0
        self._retry_at = 0.0

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._pending.append(batch)

    @property
    def waiting(self) -> bool:
        """Whether rows are not written yet."""
        return bool(self._pending)

    def flush(self, folder: Path, *, at_any_rate: bool = False) -> None:
        """Write the added rows; if the disk refuses, keep them (small tables) or count them in `lost`."""
        if not self._pending:
            return
        batches = self._pending
        (batch,) = batches if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()
        self._pending = []
        while batch.num_rows:
            piece = batch.slice(0, SEAL_ROWS - (self._part.rows if self._part else 0))
            if not self._write(folder, piece, at_any_rate):
                self._keep_or_lose(batch)
                return
            batch = batch.slice(piece.num_rows)
            if self._part and self._part.rows >= SEAL_ROWS:
                self.seal(folder)

    def seal(self, folder: Path) -> None:
        if self._part:
            self._finish(self._part.seal(folder, self.table.order))

    def _finish(self, sealed: Sealed | None) -> None:
        """End the part that is being written."""
        if sealed:
            last = max([sealed.last, *(part.last for part in self.sealed[-1:])])
            self.sealed.append(replace(sealed, last=last))
        self._part = None

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return sum(part.size_bytes for part in self.sealed) + (self._part.whole_bytes if self._part else 0)

    def name_of(self, part: Sealed) -> str:
        return _part_name(self._prefix, part.number)

    def rows(self, folder: Path, parts: Iterable[Sealed]) -> pa.Table:
        """Return the rows of these parts. Raises OSError or ArrowInvalid."""
        tables = [_SCHEMAS[self.table.name].empty_table()]
        for part in parts:
            path = folder / self.name_of(part)
            try:
                data = path.read_bytes()
                if not is_intact(data):
                    raise OSError(f"{path} is damaged")
                tables.append(pa.ipc.open_file(pa.BufferReader(data)).read_all())
            except pa.ArrowInvalid:  # the disk did not take its footer
                tables.append(read_live(path))
        return pa.concat_tables(tables)

    def live_rows(self, folder: Path) -> pa.Table:
        """Return the rows of the part that is being written. Raises OSError."""
        return read_live(folder / self._part.name) if self._part else _SCHEMAS[self.table.name].empty_table()

    def reduce(self, folder: Path, parts: Sequence[Sealed], rows: pa.Table) -> None:
        """Replace consecutive sealed parts by these of their rows. Raises OSError."""
        rows, left = rows.sort_by(self.table.order), []
        numbers = iter([part.number for part in parts])
        for begin in range(0, rows.num_rows, SEAL_ROWS):
            number, few = next(numbers), rows.slice(begin, SEAL_ROWS)
            path = folder / _part_name(self._prefix, number)
            left.append(_replace_file(path, number, few, self.table.order, reduced=True))
        for number in numbers:
            (folder / _part_name(self._prefix, number)).unlink(missing_ok=True)
        at = self.sealed.index(parts[0])
        self.sealed[at : at + len(parts)] = left

    def _write(self, folder: Path, batch: pa.RecordBatch, at_any_rate: bool) -> bool:
        if not at_any_rate and time.monotonic() < self._retry_at:
            return False
        try:
            if self._part is None:
                self._part = _Part(folder, self._prefix, self._next_part, batch.schema)
                self._next_part = self._part.number + 1
            self._part.write(batch, self.table.order)
        except OSError as error:
            self.why = os.strerror(error.errno) if error.errno else str(error)
            self._retry_at = time.monotonic() + RETRY_S
            if self._part:
                self._finish(self._part.abandon(folder))
            return False
        return True

    def _keep_or_lose(self, batch: pa.RecordBatch) -> None:
        if self.table.name in _KEPT and len(self._pending) < KEPT_BATCHES:
            self._pending.append(batch)
        else:
            self.lost_since_ns = self.lost_since_ns or time.perf_counter_ns()
            self.lost += batch.num_rows


class Partition:
    """All tables of one rank's attempt ("rank=00003", prefix "a0-") or of one node ("node=00000")."""

    def __init__(self, run: RunFolder, key: str, prefix: str = "") -> None:
        self._run = run
        self.key = key
        self.closed = False
        self._prefix = prefix
        self._writers: dict[str, _TableWriter] = {}

    def add(self, table: str, columns: Mapping[str, Any]) -> None:
        """Add rows, to be written with the next flush. Raises ValueError or TypeError if they do not fit."""
        if table not in self._writers:
            self._writers[table] = _TableWriter(TABLES[table], self._prefix)
        self._writers[table].add(batch_of(table, columns))

    def add_row(self, table: str, row: Mapping[str, Any]) -> None:
        self.add(table, {name: [value] for name, value in row.items()})

    def gap(
        self,
        table: str,
        why: str,
        *,
        source: str = "agent",
        start_ns: int | None = None,
        end_ns: int | None = None,
        count: int | None = None,
    ) -> None:
        row = {"start_ns": start_ns, "end_ns": end_ns, "table": table, "source": source, "count": count, "why": why}
        self.add_row("gaps", row)

    def flush(self) -> None:
        """Write all rows so far (or keep them, or count them as lost)."""
        for writer in self._in_order():
            lost_before = writer.lost
            if writer.waiting:
                writer.flush(self._folder(writer))
            if lost_before and writer.lost == lost_before:
                self._report_loss(writer)

    def close(self) -> None:
        """Write all rows and seal all parts, as far as the disk takes them; `RunFolder` keeps the rest."""
        self.closed = True
        for writer in self._in_order():
            writer.flush(self._folder(writer), at_any_rate=True)
            writer.seal(self._folder(writer))
            if writer.lost:
                self._report_loss(writer)
        gaps = self._writers.get("gaps")
        if gaps:
            gaps.flush(self._folder(gaps), at_any_rate=True)
            gaps.seal(self._folder(gaps))
        self._run.refused += [(writer, self.key) for writer in self._writers.values() if writer.waiting]

    @property
    def size_bytes(self) -> int:
        """Size of its files."""
        return sum(writer.size_bytes for writer in self._writers.values())

    def sealed(self, table: str) -> Sequence[Sealed]:
        """Return the table's finished files, in the order in which they were written."""
        return self._writers[table].sealed if table in self._writers else ()

    def path(self, table: str, part: Sealed) -> Path:
        """Return the current path of this file of the table."""
        writer = self._writers[table]
        return self._folder(writer) / writer.name_of(part)

    def rows(self, table: str, parts: Iterable[Sealed]) -> pa.Table:
        """Return the rows of these files. Raises OSError or ArrowInvalid."""
        writer = self._writers.get(table)
        return writer.rows(self._folder(writer), parts) if writer else _SCHEMAS[table].empty_table()

    def live_rows(self, table: str) -> pa.Table:
        """Return the rows of the file that is being written. Raises OSError."""
        writer = self._writers.get(table)
        return writer.live_rows(self._folder(writer)) if writer else _SCHEMAS[table].empty_table()

    def reduce(self, table: str, parts: Sequence[Sealed], rows: pa.Table | None = None) -> None:
        """Replace these consecutive files by files of these rows, or by none. Raises OSError."""
        writer = self._writers[table]
        none = _SCHEMAS[table].empty_table()
        writer.reduce(self._folder(writer), parts, none if rows is None else rows)

    def _in_order(self) -> Sequence[_TableWriter]:
        """Return the writers, that of gaps last, as the others add to it."""
        return sorted(self._writers.values(), key=lambda writer: writer.table.name == "gaps")

    def _folder(self, writer: _TableWriter) -> Path:
        return self._run.path / writer.table.name / self.key

    def _report_loss(self, writer: _TableWriter) -> None:
        now_ns = time.perf_counter_ns()
        why = f"the rows could not be written: {writer.why}"
        self.gap(writer.table.name, why, start_ns=writer.lost_since_ns, end_ns=now_ns, count=writer.lost)
        writer.lost, writer.lost_since_ns = 0, 0
