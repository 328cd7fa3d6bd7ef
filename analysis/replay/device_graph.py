"""What waits for what on ranks whose device work was traced: host calls, kernels, and collectives across ranks.

A profiler's trace has the calls and the kernels, but hardly ever the events by which streams wait for each other. What
is not written down is taken from what PyTorch always does, or inferred from the times; each rule says which.

Source: Lumos and HTA's critical path analysis (the kinds of edges), dPRO (collectives as barriers between ranks).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, MEMORY
from rankscope.analysis.replay.graph import Graph, assemble
from rankscope.analysis.replay.host_graph import HostGraph
from rankscope.analysis.runs.memory_budget import MOST_ROWS
from rankscope.analysis.text.message import text
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.host_breakdown import NO_REGION, PARTS, Spans
from rankscope.errors import NotReplayable

__all__ = ["BETWEEN", "LAUNCH", "device_graph", "first_steps"]

BETWEEN = "between kernels"  # label of the time between kernels that wait for each other
LAUNCH = "launch"  # label of the time from a launch call's begin to the kernel's

_SYNCHRONISES = "Synchronize|Memcpy|Memset|Free|Malloc|HostAlloc|HostRegister"
_LONG_CALL_NS = 100_000  # shorter calls that neither launch nor synchronise are part of the host's time around them
_HANDED_OVER_NS = 20_000  # a thread that was quiet for so long may have waited for the one that launched meanwhile
_CLOCK_NS = (
    1_000_000  # by how much a device's clock may be off before kernels ahead of their launch are no matter of it
)
_NEAR_NS = 10_000  # a kernel that begins so soon after the end of one on another stream has waited for it
_NEAR_SHARE = 0.02  # or within this share of the time that nothing explains
_LONG_GAP_NS, _UNSEEN_WAKE_UP_NS = 1_000_000, 50_000  # host's time that may be a wait no call shows; and how it ends
_AFTER_WAKE_UP = 0.05  # or within this share of that time, in which it did something before its next call
_WOKEN = 0.5  # largest share of a call that may lie after the end of what it waited for
_LOOK_BACK = 64
_MAIN_THREAD = 0
_TRANSFER = PARTS.index("transfer")
_POSITIONS = 1 << 32  # more than there are positions in a cycle
_NEVER = np.iinfo(np.int64).max

Ints = NDArray[np.signedinteger[Any]]  # times take 8 bytes, codes and numbers of nodes 4
Shorts = NDArray[np.int32]
Bools = NDArray[np.bool_]


def device_graph(timeline: Timeline) -> HostGraph:
    """The graph of all ranks that have kernels. Raises `NotReplayable`.

    - A thread does one thing after the other. A thread that was quiet while another one launched work goes on after
      that: backward runs on a thread of its own (inferred).
    - A kernel waits for its launch call to begin and for the kernel before it on its stream; one that communicates also
      for the last other kernel that its thread had launched (NCCL's stream waits for the current one). A kernel that
      none of these explains begins after the one on another stream that ended just before (inferred).
    - A call that synchronises, or frees or copies and so may, or a launch that takes long since the queue is full, ends
      after the last kernel launched before it that ended until then, if it did not go on long after. So does the host
      between calls, if it did nothing for long and went on soon after the last kernel of a stream had ended: not every
      wait shows as a call (inferred).
    - A matched collective is an arrival on each rank, one transfer and an end on each rank. A kernel that communicates
      and has no partner counts with its waiting.
    - A step ends when the work of each stream and thread that ended in it has.

    Delays between these (launch latency, gaps on a stream, time to wake up) are as measured. Where clocks of host and
    device differ so that a kernel precedes its launch, the host's times are moved by the largest such difference.
    """
    kernels, collectives = timeline.kernels, timeline.collectives
    if timeline.steps.is_empty():
        raise NotReplayable(text("no step was seen"))
    if not timeline.comparable:
        raise NotReplayable(text("the ranks number their steps differently"))
    if any(c.error_ns is None for c in timeline.clocks) and timeline.ranks["node"].n_unique() > 1:
        raise NotReplayable(text("the nodes' clocks could not be brought together"))
    named = (timeline.regions["name"], timeline.launches["name"], collectives["op"])
    labels = sorted({LAUNCH, BETWEEN, NO_REGION, COMMUNICATION, *PARTS}.union(*(set(n.unique()) for n in named)))
    code = {label: i for i, label in enumerate(labels)}
    starts = [table["start_ns"].to_numpy() for table in (kernels, timeline.launches, timeline.steps)]
    nodes = _Nodes(min(int(start.min()) for start in starts if len(start)))
    matched = collectives.filter(pl.col("instance_id").is_not_null(), pl.col("device_start_ns").is_not_null())
    matched = matched.with_columns(_position_in_cycle(matched))
    sides: list[_Sides] = []
    unmatched = 0
    tables = [
        (dict(by_rank(table)), table.clear())
        for table in (
            timeline.launches.select("rank", "start_ns", "end_ns", "name", "thread", "correlation"),
            timeline.regions,
            matched,
            timeline.steps,
        )
    ]
    for rank, rows in by_rank(kernels.select("rank", "start_ns", "end_ns", "work", "device", "stream", "correlation")):
        of_rank = (by.get(rank, empty) for by, empty in tables)
        side, alone = _add_rank(nodes, rank, code, rows, *of_rank)
        sides.append(side)
        unmatched += alone
    instances = _add_transfers(nodes, sides)
    graph, number, cycle = nodes.graph(timeline.steps, tuple(PARTS), tuple(labels))
    ends = pl.concat([side.steps for side in sides])
    return HostGraph(
        graph=graph,
        steps=ends.with_columns(before=number[ends["before"].to_numpy()], last=number[ends["last"].to_numpy()]),
        cycle=cycle,
        unmatched=unmatched,
        matched=instances,
    )


def first_steps(timeline: Timeline) -> Timeline:
    """The timeline, with so many of its first steps that it has no more than `MOST_ROWS` kernels and launches.

    Raises `NotReplayable` where these are fewer than two judged steps, or not the only one.
    """
    if timeline.kernels.is_empty() or len(timeline.kernels) + len(timeline.launches) <= MOST_ROWS:
        return timeline
    steps = timeline.steps.filter(pl.col("rank").is_in(timeline.kernels["rank"].unique().implode()))
    numbers = steps["step"].unique().sort().to_numpy()
    tables = [dict(by_rank(table)) for table in (timeline.kernels, timeline.launches)]
    begun = np.zeros(len(numbers), np.int64)  # rows that begin before each step's end
    ends = {}
    for rank, rows in by_rank(steps.sort("rank", "step")):
        at = np.searchsorted(rows["step"].to_numpy(), numbers, side="right") - 1
        ends[rank] = np.where(at >= 0, rows["end_ns"].to_numpy()[at], rows["start_ns"][0])
        for table in tables:
            begun += np.searchsorted(table[rank]["start_ns"].to_numpy(), ends[rank]) if rank in table else 0
    kept = int(np.searchsorted(begun, MOST_ROWS, side="right"))
    first = steps.filter(pl.col("step").is_in(numbers[:kept]))
    if not kept or first.filter("judged")["step"].n_unique() < min(2, steps.filter("judged")["step"].n_unique()):
        raise NotReplayable(
            text("a graph of two steps would have more than {most:,} kernels and launches", most=MOST_ROWS)
        )
    last = {rank: int(end[kept - 1]) for rank, end in ends.items()}
    return replace(
        timeline,
        steps=first,
        kernels=_until(timeline.kernels, last),
        launches=_until(timeline.launches, last),
        collectives=timeline.collectives.filter(pl.col("step") <= numbers[kept - 1]),
    )


def _until(table: pl.DataFrame, ends: dict[int, int]) -> pl.DataFrame:
    """The rows that begin before their rank's end."""
    kept = [rows[: int(rows["start_ns"].search_sorted(ends[rank]))] for rank, rows in by_rank(table) if rank in ends]
    return pl.concat([table.clear(), *kept])


def _position_in_cycle(matched: pl.DataFrame) -> pl.Series:
    """The same number for the same operation of each step: its group, kind, size and place among those."""
    kind = ["group_id", "op", "size_bytes", "peer", "tag"]
    numbered = matched.select(*kind, pl.int_range(pl.len()).over("rank", "step", *kind).alias("_nth"))
    position = pl.struct(*kind, "_nth").rank("dense").cast(pl.Int64) - 1
    return numbered.select(position.alias("_position"))["_position"]


# ---------------------------------------------------------------- nodes in any order


@dataclass(slots=True)
class _Nodes:
    """Nodes as they are found, in blocks."""

    origin_ns: int
    count: int = 0
    columns: dict[str, list[NDArray[np.generic]]] = field(default_factory=dict)
    waits: list[Shorts] = field(default_factory=list)
    waited_for: list[Shorts] = field(default_factory=list)

    def add(
        self,
        duration: Ints,
        end: Ints,
        *,
        rank: int,
        part: Ints | int,
        label: Ints | int,
        instance: Ints | int = -1,
        cycle: Ints | int = -1,
    ) -> Ints:
        """Numbers of new nodes. They began no later than `end` - `duration`."""
        size = len(duration)
        times = {"duration": duration, "end": end, "instance": instance, "cycle": cycle}
        codes = {"rank": rank, "part": part, "label": label}
        for block, kind in ((times, np.int64), (codes, np.int32)):
            for name, values in block.items():
                self.columns.setdefault(name, []).append(np.broadcast_to(np.asarray(values, kind), (size,)))
        self.count += size
        return np.arange(self.count - size, self.count, dtype=np.int32)

    def wait(self, nodes: Ints, others: Ints) -> None:
        """Each of the nodes waits for the other beside it; a negative number is nothing."""
        known = others >= 0
        self.waits.append(nodes[known].astype(np.int32))
        self.waited_for.append(others[known].astype(np.int32))

    def graph(self, steps: pl.DataFrame, parts: tuple[str, ...], labels: tuple[str, ...]) -> tuple[Graph, Shorts, Ints]:
        """The graph, each node's number in it and, by that number, its cycle. What was added is gone then."""
        rows = {name: np.concatenate(self.columns.pop(name)) for name in [*self.columns]}
        waits, self.waits = np.concatenate(self.waits), []
        waited_for, self.waited_for = np.concatenate(self.waited_for), []
        start, unordered = rows["end"] - rows["duration"], rows.pop("cycle")
        graph, number = assemble(
            duration_ns=rows.pop("duration").astype(np.float64),
            waits=waits,
            waited_for=waited_for,
            step=_step_of(steps, rows["rank"], rows["end"]),
            rank=rows.pop("rank"),
            part=rows.pop("part"),
            label=rows.pop("label"),
            instance=rows.pop("instance"),
            start_ns=start,
            end_ns=rows.pop("end"),
            parts=parts,
            labels=labels,
            origin_ns=self.origin_ns,
        )
        cycle = np.empty_like(unordered)
        cycle[number] = unordered
        return graph, number, cycle


def _step_of(steps: pl.DataFrame, rank: Ints, end: Ints) -> Ints:
    """The step in which each node ended, -1 outside; a transfer is in no rank's step."""
    step = np.full(len(rank), -1, np.int32)
    for of, rows in by_rank(steps.sort("rank", "start_ns")):
        mine = np.flatnonzero(rank == of)
        begin, until, number = (rows[c].to_numpy() for c in ("start_ns", "end_ns", "step"))
        at = np.searchsorted(begin, end[mine], side="left") - 1
        step[mine] = np.where((at >= 0) & (end[mine] <= until[at]), number[at], -1)
    return step


# ---------------------------------------------------------------- one rank


@dataclass(frozen=True, slots=True)
class _Calls:
    """Calls of the host that matter, by thread and time, none inside another."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    launches: Bools
    synchronises: Bools


@dataclass(frozen=True, slots=True)
class _Sides:
    """The matched collectives of a rank: node of the arrival and of the end, and when they were."""

    instance: Ints
    arrival: Ints
    done: Ints
    arrived_ns: Ints
    ended_ns: Ints
    label: Ints
    position: Ints  # in the cycle
    residual: Ints  # durations of the ends
    steps: pl.DataFrame  # of `HostGraph`


def _add_rank(
    nodes: _Nodes,
    rank: int,
    code: dict[str, int],
    kernels: pl.DataFrame,
    launches: pl.DataFrame,
    regions: pl.DataFrame,
    matched: pl.DataFrame,
    steps: pl.DataFrame,
) -> tuple[_Sides, int]:
    """Add the nodes of one rank; also says how many of its kernels communicate without a partner."""
    kernels = kernels.sort("device", "stream", "start_ns", "end_ns")
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    calls, call_of = _calls(launches, kernels, code)
    launched = call_of >= 0
    early = (start[launched] - calls.start[call_of[launched]]).min(initial=0)
    if early < 0 and early >= -_CLOCK_NS:  # the host's clock is ahead of the device's by at least that
        calls = _shifted(calls, int(early))
    places = _Places(regions, code, int(min(early, 0)) if early >= -_CLOCK_NS else 0)

    launch_ns = start.copy()
    launch_ns[launched] = calls.start[call_of[launched]]
    launch_thread = np.zeros(len(start), np.int32)
    launch_thread[launched] = calls.thread[call_of[launched]]
    slept_for = _slept_for(calls, end, launch_ns)
    lane = [kernels[c].fill_null(-1).to_numpy() for c in ("device", "stream")]
    stream = np.cumsum(np.concatenate([[False], (np.diff(lane[0]) != 0) | (np.diff(lane[1]) != 0)]))
    gaps = _gaps(nodes, calls, stream, end, launch_ns)
    began, returned = _add_host(nodes, rank, calls, gaps, places, end, slept_for)
    label, part = places.of_launch(launch_ns, launch_thread, launched), _parts_of(kernels)
    unlabelled = label < 0
    label[unlabelled] = np.array([code[p] for p in PARTS])[part[unlabelled]]

    communicates = (kernels["work"] == COMMUNICATION).to_numpy()
    before = _last_to_end(stream, end)
    queued = _current(calls, call_of, communicates, end, start)
    free = np.maximum(np.where(before >= 0, end[before], nodes.origin_ns), np.where(queued >= 0, end[queued], 0))
    # A stream that was still busy is what the kernel waited for, else it is the launch.
    bound_by_launch = launched & (launch_ns >= free)
    latency = np.maximum(start - launch_ns, 0)
    typical = int(np.median(latency[bound_by_launch])) if bound_by_launch.any() else 0
    other = _other_stream(stream, start, end, np.maximum(launch_ns + np.where(launched, typical, 0), free))
    ready = np.maximum(free, np.where(other >= 0, end[other], 0))
    gap = np.clip(start - ready, 0, None)
    by_other = other >= 0
    by_launch = bound_by_launch & ~by_other
    delay = np.where(by_launch, latency, np.minimum(latency, typical))
    gap[by_launch] = 0

    fall = nodes.add(
        delay[launched], (launch_ns + delay)[launched], rank=rank, part=PARTS.index("other"), label=code[LAUNCH]
    )
    nodes.wait(fall, began[call_of[launched]])
    call_node = np.full(len(start), -1, np.int32)
    call_node[launched] = fall
    pause = nodes.add(gap, np.minimum(ready + gap, start), rank=rank, part=PARTS.index("other"), label=code[BETWEEN])
    may_begin = np.maximum(np.where(launched, launch_ns + delay, nodes.origin_ns), ready + gap)
    instance, arrived = _instances(start, end, communicates, matched)
    alone = instance < 0
    own = np.clip(end - np.maximum(start, may_begin), 0, None)
    kernel = np.empty(len(start), np.int32)
    kernel[alone] = nodes.add(own[alone], end[alone], rank=rank, part=part[alone], label=label[alone])
    row = arrived[~alone]
    op = matched["op"].replace_strict(code, return_dtype=pl.Int32).to_numpy()[row]
    position = matched["_position"].to_numpy()[row]
    at = np.maximum(start, may_begin)[~alone]
    arrival = nodes.add(np.zeros_like(at), at, rank=rank, part=_TRANSFER, label=op, instance=instance[~alone])
    residual = np.zeros_like(at)  # filled in once all ranks are known
    done = nodes.add(
        *(residual, end[~alone]),
        rank=rank,
        part=_TRANSFER,
        label=op,
        instance=instance[~alone],
        cycle=(rank + 2) * _POSITIONS + position,
    )
    kernel[~alone] = done
    entered = kernel.copy()
    entered[~alone] = arrival
    for node, waited_for in ((entered, call_node), (entered, pause)):
        nodes.wait(node, waited_for)
    for earlier in (before, queued, other):
        nodes.wait(pause, np.where(earlier >= 0, kernel[earlier], -1))
    for node, kept in ((returned, slept_for), (began, gaps.kernel)):
        nodes.wait(node, np.where(kept >= 0, kernel[kept], -1))
    ended = _add_ends_of_steps(nodes, rank, code, steps, [(stream, end, kernel), (calls.thread, calls.end, returned)])
    side = _Sides(instance[~alone], arrival, done, at, end[~alone], op, position, residual, ended)
    return side, int((alone & communicates).sum())


def _add_ends_of_steps(
    nodes: _Nodes, rank: int, code: dict[str, int], steps: pl.DataFrame, lanes: list[tuple[Ints, Ints, Ints]]
) -> pl.DataFrame:
    """A node at the begin of the first step and at the end of each; lanes are (which, end, node) of what happens."""
    begin, over = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    step = steps["step"].to_numpy()
    host = {"rank": rank, "part": PARTS.index("host"), "label": code[NO_REGION]}
    zero = nodes.add(begin[:1] - nodes.origin_ns, begin[:1], **host)
    last = np.concatenate([begin[:1], over[:-1]])
    earlier: list[Ints] = []
    for which, end, node in lanes:
        order = np.lexsort((end, which))
        for rows in np.split(order, np.flatnonzero(np.diff(which[order])) + 1):
            at = np.searchsorted(end[rows], over, side="right") - 1
            earlier.append(np.where(at >= 0, node[rows[at]], -1) if len(rows) else np.full(len(over), -1))
            last = np.maximum(last, np.where(at >= 0, end[rows[at]], last)) if len(rows) else last
    ends = nodes.add(over - last, over, **host)
    before = np.concatenate([zero, ends[:-1]])
    for others in (before, *earlier):
        nodes.wait(ends, others)
    measured = over - np.concatenate([begin[:1], over[:-1]])
    judged = {"judged": steps["judged"]}
    return pl.DataFrame(
        {"rank": steps["rank"], "step": step, "measured_ns": measured, "before": before, "last": ends} | judged
    )


def _parts_of(kernels: pl.DataFrame) -> Ints:
    part = {COMPUTE: "compute", MEMORY: "memory", COMMUNICATION: "unsplit"}
    code = {work: PARTS.index(name) for work, name in part.items()}
    return np.asarray(kernels["work"].replace_strict(code, return_dtype=pl.Int32).to_numpy())


def _calls(launches: pl.DataFrame, kernels: pl.DataFrame, code: dict[str, int]) -> tuple[_Calls, Ints]:
    """The calls that matter, and per kernel the one that launched it (-1: not seen)."""
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
    calls = _Calls(
        *(values[kept] for values in (start, end, thread, rows["_label"].to_numpy(), launching, synchronises))
    )
    return calls, np.where(row >= 0, number[row], -1) if len(rows) else row


def _shifted(calls: _Calls, by_ns: int) -> _Calls:
    return _Calls(calls.start + by_ns, calls.end + by_ns, calls.thread, calls.name, calls.launches, calls.synchronises)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The host's time before each call: since when, and what the thread did before. -1: nothing."""

    since: Ints
    before: Ints  # the call before on the thread
    other: Ints  # the call of the thread that handed over
    kernel: Ints  # the kernel that was waited for


def _gaps(nodes: _Nodes, calls: _Calls, stream: Ints, end: Ints, launch_ns: Ints) -> _Gaps:
    size = len(calls.start)
    index = np.arange(size)
    first = np.concatenate([[True], calls.thread[1:] != calls.thread[:-1]])[:size]
    before = np.where(first, -1, index - 1)
    since = np.where(first, nodes.origin_ns, calls.end[before])
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
    kept = (kernel >= 0) & (calls.start - end[kernel] <= soon) & (following[kernel] > since)
    return _Gaps(since, before, np.where(handed, other, -1), np.where(kept, kernel, -1))


def _add_host(
    nodes: _Nodes, rank: int, calls: _Calls, gaps: _Gaps, places: _Places, end: Ints, slept_for: Ints
) -> tuple[Ints, Ints]:
    """Two nodes per call: where it began, after the host's own time before it, and where it returned."""
    part, label = places.of_time(np.minimum(gaps.since, calls.start), calls.start, calls.thread)
    since = np.maximum(gaps.since, np.where(gaps.kernel >= 0, end[gaps.kernel], 0)) if len(end) else gaps.since
    began = nodes.add(np.clip(calls.start - since, 0, None), calls.start, rank=rank, part=part, label=label)
    inside = places.of_launch(calls.start, calls.thread, np.ones(len(calls.start), bool))
    name = np.where(calls.launches & ~calls.synchronises & (inside >= 0), inside, calls.name)
    woken = np.where(slept_for >= 0, end[slept_for], 0) if len(end) else 0
    own = calls.end - np.maximum(np.maximum(calls.start, since), woken)
    returned = nodes.add(np.clip(own, 0, None), calls.end, rank=rank, part=PARTS.index("host"), label=name)
    nodes.wait(returned, began)
    for earlier in (gaps.before, gaps.other):
        nodes.wait(began, np.where(earlier >= 0, returned[earlier], -1))
    return began, returned


def _slept_for(calls: _Calls, end: Ints, launch_ns: Ints) -> Ints:
    """The kernel whose end each call that synchronises waited for, -1: none."""
    kernel = _ended_in(np.where(calls.synchronises, calls.start, _NEVER), calls.end, end, launch_ns)
    if not len(end):
        return kernel
    late = calls.end - end[kernel]
    return np.where(late <= np.maximum(_NEAR_NS, _WOKEN * (calls.end - calls.start)), kernel, -1)


def _ended_in(begin: Ints, until: Ints, end: Ints, launch_ns: Ints) -> Ints:
    """The kernel that ended last between these moments of those launched until the first of them, -1: none."""
    found = np.full(len(begin), -1)
    asked = np.flatnonzero(begin < _NEVER)
    if not len(end) or not len(asked):
        return found
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], until[asked], side="right") - 1
    for _ in range(_LOOK_BACK):
        late = (at >= 0) & (launch_ns[order[np.maximum(at, 0)]] > begin[asked])
        if not late.any():
            break
        at = at - late
    kernel = order[np.maximum(at, 0)]
    known = (at >= 0) & (launch_ns[kernel] <= begin[asked]) & (end[kernel] > begin[asked])
    found[asked[known]] = kernel[known]
    return found


