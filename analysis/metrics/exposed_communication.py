"""How long ranks were in some part between two moments, and which operations' transfers held them up."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from rankscope.analysis.metrics.step_matrix import Ints

__all__ = ["held_up", "is_bounded", "spent", "with_exposed"]


def spent(phases: pl.DataFrame, parts: Collection[str], spans: pl.DataFrame) -> Ints:
    """How many ns of each span (rank, start_ns, end_ns) the rank was in one of these parts, 0 where it ends too early.

    Phases of one rank do not overlap.
    """
    wanted = phases.filter(pl.col("part").is_in(parts)).select("rank", "start_ns", "end_ns").sort("rank", "start_ns")
    if wanted.is_empty() or spans.is_empty():
        return np.zeros(len(spans), np.int64)
    low, high = (np.concatenate([frame[c].to_numpy() for frame in (wanted, spans)]) for c in ("start_ns", "end_ns"))
    first, last = int(low.min()), int(high.max())
    ranks = np.unique(np.concatenate([wanted["rank"].to_numpy(), spans["rank"].to_numpy()]))

    def placed(frame: pl.DataFrame, column: str) -> Ints:
        """One time line for all ranks, one after the other."""
        of_rank = np.searchsorted(ranks, frame["rank"].to_numpy()) * (last - first + 1)
        return np.asarray(of_rank + np.clip(frame[column].to_numpy() - first, 0, last - first), np.int64)

    start, length = placed(wanted, "start_ns"), (wanted["end_ns"] - wanted["start_ns"]).to_numpy()
    before = np.concatenate([[0], np.cumsum(length)])

    def until(at: Ints) -> Ints:
        latest = np.searchsorted(start, at, side="right") - 1
        known = np.maximum(latest, 0)
        return np.asarray(np.where(latest >= 0, before[known] + np.minimum(at - start[known], length[known]), 0))

    return np.asarray(np.maximum(until(placed(spans, "end_ns")) - until(placed(spans, "start_ns")), 0), np.int64)


def with_exposed(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """The rows of `collectives` that have a wait, with two columns more, by rank and by when their transfer begins.

    `begin_ns` is when the last rank had arrived; `exposed_ns` for how long the rank stood still while it transferred.
    Of transfers at once the one that began first counts, then what is left of the next, so that a rank's rows sum to no
    more than its part `transfer`.
    """
    arrival = pl.coalesce("device_start_ns", "start_ns")
    rows = (
        collectives.filter(pl.col("wait_ns").is_not_null(), pl.col("end_ns").is_not_null())
        .with_columns(begin_ns=arrival + pl.col("wait_ns"))
        .sort("rank", "begin_ns", "end_ns")
    )
    reached = pl.col("end_ns").cum_max().shift(1).over("rank").fill_null(pl.col("begin_ns"))
    alone = rows.select("rank", pl.max_horizontal("begin_ns", reached).alias("start_ns"), "end_ns")
    return rows.with_columns(exposed_ns=pl.Series(spent(phases, ("transfer",), alone), dtype=pl.Int64))


def is_bounded(collectives: pl.DataFrame) -> bool:
    """Whether operations have durations and no ends, so that nobody saw what ranks did while they transferred."""
    if "duration_ns" not in collectives.columns:
        return False
    return bool(collectives.select((pl.col("end_ns").is_null() & pl.col("transfer_ns").is_not_null()).any()).item())


def held_up(collectives: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """As `with_exposed`, or bounds of it: rows with `exposed_ns`, for how long a transfer held the rank up at most,
    and `least_ns`.

    Where operations have durations only, that is at most all of the transfer. At least it is that of the step's last
    operation, after which nothing is computed that it could hide behind, and nothing of the others.
    """
    if not is_bounded(collectives):
        return with_exposed(collectives, phases).with_columns(least_ns=pl.col("exposed_ns"))
    rows = collectives.filter(pl.col("end_ns").is_null(), pl.col("transfer_ns").is_not_null())
    is_latest = pl.col("start_ns") == pl.col("start_ns").max().over("rank", "step")
    least = pl.when(is_latest).then("transfer_ns").otherwise(0)
    return rows.with_columns(exposed_ns=pl.col("transfer_ns"), least_ns=least)
