"""From a trace to the tables that detectors, report and dashboard read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

from rankscope.analysis.model.finding import Clock, Gap
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.text import phrases
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.timeline.clocks import apply_clocks, clocks_by_causality, fit_clocks
from rankscope.analysis.timeline.code_samples import PLACES, SAMPLES, merged_places, sampled_in
from rankscope.analysis.timeline.counters import gpus_of_ranks
from rankscope.analysis.timeline.cuda_events import MARK_COLUMNS, by_marks, mark_phases, marked_steps
from rankscope.analysis.timeline.device_breakdown import device_phases, with_launches, with_waits
from rankscope.analysis.timeline.device_clocks import device_clocks, on_one_clock
from rankscope.analysis.timeline.device_waits import known_waits, without_waits
from rankscope.analysis.timeline.excluded_steps import set_lost_aside, without_lost_operations
from rankscope.analysis.timeline.hang_progress import given_up, last_begun_ns, last_progress
from rankscope.analysis.timeline.host_breakdown import InvariantError, breakdown, check_phases, phases
from rankscope.analysis.timeline.matching import match_collectives
from rankscope.analysis.timeline.nccl_durations import proxies, with_durations
from rankscope.analysis.timeline.nccl_ras import late_ranks
from rankscope.analysis.timeline.pipeline_ops import stage_ops, steps_of_ops
from rankscope.analysis.timeline.profiled_steps import profiled_gaps, set_profiled_aside
from rankscope.analysis.timeline.rank_exits import rank_exits
from rankscope.analysis.timeline.steps import (
    CAPTURE,
    agreement,
    find_steps,
    in_steps,
    judge,
    number_by_operations,
    number_by_time,
    on_device,
    renumber,
    whole_captures,
)

if TYPE_CHECKING:
    from rankscope.analysis.runs.step_range import Stretch
    from rankscope.analysis.runs.trace import Trace

__all__ = ["Timeline", "build_timeline"]

_AGREE = 0.9  # share of operations in the same step on all ranks, above which step numbers are comparable
_FEW_STEPS = 3
_NO_STEPS = text("no optimizer ran and rankscope.step() was not called, so there are no steps; call it once per step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One run, cut up. All times are ns on node 0's monotonic clock, all frames are ordered by rank (node) and time.

    | frame | columns |
    |---|---|
    | ranks | those of the schema |
    | steps | rank, step, start_ns, end_ns, source, judged, aside (why not judged: "warm-up", "outlier", "incomplete",
      "lost" or "profiled"; else null) |
    | collectives | those of the schema, those of `matching.MATCHED_COLUMNS`, step (null outside of steps); where NCCL
      was recorded `duration_ns` on the device, which tells transfer and wait of an operation without an end |
    | regions | those of the schema, step (of the host) |
    | kernels | those of the schema and of `device_phases.with_launches` |
    | launches | those of the schema and of `device_phases.with_waits` |
    | phases | rank, step, part, label, start_ns, end_ns, without gap or overlap: the device's time on ranks with
      kernels or marks, the main thread's on the others |
    | breakdown | rank, step, part, ns: each step's parts, zeros included; they sum to the step |
    | waits | rank, waited_ns: over all matched operations; ranks that have none are not in it |
    | counters | node, time_ns, source, name, device, value |
    | memory | rank, time_ns, name, value |
    | gpus | rank, node, device: the rank's GPU, as `counters` calls it |
    | marks | the phases that CUDA events close, as `marks.by_marks` has them; empty where they were not recorded |
    | groups | those of the schema |
    | proxies | those of `nccl.PROXIES`, step |
    | ras | rank, communicator, operation, launched, most, state, time_ns: as `ras.late_ranks` has it |
    | exits | those of the schema and of `rank_exits`; empty where the end of the run was not read |
    | samples, places | `code.SAMPLES` in the steps of the host, and the tree of calls that they point into
      (`code.PLACES`) |
    | ops, progress | those of the schema; of a recorded run as `stages.stage_ops`, `progress.last_progress` have it |
    """

    ranks: pl.DataFrame
    steps: pl.DataFrame
    collectives: pl.DataFrame
    regions: pl.DataFrame
    kernels: pl.DataFrame
    launches: pl.DataFrame
    phases: pl.DataFrame
    breakdown: pl.DataFrame
    waits: pl.DataFrame
    counters: pl.DataFrame
    groups: pl.DataFrame
    ops: pl.DataFrame
    progress: pl.DataFrame
    clocks: list[Clock]
    comparable: bool  # a step number means the same step on all ranks, as far as their collectives tell
    matched_fraction: float | None  # share of collective rows that are part of a whole operation; None: no rows
    gaps: list[Gap]
    memory: pl.DataFrame = field(default_factory=pl.DataFrame)
    gpus: pl.DataFrame = field(default_factory=pl.DataFrame)
    marks: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=MARK_COLUMNS))
    proxies: pl.DataFrame = field(default_factory=pl.DataFrame)
    ras: pl.DataFrame = field(default_factory=pl.DataFrame)
    exits: pl.DataFrame = field(default_factory=pl.DataFrame)
    samples: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=SAMPLES))
    places: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=PLACES))
    stretch: Stretch | None = None  # what was read of the run; None: all


