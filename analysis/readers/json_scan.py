"""From the bytes of a trace to columns of its complete events, with flat memory: the hot path of the Kineto reader.

What counts as an event is defined by `PythonScanner`; `_scan.c` is its fast twin, used where it was built, and agrees
with it on every input. Neither makes a Python object per event: columns are filled in place, and names become codes.

Most of a trace is arguments that are not needed, so those are skimmed: only their braces and quotes are looked at, and
in kernels, copies and launches four keys. Where that could go wrong (an escape, a brace or a line break in what seems
to be a string) they are parsed with care, as are those of collectives. An event that is not wanted is left in the same
way.

Broken JSON does not end a scan. An event is taken if its members can be separated (a value may be missing or be no
JSON at all); where they cannot, the scan goes on at the next `}, {"ph"`, and the event is counted as malformed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.readers.event_text import (
    ARGUMENT_TEXTS,
    BETWEEN,
    BRIEF,
    MISSING,
    ONLY_WHOLE,
    TEXTS,
    WHOLE,
    Event,
    IncompleteError,
    MalformedError,
    next_event,
    past,
)

try:
    from rankscope.analysis.readers import _scan
except ImportError:  # it is built where there is a C compiler
    _scan = None  # type: ignore[assignment]

__all__ = [
    "META_COLUMNS",
    "MISSING_SHORT",
    "NO_NAME",
    "OTHER_NAME",
    "ROW_COLUMNS",
    "Events",
    "Filled",
    "PythonScanner",
    "Scan",
    "Scanner",
    "Source",
    "new_scanner",
    "scan_events",
]

# The columns and their order are the memory layout that both scanners write: all int64 ones, then all int32 ones.
# `ts` and `dur` are ns. `cat` to `tid`, `dims` ("Input Dims" as it stands), `collective` to `dtype` are codes of names.
ROW_COLUMNS = {
    "ts": "i8",
    "dur": "i8",
    "correlation": "i8",
    "bytes": "i8",
    "cat": "i4",
    "name": "i4",
    "pid": "i4",
    "tid": "i4",
    "stream": "i4",
    "device": "i4",
    "dims": "i4",
}
# What only communication carries; `row` is the row in the batch that it belongs to.
META_COLUMNS = {
    "in_nelems": "i8",
    "out_nelems": "i8",
    "seq": "i8",
    "src": "i8",
    "dst": "i8",
    "row": "i4",
    "collective": "i4",
    "group": "i4",
    "ranks": "i4",
    "description": "i4",
    "dtype": "i4",
}
_SIZES = [sum(np.dtype(kind).itemsize for kind in columns.values()) for columns in (ROW_COLUMNS, META_COLUMNS)]
if _scan is not None and [getattr(_scan, name, 0) for name in ("ROW_BYTES", "META_BYTES")] != _SIZES:
    raise ImportError(f"{_scan.__file__} was built from other sources: python setup.py build_ext --inplace")
MISSING_SHORT = -(1 << 31)
NO_NAME, OTHER_NAME = 0, 1  # code 1 stands for all names beyond the limits
MAX_NAMES, MAX_NAME_BYTES = 1 << 18, 32 << 20
NEED_MORE, FULL, CLOSED, LOST = range(4)  # why a scan ended

_CHUNK = 1 << 16  # in the processor's cache; from 128 kB on Dask's workers map fresh memory each time
_MAX_EVENT = 4 << 20  # an event that has not ended after this many bytes is broken
_ROWS = 1 << 13
_METAS = 1 << 11
_LONGEST_START = 256  # bytes kept while looking for the start of an event

Ints = NDArray[Any]


class Source(Protocol):
    """A source of bytes: a file, or its decompressor. `read1` may give less than is there, nothing at the end."""

    def read(self, size: int, /) -> bytes: ...

    def read1(self, size: int, /) -> bytes: ...


class Filled:
    """Columns of `types` in one block of memory, which scanners fill row by row; `count` rows are filled."""

    def __init__(self, types: Mapping[str, str], capacity: int) -> None:
        self.types = types
        self.capacity = capacity
        self.count = 0
        self.block = bytearray(sum(np.dtype(kind).itemsize for kind in types.values()) * capacity)
        self.columns: dict[str, Ints] = {}
        at = 0
        for name, kind in types.items():
            self.columns[name] = np.frombuffer(self.block, kind, capacity, at)
            at += np.dtype(kind).itemsize * capacity

    def taken(self) -> dict[str, Ints]:
        """Give the filled rows; the next ones overwrite them."""
        found = {name: values[: self.count] for name, values in self.columns.items()}
        self.count = 0
        return found


class Scanner(Protocol):
    """Takes bytes, fills columns; state goes on from call to call, since names keep their codes."""

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: Filled, metas: Filled
    ) -> tuple[int, int]:
        """Events of `data[start:end]`, from between two events on (`lost`: from anywhere on, to the next event).

        `final` says that no more bytes will come. Rows are added to those that are there. Returns up to where the data
        was used, and why it ended there.
        """
        ...

    def names(self, first: int) -> list[bytes]:
        """Return the names with code `first` and above, as in the file (escapes and all)."""
        ...

    def counts(self) -> tuple[int, int, int, int]:
        """Events seen, those malformed, complete ones left out since they have no time, names beyond the limits."""
        ...


@dataclass(frozen=True, slots=True)
class Events:
    """One batch: columns by name, which the next batch overwrites."""

    rows: dict[str, Ints]
    metas: dict[str, Ints]


@dataclass(slots=True)
class Scan:
    """The result of a whole scan; `trailer` is the text after the events."""

    trailer: bytes = b""
    cut: bool = False  # the file ended before the list of events did
    too_long: int = 0  # events given up since they did not end


def new_scanner(whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> Scanner:
    """Return the fast scanner where it was built.

    Complete events of the categories `whole` become rows with all columns; those of `brief` without correlation,
    bytes, stream and device, unless they are of a collective, and with dims if their name is in `shaped`. All others
    are counted only.
    """
    return _FastScanner(whole, brief, shaped) if _scan is not None else PythonScanner(whole, brief, shaped)


def scan_events(scanner: Scanner, source: Source, begun: bytes, result: Scan) -> Iterator[Events]:
    """Batches of the events that follow in `source` after the bytes `begun`; the rest of the story is in `result`."""
    rows, metas = Filled(ROW_COLUMNS, _ROWS), Filled(META_COLUMNS, _METAS)
    buffer = bytearray(begun)
    start, end, final, lost = 0, len(begun), False, False
    while True:
        used, why = scanner.scan(buffer, start, end, final, lost, rows, metas)
        if rows.count and (final or why in (FULL, CLOSED)):
            yield Events(rows.taken(), metas.taken())
        start, lost = used, why == LOST
        if why == FULL:
            continue
        if why == CLOSED:
            result.trailer = bytes(buffer[start:end]) + source.read(_MAX_EVENT)
            return
        if final:
            result.cut, result.trailer = True, bytes(buffer[start:end])
            return
        if lost:
            start = max(start, end - _LONGEST_START)
        elif end - start > _MAX_EVENT:
            result.too_long += 1
            lost = True
            continue
        start, end, final = _refill(buffer, start, end, source)


def _refill(buffer: bytearray, start: int, end: int, source: Source) -> tuple[int, int, bool]:
    """Move what is unused to the front, and read new bytes after it.

    Start, end, and whether the source has ended.
    """
    kept = end - start
    buffer[:kept] = buffer[start:end]  # the buffer keeps its size, or grows to what an event needs
    data = source.read1(_CHUNK)
    buffer[kept : kept + len(data)] = data
    return 0, kept + len(data), not data


class _FastScanner:
    def __init__(self, whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> None:
        self._state = _scan.new(whole, brief, shaped)

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: Filled, metas: Filled
    ) -> tuple[int, int]:
        at = start, end, final, lost
        counts = rows.count, metas.count
        rows.count, metas.count, used, why = _scan.scan(self._state, data, *at, rows.block, metas.block, *counts)
        return used, why

    def names(self, first: int) -> list[bytes]:
        return _scan.names(self._state, first)

    def counts(self) -> tuple[int, int, int, int]:
        return _scan.counts(self._state)


class PythonScanner:
    """The reference, and what runs where the extension was not built."""

    def __init__(self, whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> None:
        self._shaped = frozenset(shaped)
        self._wanted: dict[bytes | None, int] = {**dict.fromkeys(brief, BRIEF), **dict.fromkeys(whole, WHOLE)}
        self._codes: dict[bytes, int] = {}
        self._name_bytes = 0
        self._events = self._malformed = self._untimed = self._unnamed = 0

    def names(self, first: int) -> list[bytes]:
        return [b"", *self._codes][max(first, 1) - 1 :]

    def counts(self) -> tuple[int, int, int, int]:
        return self._events, self._malformed, self._untimed, self._unnamed

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: Filled, metas: Filled
    ) -> tuple[int, int]:
        at = used = start
        if lost:
            found = next_event(data, at, end)
            if found is None:
                return used, LOST
            at = found
        while True:
            used = at = past(BETWEEN, data, at, end)
            if at >= end:
                return used, NEED_MORE
            if data[at] == 0x5D:  # ]
                return at + 1, CLOSED
            if rows.count == rows.capacity or metas.count == metas.capacity:
                return used, FULL
            try:
                event = Event(self._wanted, self._shaped)
                at = event.parse(data, at, end)
            except (MalformedError, IncompleteError) as problem:
                found = None if isinstance(problem, IncompleteError) and not final else next_event(data, at, end)
                if found is None:
                    return used, NEED_MORE
                self._malformed += 1
                at = found
                continue
            self._events += 1
            row, wanted = event.members, self._wanted.get(event.members.get("cat"))
            if row.get("ph") != b"X" or wanted is None:
                continue
            if wanted == BRIEF and "collective" not in row:
                row = {name: value for name, value in row.items() if name not in ONLY_WHOLE}
            if not event.is_shaped():
                row.pop("dims", None)
            if row.get("ts", MISSING) == MISSING or row.get("dur", MISSING) < 0:
                self._untimed += 1
                continue
            self._store(rows, row)
            if "collective" in row:
                self._store(metas, {**row, "row": rows.count - 1})

    def _store(self, into: Filled, event: dict[str, Any]) -> None:
        for name, kind in into.types.items():
            value = event.get(name)
            if isinstance(value, bytes):
                value = self._code(value)
            elif value is None and (name in TEXTS.values() or name in ARGUMENT_TEXTS.values()):
                value = NO_NAME
            elif kind == "i8":
                value = MISSING if value is None else value
            elif value is None or not MISSING_SHORT < value < 1 << 31:
                value = MISSING_SHORT
            into.columns[name][into.count] = value
        into.count += 1

    def _code(self, name: bytes) -> int:
        code = self._codes.get(name)
        if code is not None:
            return code
        if len(self._codes) + 2 >= MAX_NAMES or self._name_bytes + len(name) > MAX_NAME_BYTES:
            self._unnamed += 1
            return OTHER_NAME
        self._name_bytes += len(name)
        return self._codes.setdefault(name, len(self._codes) + 2)
