"""The clocks of devices of one host: a profiler relates each to the host's by itself, now and then wrongly.

All ranks end an operation that all of them need together. So what one rank's device ends later than the others', in all
operations alike, is its clock.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.matching import MUTUAL_OPS

__all__ = ["device_clocks", "on_one_clock"]

_LEAST_OPS = 8
_NOTABLE_NS = 100_000  # ends differ by up to some 10 µs where nothing is wrong


def device_clocks(collectives: pl.DataFrame) -> tuple[dict[int, int], list[Gap]]:
    """By rank, how far its device's clock is ahead of the others' on its node, ns, where that is much; and the gaps.

    `collectives` is the table. The median over operations of the device's end after the median end of its node's ranks.
    """
    ended = collectives.filter(
        pl.col("op").is_in(MUTUAL_OPS), pl.col("device_start_ns").is_not_null(), pl.col("seq").is_not_null()
    ).drop_nulls("end_ns")
    operation = ["node", "group_id", "op", "seq"]
    late = pl.col("end_ns") - pl.col("end_ns").median().over(operation)
    by_rank = (
        ended.with_columns(late=late, ranks=pl.col("rank").n_unique().over(operation))
        .filter(pl.col("ranks") > 1)
        .group_by("rank")
        .agg(pl.col("late").median(), ops=pl.len())
        .filter(pl.col("late").abs() >= _NOTABLE_NS, pl.col("ops") >= _LEAST_OPS)
        .sort("rank")
    )
    offsets = {rank: round(late) for rank, late in by_rank.select("rank", "late").iter_rows()}
    return offsets, [
        Gap(
            table="kernels",
            rank=rank,
            node=None,
            count=None,
            why=text("its device's clock was {offset} off the others' and was set right", offset=duration(abs(offset))),
        )
        for rank, offset in offsets.items()
    ]


def on_one_clock(
    rows: pl.DataFrame, offsets: Mapping[int, int], *columns: str, if_known: str | None = None
) -> pl.DataFrame:
    """Return the rows, by rank, with these times of the device moved, where the column `if_known` is not null."""
    if not offsets:
        return rows
    ahead = pl.col("rank").replace_strict(offsets, default=0, return_dtype=pl.Int64)
    if if_known:
        ahead = pl.when(pl.col(if_known).is_not_null()).then(ahead).otherwise(0)
    return rows.with_columns(pl.col(column) - ahead for column in columns)
