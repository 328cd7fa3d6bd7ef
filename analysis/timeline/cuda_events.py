"""What CUDA events measure on devices: where steps end, how long phases take, the depth of the launch queue.

Five marks a step say nothing of single kernels: what that leaves open is a part of its own, or a bound. The meaning of
each quantity is defined in docs/definitions.md, "On a device, by marks".
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Gap, PhaseTime
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.model.tables import numbers
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import duration, rounded
from rankscope.analysis.timeline.device_time import by_rank
from rankscope.analysis.timeline.host_breakdown import (
    AFTER_BACKWARD,
    AFTER_OPTIMIZER,
    FORWARD,
    PARTS,
    Grid,
    Spans,
    as_phases,
    joined,
)
from rankscope.analysis.timeline.steps import MARKERS

__all__ = [
    "MARK_COLUMNS",
    "by_marks",
    "mark_phases",
    "marked_steps",
    "phase_times",
]


MARK_COLUMNS = {
    **dict.fromkeys(("rank", "step"), pl.Int32),
    **dict.fromkeys(("mark", "phase", "part", "apart"), pl.String),
    **dict.fromkeys(("host_begin_ns", "recorded_ns", "begin_ns", "device_ns"), pl.Int64),
    **dict.fromkeys(("ahead_ns", "idle_ns", "communication_ns", "clock_error_ns"), pl.Int64),
}

_NOT_SEEN = "marks not seen"
_IN_A_GRAPH = "forward and backward"  # of a CUDA graph, whose backward and whose operations no host calls
_BETWEEN = "between microbatches"
_BEFORE_MICROBATCH = ("step_end", "optimizer_end", "forward_end", "backward_end")
_PHASES = (  # the marks that one may begin with, the mark that ends it, its name and part
    (("step_end", "optimizer_end", "backward_end"), "backward_start", FORWARD, "compute"),
    (("backward_start",), "backward_end", "backward", "compute"),
    (("backward_end",), "optimizer_start", AFTER_BACKWARD, "other"),
    (("optimizer_start",), "optimizer_end", "optimizer", "optimizer"),
    (("optimizer_end",), "step_end", AFTER_OPTIMIZER, "other"),
    (("step_end", "optimizer_end"), "optimizer_start", _IN_A_GRAPH, MIXED),
)
_OF_PIPELINES = (  # where forwards have marks too
    (_BEFORE_MICROBATCH, "forward_start", _BETWEEN, "other"),
    (("forward_start",), "forward_end", FORWARD, "compute"),
    (_BEFORE_MICROBATCH, "backward_start", _BETWEEN, "other"),
    *_PHASES[1:],
)
_TRUSTED = 0.1  # a clock's error that is at most this share of what is judged does not matter
_BESIDE_NS = 10_000_000  # so far apart are at most the end of a host's step and the mark that it enqueued there
_MOST = 0.5  # share of a rank's steps that must have ended on its device, or the hosts' steps are taken
_LITTLE = 0.01  # share of a phase: if all its communication together takes no longer, it is not separated
_MAIN_THREAD = 0
_STOPS = ("checkpoint", "compile", "input", "gc")  # what stops the main thread; where several are true the last counts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def marked_steps(
    steps: pl.DataFrame, marks: pl.DataFrame, collectives: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame, list[Gap]]:
    """Return the steps as the devices go through them, the marks in order, and what is to be said of either.

    A step ends when the device comes to the mark that the host enqueued where its own step ended; there the next one
    begins. The first begins with the host's. Steps whose end was not seen are left out, and those that follow them.
    `marks` (those of `device_waits.without_waits`) serve if on every rank that has steps most of these have an end,
    by a clock whose error is at most a tenth of the median step, and if most operations do not end on the hosts,
    where their waits are seen; if not, the hosts' steps stay, and there are no marks.
    """
    if marks["device_ns"].null_count() == len(marks) or steps.is_empty():
        return steps, marks.clear(), []
    ended = _with_device_ends(steps, marks)
    why = _useless(ended, marks, collectives)
    if why:
        why += text(": its marks are not used, and steps are those of the hosts")
        return steps, marks.clear(), [Gap(table="device_marks", rank=None, node=None, count=None, why=why)]
    follows = (pl.col("step") == pl.col("step").shift(1).over("rank") + 1).fill_null(value=False)
    is_first = pl.int_range(pl.len()).over("rank") == 0
    begin = pl.when(is_first).then("start_ns").when(follows).then(pl.col("_done").shift(1).over("rank"))
    moved = ended.with_columns(begin.alias("start_ns"), pl.col("_done").alias("end_ns"))
    whole = moved.filter(pl.col("start_ns") < pl.col("end_ns")).select(steps.columns)
    lost = len(steps) - len(whole)
    said = text(
        "{lost} of single ranks left out, whose begin or end on the device was not seen", lost=counted(lost, "step")
    )
    return whole, marks, [Gap(table="device_marks", rank=None, node=None, count=lost, why=said)] if lost else []


def _useless(ended: pl.DataFrame, marks: pl.DataFrame, collectives: pl.DataFrame) -> str:
    """Return why marks cannot be used for these steps, as the beginning of a sentence; empty if they can."""
    if 2 * collectives["end_ns"].count() > len(collectives):
        return text("most operations end on the hosts, as gloo's do")
    seen = ended.group_by("rank").agg(pl.col("_done").is_not_null().mean().alias("seen"))
    lacking = seen.filter(pl.col("seen") < _MOST)["rank"].sort().to_list()
    if lacking:
        return text("the device was not seen at the end of most steps of {lacking}", lacking=named("rank", lacking))
    errors = marks.drop_nulls("device_ns").group_by("rank").agg(pl.col("clock_error_ns").median())
    length = (pl.col("end_ns") - pl.col("start_ns")).median().alias("step_ns")
    clocks = ended.group_by("rank").agg(length).join(errors, on="rank").sort("rank")
    vague = clocks.filter(~(pl.col("clock_error_ns") <= _TRUSTED * pl.col("step_ns")).fill_null(value=False))
    if vague.is_empty():
        return ""
    worst = max(vague["clock_error_ns"].drop_nulls().to_list(), default=None)
    how = text("unknown") if worst is None else text("known only to within {error}", error=duration(worst))
    return text("the clock of the device of {ranks} is {how}", ranks=named("rank", vague["rank"].to_list()), how=how)


def phase_times(marks: pl.DataFrame) -> tuple[PhaseTime, ...]:
    """Return the phases of these marks, which are of judged steps only, by rank, in their order in the step."""
    length = (pl.col("device_ns") - pl.col("begin_ns")).sum()
    took = pl.col("communication_ns").mean() * pl.len()  # of those in which it is known
    found: list[PhaseTime] = []
    for (rank,), rows in marks.group_by("rank", maintain_order=True):
        ahead = pl.col("ahead_ns").median()
        phases = rows.group_by("phase", maintain_order=True).agg(length.alias("ns"), took.alias("took"), ahead)
        steps = rows["step"].n_unique()
        rows_of_phases = phases.select("phase", "took", "ahead_ns").rows()
        found += [
            PhaseTime(
                rank=rank,
                phase=phase,
                ns_per_step=mean,
                communication_ns_per_step=None if ns is None else round(ns / steps),
                ahead_ns=round(ahead_ns),
            )
            for mean, (phase, ns, ahead_ns) in zip(rounded(phases["ns"].to_list(), steps), rows_of_phases, strict=True)
        ]
    return tuple(found)


def _with_device_ends(steps: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Return the steps, by rank and time, with `_done`.

    When the device came to the mark beside the end of each, else null.
    """
    closing = pl.when(pl.col("source") == MARKERS).then(pl.lit("step_end")).otherwise(pl.lit("optimizer_end"))
    ends = marks.select("rank", "mark", pl.col("recorded_ns").alias("_at"), pl.col("device_ns").alias("_done"))
    joined_ends = steps.with_columns(closing.alias("mark"), pl.col("end_ns").alias("_at")).sort("_at")
    return (
        joined_ends.join_asof(
            ends.sort("_at"),
            on="_at",
            by=["rank", "mark"],
            strategy="nearest",
            tolerance=_BESIDE_NS,
            check_sortedness=False,
        )
        .drop("_at", "mark")
        .sort("rank", "step")
    )


