"""How large an Arrow stream is when it is decoded, from the lengths in its messages.

Source: https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format, `Message.fbs`.
"""

from __future__ import annotations

import struct

import pyarrow as pa

__all__ = ["decoded_bytes"]

_DAMAGED = (pa.ArrowException, OSError, struct.error, IndexError, ValueError)


def decoded_bytes(stream: bytes) -> int:
    """Return the sum of what its record batches claim to take, as far as the messages can be read.

    Nothing is decoded.
    """
    total = 0
    try:
        for message in pa.ipc.MessageReader.open_stream(pa.BufferReader(stream)):
            if message.type == "record batch" and message.body is not None:
                total += _of_batch(message.metadata.to_pybytes(), message.body)
    except _DAMAGED:
        pass  # the rest is no more than its bytes: it cannot be decoded either
    return total


def _of_batch(metadata: bytes, body: pa.Buffer) -> int:
    """Of one record batch: packed buffers begin with the length that they have when they are unpacked."""
    (root,) = struct.unpack_from("<I", metadata)
    batch = _inner(metadata, root, 2)
    if batch is None or not _field(metadata, batch, 3):
        return int(body.size)
    buffers = _inner(metadata, batch, 2)
    (count,) = struct.unpack_from("<I", metadata, buffers) if buffers is not None else (0,)
    total = 0
    for number in range(min(count, len(metadata) // 16)):
        offset, length = struct.unpack_from("<qq", metadata, (buffers or 0) + 4 + 16 * number)
        if length > 8 and 0 <= offset <= body.size - 8:
            (unpacked,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
            total += max(unpacked, length)
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
