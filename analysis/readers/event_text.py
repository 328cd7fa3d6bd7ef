"""One event of a trace from the bytes of its JSON: its members, separated even where they are broken.

What may be skimmed, and what is parsed with care, is as `json_scan` says.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ARGUMENT_TEXTS",
    "BETWEEN",
    "BRIEF",
    "MISSING",
    "ONLY_WHOLE",
    "TEXTS",
    "WHOLE",
    "Event",
    "IncompleteError",
    "MalformedError",
    "next_event",
    "past",
]

MISSING = -(1 << 63)
_LIMIT = 3 * 10**18  # three such numbers can be added in an int64
_MAX_DIGITS = 19
_SKIM = 1 << 14  # what is longer is parsed; it bounds what a file can make a skim cost
_SPACES = bytes(range(33))  # whatever is no sign counts as a space
_SPACE = re.compile(rb"[\x00-\x20]*")
BETWEEN = re.compile(rb"[\x00-\x20,]*")
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
TEXTS = {b"cat": "cat", b"name": "name", b"pid": "pid", b"tid": "tid"}
_NUMBERS = {b"ts": ("ts", 3), b"dur": ("dur", 3)}
_ARGUMENT_NUMBERS = {
    b"correlation": "correlation",
    b"bytes": "bytes",
    b"stream": "stream",
    b"device": "device",
    b"Seq": "seq",
    b"In msg nelems": "in_nelems",
    b"Out msg nelems": "out_nelems",
    b"Src Rank": "src",
    b"Dst Rank": "dst",
}
ARGUMENT_TEXTS = {
    b"Collective name": "collective",
    b"Process Group Name": "group",
    b"Process Group Ranks": "ranks",
    b"Process Group Description": "description",
    b"dtype": "dtype",
    b"Input Dims": "dims",
}
ONLY_WHOLE = ("correlation", "bytes", "stream", "device")
_OF_WHOLE = tuple(name.encode() for name in ONLY_WHOLE)
_OF_SHAPED = (b"Input Dims",)
BRIEF, WHOLE = 1, 2


class MalformedError(Exception):
    """The members of an event cannot be separated."""


class IncompleteError(Exception):
    """The event is incomplete at the last byte."""


class _DoubtError(Exception):
    """This must be parsed with care."""


def past(pattern: re.Pattern[bytes], data: bytearray, at: int, end: int) -> int:
    found = pattern.match(data, at, end)
    assert found is not None  # these patterns match nothing too
    return found.end()


def next_event(data: bytearray, at: int, end: int) -> int | None:
    found = _NEXT_EVENT.search(data, at, end)
    return found.end() if found else None


class Event:
    """One event: its members by the columns' names. Of a key that is there twice the last value counts."""

    def __init__(self, wanted: Mapping[bytes | None, int], shaped: frozenset[bytes]) -> None:
        self.members: dict[str, Any] = {}
        self._wanted, self._shaped = wanted, shaped
        self._may_leave = self._may_skim = True  # each is tried once

    def parse(self, data: bytearray, at: int, end: int) -> int:
        """Take the members of the event at `at`, and return where it ends."""
        if data[at] != 0x7B:  # {
            raise MalformedError
        return self._parse_object(data, at + 1, end, in_args=False)

    def is_shaped(self) -> bool:
        """Say whether the shapes of its inputs are asked for."""
        return self._wanted.get(self.members.get("cat")) == BRIEF and self.members.get("name") in self._shaped

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
                    raise MalformedError
                key, at = _past_string(data, at, end)
                at = _past_space(data, at, end)
                if data[at] != 0x3A:  # :
                    raise MalformedError
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
                raise MalformedError

    def _rules_out(self, key: bytes) -> bool:
        """Say whether the member of this name says that no row comes of the event."""
        if key == b"ph":
            return bool(self.members["ph"] != b"X")
        return key == b"cat" and self.members["cat"] not in self._wanted

    def _parse_args(self, data: bytearray, at: int, end: int) -> int:
        wanted = self._wanted.get(self.members.get("cat"))
        if wanted and self._may_skim:
            self._may_skim = False
            found: dict[str, Any] = {}
            with contextlib.suppress(_DoubtError):
                keys = _OF_WHOLE if wanted == WHOLE else _OF_SHAPED if self.is_shaped() else ()
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
        at = past(_NO_SIGN, data, at, end)
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
    at = past(_SPACE, data, at, end)
    if at >= end:
        raise IncompleteError
    return at


def _past_string(data: bytearray, at: int, end: int) -> tuple[bytes, int]:
    found = _STRING.match(data, at, end)
    if found is None:
        raise IncompleteError
    return bytes(found[1]), found.end()


def _past_value(data: bytearray, at: int, end: int) -> tuple[bytes | None, int]:
    """Return a string's inside, or the text of what is nested or bare; None if that is empty. And where it ends."""
    first = data[at]
    if first == 0x22:
        return _past_string(data, at, end)
    if first in b"{[":
        after = _past_nested(data, at, end)
        return bytes(data[at:after]), after
    after = past(_BARE, data, at, end)
    if after >= end:
        raise IncompleteError
    return bytes(data[at:after]).rstrip(_SPACES) or None, after


def _past_nested(data: bytearray, at: int, end: int) -> int:
    depth = 0
    while True:
        found = _BRACKET.search(data, at, end)
        if found is None:
            raise IncompleteError
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
    elif key in TEXTS:
        event[TEXTS[key]] = value


def _take_argument(event: dict[str, Any], key: bytes, value: bytes | None) -> None:
    if key in _ARGUMENT_NUMBERS:
        event[_ARGUMENT_NUMBERS[key]] = _number(value, 0)
    elif key in ARGUMENT_TEXTS:
        event[ARGUMENT_TEXTS[key]] = value


def _number(text: bytes | None, scale: int) -> int:
    """Return the decimal number times 10**scale, rounded half away from zero; MISSING if it is no number or too large.

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
