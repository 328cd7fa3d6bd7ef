"""Ranks whose hosts are slow in all that they do, by the pace of the calls with which they launch work."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from rankscope.analysis.metrics.launch_queue import paces
from rankscope.analysis.metrics.once import once

__all__ = ["as_host_time", "slow_hosts"]

_SLOWER = 1.5  # times the pace of the other ranks
_AS_MUCH = 2.0  # times that: what takes a rank longer than that from batch to batch is not its host alone


@once
def slow_hosts(launches: pl.DataFrame, phases: pl.DataFrame) -> dict[int, float]:
    """Return the ranks whose hosts take 1.5 times as long from call to call as the others, and how many times.

    Not those that wait for input by far longer than that explains.
    """
    pace = paces(phases, launches)
    waited = dict(
        phases.filter(part="input").group_by("rank").agg((pl.col("end_ns") - pl.col("start_ns")).sum()).rows()
    )
    found: dict[int, float] = {}
    for rank, ns in pace.items():
        others = [other for other in pace if other != rank]
        if not others:
            continue
        times = ns / max(float(np.median([pace[other] for other in others])), 1.0)
        usual_ns = float(np.median([waited.get(other, 0) for other in others]))
        if times >= _SLOWER and waited.get(rank, 0) <= _AS_MUCH * times * usual_ns:
            found[rank] = times
    return found


def as_host_time(rows: pl.DataFrame, ranks: Collection[int]) -> pl.DataFrame:
    """Return the rows of a breakdown or of phases, what these ranks wait for input as time of their hosts."""
    if not ranks:
        return rows
    is_input = pl.col("rank").is_in(list(ranks)) & (pl.col("part") == "input")
    part = pl.when(is_input).then(pl.lit("host")).otherwise(pl.col("part").cast(pl.String))
    return rows.with_columns(part.cast(rows["part"].dtype).alias("part"))
