"""The rows of stretches of a run that follow each other, unpacked once for all of them and all who analyze them.

A batch of a rank's file has 4,096 rows, of which a stretch of a wide run needs some hundred: to unpack all of it for
each stretch is a quarter of what such a run takes. Here the ranks and nodes that have rows of a table are divided into
shares, a few for each process. Whoever needs the table first unpacks a share, for all stretches, into a temporary file;
a share that another process is at is waited for. One that is killed there leaves the share to others.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from rankscope.analysis.readers.native.arrow_files import (
    AT_THE_END,
    Batch,
    Within,
    at_once,
    between,
    only,
    read_on,
    time_in_the_middle,
)
from rankscope.analysis.readers.native.files import Part
from rankscope.analysis.readers.workers import divided
from rankscope.collectors.schema import TABLES

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.stored_rows import StoredRows
    from rankscope.analysis.runs.step_range import Stretch

__all__ = ["OwnersRows", "Read", "Rows", "Shared", "UnpackedRows"]

_BYTES = 8_000_000  # of files whose rows are unpacked before they are written
_FEWEST = 16  # ranks or nodes in a share
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


@dataclass(frozen=True, slots=True)
class Shared:
    """Stretches, first and last steps, that share what is unpacked, in a temporary folder, in so many shares.

    This is one of the `users` of the folder, by number.
    """

    folder: str
    stretches: tuple[_Span, ...]
    shares: int
    user: int
    users: int

    def finish(self) -> None:
        """Say that this user needs no more; the last one removes the folder."""
        folder = Path(self.folder)
        if folder.exists():
            folder.joinpath(f"finished-{self.user}").touch()
            if len(list(folder.glob("finished-*"))) == self.users:
                shutil.rmtree(folder, ignore_errors=True)


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

    @property
    def size_bytes(self) -> int:
        """The size of the files that have them."""
        return sum(part.size_bytes for part, _ in self._left)

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

    def within(self, begin_ns: int, end_ns: int) -> list[Read]:
        """Return the same, without the rows of these batches that are not between the times."""
        within = Within(self._order, begin_ns, end_ns)
        return [
            Read.of(part, None if rows is None else only(rows, within), problem)
            for (part,), _, rows, problem in self.until(begin_ns, end_ns)
        ]


class UnpackedRows:
    """The rows that some stretches of a run want."""

    def __init__(self, stored: StoredRows, stretches: Sequence[Stretch], shared: Shared) -> None:
        """Take them from `stored`, of the whole run; the stretches are those of `shared`, in the order of time."""
        self._stored = stored
        self._stretches = stretches
        self._shared = shared
        self._tables: dict[str, list[_Share] | None] = {}

    def of(self, stretch: int, table: str) -> list[Read] | None:
        """Return the rows of a table that this stretch wants; None where the disk has no room for them."""
        try:
            if table not in self._tables:
                self._tables[table] = self._unpacked(table)
            shares = self._tables[table]
            return None if shares is None else [read for share in shares for read in share.of(stretch)]
        except OSError:
            self._tables[table] = None
            return None

    def _unpacked(self, table: str) -> list[_Share]:
        """Return the shares of a table, all of them unpacked. Raises `OSError`."""
        owners = self._stored.owners(table)
        if not owners:
            return []
        nodes = self._stored.nodes(owners)
        spans = list(zip(*(self._stored.spans(table, nodes, stretch) for stretch in self._stretches), strict=True))
        folder = Path(self._shared.folder)
        folder.mkdir(exist_ok=True)
        count = min(self._shared.shares, -(-len(owners) // _FEWEST))
        shares = [
            _Share(folder / f"{table}-{number}", of, self._stored.is_closed)
            for number, of in enumerate(divided(list(zip(owners, spans, strict=True)), count))
        ]
        begin = count * self._shared.user // self._shared.users  # users at work begin apart from each other
        in_turn = shares[begin:] + shares[:begin]
        for waits in (False, True):  # first what no other process is at
            for share in in_turn:
                share.make(waits=waits)
        return shares


class _Share:
    """The rows of some owners' parts of a table, in a file with a batch for each of the stretches at a time.

    An owner with a damaged file, or with other columns than the first one, is read for each stretch.
    """

    def __init__(
        self,
        path: Path,
        owners: Sequence[tuple[Sequence[Part], Sequence[_Span]]],
        is_closed: Callable[[Part], bool],
    ) -> None:
        """Each owner has its parts, and from when to when each stretch wants its rows; files' paths begin as `path`."""
        self._rows, self._index, self._lock = (path.with_name(path.name + end) for end in (".arrow", ".index", ".lock"))
        self._owners = [parts for parts, _ in owners]
        self._spans = [spans for _, spans in owners]
        self._is_closed = is_closed
        self._made: _Index | None = None

    def make(self, *, waits: bool) -> None:
        """Unpack these rows, unless they are. If another process is at it, leave it to that; or wait for its end."""
        with self._lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            if not self._index.exists():
                try:
                    self._unpack()
                except OSError:  # no room
                    self._rows.unlink(missing_ok=True)
                    raise

    def of(self, stretch: int) -> list[Read]:
        """Return the rows that a stretch wants, by owner. Raises `OSError` where they are there no more."""
        if self._made is None:
            self._made = pickle.loads(self._index.read_bytes())
        assert isinstance(self._made, _Index)
        rows, found = None, self._made.of[stretch]
        if found.batches:
            with pa.OSFile(str(self._rows)) as file:
                reader = pa.ipc.open_file(file)
                rows = pa.Table.from_batches(map(reader.get_batch, found.batches))
        parts = [self._part(owner, number) for owner, number in zip(found.owners, found.numbers, strict=True)]
        damaged = self._made.damaged
        if not damaged:
            return [] if rows is None else [Read(parts, found.counts, rows, None)]
        reads: dict[int, list[Read]] = {}
        begin = 0
        for owner, part, count in zip(found.owners, parts, found.counts, strict=True):
            if owner not in damaged:
                assert rows is not None
                reads.setdefault(owner, []).append(Read.of(part, rows.slice(begin, count), None))
            begin += count
        for owner in damaged:
            span = self._spans[owner][stretch]
            reads[owner] = OwnersRows(self._owners[owner], span, self._is_closed).within(*span)
        return [read for _, of_owner in sorted(reads.items()) for read in of_owner]

    def _part(self, owner: int, number: int) -> Part:
        parts = self._owners[owner]
        return parts[0] if len(parts) == 1 else next(part for part in parts if part.number == number)

    def _unpack(self) -> None:
        """Write the file, and what is where. Raises `OSError`."""
        made = _Index([_Found() for _ in self._spans[0]])
        schema: pa.Schema | None = None
        writer: pa.ipc.RecordBatchFileWriter | None = None
        written = 0
        for owners in self._together():
            waiting: list[list[_Piece]] = [[] for _ in made.of]
            for stretch, found in enumerate(made.of):
                for owner, ((part,), _, rows, problem) in self._until(stretch, owners):
                    if problem or (rows is not None and schema not in (None, rows.schema)):
                        made.damaged.add(owner)
                    elif rows is not None and len(rows):
                        schema = rows.schema
                        wanted = between(rows, TABLES[part.table].order, self._spans[owner][stretch:])
                        for after, some in wanted.items():
                            waiting[stretch + after].append(_Piece(owner, part.number, some))
                pieces = sorted(waiting[stretch], key=lambda piece: piece.owner)  # also of batches read before
                waiting[stretch] = []
                if pieces:
                    writer = writer or pa.ipc.new_file(str(self._rows), schema)
                    (batch,) = pa.concat_tables(piece.rows for piece in pieces).combine_chunks().to_batches()
                    writer.write_batch(batch)
                    found.add(written, pieces)
                    written += 1
        if writer:
            writer.close()
        half = self._index.with_suffix(".half")
        half.write_bytes(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))
        os.replace(half, self._index)

    def _until(self, stretch: int, owners: Sequence[tuple[int, OwnersRows]]) -> Iterator[tuple[int, Read]]:
        """Yield the batches of each owner, not yielded before, that may have rows of a stretch."""
        found = at_once(lambda one: one[1].until(*self._spans[one[0]][stretch]), owners)
        return ((owner, read) for (owner, _), reads in zip(owners, found, strict=True) for read in reads)

    def _together(self) -> Iterator[list[tuple[int, OwnersRows]]]:
        """Yield owners, by number, whose rows are unpacked together, with what has them."""
        some: list[tuple[int, OwnersRows]] = []
        size = 0
        for owner, (parts, spans) in enumerate(zip(self._owners, self._spans, strict=True)):
            rows = OwnersRows(parts, (spans[0][0], spans[-1][1]), self._is_closed)
            if some and size + rows.size_bytes > _BYTES:
                yield some
                some, size = [], 0
            some.append((owner, rows))
            size += rows.size_bytes
        if some:
            yield some


class _Piece(NamedTuple):
    owner: int
    part: int  # its number
    rows: pa.Table


@dataclass(slots=True)
class _Found:
    """What a share's file has for a stretch: in these batches, one after the other, so many rows of these parts."""

    batches: list[int] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)  # of the owner's part
    counts: list[int] = field(default_factory=list)

    def add(self, batch: int, pieces: Sequence[_Piece]) -> None:
        """Add a batch that consists of these pieces."""
        self.batches.append(batch)
        self.owners += [piece.owner for piece in pieces]
        self.numbers += [piece.part for piece in pieces]
        self.counts += [len(piece.rows) for piece in pieces]


@dataclass(slots=True)
class _Index:
    """What a share's file has, by stretch, and the owners of which it does not have all."""

    of: list[_Found]
    damaged: set[int] = field(default_factory=set)
