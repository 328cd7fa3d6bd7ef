"""`run/node=….json`: what was launched on a node, its ranks, and its state."""

from __future__ import annotations

import contextlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.collectors.agent.arrow_writer import RunFolder
from rankscope.collectors.agent.json_files import replace_json
from rankscope.collectors.agent.messages import Hello
from rankscope.collectors.untyped import Foreign

__all__ = ["RunState", "file_of", "is_run_of", "versions"]


class RunState:
    """The run's JSON about this node; `changed` since it was written."""

    def __init__(self, run: RunFolder, said: dict[str, Any]) -> None:
        self.said = said
        self.changed = False
        self.kept_since_ns: int | None = None  # as the JSON on the disk says
        self.ranks: list[dict[str, Any]] = []
        self._run = run
        said["ranks"] = self.ranks

    def publish(self, **said: Foreign) -> None:
        """Add these fields; the next flush writes them."""
        self.said |= said
        self.changed = True

    def add_rank(self, hello: Hello, attempt: int) -> dict[str, Any]:
        """Give the rank's entry, which may be changed."""
        report = {"rank": hello.rank, "world": hello.world, "attempt": attempt, "pid": hello.pid, "bye": False}
        report |= {"ended": False, "world_size": hello.world_size, "start_ns": hello.start_ns, "end_ns": None}
        self.ranks.append(report)
        self.said["versions"]["torch"] = hello.torch
        self.changed = True  # not now: on slow storage the next ranks would wait for it
        return report

    def free_attempt(self, hello: Hello) -> int:
        """Return the rank's attempt, or a later one where another job under this agent had that."""
        attempt = hello.attempt
        same = [report for report in self.ranks if (report["rank"], report["world"]) == (hello.rank, hello.world)]
        while attempt in {report["attempt"] for report in same}:
            attempt += 1
        return attempt

    def write(self) -> None:
        """Write the JSON to the disk; if that is full it is unchanged."""
        self.said["name"] = self._run.path.name
        with contextlib.suppress(OSError):
            replace_json(file_of(self.said["node"], self._run.path), self.said)
            self.changed = False
            self.kept_since_ns = self.said.get("kept_since_ns")


def file_of(node: int, run: Path) -> Path:
    return run / "run" / f"node={node:05d}.json"


def is_run_of(folder: Path, agent: str) -> bool:
    """Say whether this agent of node 0, or one that has met it, writes there, or none yet."""
    said = []
    for path in folder.glob("run/node=*.json"):
        with contextlib.suppress(OSError, ValueError):
            said.append(json.loads(path.read_bytes()))
    return not said or any(agent in (state.get("agent"), state.get("peer")) for state in said)


def versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "pyarrow": pa.__version__, "kernel": platform.release()}
    with contextlib.suppress(PackageNotFoundError):  # run from a bare folder
        versions["rankscope"] = version("rankscope")
    return versions
