"""From the bytes of a trace to columns of its complete events, with flat memory: the hot path of the Kineto reader.

What counts as an event is defined by `PythonScanner`; `_scan.c` is its fast twin, used where it was built, and agrees
with it on every input. Neither makes a Python object per event: columns are filled in place, and names become codes.

Most of a trace is arguments that nobody asks for, so those are skimmed: only their braces and quotes are looked at, and
in kernels and launches three keys. Where that could go wrong (an escape, a brace or a line break in what seems to be a
string) they are parsed with care, as are those of collectives. An event that is not wanted is left in the same way.

Broken JSON does not end a scan. An event is taken if its members can be told apart (a value may be missing or be no
JSON at all); where they cannot, the scan goes on at the next `}, {"ph"`, and the event is counted as malformed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
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
# `ts` and `dur` are ns. `cat` to `tid`, `dims` ("Input Dims" as it stands), `collective` to `dtype` are codes of names.
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
MISSING, MISSING_SHORT = -(1 << 63), -(1 << 31)
NO_NAME, OTHER_NAME = 0, 1  # code 1 stands for all names beyond the limits
MAX_NAMES, MAX_NAME_BYTES = 1 << 18, 32 << 20
NEED_MORE, FULL, CLOSED, LOST = range(4)  # why a scan ended

_LIMIT = 3 * 10**18  # three such numbers can be added in an int64
_MAX_DIGITS = 19
_SKIM = 1 << 14  # what is longer is parsed; it bounds what a file can make a skim cost
_CHUNK = 1 << 19  # it and the columns stay in the processor's cache
_MAX_EVENT = 4 << 20  # an event that has not ended after this many bytes is broken
_ROWS = 1 << 13
_METAS = 1 << 11
_LONGEST_START = 256  # bytes kept while looking for the start of an event

Ints = NDArray[Any]


class Source(Protocol):
    """Where bytes come from: a file, or what unpacks one. `read1` may give less than is there, nothing at the end."""

    def read(self, size: int, /) -> bytes: ...

    def read1(self, size: int, /) -> bytes: ...


class Scanner(Protocol):
    """Takes bytes, fills columns; state goes on from call to call, since names keep their codes."""

    def scan(
        self,
        data: bytearray,
        start: int,
        end: int,
        final: bool,
        lost: bool,
        rows: bytearray,
        metas: bytearray,
        n_rows: int,
        n_metas: int,
    ) -> tuple[int, int, int, int]:
        """Events of `data[start:end]`, from between two events on (`lost`: from anywhere on, to the next event).

        `final` says that no more bytes will come, `n_rows` and `n_metas` how many there are already. Returns how many
        there are now, up to where the data was used, and why it ended there.
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


