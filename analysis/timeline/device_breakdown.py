"""The breakdown of each rank's device time per step, in parts that add up to the step to the nanosecond.

The meaning of each part is defined in docs/definitions.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, COPIES_TO_HOST, MEMORY, WAITING_CALLS
from rankscope.analysis.model.parts import IDLE_LABELS
from rankscope.analysis.model.tables import numbers
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.host_breakdown import PARTS, Grid, Spans, as_phases, joined
from rankscope.collectors.schema import P2P_OPS

__all__ = ["OWN_GAP_NS", "device_phases", "with_launches", "with_waits"]

_BETWEEN, _QUEUED, _UNSEEN, _NO_REGION = range(len(IDLE_LABELS))

_MAIN_THREAD = 0
_STOPS = ("checkpoint", "compile", "input", "gc")  # what stops the main thread; where several are true the last counts
_NOT_A_PLACE = ("operator", "wait", *_STOPS)  # regions that do not say where in the model work was launched
OWN_GAP_NS = 20_000  # devices begin what is queued within some µs
_NEVER = np.iinfo(np.int64).max

Ints = NDArray[np.signedinteger[Any]]  # codes take 1 or 4 bytes, times 8
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's input. Kernels, collectives and regions are in order of start; labels are codes."""

    step_start: Ints
    step_end: Ints
    step: Ints
    work: dict[str, Spans]  # device rows that last, by what they are; the label is where they were launched
    begins: Ints  # of all of them, in order
    launched: Ints  # when the host launched each, _NEVER where that was not seen
    thread: Ints  # which thread did
    transfers: Spans  # collectives; the label is the operation
    last_arrival: Ints
    split: Bools  # matched, with a wait that is known
    p2p: Bools
    stops: dict[str, Spans]
    hosts_time: dict[int, Spans]  # regions and long operators by thread


