"""Calls of the host that launch or synchronise: where in the program, what came before, and what they waited for.

What is inferred from times is as `device_graph.device_graph` says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.tables import numbers
from rankscope.analysis.timeline.host_breakdown import NO_REGION, PARTS, Spans
from rankscope.collectors.schema import REGION_KINDS

__all__ = [
    "LOOK_BACK",
    "NEAR_NS",
    "Calls",
    "Gaps",
    "Places",
    "calls_that_matter",
    "gaps_between",
    "kernel_slept_for",
    "may_wait",
    "shifted",
]

_SYNCHRONISES = "Synchronize|Memcpy|Memset|Free|Malloc|HostAlloc|HostRegister"
_LONG_CALL_NS = 100_000  # shorter calls that neither launch nor synchronise are part of the host's time around them
_HANDED_OVER_NS = 20_000  # a thread that was quiet for so long may have waited for the one that launched meanwhile
NEAR_NS = 10_000  # a kernel that begins so soon after the end of one on another stream has waited for it
_LONG_GAP_NS, _UNSEEN_WAKE_UP_NS = 1_000_000, 50_000  # host's time that may be a wait no call shows; and how it ends
_AFTER_WAKE_UP = 0.05  # or within this share of that time, in which it did something before its next call
_RECURS, _RECURS_ALIKE = 3, 0.05  # times that this recurs, and how much of the gaps' scatter the delays' may be
_WOKEN = 0.5  # largest share of a call that may lie after the end of what it waited for
LOOK_BACK = 64
_MAIN_THREAD = 0
_NEVER = np.iinfo(np.int64).max
Ints = NDArray[np.signedinteger[Any]]  # times take 8 bytes, codes and numbers of nodes 4
Bools = NDArray[np.bool_]


def may_wait(call: str) -> bool:
    """Say whether a call of this name may last until the device, or another process on it, is done."""
    return re.search(_SYNCHRONISES, call) is not None


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of the host that matter, by thread and time, none inside another."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    launches: Bools
    synchronises: Bools


def calls_that_matter(launches: pl.DataFrame, kernels: pl.DataFrame, code: dict[str, int]) -> tuple[Calls, Ints]:
    """Return the calls that matter, and per kernel the one that launched it (-1: not seen)."""
    rows = launches.sort("thread", "start_ns", "end_ns", descending=[False, False, True]).with_columns(
        pl.col("name").str.contains(_SYNCHRONISES).alias("_sync"),
        pl.col("name").replace_strict(code, return_dtype=pl.Int32).alias("_label"),
    )
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()
    thread = rows["thread"].to_numpy().astype(np.int32)
    correlation = rows["correlation"].to_numpy()
    order = np.argsort(correlation, kind="stable")
    wanted = kernels["correlation"].fill_null(-1).to_numpy()
    place = np.minimum(np.searchsorted(correlation[order], wanted), max(len(order) - 1, 0))
    row = order[place] if len(order) else np.full(len(wanted), -1)
    row = np.where(correlation[row] == wanted, row, -1) if len(order) else row
    # A runtime call wraps the driver's: only the outer one counts.
    within = np.zeros(len(rows), bool)
    for of in np.unique(thread):
        mine = np.flatnonzero(thread == of)
        within[mine[1:]] = end[mine][1:] <= np.maximum.accumulate(end[mine])[:-1]
    outer = np.maximum.accumulate(np.where(within, -1, np.arange(len(rows)))) if len(rows) else np.empty(0, np.int64)
    row = np.where(row >= 0, outer[row], -1) if len(rows) else row
    launching = np.zeros(len(rows), bool)
    launching[row[row >= 0]] = True
    synchronises = rows["_sync"].to_numpy() | (launching & (end - start >= _LONG_CALL_NS))
    kept = ~within & (launching | synchronises | (end - start >= _LONG_CALL_NS))
    number = np.cumsum(kept) - 1
    calls = Calls(
        *(values[kept] for values in (start, end, thread, rows["_label"].to_numpy(), launching, synchronises))
    )
    return calls, np.where(row >= 0, number[row], -1) if len(rows) else row


def shifted(calls: Calls, by_ns: int) -> Calls:
    return Calls(calls.start + by_ns, calls.end + by_ns, calls.thread, calls.name, calls.launches, calls.synchronises)


@dataclass(frozen=True, slots=True)
class Gaps:
    """The host's time before each call: since when, and what the thread did before. -1: nothing."""

    since: Ints
    before: Ints  # the call before on the thread
    other: Ints  # the call of the thread that handed over
    kernel: Ints  # the kernel that was waited for


def gaps_between(origin_ns: int, calls: Calls, places: Places, stream: Ints, end: Ints, launch_ns: Ints) -> Gaps:
    size = len(calls.start)
    index = np.arange(size)
    first = np.concatenate([[True], calls.thread[1:] != calls.thread[:-1]])[:size]
    before = np.where(first, -1, index - 1)
    since = np.where(first, origin_ns, calls.end[before])
    in_time = np.argsort(calls.start, kind="stable")
    latest = np.full(size, -1)  # the launch before, of any thread
    latest[in_time[1:]] = np.maximum.accumulate(np.where(calls.launches[in_time], index, -1))[:-1]
    other = np.where(latest >= 0, in_time[latest], -1)
    handed = (other >= 0) & (calls.thread[other] != calls.thread) & (calls.start[other] > since)
    handed &= (calls.start - since >= _HANDED_OVER_NS) & (calls.end[other] <= calls.start)
    since = np.maximum(since, np.where(handed, calls.end[other], 0))
    following = np.append(np.where(np.diff(stream) == 0, launch_ns[1:], _NEVER), _NEVER)[: len(end)]
    long = np.where(calls.start - since >= _LONG_GAP_NS, since, _NEVER)
    kernel = _ended_in(long, calls.start, end, launch_ns)
    soon = np.maximum(_UNSEEN_WAKE_UP_NS, _AFTER_WAKE_UP * (calls.start - since))
    kept = (kernel >= 0) & (calls.start - end[kernel] <= soon)
    asked = np.flatnonzero(kept)
    ran_dry = following[kernel[asked]] > since[asked]
    kept[asked] = ran_dry | _recur(calls, places, asked, since[asked], end[kernel[asked]])
    return Gaps(since, before, np.where(handed, other, -1), np.where(kept, kernel, -1))


