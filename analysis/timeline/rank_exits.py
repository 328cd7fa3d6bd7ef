"""The last operations of the ranks when their processes ended."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.collectors.schema import P2P_OPS

__all__ = ["last_operations", "rank_exits"]


def rank_exits(
    exits: pl.DataFrame, collectives: pl.DataFrame, regions: pl.DataFrame, steps: pl.DataFrame
) -> pl.DataFrame:
    """Return the table `exits` with what was known of the ranks then, one row each, in the order in which they failed.

    failed_ns: when its exception came to the top, else when it had ended; step: the one after the last that it ended
    before that; begun_ns: when any rank began anything last before that; op, op_end_ns: the last operation that it
    began, and its end; op_is_whole: all its ranks came to that. Unknown ones are null.
    """
    rows = exits.unique("rank", keep="last").with_columns(
        pl.coalesce("raised_ns", "bye_ns", "end_ns").alias("failed_ns")
    )
    rows = rows.sort("failed_ns", "rank")
    done = steps.select("rank", "step", pl.col("end_ns").alias("_at")).sort("_at")
    rows = rows.join_asof(done, left_on="failed_ns", right_on="_at", by="rank", check_sortedness=False)
    last = (
        collectives.filter(pl.col("rank").is_in(rows["rank"].implode()))
        .sort("start_ns")
        .unique("rank", keep="last")
        .select("rank", "op", op_end_ns="end_ns", op_is_whole=pl.col("instance_id").is_not_null())
    )
    rows = rows.join(last, on="rank", how="left", maintain_order="left")
    begun = np.concatenate([table["start_ns"].drop_nulls().to_numpy() for table in (collectives, regions)])
    early = begun < (rows["failed_ns"].min() or 0)  # nearly all: only the last of these counts
    latest = begun[early].max(keepdims=True) if early.any() else begun[:0]
    begun = np.sort(np.concatenate([latest, begun[~early]]))
    before = np.searchsorted(begun, rows["failed_ns"].to_numpy())
    at = [int(begun[number - 1]) if number else None for number in before]
    return rows.with_columns(pl.col("step") + 1, pl.Series("begun_ns", at, pl.Int64)).drop("_at", strict=False)


def last_operations(collectives: pl.DataFrame) -> pl.DataFrame:
    """(rank, group_id, seq, op, dtype, size_bytes, start_ns) of the operations with which each group ended.

    They are those after the last that is whole, and those from the last that all ranks seen have begun. `size_bytes` is
    null for operations of a kind that had not the same size on all ranks before, as of sparse tensors.
    """
    rows = collectives.lazy().filter(~pl.col("op").is_in(P2P_OPS))
    whole = rows.filter(pl.col("instance_id").is_not_null())
    begun = (
        rows.group_by("group_id", "rank").agg(pl.col("seq").max()).group_by("group_id").agg(_all=pl.col("seq").min())
    )
    ended = whole.group_by("group_id").agg(_after=pl.col("seq").max() + 1)
    last = rows.join(begun, on="group_id").join(ended, on="group_id", how="left")
    last = last.filter(pl.col("seq") >= pl.min_horizontal("_all", "_after"))
    earlier = whole.join(begun, on="group_id").filter(pl.col("seq") < pl.col("_all"))
    uneven = (
        earlier.group_by("group_id", "op", "seq")
        .agg((pl.col("size_bytes").min() != pl.col("size_bytes").max()).alias("_uneven"))
        .group_by("group_id", "op")
        .agg(pl.col("_uneven").any())
    )
    last = last.join(uneven, on=["group_id", "op"], how="left").with_columns(
        size_bytes=pl.when(~pl.col("_uneven").fill_null(value=False)).then("size_bytes")
    )
    columns = ("rank", "group_id", "seq", "op", "dtype", "size_bytes", "start_ns")
    return last.select(columns).sort("start_ns", "rank").collect()
