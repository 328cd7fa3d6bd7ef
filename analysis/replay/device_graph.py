"""The dependency graph of ranks whose device work was traced: host calls, kernels, and collectives across ranks.

A profiler's trace has the calls and the kernels, but hardly ever the events by which streams wait for each other. What
is not written down is taken from what PyTorch always does, or inferred from the times; each rule says which.

Source: Lumos and HTA's critical path analysis (the kinds of edges), dPRO (collectives as barriers between ranks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, MEMORY
from rankscope.analysis.model.tables import numbers
from rankscope.analysis.replay.host_calls import (
    Calls,
    Gaps,
    Places,
    calls_that_matter,
    gaps_between,
    kernel_slept_for,
    shifted,
)
from rankscope.analysis.replay.host_graph import HostGraph
from rankscope.analysis.replay.kernel_order import ended_just_before, last_launched_before, last_to_end
from rankscope.analysis.replay.node_blocks import NodeBlocks
from rankscope.analysis.runs.memory_budget import ENOUGH_ROWS, ENOUGH_STEPS, MOST_ROWS
from rankscope.analysis.text.message import text
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.host_breakdown import NO_REGION, PARTS
from rankscope.errors import NotReplayable

__all__ = ["BETWEEN", "LAUNCH", "device_graph", "first_steps"]

BETWEEN = "between kernels"  # label of the time between kernels that wait for each other
LAUNCH = "launch"  # label of the time from a launch call's begin to the kernel's
_CLOCK_NS = (
    1_000_000  # by how much a device's clock may be off before kernels ahead of their launch are no matter of it
)
_TRANSFER = PARTS.index("transfer")
_POSITIONS = 1 << 32  # more than there are positions in a cycle
Ints = NDArray[np.signedinteger[Any]]  # times take 8 bytes, codes and numbers of nodes 4
Bools = NDArray[np.bool_]


def device_graph(timeline: Timeline) -> HostGraph:
    """Return the graph of all ranks that have kernels. Raises `NotReplayable`.

    - A thread does one thing after the other. A thread that was quiet while another one launched work goes on after
      that: backward runs on a thread of its own (inferred).
    - A kernel waits for its launch call to begin and for the kernel before it on its stream; one that communicates also
      for the last other kernel that its thread had launched (NCCL's stream waits for the current one). A kernel that
      none of these explains begins after the one on another stream that ended just before (inferred).
    - A call that synchronises, or frees or copies and so may, or a launch that takes long since the queue is full, ends
      after the last kernel launched before it that ended until then, if it did not go on long after. So does the host
      between calls, if it did nothing for long and went on soon after the last kernel of a stream had ended, or at the
      same place of the program always equally soon after a kernel's end: not every wait shows as a call (inferred).
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
    nodes = NodeBlocks(min(int(start.min()) for start in starts if len(start)))
    matched = collectives.filter(pl.col("instance_id").is_not_null(), pl.col("device_start_ns").is_not_null())
    matched = matched.with_columns(_position_in_cycle(matched))
    sides: list[_Sides] = []
    ends: list[pl.DataFrame] = []
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
        side, ended, alone = _add_rank(nodes, rank, code, rows, *of_rank)
        sides.append(side)
        ends.append(ended)
        unmatched += alone
    instances = _add_transfers(nodes, sides)
    graph, cycle = nodes.graph(timeline.steps, tuple(PARTS), tuple(labels))
    return HostGraph(
        graph=graph,
        steps=pl.concat(ends),
        cycle=cycle,
        unmatched=unmatched,
        matched=instances,
    )


def first_steps(timeline: Timeline) -> Timeline:
    """Return the timeline with its first steps: all, as many as are enough, or as many as a graph may have.

    Enough are `ENOUGH_STEPS` judged ones, or the more that have `ENOUGH_ROWS` kernels and launches together; a graph
    has no more than `MOST_ROWS` of these.

    Raises `NotReplayable` where these are fewer than two judged steps, or not the only one.
    """
    count = len(timeline.kernels) + len(timeline.launches)
    if timeline.kernels.is_empty() or count <= ENOUGH_ROWS:
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
    judged = np.cumsum(np.isin(numbers, steps.filter("judged")["step"].unique().to_numpy()))
    fit, few = (int(np.searchsorted(begun, most, side="right")) for most in (MOST_ROWS, ENOUGH_ROWS))
    kept = min(fit, max(few, int(np.searchsorted(judged, ENOUGH_STEPS)) + 1), len(numbers))
    if kept == len(numbers) and count <= MOST_ROWS:
        return timeline
    if not kept or judged[kept - 1] < min(2, judged[-1]):
        raise NotReplayable(
            text("a graph of two steps would have more than {most:,} kernels and launches", most=MOST_ROWS)
        )
    first = steps.filter(pl.col("step").is_in(numbers[:kept]))
    last = {rank: int(end[kept - 1]) for rank, end in ends.items()}
    return replace(
        timeline,
        steps=first,
        kernels=_until(timeline.kernels, last),
        launches=_until(timeline.launches, last),
        collectives=timeline.collectives.filter(pl.col("step") <= numbers[kept - 1]),
    )


def _until(table: pl.DataFrame, ends: dict[int, int]) -> pl.DataFrame:
    """Return the rows that begin before their rank's end."""
    kept = [rows[: int(rows["start_ns"].search_sorted(ends[rank]))] for rank, rows in by_rank(table) if rank in ends]
    return pl.concat([table.clear(), *kept])


def _position_in_cycle(matched: pl.DataFrame) -> pl.Series:
    """Return the same number for the same operation of each step: its group, kind, size and place among those."""
    kind = ["group_id", "op", "size_bytes", "peer", "tag"]
    numbered = matched.select(*kind, pl.int_range(pl.len()).over("rank", "step", *kind).alias("_nth"))
    position = pl.struct(*kind, "_nth").rank("dense").cast(pl.Int64) - 1
    return numbered.select(position.alias("_position"))["_position"]


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


@dataclass(frozen=True, slots=True)
class _Launched:
    """The host's side of a rank, and by kernel what launched it."""

    calls: Calls
    places: Places
    call: Ints  # number of the call, -1: not seen
    seen: Bools
    launch_ns: Ints  # where it was not seen, the kernel's begin
    thread: Ints
    enqueued_ns: Ints  # what no call launched was before the trace began


@dataclass(frozen=True, slots=True)
class _Waits:
    """By kernel: which others it waits for (-1: none), when they are done, and what then still passes."""

    before: Ints  # on its stream
    queued: Ints  # of its thread
    other: Ints  # of another stream
    ready_ns: Ints
    gap_ns: Ints  # after these
    delay_ns: Ints  # after the launch call's begin


def _add_rank(
    nodes: NodeBlocks,
    rank: int,
    code: dict[str, int],
    kernels: pl.DataFrame,
    launches: pl.DataFrame,
    regions: pl.DataFrame,
    matched: pl.DataFrame,
    steps: pl.DataFrame,
) -> tuple[_Sides, pl.DataFrame, int]:
    """Add the nodes of one rank.

    Returns its collectives, the ends of its steps as `HostGraph.steps`, and how many of its kernels communicate without
    a partner.
    """
    kernels = kernels.sort("device", "stream", "start_ns", "end_ns")
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    host = _launched(launches, regions, kernels, code, nodes.origin_ns)
    calls, places, launched = host.calls, host.places, host.seen
    slept_for = kernel_slept_for(calls, end, host.enqueued_ns)
    lane = [kernels[c].fill_null(-1).to_numpy() for c in ("device", "stream")]
    stream = np.cumsum(np.concatenate([[False], (np.diff(lane[0]) != 0) | (np.diff(lane[1]) != 0)]))
    gaps = gaps_between(nodes.origin_ns, calls, places, stream, end, host.enqueued_ns)
    began, returned = _add_host(nodes, rank, calls, gaps, places, end, slept_for)
    part, label = _labels_of(kernels, host, code)
    communicates = (kernels["work"] == COMMUNICATION).to_numpy()
    waits = _waits(host, stream, communicates, start, end, nodes.origin_ns)
    after_launch = (host.launch_ns + waits.delay_ns)[launched]

    fall = nodes.add(waits.delay_ns[launched], after_launch, rank=rank, part=PARTS.index("other"), label=code[LAUNCH])
    nodes.wait(fall, began[host.call[launched]])
    call_node = np.full(len(start), -1, np.int32)
    call_node[launched] = fall
    after_others = waits.ready_ns + waits.gap_ns
    pause = nodes.add(
        waits.gap_ns, np.minimum(after_others, start), rank=rank, part=PARTS.index("other"), label=code[BETWEEN]
    )
    may_begin = np.maximum(after_others, nodes.origin_ns)
    may_begin[launched] = np.maximum(after_others[launched], after_launch)
    instance, arrived = _instances(start, end, communicates, matched)
    alone = instance < 0
    own = np.clip(end - np.maximum(start, may_begin), 0, None)
    kernel = np.empty(len(start), np.int32)
    when = host.launch_ns
    kernel[alone] = nodes.add(
        own[alone], end[alone], rank=rank, part=part[alone], label=label[alone], launched=when[alone]
    )
    at = np.maximum(start, may_begin)[~alone]
    sides = _add_sides(nodes, rank, code, matched[arrived[~alone]], at, end[~alone], when[~alone])
    kernel[~alone] = sides.done
    entered = kernel.copy()
    entered[~alone] = sides.arrival
    for node, waited_for in ((entered, call_node), (entered, pause)):
        nodes.wait(node, waited_for)
    for earlier in (waits.before, waits.queued, waits.other):
        nodes.wait(pause, np.where(earlier >= 0, kernel[earlier], -1))
    for node, kept in ((returned, slept_for), (began, gaps.kernel)):
        nodes.wait(node, np.where(kept >= 0, kernel[kept], -1))
    ended = _add_ends_of_steps(nodes, rank, code, steps, [(stream, end, kernel), (calls.thread, calls.end, returned)])
    return sides, ended, int((alone & communicates).sum())


def _add_sides(
    nodes: NodeBlocks,
    rank: int,
    code: dict[str, int],
    matched: pl.DataFrame,
    arrived_ns: Ints,
    ended_ns: Ints,
    launched_ns: Ints,
) -> _Sides:
    """Return the arrival and the end of each of these collectives.

    How long the ends take is known once all ranks are.
    """
    instance = matched["instance_id"].cast(pl.Int64).to_numpy()
    op = numbers(matched["op"], code)
    position = matched["_position"].to_numpy()

    def added(duration: Ints, end: Ints, cycle: Ints | int = -1) -> Ints:
        of_op: dict[str, Any] = {"instance": instance, "cycle": cycle, "launched": launched_ns}
        return nodes.add(duration, end, rank=rank, part=_TRANSFER, label=op, **of_op)

    arrival = added(np.zeros_like(arrived_ns), arrived_ns)
    residual = np.zeros_like(arrived_ns)
    done = added(residual, ended_ns, (rank + 2) * _POSITIONS + position)
    return _Sides(instance, arrival, done, arrived_ns, ended_ns, op, position, residual)


def _launched(
    launches: pl.DataFrame, regions: pl.DataFrame, kernels: pl.DataFrame, code: dict[str, int], origin_ns: int
) -> _Launched:
    start = kernels["start_ns"].to_numpy()
    calls, call_of = calls_that_matter(launches, kernels, code)
    launched = call_of >= 0
    early = (start[launched] - calls.start[call_of[launched]]).min(initial=0)
    if early < 0 and early >= -_CLOCK_NS:  # the host's clock is ahead of the device's by at least that
        calls = shifted(calls, int(early))
    launch_ns = start.copy()
    launch_ns[launched] = calls.start[call_of[launched]]
    thread = np.zeros(len(start), np.int32)
    thread[launched] = calls.thread[call_of[launched]]
    return _Launched(
        calls=calls,
        places=Places(regions, code, int(min(early, 0)) if early >= -_CLOCK_NS else 0),
        call=call_of,
        seen=launched,
        launch_ns=launch_ns,
        thread=thread,
        enqueued_ns=np.where(launched, launch_ns, origin_ns),
    )


def _waits(host: _Launched, stream: Ints, communicates: Bools, start: Ints, end: Ints, origin_ns: int) -> _Waits:
    before = last_to_end(stream, end)
    queued = last_launched_before(host.calls, host.call, communicates, end, start)
    free = np.maximum(np.where(before >= 0, end[before], origin_ns), np.where(queued >= 0, end[queued], 0))
    # A stream that was still busy is what the kernel waited for, else it is the launch.
    bound_by_launch = host.seen & (host.launch_ns >= free)
    latency = np.maximum(start - host.launch_ns, 0)
    typical = int(np.median(latency[bound_by_launch])) if bound_by_launch.any() else 0
    explained = np.maximum(host.enqueued_ns + np.where(host.seen, typical, 0), free)
    other = ended_just_before(stream, start, end, explained)
    ready = np.maximum(free, np.where(other >= 0, end[other], 0))
    gap = np.clip(start - ready, 0, None)
    by_launch = bound_by_launch & (other < 0)
    gap[by_launch] = 0
    delay = np.where(by_launch, latency, np.minimum(latency, typical))
    return _Waits(before=before, queued=queued, other=other, ready_ns=ready, gap_ns=gap, delay_ns=delay)


def _labels_of(kernels: pl.DataFrame, host: _Launched, code: dict[str, int]) -> tuple[Ints, Ints]:
    """Part and label of each kernel: the region that launched it, else what it does."""
    label, part = host.places.of_launch(host.launch_ns, host.thread, host.seen), _parts_of(kernels)
    unlabelled = label < 0
    label[unlabelled] = np.array([code[COMMUNICATION if p == "unsplit" else p] for p in PARTS])[part[unlabelled]]
    return part, label


def _add_ends_of_steps(
    nodes: NodeBlocks, rank: int, code: dict[str, int], steps: pl.DataFrame, lanes: list[tuple[Ints, Ints, Ints]]
) -> pl.DataFrame:
    """Return a node at the begin of the first step and at the end of each.

    Lanes are (which, end, node) of what happens.
    """
    begin, over = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    step = steps["step"].to_numpy()
    host: dict[str, Any] = {"rank": rank, "part": PARTS.index("host"), "label": code[NO_REGION]}
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
    return numbers(kernels["work"], code)


def _add_host(
    nodes: NodeBlocks, rank: int, calls: Calls, gaps: Gaps, places: Places, end: Ints, slept_for: Ints
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


def _add_transfers(nodes: NodeBlocks, sides: list[_Sides]) -> int:
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
