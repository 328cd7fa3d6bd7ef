"""The few turns of phrase that titles and the verdict share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rankscope.analysis.text.message import Text, plural, text
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import INSTALLED

__all__ = [
    "NO_ROLES",
    "as_recorded",
    "counted",
    "every_nth",
    "group_title",
    "how_to_profile",
    "is_installed",
    "named",
    "place_in_code",
    "some_ranges",
]

NO_ROLES = ("", "undefined", "default_pg")  # torch's descriptions of groups that do not say what for

_FEW = 3  # steps that follow each other by chance
_RUNS = 10  # of numbers that a reader reads
_SHOWN = 4  # of more, before the last


def named(kind: str, numbers: Sequence[int]) -> Text:
    """`rank 2`, `ranks 0-3,8`; `Rank 2` where the kind is written so."""
    return plural(f"{kind} {{numbers}}", f"{kind}s {{numbers}}", len(numbers), numbers=some_ranges(numbers))


def some_ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges that a reader reads: `0-3,8`, `odd 1-125 (63)`, `0-60 in steps of 4 (16)`.

    Of many without such an order the first and the last, and how many they are: `0-3,8,20-39 … 90 (27)`.
    """
    numbers = sorted(set(numbers))
    ends = [at for at, (number, after) in enumerate(pairwise(numbers), 1) if after != number + 1]
    if len(ends) < _RUNS:
        return ranges(numbers)
    first, last, count = numbers[0], numbers[-1], len(numbers)
    strides = {after - number for number, after in pairwise(numbers)}
    if strides == {2}:
        ends_at = f"{first}-{last}"
        if first % 2:
            return text("odd {ends} ({count})", ends=ends_at, count=count)
        return text("even {ends} ({count})", ends=ends_at, count=count)
    if len(strides) == 1:
        return text("{ends} in steps of {stride} ({count})", ends=f"{first}-{last}", stride=strides.pop(), count=count)
    head, tail = numbers[: ends[_SHOWN - 1]], numbers[ends[-1] :]
    return f"{ranges(head)} … {ranges(tail)} ({count})"


def group_title(name: str, role: str) -> str:
    """`TENSOR_MODEL_PARALLEL_GROUP (37)`; `group 37` where it has no name that says what it is for."""
    return f"{role} ({name})" if role not in (*NO_ROLES, name) else text("group {name}", name=name)


def counted(number: int, noun: str) -> Text:
    """`1 rank`, `3 ranks`."""
    return plural(f"{{number}} {noun}", f"{{number}} {noun}s", number, number=number)


def as_recorded(why: str) -> Text:
    """Return a collector's or agent's English text, with its quote after a colon; known words translate."""
    head, _, quoted = why.partition(": ")
    return text("{file}: {why}", file=Text(head, {}), why=Text(quoted, {})) if quoted else Text(why, {})


def how_to_profile() -> Text:
    """Return the commands that record a profiled window, of a job that may have ended."""
    return text("rankscope run --profile-steps A-B, or rankscope trigger RUN while the job runs")


def place_in_code(function: str, file: str, line: int) -> str:
    """`train.py:38 (main)`; of installed packages with their folders."""
    function = function.rpartition("<locals>.")[2]
    for folder in INSTALLED:
        _, found, inside = file.partition(folder)
        if found:
            return f"{inside}:{line} ({function})"
    return f"{file.rpartition('/')[2]}:{line} ({function})"


def is_installed(file: str) -> bool:
    """Say whether this is a package's code, not the job's own."""
    return any(folder in file for folder in INSTALLED)


def every_nth(shown: Sequence[int], judged: int) -> Text:
    """Return how often something happens that shows in these steps of `judged`.

    `in every step`; `in steps 20-39` if they follow each other; `every 5 steps` if the distances say so, with a few
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
    return text("every {period} steps", period=period)
