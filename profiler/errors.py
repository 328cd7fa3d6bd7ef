"""What goes wrong, in the words that the user reads."""

from __future__ import annotations

__all__ = ["NotRecorded", "RankscopeError"]


class RankscopeError(Exception):
    """One line for the user: what, where, and what to do next. `main` prints it and exits with 2."""


class NotRecorded(Exception):  # noqa: N818  (the job goes on all the same)
    """Why a job is not recorded, in one line."""
