"""The bytes of a file that may be gzip, and may end early."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import IO, Any

try:
    from isal import igzip_lib
except ImportError:  # four times slower where there is no wheel of it
    igzip_lib = None  # type: ignore[assignment]

__all__ = ["GZIP_ERRORS", "Source", "unpacked"]


# tarfile inflates with zlib
GZIP_ERRORS: Any = (EOFError, OSError, zlib.error, *((igzip_lib.IsalError,) if igzip_lib else ()))
_GZIP = 31  # zlib's name for a stream with gzip's header and checksum
_PACKED = 1 << 15


@dataclass(slots=True)
class Source:
    """Bytes of a file that may end early: what then is wrong is kept, and reading ends."""

    stream: IO[bytes] | _Gunzip
    problem: str = ""

    def read1(self, size: int) -> bytes:
        """Return some bytes, at most `size`; none where the file ends."""
        try:
            return b"" if self.problem else self.stream.read(size)
        except GZIP_ERRORS as error:
            cut = isinstance(error, EOFError)
            self.problem = "is cut off" if cut else f"cannot be read further ({str(error).strip() or 'broken'})"
            return b""

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only where the file ends."""
        parts = []
        while size and (data := self.read1(size)):
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


class _Gunzip:
    """Unpacks as far as there are bytes; gzip's own reader drops its last buffer where a file was cut."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = _new_member()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none at the end. Raises `EOFError` where the file was cut."""
        while True:
            packed = b""
            if self._member.eof:
                packed = (self._member.unused_data or self._file.read(_PACKED)).lstrip(b"\0")  # padding
                if not packed:
                    return b""
                self._member = _new_member()
            elif self._member.needs_input:
                packed = self._file.read(_PACKED)
                if not packed:
                    raise EOFError
            data: bytes = self._member.decompress(packed, size)
            if data:
                return data


class _ZlibMember:
    """A stand-in for `igzip_lib.IgzipDecompressor`, for one member of a gzip file."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    def decompress(self, data: bytes, size: int) -> bytes:
        return self._member.decompress(data or self._member.unconsumed_tail, size)


def _new_member() -> Any:  # noqa: ANN401  (isal has no types)
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP) if igzip_lib else _ZlibMember()


def unpacked(file: IO[bytes]) -> Source:
    """Return the file's bytes, unpacked where it is gzip."""
    magic = file.read(2)
    file.seek(0)
    return Source(_Gunzip(file) if magic == b"\x1f\x8b" else file)