def _last_to_end(stream: Ints, end: Ints) -> Ints:
    """The kernel that ended last of those that began before on its stream, -1: none. They are by stream and start."""
    index = np.arange(len(end))
    before = np.full(len(end), -1)
    for rows in np.split(index, np.flatnonzero(np.diff(stream)) + 1):
        reach = np.maximum.accumulate(end[rows])
        last = np.maximum.accumulate(np.where(end[rows] == reach, rows, -1))
        before[rows[1:]] = last[:-1]
    return before


def _current(calls: _Calls, call_of: Ints, communicates: Bools, end: Ints, start: Ints) -> Ints:
    """For each kernel that communicates the last other one that its thread had launched before, -1: none."""
    found = np.full(len(end), -1)
    launched = np.flatnonzero(call_of >= 0)
    order = launched[np.lexsort((start[launched], call_of[launched]))]  # calls are by thread and time
    thread = calls.thread[call_of[order]]
    position = np.arange(len(order))
    last = np.maximum.accumulate(np.where(communicates[order], -1, position)) if len(order) else position
    known = communicates[order] & (last >= 0)
    other = order[np.maximum(last, 0)]
    known &= (thread[np.maximum(last, 0)] == thread) & (end[other] <= start[order])
    found[order[known]] = other[known]
    return found


