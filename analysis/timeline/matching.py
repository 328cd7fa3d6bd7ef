"""Which rows are one operation seen from several ranks, how long it took, and who waited for whom."""

from __future__ import annotations

from collections.abc import Iterable

import polars as pl

from rankscope.analysis.finding import Clock
from rankscope.collectors.schema import P2P_OPS

__all__ = ["MATCHED_COLUMNS", "ROOTED_OPS", "match_collectives", "members_of"]

# One rank gives or takes all: the others do not wait for each other, so their durations alone do not show a wait.
ROOTED_OPS = ("broadcast", "reduce", "gather", "scatter")

MATCHED_COLUMNS = {
    "group": pl.String,
    "group_size": pl.UInt32,
    "instance_id": pl.UInt32,
    "unmatched": pl.String,
    "transfer_ns": pl.Int64,
    "wait_ns": pl.Int64,
    "is_last": pl.Boolean,
    "arrival_spread_ns": pl.Int64,
}

_SIDES = ("group_id", "sender", "receiver", "tag", "seq")


def members_of(text: str) -> list[int]:
    """The ranks behind `0-3,8`."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    return ranks


def match_collectives(collectives: pl.LazyFrame, groups: pl.DataFrame, clocks: Iterable[Clock]) -> pl.LazyFrame:
    """Every row of `collectives`, in its order, with what its peers' rows say about it. None is dropped.

    Adds `group` (its name), `group_size`, and
    - `instance_id`: shared by all rows of one operation, dense in the order of first arrival. Null unless every rank
      of the group (both sides of a point-to-point) has exactly one row, with its end, and the same operation;
      `unmatched` then says why: "group unknown", "peer missing", "end missing", "operations differ".
    - `transfer_ns`: the least (end - start) over its ranks: the last arriver waits for nobody. Needs no common clock.
    - `wait_ns`: (end - start) - transfer_ns. For rooted operations at most the time until the last rank arrived,
      and null where the clocks are unknown. transfer_ns + wait_ns is never more than the row's own duration.
      Where the device's start is known on all ranks, and their clocks, it is the time until the last one began there,
      which by the devices' own clock error can be more than the row's duration.
    - `is_last`: this rank arrived last, or together with the last (null where rooted and the clocks are unknown).
    - `arrival_spread_ns`: last minus first arrival; null where the clocks are unknown.
    A row's start is the one on the device where that is known: the host only enqueues.

    Source: TraceLens and msprof-analyze (transfer as the minimum over ranks).
    """
    trusted = [c.node for c in clocks if c.error_ns is not None]
    numbered = (
        collectives.with_row_index("_row")
        .join(_group_sizes(groups), on="group_id", how="left", maintain_order="left")
        .pipe(_with_sides)
        .with_columns(
            pl.col("op").is_in(ROOTED_OPS).alias("_rooted"),
            pl.coalesce("device_start_ns", "start_ns").alias("_arrival_ns"),
        )
        .with_columns((pl.col("end_ns") - pl.col("_arrival_ns")).alias("_own_ns"))
    )
    of_peers = numbered.pipe(_instances, trusted).explode("_row").sort("_row")
    matched = pl.col("instance_id").is_not_null()
    beyond_transfer = pl.col("_own_ns") - pl.col("transfer_ns")
    until_last = (pl.col("_last_ns") - pl.col("_arrival_ns")).clip(0, None)
    on_device = matched & pl.col("_aligned") & pl.col("_on_device")
    return pl.concat([numbered.drop("_row"), of_peers.drop("_row", *_SIDES)], how="horizontal").select(
        *collectives.collect_schema().names(),
        "group",
        "group_size",
        "instance_id",
        "unmatched",
        "transfer_ns",
        pl.when(on_device)
        .then(until_last)
        .when(~pl.col("_rooted"))
        .then(beyond_transfer)
        .when(matched & pl.col("_aligned"))
        .then(pl.min_horizontal(beyond_transfer, until_last))
        .alias("wait_ns"),
        pl.when(on_device)
        .then(until_last == 0)
        .when(matched & ~pl.col("_rooted"))
        .then(beyond_transfer == 0)
        .when(matched & pl.col("_aligned"))
        .then(until_last == 0)
        .alias("is_last"),
        pl.when(matched & pl.col("_aligned")).then(pl.col("_last_ns") - pl.col("_first_ns")).alias("arrival_spread_ns"),
    )


def _instances(rows: pl.LazyFrame, trusted: list[int]) -> pl.LazyFrame:
    """One row per key, with the list of its rows: what they say together. Facts of a row are made before the
    grouping, which then only counts and takes extremes."""
    p2p, whole = pl.col("_p2p"), pl.col("unmatched").is_null()
    sides = pl.when(p2p).then(pl.lit(2, pl.UInt32)).otherwise("group_size")
    return (
        rows.with_columns(
            (pl.col("op") != "send").alias("_receives"),
            pl.col("op").is_in(P2P_OPS).alias("_p2p"),
            pl.col("end_ns").is_null().alias("_open"),
            pl.col("node").is_in(trusted).alias("_trusted"),
        )
        .group_by(_SIDES)
        .agg(
            "_row",
            pl.len().alias("_rows"),
            pl.col("rank").n_unique().alias("_ranks"),
            pl.col("op").n_unique().alias("_ops"),
            pl.col("node").n_unique().alias("_nodes"),
            pl.col("group_size").first(),
            pl.col("_p2p").any(),
            pl.col("_receives").sum(),
            pl.col("_open").any(),
            pl.col("_trusted").all(),
            pl.col("device_start_ns").is_not_null().all().alias("_on_device"),
            pl.col("_arrival_ns").min().alias("_first_ns"),
            pl.col("_arrival_ns").max().alias("_last_ns"),
            pl.col("_own_ns").min().alias("transfer_ns"),
        )
        .with_columns(
            pl.when(~p2p & pl.col("group_size").is_null())
            .then(pl.lit("group unknown"))
            .when((pl.col("_rows") != sides) | (pl.col("_ranks") != sides) | pl.col("sender").is_null())
            .then(pl.lit("peer missing"))
            .when(pl.when(p2p).then(pl.col("_receives") != 1).otherwise(pl.col("_ops") != 1))
            .then(pl.lit("operations differ"))
            .when("_open")
            .then(pl.lit("end missing"))
            .alias("unmatched"),
            (pl.col("_trusted") | (pl.col("_nodes") == 1)).alias("_aligned"),
        )
        .with_columns(pl.when(whole).then(pl.col("transfer_ns")))
        .sort(whole, "_first_ns", "group_id", "seq", "sender", "receiver", "tag", descending=[True, *[False] * 6])
        .with_row_index("instance_id")
        .with_columns(pl.when(whole).then("instance_id").alias("instance_id"))
        .drop("group_size")
    )


def _group_sizes(groups: pl.DataFrame) -> pl.LazyFrame:
    """group_id, group, group_size, one row per group: all its ranks say the same."""
    known = groups.select("group_id", "name", "members").unique("group_id", keep="first", maintain_order=True)
    sizes = pl.Series("group_size", [len(members_of(m)) for m in known["members"]], pl.UInt32)
    return known.select("group_id", pl.col("name").alias("group")).with_columns(sizes).lazy()


def _with_sides(collectives: pl.LazyFrame) -> pl.LazyFrame:
    """`sender` and `receiver`: -1 for collectives, so that `_SIDES` is the key of both kinds.

    A receive from any source has the sender only if one rank alone sends there, and null otherwise.
    """
    by_receiver = ("group_id", "receiver", "tag")
    op = pl.col("op")
    with_ends = collectives.with_columns(
        pl.when(op == "send").then("rank").when(op.is_in(P2P_OPS)).then("peer").otherwise(-1).alias("sender"),
        pl.when(op == "send").then("peer").when(op.is_in(P2P_OPS)).then("rank").otherwise(-1).alias("receiver"),
    )
    senders = (
        with_ends.filter((op == "send") | (op == "recv"))
        .group_by(by_receiver)
        .agg(pl.col("sender").min().alias("_only"), pl.col("sender").n_unique().alias("_senders"))
    )
    any_source = op == "recv_any_source"
    return (
        with_ends.join(senders, on=by_receiver, how="left", maintain_order="left")
        .with_columns(
            pl.when(~any_source).then("sender").when(pl.col("_senders") == 1).then("_only").alias("sender"),
        )
        .drop("_only", "_senders")
    )
