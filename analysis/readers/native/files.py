"""The files of a run's folders: parts of tables, what was launched, and deep windows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.analysis.model.address import run_folder, says_what_was_launched
from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.bounds import check_ranks
from rankscope.analysis.readers.typed import launch_of
from rankscope.analysis.text.message import text
from rankscope.collectors.schema import TABLES
from rankscope.errors import BadInput

__all__ = [
    "Part",
    "existing_folder",
    "partitions",
    "parts_in",
    "recognises",
    "refuse_two_runs",
    "run_files",
    "why_no_run",
    "windows_in",
]

_PARTITION = re.compile(r"(rank|node)=(\d+)")
_FILE = re.compile(r"(?:(?:w([0-9a-f]+)-)?a(\d+)-)?part-(\d+)\.arrow")
_RUN_FILE = re.compile(r"node=(\d+)\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file: a piece of `table` from one rank's attempt, or from one node."""

    path: Path
    table: str
    rank: int | None
    node: int | None
    world: str
    attempt: int | None
    number: int
    size_bytes: int


def recognises(path: Path) -> bool:
    """Say whether this is a run folder: it says what was launched, or holds at least one table."""
    path = run_folder(path)
    return path.is_dir() and (says_what_was_launched(path) or any(map(parts_in, partitions(path))))


def existing_folder(folder: str) -> Path:
    path = Path(folder)
    if not path.exists():
        raise BadInput(f"{folder} does not exist")
    if not path.is_dir():
        raise BadInput(f"{folder} is a file, not a run folder: give the folder that holds run/ and collectives/")
    return path.resolve()


def why_no_run(root: Path, where: str) -> str:
    inner = sorted(p.name for p in root.iterdir() if (p / "run").is_dir())
    if inner:
        return f"{where} is not a run, but holds {len(inner)}: give one of them, the newest is {root / inner[-1]}"
    if (root / "run").is_dir():
        return (
            f"{where} holds no rank yet: a rank is recorded from its first process group on; "
            "if the job is over, it made none"
        )
    return (
        f"{where} is not a run: it holds no run/node=*.json and no table; `rankscope run` prints the folder it writes"
    )


def run_files(roots: list[Path]) -> tuple[dict[int, dict[str, Any]], list[Gap]]:
    """Return the launch as each node wrote it, and a gap for each such file that is not whole."""
    run: dict[int, dict[str, Any]] = {}
    gaps = []
    for root in roots:
        for path in sorted((root / "run").glob("node=*.json")):
            if not (match := _RUN_FILE.fullmatch(path.name)):
                continue
            node = int(match[1])
            try:
                run[node] = launch_of(path.read_bytes())
            except (OSError, ValueError):
                gaps.append(
                    Gap(table="run", rank=None, node=node, count=None, why=text("{name} is not whole", name=path.name))
                )
    return run, gaps


def partitions(root: Path) -> Iterator[Path]:
    """Yield the folders of each table's ranks or nodes, in order."""
    for table in sorted(TABLES):
        names = sorted(entry.name for entry in _entries(root / table))
        yield from (root / table / name for name in names if _PARTITION.fullmatch(name))


def parts_in(partition: Path) -> list[Part]:
    """Return the parts of one rank's or node's table, in order."""
    owned = _PARTITION.fullmatch(partition.name)
    if not owned:
        return []
    table, of_rank, owner = partition.parent.name, owned[1] == "rank", int(owned[2])
    parts = [
        Part(
            path=partition / entry.name,
            table=table,
            rank=owner if of_rank else None,
            node=None if of_rank else owner,
            world=file[1] or "",
            attempt=int(file[2] or 0) if of_rank else None,
            number=int(file[3]),
            size_bytes=size_bytes,
        )
        for entry in _entries(partition)
        if (file := _FILE.fullmatch(entry.name)) and (size_bytes := _size(entry)) is not None
    ]
    if parts:
        check_ranks(partition, [owner])
    return sorted(parts, key=lambda part: (part.world, part.attempt or 0, part.number))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none if it is missing, or is being moved by its agent."""
    try:
        return list(os.scandir(folder))
    except OSError:
        return []


def _size(entry: os.DirEntry[str]) -> int | None:
    """Return the size of a file; None: not a file, or evicted at this moment."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except OSError:
        return None


def windows_in(roots: list[Path]) -> list[list[Path]]:
    """Return the windows' folders by window; one that is still being converted has no `run/node=*.json` yet."""
    folders: dict[str, list[Path]] = {}
    for root in roots:
        for file in sorted(root.glob("window-*/run/node=*.json")):
            of_window = folders.setdefault(file.parents[1].name, [])
            if file.parents[1] not in of_window:
                of_window.append(file.parents[1])
    return [folders[name] for name in sorted(folders)]


def refuse_two_runs(parts: list[Part]) -> None:
    """Refuse the same partition in two folders: that means two runs, not two nodes of one."""
    seen: dict[tuple[str, int | None, int | None], Path] = {}
    for part in parts:
        root = part.path.parents[2]
        first = seen.setdefault((part.table, part.rank, part.node), root)
        if first != root:
            owner = f"rank {part.rank}" if part.rank is not None else f"node {part.node}"
            raise BadInput(f"{owner} is in both {first} and {root}: these are two runs, give the folders of one")
