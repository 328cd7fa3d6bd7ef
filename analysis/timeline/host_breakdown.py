"""The breakdown of each rank's main thread per step, in parts that add up to the step to the nanosecond.

The meaning of each part is defined in docs/definitions.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.lookup import row_of
from rankscope.analysis.model.pointers import pointer
from rankscope.analysis.model.segments import MOST
from rankscope.analysis.model.tables import in_order, numbers
from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import told
from rankscope.analysis.timeline.rank_keys import RankKeys
from rankscope.collectors.schema import P2P_OPS, REGION_KINDS

try:
    from rankscope.analysis.timeline import _phases
except ImportError:  # it was built without a C compiler
    _phases = None  # type: ignore[assignment]

__all__ = [
    "PARTS",
    "PHASE_COLUMNS",
    "Grid",
    "InvariantError",
    "Spans",
    "as_phases",
    "breakdown",
    "check_phases",
    "joined",
    "phases",
]

# A rank without device rows has no `memory` and no `host`, one with them no `optimizer`; `mixed` is for marks alone.
PARTS = (
    *("compute", "overlapped", "memory", "wait", "bubble", "transfer", "unsplit", "mixed"),
    *("input", "gc", "compile", "checkpoint", "host", "optimizer", "other"),
)

PHASE_COLUMNS: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "part": pl.Enum(PARTS),
    "label": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}

_NOBODY = -1
_ROWS = 40_000  # of ranks that are cut together: arrays of so many stay in the cache
_MAIN_THREAD = 0
_IMMEDIATE_NS = 10_000  # a wait that is over sooner found its operation done: it has not blocked
_TAIL_BLOCKED = 0.75  # least share of the end of backward in which collectives are in flight, if it waits for them
# Kinds of regions; where several are true at once the last counts, and between the last two whether it is blocked.
_LAYERS = (
    ("forward", "backward", "user"),
    ("sync",),
    ("checkpoint",),
    ("optimizer",),
    ("compile",),
    ("input",),
    ("gc",),
)
_LOOK_BACK = 8  # how many collectives back the label of a blocked span is looked for

# Labels of time that no region covers.
FORWARD, BEFORE_FORWARD, AFTER_FORWARD = "forward", "before forward", "after forward"
AFTER_BACKWARD, AFTER_OPTIMIZER, NO_REGION = "after backward", "after the optimizer", "no region"
# The numbers that _phases.c has for these are their positions here.
_PLACES = (NO_REGION, FORWARD, BEFORE_FORWARD, AFTER_FORWARD, AFTER_BACKWARD, AFTER_OPTIMIZER)
_SWEPT_PARTS = (
    *("compute", "overlapped", "other", "checkpoint", "optimizer", "compile", "input", "gc"),
    *("wait", "bubble", "transfer", "unsplit"),
)

Ints = NDArray[np.signedinteger[Any]]  # codes take 1 or 4 bytes, times 8
Bools = NDArray[np.bool_]


class InvariantError(AssertionError):
    """A table violates its function's invariant: a bug, never the user's data."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Intervals in order of start, and the label code of each."""

    start: Ints
    end: Ints
    label: Ints

    def where(self, keep: Bools) -> Spans:
        return Spans(self.start[keep], self.end[keep], self.label[keep])

    def levels(self) -> list[Spans]:
        """Return the spans by depth, outermost first. Those of one thread nest, so those of one depth are disjoint."""
        depth = np.arange(len(self.start)) - np.searchsorted(np.sort(self.end), self.start, side="right")
        return [self.where(depth == level) for level in np.unique(depth)]

    def innermost(self, at: Ints, *, otherwise: int) -> Ints:
        """Label of the last started span that covers each of these moments."""
        label = np.full(len(at), otherwise)
        for level in self.levels():
            last = np.searchsorted(level.start, at, side="right") - 1
            covers = (last >= 0) & (at < level.end[last])
            label[covers] = level.label[last[covers]]
        return label


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Input of some ranks: steps, main-thread regions by kind, collectives (all threads).

    Their times are keys, so that they are cut together.
    """

    step_start: Ints
    step_end: Ints
    step: Ints
    rank: Ints  # of each step
    offset: Ints  # of each step, which made its rank's times keys
    first: Ints  # positions of the ranks' first and last steps
    last: Ints
    regions: Spans
    kind: Ints  # of each region, a position in `REGION_KINDS`, or one more
    calls: Spans  # label is the operation
    issued: Ints
    last_arrival: Ints  # until when peers were missing; the arrival where that is not known
    split: Bools  # matched, with a wait that is known
    ended: Bools
    p2p: Bools
    blocking: Bools  # the call itself held the main thread

    def of_kind(self, kind: str) -> Spans:
        return self.regions.where(self.kind == REGION_KINDS.index(kind))

    def rows(self, cut: tuple[Ints, Ints, Ints, Ints, Ints]) -> tuple[Ints, ...]:
        """Return rank, step, part, label, start and end of phases, on the ranks' own times."""
        step, part, label, start, end = cut
        return self.rank[step], self.step[step], part, label, start - self.offset[step], end - self.offset[step]


