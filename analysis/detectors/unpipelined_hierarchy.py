"""In a collective of two levels the links within nodes and those between nodes are used in turn.

**Signal.** A reduce-scatter in a group within a node is followed by an operation in a group that has one rank per node,
with the share of the bytes that a rank was left with: hybrid sharding, or an all-reduce made of both by hand. Time in
which a rank waits while only one of the two levels transfers is counted for each. In `pieces` pieces, one level
could work on one while the other works on the next: all but 1 / `pieces` of the smaller of the two times is the loss,
reported above `min_fraction` of the step.

**Why it costs time.** Both levels have links of their own. One after the other takes the sum of both times, at once
little more than the longer one.

**False positives.** Pieces pay the latency once each: operations below `min_bytes` are left alone. A device that copies
for both levels with the same engines gains less.

**What to try.** Smaller units for `fully_shard`, so that one unit's all-reduce runs during the next one's
reduce-scatter; pieces of a reduction by hand, on two streams; or one all-reduce over all ranks, which NCCL pipelines
over both levels by itself.

**Source.** Pipelined hierarchical collectives: Cho et al. 2019 (BlueConnect); HSDP: Zhao et al. 2023. Thresholds are
ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import longest_rows, price, transfer_grid
from rankscope.analysis.metrics.exposed_communication import with_exposed
from rankscope.analysis.metrics.links import nodes_of_groups
from rankscope.analysis.metrics.step_matrix import TRIM, estimate, sums
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.model.tables import is_like
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    lost_as=AS_EXPOSED,
)

_SAME_BYTES = 0.1  # parts are padded


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    ranks: pl.DataFrame,
    *,
    min_fraction: float = 0.05,
    min_bytes: int = 4_000_000,
    pieces: int = 4,
) -> list[Finding]:
    """Return the time that pipelining both levels would hide."""
    grid = transfer_grid(breakdown)
    inside, between = _levels(with_exposed(collectives, phases), nodes_of_groups(collectives, ranks), min_bytes)
    if between.is_empty():
        raise NotResolvable(text("no collectives of two levels, within nodes and then between them, were seen"))
    alone = _alone(phases, inside, between)
    taken = {level: sums(grid, alone, level) for level in ("inside", "between")}
    smaller = np.median(np.minimum(taken["inside"], taken["between"]), axis=0)
    lost = estimate((1 - 1 / pieces) * smaller, TRIM)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    times = {level: duration(float(np.median(ns, axis=0).mean())) for level, ns in taken.items()}
    first, second = str(inside["op"][0]), str(between["op"][0])
    return [
        Finding(
            detector="unpipelined_hierarchy",
            title=text(
                "Hierarchical collective is not pipelined: ranks wait {inside} per step while only {first} within "
                "nodes transfers, and {between} while only {second} between nodes does",
                inside=times["inside"],
                first=first,
                between=times["between"],
                second=second,
            ),
            where=text("{first}, then {second}", first=first, second=second),
            advice=text(
                "In {pieces} pieces, one level working while the other does, {share} of the shorter time "
                "would be hidden: smaller units for fully_shard, pieces on two streams, or one "
                "all-reduce over all ranks.",
                pieces=pieces,
                share=percent(1 - 1 / pieces),
            ),
            groups=tuple(pl.concat([inside["group"], between["group"]]).drop_nulls().unique().sort().to_list()),
            evidence=longest_rows(between, "collectives"),
            **price(grid, lost, lost.ns),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.05) -> int:
    """Return the smallest loss per step that would have been reported."""
    return round(min_fraction * transfer_grid(breakdown).step_ns)


def _levels(rows: pl.DataFrame, nodes: pl.DataFrame, min_bytes: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return reduce-scatters within nodes, and the operations between nodes that follow them with what they left."""
    within = nodes.filter(pl.col("nodes") == 1)["group_id"].implode()
    scatters = rows.filter(
        pl.col("group_id").is_in(within),
        is_like("op", "^reduce_scatter"),
        pl.col("group_size") > 1,
        pl.col("size_bytes") >= min_bytes,
    ).sort("begin_ns")
    if scatters.is_empty():
        return scatters, scatters
    between = nodes.filter(pl.col("nodes") > 1).select("group_id", "nodes")
    reduces = (
        rows.filter(is_like("op", "^(allreduce|reduce_scatter)"))
        .join(between, on="group_id")
        .filter(pl.col("nodes") == pl.col("group_size"))
        .sort("begin_ns")
    )
    left = scatters.select(
        "rank", "step", "begin_ns", scatter="instance_id", left=pl.col("size_bytes") / pl.col("group_size")
    )
    found = reduces.join_asof(
        left, on="begin_ns", by=["rank", "step"], check_sortedness=False, suffix="_inside"
    ).filter((pl.col("size_bytes") / pl.col("left") - 1).abs() <= _SAME_BYTES)
    inside = scatters.filter(pl.col("instance_id").is_in(found["scatter"].implode()))
    return inside, found


def _alone(phases: pl.DataFrame, inside: pl.DataFrame, between: pl.DataFrame) -> pl.DataFrame:
    """By (rank, step): ns in which the rank waited and only `inside`, or only `between`, was transferring."""
    blocked = phases.filter(pl.col("part") == "transfer").select("rank", "step", "start_ns", "end_ns")
    spans = {"blocked": blocked, "inside": inside, "between": between}
    edges = []
    for name, rows in spans.items():
        start = "start_ns" if name == "blocked" else "begin_ns"
        for column, change in ((start, 1), ("end_ns", -1)):
            at = rows.select("rank", "step", at_ns=column).with_columns(
                pl.lit(change if name == each else 0).alias(each) for each in spans
            )
            edges.append(at)
    moments = pl.concat(edges).sort("rank", "at_ns").with_columns(pl.col(name).cum_sum().over("rank") for name in spans)
    moments = moments.with_columns(ns=pl.col("at_ns").shift(-1).over("rank") - pl.col("at_ns")).filter(
        pl.col("blocked") > 0
    )
    one, other = pl.col("inside") > 0, pl.col("between") > 0
    return moments.group_by("rank", "step").agg(
        inside=pl.col("ns").filter(one & ~other).sum(), between=pl.col("ns").filter(other & ~one).sum()
    )
