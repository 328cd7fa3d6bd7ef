"""What a training process is told: lines on its standard error."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["say"]


def say(line: str) -> None:
    """One line on standard error, if that is there and takes it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(f"rankscope: {line}", file=sys.stderr)