def _other_stream(stream: Ints, start: Ints, end: Ints, explained: Ints) -> Ints:
    """The kernel of another stream that ended just before one whose begin nothing else explains, -1: none."""
    found = np.full(len(start), -1)
    asked = np.flatnonzero(start - explained > _NEAR_NS)
    order = np.argsort(end, kind="stable")
    at = np.searchsorted(end[order], start[asked], side="right") - 1
    for _ in range(_LOOK_BACK):
        own = (at >= 0) & (stream[order[np.maximum(at, 0)]] == stream[asked])
        if not own.any():
            break
        at = at - own
    other = order[np.maximum(at, 0)]
    delay = start[asked] - explained[asked]
    near = np.maximum(_NEAR_NS, _NEAR_SHARE * delay)
    known = (at >= 0) & (stream[other] != stream[asked]) & (start[asked] - end[other] <= near)
    known &= start[other] < start[asked]
    found[asked[known]] = other[known]
    return found


def _instances(start: Ints, end: Ints, communicates: Bools, matched: pl.DataFrame) -> tuple[Ints, Ints]:
    """Per kernel the instance of its collective and the row in `matched`, -1: none."""
    rows = matched.with_row_index("_row").select("instance_id", "_row", start_ns="device_start_ns", end_ns="end_ns")
    rows = rows.unique(["start_ns", "end_ns"], keep="first", maintain_order=True)
    kernels = pl.DataFrame({"start_ns": start[communicates], "end_ns": end[communicates]})
    found = kernels.join(rows, on=["start_ns", "end_ns"], how="left", maintain_order="left")
    instance, row = np.full(len(start), -1), np.full(len(start), -1)
    for of_all, column in ((instance, "instance_id"), (row, "_row")):
        of_all[communicates] = found[column].cast(pl.Int64).fill_null(-1).to_numpy()
    return instance, row


