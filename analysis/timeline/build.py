"""From a trace to the tables that detectors, report and dashboard read."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import starmap
from typing import TYPE_CHECKING

import polars as pl

from rankscope.analysis.model.finding import Clock, Gap
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.text import phrases
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.clocks import apply_clocks, clocks_by_causality, fit_clocks
from rankscope.analysis.timeline.code_samples import PLACES, SAMPLES, merged_places, sampled_in
from rankscope.analysis.timeline.counters import gpus_of_ranks
from rankscope.analysis.timeline.cuda_events import MARK_COLUMNS, by_marks, mark_phases, marked_steps
from rankscope.analysis.timeline.device_breakdown import device_phases, with_launches, with_waits
from rankscope.analysis.timeline.device_clocks import device_clocks, on_one_clock
from rankscope.analysis.timeline.device_waits import awaited, known_waits, split_by_durations, without_waits
from rankscope.analysis.timeline.excluded_steps import set_cut_aside, set_lost_aside, without_lost_operations
from rankscope.analysis.timeline.gaps import broken, clock_gaps, early_gaps, step_gaps, timing_gaps, unmatched_gaps
from rankscope.analysis.timeline.hang_progress import last_begun_ns, last_progress
from rankscope.analysis.timeline.host_breakdown import breakdown, check_phases, phases
from rankscope.analysis.timeline.matching import match_collectives
from rankscope.analysis.timeline.nccl_durations import proxies, with_durations
from rankscope.analysis.timeline.nccl_ras import late_ranks
from rankscope.analysis.timeline.optimizer_kernels import optimizer_regions, steps_of
from rankscope.analysis.timeline.pipeline_ops import stage_ops, steps_of_ops
from rankscope.analysis.timeline.profiled_steps import profiled_gaps, set_profiled_aside
from rankscope.analysis.timeline.rank_exits import rank_exits
from rankscope.analysis.timeline.steps import (
    NAMED,
    UPDATES,
    agreement,
    find_steps,
    in_steps,
    judge,
    misnumbered,
    names_step,
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
      was recorded `duration_ns` on the device, which gives transfer and wait of an operation without an end; where
      the devices' waits are known `awaited_ns`, as `device_waits.awaited` has it |
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
    comparable: bool  # a step number means the same step on all ranks, as far as their collectives show
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


@dataclass(frozen=True, slots=True)
class _Source:
    """A trace, and its nodes' clocks."""

    trace: Trace
    clocks: list[Clock]

    def read(self, name: str, owner: str = "rank", key: str = "start_ns") -> pl.DataFrame:
        """Give a table on the run's clock, in order."""
        return in_order(apply_clocks(self.trace.table(name).collect(), self.clocks), owner, key)

    @property
    def stretch(self) -> Stretch | None:
        return self.trace.stretch

    def marks(self) -> pl.DataFrame:
        """Give the table `device_marks` on the run's clock."""
        times = {"recorded_ns": "start_ns", "device_ns": "end_ns"}
        on_clock = apply_clocks(self.trace.table("device_marks").rename(times).collect(), self.clocks)
        return on_clock.rename({name: column for column, name in times.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matched:
    """Operations matched across ranks, and the devices' work with the calls that launched it."""

    collectives: pl.DataFrame
    groups: pl.DataFrame
    kernels: pl.DataFrame
    launches: pl.DataFrame
    counted: pl.DataFrame | None  # of a part of the run: its steps on the rank that was asked
    gaps: list[Gap]

    @property
    def has_device(self) -> pl.Expr:
        return pl.col("rank").is_in(self.kernels["rank"].unique().implode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """The steps, on the device where it was seen; and those of the hosts."""

    steps: pl.DataFrame
    hosts: pl.DataFrame
    regions: pl.DataFrame
    marks: pl.DataFrame
    device_waits: pl.DataFrame
    comparable: bool
    gaps: list[Gap]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The steps cut into phases, and the operations that lie in them."""

    phases: pl.DataFrame
    breakdown: pl.DataFrame
    marks: pl.DataFrame
    enqueued_in: pl.DataFrame  # the steps in which hosts called what devices do
    collectives: pl.DataFrame
    ops: pl.DataFrame
    gaps: list[Gap]


def build_timeline(trace: Trace) -> Timeline:
    """Return the trace's timeline. What is missing or unclear is in `gaps`; lack of data never raises.

    Raises `BadInput` where the memory of this machine is not enough.
    """
    trace.check_memory()
    ranks = trace.table("ranks").sort("rank").collect()
    source = _Source(trace, _clocks(trace, [*trace.run, *ranks["node"].drop_nulls().to_list()]))
    ops = source.read("ops")
    matched = _match(source)
    found = _find_steps(source, matched, ranks, ops)
    cut = _cut(source, matched, found, ranks, ops)
    collectives = matched.collectives
    samples, places = _samples(source)
    memory = source.read("memory", key="time_ns").select("rank", "time_ns", "name", "value")
    counters = source.read("counters", "node", "time_ns")
    counters = counters.select("node", "time_ns", "source", "name", "device", "value")
    late = late_ranks(
        source.read("ras", "node", "time_ns"), ranks, trace.run, last_begun_ns(collectives, found.regions) or 0
    )
    progress, exits = source.read("progress", key="group_id"), pl.DataFrame()
    if trace.source == "native" and (source.stretch is None or source.stretch.is_to_the_end):
        until = [ns for table in (counters, samples, memory) if isinstance(ns := table["time_ns"].max(), int)]
        done_until = max(until, default=None)  # what a rank did last is all there
        progress = last_progress(collectives, found.regions, done_until, found.steps, said_late=len(late) > 0)
        exits = rank_exits(source.read("exits", key="end_ns"), collectives, found.regions, found.steps)
    proxied = proxies(source.read("nccl_calls"), source.read("nccl_events"))
    return Timeline(
        ranks=ranks,
        steps=found.steps,
        collectives=_inside(source, cut.collectives),
        regions=_inside(source, found.regions),
        kernels=matched.kernels,
        launches=matched.launches,
        phases=cut.phases,
        breakdown=cut.breakdown,
        waits=collectives.drop_nulls("wait_ns").group_by("rank").agg(waited_ns=pl.col("wait_ns").sum()).sort("rank"),
        counters=counters,
        memory=memory,
        gpus=gpus_of_ranks(trace.run),
        proxies=in_steps(proxied, cut.enqueued_in),
        ras=late,
        exits=exits,
        samples=sampled_in(samples, cut.phases if cut.marks.is_empty() else found.hosts),
        places=places,
        groups=matched.groups,
        ops=cut.ops,
        progress=progress,
        marks=cut.marks,
        clocks=source.clocks,
        stretch=source.stretch,
        comparable=found.comparable,
        matched_fraction=1 - collectives["instance_id"].null_count() / len(collectives) if len(collectives) else None,
        gaps=[*trace.gaps(), *clock_gaps(source.clocks), *matched.gaps, *found.gaps, *cut.gaps],
    )


def _match(source: _Source) -> _Matched:
    """Bring the devices' clocks together and match what ranks did with each other."""
    groups, records = source.read("groups"), source.read("flight_records")
    called = with_durations(source.read("collectives"), groups, records)
    devices_off, of_device_clocks = device_clocks(called)
    called = on_one_clock(called, devices_off, "device_start_ns", "end_ns", if_known="device_start_ns")
    collectives = match_collectives(called, groups, source.clocks)
    stretch = source.stretch
    counted = stretch.beside(source.clocks) if stretch else None
    if stretch and counted is not None and len(counted):
        collectives = collectives.filter(_begun_within(counted, stretch))
    launches = source.read("launches")
    kernels = with_launches(on_one_clock(source.read("kernels"), devices_off, "start_ns", "end_ns"), launches)
    return _Matched(
        collectives=collectives,
        groups=groups,
        kernels=kernels,
        launches=with_waits(launches, kernels),
        counted=counted,
        gaps=[*of_device_clocks, *unmatched_gaps(collectives), *timing_gaps(records)],
    )


def _find_steps(source: _Source, matched: _Matched, ranks: pl.DataFrame, ops: pl.DataFrame) -> _Steps:
    """Find the steps and number them alike, first on the hosts, then on the devices; say which count and why not."""
    stretch, collectives = source.stretch, matched.collectives
    regions = source.read("regions")
    is_capture, updates = source.trace.source != "native", regions.clear()
    if is_capture and not (regions["kind"] == "optimizer").any():
        runs = optimizer_regions(matched.kernels)
        updates = pl.concat(
            [updates, runs.cast({n: t for n, t in updates.schema.items() if n in runs.columns})], how="diagonal"
        )
    hosts, incomparable, of_numbers = _host_steps(source, matched, regions, updates)
    if (hosts["source"] == NAMED).any() or is_capture:
        regions = regions.filter(~names_step(regions))  # a step is no place in it
    read_whole = pl.col("step") >= (stretch.first if stretch else 0)
    whole, of_operations = without_lost_operations(hosts.filter(read_whole), collectives, matched.groups)
    hosts = pl.concat([hosts.filter(~read_whole), whole]).sort("rank", "step", maintain_order=True)
    regions = in_order(pl.concat([regions, updates]), "rank", "start_ns") if len(updates) else regions
    regions = in_steps(regions, hosts)
    of_phases, device_waits = without_waits(source.marks())
    steps, marks, of_marks = marked_steps(hosts, of_phases, collectives)
    has_device = matched.has_device
    steps = pl.concat([steps.filter(~has_device), on_device(steps.filter(has_device), matched.kernels)])
    if stretch:
        steps = steps.filter(pl.col("step") >= stretch.first)
    steps = judge(steps, regions, stretch.warmup if stretch else None, of_capture=is_capture)
    steps, of_lost = set_lost_aside(steps, hosts, matched.kernels, matched.launches)
    steps = set_cut_aside(steps, matched.kernels) if is_capture else steps
    steps = set_profiled_aside(steps, source.read("windows"))
    if len(ops):
        steps, incomparable = steps_of_ops(ops), []
    why_none = source.trace.reader.cannot().get("steps", _NO_STEPS)
    return _Steps(
        steps=steps,
        hosts=hosts,
        regions=regions,
        marks=marks,
        device_waits=device_waits,
        comparable=not incomparable,
        gaps=[
            *step_gaps(steps, ranks, {gap.rank for gap in of_operations}, why_none),
            *(*of_marks, *of_operations, *of_lost, *profiled_gaps(steps)),
            *(*incomparable, *of_numbers, *early_gaps(collectives, steps)),
        ],
    )


def _host_steps(
    source: _Source, matched: _Matched, regions: pl.DataFrame, updates: pl.DataFrame
) -> tuple[pl.DataFrame, list[Gap], list[Gap]]:
    """Return the steps of the hosts, or whole captures; and gaps as `_comparable_steps` has them.

    `updates` are runs of the optimizer that only its kernels show. Of a part of the run also the step before it, which
    ends on the device where the first begins.
    """
    of_records = (gap for gap in source.trace.gaps() if gap.table in ("*", "regions"))
    lossy = {gap.rank for gap in of_records if gap.count and gap.rank is not None}
    marks = source.read("steps", key="end_ns")
    found = find_steps(marks, regions, matched.collectives)
    found = steps_of(updates, matched.kernels) if found.is_empty() else found
    steps, incomparable, of_numbers = _comparable_steps(found, matched.collectives, matched.counted, lossy)
    if found.is_empty() or (incomparable and found["source"][0] == UPDATES):
        incomparable = []
        tables = (t.select("rank", "start_ns", "end_ns") for t in (matched.kernels, matched.launches, regions))
        steps = whole_captures(*(table.filter(matched.has_device) for table in tables))
    if source.stretch:
        steps = steps.filter(pl.col("step").is_between(source.stretch.first - 1, source.stretch.last))
    return steps, incomparable, of_numbers


def _cut(source: _Source, matched: _Matched, found: _Steps, ranks: pl.DataFrame, ops: pl.DataFrame) -> _Cut:
    """Cut the steps up, and place operations in them."""
    collectives, regions, has_device = matched.collectives, found.regions, matched.has_device
    split = found.steps if "breakdown" not in source.trace.reader.cannot() else found.steps.filter(has_device)
    device_waits = found.device_waits if len(found.marks) else found.device_waits.clear()
    device_waits = known_waits(device_waits, found.hosts)
    marks = by_marks(found.marks, found.steps, found.hosts, regions, collectives, device_waits)
    hosts, devices = split.filter(~has_device & marks.is_empty()), split.filter(has_device)
    timed = _on_a_clock(collectives)
    cut = pl.concat([phases(hosts, regions, timed), device_phases(devices, matched.kernels, regions, timed)])
    cut = cut if marks.is_empty() else mark_phases(marks, split, regions, device_waits)
    enqueued_in = found.steps if marks.is_empty() else found.hosts
    arrival = collectives.select(pl.coalesce("device_start_ns", "start_ns")).to_series()
    placed = in_steps(collectives, enqueued_in, arrival)
    if len(marks):
        placed = awaited(placed, device_waits)
        cut = split_by_durations(cut, placed)
    no_ops: list[Gap] = []
    if ops.is_empty():
        ops, no_ops = stage_ops(ranks, matched.groups, regions, placed, cut, source.clocks, marks)
    return _Cut(
        phases=cut,
        breakdown=breakdown(cut, split),
        marks=marks,
        enqueued_in=enqueued_in,
        collectives=placed,
        ops=ops,
        gaps=[*no_ops, *broken("phases", lambda: check_phases(cut, split))],
    )


def _inside(source: _Source, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, of a part of the run only those in its steps: so its judged rows need no memory of their own."""
    stretch = source.stretch
    return rows if stretch is None or stretch.is_to_the_end else rows.filter(pl.col("step") >= stretch.first)


def _samples(source: _Source) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the samples of main threads, and the tree of calls that they point into."""
    places, of_frames = merged_places(source.trace.table("frames").collect())
    samples = source.read("samples", key="time_ns").join(of_frames, on=["rank", "frame"], how="left")
    return samples.with_columns(pl.col("place").fill_null(0)), places


def _begun_within(counted: pl.DataFrame, stretch: Stretch) -> pl.Expr:
    """Return rows that began in these steps of one rank: earlier or later ones lack ranks that are ahead or behind.

    Where the run begins or ends with them no rank is lacking.
    """
    since, until = counted["start_ns"].min(), counted["end_ns"].max()
    is_after = pl.col("start_ns") >= since if stretch.first > 0 else pl.lit(True)
    return is_after & (pl.col("start_ns") <= until if stretch.last + 1 < len(stretch.counted) else pl.lit(True))


def _clocks(trace: Trace, nodes: list[int]) -> list[Clock]:
    """Return the nodes' clocks, from pings, else from the order of operations, else from the hosts' unix time."""
    clocks = fit_clocks(trace.table("clocks").collect(), nodes)
    if all(c.error_ns is not None for c in clocks):
        return clocks
    order = ("rank", "start_ns")
    collectives, groups = (
        trace.table(name).sort(order, maintain_order=True).collect() for name in ("collectives", "groups")
    )
    return clocks_by_causality(match_collectives(collectives, groups, clocks=()), clocks)


def _on_a_clock(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the rows without the waits of which only the length is known."""
    if "duration_ns" not in collectives.columns:
        return collectives
    return collectives.with_columns(pl.when(pl.col("end_ns").is_not_null()).then("wait_ns").alias("wait_ns"))


def _comparable_steps(
    steps: pl.DataFrame,
    collectives: pl.DataFrame,
    counted: pl.DataFrame | None,
    lossy: set[int],
) -> tuple[pl.DataFrame, list[Gap], list[Gap]]:
    """Return the steps, numbered alike on all ranks (of part of a run as `counted`), or a gap that says they are not.

    And gaps that say how those of `lossy` ranks, which lost records, were numbered.
    """
    if counted is not None and len(steps):
        steps = number_by_time(steps, counted)
    same = agreement(steps, collectives)
    if same is not None and same < _AGREE:
        steps = renumber(steps, collectives)
        same = agreement(steps, collectives)
    wrong = misnumbered(steps, collectives, lossy)
    if same is None or (same >= _AGREE and not wrong):
        return steps, [], []
    by_operations, left_out = number_by_operations(steps, collectives, wrong)
    if (agreement(by_operations, collectives) or 0) >= _AGREE:
        unknown = sorted(wrong - left_out.keys())
        return by_operations, [], [*starmap(_renumbered, left_out.items()), *map(_not_numbered, unknown)]
    why = text(
        "step numbers do not mean the same step on all ranks: only {same} of the collectives "
        "are in the same one; mark the same steps on all ranks, with rankscope.step() or the profiler's step()",
        same=percent(same),
    )
    return steps, [Gap(table="steps", rank=None, node=None, count=None, why=why)], []


def _not_numbered(rank: int) -> Gap:
    why = text(
        "records of {rank} were lost: its steps may have other numbers than the same steps of other ranks",
        rank=phrases.named("rank", [rank]),
    )
    return Gap(table="steps", rank=rank, node=None, count=None, why=why)


def _renumbered(rank: int, left_out: int) -> Gap:
    why = text(
        "records of {rank} were lost: its steps are numbered by their operations, and {steps} left out",
        rank=phrases.named("rank", [rank]),
        steps=phrases.counted(left_out, "step"),
    )
    return Gap(table="steps", rank=rank, node=None, count=left_out, why=why)
