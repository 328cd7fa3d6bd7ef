"""A checksum inside each sealed Arrow file, so that a bit that flips later is noticed and no wrong number is read.

The schema's metadata hold it, so any Arrow reader reads the file. They are in the file twice, in front and in the
footer, and their digits count as zeros. A file without it was not sealed, or by an older version.
"""

from __future__ import annotations

import zlib

__all__ = ["METADATA", "is_intact", "with_checksum"]

_MARK, _ZEROS = b"rankscope-crc32:", b"00000000"
METADATA = {b"checksum": _MARK + _ZEROS}


def with_checksum(file: bytes) -> bytes:
    """Return the file with its checksum in place of the zeros. `METADATA` are its schema's."""
    digits = b"%08x" % zlib.crc32(file)
    first, last = _places(file)
    return b"".join((file[:first], digits, file[first + 8 : last], digits, file[last + 8 :]))


def is_intact(file: bytes) -> bool:
    """Say whether it is as it was written, if it has a checksum."""
    first, last = _places(file)
    if first < 0:
        return True
    view = memoryview(file)
    found = zlib.crc32(view[:first])
    for piece in (_ZEROS, view[first + 8 : last], _ZEROS, view[last + 8 :]):
        found = zlib.crc32(piece, found)
    said = b"%08x" % found
    return first < last and file[first : first + 8] == said == file[last : last + 8]


def _places(file: bytes) -> tuple[int, int]:
    """Return the positions of the digits, in front and in the footer; -1: none."""
    first, last = file.find(_MARK), file.rfind(_MARK)
    return (first + len(_MARK), last + len(_MARK)) if first >= 0 else (-1, -1)
