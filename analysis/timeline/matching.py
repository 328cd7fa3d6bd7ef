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
    - `is_last`: this rank arrived last (null where rooted and the clocks are unknown).
    - `arrival_spread_ns`: last minus first arrival; null where the clocks are unknown.

    Source: TraceLens and msprof-analyze (transfer as the minimum over ranks).
    """
    trusted = [c.node for c in clocks if c.error_ns is not None]
    own = pl.col("end_ns") - pl.col("start_ns")
    rooted = pl.col("op").is_in(ROOTED_OPS)
    on_one_clock = pl.col("node").is_in(trusted).all() | (pl.col("node").n_unique() == 1)
    numbered = (
        collectives.with_row_index("_row")
        .join(_group_sizes(groups), on="group_id", how="left", maintain_order="left")
        .pipe(_with_sides)
    )
    instances = (
        numbered.group_by(_SIDES)
        .agg(
            _why_unmatched().alias("unmatched"),
            pl.col("start_ns").min().alias("_first_ns"),
            pl.col("start_ns").max().alias("_last_ns"),
            own.min().alias("transfer_ns"),
            on_one_clock.alias("_aligned"),
            pl.col("rank").sort_by(own, "rank").first().alias("_shortest"),
            pl.col("rank").sort_by("start_ns", "rank").last().alias("_latest"),
        )
        .with_columns(pl.when(pl.col("unmatched").is_null()).then(pl.col("_first_ns", "transfer_ns")))
        .sort("_first_ns", *_SIDES, nulls_last=True)
        .with_row_index("instance_id")
        .with_columns(pl.when(pl.col("unmatched").is_null()).then("instance_id").alias("instance_id"))
    )
    until_last = (pl.col("_last_ns") - pl.col("start_ns")).clip(0, None)
    beyond_transfer = own - pl.col("transfer_ns")
    matched = pl.col("instance_id").is_not_null()
    return (
        numbered.join(instances, on=_SIDES, how="left", nulls_equal=True)
        .with_columns(
            pl.when(matched & ~rooted)
            .then(beyond_transfer)
            .when(matched & pl.col("_aligned"))
            .then(pl.min_horizontal(beyond_transfer, until_last))
            .alias("wait_ns"),
            pl.when(matched & ~rooted)
            .then(pl.col("rank") == pl.col("_shortest"))
            .when(matched & pl.col("_aligned"))
            .then(pl.col("rank") == pl.col("_latest"))
            .alias("is_last"),
            pl.when(matched & pl.col("_aligned"))
            .then(pl.col("_last_ns") - pl.col("_first_ns"))
            .alias("arrival_spread_ns"),
        )
        .sort("_row")
        .select(*collectives.collect_schema().names(), *(pl.col(c).cast(t) for c, t in MATCHED_COLUMNS.items()))
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


def _why_unmatched() -> pl.Expr:
    """Per key, why its rows are not one whole operation; null if they are."""
    p2p = pl.col("op").is_in(P2P_OPS).any()
    sides = pl.when(p2p).then(pl.lit(2, pl.UInt32)).otherwise(pl.col("group_size").first())
    receives = (pl.col("op") != "send").sum()
    same = pl.when(p2p).then(receives == 1).otherwise(pl.col("op").n_unique() == 1)
    return (
        pl.when(~p2p & pl.col("group_size").first().is_null())
        .then(pl.lit("group unknown"))
        .when((pl.len() != sides) | (pl.col("rank").n_unique() != sides) | pl.col("sender").first().is_null())
        .then(pl.lit("peer missing"))
        .when(~same)
        .then(pl.lit("operations differ"))
        .when(pl.col("end_ns").has_nulls())
        .then(pl.lit("end missing"))
    )
