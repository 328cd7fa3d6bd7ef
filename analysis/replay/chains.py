"""The chains of main threads: their own time, cut where operations are called, and spans in which they are blocked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import among, distinct_in_order
from rankscope.analysis.model.parts import BLOCKED
from rankscope.analysis.model.pointers import pointer
from rankscope.analysis.replay.graph import Ints, Shorts
from rankscope.analysis.timeline.rank_keys import RankKeys

try:
    from rankscope.analysis.replay import _replay
except ImportError:  # it is built where there is a C compiler
    _replay = None  # type: ignore[assignment]

__all__ = ["Chains", "chains_of"]

_NONE = -1

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Chains:
    """The main threads' nodes, rank after rank; times are keys, see `RankKeys`."""

    start: Ints
    end: Ints
    phase: Shorts  # row of the phases, -1 in a gap between steps
    place: Ints
    blocked: Bools

    @cached_property
    def before(self) -> Ints:
        """The node that ends where each begins. Nodes 0 to ranks - 1 end where the ranks begin."""
        before = np.arange(len(self.start)) + self.place[-1]
        first = np.flatnonzero(np.diff(self.place, prepend=_NONE))
        before[first] = self.place[first]
        return np.asarray(before)

    def node_before(self, key: Ints) -> Ints:
        """Return the node that ends at these times, at each of which one begins."""
        return self.before[np.searchsorted(self.start, key)]


def chains_of(phases: pl.DataFrame, keys: RankKeys, arrivals: Ints) -> Chains:
    """Return the phases, cut at arrivals, those in which a rank is blocked joined between them."""
    place = keys.place(phases)
    offset = place * keys.span - keys.origin
    low, high = (phases[column].to_numpy() + offset for column in ("start_ns", "end_ns"))
    ends, calls = (np.sort(times, kind="stable") for times in (high, arrivals))  # they nearly are
    step, blocked = phases["step"].to_numpy(), phases["part"].is_in(BLOCKED).to_numpy()
    if _replay is None:
        return _spans_in_python(low, high, calls, place, step, blocked, keys.span)
    most = 2 * len(low) + len(calls)
    start, end, of_rank = (np.empty(most, np.int64) for _ in range(3))
    phase, is_blocked = np.empty(most, np.int32), np.empty(most, np.bool_)
    given: list[NDArray[Any]] = [low, high, ends, calls, place, np.ascontiguousarray(step, dtype=np.int32), blocked]
    found: list[NDArray[Any]] = [start, end, phase, of_rank, is_blocked]
    n = _replay.spans(len(low), len(calls), keys.span, *map(pointer, given + found))
    return Chains(start[:n], end[:n], phase[:n], of_rank[:n], is_blocked[:n])


def _spans_in_python(
    low: Ints, high: Ints, calls: Ints, place: Ints, step: NDArray[np.integer], blocked: Bools, span: int
) -> Chains:
    at = distinct_in_order(np.concatenate([low, high, calls]))
    phase = np.searchsorted(low, at[:-1], side="right") - 1
    start, end = at[:-1], at[1:]
    inside = start < high[phase]
    # Between the last phase of a rank and the first of the next one there is nothing.
    on_chain = inside | (end // span == place[phase])
    start, end, phase, inside = start[on_chain], end[on_chain], phase[on_chain], inside[on_chain]
    place, step, blocked = place[phase], step[phase], blocked[phase] & inside
    goes_on = blocked[1:] & blocked[:-1] & ~among(start, calls)[1:] & (step[1:] == step[:-1]) & (start[1:] == end[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~goes_on]))
    last = np.concatenate([first[1:], [len(start)]]) - 1
    of = np.where(inside, phase, _NONE)[first].astype(np.int32)
    return Chains(start[first], end[last], of, place[first], blocked[first])