def build_timeline(trace: Trace) -> Timeline:
    """The trace's timeline. What could not be seen or settled is in `gaps`; nothing raises for lack of data.

    Raises `BadInput` where the memory of this machine is not enough.
    """
    trace.check_memory()
    ranks = trace.table("ranks").sort("rank").collect()
    clocks = _clocks(trace, [*trace.run, *ranks["node"].drop_nulls().to_list()])

    def read(name: str, owner: str, key: str) -> pl.DataFrame:
        return in_order(trace.table(name).pipe(apply_clocks, clocks).collect(), owner, key)

    regions = read("regions", "rank", "start_ns")
    groups = read("groups", "rank", "start_ns")
    records = read("flight_records", "rank", "start_ns")
    called = with_durations(read("collectives", "rank", "start_ns"), groups, records)
    devices_off, of_device_clocks = device_clocks(called)
    called = on_one_clock(called, devices_off, "device_start_ns", "end_ns", if_known="device_start_ns")
    collectives = match_collectives(called, groups, clocks)
    stretch = trace.stretch
    counted = stretch.beside(clocks) if stretch else None
    if stretch and counted is not None and len(counted):
        collectives = collectives.filter(_begun_within(counted, stretch))
    launches = read("launches", "rank", "start_ns")
    kernels = on_one_clock(read("kernels", "rank", "start_ns"), devices_off, "start_ns", "end_ns")
    kernels = with_launches(kernels, launches)
    launches = with_waits(launches, kernels)
    lossy = {gap.rank for gap in trace.gaps() if gap.count and gap.rank is not None and gap.table in ("*", "regions")}
    steps, incomparable, of_numbers = _comparable_steps(
        read("steps", "rank", "end_ns"), regions, collectives, counted, lossy
    )
    has_device = pl.col("rank").is_in(kernels["rank"].unique().implode())
    if steps.is_empty():
        tables = (table.select("rank", "start_ns", "end_ns") for table in (kernels, launches, regions))
        steps = whole_captures(*(table.filter(has_device) for table in tables))
    if stretch:  # with the one before, which ends on the device where the first begins
        steps = steps.filter(pl.col("step").is_between(stretch.first - 1, stretch.last))
    read_whole = pl.col("step") >= (stretch.first if stretch else 0)
    whole, of_operations = without_lost_operations(steps.filter(read_whole), collectives, groups)
    steps = pl.concat([steps.filter(~read_whole), whole]).sort("rank", "step", maintain_order=True)
    regions, hosts_steps = in_steps(regions, steps), steps
    of_phases, of_waits = without_waits(_marks(trace, clocks))
    steps, marks, of_marks = marked_steps(steps, of_phases, collectives)
    steps = pl.concat([steps.filter(~has_device), on_device(steps.filter(has_device), kernels)])
    if stretch:
        steps = steps.filter(pl.col("step") >= stretch.first)
    steps = judge(steps, regions, stretch.warmup if stretch else None, of_capture=trace.source == "kineto")
    steps, of_lost = set_lost_aside(steps, hosts_steps, kernels, launches)
    steps = set_profiled_aside(steps, read("windows", "rank", "start_ns"))
    ops = read("ops", "rank", "start_ns")
    if len(ops):
        steps, incomparable = steps_of_ops(ops), []
    counters = read("counters", "node", "time_ns").select("node", "time_ns", "source", "name", "device", "value")
    samples = read("samples", "rank", "time_ns")
    memory = read("memory", "rank", "time_ns").select("rank", "time_ns", "name", "value")
    progress = read("progress", "rank", "group_id")
    late = late_ranks(read("ras", "node", "time_ns"), ranks, trace.run, last_begun_ns(collectives, regions) or 0)
    exits = pl.DataFrame()
    if trace.source == "native" and (stretch is None or stretch.is_to_the_end):  # what a rank did last is all there
        sampled = (table["time_ns"].max() for table in (counters, samples, memory))
        until = [ns for ns in sampled if isinstance(ns, int)]
        progress = last_progress(collectives, regions, max(until, default=None), steps, said_late=len(late) > 0)
        exits = rank_exits(read("exits", "rank", "end_ns"), collectives, regions, steps)
    split = steps if "breakdown" not in trace.reader.cannot() else steps.filter(has_device)
    device_waits = known_waits(of_waits if len(marks) else of_waits.clear(), hosts_steps)
    marks = by_marks(marks, steps, hosts_steps, regions, collectives, device_waits)
    hosts, devices = split.filter(~has_device & marks.is_empty()), split.filter(has_device)
    timed = _on_a_clock(collectives)
    cut = pl.concat([phases(hosts, regions, timed), device_phases(devices, kernels, regions, timed)])
    cut = cut if marks.is_empty() else mark_phases(marks, split, regions, device_waits)
    places, of_frames = merged_places(trace.table("frames").collect())
    samples = samples.join(of_frames, on=["rank", "frame"], how="left")
    samples = samples.with_columns(pl.col("place").fill_null(0))
    arrival = pl.coalesce("device_start_ns", "start_ns").alias("_arrival_ns")
    enqueued_in = steps if marks.is_empty() else hosts_steps
    placed = in_steps(collectives.with_columns(arrival), enqueued_in, at="_arrival_ns").drop("_arrival_ns")
    no_ops: list[Gap] = []
    if ops.is_empty():
        ops, no_ops = stage_ops(ranks, groups, regions, placed, cut, clocks, marks)
    gaps = [
        *trace.gaps(),
        *_clock_gaps(clocks),
        *of_device_clocks,
        *_unmatched_gaps(collectives),
        *_timing_gaps(records),
        *_step_gaps(steps, ranks, {gap.rank for gap in of_operations}, trace.reader.cannot().get("steps", _NO_STEPS)),
        *of_marks,
        *of_operations,
        *of_lost,
        *profiled_gaps(steps),
        *([Gap(table="*", rank=None, node=None, count=None, why=stretch.said)] if stretch and stretch.said else ()),
        *incomparable,
        *of_numbers,
        *_early_gaps(collectives, steps),
        *no_ops,
        *_broken("phases", lambda: check_phases(cut, split)),
    ]
    return Timeline(
        ranks=ranks,
        steps=steps,
        collectives=placed,
        regions=regions,
        kernels=kernels,
        launches=launches,
        phases=cut,
        breakdown=breakdown(cut, split),
        waits=collectives.drop_nulls("wait_ns").group_by("rank").agg(waited_ns=pl.col("wait_ns").sum()).sort("rank"),
        counters=counters,
        memory=memory,
        gpus=gpus_of_ranks(trace.run),
        proxies=in_steps(
            proxies(read("nccl_calls", "rank", "start_ns"), read("nccl_events", "rank", "start_ns")), enqueued_in
        ),
        ras=late,
        exits=exits,
        samples=sampled_in(samples, cut if marks.is_empty() else hosts_steps),
        places=places,
        groups=groups,
        ops=ops,
        progress=progress,
        marks=marks,
        clocks=clocks,
        stretch=stretch,
        comparable=not incomparable,
        matched_fraction=1 - collectives["instance_id"].null_count() / len(collectives) if len(collectives) else None,
        gaps=gaps,
    )