def by_marks(
    marks: pl.DataFrame,
    steps: pl.DataFrame,
    hosts: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    waits: pl.DataFrame,
) -> pl.DataFrame:
    """Return the phases that marks close in `steps` (the devices'), by rank and time, with the columns of MARK_COLUMNS.

    On the device a phase lasts from `begin_ns` to `device_ns`, where the mark before and this one lie; the host
    enqueued the two at `host_begin_ns` and `recorded_ns`.
    `ahead_ns`: how far the host was ahead at the end, the depth of its queue.
    `idle_ns`: the most that the device was idle. It had work until it came to the mark before, and had all of its work
    when the host had enqueued this one.
    `communication_ns`: the `duration_ns` of the operations that the host enqueued meanwhile, with waiting, whatever hid
    it; null where that is not known.
    `part`: the phase's own, or mixed where any rank communicates in that phase of the step for more than 1 % of it, or
    for an unknown time, and where marks are missing. Between a pipeline's microbatches nothing is computed:
    there, communication blocks, and what of it is waiting is not known (unsplit). `hosts` are the hosts' steps.
    `apart`: what a mixed phase is beside the device's waits for communication, where these are known
    (`device_waits.known_waits`); else null.
    """
    if marks.is_empty():
        return pl.DataFrame(schema=MARK_COLUMNS)
    index = pl.int_range(pl.len()).over("rank")
    begun = hosts.group_by("rank").agg(pl.col("start_ns").min().alias("_begun"))
    seen = (
        marks.with_columns(index.alias("_index")).drop_nulls("device_ns").join(begun, on="rank", maintain_order="left")
    )

    def before(column: str) -> pl.Expr:
        return pl.col(column).shift(1).over("rank").fill_null(pl.col("_begun"))

    pairs = [
        (pipelined, begin, *rest)
        for pipelined, phases in ((False, _PHASES), (True, _OF_PIPELINES))
        for begins, *rest in phases
        for begin in begins
    ]
    of_marks = pl.DataFrame(pairs, ["_pipelined", "_begin", "mark", "phase", "part"], orient="row")
    spans = steps.select("rank", "step", pl.col("start_ns").alias("_start"), pl.col("end_ns").alias("device_ns"))
    named_phases = seen.with_columns(
        pl.col("mark").shift(1).over("rank").fill_null("step_end").alias("_begin"),
        before("device_ns").alias("begin_ns"),
        before("recorded_ns").alias("host_begin_ns"),
        (pl.col("mark") == "forward_start").any().over("rank").alias("_pipelined"),
    ).join(of_marks, on=["_pipelined", "_begin", "mark"], how="left", maintain_order="left")
    return (
        named_phases.with_columns(pl.col("phase").fill_null(_NOT_SEEN), pl.col("part").fill_null(MIXED))
        .sort("device_ns", maintain_order=True)
        .join_asof(spans.sort("device_ns"), on="device_ns", by="rank", strategy="forward", check_sortedness=False)
        .filter(pl.col("device_ns") > pl.col("_start"))
        .with_columns(pl.max_horizontal("begin_ns", "_start").alias("begin_ns"))
        .sort("rank", "_index")
        .with_columns(pl.col("part").alias("_own"))
        .pipe(_with_communication, regions, collectives)
        .with_columns(
            apart=pl.when(
                pl.col("part") == MIXED, pl.col("_own") != MIXED, pl.col("step").is_in(waits["step"].implode())
            ).then("_own"),
            ahead_ns=(pl.col("device_ns") - pl.col("recorded_ns")).clip(lower_bound=0),
            idle_ns=(pl.min_horizontal("recorded_ns", "device_ns") - pl.col("begin_ns")).clip(lower_bound=0),
        )
        .select(pl.col(c).cast(t) for c, t in MARK_COLUMNS.items())
    )


