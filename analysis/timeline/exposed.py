"""How much of each operation's transfer its rank stood still for."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.timeline.own import Ints

__all__ = ["with_exposed"]


def with_exposed(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """The rows of `collectives` that have a wait, with `exposed_ns` added: what its transfer holds up its rank.

    Ordered by rank and by when their transfer begins: when the last rank has arrived. Of transfers at once the one that
    began first counts, then what is left of the next, so that a rank's rows sum to no more than its part `transfer`.
    """
    arrival = pl.coalesce("device_start_ns", "start_ns")
    rows = (
        collectives.filter(pl.col("wait_ns").is_not_null(), pl.col("end_ns").is_not_null())
        .with_columns(begin_ns=arrival + pl.col("wait_ns"))
        .sort("rank", "begin_ns", "end_ns")
    )
    blocked = phases.filter(pl.col("part") == "transfer").select("rank", "start_ns", "end_ns").sort("rank", "start_ns")
    if rows.is_empty() or blocked.is_empty():
        return rows.with_columns(exposed_ns=pl.lit(0, pl.Int64))
    reached = pl.col("end_ns").cum_max().shift(1).over("rank").fill_null(pl.col("begin_ns"))
    begin = rows.select(pl.max_horizontal("begin_ns", reached)).to_series().to_numpy()
    end = rows["end_ns"].to_numpy()
    # One time line for all ranks, one after the other.
    first = min(int(begin.min()), int(blocked["start_ns"].to_numpy().min()))
    span = max(int(end.max()), int(blocked["end_ns"].to_numpy().max())) - first + 1
    ranks = np.unique(np.concatenate([rows["rank"].to_numpy(), blocked["rank"].to_numpy()]))

    def placed(rank: pl.Series, ns: Ints) -> Ints:
        return np.asarray(np.searchsorted(ranks, rank.to_numpy()) * span + (ns - first), np.int64)

    start = placed(blocked["rank"], blocked["start_ns"].to_numpy())
    length = (blocked["end_ns"] - blocked["start_ns"]).to_numpy()
    before = np.concatenate([[0], np.cumsum(length)])

    def blocked_until(at: Ints) -> Ints:
        latest = np.searchsorted(start, at, side="right") - 1
        known = np.maximum(latest, 0)
        inside = np.where(latest >= 0, np.minimum(at - start[known], length[known]), 0)
        return np.asarray(before[known] * (latest >= 0) + inside, np.int64)

    exposed = blocked_until(placed(rows["rank"], end)) - blocked_until(placed(rows["rank"], np.minimum(begin, end)))
    return rows.with_columns(exposed_ns=pl.Series(exposed))
