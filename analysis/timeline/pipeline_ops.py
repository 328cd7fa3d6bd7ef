"""Operations of a recorded pipeline's stages: their microbatches, and their sends and receives.

This is the table `ops`, which traces of operations bring along, made from regions and point-to-point operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import polars as pl

from rankscope.analysis.model.finding import Clock, Gap
from rankscope.analysis.model.parts import BLOCKED
from rankscope.analysis.model.pipeline_ops import BACKWARD, CLIP, FORWARD, OPTIMIZER
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.text.message import text
from rankscope.analysis.timeline.host_breakdown import AFTER_BACKWARD
from rankscope.analysis.timeline.parallelism import Role, roles
from rankscope.analysis.timeline.steps import STEP_COLUMNS
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import NotReplayable

__all__ = ["replicas", "stage_ops", "steps_of_ops"]

_SETTLED = 1.5  # a longer step, in medians, does not count
_MAIN_THREAD = 0
_COMPUTES = {"forward": FORWARD, "backward": BACKWARD}
_SEQ = pl.int_range(pl.len()).over("rank", "step", "stage", "kind").alias("seq")
_WAY = pl.col("name").str.split("-").list.first().alias("_way")
# Since when a rank has had nothing else to do than to receive what it computes next.
_FREE = (
    pl.col("end_ns").shift(1).over("rank", "step").fill_null(pl.col("start_ns").min().over("step")).alias("_free_ns")
)
_OF_SCHEDULE = (
    (pl.col("thread") == _MAIN_THREAD) & pl.col("kind").is_in(tuple(_COMPUTES)) & pl.col("microbatch").is_not_null()
)
_CLOCKS_TELL = 0.1  # of a forward: the clocks' error up to which operations of two nodes are compared
_SPLIT = 0.5  # share of the steps whose backwards are not as many as their forwards, above which that is the schedule


def stage_ops(
    ranks: pl.DataFrame,
    groups: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    phases: pl.DataFrame,
    clocks: Iterable[Clock],
    marks: pl.DataFrame,
) -> tuple[pl.DataFrame, list[Gap]]:
    """Return the table `ops` of a run that records regions: empty without a pipeline, or with a gap that says why.

    A computation is the innermost region of its microbatch, from the last receive in it on, with what its rank does
    until it waits or computes again: calls of sends and receives are no bubble. A receive begins where the
    computation before it ends (before the first: with the step's first forward), since a busy rank does not
    wait; a send ends no later than its receive. A replica is a set of ranks that send to each other; ranks of one
    stage that share its layers are in different ones.

    On devices a computation is what its `marks` (as `by_marks` has them) enclose. A device waits for what it receives
    before the first of these: so the receive ends there, and so does its send, since it is unknown when the data
    reached a busy device.
    """
    nothing = pl.DataFrame(schema=schema_of("ops"))
    if regions.filter(_OF_SCHEDULE).is_empty():
        return nothing, []
    computed = _computations(regions, collectives, phases) if marks.is_empty() else _marked(regions, marks)
    if computed.is_empty():
        return nothing, []
    try:
        if marks.is_empty():
            _check_devices(ranks.filter(pl.col("rank").is_in(computed["rank"].unique().implode())))
        computed = _with_stages(computed, roles(groups, regions, collectives))
        _check_schedule(computed)
        _check_clocks(computed, ranks, clocks, marks["clock_error_ns"])
        sent = collectives.filter(pl.col("op").is_in(P2P_OPS), pl.col("peer").is_not_null())
        # With several stages on a rank, its peers do not show which one a transfer belongs to.
        single = computed.group_by("rank").agg(pl.col("stage").n_unique())["stage"].max() == 1
        transferred = _transfers(sent, computed) if marks.is_empty() and single else _handed_on(sent, computed)
        ended = [] if marks.is_empty() else [_ends(marks, computed)]
        ops = pl.concat([computed, transferred.drop("peer"), *ended], how="diagonal_relaxed")
        replica = replicas(transferred.select("rank", "peer").unique().rows())
    except NotReplayable as reason:
        return nothing, [Gap(table="ops", rank=None, node=None, count=None, why=reason.args[0])]
    placed = pl.DataFrame(replica, {"rank": pl.Int32, "replica": pl.Int32}, orient="row")
    ops = ops.join(placed, on="rank").join(
        ranks.select("rank", "node", "attempt").unique("rank"), on="rank", how="left"
    )
    return pl.concat([nothing, _cast(ops, nothing.schema)], how="diagonal").sort("rank", "start_ns"), []


def _marked(regions: pl.DataFrame, marks: pl.DataFrame) -> pl.DataFrame:
    """Return the same from what marks enclose.

    The phases of a microbatch that the host enqueued in the schedule's region.
    """
    of_schedule = regions.filter(_OF_SCHEDULE).select(
        *("rank", "microbatch", "stage", "kind"), pl.col("start_ns").alias("_at"), until_ns="end_ns"
    )
    enclosed = (
        marks.with_columns(_at="host_begin_ns")
        .sort("_at")
        .join_asof(of_schedule.sort("_at"), on="_at", by="rank", check_sortedness=False)
        .filter(pl.col("_at") <= pl.col("until_ns"), pl.col("phase") == pl.col("kind"))
    )
    return enclosed.sort("rank", "begin_ns").select(
        *("rank", "step", "microbatch", "stage"),
        pl.col("kind").replace_strict(_COMPUTES).alias("name"),
        _SEQ,
        start_ns="begin_ns",
        end_ns="device_ns",
    )


def _ends(marks: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """Return the devices' operations after a step's last backward.

    They meet in the reduction of gradients, and the optimizer runs.
    """
    names = {AFTER_BACKWARD: CLIP, "optimizer": OPTIMIZER}
    after = marks.filter(pl.col("phase").is_in(tuple(names)))
    return (
        after.group_by("rank", "step", name=pl.col("phase").replace_strict(names, return_dtype=pl.String))
        .agg(start_ns=pl.col("begin_ns").min(), end_ns=pl.col("device_ns").max(), seq=pl.lit(0))
        .join(computed.group_by("rank").agg(pl.col("stage").min()), on="rank")
    )


def _cast(ops: pl.DataFrame, schema: pl.Schema) -> pl.DataFrame:
    return ops.select(pl.col(name).cast(kind) for name, kind in schema.items() if name in ops.columns)


def _computations(regions: pl.DataFrame, collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """Return forwards and backwards in order: rank, step, microbatch, name, seq, start_ns, end_ns."""
    order = ("rank", "start_ns", "end_ns")
    # The schedule's span of a microbatch holds torch's own of its computation.
    innermost = (pl.col("start_ns").shift(-1).over("rank") >= pl.col("end_ns")).fill_null(True)
    in_steps = regions.filter(_OF_SCHEDULE, pl.col("step").is_not_null())
    spans = in_steps.sort(order, descending=[False, False, True]).filter(innermost)
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
            *("rank", "step", "microbatch", "stage"),
            pl.col("kind").replace_strict(_COMPUTES).alias("name"),
            _SEQ,
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
    """With the stage of each computation: the schedule's, or the one that its rank holds."""
    if not computed["stage"].has_nulls():
        return computed
    absent = sorted(set(computed["rank"].unique()) - held.keys())
    if absent:
        raise NotReplayable(
            text("the pipeline stage of rank {rank} is unknown: nothing it sent was recorded", rank=absent[0])
        )
    stages = [(rank, stage) for rank, (stage, *_) in held.items()]
    placed = pl.DataFrame(stages, {"rank": pl.Int32, "stage": pl.Int32}, orient="row")
    return computed.drop("stage").join(placed, on="rank", maintain_order="left")


def _check_schedule(computed: pl.DataFrame) -> None:
    """One backward for each forward: zero-bubble schedules compute gradients of inputs and of weights apart."""
    forwards = (pl.col("name") == FORWARD).sum()
    split = computed.group_by("rank", "step").agg((forwards * 2 != pl.len()).alias("split"))["split"]
    if split.sum() > _SPLIT * len(split):
        raise NotReplayable(
            text("schedules without one backward for each forward (zero bubble) cannot be replayed yet")
        )


def _check_clocks(computed: pl.DataFrame, ranks: pl.DataFrame, clocks: Iterable[Clock], of_devices: pl.Series) -> None:
    usual_ns = computed.filter(pl.col("name") == FORWARD).select((pl.col("end_ns") - pl.col("start_ns")).median())
    allowed_ns = _CLOCKS_TELL * (usual_ns.item() or 0)
    error_ns = of_devices.median()
    if isinstance(error_ns, float) and error_ns > allowed_ns:
        raise NotReplayable(
            text(
                "clocks of devices may be off by {error:.0f} µs, more than a tenth of a microbatch's forward",
                error=error_ns / 1e3,
            )
        )
    nodes = ranks.join(computed, on="rank", how="semi")["node"].unique().to_list()
    if len(nodes) < 2:
        return
    errors = [clock.error_ns for clock in clocks if clock.node in nodes]
    unknown = [clock.node for clock in clocks if clock.node in nodes and clock.error_ns is None]
    if unknown:
        raise NotReplayable(
            text(
                "the clock of node {node} is not synchronized, so stages of two nodes cannot be compared",
                node=unknown[0],
            )
        )
    error_ns = sum(sorted((e for e in errors if e is not None), reverse=True)[:2])
    if error_ns > allowed_ns:
        raise NotReplayable(
            text(
                "clocks of two nodes may be {error:.0f} µs apart, more than a tenth of a microbatch's forward",
                error=error_ns / 1e3,
            )
        )


def _transfers(sent: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """Return sends and receives between neighbours: rank, peer, step, stage, name, seq, start_ns, end_ns."""
    is_send = pl.col("op") == "send"
    further = pl.col("_peer_stage") - pl.col("stage")
    between = (
        _between_neighbours(sent, computed)
        .drop_nulls(("instance_id", "step", "start_ns", "end_ns"))
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
    free = computed.sort("rank", "start_ns").select("rank", "step", "seq", _WAY, _FREE)
    start = pl.when(is_send).then("start_ns").otherwise("_free_ns")
    end = pl.when(is_send).then(pl.min_horizontal("end_ns", "_received_ns")).otherwise("end_ns")
    return (
        _per_microbatch(between, computed)
        .join(free, on=["rank", "step", "_way", "seq"])
        .with_columns(start.alias("start_ns"), pl.max_horizontal(start, end).alias("end_ns"))
        .group_by("rank", "peer", "step", "stage", "name", "seq")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    )


def _between_neighbours(sent: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """Return sends and receives of ranks whose stages are neighbours, with `stage` and `_peer_stage`."""
    stage = computed.select("rank", "stage").unique()
    peers = stage.rename({"rank": "peer", "stage": "_peer_stage"})
    between = sent.join(stage, on="rank").join(peers, on="peer")
    return between.filter((pl.col("_peer_stage") - pl.col("stage")).abs() == 1)


def _handed_on(sent: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """Return the same as `_transfers`, where only computations have times: of each microbatch from stage to stage."""
    between = _between_neighbours(sent, computed).drop_nulls(("instance_id", "step"))
    if between.is_empty():
        raise NotReplayable(text("no sends and receives between the stages were recorded on both sides"))
    pairs = between.select("rank", "peer").unique()
    # After a loss of records a rank may count its steps differently: such steps lack transfers, and are left out.
    apart = between.filter(pl.col("step").n_unique().over("instance_id") > 1)
    free = computed.join(apart, on=["rank", "step"], how="anti").sort("rank", "start_ns").with_columns(_WAY, _FREE)
    before = computed.select("step", "name", "seq", peer="rank", _sent_ns="end_ns", _from="stage")
    handed = (
        free.join(pairs, on="rank")
        .join(before, on=["peer", "step", "name", "seq"])
        .filter(pl.col("stage") - pl.col("_from") == pl.when(pl.col("_way") == "forward").then(1).otherwise(-1))
    )
    at = pl.col("start_ns")
    receives = handed.select(
        *("rank", "peer", "step", "stage", "seq"),
        pl.format("{}-recv", "_way").alias("name"),
        pl.min_horizontal("_free_ns", at).alias("start_ns"),
        at.alias("end_ns"),
    )
    sends = handed.select(
        *("step", "seq"),
        pl.format("{}-send", "_way").alias("name"),
        rank="peer",
        peer="rank",
        stage="_from",
        start_ns="_sent_ns",
        end_ns=pl.max_horizontal("_sent_ns", at),
    )
    return pl.concat([receives, sends], how="diagonal_relaxed")


def _per_microbatch(between: pl.DataFrame, computed: pl.DataFrame) -> pl.DataFrame:
    """With `seq`, the ordinal of the microbatch, which may consist of several tensors; other numbers are left out."""
    microbatches = computed.group_by("rank", "step", _WAY).agg(pl.len().alias("_microbatches"))
    of = ("rank", "peer", "step", "name")
    return (
        between.join(microbatches, on=["rank", "step", "_way"])
        .filter(pl.len().over(of) % pl.col("_microbatches") == 0)
        .sort("rank", "number")
        .with_columns((pl.int_range(pl.len()).over(of) // (pl.len().over(of) // pl.col("_microbatches"))).alias("seq"))
    )


def replicas(neighbours: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
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


def steps_of_ops(ops: pl.DataFrame) -> pl.DataFrame:
    """Each rank's steps, as `timeline.steps.judge` gives them, numbered as the source numbers them.

    A step lasts from the first start to the last end of its operations on any rank. One that is longer than 1.5 × the
    median is excluded: a warm-up if no step before it is judged, else an outlier.
    """
    spans = (
        ops.group_by("step")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .sort("step")
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("_length"))
        .with_columns((pl.col("_length") <= _SETTLED * pl.col("_length").median()).alias("judged"))
        .with_columns(
            pl.when("judged")
            .then(None)
            .when(pl.col("judged").cum_max())
            .then(pl.lit("outlier"))
            .otherwise(pl.lit("warm-up"))
            .alias("aside"),
            pl.lit("operations").alias("source"),
        )
    )
    ranks = ops.select("rank").unique()
    return (
        ranks.join(spans, how="cross")
        .sort("rank", "step")
        .select(*(pl.col(c).cast(t) for c, t in STEP_COLUMNS.items()), "judged", "aside")
    )
