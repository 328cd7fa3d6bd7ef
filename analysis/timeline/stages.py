"""What the stages of a recorded pipeline did: their microbatches, and what they sent to each other.

This is the table `ops`, which traces of operations bring along, made from regions and point-to-point operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from rankscope.analysis.finding import Clock, Gap
from rankscope.analysis.language import text
from rankscope.analysis.readers.native import schema_of
from rankscope.analysis.timeline.graph import NotReplayable
from rankscope.analysis.timeline.own import BLOCKED
from rankscope.analysis.timeline.pipeline import BACKWARD, FORWARD
from rankscope.analysis.timeline.roles import Role, roles
from rankscope.collectors.schema import P2P_OPS

__all__ = ["stage_ops"]

_MAIN_THREAD = 0
_CLOCKS_TELL = 0.1  # of a forward: the clocks' error up to which operations of two nodes are compared
_SPLIT = 0.5  # share of the steps whose backwards are not as many as their forwards, above which that is the schedule


def stage_ops(
    ranks: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    phases: pl.DataFrame,
    clocks: Iterable[Clock],
) -> tuple[pl.DataFrame, list[Gap]]:
    """The table `ops` of a run that records regions, empty where it has no pipeline, or with a gap that says why not.

    A computation is the innermost region of its microbatch, from the last receive in it on, with what its rank does
    until it stands still or computes again: calls of sends and receives are no bubble. A receive begins where the
    computation before it ends (before the first: with the step's first forward), since a rank that is busy waits for
    nobody; a send ends no later than its receive. A replica is a set of ranks that send to each other; ranks of one
    stage that share its layers are in different ones.
    """
    computed = _computations(regions, collectives, phases)
    nothing = pl.DataFrame(schema=schema_of("ops"))
    if computed.is_empty():
        return nothing, []
    try:
        _check_devices(ranks.filter(pl.col("rank").is_in(computed["rank"].unique().implode())))
        sent = collectives.filter(
            pl.col("op").is_in(P2P_OPS),
            pl.col("instance_id").is_not_null() & pl.col("step").is_not_null(),
            pl.col("start_ns").is_not_null() & pl.col("end_ns").is_not_null(),
        )
        computed = _with_stages(computed, roles(groups, regions, collectives))
        _check_schedule(computed)
        _check_clocks(computed, ranks, clocks)
        transferred = _transfers(sent, computed)
        ops = pl.concat([computed, transferred.drop("peer")], how="diagonal_relaxed")
        replica = _replicas(transferred.select("rank", "peer").unique().rows())
    except NotReplayable as reason:
        return nothing, [Gap(table="ops", rank=None, node=None, count=None, why=reason.args[0])]
    placed = pl.DataFrame(replica, {"rank": pl.Int32, "replica": pl.Int32}, orient="row")
    ops = ops.join(placed, on="rank").join(
        ranks.select("rank", "node", "attempt").unique("rank"), on="rank", how="left"
    )
    return pl.concat([nothing, _cast(ops, nothing.schema)], how="diagonal").sort("rank", "start_ns"), []


def _cast(ops: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    return ops.select(pl.col(name).cast(kind) for name, kind in schema.items() if name in ops.columns)


def _computations(regions: pl.DataFrame, collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """Forwards and backwards in order: rank, step, microbatch, name, seq, start_ns, end_ns."""
    of_schedule = (
        (pl.col("thread") == _MAIN_THREAD)
        & pl.col("kind").is_in(("forward", "backward"))
        & pl.col("microbatch").is_not_null()
        & pl.col("step").is_not_null()
    )
    order = ("rank", "start_ns", "end_ns")
    # The schedule's span of a microbatch holds torch's own of its computation.
    innermost = (pl.col("start_ns").shift(-1).over("rank") >= pl.col("end_ns")).fill_null(True)
    spans = regions.filter(of_schedule).sort(order, descending=[False, False, True]).filter(innermost)
    received = collectives.filter(pl.col("op").is_in(P2P_OPS), pl.col("op") != "send").drop_nulls("end_ns")
    received = received.select("rank", "end_ns", received_ns="end_ns").sort("end_ns")
    blocked = phases.filter(pl.col("part").is_in(BLOCKED))
    blocked = blocked.select("rank", end_ns="start_ns", blocked_ns="start_ns").sort("end_ns")
    next_ns = pl.col("start_ns").shift(-1).over("rank", "step")
    return (
        spans.sort("end_ns")
        .join_asof(received, on="end_ns", by="rank", check_sortedness=False)
        .join_asof(blocked, on="end_ns", by="rank", strategy="forward", check_sortedness=False)
        .sort("rank", "start_ns")
        .with_columns(pl.max_horizontal("start_ns", "received_ns"))
        .select(
            *("rank", "step", "microbatch"),
            pl.col("kind").replace_strict({"forward": FORWARD, "backward": BACKWARD}).alias("name"),
            pl.int_range(pl.len()).over("rank", "step", "kind").alias("seq"),
            "start_ns",
            pl.when(next_ns.is_null())
            .then("end_ns")
            .otherwise(pl.min_horizontal("blocked_ns", next_ns))
            .alias("end_ns"),
        )
    )


def _check_devices(ranks: pl.DataFrame) -> None:
    devices = ranks.filter(pl.col("device") != "cpu")["device"].unique().sort().to_list()
    if devices:
        raise NotReplayable(
            text("the stages compute on {devices}, and when they do was not recorded", devices=", ".join(devices))
        )


def _with_stages(computed: pl.DataFrame, held: Mapping[int, Role]) -> pl.DataFrame:
    """With the one stage that each rank holds."""
    if any(len(stages) > 1 for stages in held.values()):
        raise NotReplayable(text("stages with several model chunks (interleaved schedules) cannot be replayed yet"))
    absent = sorted(set(computed["rank"].unique()) - held.keys())
    if absent:
        raise NotReplayable(
            text("the pipeline stage of rank {rank} is not known: nothing it sent was recorded", rank=absent[0])
        )
    stages = [(rank, stage) for rank, (stage,) in held.items()]
    placed = pl.DataFrame(stages, {"rank": pl.Int32, "stage": pl.Int32}, orient="row")
    return computed.join(placed, on="rank", maintain_order="left")


def _check_schedule(computed: pl.DataFrame) -> None:
    """One backward for each forward: zero-bubble schedules compute gradients of inputs and of weights apart."""
    forwards = (pl.col("name") == FORWARD).sum()
    split = computed.group_by("rank", "step").agg((forwards * 2 != pl.len()).alias("split"))["split"]
    if split.sum() > _SPLIT * len(split):
        raise NotReplayable(
            text("schedules without one backward for each forward (zero bubble) cannot be replayed yet")
        )


def _check_clocks(computed: pl.DataFrame, ranks: pl.DataFrame, clocks: Iterable[Clock]) -> None:
    nodes = ranks.join(computed, on="rank", how="semi")["node"].unique().to_list()
    if len(nodes) < 2:
        return
    errors = [clock.error_ns for clock in clocks if clock.node in nodes]
    unknown = [clock.node for clock in clocks if clock.node in nodes and clock.error_ns is None]
    if unknown:
        raise NotReplayable(
            text(
                "the clock of node {node} is not known, so stages of two nodes cannot be compared",
                node=unknown[0],
            )
        )
    error_ns = sum(sorted((e for e in errors if e is not None), reverse=True)[:2])
    usual_ns = computed.filter(pl.col("name") == FORWARD).select((pl.col("end_ns") - pl.col("start_ns")).median())
    if error_ns > _CLOCKS_TELL * (usual_ns.item() or 0):
        raise NotReplayable(
            text(
                "clocks of two nodes may be {error:.0f} µs apart, more than a tenth of a microbatch's forward",
                error=error_ns / 1e3,
            )
        )


def _transfers(sent: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """Sends and receives between neighbours: rank, peer, step, stage, name, seq, start_ns, end_ns."""
    stage = computed.select("rank", "stage").unique()
    is_send = pl.col("op") == "send"
    further = pl.col("_peer_stage") - pl.col("stage")
    between = (
        sent.join(stage, on="rank")
        .join(stage.rename({"rank": "peer", "stage": "_peer_stage"}), on="peer")
        .filter(further.abs() == 1)
        # After a loss of records a rank may count its steps differently: such steps lack transfers, and are left out.
        .filter(pl.col("step").n_unique().over("instance_id") == 1)
        .with_columns(
            pl.when(is_send == (further == 1)).then(pl.lit("forward")).otherwise(pl.lit("backward")).alias("_way"),
            pl.when(is_send).then(pl.lit("send")).otherwise(pl.lit("recv")).alias("_end"),
            pl.col("end_ns").filter(~is_send).min().over("instance_id").alias("_received_ns"),
        )
        .with_columns(pl.format("{}-{}", "_way", "_end").alias("name"))
    )
    if between.is_empty():
        raise NotReplayable(text("no sends and receives between the stages were recorded on both sides"))
    first_ns = pl.col("start_ns").min().over("step")
    free = computed.sort("rank", "start_ns").select(
        *("rank", "step", "seq"),
        pl.col("name").str.split("-").list.first().alias("_way"),
        pl.col("end_ns").shift(1).over("rank", "step").fill_null(first_ns).alias("_free_ns"),
    )
    start = pl.when(is_send).then("start_ns").otherwise("_free_ns")
    end = pl.when(is_send).then(pl.min_horizontal("end_ns", "_received_ns")).otherwise("end_ns")
    return (
        _per_microbatch(between, computed)
        .join(free, on=["rank", "step", "_way", "seq"])
        .with_columns(start.alias("start_ns"), pl.max_horizontal(start, end).alias("end_ns"))
        .group_by("rank", "peer", "step", "stage", "name", "seq")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )


def _per_microbatch(between: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """With `seq`, the ordinal of the microbatch, which may consist of several tensors; other numbers are left out."""
    way = pl.col("name").str.split("-").list.first().alias("_way")
    microbatches = computed.group_by("rank", "step", way).agg(pl.len().alias("_microbatches"))
    of = ("rank", "peer", "step", "name")
    return (
        between.join(microbatches, on=["rank", "step", "_way"])
        .filter(pl.len().over(of) % pl.col("_microbatches") == 0)
        .sort("rank", "number")
        .with_columns((pl.int_range(pl.len()).over(of) // (pl.len().over(of) // pl.col("_microbatches"))).alias("seq"))
    )


def _replicas(neighbours: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(rank, replica): ranks that send to each other, directly or through others, are one; numbered by first rank."""
    first = {rank: rank for pair in neighbours for rank in pair}
    changed = True
    while changed:
        changed = False
        for a, b in neighbours:
            low = min(first[a], first[b])
            changed |= first[a] != low or first[b] != low
            first[a] = first[b] = low
    number = {rank: i for i, rank in enumerate(sorted(set(first.values())))}
    return [(rank, number[low]) for rank, low in sorted(first.items())]
