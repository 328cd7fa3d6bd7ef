"""The rows of stretches of a run that follow each other, of which each batch is unpacked once.

A batch of a rank's file has 4,096 rows, of which a stretch of a wide run needs some hundred: to unpack all of it for
each stretch is a quarter of what such a run takes. Here the rows of a batch that the stretches after the present one
want lie in temporary files, one for each, until they are read, as they are in memory.
"""

from __future__ import annotations

import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from rankscope.analysis.readers.native.arrow_files import (
    AT_THE_END,
    Batch,
    Within,
    at_once,
    between,
    read_on,
    time_in_the_middle,
)
from rankscope.analysis.readers.native.files import Part
from rankscope.collectors.schema import TABLES

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.stored_rows import StoredRows
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["OwnersRows", "Read", "Rows", "UnpackedRows"]

_PIECES = 64  # of batches that are written at once; until then each holds all of its batch
_Span = tuple[int, int]


class Read(NamedTuple):
    """Rows of parts, one part after the other, of each so many, and what is wrong with the part."""

    parts: list[Part]
    counts: list[int]
    rows: pa.Table | None
    problem: str | None

    @classmethod
    def of(cls, part: Part, rows: pa.Table | None, problem: str | None) -> Read:
        """Return what was read of one part."""
        return cls([part], [0 if rows is None else rows.num_rows], rows, problem)


class Rows(NamedTuple):
    """Good rows of parts, one part after the other, of each so many."""

    parts: list[Part]
    counts: list[int]
    table: pa.Table


class OwnersRows:
    """The rows of one rank's or node's parts of a table, read on from each stretch to the next."""

    def __init__(self, parts: Sequence[Part], span: _Span, is_closed: Callable[[Part], bool]) -> None:
        """`parts` are in the order in which they were written. No rows outside of `span` are wanted."""
        self._order = TABLES[parts[0].table].order
        self._is_closed = is_closed
        self._left: list[tuple[Part, Batch]] = []

        def middle_ns(number: int) -> int:
            at_ns = time_in_the_middle(parts[number].path, self._order)
            if at_ns == AT_THE_END and number < len(parts) - 1:  # it cannot be read
                return middle_ns(number - 1) if number else -AT_THE_END
            return at_ns

        # Of parts that follow each other those and one on either side, since their times overlap a little.
        first, last = 0, 0
        if len(parts) > 1:
            numbers = range(len(parts))
            last = bisect_right(numbers, span[1], key=middle_ns)
            first = max(bisect_left(numbers, span[0], key=middle_ns) - 1, 0)
        for number in range(first, min(last + 1, len(parts))):
            since_ns = middle_ns(number - 1) if number > first else -AT_THE_END
            self._left.append((parts[number], Batch(0, since_ns)))

    def until(self, begin_ns: int, end_ns: int) -> list[Read]:
        """Return the rows of all batches, not returned before, that may have some between two times, both included."""
        found, left = [], []
        for part, batch in self._left:
            if batch.begin_ns <= end_ns:
                within = Within(self._order, begin_ns, end_ns)
                closed = self._is_closed(part)
                rows, problem, batch = read_on(part.path, closed=closed, within=within, since=batch.number)
                found.append(Read.of(part, rows, problem))
            if batch.begin_ns < AT_THE_END:
                left.append((part, batch))
        self._left = left
        return found


class UnpackedRows:
    """The rows that some stretches of a run want; each stretch is asked for after those before it."""

    def __init__(self, stored: StoredRows, stretches: Sequence[Stretch], folder: str) -> None:
        """Take them from `stored`, of the whole run; a temporary folder is in `folder`."""
        self._stored = stored
        self._stretches = stretches
        self._folder = tempfile.TemporaryDirectory(dir=folder)
        self._tables: dict[str, _Unpacked | None] = {}

    def of(self, stretch: int, table: str) -> list[Read] | None:
        """Return the rows of a table that this stretch wants, by owner; None where the disk has no room for others."""
        if table not in self._tables:
            self._tables[table] = self._unpacked(table)
        unpacked = self._tables[table]
        try:
            return unpacked.of(stretch) if unpacked else None
        except OSError:
            self._tables[table] = None
            return None

    def _unpacked(self, table: str) -> _Unpacked:
        owners = self._stored.owners(table)
        nodes = self._stored.nodes(owners)
        spans = list(zip(*(self._stored.spans(table, nodes, stretch) for stretch in self._stretches), strict=True))
        rows = [
            OwnersRows(parts, (of[0][0], of[-1][1]), self._stored.is_closed)
            for parts, of in zip(owners, spans, strict=True)
        ]
        return _Unpacked(TABLES[table].order, rows, spans, len(self._stretches), Path(self._folder.name, table))


