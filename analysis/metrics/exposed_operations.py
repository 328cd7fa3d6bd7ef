"""Which operations' transfers nothing hides, by the sort of process group, and which of them could be hidden."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.exposed_communication import (
    described,
    is_awaited,
    kind_of_group,
    spent,
    with_exposed,
)
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import Ints
from rankscope.analysis.model.segments import reached_before
from rankscope.analysis.model.tables import WORDS, in_order
from rankscope.analysis.text.phrases import NO_ROLES
from rankscope.analysis.timeline.rank_keys import RankKeys
from rankscope.collectors.schema import OPS, P2P_OPS

__all__ = ["BY_SORT", "P2P", "computed", "exposed_operations", "surely_saved_ns"]

BY_SORT = ["sort", "kind", "op"]
P2P = "p2p"  # sends and receives


@once
def exposed_operations(collectives: pl.DataFrame, phases: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Return operations with `sort`, `kind`, `transfer_ns`, `exposed_ns`, `is_bound` and `is_edge`, a row per rank.

    `sort` is the description that groups of one purpose share (`tp`, `mesh_dp`), else the group's name. Where
    arrivals of peers are unknown (`is_bound`), the transfer is all of the operation, with the wait for peers, but for
    that for the last of those that were seen. The first and the last of a sort and kind of operation in a step are its
    edges: nothing in the step lies before or after them.
    Sends and receives are one kind, `P2P`.
    """
    known = with_exposed(collectives, phases).with_columns(is_bound=False)
    arrival = pl.coalesce("device_start_ns", "start_ns")
    alone = collectives.filter(pl.col("wait_ns").is_null(), pl.col("end_ns").is_not_null())
    least = pl.col("least_wait_ns").fill_null(0) if "least_wait_ns" in alone.columns else 0
    alone = alone.with_columns(begin_ns=arrival + least).sort("rank", "begin_ns", "end_ns")
    reached = reached_before(alone, "rank")
    spans = alone.select("rank", pl.max_horizontal("begin_ns", reached).alias("start_ns"), "end_ns")
    alone = alone.with_columns(
        exposed_ns=pl.Series(spent(phases, ("unsplit",), spans), dtype=pl.Int64), is_bound=pl.lit(True)
    )
    rows = pl.concat([known, alone], how="diagonal")
    purposes, purpose = _purposes(rows, groups)
    return rows.select(
        *("rank", "step", "instance_id", "group"),
        *(purposes[column].gather(purpose) for column in BY_SORT),
        *("start_ns", "end_ns", "exposed_ns", "is_bound"),
        began_ns=arrival,
        transfer_ns=(pl.col("end_ns") - pl.col("begin_ns")).clip(0, None),
        is_edge=_edges(rows, purpose, len(purposes)),
    )


def surely_saved_ns(collectives: pl.DataFrame, phases: pl.DataFrame, op: str) -> float:
    """Return what a step saves at least, had these operations' transfers taken no time, ns.

    By operations of all ranks: without its transfer each rank goes on earlier by what it blocks the rank that it blocks
    least, and so does all that follows, as what was queued behind it in its group. It counts for nothing where, when it
    ends, another kind of operation is under way that may end as late as before: one that was called before it, or in
    another group. 0 where devices did the work, which may wait for their launches instead.
    """
    on_devices = "device_start_ns" in collectives.columns and collectives["device_start_ns"].is_not_null().any()
    if on_devices or is_awaited(collectives):
        return 0.0
    rows, ranks = with_exposed(collectives, phases), phases["rank"].n_unique()
    whole = rows.filter(pl.col("op") == op, pl.col("instance_id").is_not_null(), pl.col("group_size") == ranks)
    if whole.is_empty():
        return 0.0
    never_ns = int(whole["end_ns"].to_numpy().max()) + 1  # after all of them
    others = collectives.filter(pl.col("op") != op).select(
        "rank", "group_id", "start_ns", pl.col("end_ns").fill_null(never_ns)
    )
    keys = RankKeys.covering(whole, others)
    others, total_ns = in_order(others, "rank", "start_ns"), 0
    for (group,), of_group in whole.group_by("group_id"):
        ends, is_over = keys.of(of_group, "end_ns"), np.ones(len(of_group), bool)
        in_group = pl.col("group_id") == group
        for some, until in ((others.filter(in_group), "start_ns"), (others.filter(~in_group), "end_ns")):
            begun = np.searchsorted(keys.of(some, "start_ns"), keys.of(of_group, until))
            reached = np.maximum.accumulate(keys.of(some, "end_ns"))
            is_over &= np.append(np.iinfo(np.int64).min, reached)[begun] <= ends
        instances, instance = distinct(of_group["instance_id"].to_numpy())
        least = np.full(len(instances), np.iinfo(np.int64).max)
        np.minimum.at(least, instance, np.where(is_over, of_group["exposed_ns"].to_numpy(), 0))
        total_ns += int(least[np.bincount(instance) == ranks].sum())
    return total_ns / phases["step"].n_unique()


def _purposes(rows: pl.DataFrame, groups: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Return the different `sort`, `kind` and `op`, as `exposed_operations` has them, and which each row has."""
    codes = rows["op"].cast(WORDS["op"]).to_physical().to_numpy()
    _, group = distinct(rows["group_id"].to_numpy())
    pairs, pair = distinct(group * len(OPS) + codes)
    one_of = np.zeros(len(pairs), np.int64)
    one_of[pair] = np.arange(len(rows))
    role = pl.when(~pl.col("role").is_in(NO_ROLES)).then("role")
    op = pl.when(pl.col("op").is_in(P2P_OPS)).then(pl.lit(P2P)).otherwise(pl.col("op").cast(pl.String))
    of_pair = (
        rows.select("group_id", "op", "group")[one_of]
        .join(described(groups), on="group_id", how="left", maintain_order="left")
        .select(sort=pl.coalesce(role, "group", pl.lit("")), kind=kind_of_group(), op=op)
    )
    purposes = of_pair.unique(maintain_order=True)
    of = of_pair.join(purposes.with_row_index("_row"), on=BY_SORT, how="left", maintain_order="left")["_row"]
    words = purposes.select(
        pl.col(column).cast(pl.Enum(purposes[column].unique(maintain_order=True))) for column in BY_SORT
    )
    return words, of.to_numpy().astype(np.int64)[pair]


def _edges(rows: pl.DataFrame, purpose: Ints, purposes: int) -> pl.Series:
    """Say of each row whether none of its purpose begins before it, or none after it, in its step on its rank."""
    _, rank = distinct(rows["rank"].to_numpy())
    steps, step = distinct(rows["step"].fill_null(-1).to_numpy())
    cells, cell = distinct((rank * len(steps) + step) * purposes + purpose)
    begin = rows["begin_ns"].to_numpy()
    low, high = np.full(len(cells), begin.max(initial=0)), np.full(len(cells), begin.min(initial=0))
    np.minimum.at(low, cell, begin)
    np.maximum.at(high, cell, begin)
    return pl.Series((begin == low[cell]) | (begin == high[cell]))


def computed(phases: pl.DataFrame) -> pl.DataFrame:
    """When ranks compute, in pieces (rank, step, ns), while nothing is under way that this would hide."""
    return phases.filter(pl.col("part") == "compute").select("rank", "step", ns=pl.col("end_ns") - pl.col("start_ns"))
