"""Finds which two ranks each kernel of point-to-point communication is of.

Such a kernel sends, receives or both, and of one stream each may be with another rank: the stages of a pipeline have
one communicator, and so one stream, for both of their neighbours. So it is single kernels that fit: both ranks' end
together and overlap. Ranks that work in step end theirs at about the same time too, so each kernel is taken with the
one that ends nearest, if both are each other's nearest, and of the pairs of streams those that are needed: the fewest
that explain nearly all kernels of their streams.

Source: NCCL user guide, "Point-to-point communication"; torch.distributed's `batch_isend_irecv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["CLOSE_NS", "ENOUGH", "MOST_NS", "SLACK_NS", "Clocks", "Stream", "exchanges"]

# How far apart ends of one operation are, but for what clocks differ by: 18 us at most in traces of five jobs (median),
# while ranks that only keep in step are some 100 us apart.
CLOSE_NS, MOST_NS = 20_000, 50_000
SLACK_NS = 50_000  # by how much one operation may end on a rank before it begins on another: clocks of devices differ
ENOUGH = 8  # operations from which on they show more than chance
_OF_ONE_CLOCK_NS, _BY_UNIX_TIME_NS = 1_000_000, 10_000_000  # by how much clocks may differ from what is known of them
_STANDS_OUT = 0.75  # of the kernels that end together at one difference of two clocks; at any other it is fewer
_LEAST = 0.1  # of the kernels of the shorter stream
_NEARLY_ALL = 0.9  # of a stream's kernels, from the first that has a partner to the last
_NEEDED = 0.5  # of a pair's kernels, at least, have no other partner

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The communication kernels of one stream, in their order."""

    rank: int
    node: int
    clock: int  # times of streams of one are of one clock
    kind: Ints
    way: Ints  # of each 1 if it is said to send, -1 to receive, else 0
    start_ns: Ints
    end_ns: Ints
    rows: Ints  # in the frame of all streams

    def only(self, which: Bools | Ints) -> Stream:
        columns = ("kind", "way", "start_ns", "end_ns", "rows")
        return replace(self, **{column: getattr(self, column)[which] for column in columns})


@dataclass(frozen=True, slots=True)
class Clocks:
    """What is known of clocks: by how much each is ahead of another one by groups that span them, and of unix time."""

    placed: Mapping[int, tuple[int, float]]  # the other one, and by how much
    unix_ns: Mapping[int, int]  # when time 0 was

    def between(self, one: int, other: int) -> list[tuple[float, float]]:
        """Return by how much the second clock may be ahead, and what each guess may be off by."""
        if one == other:
            return [(0.0, _OF_ONE_CLOCK_NS)]
        (root, ahead), (of, beyond) = (self.placed.get(clock, (clock, 0.0)) for clock in (one, other))
        guesses: list[tuple[float, float]] = [(beyond - ahead, _OF_ONE_CLOCK_NS)] if root == of else []
        if one in self.unix_ns and other in self.unix_ns:
            guesses.append((float(self.unix_ns[one] - self.unix_ns[other]), _BY_UNIX_TIME_NS))
        return guesses


@dataclass(frozen=True, slots=True)
class _Couples:
    """Two kernels each that may be one operation: their pair of streams, their numbers, and how far apart they end."""

    pair: Ints
    one: Ints
    other: Ints
    off_ns: Floats

    def only(self, which: Bools | Ints | slice) -> _Couples:
        return _Couples(self.pair[which], self.one[which], self.other[which], self.off_ns[which])


def exchanges(
    streams: Sequence[Stream],
    pairs: Sequence[tuple[int, int]],
    together: Mapping[int, tuple[int, float]],
    clocks: Clocks,
) -> dict[tuple[int, int], tuple[Ints, Ints]]:
    """Return which kernels of which two streams are one operation, in order, by positions.

    Only these `pairs` of streams may exchange something. `together` are streams that look like one group: its number,
    and how far apart their ends are, ns. They are taken apart only if all of them have partners no farther from them.
    """
    first = np.cumsum([0, *(len(stream.rows) for stream in streams)])
    couples = _couples(streams, pairs, together, clocks)
    least = np.array([max(ENOUGH, _LEAST * min(len(streams[of].rows) for of in pair)) for pair in pairs])
    left = set(range(len(streams)))
    while True:
        may = np.array([one in left and other in left for one, other in pairs], np.bool_)
        found = _in_order(_of_needed_pairs(couples, may, least))
        shares = {n: _share(found, first[n : n + 2], together.get(n, (n, np.inf))[1]) for n in left}
        of_group: dict[int, float] = {}
        for n, share in shares.items():
            group = together.get(n, (-1 - n, 0.0))[0]
            of_group[group] = min(share, of_group.get(group, share))
        lowest = min(of_group.values(), default=1.0)
        if lowest >= _NEARLY_ALL:
            break
        left = {n for n in left if of_group[together.get(n, (-1 - n, 0.0))[0]] > lowest}
    ids = {number: (found.one[found.pair == number], found.other[found.pair == number]) for number in set(found.pair)}
    return {pairs[n]: (one - first[pairs[n][0]], other - first[pairs[n][1]]) for n, (one, other) in ids.items()}