def _recur(calls: Calls, places: Places, asked: Ints, since: Ints, kernel_end: Ints) -> Bools:
    """Return which of these calls follow a kernel's end by the same time whenever their thread is there.

    However long it was quiet before: they wait for it, though the stream had more to do (for an event in its middle).
    """
    begin = calls.start[asked]
    part, label = places.of_time(since, begin, calls.thread[asked])
    _, of = np.unique(np.stack([calls.thread[asked], part, label]), axis=1, return_inverse=True)
    same = np.zeros(len(asked), bool)
    for one in range(of.max(initial=-1) + 1):
        rows = np.flatnonzero(of == one)
        after, quiet = (begin - kernel_end)[rows], (begin - since)[rows]
        same[rows] = len(rows) >= _RECURS and np.ptp(after) <= _RECURS_ALIKE * np.ptp(quiet)
    return same


def kernel_slept_for(calls: Calls, end: Ints, launch_ns: Ints) -> Ints:
    """Return the kernel whose end each call that synchronises waited for, -1: none."""
    kernel = _ended_in(np.where(calls.synchronises, calls.start, _NEVER), calls.end, end, launch_ns)
    if not len(end):
        return kernel
    late = calls.end - end[kernel]
    return np.where(late <= np.maximum(NEAR_NS, _WOKEN * (calls.end - calls.start)), kernel, -1)


def _ended_in(begin: Ints, until: Ints, end: Ints, launch_ns: Ints) -> Ints:
    """Return the kernel that ended last between these moments of those launched until the first of them, -1: none."""
    found = np.full(len(begin), -1)
    asked = np.flatnonzero(begin < _NEVER)
    if not len(end) or not len(asked):
        return found
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], until[asked], side="right") - 1
    for _ in range(LOOK_BACK):
        late = (at >= 0) & (launch_ns[order[np.maximum(at, 0)]] > begin[asked])
        if not late.any():
            break
        at = at - late
    kernel = order[np.maximum(at, 0)]
    known = (at >= 0) & (launch_ns[kernel] <= begin[asked]) & (end[kernel] > begin[asked])
    found[asked[known]] = kernel[known]
    return found


class Places:
    """In which region of a rank's program something happened."""

    def __init__(self, regions: pl.DataFrame, code: dict[str, int], shift_ns: int) -> None:
        rows = regions.filter(pl.col("end_ns") > pl.col("start_ns")).sort(
            "start_ns", "end_ns", descending=[False, True], maintain_order=True
        )
        self._name = numbers(rows["name"], code)
        kind = rows["kind"]
        stops = ("gc", "input", "compile", "checkpoint")
        self._part = numbers(kind, {k: PARTS.index(k if k in stops else "host") for k in REGION_KINDS})
        spans = Spans(
            rows["start_ns"].to_numpy() + shift_ns, rows["end_ns"].to_numpy() + shift_ns, np.arange(len(rows))
        )
        thread = rows["thread"].to_numpy()
        is_place = ~kind.is_in(["operator", "wait", *stops]).to_numpy()
        threads = np.unique(thread)
        self._all = {int(t): spans.where(thread == t) for t in threads}
        self._places = {int(t): spans.where((thread == t) & is_place) for t in threads}
        self._no_region = code[NO_REGION]

    def of_launch(self, at: Ints, thread: Ints, known: Bools) -> Ints:
        """Label of the innermost region at these times on these threads, else on the main one, else -1."""
        row = np.full(len(at), -1)
        for of in (_MAIN_THREAD, *(t for t in self._places if t != _MAIN_THREAD)):
            mine = np.flatnonzero(known & ((thread == of) | (of == _MAIN_THREAD)))
            if of in self._places and len(mine):
                found = self._places[of].innermost(at[mine], otherwise=-1)
                row[mine] = np.where(found >= 0, found, row[mine])
        return np.where(row >= 0, self._name[row], -1) if len(self._name) else row

    def of_time(self, begin: Ints, end: Ints, thread: Ints) -> tuple[Ints, Ints]:
        """Part and label of the host's time between these moments: those of the innermost region in the middle."""
        row = np.full(len(begin), -1)
        middle = begin + (end - begin) // 2
        for of, spans in self._all.items():
            mine = np.flatnonzero(thread == of)
            if len(mine):
                row[mine] = spans.innermost(middle[mine], otherwise=-1)
        if not len(self._name):
            return np.full(len(begin), PARTS.index("host")), np.full(len(begin), self._no_region)
        part = np.where(row >= 0, self._part[row], PARTS.index("host"))
        return part, np.where(row >= 0, self._name[row], self._no_region)