class _Unpacked:
    """Those of a table."""

    def __init__(
        self, order: str, owners: Sequence[OwnersRows], spans: Sequence[Sequence[_Span]], count: int, path: Path
    ) -> None:
        """`spans` has for each owner from when to when each stretch wants its rows; files' paths begin as `path`."""
        self._order = order
        self._owners = owners
        self._spans = spans
        self._files = [_File(path.with_name(f"{path.name}-{number}.arrow")) for number in range(count)]
        self._ready = -1  # stretch
        self._adding = threading.Lock()

    def of(self, stretch: int) -> list[Read]:
        """Return the rows that this stretch wants, by owner. Raises `OSError`."""
        if self._ready < stretch:
            for file in self._files[max(self._ready, 0) : stretch]:
                file.remove()
            at_once(lambda owner: self._unpack(owner, stretch), range(len(self._owners)))
            for file in self._files[stretch:]:
                file.compact()
            self._files[stretch].close()
            self._ready = stretch
        return self._files[stretch].read()

    def _unpack(self, owner: int, stretch: int) -> None:
        spans = self._spans[owner][stretch:]
        for read in self._owners[owner].until(*spans[0]):
            rows = {} if read.rows is None else between(read.rows, self._order, spans)
            none = None if read.rows is None else read.rows[:0]
            said = range(len(spans)) if read.problem else rows
            with self._adding:
                for number in said:
                    piece = Read.of(read.parts[0], rows.get(number, none), read.problem)
                    self._files[stretch + number].add(owner, piece)


class _File:
    """Rows of one stretch. Those with other columns than the first ones stay in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._schema: pa.Schema | None = None
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._waiting: list[pa.Table] = []
        self._rows = 0  # that are written or wait
        self._said: list[tuple[int, int, Read]] = []  # of an owner; without the rows from there on, as many as it says

    def add(self, owner: int, read: Read) -> None:
        """Add what was read of one of the owner's parts."""
        if read.rows is None or self._schema not in (None, read.rows.schema):
            self._said.append((owner, -1, read))
            return
        self._schema = read.rows.schema
        self._said.append((owner, self._rows, read._replace(rows=None)))
        self._waiting.append(read.rows)
        self._rows += read.counts[0]
        if len(self._waiting) >= _PIECES:
            self._write()

    def compact(self) -> None:
        """Give up what rows that wait were unpacked with."""
        if self._waiting and self._writer:
            self._write()
        elif self._waiting:
            self._waiting = [pa.concat_tables(self._waiting).combine_chunks()]

    def close(self) -> None:
        """Add no more: the file can be read."""
        if self._writer:
            self._writer.close()

    def read(self) -> list[Read]:
        """Return each part with its rows, by owner."""
        rows = None
        if self._writer:
            with pa.OSFile(str(self._path)) as file:  # mapped it would take memory beside what is free already
                rows = pa.ipc.open_file(file).read_all()
        elif self._waiting:
            rows = pa.concat_tables(self._waiting)
        said = sorted(self._said, key=lambda said: (said[0], said[2].parts[0].number))
        if rows is not None and said == self._said and all(begin >= 0 and not one.problem for _, begin, one in said):
            return [Read([one.parts[0] for _, _, one in said], [one.counts[0] for _, _, one in said], rows, None)]
        return [
            one if begin < 0 or rows is None else one._replace(rows=rows.slice(begin, one.counts[0]))
            for _, begin, one in said
        ]

    def remove(self) -> None:
        """Remove the file and what waits: they are not read any more."""
        self._waiting, self._said = [], []
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        self._writer = self._writer or pa.ipc.new_file(str(self._path), self._schema)
        self._writer.write_table(pa.concat_tables(self._waiting).combine_chunks())
        self._waiting = []
