"""Fingerprints of a run's files and of this code: results are remade where either has changed."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import rankscope

__all__ = ["DERIVED", "code_fingerprint", "files_fingerprint"]

DERIVED = ("lanes", "summary", "report")  # what names of files in a run folder begin with that are made of its tables


def files_fingerprint(path: Path) -> str:
    """Another one when a file below the path comes, goes or changes; what is made of them does not count."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    seen = hashlib.sha256()
    for file in files:
        inside = file.relative_to(path)
        if inside.parts and inside.parts[0].startswith(DERIVED):
            continue
        try:
            found = file.stat()
        except OSError:  # gone since
            continue
        if stat.S_ISREG(found.st_mode):
            seen.update(f"{inside}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return seen.hexdigest()


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
