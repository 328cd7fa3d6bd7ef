"""Which files are traces of the profiler."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import IO

from rankscope.analysis.readers.base import files_in
from rankscope.analysis.readers.kineto.header import BARE_ARRAY, SNIFF
from rankscope.analysis.readers.kineto.unpack import GZIP_ERRORS, unpacked

__all__ = ["JSON_NAME", "TAR_NAME", "member_of", "trace_files"]

_HEADER_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
_TRACE_NAME = re.compile(r"\.pt\.trace\.json(\.gz)?$")
JSON_NAME = re.compile(r"\.json(\.gz)?$")
TAR_NAME = re.compile(r"\.(tar|tar\.gz|tgz)$")


def recognises(path: Path) -> bool:
    """Whether this is a profiler's trace, by its content or by the name that torch gives it, or holds at least one."""
    if path.is_dir():
        return any(is_trace(file) for file in _files_of(path))
    return is_trace(path)


def _files_of(folder: Path) -> list[Path]:
    """Return the files in the folder that may be traces; if there are none, those one level below."""
    for pattern in ("*", "*/*"):
        files = [f for f in sorted(folder.glob(pattern)) if f.is_file() and _may_be_trace(f.name)]
        if files:
            return files
    return []


def _may_be_trace(name: str) -> bool:
    return not name.startswith(".") and bool(JSON_NAME.search(name) or TAR_NAME.search(name))


def is_trace(path: Path) -> bool:
    if _TRACE_NAME.search(path.name):
        return True
    try:
        if TAR_NAME.search(path.name):
            with tarfile.open(path) as tar:
                members = (m for m in tar if m.isfile() and JSON_NAME.search(m.name))
                return any(_begins_as_trace(member_of(tar, m), m.name) for m in members)
        with path.open("rb") as file:
            return _begins_as_trace(file, path.name)
    except (tarfile.TarError, *GZIP_ERRORS):
        return False


def _begins_as_trace(file: IO[bytes], name: str) -> bool:
    if _TRACE_NAME.search(name):
        return True
    begin = unpacked(file).read(SNIFF)
    return any(key in begin for key in _HEADER_KEYS) or bool(BARE_ARRAY.match(begin))


def trace_files(path: Path) -> list[Path]:
    """Return the file, or the folder's traces; a folder with one file only has that."""
    if not path.is_dir():
        return files_in([str(path)])
    files = _files_of(path)
    return files if len(files) == 1 else [file for file in files if TAR_NAME.search(file.name) or is_trace(file)]


def member_of(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None  # regular files have bytes
    return file
