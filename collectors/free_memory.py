"""How much memory is free, for this process and within its control groups."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes", "own_bytes"]

_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # cgroup v2, v1


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return how much this process may hold: what it holds already, and what is free here and in its control groups.

    None if unknown.
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
    return free + own_bytes(proc)


def own_bytes(proc: Path) -> int:
    """Return the memory of this process; 0 if unknown."""
    try:
        return _fields(proc / "self" / "status").get("VmRSS", 0)
    except (OSError, ValueError):
        return 0


def _fields(path: Path) -> dict[str, int]:
    """Bytes by name, of a file of lines as `MemFree:  123 kB`."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}


def _left(folder: Path, limit: str, usage: str) -> int:
    """Return how much more a control group may take; its page cache is freed when needed."""
    try:
        allowed, used = int((folder / limit).read_text()), int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is none, or no limit: `max`
        return 1 << 62
    return max(allowed - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)), 0)
