"""Protocol buffers' wire format, for many messages of one kind at once.

A block holds one piece of each message: a row of bytes each, and which of them are there. So numbers take no more bytes
than they need, and what a message lacks takes none, without a loop over messages.

Source: protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "encoded", "fixed64", "message", "one", "varint"]

_VARINT, _FIXED64, _BYTES = 0, 1, 2  # wire types

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Block:
    """One row per message: bytes, and which of them are written."""

    bytes: NDArray[np.uint8]
    kept: NDArray[np.bool_]


def varint(number: int, values: Array, present: NDArray[np.bool_] | None = None) -> Block:
    """Return a field of whole numbers; negative ones take 10 bytes."""
    body = _varint(values)
    return _field(number, _VARINT, body.bytes, body.kept, present)


def fixed64(number: int, values: Array, present: NDArray[np.bool_] | None = None) -> Block:
    """Return a field of numbers of 8 bytes: whole ones, or doubles."""
    wide = np.ascontiguousarray(values, np.float64 if values.dtype.kind == "f" else np.uint64)
    body = wide.astype(wide.dtype.newbyteorder("<")).view(np.uint8).reshape(-1, 8)
    return _field(number, _FIXED64, body, np.ones(body.shape, np.bool_), present)


def message(number: int, fields: Sequence[Block], present: NDArray[np.bool_] | None = None) -> Block:
    """Return a field that is a message of these fields."""
    body, kept = np.hstack([f.bytes for f in fields]), np.hstack([f.kept for f in fields])
    length = _varint(kept.sum(axis=1, dtype=np.int64))
    return _field(number, _BYTES, np.hstack([length.bytes, body]), np.hstack([length.kept, kept]), present)


def encoded(*blocks: Block) -> bytes:
    """Return the messages one after the other, each with these pieces."""
    return np.hstack([b.bytes for b in blocks])[np.hstack([b.kept for b in blocks])].tobytes()


def one(number: int, value: int | str | bytes) -> bytes:
    """Return a single field."""
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value % (1 << 64))
    body = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _BYTES) + _number(len(body)) + body


def _field(
    number: int, wire_type: int, body: NDArray[np.uint8], kept: NDArray[np.bool_], present: NDArray[np.bool_] | None
) -> Block:
    tag = np.frombuffer(_number(number << 3 | wire_type), np.uint8)
    rows = np.hstack([np.broadcast_to(tag, (len(body), len(tag))), body])
    there = np.hstack([np.ones((len(body), len(tag)), np.bool_), kept])
    return Block(rows, there if present is None else there & present[:, None])


def _varint(values: Array) -> Block:
    left = values.astype(np.int64, copy=False).view(np.uint64)
    width = max(1, -(-int(left.max(initial=0)).bit_length() // 7))
    rows, kept = np.empty((len(left), width), np.uint8), np.empty((len(left), width), np.bool_)
    for place in range(width):
        kept[:, place] = (left > 0) | (place == 0)
        rest = left >> np.uint64(7)
        rows[:, place] = (left & np.uint64(0x7F)) | ((rest > 0) * np.uint64(0x80))
        left = rest
    return Block(rows, kept)


def _number(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])
