"""Collectors that run in the node's agent: modules with `collector`, a `Collector`; being here is the registration."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "Collector",
    "Node",
    "Sample",
    "read",
]

_READ_BYTES = 1 << 16
Sample = tuple[str, str, str, float]  # source, name with its unit, device, value


@dataclass(slots=True, kw_only=True)
class Node:
    """A collector's view of its node, and of the job on it."""

    addresses: frozenset[str]  # all of this node's, loopback too
    gap: Callable[[str, str], None]  # source, why
    pids: Mapping[str, int] = field(default_factory=dict)  # device, as in "rank3" → process id; replaced as ranks go
    main_tids: Mapping[str, int] = field(default_factory=dict)  # device → id of the main thread, which trains
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """One collector as the agent sees it, which fills `counters`.

    start: opens the source, or raises Unavailable.
    sample: reads everything once. An exception switches it off.
    stop: releases the source.
    """

    start: Callable[[Node], None]
    sample: Callable[[Node], Iterable[Sample]]
    stop: Callable[[], None]


def read(path: str) -> str:
    """Return the text of a file of /proc or /sys; between readings a second apart that takes half of `Path.read_text`.

    Raises OSError.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while more := os.read(file, _READ_BYTES):  # the kernel may hand over a long one in pieces
            text += more
    finally:
        os.close(file)
    return text.decode()
