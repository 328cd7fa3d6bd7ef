"""Numbers operations that carry no number of their own, so that equal numbers are the same operation on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sequence", "align"]

_LEAST_PAIRS = 4  # with fewer, clocks that differ prove nothing
_EXTRA = 32  # how many more operations one rank may have at an end than its length tells
_MOST_NS = 1_000_000  # ends of one operation on two ranks differ by less, in the median of every stretch
_STANDS_OUT = 2  # by how much a shift must be better than any other, where clocks differ
_STRETCH = 8  # operations; a hole within the last few of a recording is not seen

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One rank's operations in their order: a code that tells kinds apart, and the end."""

    kind: Ints
    end_ns: Ints


def align(sequences: Mapping[int, Sequence], *, one_clock: bool) -> dict[int, int] | None:
    """What to add to each rank's position so that equal sums are one operation; None if that is not certain.

    Recordings begin and end on each rank at another time, so a rank may lack operations at either end. All ranks end
    an operation together: the shift is right where the kinds agree everywhere and the ends differ least (from the
    rank's constant difference, where the clocks are not one), by little in every stretch of the recording: after a
    hole in the middle operations of one kind still agree, but no longer end together. Such a rank fits nowhere.
    """
    if len(sequences) == 1:
        return dict.fromkeys(sequences, 0)
    reference = max(sequences, key=lambda rank: (len(sequences[rank].kind), -rank))
    shifts = {rank: _shift(sequences[reference], rows, one_clock) for rank, rows in sequences.items()}
    if any(shift is None for shift in shifts.values()):
        return None
    least = min(shift for shift in shifts.values() if shift is not None)
    return {rank: shift - least for rank, shift in shifts.items() if shift is not None}


def _shift(reference: Sequence, rows: Sequence, one_clock: bool) -> int | None:
    """Position in the reference of this rank's first operation."""
    n, m = len(reference.kind), len(rows.kind)
    reach = n - m + _EXTRA
    fits: list[tuple[float, int]] = []
    for shift in range(-min(reach, m - 1), min(reach, n - 1) + 1):
        low, high = max(shift, 0), min(shift + m, n)
        if 2 * (high - low) < m or (high - low < _LEAST_PAIRS and not one_clock):
            continue
        here, there = slice(low - shift, high - shift), slice(low, high)
        if not np.array_equal(rows.kind[here], reference.kind[there]):
            continue
        apart = rows.end_ns[here] - reference.end_ns[there]
        off = np.abs(apart if one_clock else apart - np.median(apart))
        stretches = np.array_split(off, max(1, len(off) // _STRETCH))
        spread = float(np.median(off))
        if all(float(np.median(stretch)) <= _MOST_NS for stretch in stretches):
            fits.append((spread, shift))
    best = min(fits, default=None)
    # Where clocks differ, operations that follow each other evenly fit everywhere: the best must stand out.
    if best is None or (not one_clock and any(s <= _STANDS_OUT * best[0] for s, shift in fits if shift != best[1])):
        return None
    return best[1]
