"""Who began late on the device, by how much, operation by operation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.timeline.matching import ROOTED_OPS
from rankscope.analysis.timeline.own import Floats, Ints, StepGrid
from rankscope.collectors.schema import P2P_OPS

__all__ = ["Arrivals", "arrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Per rank of a grid how often it began last, of how many operations, and by how much, ns per (rank, step)."""

    margin: Floats  # how long the second-last rank, and so all others, were there already; what overlaps counts once
    last: Ints
    operations: Ints


def arrivals(collectives: pl.DataFrame, grid: StepGrid) -> Arrivals | None:
    """The lateness of each rank of the grid, from collectives that all ranks began on their devices by one clock.

    None where there are none such. An operation belongs to the step in which its last rank began it. Operations with
    a root and sends are left out: not all of their ranks wait for each other.
    """
    apart = pl.col("op").is_in([*ROOTED_OPS, *P2P_OPS])
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