def _begun_within(counted: pl.DataFrame, stretch: Stretch) -> pl.Expr:
    """What began in these steps of one rank: what began earlier or later lacks ranks that are ahead or behind.

    Where the run begins or ends with them no rank is lacking.
    """
    since, until = counted["start_ns"].min(), counted["end_ns"].max()
    is_after = pl.col("start_ns") >= since if stretch.first > 0 else pl.lit(True)
    return is_after & (pl.col("start_ns") <= until if stretch.last + 1 < len(stretch.counted) else pl.lit(True))


def _marks(trace: Trace, clocks: list[Clock]) -> pl.DataFrame:
    """The table `device_marks` on the run's clock."""
    times = {"recorded_ns": "start_ns", "device_ns": "end_ns"}
    on_clock = trace.table("device_marks").rename(times).pipe(apply_clocks, clocks)
    return on_clock.rename({name: column for column, name in times.items()}).collect()


def _clocks(trace: Trace, nodes: list[int]) -> list[Clock]:
    """The nodes' clocks, from pings, else from what the operations tell, else from the hosts' unix time."""
    clocks = fit_clocks(trace.table("clocks").collect(), nodes)
    if all(c.error_ns is not None for c in clocks):
        return clocks
    order = ("rank", "start_ns")
    collectives, groups = (
        trace.table(name).sort(order, maintain_order=True).collect() for name in ("collectives", "groups")
    )
    return clocks_by_causality(match_collectives(collectives, groups, clocks=()), clocks)


