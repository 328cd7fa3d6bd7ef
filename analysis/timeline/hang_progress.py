"""How far each rank had come when a recorded job stopped making progress."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.collectors.schema import P2P_OPS, STILL_NS, STILL_STEPS

__all__ = ["given_up", "last_begun_ns", "last_progress"]

_NOT_RECORDED = ("started", "is_started", "dtype", "frame", "quiet_ns")  # only PyTorch's flight recorder has them
_FAILED_NS = 1_000_000_000  # instead of STILL_NS, where an operation is known to have failed


def last_progress(
    collectives: pl.DataFrame,
    regions: pl.DataFrame,
    until_ns: int | None,
    steps: pl.DataFrame,
    *,
    said_late: bool = False,
) -> pl.DataFrame:
    """Return the table `progress` of a recorded run: one row per rank and group that it used.

    Operations count as outstanding only if the job hung at the end of the recording: no rank began anything for
    10 s, or for 5 median steps if that is longer, before `until_ns`, when anything was sampled last. Where nothing was
    (None), it is not known whether it hung. `collectives` is the matched table: an operation that all its ranks
    ended is not outstanding, however long it took. One that ended on some ranks only, after as long, was ended by what
    ended the job. Where one ended that cannot without a rank that never came to it, it failed, by a timeout or with
    that rank: then 1 s is enough. What a rank does that comes when the others have given up does not count.

    Of operations whose ends are never seen, as NCCL's (and not the only one of its kind, where the group's others have
    ends), those count that some member has not called, if NCCL's RAS said
    that a rank was late (`said_late`); else it is not known how far the rank was (`completed` is null).
    """
    steps_ns = _few_steps_ns(steps)
    collectives, regions = _until_given_up(collectives, regions, steps)
    numbered = collectives.with_columns(pl.col("op").is_in(P2P_OPS).alias("_p2p"))
    begun_ns = last_begun_ns(collectives, regions)
    idle_ns = None if until_ns is None else until_ns - (until_ns if begun_ns is None else begun_ns)
    outstanding = _outstanding(numbered, steps_ns, idle_ns)
    held = unknown = pl.lit(value=False)
    if outstanding is not None:
        ends = pl.col("end_ns").is_not_null().any()
        only = ~pl.col("_p2p") & (pl.len().over("rank", "group_id", "op") == 1)
        seen = ends.over("op") | (only & ends.over("group_id")) | said_late
        seen &= pl.lit(until_ns is not None)
        held, unknown = outstanding & seen, outstanding & ~seen
    by = ["rank", "group_id"]
    marked = numbered.select(
        *(*by, "seq", "op", "start_ns", "peer", "size_bytes", "_p2p"), held.alias("_held"), unknown.alias("_unknown")
    )
    counts = (
        marked.filter(~pl.col("_p2p"))
        .group_by("rank", "group_id")
        .agg(
            pl.col("seq").max().cast(pl.Int64).alias("enqueued"),
            pl.when(~pl.col("_unknown").any())
            .then(pl.col("seq").filter(~pl.col("_held")).max().cast(pl.Int64).fill_null(-1))
            .alias("completed"),
        )
    )
    first = marked.filter("_held").sort("start_ns").unique(by, keep="first", maintain_order=True)
    rows = marked.select(by).unique().join(counts, on=by, how="left")
    rows = rows.join(first.select(*by, "seq", "op", "start_ns", "peer", "size_bytes"), on=by, how="left").with_columns(
        is_p2p=pl.lit(False), node=pl.lit(0), attempt=pl.lit(0), **dict.fromkeys(_NOT_RECORDED, pl.lit(None))
    )
    return rows.select(pl.col(c).cast(t) for c, t in schema_of("progress").items()).sort(by)


def _outstanding(numbered: pl.DataFrame, steps_ns: float, idle_ns: int | None) -> pl.Expr | None:
    """Say of each operation whether its rank never got out of it, None: of none.

    `idle_ns`: since no rank began anything, if known.
    """
    least_ns = max(_FAILED_NS, steps_ns)
    if idle_ns is not None and idle_ns < least_ns:
        return None
    failed = steps_ns > 0 and _has_failed(numbered, least_ns)
    still_ns = least_ns if failed else max(STILL_NS, steps_ns)
    if idle_ns is not None and idle_ns < still_ns:
        return None
    lasted = (pl.col("end_ns") - pl.col("start_ns")).fill_null(still_ns) >= still_ns
    return pl.col("instance_id").is_null() & lasted & _none_later_ended()


def _few_steps_ns(steps: pl.DataFrame) -> float:
    median_ns = (steps["end_ns"] - steps["start_ns"]).median()
    return STILL_STEPS * (median_ns if isinstance(median_ns, float) else 0)


def given_up(collectives: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows whose ranks gave the operation up, by a timeout or an error, and began nothing more.

    They ended 1 s and 5 median steps or more before another rank came, which none can end without.
    """
    after_ns = max(_FAILED_NS, _few_steps_ns(steps))
    rows = collectives.filter(pl.col("op").is_in(MUTUAL_OPS), pl.col("early_ns") >= after_ns)
    if rows.is_empty():
        return rows
    late = pl.col("start_ns") >= (rows["end_ns"] - rows["early_ns"]).min()
    went_on = collectives.filter(late, pl.col("rank").is_in(rows["rank"].implode()))
    return rows if went_on.is_empty() else rows.clear()


def _until_given_up(
    collectives: pl.DataFrame, regions: pl.DataFrame, steps: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Both until ranks gave an operation up."""
    gave_up = given_up(collectives, steps)
    if gave_up.is_empty():
        return collectives, regions
    late = pl.col("start_ns") >= (gave_up["end_ns"] - gave_up["early_ns"]).min()
    too_late = collectives.filter(late)["instance_id"].drop_nulls()
    kept = collectives.filter(~late).with_columns(
        instance_id=pl.when(~pl.col("instance_id").is_in(too_late.implode())).then("instance_id"),
        end_ns=pl.col("end_ns") - pl.col("early_ns").fill_null(0),
    )
    return kept, regions.filter(~late)


def _has_failed(numbered: pl.DataFrame, after_ns: float) -> bool:
    """Say whether an operation ended, after so long, to which a rank never came that it cannot end without."""
    all_recorded = pl.col("rank").n_unique().over("group_id") == pl.col("group_size")
    came = pl.len().over("group_id", "seq", "op") == pl.col("group_size")
    lasted = pl.col("end_ns") - pl.col("start_ns") >= after_ns
    unlike = pl.col("op").is_in(MUTUAL_OPS) & all_recorded & ~came & lasted & _none_later_ended()
    return bool(numbered.select(unlike.any()).item())


def last_begun_ns(collectives: pl.DataFrame, regions: pl.DataFrame) -> int | None:
    """Return when any rank began anything for the last time."""
    begun = [ns for ns in (collectives["start_ns"].max(), regions["start_ns"].max()) if isinstance(ns, int)]
    return max(begun, default=None)


def _none_later_ended() -> pl.Expr:
    """No later operation with the same ranks ended on all of them."""
    same = ["rank", "group_id", "_p2p", pl.when("_p2p").then("peer"), pl.when("_p2p").then("tag")]
    whole = pl.col("instance_id").is_not_null()
    last_whole = pl.col("seq").filter(whole).max().over(same)
    return last_whole.is_null() | (pl.col("seq") > last_whole)
