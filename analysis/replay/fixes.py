"""Fixes as they are written: `rank:2,5`, `link:node1`, `op:allreduce=0.5`, `gc`. Read and written here only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.errors import BadFix

__all__ = ["SCHEDULES", "VANISHING", "Fix", "check_form", "refused", "together"]

VANISHING = ("gc", "input", "compile", "checkpoint", "host")  # parts of the step that take no time
SCHEDULES = ("overlap", "prefetch", "reshard")  # when communication happens
_FORM = re.compile(
    r"(?:rank:\d{1,9}(?:,\d{1,9})*|(?:node|stage):\d{1,9}|link:node\d{1,9}(?:-node\d{1,9}|(?:,node\d{1,9})*)|"
    r"op:\w+=\d*\.?\d+|bucket-mb:\d*\.?\d+|"
    rf"overlap:[^:]+(?::\w+)?|prefetch:[1-9]\d?|reshard:off|balance(?::stages)?|{'|'.join(VANISHING)})"
)


@dataclass(frozen=True, slots=True)
class Fix:
    """One fix: its kind, and what it is done to, as written; `str` writes it."""

    kind: str
    of: str = ""

    @classmethod
    def parse(cls, written: str) -> Fix:
        """Read a fix; whether a run can have it shows when it is replayed."""
        kind, _, of = written.partition(":")
        return cls(kind, of)

    @classmethod
    def numbered(cls, kind: str, *numbers: int) -> Fix:
        """Give the fix of these ranks, nodes or stages."""
        return cls(kind, ",".join(map(str, numbers)))

    @classmethod
    def link(cls, *nodes: int, is_pair: bool = False) -> Fix:
        """Give the fix of the networks of nodes, or of the link between two."""
        return cls("link", ("-" if is_pair else ",").join(f"node{node}" for node in nodes))

    def __str__(self) -> str:
        return f"{self.kind}:{self.of}" if self.of else self.kind

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks, nodes or stages that it names; none where that is not what it is done to."""
        if self.kind == "link":
            is_one = re.fullmatch(r"node\d+(-node\d+|(,node\d+)*)", self.of)
            return tuple(map(int, re.findall(r"\d+", self.of))) if is_one else ()
        parts = self.of.split(",")
        return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()

    @property
    def is_pair(self) -> bool:
        """Whether it is that of the link between two nodes."""
        return self.kind == "link" and "-" in self.of

    @property
    def amount(self) -> float | None:
        """The MiB of buckets, or the factor of an operation's time; None where there is none."""
        found = re.fullmatch(r"\d*\.?\d+", self.of.rpartition("=")[2])
        return float(found[0]) if found else None


def check_form(written: str) -> None:
    """Raise `BadFix`, without a run, if no run may have such a fix."""
    if not _FORM.fullmatch(written):
        kinds = f"rank:2, rank:2,5, node:1, balance, stage:3, link:node1, op:allreduce=0.5, {', '.join(VANISHING)}"
        schedules = "balance:stages, overlap:GROUP:OPERATION, prefetch:1, reshard:off"
        raise BadFix(f"no fix is written '{written}'; there are {kinds}, bucket-mb:50, {schedules}")


def refused(fix: Fix, why: str, possible: Sequence[str]) -> BadFix:
    """Return the error that a run cannot have this fix."""
    return BadFix(f"cannot fix '{fix}' in this run: {why}; possible: {', '.join(possible)}")


def together(written: Sequence[str]) -> list[str]:
    """Return the fixes, those of single ranks as one: none of them is a measure for the others."""
    fixes = [Fix.parse(one) for one in written]
    ranks = [fix.of for fix in fixes if fix.kind == "rank"]
    rest = [str(fix) for fix in fixes if fix.kind != "rank"]
    return [*rest, str(Fix("rank", ",".join(ranks)))] if ranks else rest