def _couples(
    streams: Sequence[Stream],
    pairs: Sequence[tuple[int, int]],
    together: Mapping[int, tuple[int, float]],
    clocks: Clocks,
) -> _Couples:
    """Return the kernels of each pair of streams that end together, at the difference of clocks at which most do."""
    first = np.cumsum([0, *(len(stream.rows) for stream in streams)])
    none = np.empty(0, np.int64)
    found = [_Couples(none, none, none, np.empty(0))]
    for number, (a, b) in enumerate(pairs):
        guesses = clocks.between(streams[a].clock, streams[b].clock)
        best = max(
            (_ending_together(streams[a], streams[b], *guess) for guess in guesses),
            key=lambda found: len(found[0]),
            default=None,
        )
        most = min(together[of][1] if of in together else MOST_NS for of in (a, b))
        if best is not None and len(best[0]) and np.median(best[2]) <= most:
            here, there, off = best
            found.append(_Couples(np.full(len(off), number), here + first[a], there + first[b], off))
    return _joined(found)


def _joined(parts: Sequence[_Couples]) -> _Couples:
    return _Couples(*(np.concatenate([getattr(part, column) for part in parts]) for column in _Couples.__slots__))


def _ending_together(one: Stream, other: Stream, ahead_ns: float, most_ns: float) -> tuple[Ints, Ints, Floats]:
    """Return the positions of kernels of both that may be one operation, and how far apart they end."""
    here, there = _near(one.end_ns, other.end_ns - round(ahead_ns), round(most_ns))
    opposite = one.way[here] * other.way[there] <= 0
    here, there = here[opposite], there[opposite]
    apart = other.end_ns[there] - one.end_ns[here]
    ahead = _ahead(apart, certain=one.clock == other.clock)
    off = np.abs(apart - ahead)
    begun = np.maximum(one.start_ns[here], other.start_ns[there] - ahead)
    over = np.minimum(one.end_ns[here], other.end_ns[there] - ahead)
    fit = (off <= MOST_NS) & (begun <= over + SLACK_NS)
    return here[fit], there[fit], off[fit]


def _near(one: Ints, other: Ints, most_ns: int) -> tuple[Ints, Ints]:
    """Return the positions of all two times that are at most so far apart."""
    low, high = np.searchsorted(other, one - most_ns), np.searchsorted(other, one + most_ns, side="right")
    count = high - low
    here = np.repeat(np.arange(len(one)), count)
    return here, np.arange(len(here)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)


def _ahead(apart: Ints, *, certain: bool) -> float:
    """Return the difference at which most ends fall together; infinite: too few, or nearly as many at another one."""
    if len(apart) < ENOUGH:
        return np.inf
    ordered = np.sort(apart)
    count = np.searchsorted(ordered, ordered + 2 * CLOSE_NS, side="right") - np.arange(len(ordered))
    best = int(count.argmax())
    ahead = float(np.median(ordered[best : best + count[best]]))
    others = count[np.abs(ordered + CLOSE_NS - ahead) > MOST_NS + CLOSE_NS]
    stands_out = certain or others.max(initial=0) < _STANDS_OUT * count[best]
    return ahead if count[best] >= ENOUGH and stands_out else np.inf


def _of_needed_pairs(couples: _Couples, may: Bools, least: Floats) -> _Couples:
    """Return the operations of the fewest pairs of streams that explain as many kernels as all that `may`."""
    may = may.copy()
    while True:
        found = _nearest(couples, may)
        count = np.bincount(found.pair, minlength=len(may))
        few = may & (count < least)
        if few.any():
            may &= ~few | (count > max(count[few].min(), ENOUGH / 2))
            continue
        for number in sorted(np.flatnonzero(may), key=lambda pair: count[pair]):
            without = may.copy()
            without[number] = False
            if len(found.pair) - len(_nearest(couples, without).pair) < _NEEDED * count[number]:
                may = without
                break
        else:
            return found


def _nearest(couples: _Couples, may: Bools) -> _Couples:
    """Return the kernels of the pairs that `may` that are each other's nearest, but for those with a nearer one."""
    left = couples.only(may[couples.pair])
    left = left.only(np.argsort(left.off_ns, kind="stable"))
    kernels = 1 + int(max(left.one.max(initial=0), left.other.max(initial=0)))
    found = [left.only(slice(0))]
    while len(left.pair):
        nearest = np.full(kernels, len(left.pair))
        for side in (left.one, left.other):
            np.minimum.at(nearest, side, np.arange(len(side)))
        mutual = nearest[left.one] == nearest[left.other]
        found.append(left.only(mutual))
        taken = np.zeros(kernels, np.bool_)
        taken[found[-1].one] = taken[found[-1].other] = True
        left = left.only(~taken[left.one] & ~taken[left.other])
    return _joined(found)


def _in_order(couples: _Couples) -> _Couples:
    """Return the operations by pair and place, without those that would come in another order on the other stream."""
    ordered = couples.only(np.lexsort((couples.one, couples.pair)))
    keep = np.ones(len(ordered.pair), np.bool_)
    for pair in np.unique(ordered.pair):
        mine = ordered.pair == pair
        keep[mine] = ordered.other[mine] == np.maximum.accumulate(ordered.other[mine])
    return ordered.only(keep)


def _share(couples: _Couples, first: Ints, apart_ns: float) -> float:
    """Return the share of a stream's kernels that have partners; none, if these end farther apart than `apart_ns`.

    Recordings begin and end on each rank at another time: what comes before and after all partners does not count.
    """
    in_one, in_other = (((side >= first[0]) & (side < first[1])) for side in (couples.one, couples.other))
    mine = np.concatenate([couples.one[in_one], couples.other[in_other]])
    if len(mine) < ENOUGH or np.median(couples.off_ns[in_one | in_other]) > min(apart_ns, CLOSE_NS):
        return 0.0
    return float(len(mine) / (mine.max() - mine.min() + 1))
