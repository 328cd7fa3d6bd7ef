"""The few turns of phrase that titles and the verdict share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import INSTALLED

__all__ = ["counted", "every_nth", "is_installed", "named", "place_in_code", "some_ranges"]

_FEW = 3  # steps that follow each other by chance
_RUNS = 12  # of numbers that a reader reads


def named(kind: str, numbers: Sequence[int]) -> Text:
    """`rank 2`, `ranks 0-3,8`; `Rank 2` where the kind is written so."""
    return Text(f"{kind} {{numbers}}" if len(numbers) == 1 else f"{kind}s {{numbers}}", {"numbers": ranges(numbers)})


def some_ranges(numbers: Sequence[int]) -> str:
    """Numbers in order as ranges, of many the first, and how many more there are: `0-3,8,20-39 and 12 more`."""
    ends = [at for at, (number, after) in enumerate(pairwise(numbers), 1) if after != number + 1]
    if len(ends) < _RUNS:
        return ranges(numbers)
    shown = ends[_RUNS - 1]
    return text("{shown} and {more} more", shown=ranges(numbers[:shown]), more=len(numbers) - shown)


def counted(number: int, noun: str) -> Text:
    """`1 rank`, `3 ranks`."""
    return Text(f"{{number}} {noun}" if number == 1 else f"{{number}} {noun}s", {"number": number})


def place_in_code(function: str, file: str, line: int) -> str:
    """`train.py:38 (main)`; of installed packages with their folders."""
    function = function.rpartition("<locals>.")[2]
    for folder in INSTALLED:
        _, found, inside = file.partition(folder)
        if found:
            return f"{inside}:{line} ({function})"
    return f"{file.rpartition('/')[2]}:{line} ({function})"


def is_installed(file: str) -> bool:
    """Whether this is a package's code, not the job's own."""
    return any(folder in file for folder in INSTALLED)


def every_nth(shown: Sequence[int], judged: int) -> Text:
    """How often something happens that shows in these steps of `judged`.

    `in every step`; `in steps 20-39` if they follow each other; `every 5th step` if the distances say so, with a few
    left out at most; else `in 3 of 40 steps`.
    """
    times = len(shown)
    if times == judged:
        return text("in every step")
    if times > _FEW and shown[-1] - shown[0] + 1 == times:
        return text("in steps {first}-{last}", first=shown[0], last=shown[-1])
    distances = [after - before for before, after in pairwise(shown)]
    period = min(distances, default=0)
    regular = all(distance % period == 0 for distance in distances) and distances.count(period) * 2 >= len(distances)
    if times <= _FEW or period < 2 or not regular:
        return text("in {times} of {judged} steps", times=times, judged=judged)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(period % 10 if period % 100 not in (11, 12, 13) else 0, "th")
    return text("every {period}{en_ending} step", period=period, en_ending=ending)
