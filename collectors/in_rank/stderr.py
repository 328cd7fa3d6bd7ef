"""What a training process is told: lines on its standard error."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["say", "text_of"]


def say(line: str) -> None:
    """One line on standard error, if that is there and takes it: the script may have replaced it, and `print`."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"rankscope: {line}\n")
        sys.stderr.flush()


def text_of(error: BaseException) -> str:
    """Return the kind of an error and what it says, which may be nothing or fail."""
    said = ""
    with contextlib.suppress(Exception):
        said = str(error).strip()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