def _add_transfers(nodes: _Nodes, sides: list[_Sides]) -> int:
    """One node per collective that begins when the last rank has come; each rank ends a little later. How many."""
    instance, arrival, done, arrived, ended, label, position = (
        np.concatenate([getattr(side, f) for side in sides])
        for f in ("instance", "arrival", "done", "arrived_ns", "ended_ns", "label", "position")
    )
    _, first, number = np.unique(instance, return_index=True, return_inverse=True)
    last, done_first = np.full(len(first), np.iinfo(np.int64).min), np.full(len(first), np.iinfo(np.int64).max)
    np.maximum.at(last, number, arrived)
    np.minimum.at(done_first, number, ended)
    duration = np.clip(done_first - last, 0, None)
    transfer = nodes.add(
        *(duration, last + duration),
        rank=-1,
        part=_TRANSFER,
        label=label[first],
        instance=instance[first],
        cycle=position[first],
    )
    nodes.wait(transfer[number], arrival)
    nodes.wait(done, transfer[number])
    residual = np.clip(ended - (last + duration)[number], 0, None)
    for side, own in zip(sides, np.split(residual, np.cumsum([len(side.done) for side in sides])[:-1]), strict=True):
        side.residual[:] = own
    return len(first)


class _Places:
    """In which region of a rank's program something happened."""

    def __init__(self, regions: pl.DataFrame, code: dict[str, int], shift_ns: int) -> None:
        rows = regions.filter(pl.col("end_ns") > pl.col("start_ns")).sort(
            "start_ns", "end_ns", descending=[False, True], maintain_order=True
        )
        self._name = rows["name"].replace_strict(code, return_dtype=pl.Int32).to_numpy()
        kind = rows["kind"]
        stops = {k: PARTS.index(k) for k in ("gc", "input", "compile", "checkpoint")}
        self._part = kind.replace_strict(stops, default=PARTS.index("host"), return_dtype=pl.Int32).to_numpy()
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
