"""NCCL's own records of torch's operations: what its proxies waited for, and how long they took on the device."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.tables import WORDS

__all__ = ["NCCL_WAITS", "PROXIES", "nccl_durations", "nccl_waits", "proxies", "sends", "with_durations"]

_CLOCK_NS = 2_000  # what the conversion of the recorder's unix time may be off: both clocks are slewed alike
WAITS = ("gpu_wait_ns", "peer_wait_ns", "network_wait_ns", "flush_wait_ns")
NCCL_WAITS = pl.Schema(
    {
        "rank": pl.Int32,
        "number": pl.UInt64,
        "call": pl.UInt32,
        "op": WORDS["op"],
        "communicator": pl.Int64,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
        "sent_bytes": pl.Int64,
        **dict.fromkeys(WAITS, pl.Int64),
    }
)
PROXIES = pl.Schema(
    {
        **dict.fromkeys(("rank", "node"), pl.Int32),
        **dict.fromkeys(("start_ns", "end_ns"), pl.Int64),
        "event": pl.String,
        "call": pl.UInt32,
        **dict.fromkeys(("peer_rank", "peer_node"), pl.Int32),
        "size_bytes": pl.Int64,
        **dict.fromkeys(WAITS, pl.Int64),
    }
)
# What NCCL calls an operation, by the operations of torch that may become it. Others may become sends and receives.
_NCCL_OP = {
    "allreduce": ("allreduce", "allreduce_coalesced", "barrier", "monitored_barrier"),
    "allgather": (
        "allgather",
        "allgather_base",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
    ),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    "broadcast": ("broadcast", "allgather", "allgather_coalesced", "scatter"),
    "reduce": ("reduce", "reduce_scatter"),
    "gather": ("gather", "gather_into_tensor"),
    "scatter": ("scatter",),
    "alltoall": ("alltoall", "alltoall_base"),
    "send": ("send", "alltoall", "alltoall_base", "gather", "gather_into_tensor", "scatter"),
    "recv": ("recv", "recv_any_source", "alltoall", "alltoall_base", "gather", "gather_into_tensor", "scatter"),
}


def nccl_waits(collectives: pl.DataFrame, calls: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """One row per call of NCCL, with what its proxies waited for and the operation of torch that made it.

    The waits are sums over the call's proxies (channels, peers, both directions), so they are shares of the proxies'
    time, not of the clock's; a wait that no proxy reported is null. A call without proxies, which stayed within the
    node, has null in all of them and in `end_ns`, the end of its last proxy. `number` is that of the row in
    `collectives` during whose call NCCL began this one, if torch could have made it so; null: NCCL alone saw it, as
    with other libraries, CUDA graphs, and operations that torch collects and begins together.

    Source: NCCL, profiler plugin interface (ext-profiler); `collectors/native`.
    """
    if calls.is_empty():
        return NCCL_WAITS.to_frame()
    key = ["rank", "attempt"] if "attempt" in calls.columns else ["rank"]
    made_by = collectives.select(
        *key, "number", pl.col("op").alias("torch_op"), pl.col("start_ns").alias("torch_start_ns"), "issued_ns"
    )
    pairs = pl.DataFrame(
        [(op, torch_op, True) for op, torch_ops in _NCCL_OP.items() for torch_op in torch_ops],
        schema={"op": WORDS["op"], "torch_op": WORDS["op"], "fits": pl.Boolean},
        orient="row",
    )
    inside = (pl.col("start_ns") <= pl.col("issued_ns")) & pl.col("fits")
    joined = (
        calls.sort("start_ns")
        .join_asof(
            made_by.sort("torch_start_ns"),
            left_on="start_ns",
            right_on="torch_start_ns",
            by=key,
            check_sortedness=False,
        )
        .join(pairs, on=["op", "torch_op"], how="left", maintain_order="left")
        .with_columns(pl.when(inside).then("number").alias("number"))
    )
    proxies = events.filter(pl.col("event").is_in(["send", "recv"]), pl.col("call").is_not_null())
    waits = proxies.group_by(*key, "call").agg(
        pl.col("end_ns").max(),
        pl.when(pl.col("event") == "send").then("size_bytes").sum().alias("sent_bytes"),
        *(pl.when(pl.col(wait).count() > 0).then(pl.col(wait).sum()).alias(wait) for wait in WAITS),
    )
    return (
        joined.join(waits, on=[*key, "call"], how="left")
        .sort("rank", "start_ns", "call")
        .select(NCCL_WAITS.names())
        .cast(NCCL_WAITS)
    )


def nccl_durations(collectives: pl.DataFrame, groups: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Return `records` (the table `flight_records`) with the `number` of the row in `collectives` that made each.

    That is the operation of the record's group during whose call, give or take 2 µs for the clocks, the recorder took
    it; null: NCCL alone saw it, as with other libraries. torch's own count does not join the two: operations that it
    begins together share one number, and those of other libraries have numbers too.
    """
    key = ["rank", "attempt"] if "attempt" in records.columns else ["rank"]
    records = _with_those_of_wholes(records, [*key, "group"])
    names = groups.select(*key, "group_id", pl.col("name").alias("group")).unique([*key, "group_id"], keep="last")
    made_by = collectives.join(names, on=[*key, "group_id"]).select(
        *key, "group", "number", pl.col("start_ns").alias("torch_start_ns"), "issued_ns"
    )
    return (
        records.with_columns(_at=pl.col("start_ns") + _CLOCK_NS)
        .sort("_at")
        .join_asof(
            made_by.with_columns(pl.col("torch_start_ns").alias("_from")).sort("_from"),
            left_on="_at",
            right_on="_from",
            by=[*key, "group"],
            check_sortedness=False,
        )
        .with_columns(pl.when(pl.col("start_ns") <= pl.col("issued_ns") + _CLOCK_NS).then("number").alias("number"))
        .drop("_at", "_from", "torch_start_ns", "issued_ns", strict=False)
        .sort("rank", "start_ns")
    )