def new_scanner(whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> Scanner:
    """The fast scanner where it was built.

    Complete events of the categories `whole` become rows with all columns; those of `brief` without correlation,
    stream and device, unless they are of a collective, and with dims if their name is in `shaped`. All others are
    counted only.
    """
    return _FastScanner(whole, brief, shaped) if _scan is not None else PythonScanner(whole, brief, shaped)


def scan_events(scanner: Scanner, source: Source, begun: bytes, result: Scan) -> Iterator[Events]:
    """Batches of the events that follow in `source` after the bytes `begun`; the rest of the story is in `result`."""
    rows, metas = _block(ROW_COLUMNS, _ROWS), _block(META_COLUMNS, _METAS)
    row_columns, meta_columns = _columns(ROW_COLUMNS, rows, _ROWS), _columns(META_COLUMNS, metas, _METAS)
    buffer = bytearray(begun)
    start, end, final, lost = 0, len(begun), False, False
    n_rows = n_metas = 0
    while True:
        n_rows, n_metas, used, why = scanner.scan(buffer, start, end, final, lost, rows, metas, n_rows, n_metas)
        if n_rows and (final or why in (FULL, CLOSED)):
            yield Events(
                {name: values[:n_rows] for name, values in row_columns.items()},
                {name: values[:n_metas] for name, values in meta_columns.items()},
            )
            n_rows = n_metas = 0
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
    data = source.read1(_CHUNK)
    buffer[kept : kept + len(data)] = data
    return 0, kept + len(data), not data


def _block(columns: dict[str, str], capacity: int) -> bytearray:
    return bytearray(sum(np.dtype(t).itemsize for t in columns.values()) * capacity)


def _columns(columns: dict[str, str], block: bytearray, capacity: int) -> dict[str, Ints]:
    arrays, at = {}, 0
    for name, kind in columns.items():
        arrays[name] = np.frombuffer(block, kind, capacity, at)
        at += np.dtype(kind).itemsize * capacity
    return arrays


class _FastScanner:
    def __init__(self, whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> None:
        self._state = _scan.new(whole, brief, shaped)

    def scan(
        self,
        data: bytearray,
        start: int,
        end: int,
        final: bool,
        lost: bool,
        rows: bytearray,
        metas: bytearray,
        n_rows: int,
        n_metas: int,
    ) -> tuple[int, int, int, int]:
        return _scan.scan(self._state, data, start, end, final, lost, rows, metas, n_rows, n_metas)

    def names(self, first: int) -> list[bytes]:
        return _scan.names(self._state, first)

    def counts(self) -> tuple[int, int, int, int]:
        return _scan.counts(self._state)


_SPACES = bytes(range(33))  # whatever is no sign counts as a space
_SPACE = re.compile(rb"[\x00-\x20]*")
_BETWEEN = re.compile(rb"[\x00-\x20,]*")
_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_BARE = re.compile(rb'[^,}\]"\n{\[]*')
# A whole member whose value is neither nested nor holds an escape: what most are, at one match instead of six.
_MEMBER = re.compile(
    rb'[\x00-\x20]*"([^"\\]*)"[\x00-\x20]*:[\x00-\x20]*'
    rb'(?:"([^"\\]*)"|([^,}\]"\n{\[\x00-\x20][^,}\]"\n{\[]*))(?=[\x00-\x20]*[,}])'
)
_BRACKET = re.compile(rb'["{}\[\]]')
_NEXT_EVENT = re.compile(rb'\}[\x00-\x20]*,[\x00-\x20]*(?=\{[\x00-\x20]*"ph")')
_NUMBER = re.compile(rb"(-?)([0-9]+)(?:\.([0-9]*))?(?:[eE]([+-]?)([0-9]+))?")
_NO_SIGN = re.compile(rb'[^"{}\\]*')
_PLAIN_STRING = re.compile(rb'"([^"{}\\\n]*)"')
_COLON = re.compile(rb"[\x00-\x20]*:[\x00-\x20]*")
_NUMBERS_IN_LISTS = re.compile(rb"\[[\[\]0-9,\x00-\x20-]*")
_BARE_NUMBER = re.compile(rb'([-0-9][^,}\]"\n{\[]*)[,}\]"\n{\[]')
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
    b"Input Dims": "dims",
}
_ONLY_WHOLE = ("correlation", "stream", "device")
_OF_WHOLE = tuple(name.encode() for name in _ONLY_WHOLE)
_OF_SHAPED = (b"Input Dims",)
_BRIEF, _WHOLE = 1, 2


class _MalformedError(Exception):
    """The members of an event cannot be told apart."""


class _IncompleteError(Exception):
    """The event goes on after the last byte."""


class _DoubtError(Exception):
    """This must be parsed with care."""


class PythonScanner:
    """The reference, and what runs where the extension was not built."""

    def __init__(self, whole: tuple[bytes, ...], brief: tuple[bytes, ...], shaped: tuple[bytes, ...]) -> None:
        self._shaped = frozenset(shaped)
        self._wanted: dict[bytes | None, int] = {**dict.fromkeys(brief, _BRIEF), **dict.fromkeys(whole, _WHOLE)}
        self._codes: dict[bytes, int] = {}
        self._name_bytes = 0
        self._events = self._malformed = self._untimed = self._unnamed = 0

    def names(self, first: int) -> list[bytes]:
        return [b"", *self._codes][max(first, 1) - 1 :]

    def counts(self) -> tuple[int, int, int, int]:
        return self._events, self._malformed, self._untimed, self._unnamed

    def scan(
        self,
        data: bytearray,
        start: int,
        end: int,
        final: bool,
        lost: bool,
        rows: bytearray,
        metas: bytearray,
        n_rows: int,
        n_metas: int,
    ) -> tuple[int, int, int, int]:
        room = len(rows) // _row_size(ROW_COLUMNS), len(metas) // _row_size(META_COLUMNS)
        row_columns, meta_columns = (
            _columns(columns, block, n)
            for columns, block, n in ((ROW_COLUMNS, rows, room[0]), (META_COLUMNS, metas, room[1]))
        )
        at = used = start
        if lost:
            found = _next_event(data, at, end)
            if found is None:
                return n_rows, n_metas, used, LOST
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
                event = _Event(self._wanted, self._shaped)
                at = event.parse(data, at, end)
            except (_MalformedError, _IncompleteError) as problem:
                found = None if isinstance(problem, _IncompleteError) and not final else _next_event(data, at, end)
                if found is None:
                    return n_rows, n_metas, used, NEED_MORE
                self._malformed += 1
                at = found
                continue
            self._events += 1
            row, wanted = event.members, self._wanted.get(event.members.get("cat"))
            if row.get("ph") != b"X" or wanted is None:
                continue
            if wanted == _BRIEF and "collective" not in row:
                row = {name: value for name, value in row.items() if name not in _ONLY_WHOLE}
            if not event.is_shaped():
                row.pop("dims", None)
            if row.get("ts", MISSING) == MISSING or row.get("dur", MISSING) < 0:
                self._untimed += 1
                continue
            self._store(row_columns, ROW_COLUMNS, n_rows, row)
            if "collective" in row:
                self._store(meta_columns, META_COLUMNS, n_metas, {**row, "row": n_rows})
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


class _Event:
    """One event: its members by the columns' names. Of a key that is there twice the last value counts."""

    def __init__(self, wanted: Mapping[bytes | None, int], shaped: frozenset[bytes]) -> None:
        self.members: dict[str, Any] = {}
        self._wanted, self._shaped = wanted, shaped
        self._may_leave = self._may_skim = True  # each is tried once

    def parse(self, data: bytearray, at: int, end: int) -> int:
        """Takes the members of the event at `at`; where it ends."""
        if data[at] != 0x7B:  # {
            raise _MalformedError
        return self._parse_object(data, at + 1, end, in_args=False)

    def is_shaped(self) -> bool:
        """Whether the shapes of its inputs are asked for."""
        return self._wanted.get(self.members.get("cat")) == _BRIEF and self.members.get("name") in self._shaped

    def _parse_object(self, data: bytearray, at: int, end: int, *, in_args: bool) -> int:
        key: bytes
        value: bytes | None
        while True:
            plain = _MEMBER.match(data, at, end)
            if plain is not None:
                key, text, bare = plain.groups()
                at = plain.end(3) if text is None else plain.end(2) + 1
                value = bytes(bare).rstrip(_SPACES) if text is None else bytes(text)
            else:
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
                is_args = not in_args and key == b"args" and data[at] == 0x7B
                value, at = (None, self._parse_args(data, at + 1, end)) if is_args else _past_value(data, at, end)
            if in_args:
                _take_argument(self.members, bytes(key), value)
            else:
                _take_member(self.members, bytes(key), value)
                if self._may_leave and self._rules_out(key):
                    self._may_leave = False
                    with contextlib.suppress(_DoubtError):
                        return _skim(data, at, end)
            at = _past_space(data, at, end)
            if data[at] == 0x2C:  # ,
                at += 1
            elif data[at] != 0x7D:
                raise _MalformedError

    def _rules_out(self, key: bytes) -> bool:
        """Whether the member of this name says that no row comes of the event."""
        if key == b"ph":
            return bool(self.members["ph"] != b"X")
        return key == b"cat" and self.members["cat"] not in self._wanted

    def _parse_args(self, data: bytearray, at: int, end: int) -> int:
        wanted = self._wanted.get(self.members.get("cat"))
        if wanted and self._may_skim:
            self._may_skim = False
            found: dict[str, Any] = {}
            with contextlib.suppress(_DoubtError):
                keys = _OF_WHOLE if wanted == _WHOLE else _OF_SHAPED if self.is_shaped() else ()
                after = _skim(data, at, end, found, keys)
                self.members |= found
                return after
        return self._parse_object(data, at, end, in_args=True)


def _skim(
    data: bytearray, at: int, end: int, members: dict[str, Any] | None = None, keys: tuple[bytes, ...] = ()
) -> int:
    """Past the brace that closes the object in which `at` lies; into `members` its members of these keys.

    Raises `_DoubtError` where the end may be another one, or a collective's arguments are passed and asked for.
    """
    depth, end = 1, min(end, at + _SKIM)
    while True:
        at = _past(_NO_SIGN, data, at, end)
        sign = data[at] if at < end else None
        if sign == 0x7B:  # {
            depth += 1
        elif sign == 0x7D:  # }
            depth -= 1
            if not depth:
                return at + 1
        else:
            found = _PLAIN_STRING.match(data, at, end)
            if found is None or (members is not None and found[1] == b"Collective name"):
                raise _DoubtError
            at = found.end() - 1
            if members is not None and depth == 1 and found[1] in keys:
                colon = _COLON.match(data, at + 1, end)
                if colon is not None:
                    value = _numbers_in_lists if keys is _OF_SHAPED else _bare_number
                    _take_argument(members, bytes(found[1]), value(data, colon.end(), end))
        at += 1


def _bare_number(data: bytearray, at: int, end: int) -> bytes:
    found = _BARE_NUMBER.match(data, at, end)
    if found is None:
        raise _DoubtError
    return bytes(found[1]).rstrip(_SPACES)


def _numbers_in_lists(data: bytearray, at: int, end: int) -> bytes:
    found = _NUMBERS_IN_LISTS.match(data, at, end)
    if found is None or found.end() >= end or b"]" not in found[0]:
        raise _DoubtError
    return bytes(found[0][: found[0].rindex(b"]") + 1])


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
    return bytes(data[at:after]).rstrip(_SPACES) or None, after


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
