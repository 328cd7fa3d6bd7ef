"""A run as Perfetto's slices: tables, in the order of their tracks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Report
from rankscope.analysis.report.lane_packing import nest_rows, pack_rows
from rankscope.analysis.timeline.build import Timeline

__all__ = ["OF_JOB", "OF_NODE", "TIMED", "Pack", "Table", "operations_of", "span_of", "tables_of"]

_ARROWS = 32  # to one operation's ranks, those that waited longest
_BLOCKED_NS = 10_000  # a shorter wait is none, as in the breakdown
OF_JOB, OF_NODE = -1, -2  # in place of a rank: the job's rows, and those of node 0; node 1 has -3, …

TIMED = {  # frames with a rank, and what of them is their time
    "steps": ("start_ns", "end_ns"),
    "phases": ("start_ns", "end_ns"),
    "ops": ("start_ns", "end_ns"),
    "marks": ("begin_ns", "device_ns"),
    "kernels": ("start_ns", "end_ns"),
    "collectives": ("start_ns", "end_ns"),
    "regions": ("start_ns", "end_ns"),
    "memory": ("time_ns", "time_ns"),
}

Ints = NDArray[np.int64]
Pack = Callable[[Ints, Ints, int], NDArray[np.intp]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with `rank`, `start_ns` and `end_ns`, in order of rank, and the arguments of each."""

    category: str
    frame: pl.DataFrame
    track: pl.Expr
    name: pl.Expr
    args: Sequence[str]
    pack: Pack = pack_rows


def tables_of(
    part: Timeline, operations: pl.DataFrame, report: Report, gaps: pl.DataFrame, span: tuple[int, int]
) -> Iterator[Table]:
    """In the order in which a rank's tracks lie below each other.

    `operations` is as `operations_of` has it; `span` is from the run's first event to its last.
    """
    yield from _of_steps(part, report)
    yield from _of_work(part, operations)
    yield Table(
        category="gaps",
        frame=_timed(gaps, part, span),
        track=pl.lit("not seen"),
        name=pl.format("{}: {}", "table", "why"),
        args=("count", "source"),
    )


def _of_steps(part: Timeline, report: Report) -> Iterator[Table]:
    """Yield steps, findings, and what the steps are made of."""
    aside = pl.when(pl.col("aside").is_not_null()).then(pl.format(" ({})", "aside")).otherwise(pl.lit(""))
    yield Table(
        category="steps",
        frame=part.steps,
        track=pl.lit("steps"),
        name=pl.concat_str(pl.lit("step "), "step", aside),
        args=("step", "judged", "aside", "source"),
    )
    yield Table(
        category="findings",
        frame=_evidence(report, part),
        track=pl.lit("findings"),
        name=pl.col("name"),
        args=("note", "node"),
    )
    yield Table(
        category="phases",
        frame=part.phases,
        track=pl.lit("parts of the step"),
        name=pl.col("part"),
        args=("step", "label"),
    )
    yield Table(
        category="ops",
        frame=part.ops,
        track=pl.lit("operations of the stage"),
        name=pl.col("name"),
        args=("step", "stage", "replica", "chunk", "microbatch", "seq"),
    )
    yield Table(
        category="marks",
        frame=part.marks.rename({"begin_ns": "start_ns", "device_ns": "end_ns"}),
        track=pl.lit("device, by marks"),
        name=pl.col("phase"),
        args=("step", "part", "ahead_ns", "idle_ns", "communication_ns", "clock_error_ns"),
    )


def _of_work(part: Timeline, operations: pl.DataFrame) -> Iterator[Table]:
    """Yield the work of devices and threads."""
    yield Table(
        category="kernels",
        frame=part.kernels,
        track=_stream(part.kernels),
        name=pl.col("name"),
        args=("work", "stream", "correlation", "bytes"),
    )
    yield Table(
        category="collectives",
        frame=operations,
        track=pl.format("group {}", pl.coalesce("group", pl.lit("unknown"))),
        name=pl.col("op"),
        args=(
            *("step", "group", "seq", "peer", "tag", "dtype", "size_bytes", "wait_ns", "transfer_ns", "last_rank"),
            *("arrival_spread_ns", "duration_ns", "instance_id", "end", "unmatched"),
        ),
    )
    thread = pl.when(pl.col("thread") == 0).then(pl.lit("main thread")).otherwise(pl.format("thread {}", "thread"))
    yield Table(
        category="regions",
        frame=part.regions,
        track=thread,
        name=pl.coalesce("name", "kind"),
        args=("kind", "microbatch", "stage"),
        pack=nest_rows,
    )


def _evidence(report: Report, part: Timeline) -> pl.DataFrame:
    """Return the evidence of findings; rows without a rank are the run's."""
    schema = {"rank": pl.Int32, "node": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}
    rows = [
        (OF_JOB if e.rank is None else e.rank, e.node, e.start_ns, e.end_ns, finding.title, e.note)
        for finding in report.findings
        for e in finding.evidence
    ]
    frame = pl.DataFrame(rows, schema | {"name": pl.String, "note": pl.String}, orient="row")
    return _shown(frame, part)


