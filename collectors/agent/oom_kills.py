"""Counts processes that the OOM killer killed."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["OomKills"]


class OomKills:
    """How many processes the OOM killer has killed in the control group of a process, since this exists."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        """Read the count at the start: a process that has ended is in no group. Without a group it is the host's."""
        files = [proc / "vmstat"]
        with contextlib.suppress(OSError, ValueError):
            for line in (proc / str(pid) / "cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if not controllers:
                    files[:0] = [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
                elif "memory" in controllers.split(","):
                    files[:0] = [cgroups / "memory" / path.lstrip("/") / "memory.oom_control"]
        self._file = next((file for file in files if _count(file) is not None), files[-1])
        self._before = _count(self._file)

    def count(self) -> int | None:
        """None where the system does not say."""
        now = _count(self._file)
        return None if now is None or self._before is None else max(now - self._before, 0)


def _count(file: Path) -> int | None:
    try:
        return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None
