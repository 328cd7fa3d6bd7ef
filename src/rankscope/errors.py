"""Every error that rankscope raises on purpose. Each message is one line: what, where, what to do next.

Imported inside the training process: the standard library only.
"""
# ruff: noqa: N818 - users read these names

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadFix",
    "BadInput",
    "BadQuery",
    "NotBuilt",
    "NotComparable",
    "NotExportable",
    "NotRecorded",
    "NotReplayable",
    "NotResolvable",
    "RankscopeError",
    "Unavailable",
]


class RankscopeError(Exception):
    """Something that the user can fix. The command line prints it and exits with `exit_code`."""

    exit_code: ClassVar[int] = 2


class BadInput(RankscopeError):
    """What was given cannot be analyzed."""


class BadFix(RankscopeError):
    """The fix cannot be made in this run; the message says what can."""


class BadQuery(RankscopeError):
    """A question in SQL gets no answer."""


class NotComparable(RankscopeError):
    """The runs are sound, and say nothing when they are compared."""


class NotReplayable(RankscopeError):
    """The operations do not allow a replay; the message is one clause that says why."""

    exit_code = 1


class NotResolvable(RankscopeError):
    """The tables do not allow a detector's verdict; the message is one clause that says why.

    `unclear` where that is because the steps are too few to compare any with each other, or scatter too much.
    """

    def __init__(self, why: str, *, unclear: bool = False) -> None:
        super().__init__(why)
        self.unclear = unclear


class NotExportable(RankscopeError):
    """Nothing is written."""


class NotBuilt(RankscopeError):
    """A compiled part could not be built on this machine."""


class NotRecorded(RankscopeError):
    """The job is not recorded, and goes on all the same."""


class Unavailable(RankscopeError):
    """A collector's source is not there: a state of the node, not a fault."""
