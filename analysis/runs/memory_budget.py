"""What of a run fits into memory, its timeline and replay included: who takes too much is killed without a word."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.readers.native import NativeReader
    from rankscope.analysis.runs.trace import Trace

__all__ = ["MOST_ROWS", "available_bytes", "check_memory", "check_share", "needed_bytes", "readable_share"]

# Kernels and launches of a graph, which with its path takes some 200 bytes for each.
MOST_ROWS = 2_000_000
# Measured on traces of 0.3 to 2.5 GB (docs/performance.md).
_BEFORE = 160_000_000
_OF_TIMELINE, _OF_GRAPH = 260, 290  # for each kernel and launch

# Of a recorded run, for each row: measured on simulated ones of 16 to 1,024 ranks (docs/performance.md).
_OF_ROW, _OF_OTHER_ROW = {"regions": 1300, "collectives": 1300, "device_marks": 400, "flight_records": 400}, 200
_MOST = 3_000_000_000  # a report on so much takes half a minute, while a job that has ended may hold its machines
_SHARE = 0.5  # of the memory that is free

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup v2, v1


def check_memory(trace: Trace) -> None:
    """Nothing, where the device's rows fit or nobody can tell. Raises `BadInput` with what to do."""
    rows = {name: trace.reader.rows(name) for name in ("kernels", "launches")}
    needed, free = needed_bytes(sum(rows.values())), available_bytes()
    if free is None or needed <= free:
        return
    counted = " and ".join(f"{count:,} {name}" for name, count in rows.items())
    raise BadInput(
        f"{trace.path} does not fit into memory: {counted} need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
        "are free. Give the files of fewer ranks, profile fewer steps, or report on a machine with more memory "
        "(rankscope import does with 0.2 GB and makes a small folder that can be moved there)"
    )


def readable_share(reader: NativeReader) -> float:
    """What share of a recorded run a report holds without being told which: 1 is all."""
    free = available_bytes()
    most = _MOST if free is None else min(_MOST, _SHARE * free)
    return (most - _BEFORE) / max(_of_rows(reader), 1)


def check_share(reader: NativeReader, share: float, *, beside: bool = False) -> None:
    """Nothing, where this share of a recorded run fits or nobody can tell. Raises `BadInput` with what to do.

    `beside` says that it must fit beside what this process holds already.
    """
    needed, free = _BEFORE + share * _of_rows(reader), available_bytes()
    if free is not None and beside:
        free -= _own_bytes(Path("/proc"))
    if free is not None and needed > free:
        raise BadInput(
            f"{reader.where}: so many steps need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: name "
            "fewer of them, or report on a machine with more memory"
        )


def _of_rows(reader: NativeReader) -> float:
    return sum(count * _OF_ROW.get(name, _OF_OTHER_ROW) for name, count in reader.estimated_rows().items())


def needed_bytes(rows: int) -> int:
    """What a report on so many kernels and launches takes at most, this process included."""
    return _BEFORE + rows * _OF_TIMELINE + min(rows, MOST_ROWS) * _OF_GRAPH


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process may hold: what it holds already, and what is free here and within its control groups.

    None where the system does not say.
    """
    try:
        system = _fields(proc / "meminfo")
        groups = (proc / "self" / "cgroup").read_text().splitlines()
        free = system["MemAvailable"] + system.get("SwapFree", 0)
    except (OSError, KeyError, ValueError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        root = cgroups / controllers if controllers else cgroups
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(cgroups):
                break
            free = min(free, *(_left(folder, *names) for names in _LIMITS))
    return free + _own_bytes(proc)


def _own_bytes(proc: Path) -> int:
    """What this process holds; 0 where nobody knows."""
    try:
        return _fields(proc / "self" / "status").get("VmRSS", 0)
    except (OSError, ValueError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name, of a file of lines as `MemFree:  123 kB`."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _left(folder: Path, limit: str, usage: str) -> int:
    """What a control group may take more; what its files hold in memory is given up when that is needed."""
    try:
        allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is none, or no limit: `max`
        return 1 << 62
    return max(allowed - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)), 0)
