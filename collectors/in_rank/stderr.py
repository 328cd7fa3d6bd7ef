"""Messages to the user on a training process's standard error."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["say", "text_of"]


def say(line: str) -> None:
    """Print a line on standard error, if possible: the script may have replaced it, and `print`."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"rankscope: {line}\n")
        sys.stderr.flush()


def text_of(error: BaseException) -> str:
    """Return the type and text of an error, whose `__str__` may be empty or fail."""
    said = ""
    with contextlib.suppress(Exception):
        said = str(error).strip()
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
