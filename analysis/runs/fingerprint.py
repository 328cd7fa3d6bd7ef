"""Fingerprints of a run's files and of this code: results are remade where either has changed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import rankscope

__all__ = ["DERIVED", "code_fingerprint", "files_fingerprint"]

DERIVED = ("lanes", "summary", "report")  # what names of files in a run folder begin with that are made of its tables


def files_fingerprint(path: Path) -> str:
    """Another one when a file below the path comes, goes or changes; what is made of them does not count."""
    seen = hashlib.sha256()
    for file in _files_below(str(path)) if path.is_dir() else [str(path)]:
        try:
            found = os.stat(file)  # ten thousand ranks leave as many files: a Path for each takes four times as long
        except OSError:  # gone since
            continue
        if stat.S_ISREG(found.st_mode):
            said = f"{file[len(str(path)) :]}\0{found.st_size}\0{found.st_mtime_ns}\n"
            seen.update(said.encode(errors="surrogateescape"))
    return seen.hexdigest()


def _files_below(top: str) -> Iterator[str]:
    for folder, inner, names in os.walk(top):
        if folder == top:
            inner[:], names = ([name for name in of if not name.startswith(DERIVED)] for of in (inner, names))
        inner.sort()
        yield from (f"{folder}/{name}" for name in sorted(names))


@cache
def code_fingerprint(*folders: str) -> str:
    """Of this version of rankscope and of its modules in these folders."""
    root = Path(rankscope.__file__).parent
    seen = hashlib.sha256(rankscope.__version__.encode())
    for file in _modules(root, folders):
        seen.update(file.read_bytes())
    return seen.hexdigest()


def _modules(root: Path, folders: Iterable[str]) -> Iterable[Path]:
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))
