"""What goes wrong, in the words that the user reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["NotRecorded", "RankscopeError", "clear_input_errors", "say"]


class RankscopeError(Exception):
    """One line for the user: what, where, and what to do next. `main` prints it and exits with 2."""


class NotRecorded(Exception):  # noqa: N818  (the job goes on all the same)
    """Why a job is not recorded, in one line."""


def say(line: str) -> None:
    """One line on standard error, if that is there and takes it: the job must not depend on it."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"rankscope: {line}", file=sys.stderr, flush=True)


@contextmanager
def clear_input_errors() -> Iterator[None]:
    """Input that cannot be analysed is a RankscopeError."""
    from rankscope.analysis.runs.trace import BadInput

    try:
        yield
    except BadInput as error:
        raise RankscopeError(str(error)) from None
