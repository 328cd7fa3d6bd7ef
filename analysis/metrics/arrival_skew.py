"""Arrival skew on the device: which rank began each operation late, by a clock or by how long the others waited."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.metrics.step_matrix import Floats, Ints, StepGrid, by_rank_and_step
from rankscope.analysis.model.tables import is_like
from rankscope.analysis.timeline.matching import MUTUAL_OPS, ROOTED_OPS
from rankscope.collectors.schema import P2P_OPS

__all__ = ["Arrivals", "Lateness", "arrivals", "charged_to_last", "lateness"]

_NOT_ALL_WAIT = (*ROOTED_OPS, *P2P_OPS)  # not all of their ranks wait for each other
_REDUCTIONS = "^(allreduce|reduce_scatter)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Per rank of a grid how often it began last, of how many operations, and by how much, ns per (rank, step)."""

    margin: Floats  # how long the second-last rank, and so all others, were there already; what overlaps counts once
    last: Ints
    operations: Ints


def arrivals(collectives: pl.DataFrame, grid: StepGrid) -> Arrivals | None:
    """Return the lateness of the grid's ranks, from collectives that all began on their devices by one clock.

    None where there are none such. An operation belongs to the step in which its last rank began it. Operations with
    a root and sends are left out: not all of their ranks wait for each other.
    """
    apart = pl.col("op").is_in(_NOT_ALL_WAIT)
    known = pl.col("device_start_ns").is_not_null() & pl.col("arrival_spread_ns").is_not_null()
    rows = collectives.filter(known, ~apart, pl.col("rank").is_in(grid.ranks))
    operations = (
        rows.sort("instance_id", "device_start_ns", "wait_ns", descending=[False, False, True])
        .group_by("instance_id", maintain_order=True)
        .agg(
            pl.col("rank").last(),
            pl.col("step").last(),
            pl.col("device_start_ns").get(-2, null_on_oob=True).alias("start_ns"),
            pl.col("device_start_ns").last().alias("end_ns"),
            pl.len().alias("_ranks"),
            pl.col("group_size").first(),
        )
        .filter(pl.col("_ranks") == pl.col("group_size"), pl.col("step").is_in(grid.steps))
    )
    if operations.is_empty():
        return None
    reached = pl.col("end_ns").cum_max().shift(1, fill_value=0).over("rank", "step")
    late = (
        operations.sort("rank", "step", "start_ns")
        .with_columns((pl.col("end_ns") - pl.max_horizontal("start_ns", reached)).clip(0).alias("ns"))
        .group_by("rank", "step")
        .agg(pl.col("ns").sum(), pl.len())
    )
    row = np.searchsorted(grid.ranks, late["rank"])
    margin = np.zeros((len(grid.ranks), len(grid.steps)))
    margin[row, np.searchsorted(grid.steps, late["step"])] = late["ns"].to_numpy()
    last, taken_part = np.zeros(len(grid.ranks), np.int64), np.zeros(len(grid.ranks), np.int64)
    np.add.at(last, row, late["len"].to_numpy())
    members = rows.filter(pl.col("instance_id").is_in(operations["instance_id"].implode()))["rank"].value_counts()
    taken_part[np.searchsorted(grid.ranks, members["rank"])] = members["count"].to_numpy()
    return Arrivals(margin=margin, last=last, operations=taken_part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """The time that others waited for each rank, or for each node as a whole, ns per (rank or node, step).

    The times are unknown: waits may have overlapped, and others may have computed meanwhile. The cost lies between.
    """

    least: Floats
    most: Floats
    last: Ints  # how many operations it began last
    operations: Ints


def lateness(
    collectives: pl.DataFrame,
    grid: StepGrid,
    node_of: dict[int, int] | None = None,
    regions: pl.DataFrame | None = None,
) -> Lateness | None:
    """Return the lateness of the grid's ranks, or with `node_of` of their nodes, where only durations are known.

    A rank is late by the least that another one waits, a node by what all others wait at least beyond any of its own
    ranks. Not its own lateness is what it waits for others in other groups, nor what transfers there take longer than
    the median one of the same sort in that step: it is taken off. What it waits for a neighbour in a pipeline is taken
    off the next operation, by how much more than another member waits for its neighbours before that. Of a node the
    rank that is late the least counts. `most` adds up all operations; `least` is the longest wait, since a rank that is
    behind may be late in all operations until its peers have to wait. Those in which each wait counts are added up,
    less what the rank waits in them itself: reductions outside of backward, and what is like them, whose result is
    wanted at once.
    None where there are no such operations.
    """
    known = pl.col("end_ns").is_null() & pl.col("wait_ns").is_not_null()
    rows = collectives.filter(known, pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
    usual = pl.col("transfer_ns").median().over("step", "op", "group_size", "size_bytes")
    longer = (pl.col("transfer_ns") - usual).clip(0).round().cast(pl.Int64)
    rows = rows.with_columns(waited=pl.col("wait_ns") + longer)
    together = _with_waits_for_neighbours(rows).filter(pl.col("op").is_in(MUTUAL_OPS))
    if together.is_empty():
        return None
    unit = pl.col("rank") if node_of is None else pl.col("rank").replace_strict(node_of, return_dtype=pl.Int32)
    together = _with_wanted_at_once(together, regions).with_columns(unit.alias("unit"))
    late = (
        together.group_by("instance_id", "unit")
        .agg(first=pl.col("wait_ns").min(), slowest=(pl.col("wait_ns") + pl.col("held_up_ns")).max())
        .sort("instance_id", "first", "unit")
        .group_by("instance_id", maintain_order=True)
        .agg(pl.col("unit").first(), pl.col("slowest").first(), next=pl.col("first").get(1, null_on_oob=True))
        .filter(pl.col("next").is_not_null())
        .select("instance_id", "unit", late_ns=(pl.col("next") - pl.col("slowest")).clip(0))
    )
    by_group = ["rank", "step", "group_id"]
    in_turn = pl.col("late_ns").fill_null(0).filter("at_once").sum() - pl.col("wait_ns").filter("at_once").sum()
    in_group = (
        together.join(late, on=["instance_id", "unit"], how="left")
        .group_by(by_group)
        .agg(most=pl.col("late_ns").sum(), least=pl.max_horizontal(pl.col("late_ns").max(), in_turn))
    )
    waited = rows.filter(~pl.col("op").is_in(P2P_OPS)).group_by(by_group).agg(pl.col("waited").sum())
    elsewhere = waited.with_columns(pl.col("waited").sum().over("rank", "step") - pl.col("waited"))
    net = in_group.join(elsewhere, on=by_group).with_columns(
        (pl.col(name) - pl.col("waited")).clip(0) for name in ("most", "least")
    )
    by_step = net.group_by("rank", "step").agg(pl.col("most").sum(), pl.col("least").max())
    units = list(grid.ranks) if node_of is None else sorted(set(node_of.values()))
    of_unit = np.searchsorted(units, grid.ranks if node_of is None else [node_of[rank] for rank in grid.ranks])
    values = {name: by_rank_and_step(by_step, name, grid.ranks, grid.steps) for name in ("most", "least")}
    least, most = (
        np.array([values[name][of_unit == u].min(axis=0) for u in range(len(units))]) for name in ("least", "most")
    )
    count = together.join(late.select("instance_id"), on="instance_id", how="semi").unique(["instance_id", "unit"])
    of = {name: dict(frame["unit"].value_counts().iter_rows()) for name, frame in (("all", count), ("last", late))}
    last, operations = (np.array([of[name].get(u, 0) for u in units], np.int64) for name in ("last", "all"))
    return Lateness(least=least, most=most, last=last, operations=operations)


def _with_waits_for_neighbours(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with `held_up_ns`: what its rank waited in sends and receives since the group's operation before.

    Beyond what the rank of the operation that waited least did.
    """
    sent = pl.when(pl.col("op").is_in(P2P_OPS)).then("waited").otherwise(0)
    so_far = rows.sort("rank", "start_ns").with_columns(_sent=sent.cum_sum().over("rank"))
    since = pl.col("_sent") - pl.col("_sent").shift(1).over("rank", "group_id").fill_null(0)
    held_up = so_far.with_columns(held_up_ns=since).drop("_sent")
    return held_up.with_columns(pl.col("held_up_ns") - pl.col("held_up_ns").min().over("instance_id"))


def _with_wanted_at_once(rows: pl.DataFrame, regions: pl.DataFrame | None) -> pl.DataFrame:
    """Return the rows with `at_once`: a reduction outside of backward, or one of the same group and size.

    Gradients are reduced in backward, which goes on meanwhile; activations are what the next operator needs.
    """
    never = pl.lit(False).alias("at_once")
    if regions is None:
        return rows.with_columns(never)
    spans = regions.filter(pl.col("kind") == "backward").select("rank", begun_ns="start_ns", until_ns="end_ns")
    if spans.is_empty():
        return rows.with_columns(never)
    like = ["group_id", "op", "size_bytes"]
    outside = (
        rows.filter(is_like("op", _REDUCTIONS))
        .sort("start_ns")
        .join_asof(spans.sort("begun_ns"), left_on="start_ns", right_on="begun_ns", by="rank", check_sortedness=False)
        .filter(pl.col("until_ns").is_null() | (pl.col("start_ns") >= pl.col("until_ns")))
        .select(like)
        .unique()
        .with_columns(at_once=pl.lit(True))
    )
    return rows.join(outside, on=like, how="left").with_columns(pl.col("at_once").fill_null(False))


def charged_to_last(collectives: pl.DataFrame) -> dict[int, int]:
    """Return the waits of all ranks in operations without ends, by the rank that each waited for."""
    rows = collectives.filter(pl.col("end_ns").is_null(), pl.col("wait_ns").is_not_null())
    of_operation = rows.group_by("instance_id").agg(pl.col("rank").filter("is_last").min(), pl.col("wait_ns").sum())
    return dict(of_operation.group_by("rank").agg(pl.col("wait_ns").sum()).iter_rows())
