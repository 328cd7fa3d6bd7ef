"""Error messages of the command line."""

from __future__ import annotations

import sys
from contextlib import suppress

__all__ = ["say"]


def say(line: str) -> None:
    """One line on standard error, if that is there and takes it: the job must not depend on it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"rankscope: {line}", file=sys.stderr, flush=True)
