"""Files of object storage on this machine: s3://, gs://, hdfs://, az:// and file://.

A run is read more than once and in any order, so it is copied first, into a temporary folder that this process removes
when it ends. Credentials, region and endpoint are those that the storage's own tools take from the environment.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rankscope.collectors.object_storage import SCHEMES, Location, file_system, location
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["local_path", "scheme_of"]

_ADDRESS = re.compile(r"(?:world|steps)=[0-9-]+")  # a part of a run, which need be no folder
_ATTEMPTS = 6  # of one request, each later than the one before: half a minute


def scheme_of(name: str) -> str | None:
    """Return the scheme of what is named by a URL; None for a path. What exists under that name is a path."""
    at = location(name)
    return None if at is None or Path(name).exists() else at.scheme


def local_path(name: str) -> str:
    """Return the path on this machine: itself, or that of a copy. Raises `BadInput`."""
    at = location(name)
    if at is None or scheme_of(name) is None:
        return name
    if at.scheme not in SCHEMES:
        raise BadInput(f"{name}: {at.scheme} is none of {', '.join(SCHEMES)}; copy it to a folder here and name that")
    if at.scheme == "file":
        return f"/{at.path}"
    path, part = PurePosixPath(at.path), list[str]()
    while _ADDRESS.fullmatch(path.name):
        path, part = path.parent, [path.name, *part]
    return str(Path(_copy(at._replace(path=str(path))), *part))


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="rankscope-")


@cache
def _copy(at: Location) -> Path:
    """Return a copy of this file or folder, made once."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSelector, FileType

    url = f"{at.scheme}://{at.path}"
    target = Path(_folder().name, str(_copy.cache_info().misses), PurePosixPath(at.path).name)
    try:
        system, root = file_system(at, attempts=_ATTEMPTS)
        (entry,) = system.get_file_info([root])
        if entry.type == FileType.NotFound:
            raise BadInput(f"{url} does not exist")
        inside = [entry] if entry.is_file else system.get_file_info(FileSelector(root, recursive=True))
        files = {each.path: _below(target, each.path, root) for each in inside if each.is_file}
        _copy_files(system, files)
    except (OSError, ValueError, ImportError, ArrowException) as error:
        why = " ".join(str(error).split())
        raise BadInput(f"cannot read {url}: {why}") from None
    return target


def _below(target: Path, path: str, root: str) -> Path:
    """Return the path for a file of the storage; keys are untrusted, and may lead out of a folder."""
    below = PurePosixPath(path).relative_to(root)
    if ".." in below.parts or below.is_absolute():
        raise BadInput(f"{path} is no path that can be copied here: it holds '..'")
    return target / below


def _copy_files(system: FileSystem, files: dict[str, Path]) -> None:
    from pyarrow.fs import LocalFileSystem, copy_files

    here = LocalFileSystem()

    def copy(source: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_files(source, str(target), source_filesystem=system, destination_filesystem=here, use_threads=False)

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(copy, files, files.values()):
            pass
