"""Many small collectives follow each other, and each costs its latency.

**Signal.** Runs of the same operation in one group, in which a rank computes for less than a tenth of an operation
between two of them, and which in forward and backward are issued without waiting for each other: nothing in between
needs the result of one alone. A size is small up to a quarter of n½, where latency is at least four fifths of the time;
latency α and bandwidth come from the run's own transfers of different sizes. The loss is what the small ones of a run
hold the ranks up, minus what one operation with all their bytes takes: reported from `min_count` operations saved per
step, above `min_fraction` of the step.

**Why it costs time.** Each operation passes all its messages one after the other, however little is in them: a ring of
p ranks takes 2(p - 1) α for an all-reduce. One operation with all the bytes pays that once.

**False positives.** What looks independent may not be: a loop that decides by each result whether to go on. Operations
of tensor parallelism follow each other with computation in between and do not count. Where all operations have about
the same size, or their times fit no line, latency cannot be distinguished from bandwidth: not checked, except up to
1 kB, which is latency on every network, whatever the line says.

**What to try.** One flat buffer for many tensors; DistributedDataParallel instead of a loop over parameters, or a
larger `bucket_cap_mb` (25 by default); scalars of metrics stacked into one tensor, every n steps.

**Source.** Hockney 1994 for α, β and n½; the cost of a ring: Patarasuk and Yuan 2009. Thresholds are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, longest_rows, price, refuse_unsized, transfer_grid
from rankscope.analysis.metrics.bandwidth import Line, lines, transfers
from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.exposed_communication import spent, with_exposed
from rankscope.analysis.metrics.step_matrix import TRIM, Estimate, Floats, StepGrid, by_rank_and_step, estimate
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.segments import reached_before
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.model.tables import WORDS, in_order
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import bytes_text, duration
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    explains=("exposed_communication",),
    lost_as=AS_EXPOSED,
)

_BOUND_BY_LATENCY = 0.25  # of n½: up to there at least 80 % of the time is latency
_WORST_FIT = 0.25
_TINY_BYTES, _FUSED_TINY_BYTES = 1024, 65_536  # bound by latency on every network
_COMPUTED = 0.1  # of an operation's time: more computation between two may be what the second one needs
_COMPUTING = ("compute", "overlapped")
_DIRECTED = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class _Saving:
    """The saving of fusing the small operations of one kind; arrays are by step, of the median rank."""

    op: str
    groups: tuple[str, ...]
    ns: Floats
    fewer: float  # operations per step
    count: float  # of small operations per step
    each_ns: float
    each_bytes: float
    latency_ns: float
    rows: pl.DataFrame


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_count: int = 8,
) -> list[Finding]:
    """Return the saving of fusing, one finding per kind of operation."""
    grid = transfer_grid(breakdown, FEW_STEPS)
    known = _small_sizes(collectives)
    rows = with_exposed(collectives, phases)
    runs = _runs(_frequent(rows, min_count * len(grid.steps)), phases, regions)
    findings = []
    for saving in _savings(runs, known, grid):
        lost = estimate(saving.ns, TRIM)
        if saving.fewer >= min_count and lost.clear and lost.ns >= min_fraction * grid.step_ns:
            findings.append(_finding(saving, lost, grid, regions))
    if not findings:
        _refuse_unknown(runs, known, grid, min_fraction, min_count)
        refuse_unsized(rows, grid, min_fraction)
    return findings


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.05) -> int:
    """Return the smallest loss per step that would have been reported."""
    return round(min_fraction * transfer_grid(breakdown, FEW_STEPS).step_ns)


def _small_sizes(collectives: pl.DataFrame) -> pl.DataFrame:
    """By (op, group_id): latency and ns per byte (at the most), and up to which size an operation is small."""
    moved = transfers(collectives)
    of_tiny = pl.col("ns").filter(pl.col("alone") & (pl.col("size_bytes") <= _TINY_BYTES)).median()
    fitted = lines(moved)
    rows = []
    for op, group, size, usual in moved.group_by("op", "group_id").agg(pl.col("size_bytes").max(), of_tiny).iter_rows():
        line = fitted.get((op, group))
        if line is not None and _trusted(line):
            steepest = line.ns_per_byte + 2 * line.rate_error_ns_per_byte
            small = max(_BOUND_BY_LATENCY * line.half_bytes, _TINY_BYTES)
            rows.append((op, group, line.latency_ns, steepest, min(small, size)))
        elif usual is not None:
            rows.append((op, group, usual, usual / _FUSED_TINY_BYTES, min(_TINY_BYTES, size)))
    columns: dict[str, Any] = {
        "op": WORDS["op"],
        "group_id": pl.Int64,
        "latency_ns": pl.Float64,
        "ns_per_byte": pl.Float64,
    }
    return pl.DataFrame(rows, {**columns, "most_bytes": pl.Float64}, orient="row")


def _trusted(line: Line) -> bool:
    return line.error <= _WORST_FIT and line.latency_ns > 2 * line.latency_error_ns


def _frequent(rows: pl.DataFrame, more_than: int) -> pl.DataFrame:
    """Return the rows of kinds of operations of which some rank has more than that: of others no more can be saved."""
    if rows.is_empty():
        return rows
    op, (ranks, rank) = rows["op"].to_physical().to_numpy(), distinct(rows["rank"].to_numpy())
    count = np.bincount(op.astype(np.int64) * len(ranks) + rank, minlength=(int(op.max()) + 1) * len(ranks))
    frequent = np.asarray((count.reshape(-1, len(ranks)) > more_than).any(axis=1))
    return rows if frequent[op].all() else rows.filter(frequent[op])


def _runs(rows: pl.DataFrame, phases: pl.DataFrame, regions: pl.DataFrame | None) -> pl.DataFrame:
    """Return the rows of collectives, with the number of the `run` that they are in and their own time `ns`."""
    by = ["rank", "group_id", "op", "dtype", "step"]
    arrival = pl.coalesce("device_start_ns", "start_ns")
    rows = rows.sort(*by, "begin_ns").with_columns(
        before_ns=pl.col("end_ns").shift(1).over(by),
        ns=pl.col("end_ns") - pl.max_horizontal("begin_ns", pl.col("end_ns").cum_max().shift(1).over(by)),
        arrival_ns=arrival,
    )
    between = rows.select("rank", start_ns=pl.col("before_ns").fill_null(pl.col("arrival_ns")), end_ns="arrival_ns")
    directed = _outermost(regions).with_columns(part=pl.lit("directed")) if regions is not None else None
    computed = pl.Series(spent(phases, _COMPUTING, between))
    inside = pl.Series(spent(directed, ("directed",), between) if directed is not None else np.zeros(len(rows)))
    waited_for = (inside > 0) & rows["device_start_ns"].is_null()
    gap = pl.col("arrival_ns") - pl.col("before_ns")
    most = pl.col("ns").clip(0)
    apart = (
        pl.col("before_ns").is_null() | (gap > most) | (computed.alias("c") > _COMPUTED * most) | waited_for.alias("w")
    )
    return rows.with_columns(run=apart.cum_sum(), ns=most)


def _outermost(regions: pl.DataFrame) -> pl.DataFrame:
    """Return forwards and backwards of main threads, none within another."""
    main = in_order(regions.filter(pl.col("thread") == 0, pl.col("kind").is_in(_DIRECTED)), "rank", "start_ns")
    reached = reached_before(main, "rank")
    return main.filter(reached.is_null() | (main["start_ns"] >= reached))


def _savings(runs: pl.DataFrame, known: pl.DataFrame, grid: StepGrid) -> list[_Saving]:
    """Return the saving per kind of operation if the small ones of every run were fused."""
    small = runs.join(known, on=["op", "group_id"]).filter(
        pl.col("size_bytes") <= pl.col("most_bytes"), pl.col("size_bytes") > 0
    )
    fused = small.group_by("run").agg(
        pl.col("op", "group", "rank", "step").first(),
        pl.len().alias("count"),
        pl.col("exposed_ns").sum(),
        one_ns=pl.col("latency_ns").first() + pl.col("ns_per_byte").first() * pl.col("size_bytes").sum(),
    )
    fused = fused.filter(pl.col("count") > 1).with_columns(ns=(pl.col("exposed_ns") - pl.col("one_ns")).clip(0))
    savings = []
    for (op,), rows in fused.group_by("op", maintain_order=True):
        of_op = small.filter(pl.col("run").is_in(rows["run"].implode()))
        ranks = rows["rank"].unique().sort().to_list()
        steps = len(grid.steps) * len(ranks)
        savings.append(
            _Saving(
                op=str(op),
                groups=tuple(rows["group"].drop_nulls().unique().sort().to_list()),
                ns=np.median(by_rank_and_step(rows, "ns", ranks, grid.steps), axis=0),
                fewer=float((rows["count"] - 1).sum()) / steps,
                count=len(of_op) / steps,
                each_ns=float(np.median(of_op["ns"])),
                each_bytes=float(of_op["size_bytes"].to_numpy().mean()),
                latency_ns=float(np.median(of_op["latency_ns"])),
                rows=of_op.join(rows.sort("ns", descending=True).unique("rank", keep="first").select("run"), on="run"),
            )
        )
    return sorted(savings, key=lambda saving: -float(saving.ns.mean()))


def _finding(saving: _Saving, lost: Estimate, grid: StepGrid, regions: pl.DataFrame | None) -> Finding:
    runs = saving.rows.group_by("rank", "run").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    fused = round(saving.count - saving.fewer)
    together = bytes_text(saving.count * saving.each_bytes)
    return Finding(
        detector="small_messages",
        title=text(
            "{count:.0f} small {op} per step, together {together}, take {each} each, most of it latency",
            count=saving.count,
            op=saving.op,
            together=together,
            each=duration(saving.each_ns),
        ),
        where=_place(runs, regions),
        advice=text(
            "Send them as {fused} per step: one flat buffer for all tensors, a larger bucket_cap_mb, "
            "or stacked scalars. An operation takes {latency} before a byte moves.",
            fused=counted(fused, "operation"),
            latency=duration(saving.latency_ns),
        ),
        groups=saving.groups,
        evidence=longest_rows(runs, "collectives"),
        **price(grid, lost, lost.ns),
    )


def _place(runs: pl.DataFrame, regions: pl.DataFrame | None) -> str:
    """Return the innermost region that most runs begin in."""
    if regions is None:
        return ""
    within = (
        runs.with_row_index("at")
        .join(regions.filter(pl.col("thread") == 0), on="rank", suffix="_region")
        .filter(pl.col("start_ns_region") <= pl.col("start_ns"), pl.col("start_ns") < pl.col("end_ns_region"))
        .filter(~pl.col("kind").is_in(["wait", "gc", "operator"]))
        .sort("start_ns_region")
        .group_by("at")
        .last()
    )
    names = within["name"].mode().sort()
    return str(names[0]) if len(within) * 2 > len(runs) else text("outside of forward and backward")


def _refuse_unknown(
    runs: pl.DataFrame, known: pl.DataFrame, grid: StepGrid, min_fraction: float, min_count: int
) -> None:
    """Not resolvable where many operations follow each other that may be bound by latency or not."""
    many = (
        runs.join(known, on=["op", "group_id"], how="anti")
        .filter(pl.col("size_bytes") > 0)
        .group_by("op", "rank", "run")
        .agg(pl.len(), pl.col("exposed_ns").sum())
        .filter(pl.col("len") > 1)
        .group_by("op", "rank")
        .agg((pl.col("len") - 1).sum() / len(grid.steps), pl.col("exposed_ns").sum() / len(grid.steps))
        .filter(pl.col("len") >= min_count, pl.col("exposed_ns") >= min_fraction * grid.step_ns)
    )
    if len(many):
        op = min(many["op"].unique())
        raise NotResolvable(
            text(
                "the sizes of the {op} operations hardly differ, so latency cannot be distinguished from bandwidth",
                op=op,
            )
        )