def with_launches(kernels: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels, by rank, with `launch_ns` and `launch_thread`.

    When and where the host's call began, else null.

    Of several calls with one correlation the first counts.
    """
    calls, none = dict(by_rank(launches)), launches.clear()
    frames = [_with_calls(rows, calls.get(rank, none)) for rank, rows in by_rank(kernels)]
    return pl.concat([_with_calls(kernels.clear(), none), *frames])


def with_waits(launches: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the launches with `waits`: whether the call returns only when the device has caught up.

    That is so by its name, or of a copy to the host that is over when its call returns: one to pageable memory.

    Source: CUDA Runtime API, "API synchronization behavior".
    """
    is_copy = (pl.col("work") == MEMORY) & pl.col("name").str.contains(COPIES_TO_HOST)
    copied = kernels.filter(is_copy).select("rank", "correlation", copied_ns="end_ns").drop_nulls()
    copied = copied.unique(["rank", "correlation"])
    with_copies = launches.join(copied, on=["rank", "correlation"], how="left", maintain_order="left")
    is_over = (pl.col("copied_ns") <= pl.col("end_ns")).fill_null(value=False)
    return with_copies.with_columns(waits=pl.col("name").str.contains(WAITING_CALLS) | is_over).drop("copied_ns")


def _with_calls(kernels: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the same of one rank. Correlations mostly come in order: sorting them is cheaper than a join."""
    order = np.argsort(calls["correlation"].to_numpy(), kind="stable")
    ordered = calls["correlation"].to_numpy()[order]
    wanted = kernels["correlation"].fill_null(_NEVER).to_numpy()
    at = np.searchsorted(ordered, wanted)
    found = at < len(ordered)
    found[found] = ordered[at[found]] == wanted[found]
    row = pl.Series(np.concatenate([order, [0]])[at], dtype=pl.UInt32).set(pl.Series(~found), None)
    return kernels.with_columns(launch_ns=calls["start_ns"].gather(row), launch_thread=calls["thread"].gather(row))


def device_phases(
    steps: pl.DataFrame, kernels: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame
) -> pl.DataFrame:
    """Return the device's time in disjoint rows: (rank, step, part, label, start_ns, end_ns), ordered.

    The rows of a step cover it without gap or overlap. Time in which a kernel computes is compute, or overlapped if one
    communicates as well; else communication (wait, bubble, transfer or unsplit), else memory. Time in which nothing
    runs is gc, input, compile or checkpoint if that stopped the host's main thread; else host, if the call that
    launched what came next began after the queue was drained; else other. `kernels` has the columns of
    `with_launches`, `collectives` is the matched table.

    Source: HTA's idle time breakdown for the rule on the launch.
    """
    if steps.is_empty():
        return as_phases([], [])
    regions = regions.filter(pl.col("end_ns") > pl.col("start_ns"))
    regions = regions.sort("rank", "start_ns", "end_ns", descending=[False, False, True])
    on_device = pl.col("device_start_ns").is_not_null() & pl.col("end_ns").is_not_null()
    collectives = collectives.filter(on_device).sort("rank", "device_start_ns")
    labels = [*IDLE_LABELS, *PARTS, COMMUNICATION]
    labels += sorted({*regions["name"].unique(), *collectives["op"].unique()} - {*labels})
    code = {label: i for i, label in enumerate(labels)}
    tables = [(dict(by_rank(table)), table.clear()) for table in (kernels, regions, collectives)]
    cut = []
    for rank, of_rank in by_rank(steps.sort("rank", "start_ns")):
        arrays = _rank_arrays(code, of_rank, *(parts.get(rank, empty) for parts, empty in tables))
        cut.append((rank, _cut(arrays)))
    return as_phases(cut, labels)


def _rank_arrays(
    code: dict[str, int], steps: pl.DataFrame, kernels: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame
) -> _Rank:
    kernels = kernels.select("start_ns", "end_ns", "launch_ns", "launch_thread", "work")
    kernels = kernels.filter(pl.col("end_ns") > pl.col("start_ns"))
    if not kernels["start_ns"].is_sorted():
        kernels = kernels.sort("start_ns", maintain_order=True)
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    launched = kernels["launch_ns"].fill_null(_NEVER).to_numpy()
    thread = kernels["launch_thread"].fill_null(_MAIN_THREAD).to_numpy()
    names = numbers(regions["name"], code)
    spans = Spans(regions["start_ns"].to_numpy(), regions["end_ns"].to_numpy(), names)
    on_thread, kind = regions["thread"].to_numpy(), regions["kind"]
    places = _by_thread(spans, on_thread, ~kind.is_in(_NOT_A_PLACE).to_numpy())
    label = _places(places, launched, thread)
    work: dict[str, Spans] = {}
    for name in (COMPUTE, COMMUNICATION, MEMORY):
        of_work = (kernels["work"] == name).to_numpy()
        label[of_work & (label < 0)] = code[name]
        work[name] = Spans(start, end, label).where(of_work)
    begin, done = collectives["device_start_ns"].to_numpy(), collectives["end_ns"].to_numpy()
    operation = numbers(collectives["op"], code)
    return _Rank(
        step_start=steps["start_ns"].to_numpy(),
        step_end=steps["end_ns"].to_numpy(),
        step=steps["step"].to_numpy(),
        work=work,
        begins=start,
        launched=launched,
        thread=thread,
        transfers=Spans(begin, done, operation),
        last_arrival=np.minimum(begin + collectives["wait_ns"].fill_null(0).to_numpy(), done),
        split=collectives["wait_ns"].is_not_null().to_numpy(),
        p2p=collectives["op"].is_in(P2P_OPS).to_numpy(),
        stops={n: spans.where((on_thread == _MAIN_THREAD) & (kind == n).to_numpy()) for n in _STOPS},
        hosts_time=_by_thread(spans, on_thread, ~kind.is_in(_STOPS).to_numpy()),
    )


def _by_thread(spans: Spans, on_thread: Ints, keep: Bools) -> dict[int, Spans]:
    return {int(t): spans.where(keep & (on_thread == t)) for t in np.unique(on_thread[keep])}


def _places(places: dict[int, Spans], launched: Ints, thread: Ints) -> Ints:
    """Return the innermost region in which each row was launched: on its thread, else on the main one, else -1.

    Autograd launches from threads of its own, while the main thread is in the region that called backward.
    """
    label = np.full(len(launched), -1, np.int32)
    for where in (_MAIN_THREAD, *(t for t in places if t != _MAIN_THREAD)):
        mine = np.flatnonzero((thread == where) | (where == _MAIN_THREAD))
        if where in places and len(mine):
            found = places[where].innermost(launched[mine], otherwise=-1)
            label[mine] = np.where(found >= 0, found, label[mine])
    return label


def _cut(rank: _Rank) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """step, position in PARTS, label, start and end of each phase of one rank."""
    edges = [rank.step_start, rank.step_end, rank.transfers.start, rank.last_arrival, rank.transfers.end]
    edges += [edge for spans in (*rank.work.values(), *rank.stops.values()) for edge in (spans.start, spans.end)]
    grid = Grid(edges, rank.step_start[:1], rank.step_end[-1:])
    step = grid.begun(rank.step_start) - 1
    part = np.full(len(grid.start), PARTS.index("other"), np.int8)
    label = np.full(len(grid.start), _BETWEEN, np.int32)
    begun = {name: grid.begun(spans.start) for name, spans in rank.work.items()}
    running = {name: begun[name] > grid.begun(spans.end) for name, spans in rank.work.items()}

    def paint(name: str, where: Bools, spans: Spans, number: Ints) -> None:
        if not len(spans.start):
            return
        part[where] = PARTS.index(name)
        label[where] = _latest(spans, grid.start[where], number[where])

    communicates, computes = running[COMMUNICATION], running[COMPUTE]
    paint("memory", running[MEMORY], rank.work[MEMORY], begun[MEMORY])
    paint("unsplit", communicates, rank.work[COMMUNICATION], begun[COMMUNICATION])
    _split(rank, grid, communicates, part, label)
    paint("compute", computes, rank.work[COMPUTE], begun[COMPUTE])
    part[computes & communicates] = PARTS.index("overlapped")
    idle = ~(computes | communicates | running[MEMORY])
    for name, spans in rank.stops.items():
        number = grid.begun(spans.start)
        paint(name, idle & (number > grid.begun(spans.end)), spans, number)
    _explain(rank, grid, step, idle, begun, part, label)
    return joined(rank.step[step], part, label, grid, grid.start < rank.step_end[step])


def _latest(spans: Spans, at: Ints, begun: Ints) -> Ints:
    """Label of the span that started last and covers each of these moments; spans may overlap in any way.

    `begun` is how many have, one at least that lasts. Where the last started one has ended, the label is that of the
    one that ends last of all begun.
    """
    last = begun - 1
    reach = np.maximum.accumulate(spans.end)
    longest = np.maximum.accumulate(np.where(spans.end == reach, np.arange(len(reach)), 0))
    return spans.label[np.where(spans.end[last] > at, last, longest[last])]


def _split(rank: _Rank, grid: Grid, communicates: Bools, part: Ints, label: Ints) -> None:
    """Write wait, bubble or transfer where all that communicates is matched, and the operation's name."""
    calls = rank.transfers
    if not len(calls.start):
        return
    begun = grid.begun(calls.start)
    known = communicates & (begun > grid.begun(calls.end))
    label[known] = _latest(calls, grid.start[known], begun[known])
    known &= ~grid.covered(calls.where(~rank.split))
    missing = Spans(calls.start, rank.last_arrival, calls.label)
    part[known] = PARTS.index("transfer")
    for name, kind in (("bubble", rank.p2p), ("wait", ~rank.p2p)):
        part[known & grid.covered(missing.where(rank.split & kind))] = PARTS.index(name)


def _explain(rank: _Rank, grid: Grid, step: Ints, idle: Bools, begun: dict[str, Ints], part: Ints, label: Ints) -> None:
    """Write host where the launch queue had drained before the next launch, and what the launching thread did then.

    What else is idle gets the label that says of which sort it is. `begun` is how many rows of each kind of work have.
    """
    dry = np.flatnonzero(idle & ~np.concatenate([[False], idle[:-1]]))
    rest = np.flatnonzero(idle & (part == PARTS.index("other")))
    since = grid.start[dry[np.searchsorted(dry, rest, side="right") - 1]]
    following = sum((number[rest] for number in begun.values()), np.zeros(len(rest), np.int64))  # as all is idle
    # After the last row nothing was launched, however long the host took: that is the host's as well.
    launched = _at_or(rank.launched, following, _NEVER - 1)
    label[rest[_at_or(rank.begins, following, _NEVER) - since > OWN_GAP_NS]] = _QUEUED
    label[rest[launched == _NEVER]] = _UNSEEN
    late = (launched > since) & (launched < _NEVER)
    slow, following = rest[late], following[late]
    if not len(slow):
        return
    new = (np.diff(slow) != 1) | (np.diff(step[slow]) != 0) | (np.diff(following) != 0)
    first, last = np.flatnonzero(np.concatenate([[True], new])), np.flatnonzero(np.concatenate([new, [True]]))
    begin, end = grid.start[slow[first]], grid.end[slow[last]]
    thread = _at_or(rank.thread, following[first], _MAIN_THREAD)
    during = np.full(len(first), _NO_REGION, np.int32)
    for where, spans in rank.hosts_time.items():
        mine = thread == where
        during[mine] = _most_of(spans, begin[mine], end[mine], otherwise=_NO_REGION)
    part[slow] = PARTS.index("host")
    label[slow] = np.repeat(during, last - first + 1)


def _at_or(values: Ints, at: Ints, otherwise: int) -> Ints:
    """Return the values at these positions; `otherwise` at the one after the last."""
    inside = np.minimum(at, len(values) - 1)
    return np.where(at < len(values), values[inside], otherwise) if len(values) else np.full(len(at), otherwise)


def _most_of(spans: Spans, begin: Ints, end: Ints, *, otherwise: int) -> Ints:
    """Label of the innermost of these nested spans that covers more than half of each interval."""
    label = np.full(len(begin), otherwise)
    middle = begin + (end - begin) // 2  # whatever covers more than half covers it
    for level in spans.levels():
        last = np.searchsorted(level.start, middle, side="right") - 1
        covered = np.minimum(level.end[last], end) - np.maximum(level.start[last], begin)
        chosen = (last >= 0) & (2 * covered > end - begin)
        label[chosen] = level.label[last[chosen]]
    return label