def _timed(gaps: pl.DataFrame, part: Timeline, span: tuple[int, int]) -> pl.DataFrame:
    """Return the gaps of which it is known when they were; what is of no rank is the node's."""
    known = gaps.filter(pl.col("start_ns").is_not_null() | pl.col("end_ns").is_not_null())
    first, last = span
    return _shown(
        known.with_columns(
            pl.coalesce("rank", OF_NODE - pl.col("node")).cast(pl.Int32).alias("rank"),
            pl.col("start_ns").fill_null(first).clip(first, last),
            pl.col("end_ns").fill_null(last).clip(first, last),
        ),
        part,
    )


def _shown(rows: pl.DataFrame, part: Timeline) -> pl.DataFrame:
    """Return rows of the shown ranks, the nodes and the run that are at least in part within the shown time."""
    first, last = span_of(part) or (1, 0)
    of_part = pl.col("rank").is_in(part.ranks["rank"].implode()) | (pl.col("rank") < 0)
    return rows.filter(of_part, pl.col("start_ns") <= last, pl.col("end_ns") >= first).sort("rank", "start_ns")


def _stream(kernels: pl.DataFrame) -> pl.Expr:
    stream = pl.format("stream {}", pl.col("stream").cast(pl.String).fill_null("?"))
    several = kernels.group_by("rank").agg(pl.col("device").n_unique() > 1)["device"].any() if len(kernels) else False
    return pl.format("device {} {}", pl.col("device").cast(pl.String).fill_null("?"), stream) if several else stream


def operations_of(rows: pl.DataFrame, of_all_ranks: pl.DataFrame, last_ns: int) -> pl.DataFrame:
    """Return operations from arrival to end; without an end, their call, or until the end of the run if they hang.

    `_waited`: the wait is long enough to be drawn. `_flow` is the number of the arrow that ends in a row, at
    `_over_ns`; `_flows` and `_first_flow` are how many begin there, at its start, and their first number.
    """
    if rows.is_empty():
        return rows
    start = pl.coalesce("device_start_ns", "start_ns")
    hangs = pl.col("end_ns").is_null() & (start >= pl.col("end_ns").max().over("rank"))
    seen = pl.when(hangs).then(last_ns).otherwise(pl.coalesce("end_ns", "issued_ns", start))
    at_once = pl.col("peer") < 0
    last = of_all_ranks.filter(pl.col("is_last")).unique("instance_id", keep="first")
    last = last.select("instance_id", pl.col("rank").alias("last_rank"))
    drawn = rows.join(last, on="instance_id", how="left", maintain_order="left").with_columns(
        pl.col("op").cast(pl.String).replace("unknown", "communication"),
        start.alias("start_ns"),
        pl.max_horizontal(start, seen).alias("end_ns"),
        pl.when(~at_once).then("peer").alias("peer"),
        pl.when(~at_once).then("tag").alias("tag"),
        pl.when(pl.col("end_ns").is_null()).then(pl.lit("not seen")).alias("end"),
        (pl.col("end_ns").is_not_null() & (pl.col("wait_ns") >= _BLOCKED_NS)).fill_null(False).alias("_waited"),
    )
    return _with_arrows(drawn)


def _with_arrows(drawn: pl.DataFrame) -> pl.DataFrame:
    came = drawn.filter(pl.col("is_last")).unique("instance_id", keep="first")
    came = came.select("instance_id", _came_ns="start_ns")
    row, wait = pl.int_range(pl.len()).alias("_row"), pl.col("wait_ns")
    over = pl.max_horizontal(pl.col("start_ns") + wait, "_came_ns")  # clocks may differ by their error
    ends = (
        drawn.select(row, "instance_id", "start_ns", "end_ns", "wait_ns", "_waited", "is_last")
        .filter("_waited", ~pl.col("is_last"))
        .join(came, on="instance_id")
        .with_columns(over.alias("_over_ns"))
        .filter(pl.col("_over_ns") < pl.col("end_ns"))
        .filter(wait.rank("ordinal", descending=True).over("instance_id") <= _ARROWS)
        .sort("instance_id")
        .with_columns(pl.int_range(1, pl.len() + 1).alias("_flow"))
    )
    begins = ends.group_by("instance_id").agg(_flows=pl.len().cast(pl.Int64), _first_flow=pl.col("_flow").min())
    first = (pl.col("is_last") & pl.col("is_last").cum_sum().over("instance_id").eq(1)).fill_null(False)
    return (
        drawn.with_columns(row)
        .join(ends.select("_row", "_flow", "_over_ns"), on="_row", how="left", maintain_order="left")
        .join(begins, on="instance_id", how="left", maintain_order="left")
        .with_columns(pl.when(first).then("_flows").fill_null(0).alias("_flows"))
        .drop("_row")
    )


def span_of(timeline: Timeline) -> tuple[int, int] | None:
    """Return the first start and the last known time; None: nothing has a time."""
    ends = [
        frame.select(first=pl.col(start).min(), last=pl.max_horizontal(start, end).max())
        for name, (start, end) in TIMED.items()
        if name != "memory" and len(frame := getattr(timeline, name))
    ]
    if not ends:
        return None
    first, last = pl.concat(ends).select(pl.col("first").min(), pl.col("last").max()).row(0)
    return None if first is None else (int(first), int(last))
