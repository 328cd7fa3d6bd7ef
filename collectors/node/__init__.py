"""Collectors that run in the node's agent, one module each; being in this folder is the registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

__all__ = [
    "Collector",
    "Node",
    "Sample",
]

Sample = tuple[str, str, str, float]  # source, name with its unit, device, value


@dataclass(slots=True, kw_only=True)
class Node:
    """What a collector may know of its node, and of the job on it."""

    addresses: frozenset[str]  # all of this node's, loopback too
    gap: Callable[[str, str], None]  # source, why
    pids: Mapping[str, int] = field(default_factory=dict)  # device, as in "rank3" → process id; replaced as ranks go
    main_tids: Mapping[str, int] = field(default_factory=dict)  # device → id of the main thread, which trains
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


class Collector(Protocol):
    """One module of this folder. An exception in `sample` switches it off."""

    tables: tuple[str, ...]

    def start(self, node: Node) -> None:
        """Open the source, or raise Unavailable."""

    def sample(self, node: Node) -> Iterable[Sample]:
        """Read everything once."""

    def stop(self) -> None:
        """Let go of the source."""
