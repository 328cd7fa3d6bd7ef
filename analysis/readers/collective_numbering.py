"""Numbers operations that carry no number of their own, so that equal numbers are the same operation on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sequence", "align"]

_LEAST_PAIRS = 4  # with fewer, clocks that differ prove nothing
_EXTRA = 32  # how many more operations one rank may have at an end than its length implies
_MOST_NS = 1_000_000  # ends of one operation on two ranks differ by less, in the median of every stretch
_STANDS_OUT = 2  # by how much a shift must be better than any other, where clocks differ
_STRETCH = 8  # operations; a hole within the last few of a recording is not seen
_LACKS = 0.1  # share of its operations, or one, that a rank may lack in the middle
_CLOSE = 0.25  # of the usual time between two ends of one kind: what is nearer than that is one operation

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One rank's operations in their order: a code per kind, and the end."""

    kind: Ints
    end_ns: Ints


def align(sequences: Mapping[int, Sequence], *, one_clock: bool) -> dict[int, Ints] | None:
    """Give the number of each rank's operations, equal where they are one operation; None if that is not certain.

    Recordings begin and end on each rank at another time, so a rank may lack operations at either end. All ranks end
    an operation together: a shift is right where the kinds agree everywhere and the ends differ least (from the
    rank's constant difference, where the clocks are not one), by little in every stretch of the recording. After a
    hole in the middle operations of one kind still agree, but no longer end together, and streams may take turns in
    another order: a rank whose operations fit at no shift is aligned by their ends alone, kind by kind.
    """
    if len(sequences) == 1:
        return {rank: np.arange(len(rows.kind)) for rank, rows in sequences.items()}
    reference = max(sequences, key=lambda rank: (len(sequences[rank].kind), -rank))
    size = len(sequences[reference].kind)
    places: dict[int, Ints] = {}
    for rank, rows in sequences.items():
        shift = _shift(sequences[reference], rows, one_clock)
        found = np.arange(len(rows.kind)) + shift if shift is not None else None
        if found is None:
            found = _by_ends(sequences[reference], rows, one_clock)
            if found is None:
                return None
            alone = found < 0  # what only this rank has gets numbers that no other rank has
            found[alone] = size + _EXTRA + np.arange(int(alone.sum()))
            size += int(alone.sum())
        places[rank] = found
    least = min(int(at.min()) for at in places.values())
    return {rank: at - least for rank, at in places.items()}


def _by_ends(reference: Sequence, rows: Sequence, one_clock: bool) -> Ints | None:
    """Position in the reference of each operation of this rank by its end, -1 for what the reference lacks.

    None where more is lacking than one rank may lack, or where clocks differ and more than one difference fits.
    """
    offsets = np.zeros(1) if one_clock else _differences(reference, rows)
    fits = sorted(
        (fit for off in offsets if (fit := _nearest(reference, rows, float(off), one_clock)) is not None),
        key=lambda fit: (-int((fit[1] >= 0).sum()), fit[0]),
    )
    if not fits:
        return None
    (_, best, off), others = fits[0], fits[1:]
    apart = [abs(other[2] - off) for other in others]
    return None if any(ns > 2 * _MOST_NS for ns in apart) else best


def _differences(reference: Sequence, rows: Sequence) -> Floats:
    """Return possible differences of two clocks: medians over each half of the operations' ends, at each shift."""
    n, m = len(reference.kind), len(rows.kind)
    reach, found = n - m + _EXTRA, []
    for shift in range(-min(reach, m - 1), min(reach, n - 1) + 1):
        low, high = max(shift, 0), min(shift + m, n)
        if high - low >= 2 * _LEAST_PAIRS:
            apart = rows.end_ns[low - shift : high - shift] - reference.end_ns[low:high]
            found += [float(np.median(half)) for half in np.array_split(apart, 2)]
    return np.unique(found)


def _nearest(reference: Sequence, rows: Sequence, off: float, one_clock: bool) -> tuple[float, Ints, float] | None:
    """Return how far ends are apart, the position of each operation that ends with it, and the clocks' difference.

    None unless nearly all operations of the time that both saw have one.
    """
    found = np.full(len(rows.kind), -1, np.int64)
    for kind in np.unique(rows.kind):
        mine, theirs = np.flatnonzero(rows.kind == kind), np.flatnonzero(reference.kind == kind)
        theirs = theirs[np.argsort(reference.end_ns[theirs], kind="stable")]
        if len(theirs) < 2:
            continue
        there, here = reference.end_ns[theirs], rows.end_ns[mine] - off
        after = np.clip(np.searchsorted(there, here), 1, len(there) - 1)
        near = np.where(here - there[after - 1] < there[after] - here, after - 1, after)
        close = np.abs(here - there[near]) <= min(_MOST_NS, _CLOSE * float(np.median(np.diff(there))))
        found[mine[close]] = theirs[near[close]]
    known = found >= 0
    pairs = found[known]
    if len(np.unique(pairs)) < len(pairs) or len(pairs) < 2 * _LEAST_PAIRS:
        return None
    apart = rows.end_ns[known] - reference.end_ns[pairs]
    clocks = 0.0 if one_clock else float(np.median(apart))
    ends, others = rows.end_ns - clocks, reference.end_ns
    is_paired = np.isin(np.arange(len(others)), pairs)
    if _lacks(ends, others, known) or _lacks(others, ends, is_paired):
        return None
    return float(np.median(np.abs(apart - clocks))), found, clocks


def _lacks(ends: NDArray[Any], others: NDArray[Any], paired: NDArray[np.bool_]) -> bool:
    """Say whether of the operations in the time of the others too many are not `paired`."""
    both = (ends >= others.min() - _MOST_NS) & (ends <= others.max() + _MOST_NS)
    return bool((both & ~paired).sum() > max(1.0, _LACKS * both.sum()))


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
        spread = float(np.median(off))
        if spread > _MOST_NS:  # so that of some stretch is, too
            continue
        stretches = np.array_split(off, max(1, len(off) // _STRETCH))
        if all(float(np.median(stretch)) <= _MOST_NS for stretch in stretches):
            fits.append((spread, shift))
    best = min(fits, default=None)
    # Where clocks differ, operations that follow each other evenly fit everywhere: the best must stand out.
    if best is None or (not one_clock and any(s <= _STANDS_OUT * best[0] for s, shift in fits if shift != best[1])):
        return None
    return best[1]