def _with_communication(phases: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the phases with `communication_ns`, and with `part` mixed where they communicate."""
    on_device = pl.col("duration_ns") if "duration_ns" in collectives.columns else pl.lit(None, pl.Int64)
    took = pl.when(pl.col("end_ns").is_null()).then(on_device).otherwise(0)  # the end of gloo's is seen on the host
    calls = collectives.select("rank", pl.col("start_ns").alias("at"), took.alias("duration_ns"), is_call=True)
    waits = regions.filter(pl.col("kind") == "wait", pl.col("thread") == _MAIN_THREAD)
    rows = pl.concat(
        [calls, waits.select("rank", pl.col("start_ns").alias("at"), duration_ns=0, is_call=False)],
        how="vertical_relaxed",
    )
    begins = phases.select("rank", "_index", pl.col("host_begin_ns").alias("at"), "recorded_ns").sort("at")
    is_call = pl.col("is_call")
    # More waits than calls: what is waited for was enqueued in an earlier phase, and it is not known how much is left.
    untimed = pl.col("duration_ns").has_nulls() | (is_call.sum() < (~is_call).sum())
    inside = (
        rows.sort("at")
        .join_asof(begins, on="at", by="rank", check_sortedness=False)
        .filter(pl.col("at") < pl.col("recorded_ns"))
        .group_by("rank", "_index")
        .agg(pl.when(~untimed).then(pl.col("duration_ns").sum()).alias("communication_ns"), _calls=pl.len())
    )
    length = pl.col("device_ns") - pl.col("begin_ns")
    much = pl.col("_calls").is_not_null() & ~(pl.col("communication_ns") <= _LITTLE * length).fill_null(value=False)
    between = pl.col("phase") == _BETWEEN
    nth = pl.int_range(pl.len()).over("rank", "step", "phase")  # gradients may be accumulated over several backwards
    return (
        phases.join(inside, on=["rank", "_index"], how="left", maintain_order="left")
        .with_columns(nth.alias("_nth"), much.alias("_much"))
        .with_columns(
            pl.when(between & pl.col("_much"))
            .then(pl.lit("unsplit"))
            .when(~between & pl.col("_much").any().over("step", "phase", "_nth"))
            .then(pl.lit(MIXED))
            .otherwise("part")
            .alias("part"),
            pl.when(pl.col("_calls").is_not_null()).then("communication_ns").otherwise(0).alias("communication_ns"),
        )
    )


def mark_phases(marks: pl.DataFrame, steps: pl.DataFrame, regions: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return the devices' time in disjoint rows: (rank, step, part, label, start_ns, end_ns), ordered.

    The rows of a step cover it without gap or overlap: those of a phase of `marks` (as `by_marks` has them) have its
    part and its name for a label, but for the time in which the host's main thread was stopped (gc, input, compile,
    checkpoint) and its launch queue was drained, see `_dry`. A mixed phase whose waits are known (`waits`, as
    `device_waits.known_waits` has them) is unsplit communication in these and its own part otherwise.
    """
    stops = regions.filter(
        pl.col("kind").is_in(_STOPS), pl.col("thread") == _MAIN_THREAD, pl.col("end_ns") > pl.col("start_ns")
    ).sort("rank", "start_ns", "end_ns", descending=[False, False, True])
    labels = sorted({*PARTS, *marks["phase"].unique(), *stops["name"].unique()})
    code = {label: number for number, label in enumerate(labels)}
    of_stops, none = dict(by_rank(stops)), stops.clear()
    of_steps, of_waits, no_waits = dict(by_rank(steps.sort("rank", "start_ns"))), dict(by_rank(waits)), waits.clear()
    cut = [
        (rank, _cut(of_rank, of_steps[rank], of_stops.get(rank, none), of_waits.get(rank, no_waits), code))
        for rank, of_rank in by_rank(marks)
    ]
    return as_phases(cut, labels)


def _cut(
    marks: pl.DataFrame, steps: pl.DataFrame, stops: pl.DataFrame, waits: pl.DataFrame, code: dict[str, int]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """step, position in PARTS, label, start and end of each phase of one rank."""
    begin, end = marks["begin_ns"].to_numpy(), marks["device_ns"].to_numpy()
    dry, dry_part = _dry(marks, stops, code)
    waiting = Spans(waits["start_ns"].to_numpy(), waits["end_ns"].to_numpy(), np.zeros(len(waits), np.int64))
    edges = [begin, end, dry.start, dry.end, waiting.start, waiting.end]
    grid = Grid(edges, steps["start_ns"][:1].to_numpy(), steps["end_ns"][-1:].to_numpy())
    lasts = end > begin
    phase = np.flatnonzero(lasts)[np.searchsorted(begin[lasts], grid.start, side="right") - 1]
    code_of_part = {name: number for number, name in enumerate(PARTS)}
    is_apart = marks["apart"].is_not_null().to_numpy()[phase]
    part = numbers(pl.select(pl.coalesce(marks["apart"], marks["part"])).to_series(), code_of_part)[phase]
    part[is_apart & grid.covered(waiting)] = code_of_part["unsplit"]
    label = numbers(marks["phase"], code)[phase]
    at = np.searchsorted(dry.start, grid.start, side="right") - 1
    is_dry = (at >= 0) & (grid.start < dry.end[at]) if len(dry.start) else np.zeros(len(at), bool)
    part[is_dry], label[is_dry] = dry_part[at[is_dry]], dry.label[at[is_dry]]
    step = np.searchsorted(steps["start_ns"].to_numpy(), grid.start, side="right") - 1
    inside = grid.start < steps["end_ns"].to_numpy()[step]
    return joined(steps["step"].to_numpy()[step], part, label, grid, inside)


def _dry(marks: pl.DataFrame, stops: pl.DataFrame, code: dict[str, int]) -> tuple[Spans, Ints]:
    """Return when one rank's device was idle because its host was stopped; and the part that each of these is.

    Assume that within a phase the host enqueues work evenly while it is not stopped: the launch queue drained when the
    device had done the share enqueued before the stop. All the phase's work is assumed to be as much as possible: work
    enqueued after a stop was done after it. So this is a lower bound of the idle time.
    """
    host_begin, host_end, begin, end = (
        marks[c].to_numpy() for c in ("host_begin_ns", "recorded_ns", "begin_ns", "device_ns")
    )
    by_kind = [stops.filter(pl.col("kind") == kind) for kind in _STOPS]
    spans = [
        Spans(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy(), numbers(rows["name"], code)) for rows in by_kind
    ]
    edges = [host_begin, host_end, *(edge for s in spans for edge in (s.start, s.end))]
    grid = Grid(edges, host_begin[:1], host_end[-1:])
    part, label = np.full(len(grid.start), -1), np.zeros(len(grid.start), np.int64)
    for kind, of_kind in zip(_STOPS, spans, strict=True):
        where = grid.covered(of_kind)
        part[where] = PARTS.index(kind)
        label[where] = of_kind.innermost(grid.start[where], otherwise=0)
    phase = np.searchsorted(host_begin, grid.start, side="right") - 1
    at = np.flatnonzero((part >= 0) & (grid.start < host_end[phase]))
    phase, start, stop = phase[at], grid.start[at], grid.end[at]
    length = stop - start
    first = np.searchsorted(phase, phase)  # of the stops of the same phase
    so_far = np.cumsum(length) - length
    launching = host_end - host_begin - np.bincount(phase, weights=length, minlength=len(begin))
    enqueued = (start - host_begin[phase] - (so_far - so_far[first])) / np.maximum(launching[phase], 1)
    after = np.maximum(1 - enqueued, 0)
    stop = np.minimum(stop, end[phase])
    work = (end - begin).astype(np.float64)
    np.minimum.at(work, phase[after > 0], (end[phase] - stop)[after > 0] / after[after > 0])
    dry = begin[phase] + enqueued * work[phase]  # had the device not been idle before
    idle = np.zeros(len(begin))
    begins = stop.astype(np.float64)
    nth = np.arange(len(at)) - first
    for n in range(int(nth.max(initial=-1)) + 1):
        these = nth == n
        of = phase[these]
        begins[these] = np.minimum(np.maximum(start[these], dry[these] + idle[of]), stop[these])
        idle[of] += stop[these] - begins[these]
    begins = np.ceil(begins).astype(np.int64)
    known = stop - begins > marks["clock_error_ns"].fill_null(0).to_numpy()[phase] / _TRUSTED
    return Spans(begins[known], stop[known], label[at][known]), part[at][known]
