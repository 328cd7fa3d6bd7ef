"""Which operations' transfers nothing hides, by the sort of process group, and which of them could be hidden."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.metrics.exposed_communication import kind_of_group, spent, with_exposed
from rankscope.analysis.metrics.once import once
from rankscope.collectors.schema import P2P_OPS

__all__ = ["BY_SORT", "computed", "exposed_operations"]

BY_SORT = ["sort", "kind", "op"]
_DEFAULT = "default_pg"  # torch's description of the group of all ranks: it says nothing


@once
def exposed_operations(collectives: pl.DataFrame, phases: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return operations with `sort`, `kind`, `transfer_ns`, `exposed_ns`, `is_bound` and `is_edge`, a row per rank.

    `sort` is the description that groups of one purpose share (`tp`, `mesh_dp`), else the group's name. Where
    arrivals of peers are unknown (`is_bound`), the transfer is all of the operation, with the wait for peers. The first
    and the last of a sort and kind of operation in a step are its edges: nothing in the step lies before or after them.
    Sends and receives are one kind, "p2p".
    """
    known = with_exposed(collectives, phases).with_columns(is_bound=False)
    arrival = pl.coalesce("device_start_ns", "start_ns")
    alone = collectives.filter(pl.col("wait_ns").is_null(), pl.col("end_ns").is_not_null())
    alone = alone.with_columns(begin_ns=arrival).sort("rank", "begin_ns", "end_ns")
    reached = pl.col("end_ns").cum_max().shift(1).over("rank").fill_null(pl.col("begin_ns"))
    spans = alone.select("rank", pl.max_horizontal("begin_ns", reached).alias("start_ns"), "end_ns")
    alone = alone.with_columns(
        exposed_ns=pl.Series(spent(phases, ("unsplit",), spans), dtype=pl.Int64), is_bound=pl.lit(True)
    )
    rows = pl.concat([known, alone], how="diagonal")
    purposes = _purposes(rows, groups)
    rows = rows.join(purposes, on=["group_id", "op"], how="left", maintain_order="left")
    begin, by_step = pl.col("begin_ns"), ["rank", "step", "_purpose"]
    return rows.select(
        *("rank", "step", "instance_id", "group", "sort", "kind", pl.col("_op").alias("op")),
        *("start_ns", "end_ns", "exposed_ns", "is_bound"),
        began_ns=pl.coalesce("device_start_ns", "start_ns"),
        transfer_ns=(pl.col("end_ns") - begin).clip(0, None),
        is_edge=(begin == begin.min().over(by_step)) | (begin == begin.max().over(by_step)),
    )


def _purposes(rows: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return `sort`, `kind`, `_op` of each group_id and op, as `exposed_operations` has them, and their number."""
    about = pl.concat_str("name", "role", separator=" ", ignore_nulls=True)
    named = groups.select("group_id", "role", about=about).unique("group_id")
    role = pl.when((pl.col("role") != "") & (pl.col("role") != _DEFAULT)).then("role")
    op = pl.when(pl.col("op").is_in(P2P_OPS)).then(pl.lit("p2p")).otherwise(pl.col("op").cast(pl.String))
    return (
        rows.select("group_id", "op", "group")
        .unique(["group_id", "op"], maintain_order=True)
        .join(named, on="group_id", how="left", maintain_order="left")
        .select("group_id", "op", sort=pl.coalesce(role, "group", pl.lit("")), kind=kind_of_group(), _op=op)
        .with_columns(_purpose=pl.struct("sort", "kind", "_op").rank("dense"))
    )


def computed(phases: pl.DataFrame) -> pl.DataFrame:
    """How long each rank computes in each step (rank, step, ns) while nothing is under way that this would hide."""
    return (
        phases.filter(pl.col("part") == "compute")
        .group_by("rank", "step")
        .agg(ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
    )
