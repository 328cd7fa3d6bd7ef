"""Limits on what is decoded from a file: small files must not take gigabytes, nor minutes.

Every reader checks them before it decodes, so that one budget holds for all formats.
"""

from __future__ import annotations

import pickletools
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankscope.collectors.free_memory import available_bytes
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import MOST_RANKS
from rankscope.errors import BadInput

__all__ = ["check_bytes", "check_groups", "check_pickle", "check_ranks", "check_regular", "check_structure"]

_ALWAYS_BYTES = 256 << 20  # what is decoded from any file, however small
_MOST_TIMES = 64  # the file's size, beyond that: measurements that are packed are at most about 20
_SHARE = 0.5  # of the memory that is free
_MOST_MEMBERS = 1 << 24  # of all groups together
_MOST_NESTED = 64
_NODES_BESIDE, _NODES_OF_A_BYTE = 10_000, 2

# Of a pickle's opcodes: bytes of the argument; below 0 as pickletools says it (a line, or bytes after their length).
_ARGUMENT_BYTES = [0] * 256
for _opcode in pickletools.opcodes:
    _ARGUMENT_BYTES[ord(_opcode.code)] = _opcode.arg.n if _opcode.arg else 0
_LENGTH_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_PUT, _LONG_BINPUT = b"pr"


def check_regular(path: Path) -> None:
    """Raise `BadInput` unless this is a folder or a regular file: reading another kind may never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise BadInput(f"{path} is no regular file but a device, a pipe or a socket: save what it gives in a file")


def check_bytes(where: object, decoded: int, size_bytes: int) -> None:
    """Raise `BadInput` if a file holds more than its size allows, or than fits into memory."""
    if decoded <= _ALWAYS_BYTES:
        return
    if decoded > _MOST_TIMES * size_bytes:
        raise BadInput(
            f"{where} claims {decoded / 1e9:.1f} GB in a file of {size_bytes / 1e6:.1f} MB: it is damaged or made up"
        )
    free = available_bytes()
    if free is not None and decoded > _SHARE * free:
        raise BadInput(
            f"{where} takes {decoded / 1e9:.1f} GB when it is decoded, and {free / 1e9:.1f} GB of memory are free: "
            "read it on a machine with more, or give fewer ranks or steps"
        )


def check_ranks(where: object, numbers: Iterable[int | None]) -> None:
    """Raise `BadInput` unless these can be ranks, or their count."""
    for number in numbers:
        if number is not None and not 0 <= number <= MOST_RANKS:
            raise BadInput(f"{where} names rank or world size {number}, and only 0 to {MOST_RANKS:,} can be: damaged")


def check_groups(where: object, members: Iterable[str | None]) -> None:
    """Raise `BadInput` unless these texts (`0-3,8`) name ranks, and no more than jobs have."""
    count = 0
    for text in set(members):
        try:
            count += len(members_of(text or ""))
        except ValueError:
            raise BadInput(f"{where} has a process group of the ranks {(text or '')[:60]!r}: damaged") from None
        if count > _MOST_MEMBERS:
            raise BadInput(f"{where} has process groups of more than {_MOST_MEMBERS:,} ranks together: damaged")


def check_pickle(content: bytes) -> None:
    """Raise ValueError if a pickle's memo has more places than the pickle has bytes.

    The unpickler makes a table of as many places as the highest number: four bytes may ask for 64 GB.
    """
    at, size = 0, len(content)
    while at < size:
        opcode = content[at]
        taken = _ARGUMENT_BYTES[opcode]
        at += 1
        if taken >= 0:
            if opcode == _LONG_BINPUT and int.from_bytes(content[at : at + 4], "little") > size:
                raise ValueError("it keeps more than it holds")
            at += taken
        elif taken == pickletools.UP_TO_NEWLINE:
            line = content[at : content.find(b"\n", at) % (size + 1)]
            if opcode == _PUT and int(line) > size:
                raise ValueError("it keeps more than it holds")
            at += len(line) + 1
        else:
            width = _LENGTH_BYTES[taken]
            at += width + int.from_bytes(content[at : at + width], "little")


def check_structure(loaded: object, size_bytes: int) -> None:
    """Raise ValueError if lists and dicts hold more than a file of this size can.

    A pickle may refer to one list a million times: following all references would not end.
    """
    left = _NODES_BESIDE + _NODES_OF_A_BYTE * size_bytes
    level: list[Any] = [loaded]
    for _ in range(_MOST_NESTED):
        inner: list[Any] = []
        for one in level:
            if not isinstance(one, (list, tuple, dict)):
                continue
            left -= len(one)
            if left < 0:
                raise ValueError("it holds one thing many times over")
            inner += one.values() if isinstance(one, dict) else one
        if not inner:
            return
        level = inner
    raise ValueError("it is nested too deeply")