def phases(steps: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the main thread's time in disjoint rows: (rank, step, part, label, start_ns, end_ns), ordered.

    The rows of a step cover it without gap or overlap. Where several things are true at once the first counts:
    gc, blocked on communication (unsplit, wait, bubble or transfer), input, compile, optimizer, checkpoint, sync
    (other), compute (overlapped while a collective of this rank is in flight), other. `collectives` is the matched
    table.

    The microbatches of a pipeline's schedule (`PP:1F0`) are labelled forward and backward: ranks of different stages
    would otherwise have no label in common.
    """
    of_schedule = pl.col("microbatch").is_not_null() & pl.col("kind").is_in((FORWARD, "backward"))
    if regions["microbatch"].null_count() < len(regions):
        kind = pl.col("kind").cast(pl.String)
        regions = regions.with_columns(pl.when(of_schedule).then(kind).otherwise("name").alias("name"))
    labels = sorted(
        {
            *PARTS,
            *_PLACES,
            *regions["name"].unique().to_list(),
            *collectives["op"].unique().to_list(),
        }
    )
    code = dict(zip(labels, range(len(labels)), strict=True))
    regions = (
        regions.filter(pl.col("thread") == _MAIN_THREAD, pl.col("end_ns") > pl.col("start_ns"))
        .pipe(in_order, "rank", "start_ns")
        .select("rank", "start_ns", "end_ns", "name", pl.col("kind").to_physical().fill_null(len(REGION_KINDS)))
        .pipe(_labelled, "name", code)
    )
    # Without an end nothing says that the call waited: on an accelerator it only queues the work.
    blocking = (
        (pl.col("thread") == _MAIN_THREAD)
        & pl.col("end_ns").is_not_null()
        & (~pl.col("is_async")).fill_null(pl.col("end_ns") <= pl.col("issued_ns"))
    )
    collectives = _labelled(in_order(collectives, "rank", "start_ns"), "op", code).select(
        *("rank", "start_ns", "issued_ns", "_label"),
        pl.coalesce("end_ns", "start_ns").alias("end_ns"),
        pl.col("end_ns").is_not_null().alias("ended"),
        (pl.coalesce("device_start_ns", "start_ns") + pl.col("wait_ns").fill_null(0)).alias("last_arrival_ns"),
        pl.col("op").is_in(P2P_OPS).alias("p2p"),
        pl.col("wait_ns").is_not_null().alias("split"),
        blocking.alias("blocking"),
    )
    pieces = list(_some_ranks(steps.sort("rank", "start_ns"), regions, collectives))
    cut = [of_some.rows(_cut(of_some, code)) for of_some in told(text("ranks"), pieces, len(pieces))]
    return _table(cut, labels)


def as_phases(cut: list[tuple[int, tuple[Ints, Ints, Ints, Ints, Ints]]], labels: list[str]) -> pl.DataFrame:
    """Return the rows of these ranks as a table.

    Each has the columns of `joined`, `labels` are the words for their codes.
    """
    return _table([(np.full(len(columns[0]), rank), *columns) for rank, columns in cut], labels)


def _table(cut: Sequence[tuple[Ints, ...]], labels: list[str]) -> pl.DataFrame:
    """Return these pieces as a table: rank, step, code of the part and of the label, start and end."""
    if not cut:
        return pl.DataFrame(schema=PHASE_COLUMNS)
    columns = (column[0] if len(column) == 1 else np.concatenate(column) for column in zip(*cut, strict=True))
    rank, step, part, label, start, end = columns
    return pl.DataFrame(
        {
            "rank": rank,
            "step": step,
            "part": pl.Series("part", PARTS, PHASE_COLUMNS["part"]).gather(part),
            "label": pl.Series(labels, dtype=pl.String).gather(label),
            "start_ns": start,
            "end_ns": end,
        },
        schema_overrides=PHASE_COLUMNS,
    )


def breakdown(phases: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """(rank, step, part, ns): one row for each part of each step, zeros included; they sum to the step."""
    first, row = _runs_of_steps(phases, steps)
    row = np.repeat(row, np.diff(first, append=len(phases)))
    part = phases["part"].to_physical().to_numpy()
    length = (phases["end_ns"] - phases["start_ns"]).to_numpy()
    spent = np.bincount((row + 1) * len(PARTS) + part, length, (len(steps) + 1) * len(PARTS))[len(PARTS) :]
    each = np.repeat(np.arange(len(steps)), len(PARTS))
    part_of_each = pl.Series("part", PARTS, PHASE_COLUMNS["part"]).gather(np.tile(np.arange(len(PARTS)), len(steps)))
    of_steps = steps.select("rank", "step")[each]
    return of_steps.with_columns(part_of_each, pl.Series("ns", spent.astype(np.int64)))


def check_phases(phases: pl.DataFrame, steps: pl.DataFrame) -> None:
    """Raise `InvariantError` unless the rows of every step come one after the other and cover it exactly."""
    first, row = _runs_of_steps(phases, steps)
    start, end = phases["start_ns"].to_numpy(), phases["end_ns"].to_numpy()
    seamless = np.append(True, start[1:] == end[:-1])[: len(start)]
    seamless[first] = True
    whole = np.logical_and.reduceat(seamless & (end > start), first) if len(first) else np.zeros(0, bool)
    last = np.append(first[1:], len(phases))[: len(first)] - 1
    begin, until = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    covers = whole & (row >= 0) & (start[first] == begin[row]) & (end[last] == until[row]) if len(steps) else whole
    times = np.bincount(row + 1, minlength=len(steps) + 1)[1:]
    covered = np.bincount(row[covers] + 1, minlength=len(steps) + 1)[1:]
    wrong = np.flatnonzero((times != 1) | (covered != 1))
    if len(wrong):
        one = steps.row(int(wrong[0]), named=True)
        raise InvariantError(f"the parts of step {one['step']} of rank {one['rank']} do not cover it")


def _runs_of_steps(phases: pl.DataFrame, steps: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return where rows of another step begin, and the row of that step in `steps`; -1: it is none of them."""
    rank, step = phases["rank"].to_numpy(), phases["step"].to_numpy()
    first = np.flatnonzero((np.diff(rank, prepend=_NOBODY) != 0) | (np.diff(step, prepend=_NOBODY) != 0))
    return first, row_of(phases.select("rank", "step")[first], steps, ["rank", "step"])


def _labelled(rows: pl.DataFrame, column: str, code: dict[str, int]) -> pl.DataFrame:
    return rows.with_columns(_label=numbers(rows[column], code))


def _some_ranks(steps: pl.DataFrame, regions: pl.DataFrame, collectives: pl.DataFrame) -> Iterator[_Ranks]:
    """Yield the input in pieces of whole ranks, of about as many rows each. All tables are in order of rank."""
    if steps.is_empty():
        return
    ranks = np.unique(steps["rank"].to_numpy())
    tables = [steps, *(rows.filter(pl.col("rank").is_in(ranks)) for rows in (regions, collectives))]
    times = [table[column] for table in tables for column in table.columns if column.endswith("_ns") and len(table)]
    origin, last = min(int(of.to_numpy().min()) for of in times), max(int(of.to_numpy().max()) for of in times)
    span = last - origin + 2  # no rank begins where the one before ends
    bounds = [np.append(np.searchsorted(table["rank"].to_numpy(), ranks), len(table)) for table in tables]
    piece = np.cumsum(sum(np.diff(of) for of in bounds)) // _ROWS + np.arange(len(ranks)) // max(MOST // span, 1)
    for begin, end in pairwise([*np.flatnonzero(np.diff(piece, prepend=-1)).tolist(), len(ranks)]):
        rows = [table[int(of[begin]) : int(of[end])] for table, of in zip(tables, bounds, strict=True)]
        yield _ranks_of(RankKeys(ranks[begin:end], origin, span), rows)


def _ranks_of(keys: RankKeys, tables: list[pl.DataFrame]) -> _Ranks:
    """Return the rows of these ranks, their times as keys."""
    steps, regions, collectives = tables
    of_steps, of_regions, of_calls = (keys.offset(table) for table in tables)
    start, end = (regions[column].to_numpy() + of_regions for column in ("start_ns", "end_ns"))
    order = np.arange(len(start))  # regions are in order of start
    together = np.flatnonzero(start[1:] == start[:-1])
    together = np.union1d(together, together + 1)
    order[together] = together[np.lexsort((-end[together], start[together]))]  # the outer ones first
    spans = Spans(start[order], end[order], regions["_label"].to_numpy()[order])
    kind = regions["kind"].to_numpy()[order]
    starts, ends, issued, last_arrival = (
        collectives[column].to_numpy() + of_calls for column in ("start_ns", "end_ns", "issued_ns", "last_arrival_ns")
    )
    new = np.flatnonzero(np.diff(steps["rank"].to_numpy(), prepend=_NOBODY))
    return _Ranks(
        step_start=steps["start_ns"].to_numpy() + of_steps,
        step_end=steps["end_ns"].to_numpy() + of_steps,
        step=steps["step"].to_numpy(),
        rank=steps["rank"].to_numpy(),
        offset=of_steps,
        first=new,
        last=np.append(new[1:], len(steps)) - 1,
        regions=spans,
        kind=kind,
        calls=Spans(starts, ends, collectives["_label"].to_numpy()),
        issued=issued,
        last_arrival=last_arrival,
        split=collectives["split"].to_numpy(),
        ended=collectives["ended"].to_numpy(),
        p2p=collectives["p2p"].to_numpy(),
        blocking=collectives["blocking"].to_numpy(),
    )


def _cut(ranks: _Ranks, code: dict[str, int]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Position of the step, position in PARTS, label, start and end of each phase of these ranks."""
    blocked = _blocked(ranks, ranks.of_kind("wait"), ranks.of_kind("backward"))
    last = [_last_in_step(ranks, ranks.of_kind(kind).start) for kind in ("forward", "backward", "optimizer")]
    return (cut_in_python if _phases is None else _swept)(ranks, code, blocked, last)


def _swept(
    ranks: _Ranks, code: dict[str, int], blocked: Spans, last: list[Ints]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return what `cut_in_python` does, by the compiled sweep."""
    layer = np.full(len(REGION_KINDS) + 1, _NOBODY, np.int8)
    for number, kinds in enumerate(_LAYERS):
        layer[[REGION_KINDS.index(kind) for kind in kinds]] = number
    calls, regions = ranks.calls, ranks.regions
    state = ranks.ended.astype(np.uint8) + 2 * ranks.split.astype(np.uint8) + 4 * ranks.p2p.astype(np.uint8)
    rows = 2 * (len(ranks.step_start) + len(regions.start) + len(blocked.start)) + 3 * len(calls.start)
    phases = [np.empty(rows, dtype) for dtype in (np.int32, np.int8, np.int32, np.int64, np.int64)]
    columns = (
        (ranks.first, ranks.last, ranks.step_start, ranks.step_end, *last),
        (regions.start, regions.end, regions.label, layer[ranks.kind]),
        (calls.start, calls.end, calls.label, ranks.last_arrival, state),
        (blocked.start, blocked.end, blocked.label),
    )
    given = [[np.ascontiguousarray(column) for column in table] for table in columns]
    words = [np.array([PARTS.index(part) for part in _SWEPT_PARTS]), np.array([code[label] for label in _PLACES])]
    found = _phases.cut(
        *(at for table in given for at in (len(table[0]), *map(pointer, table))), *map(pointer, words + phases)
    )
    step, part, label, start, end = (column[:found] for column in phases)
    return step, part, label, start, end


def cut_in_python(
    ranks: _Ranks, code: dict[str, int], blocked: Spans, last: list[Ints]
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return the same without a compiler: what the fast one is held against.

    `blocked` are spans in which main threads were blocked on communication; `last` says when the last forward, backward
    and optimizer of each step begin, -1 where there is none.
    """
    of = {kind: ranks.of_kind(kind) for kinds in _LAYERS for kind in kinds}
    compute = _LAYERS[0]
    edges = [
        ranks.step_start,
        ranks.step_end,
        ranks.calls.start,
        ranks.calls.end,
        ranks.last_arrival,
        blocked.start,
        blocked.end,
    ]
    edges += [edge for spans in of.values() for edge in (spans.start, spans.end)]
    grid = Grid(edges, ranks.step_start[ranks.first], ranks.step_end[ranks.last])
    step = np.searchsorted(ranks.step_start, grid.start, side="right") - 1
    inside = grid.start < ranks.step_end[step]

    part = np.full(len(grid.start), PARTS.index("other"))
    label = np.full(len(grid.start), code[NO_REGION])
    last_forward, last_backward, last_optimizer = last
    after_backward = (last_backward[step] >= 0) & (grid.start >= last_backward[step])
    label[after_backward & (grid.start < last_optimizer[step])] = code[AFTER_BACKWARD]
    label[(last_optimizer[step] >= 0) & (grid.start >= last_optimizer[step])] = code[AFTER_OPTIMIZER]
    label[(last_forward[step] >= 0) & (grid.start < last_backward[step])] = code[AFTER_FORWARD]
    label[grid.start < last_forward[step]] = code[BEFORE_FORWARD]
    forward = (grid.start < last_backward[step]) & (last_forward[step] < 0)
    part[forward], label[forward] = PARTS.index("compute"), code[FORWARD]

    def paint(name: str, spans: Spans) -> None:
        where = grid.covered(spans)
        part[where] = PARTS.index(name)
        label[where] = spans.innermost(grid.start[where], otherwise=code[name])

    in_flight = grid.covered(ranks.calls.where(ranks.ended)) & ~grid.between
    paint("compute", _merged([of[kind] for kind in compute]))
    part[(part == PARTS.index("compute")) & in_flight] = PARTS.index("overlapped")
    paint("other", of["sync"])
    for name in ("checkpoint", "optimizer", "compile", "input"):
        paint(name, of[name])
    where = grid.covered(blocked) & ~grid.between
    part[where] = _split(ranks, grid, where, in_flight)[where]
    label[where] = blocked.innermost(grid.start[where], otherwise=code["wait"])
    label[where] = _operation(ranks, grid, where & in_flight, label)[where]
    paint("gc", of["gc"])
    return joined(step, part, label, grid, inside)


class Grid:
    """Elementary spans between all the points where anything starts or ends, from `low` to `high`.

    Of several ranks, one after the other, there is one of each by rank; `between` says which spans lie between two.
    """

    def __init__(self, edges: list[Ints], low: Ints, high: Ints) -> None:
        at = np.concatenate(edges)  # of large runs the largest array: no copies; np.unique would be slower, too
        at.sort()
        of = np.searchsorted(low[1:], at, side="right") if len(low) > 1 else 0
        np.clip(at, low[of], high[of], out=at)
        self.at = at[np.concatenate([[True], at[1:] != at[:-1]])]
        self.start, self.end = self.at[:-1], self.at[1:]
        self.between = np.zeros(len(self.start), np.bool_)
        self.between[np.searchsorted(self.start, high[:-1])] = True

    def begun(self, times: Ints) -> Ints:
        """Return how many of these times lie at or before the start of each elementary span."""
        return np.cumsum(self._counted(times), dtype=np.int32)

    def covered(self, spans: Spans) -> Bools:
        """Return which elementary spans lie in at least one of these spans."""
        if not len(spans.start):
            return np.zeros(len(self.start), np.bool_)
        return np.asarray(np.cumsum(self._counted(spans.start) - self._counted(spans.end)) > 0)

    def _counted(self, times: Ints) -> Ints:
        """Return how many of these times lie at the start of each elementary span."""
        size = len(self.start)
        if not len(times):
            return np.zeros(size, np.int64)
        # What is before the first point counts from there on, what is after the last never.
        return np.bincount(np.searchsorted(self.at, times), minlength=size)[:size]


def _merged(spans: list[Spans]) -> Spans:
    joined = Spans(*(np.concatenate([getattr(s, f) for s in spans]) for f in ("start", "end", "label")))
    order = np.lexsort((-joined.end, joined.start))
    return Spans(joined.start[order], joined.end[order], joined.label[order])


def _blocked(ranks: _Ranks, waits: Spans, backward: Spans) -> Spans:
    """Return the spans in which the main thread waited for communication.

    Seen: regions of kind wait, and calls that were not asynchronous, or may not have been and returned only when the
    operation was done. (An asynchronous call that takes long was not waiting: its thread had no CPU.)
    Inferred: DDP waits for its buckets in C++ at the end of backward, so from the moment its last collective is issued
    until those in flight are done.
    Not inferred where a wait was seen there, or where backward went on long after they were done: it was computing.
    """
    waits = waits.where(waits.end - waits.start >= _IMMEDIATE_NS)
    calls = ranks.calls
    in_call = Spans(calls.start, ranks.issued, calls.label).where(ranks.blocking & (ranks.issued > calls.start))
    return _merged([waits, in_call, _waits_of_backward(ranks, waits, backward)])


def _waits_of_backward(ranks: _Ranks, waits: Spans, backward: Spans) -> Spans:
    collective = ~ranks.p2p
    start, issued = ranks.calls.start[collective], ranks.issued[collective]
    label, end = ranks.calls.label[collective], ranks.calls.end[collective]
    last = np.searchsorted(start, backward.end) - 1
    has = (last >= 0) & (start[last] >= backward.start) if len(start) else np.zeros(len(last), bool)
    last, end_of_backward = last[has], backward.end[has]
    begin = issued[last]
    until = np.minimum(end_of_backward, np.maximum.accumulate(end)[last]) if len(last) else begin
    seen = np.searchsorted(waits.start, until) - np.searchsorted(np.sort(waits.end), begin, side="right")
    keep = (until > begin) & (seen <= 0) & (until - begin >= _TAIL_BLOCKED * (end_of_backward - begin))
    return Spans(begin[keep], until[keep], label[last][keep])


def _split(ranks: _Ranks, grid: Grid, blocked: Bools, in_flight: Bools) -> Ints:
    """Choose the part of each blocked elementary span.

    It is unsplit while an unmatched operation is in flight, else wait, bubble or transfer; and unsplit where nothing is
    in flight.
    """
    calls = ranks.calls
    unsplit = grid.covered(calls.where(ranks.ended & ~ranks.split))
    missing = Spans(calls.start, ranks.last_arrival, calls.label)
    waiting, starved = (grid.covered(missing.where(ranks.split & kind)) for kind in (~ranks.p2p, ranks.p2p))
    # A thread wakes up a little after the operation's end: that belongs to the operation it was blocked on.
    index = np.arange(len(blocked))
    opened = np.maximum.accumulate(np.where(blocked & ~np.concatenate([[False], blocked[:-1]]), index, -1))
    woken = np.maximum.accumulate(np.where(in_flight & blocked, index, -1)) >= np.maximum(opened, 0)
    transfer = in_flight | woken
    choice = np.where(transfer, PARTS.index("transfer"), PARTS.index("unsplit"))
    choice[starved] = PARTS.index("bubble")
    choice[waiting] = PARTS.index("wait")
    choice[unsplit] = PARTS.index("unsplit")
    return choice


def _operation(ranks: _Ranks, grid: Grid, in_flight: Bools, wait: Ints) -> Ints:
    """Return the operation in flight that started last, or that has just ended.

    The name of the wait before the first.
    """
    calls = ranks.calls
    label: Ints = wait.copy()
    last = np.searchsorted(calls.start, grid.start, side="right") - 1
    sought = in_flight.copy()
    for back in range(_LOOK_BACK):
        at = np.flatnonzero(sought & (last >= back))
        at = at[grid.start[at] < calls.end[last[at] - back]]
        label[at] = calls.label[last[at] - back]
        sought[at] = False
    index = np.arange(len(label))
    latest = np.maximum.accumulate(np.where(in_flight, index, -1))
    of_rank = np.maximum.accumulate(np.where(grid.between, index, 0))
    return np.where(latest >= of_rank, label[latest], label)


def _last_in_step(ranks: _Ranks, start: Ints) -> Ints:
    """Per step the last of these starts that lies in it, -1 where none does."""
    if not len(start):
        return np.full(len(ranks.step_start), -1)
    last: Ints = start[np.searchsorted(start, ranks.step_end) - 1]
    last[(last < ranks.step_start) | (last >= ranks.step_end)] = -1
    return last


def joined(step: Ints, part: Ints, label: Ints, grid: Grid, inside: Bools) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Neighbours that say the same become one row."""
    step, part, label = step[inside], part[inside], label[inside]
    start, end = grid.start[inside], grid.end[inside]
    if not len(start):
        return step, part, label, start, end
    new = np.flatnonzero((np.diff(step) != 0) | (np.diff(part) != 0) | (np.diff(label) != 0) | (start[1:] != end[:-1]))
    first = np.concatenate([[0], new + 1])
    last = np.concatenate([new, [len(start) - 1]])
    return step[first], part[first], label[first], start[first], end[last]
