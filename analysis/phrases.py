"""The few turns of phrase that titles and the verdict share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rankscope.analysis.report.quantities import ranges

__all__ = ["counted", "every_nth", "named"]


def named(kind: str, numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3,8`."""
    return f"{kind} {ranges(numbers)}" if len(numbers) == 1 else f"{kind}s {ranges(numbers)}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every_nth(shown: Sequence[int], judged: int) -> str:
    """How often something happens that shows in these steps of `judged`.

    `in every step`; `every 5th step` if the distances say so, with a few left out at most; else `in 3 of 40 steps`.
    """
    times = len(shown)
    if times == judged:
        return "in every step"
    distances = [after - before for before, after in pairwise(shown)]
    period = min(distances, default=0)
    regular = all(distance % period == 0 for distance in distances) and distances.count(period) * 2 >= len(distances)
    if times < 4 or period < 2 or not regular:
        return f"in {times} of {judged} steps"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(period % 10 if period % 100 not in (11, 12, 13) else 0, "th")
    return f"every {period}{ending} step"
