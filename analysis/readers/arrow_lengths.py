"""How large an Arrow stream is when it is decoded, from the lengths in its messages.

Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format, `Message.fbs`.
"""

from __future__ import annotations

import struct

__all__ = ["decoded_bytes"]

_RECORD_BATCH = 3  # of the types of messages
_TYPE, _HEADER, _BODY_BYTES = 1, 2, 3  # fields of a message
_BUFFERS, _PACKED = 2, 3  # fields of a record batch


def decoded_bytes(stream: bytes) -> int:
    """Return the sum of what its record batches claim to take, as far as the messages can be read.

    Nothing is decoded.
    """
    total = at = 0
    try:
        while True:
            (length,) = struct.unpack_from("<i", stream, at)
            if length == -1:  # which older streams lack
                at += 4
                (length,) = struct.unpack_from("<i", stream, at)
            metadata, body = stream[at + 4 : at + 4 + length], at + 4 + length
            (message,) = struct.unpack_from("<I", metadata)  # none at the end
            kind, size = _field(metadata, message, _TYPE), _field(metadata, message, _BODY_BYTES)
            (body_bytes,) = struct.unpack_from("<Q", metadata, size) if size else (0,)
            at = body + body_bytes
            if at > len(stream):
                return total
            if kind and metadata[kind] == _RECORD_BATCH:
                total += _of_batch(metadata, message, stream, body, body_bytes)
    except (struct.error, IndexError):
        return total  # the rest is no more than its bytes: it cannot be decoded either


def _of_batch(metadata: bytes, message: int, stream: bytes, body: int, body_bytes: int) -> int:
    """Of one record batch: packed buffers begin with the length that they have when they are unpacked."""
    batch = _inner(metadata, message, _HEADER)
    if batch is None or not _field(metadata, batch, _PACKED):
        return body_bytes
    buffers = _inner(metadata, batch, _BUFFERS)
    if buffers is None:
        return 0
    (count,) = struct.unpack_from("<I", metadata, buffers)
    total = 0
    for offset, length in struct.iter_unpack("<qq", metadata[buffers + 4 : buffers + 4 + 16 * count]):
        if length > 8 and 0 <= offset <= body_bytes - 8:
            total += max(*struct.unpack_from("<q", stream, body + offset), length)
    return total


def _field(table: bytes, at: int, number: int) -> int:
    """Return where a flatbuffer's table has this field, 0 if it has none."""
    (back,) = struct.unpack_from("<i", table, at)
    (size,) = struct.unpack_from("<H", table, at - back)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", table, at - back + 4 + 2 * number)
    return at + offset if offset else 0


def _inner(table: bytes, at: int, number: int) -> int | None:
    """Return where the table or vector begins that this field names."""
    field = _field(table, at, number)
    return field + int(struct.unpack_from("<I", table, field)[0]) if field else None
