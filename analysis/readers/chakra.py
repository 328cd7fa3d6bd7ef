"""Reads MLCommons Chakra and PyTorch execution traces (JSON, also packed in `.tgz`), as far as they carry times.

Such a trace is the graph of a rank's operators. PyTorch writes no times into it; what was run through a simulator, or
linked with a profiler's trace, has a start and a duration per node. Only those can be placed in time.

Source: mlcommons/chakra, schema 1.0.2 to 1.1; `torch.profiler.ExecutionTraceObserver`.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.base import NO_STEPS, FrameReader, Reader, files_in, gap, table
from rankscope.analysis.text.message import text
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]

_HEAD = 4096
_MAX_BYTES = 1 << 30  # unpacked, so that a small archive cannot fill the memory
_RANK = re.compile(r"(?:rank|et)[._-]?(\d+)", re.IGNORECASE)
_LACKS = {"breakdown": text("an execution trace has operators, not what the host waited for"), "steps": NO_STEPS}
# Where the times stand: names of start and duration, and ns per unit.
_TIMES = (("ts", "dur", 1_000), ("start_time_micros", "duration_micros", 1_000), ("ts_ns", "dur_ns", 1))

_UNREADABLE = (OSError, EOFError, tarfile.TarError, zlib.error)

Row = dict[str, Any]


def recognises(path: Path) -> bool:
    """Such a trace, or a folder in which one lies."""
    if path.is_dir():
        return any(f.is_file() and _is_trace(f) for f in path.iterdir())
    return _is_trace(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """Return the operators of all ranks that have times. Raises `BadInput` if none has."""
    rows: list[Row] = []
    missing: list[Gap] = []
    ranks: set[int] = set()
    for path in files_in(paths):
        if not _is_trace(path):
            continue
        try:
            trace = json.loads(_content(path))
            nodes = trace["nodes"]
        except (*_UNREADABLE, ValueError, KeyError, TypeError):
            missing.append(gap("regions", text("{name} was not read: it is cut or no JSON", name=path.name)))
            continue
        named = _RANK.search(path.name)
        rank = int(named[1]) if named else len(ranks)
        ranks.add(rank)
        timed = list(_regions(nodes, rank))
        rows += timed
        if len(timed) < len(nodes):
            why = text(
                "{untimed} of the {nodes} nodes of {name} carry no times",
                untimed=len(nodes) - len(timed),
                nodes=len(nodes),
                name=path.name,
            )
            missing.append(gap("regions", why, rank=rank, count=len(nodes) - len(timed)))
    if not rows:
        problem = missing[0].why if missing else "there is no execution trace"
        raise BadInput(
            f"{', '.join(paths)}: {problem}; record a torch.profiler trace beside it and give that"
            if ranks
            else f"{', '.join(paths)}: {problem}"
        )
    return FrameReader(
        frames={
            "ranks": table("ranks", [{"rank": rank, "start_ns": 0} for rank in sorted(ranks)]),
            "regions": table("regions", rows),
        },
        missing=missing,
        lacks=_LACKS,
    )


def _is_trace(path: Path) -> bool:
    try:
        head = _content(path, _HEAD) if _is_archive(path) else path.open("rb").read(_HEAD)
    except (*_UNREADABLE, BadInput):
        return False
    return head.lstrip()[:1] == b"{" and b'"nodes"' in head and b'"schema"' in head


def _is_archive(path: Path) -> bool:
    return path.name.endswith((".tgz", ".tar.gz", ".tar"))


def _content(path: Path, size: int = _MAX_BYTES) -> bytes:
    """Return the file, or the first `size` bytes of the archive's only JSON that is none of macOS's shadow files."""
    if not _is_archive(path):
        return path.read_bytes()
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if member.isfile() and name.endswith(".json") and not name.startswith("._"):
                if member.size > _MAX_BYTES:
                    raise BadInput(f"{path}: {name} is larger than {_MAX_BYTES >> 30} GiB: unpack it first")
                return (archive.extractfile(member) or io.BytesIO()).read(size)
    return b""


def _regions(nodes: Sequence[Mapping[str, Any]], rank: int) -> Iterator[Row]:
    """Yield the nodes that have a start and a duration."""
    for node in nodes:
        said = dict(node)
        said |= {attr["name"]: attr.get("value") for attr in node.get("attrs", ()) if "name" in attr}
        for start, length, unit_ns in _TIMES:
            begins, lasts = said.get(start), said.get(length)
            if isinstance(begins, (int, float)) and isinstance(lasts, (int, float)) and begins > 0 and lasts >= 0:
                yield {
                    "rank": rank,
                    "start_ns": round(begins * unit_ns),
                    "end_ns": round(begins * unit_ns) + round(lasts * unit_ns),
                    "kind": "user",
                    "name": str(node.get("name", "")),
                    "thread": 0,
                }
                break


reader = Reader(recognises=recognises, open_run=open_run, asked=2)  # execution traces lie beside profiles