def _on_a_clock(collectives: pl.DataFrame) -> pl.DataFrame:
    """The rows without the waits of which only the length is known: nobody saw when they were."""
    if "duration_ns" not in collectives.columns:
        return collectives
    return collectives.with_columns(pl.when(pl.col("end_ns").is_not_null()).then("wait_ns").alias("wait_ns"))


def _timing_gaps(records: pl.DataFrame) -> list[Gap]:
    """Said where torch's Flight Recorder has operations and not how long they took."""
    if records.is_empty() or records["duration_ns"].is_not_null().any():
        return []
    why = text(
        "torch's Flight Recorder has no durations, so stragglers and bandwidth are unknown; "
        "TORCH_NCCL_ENABLE_TIMING=1 records them (with CUDA_DEVICE_MAX_CONNECTIONS=1 communication then overlaps "
        "less: for a short run only), or rankscope trigger for a few steps"
    )
    return [Gap(table="flight_records", rank=None, node=None, count=len(records), why=why)]


def _early_gaps(collectives: pl.DataFrame, steps: pl.DataFrame) -> list[Gap]:
    """What ended before its last rank arrived: how many, by how much at most, why, and what was done about it."""
    gave_up = given_up(collectives, steps).select("rank", "instance_id", why=pl.lit("given up"))
    by_device = pl.when(pl.col("device_start_ns").is_not_null()).then(pl.lit("device")).otherwise(pl.lit("clock"))
    done = {
        "clock": text("clocks or stamps are wrong by that, and these ends were moved to that arrival"),
        "device": text("the devices' clocks are wrong by that, and times were left as they are"),
        "given up": text("a timeout or an error ended them before it came, and these ends were moved to that arrival"),
    }
    early = collectives.filter(pl.col("early_ns").is_not_null()).join(gave_up, on=["rank", "instance_id"], how="left")
    return [
        Gap(
            table="collectives",
            rank=None,
            node=None,
            count=count,
            why=text(
                "{count} rows of operations end before their last rank arrived, by up to {worst} ns: {done}",
                count=count,
                worst=worst,
                done=done[why],
            ),
        )
        for why, count, worst in early.group_by(pl.col("why").fill_null(by_device))
        .agg(pl.len(), pl.col("early_ns").max())
        .sort("why")
        .iter_rows()
    ]


