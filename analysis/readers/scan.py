"""From the bytes of a trace to columns of its complete events, with flat memory: the hot path of the Kineto reader.

What counts as an event is defined by `PythonScanner`; `_scan.c` is its fast twin, used where it was built, and agrees
with it on every input. Neither makes a Python object per event: columns are filled in place, and names become codes.

Broken JSON does not end a scan. An event is taken if its members can be told apart (a value may be missing or be no
JSON at all); where they cannot, the scan goes on at the next `}, {"ph"`, and the event is counted as malformed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

try:
    from rankscope.analysis.readers import _scan
except ImportError:  # it is built where there is a C compiler
    _scan = None  # type: ignore[assignment]

__all__ = [
    "META_COLUMNS",
    "MISSING",
    "MISSING_SHORT",
    "NO_NAME",
    "OTHER_NAME",
    "ROW_COLUMNS",
    "Events",
    "PythonScanner",
    "Scan",
    "Scanner",
    "Source",
    "new_scanner",
    "scan_events",
]

# The columns and their order are the memory layout that both scanners write: all int64 ones, then all int32 ones.
# `ts` and `dur` are ns. `cat` to `tid`, and `collective` to `dtype`, are codes of names.
ROW_COLUMNS = {
    "ts": "i8",
    "dur": "i8",
    "correlation": "i8",
    "cat": "i4",
    "name": "i4",
    "pid": "i4",
    "tid": "i4",
    "stream": "i4",
    "device": "i4",
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
MISSING, MISSING_SHORT = -(1 << 63), -(1 << 31)
NO_NAME, OTHER_NAME = 0, 1  # code 1 stands for all names beyond the limits
MAX_NAMES, MAX_NAME_BYTES = 1 << 18, 32 << 20
NEED_MORE, FULL, CLOSED, LOST = range(4)  # why a scan ended

_LIMIT = 3 * 10**18  # three such numbers can be added in an int64
_MAX_DIGITS = 19
_CHUNK = 1 << 19  # it and the columns stay in the processor's cache
_MAX_EVENT = 4 << 20  # an event that has not ended after this many bytes is broken
_ROWS = 1 << 13
_METAS = 1 << 11
_LONGEST_START = 256  # bytes kept while looking for the start of an event

Ints = NDArray[Any]


class Source(Protocol):
    """Where bytes come from: a file, or what unpacks one."""

    def read(self, size: int, /) -> bytes: ...


class Scanner(Protocol):
    """Takes bytes, fills columns; state goes on from call to call, since names keep their codes."""

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: bytearray, metas: bytearray
    ) -> tuple[int, int, int, int]:
        """Events of `data[start:end]`, from between two events on (`lost`: from anywhere on, to the next event).

        `final` says that no more bytes will come. Returns how many rows and metas were written, up to where the data
        was used, and why it ended there.
        """
        ...

    def names(self, first: int) -> list[bytes]:
        """The names with code `first` and above, as in the file (escapes and all)."""
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
    """What a whole scan saw; `trailer` is the text after the events."""

    trailer: bytes = b""
    cut: bool = False  # the file ended before the list of events did
    too_long: int = 0  # events given up since they did not end


def new_scanner(dropped: tuple[bytes, ...]) -> Scanner:
    """The fast scanner where it was built. Complete events of the categories `dropped` are counted only."""
    return _FastScanner(dropped) if _scan is not None else PythonScanner(dropped)


def scan_events(scanner: Scanner, source: Source, begun: bytes, result: Scan) -> Iterator[Events]:
    """Batches of the events that follow in `source` after the bytes `begun`; the rest of the story is in `result`."""
    rows, metas = _block(ROW_COLUMNS, _ROWS), _block(META_COLUMNS, _METAS)
    buffer = bytearray(begun)
    start, end, final, lost = 0, len(begun), False, False
    while True:
        n_rows, n_metas, used, why = scanner.scan(buffer, start, end, final, lost, rows, metas)
        if n_rows:
            yield Events(_columns(ROW_COLUMNS, rows, _ROWS, n_rows), _columns(META_COLUMNS, metas, _METAS, n_metas))
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
    """What is unused moves to the front and new bytes follow it; start, end, and whether the source has ended."""
    kept = end - start
    buffer[:kept] = buffer[start:end]  # the buffer keeps its size, or grows to what an event needs
    data = source.read(_CHUNK)
    buffer[kept : kept + len(data)] = data
    return 0, kept + len(data), not data


def _block(columns: dict[str, str], capacity: int) -> bytearray:
    return bytearray(sum(np.dtype(t).itemsize for t in columns.values()) * capacity)


def _columns(columns: dict[str, str], block: bytearray, capacity: int, used: int) -> dict[str, Ints]:
    arrays, at = {}, 0
    for name, kind in columns.items():
        arrays[name] = np.frombuffer(block, kind, used, at)
        at += np.dtype(kind).itemsize * capacity
    return arrays


class _FastScanner:
    def __init__(self, dropped: tuple[bytes, ...]) -> None:
        self._state = _scan.new(dropped)

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: bytearray, metas: bytearray
    ) -> tuple[int, int, int, int]:
        return _scan.scan(self._state, data, start, end, final, lost, rows, metas)

    def names(self, first: int) -> list[bytes]:
        return _scan.names(self._state, first)

    def counts(self) -> tuple[int, int, int, int]:
        return _scan.counts(self._state)


_SPACE = re.compile(rb"[ \n\r\t]*")
_BETWEEN = re.compile(rb"[ \n\r\t,]*")
_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_BARE = re.compile(rb'[^,}\]"\n{\[]*')
# A whole member whose value is neither nested nor holds an escape: what most are, at one match instead of six.
_MEMBER = re.compile(
    rb'[ \n\r\t]*"([^"\\]*)"[ \n\r\t]*:[ \n\r\t]*(?:"([^"\\]*)"|([^,}\]"\n{\[ \r\t][^,}\]"\n{\[]*))[ \n\r\t]*([,}])'
)
_BRACKET = re.compile(rb'["{}\[\]]')
_NEXT_EVENT = re.compile(rb'\}[ \n\r\t]*,[ \n\r\t]*(?=\{[ \n\r\t]*"ph")')
_NUMBER = re.compile(rb"(-?)([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?)([0-9]+))?")
_TEXTS = {b"cat": "cat", b"name": "name", b"pid": "pid", b"tid": "tid"}
_NUMBERS = {b"ts": ("ts", 3), b"dur": ("dur", 3)}
_ARGUMENT_NUMBERS = {
    b"correlation": "correlation",
    b"stream": "stream",
    b"device": "device",
    b"Seq": "seq",
    b"In msg nelems": "in_nelems",
    b"Out msg nelems": "out_nelems",
    b"Src Rank": "src",
    b"Dst Rank": "dst",
}
_ARGUMENT_TEXTS = {
    b"Collective name": "collective",
    b"Process Group Name": "group",
    b"Process Group Ranks": "ranks",
    b"Process Group Description": "description",
    b"dtype": "dtype",
}


class _MalformedError(Exception):
    """The members of an event cannot be told apart."""


class _IncompleteError(Exception):
    """The event goes on after the last byte."""


class PythonScanner:
    """The reference, and what runs where the extension was not built."""

    def __init__(self, dropped: tuple[bytes, ...]) -> None:
        self._dropped = dropped
        self._codes: dict[bytes, int] = {}
        self._name_bytes = 0
        self._events = self._malformed = self._untimed = self._unnamed = 0

    def names(self, first: int) -> list[bytes]:
        return [b"", *self._codes][max(first, 1) - 1 :]

    def counts(self) -> tuple[int, int, int, int]:
        return self._events, self._malformed, self._untimed, self._unnamed

    def scan(
        self, data: bytearray, start: int, end: int, final: bool, lost: bool, rows: bytearray, metas: bytearray
    ) -> tuple[int, int, int, int]:
        room = len(rows) // _row_size(ROW_COLUMNS), len(metas) // _row_size(META_COLUMNS)
        row_columns, meta_columns = (
            _columns(columns, block, n, n)
            for columns, block, n in ((ROW_COLUMNS, rows, room[0]), (META_COLUMNS, metas, room[1]))
        )
        n_rows = n_metas = 0
        at = used = start
        if lost:
            found = _next_event(data, at, end)
            if found is None:
                return 0, 0, used, LOST
            at = found
        while True:
            used = at = _past(_BETWEEN, data, at, end)
            if at >= end:
                return n_rows, n_metas, used, NEED_MORE
            if data[at] == 0x5D:  # ]
                return n_rows, n_metas, at + 1, CLOSED
            if n_rows == room[0] or n_metas == room[1]:
                return n_rows, n_metas, used, FULL
            try:
                event, at = _parse_event(data, at, end)
            except (_MalformedError, _IncompleteError) as problem:
                found = None if isinstance(problem, _IncompleteError) and not final else _next_event(data, at, end)
                if found is None:
                    return n_rows, n_metas, used, NEED_MORE
                self._malformed += 1
                at = found
                continue
            self._events += 1
            if event.get("ph") != b"X" or event.get("cat") in self._dropped:
                continue
            if event.get("ts", MISSING) == MISSING or event.get("dur", MISSING) < 0:
                self._untimed += 1
                continue
            self._store(row_columns, ROW_COLUMNS, n_rows, event)
            if "collective" in event:
                self._store(meta_columns, META_COLUMNS, n_metas, {**event, "row": n_rows})
                n_metas += 1
            n_rows += 1

    def _store(self, columns: dict[str, Ints], types: dict[str, str], at: int, event: dict[str, Any]) -> None:
        for name, kind in types.items():
            value = event.get(name)
            if isinstance(value, bytes):
                value = self._code(value)
            elif value is None and (name in _TEXTS.values() or name in _ARGUMENT_TEXTS.values()):
                value = NO_NAME
            elif kind == "i8":
                value = MISSING if value is None else value
            elif value is None or not MISSING_SHORT < value < 1 << 31:
                value = MISSING_SHORT
            columns[name][at] = value

    def _code(self, name: bytes) -> int:
        code = self._codes.get(name)
        if code is not None:
            return code
        if len(self._codes) + 2 >= MAX_NAMES or self._name_bytes + len(name) > MAX_NAME_BYTES:
            self._unnamed += 1
            return OTHER_NAME
        self._name_bytes += len(name)
        return self._codes.setdefault(name, len(self._codes) + 2)


def _row_size(columns: dict[str, str]) -> int:
    return sum(np.dtype(t).itemsize for t in columns.values())


def _past(pattern: re.Pattern[bytes], data: bytearray, at: int, end: int) -> int:
    found = pattern.match(data, at, end)
    assert found is not None  # these patterns match nothing too
    return found.end()


def _next_event(data: bytearray, at: int, end: int) -> int | None:
    found = _NEXT_EVENT.search(data, at, end)
    return found.end() if found else None


def _parse_event(data: bytearray, at: int, end: int) -> tuple[dict[str, Any], int]:
    """The event at `at`, and where it ends. Of a key that is there twice the last value counts."""
    if data[at] != 0x7B:  # {
        raise _MalformedError
    event: dict[str, Any] = {}
    return event, _parse_members(data, at + 1, end, event, in_args=False)


def _parse_members(data: bytearray, at: int, end: int, event: dict[str, Any], *, in_args: bool) -> int:
    take = _take_argument if in_args else _take_member
    while True:
        plain = _MEMBER.match(data, at, end)
        if plain is not None:
            key, text, bare, after = plain.groups()
            take(event, bytes(key), bytes(text) if bare is None else bytes(bare).rstrip(b" \r\t"))
            at = plain.end() - (after == b"}")
            continue
        at = _past_space(data, at, end)
        if data[at] == 0x7D:  # }
            return at + 1
        if data[at] != 0x22:  # "
            raise _MalformedError
        key, at = _past_string(data, at, end)
        at = _past_space(data, at, end)
        if data[at] != 0x3A:  # :
            raise _MalformedError
        at = _past_space(data, at + 1, end)
        if not in_args and key == b"args" and data[at] == 0x7B:
            at = _parse_members(data, at + 1, end, event, in_args=True)
        else:
            value, at = _past_value(data, at, end)
            take(event, key, value)
        at = _past_space(data, at, end)
        if data[at] == 0x2C:  # ,
            at += 1
        elif data[at] != 0x7D:
            raise _MalformedError


def _past_space(data: bytearray, at: int, end: int) -> int:
    at = _past(_SPACE, data, at, end)
    if at >= end:
        raise _IncompleteError
    return at


def _past_string(data: bytearray, at: int, end: int) -> tuple[bytes, int]:
    found = _STRING.match(data, at, end)
    if found is None:
        raise _IncompleteError
    return bytes(found[1]), found.end()


def _past_value(data: bytearray, at: int, end: int) -> tuple[bytes | None, int]:
    """A string's inside, or the text of what is nested or bare; None if that is empty. And where it ends."""
    first = data[at]
    if first == 0x22:
        return _past_string(data, at, end)
    if first in b"{[":
        after = _past_nested(data, at, end)
        return bytes(data[at:after]), after
    after = _past(_BARE, data, at, end)
    if after >= end:
        raise _IncompleteError
    return bytes(data[at:after]).rstrip(b" \n\r\t") or None, after


