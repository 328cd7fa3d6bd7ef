"""Object storage by its URL: s3://, gs://, hdfs://, az://, and file:// for a folder of this machine.

Credentials, region and endpoint are those that the storage's own tools take from the environment.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from rankscope.errors import BadInput

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

__all__ = ["SCHEMES", "Location", "file_system", "location", "spool_url"]

SCHEMES = ("s3", "gs", "hdfs", "az", "file")

# Paths that went through pathlib have one slash left. One letter before the colon is a drive.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+([^?]*)(\?.*)?")
_CONNECT_S, _SILENT_S = 10, 20


class Location(NamedTuple):
    """The parts of a URL; the path begins with the bucket."""

    scheme: str
    path: str
    query: str  # with its question mark, or empty


def location(url: str) -> Location | None:
    """Return the parts of the URL, whatever its scheme; None for a path."""
    found = _URL.fullmatch(url)
    return Location(found[1].lower(), found[2].rstrip("/"), found[3] or "") if found else None


def spool_url(out: str) -> Location | None:
    """Return the place in object storage for this `--out`; None for a folder of this machine.

    Raises BadInput for an unusable URL, without a request to the storage.
    """
    at = location(out)
    if at is None or at.scheme == "file":
        return None
    if at.scheme not in SCHEMES:
        raise BadInput(f"--out {out}: {at.scheme} is none of {', '.join(SCHEMES)}; give one of these or a folder")
    if len(PurePosixPath(at.path).parts) < 2:
        raise BadInput(f"--out {out}: name the run's folder too, as in {at.scheme}://BUCKET/runs/NAME")
    _azure_account(at)
    return at


def file_system(at: Location, *, attempts: int) -> tuple[FileSystem, str]:
    """Return the storage and the path in it; retry requests so often. Raises BadInput, or pyarrow's."""
    from pyarrow import fs

    if at.scheme == "az":
        return fs.AzureFileSystem(_azure_account(at), account_key=os.environ.get("AZURE_STORAGE_KEY")), at.path
    if at.scheme != "s3" or at.query:
        system, root = fs.FileSystem.from_uri(f"{at.scheme}://{at.path}{at.query}")
        return system, root
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = fs.resolve_s3_region(PurePosixPath(at.path).parts[0])
    system = fs.S3FileSystem(
        region=region or None,
        endpoint_override=endpoint or None,
        connect_timeout=_CONNECT_S,
        request_timeout=_SILENT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=attempts),
    )
    return system, at.path


def _azure_account(at: Location) -> str:
    """Return the name of the storage account; empty for other storage. Raises BadInput."""
    account = os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if at.scheme == "az" and not account:
        raise BadInput(f"az://{at.path}: set AZURE_STORAGE_ACCOUNT to the name of the storage account")
    return account
