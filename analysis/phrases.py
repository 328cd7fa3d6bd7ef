"""The few turns of phrase that titles and the verdict share."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.report.quantities import ranges

__all__ = ["counted", "every_nth", "named"]


def named(kind: str, numbers: Sequence[int]) -> str:
    """`rank 2`, `ranks 0-3,8`."""
    return f"{kind} {ranges(numbers)}" if len(numbers) == 1 else f"{kind}s {ranges(numbers)}"


def counted(number: int, noun: str) -> str:
    """`1 rank`, `3 ranks`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def every_nth(times: int, steps: int) -> str:
    """How often something happens: `in every step`, `every 5th step` if the count fits that, `in 3 of 40 steps`."""
    period = round(steps / times)
    if times == steps:
        return "in every step"
    if period < 2 or times not in (steps // period, -(-steps // period)):
        return f"in {times} of {steps} steps"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(period % 10 if period % 100 not in (11, 12, 13) else 0, "th")
    return f"every {period}{ending} step"