def _past_nested(data: bytearray, at: int, end: int) -> int:
    depth = 0
    while True:
        found = _BRACKET.search(data, at, end)
        if found is None:
            raise _IncompleteError
        if found[0] == b'"':
            _, at = _past_string(data, found.start(), end)
            continue
        at = found.end()
        depth += 1 if found[0] in b"{[" else -1
        if depth == 0:
            return at


def _take_member(event: dict[str, Any], key: bytes, value: bytes | None) -> None:
    if key == b"ph":
        event["ph"] = value
    elif key in _NUMBERS:
        name, scale = _NUMBERS[key]
        event[name] = _number(value, scale)
    elif key in _TEXTS:
        event[_TEXTS[key]] = value


def _take_argument(event: dict[str, Any], key: bytes, value: bytes | None) -> None:
    if key in _ARGUMENT_NUMBERS:
        event[_ARGUMENT_NUMBERS[key]] = _number(value, 0)
    elif key in _ARGUMENT_TEXTS:
        event[_ARGUMENT_TEXTS[key]] = value


def _number(text: bytes | None, scale: int) -> int:
    """The decimal number times 10**scale, rounded half away from zero; MISSING if it is no number or too large.

    Exact: a float of absolute microseconds is good to a quarter of one only. Digits beyond 19 are cut.
    """
    found = _NUMBER.fullmatch(text or b"")
    if found is None:
        return MISSING
    minus, whole, fraction, exponent_sign, exponent = found.groups(b"")
    whole = whole.lstrip(b"0")
    if len(whole) > _MAX_DIGITS:
        return MISSING
    zeros = 0 if whole else len(fraction) - len(fraction.lstrip(b"0"))
    fraction = fraction[: zeros + _MAX_DIGITS - len(whole)]
    value = int(whole + fraction or b"0")
    written = int(exponent.lstrip(b"0")[:5] or b"0")
    power = scale - len(fraction) + (-written if exponent_sign == b"-" else written)
    if value and power > 2 * _MAX_DIGITS:
        return MISSING
    if power >= 0 or not value:
        value *= 10 ** max(power, 0) if value else 1
    elif power < -4 * _MAX_DIGITS - len(fraction):
        value = 0
    else:
        value, rest = divmod(value, 10**-power)
        value += 2 * rest >= 10**-power
    if value > _LIMIT:
        return MISSING
    return -value if minus else value
