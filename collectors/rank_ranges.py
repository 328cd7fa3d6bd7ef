"""How lists of ranks are written and read: `0-3,8`."""

from __future__ import annotations

from collections.abc import Iterable

from rankscope.collectors.schema import MOST_RANKS

__all__ = ["as_ranges", "members_of"]


def as_ranges(ranks: Iterable[int]) -> str:
    """Write ranks as `0-3,8`, in their order; two that follow each other as `5,6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def members_of(text: str) -> list[int]:
    """Read the ranks behind `0-3,8`. Raises ValueError where there are none, or more than any job has."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first) + 1
        if not 0 <= begin < end <= MOST_RANKS or len(ranks) > MOST_RANKS:
            raise ValueError(f"{part} are no ranks")
        ranks.extend(range(begin, end))
    return ranks