def _comparable_steps(
    marks: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    counted: pl.DataFrame | None,
    lossy: set[int],
) -> tuple[pl.DataFrame, list[Gap], list[Gap]]:
    """The steps, numbered alike on all ranks, or a gap that says that they are not; of part of a run as `counted`.

    And gaps that say how those of `lossy` ranks were numbered, who have lost records.
    """
    steps = find_steps(marks, regions, collectives)
    if counted is not None and len(steps):
        steps = number_by_time(steps, counted)
    same = agreement(steps, collectives)
    if same is not None and same < _AGREE:
        steps = renumber(steps, collectives)
        same = agreement(steps, collectives)
    if same is None or same >= _AGREE:
        return steps, [], []
    by_operations, left_out = number_by_operations(steps, collectives, lossy)
    if (agreement(by_operations, collectives) or 0) >= _AGREE:
        return by_operations, [], [_renumbered(rank, count) for rank, count in left_out.items()]
    why = text(
        "step numbers do not mean the same step on all ranks: only {same:.0%} of the collectives "
        "are in the same one; call rankscope.step() at the end of each step",
        same=same,
    )
    return steps, [Gap(table="steps", rank=None, node=None, count=None, why=why)], []


def _renumbered(rank: int, left_out: int) -> Gap:
    why = text(
        "records of {rank} were lost: its steps are numbered by their operations, and {steps} left out",
        rank=phrases.named("rank", [rank]),
        steps=phrases.counted(left_out, "step"),
    )
    return Gap(table="steps", rank=rank, node=None, count=left_out, why=why)


def _step_gaps(steps: pl.DataFrame, ranks: pl.DataFrame, told: set[int | None], why_none: str) -> list[Gap]:
    if not len(steps):
        return [Gap(table="steps", rank=None, node=None, count=None, why=why_none)]
    if steps["source"][0] == CAPTURE:
        why = text("{why_none}; the whole capture is taken as one step", why_none=why_none)
        return [Gap(table="steps", rank=None, node=None, count=None, why=why)]
    without = sorted(set(ranks["rank"].to_list()) - set(steps["rank"].to_list()) - told)
    gaps = [
        Gap(table="steps", rank=rank, node=None, count=None, why=text("rank {rank} has no step", rank=rank))
        for rank in without
    ]
    judged = steps.filter("judged")["step"].n_unique()
    if judged < _FEW_STEPS:
        why = text(
            "only {judged} of {count} steps can be analyzed; record more",
            judged=judged,
            count=steps["step"].n_unique(),
        )
        gaps.append(Gap(table="steps", rank=None, node=None, count=None, why=why))
    return gaps


def _clock_gaps(clocks: list[Clock]) -> list[Gap]:
    how = {
        "unix time": text("its time comes from the hosts' unix time, with an unknown error"),
        "none": text("its times were left as they are"),
    }
    return [
        Gap(
            table="clocks",
            rank=None,
            node=c.node,
            count=None,
            why=text(
                "no pings between node {node} and 0, nor operations that bind its clock: {how}",
                node=c.node,
                how=how[c.source],
            ),
        )
        for c in clocks
        if c.error_ns is None
    ]


def _unmatched_gaps(collectives: pl.DataFrame) -> list[Gap]:
    """One gap per reason; where operations differ also which."""
    reasons = collectives.group_by("unmatched").len().drop_nulls().sort("unmatched")
    gaps = [
        Gap(
            table="collectives",
            rank=None,
            node=None,
            count=count,
            why=text(
                "{count} of {all} collectives were not matched across ranks: {reason}",
                count=count,
                all=len(collectives),
                reason=Text(reason, {}),
            ),
        )
        for reason, count in reasons.iter_rows()
    ]
    differing = collectives.filter(pl.col("unmatched") == "operations differ").sort("start_ns")
    if len(differing):
        first = differing.row(0, named=True)
        same_key = (pl.col("group_id") == first["group_id"]) & (pl.col("seq") == first["seq"])
        of_rank = differing.filter(same_key).select("rank", "op").iter_rows()
        said = joined(", ", (text("rank {rank} {op}", rank=rank, op=op) for rank, op in of_rank))
        why = text(
            "desynchronized: operation {seq} of group {group} is {said}",
            seq=first["seq"],
            group=first["group"],
            said=said,
        )
        gaps.append(Gap(table="collectives", rank=None, node=None, count=None, why=why))
    return gaps


def _broken(table: str, check: Callable[[], None]) -> list[Gap]:
    try:
        check()
    except InvariantError as error:
        return [Gap(table=table, rank=None, node=None, count=None, why=str(error))]
    return []
