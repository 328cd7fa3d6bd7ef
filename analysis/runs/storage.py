"""What lies in object storage, as files on this machine: s3://, gs://, hdfs://, az:// and file://.

A run is read more than once and in any order, so it is copied first, into a temporary folder that this process removes
when it ends. Credentials, region and endpoint are those that the storage's own tools take from the environment.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rankscope.errors import BadInput

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["SCHEMES", "local_path", "scheme_of"]

SCHEMES = ("s3", "gs", "hdfs", "az", "file")

# Paths that went through pathlib have one slash left. One letter before the colon is a drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^?]*)(\?.*)?")
_ADDRESS = re.compile(r"(?:world|steps)=[0-9-]+")  # a part of a run, which need be no folder
_ATTEMPTS = 6  # of one request, each later than the one before: half a minute
_CONNECT_S, _SILENT_S = 10, 20


def scheme_of(name: str) -> str | None:
    """The scheme of what is named by a URL; None for a path. What exists under that name is a path."""
    found = _URL.fullmatch(name)
    return None if found is None or Path(name).exists() else found[1].lower()


def local_path(name: str) -> str:
    """Where this lies on this machine: the path itself, or that of a copy. Raises `BadInput`."""
    scheme, found = scheme_of(name), _URL.fullmatch(name)
    if scheme is None or found is None:
        return name
    if scheme not in SCHEMES:
        raise BadInput(f"{name}: {scheme} is none of {', '.join(SCHEMES)}; copy it to a folder here and name that")
    if scheme == "file":
        return f"/{found[2]}"
    path, part = PurePosixPath(found[2]), list[str]()
    while _ADDRESS.fullmatch(path.name):
        path, part = path.parent, [path.name, *part]
    return str(Path(_copy(scheme, str(path), found[3] or ""), *part))


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="rankscope-")


@cache
def _copy(scheme: str, path: str, query: str) -> Path:
    """A copy of this file or folder, made once."""
    from pyarrow import ArrowException
    from pyarrow.fs import FileSelector, FileType

    url = f"{scheme}://{path}"
    target = Path(_folder().name, str(_copy.cache_info().misses), PurePosixPath(path).name)
    try:
        system, root = _system(scheme, path, query)
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
    """Where a file of the storage goes; keys may hold anything, also what leads out of a folder."""
    below = PurePosixPath(path).relative_to(root)
    if ".." in below.parts or below.is_absolute():
        raise BadInput(f"{path} is no path that can be copied here: it holds '..'")
    return target / below


def _copy_files(system: FileSystem, files: dict[str, Path]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from pyarrow.fs import LocalFileSystem, copy_files

    here = LocalFileSystem()

    def copy(source: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        copy_files(source, str(target), source_filesystem=system, destination_filesystem=here, use_threads=False)

    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(copy, files, files.values()):
            pass


def _system(scheme: str, path: str, query: str) -> tuple[FileSystem, str]:
    """The storage and the path in it."""
    from pyarrow import fs

    if scheme == "az":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT")
        if not account:
            raise BadInput(f"az://{path}: set AZURE_STORAGE_ACCOUNT to the name of the storage account")
        return fs.AzureFileSystem(account, account_key=os.environ.get("AZURE_STORAGE_KEY")), path
    if scheme != "s3" or query:
        system, root = fs.FileSystem.from_uri(f"{scheme}://{path}{query}")
        return system, root
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = fs.resolve_s3_region(PurePosixPath(path).parts[0])
    system = fs.S3FileSystem(
        region=region or None,
        endpoint_override=endpoint or None,
        connect_timeout=_CONNECT_S,
        request_timeout=_SILENT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
    )
    return system, path
