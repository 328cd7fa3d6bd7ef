"""What goes wrong, in the words that the user reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["NotRecorded", "RankscopeError", "clear_input_errors"]


class RankscopeError(Exception):
    """One line for the user: what, where, and what to do next. `main` prints it and exits with 2."""


class NotRecorded(Exception):  # noqa: N818  (the job goes on all the same)
    """Why a job is not recorded, in one line."""


@contextmanager
def clear_input_errors() -> Iterator[None]:
    """Input that cannot be analysed is a RankscopeError."""
    from rankscope.analysis.trace import BadInput

    try:
        yield
    except BadInput as error:
        raise RankscopeError(str(error)) from None