def _with_those_of_wholes(records: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Return the records; sends and receives that begin together have the duration of the whole.

    They are one kernel, and the recorder times only that, in a record that follows theirs.
    """
    is_whole = pl.col("name").str.ends_with(":coalesced")
    records = records.sort(*key, "record").with_columns(
        _run=pl.struct("is_p2p", "seq", is_whole.alias("_whole")).rle_id().over(key)
    )
    wholes = records.filter(is_whole).select(*key, pl.col("_run") - 1, pl.col("duration_ns").alias("_of_whole"))
    wholes = wholes.unique([*key, "_run"], keep="first", maintain_order=True)
    return (
        records.join(wholes, on=[*key, "_run"], how="left", maintain_order="left")
        .with_columns(pl.coalesce("duration_ns", pl.when("is_p2p").then("_of_whole")).alias("duration_ns"))
        .drop("_run", "_of_whole")
    )


def with_durations(collectives: pl.DataFrame, groups: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, in their order, with `duration_ns` on the device, as the Flight Recorder has it.

    Without records as is.

    Null where the recorder was not timed or has lost the record, and where an operation has several that are timed:
    then none of them is the whole.
    """
    if records.is_empty():
        return collectives
    key = ["rank", "attempt", "number"] if "attempt" in records.columns else ["rank", "number"]
    timed = nccl_durations(collectives, groups, records).drop_nulls(["number", "duration_ns"])
    whole = timed.group_by(key).agg(pl.col("duration_ns").first(), pl.len()).filter(pl.col("len") == 1).drop("len")
    return collectives.join(whole, on=key, how="left", maintain_order="left")


def proxies(calls: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """One row per `send` and `recv` in `events`, by rank and time, with the rank and the node of the peer.

    Peers are places in a communicator; null where no recorded rank had that place, or NCCL did not name the
    communicator. What a proxy did for another process is left out.
    """
    if calls.is_empty() or events.is_empty():
        return PROXIES.to_frame()
    key = ["rank", "attempt", "call"] if "attempt" in calls.columns else ["rank", "call"]
    places = calls.drop_nulls("communicator").select(
        "communicator", peer="nccl_rank", peer_rank="rank", peer_node="node"
    )
    return (
        events.filter(pl.col("event").is_in(["send", "recv"]), pl.col("call").is_not_null())
        .join(calls.select(*key, "communicator"), on=key)
        .join(places.unique(["communicator", "peer"], keep="last"), on=["communicator", "peer"], how="left")
        .sort("rank", "start_ns")
        .select(PROXIES.names())
        .cast(PROXIES)
    )


def sends(proxies: pl.DataFrame) -> pl.DataFrame:
    """Return the traffic of each rank to each rank of another node.

    Columns: rank, node, peer_rank, peer_node, sent_bytes, busy_s, and rate_bytes_per_s. `busy_s` is the time in which
    the network had data, summed over the channels, so that the rate is what one channel gets through. Rows without a
    size or that wait are left out.
    """
    ends = ["rank", "node", "peer_rank", "peer_node"]
    across = proxies.filter(pl.col("event") == "send", pl.col("peer_node") != pl.col("node"))
    across = across.drop_nulls(["size_bytes", "network_wait_ns"])
    return (
        across.group_by(ends)
        .agg(sent_bytes=pl.col("size_bytes").sum().cast(pl.Float64), busy_s=pl.col("network_wait_ns").sum() / 1e9)
        .filter(pl.col("sent_bytes") > 0, pl.col("busy_s") > 0)
        .with_columns(rate_bytes_per_s=pl.col("sent_bytes") / pl.col("busy_s"))
        .sort(ends)
    )
