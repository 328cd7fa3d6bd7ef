"""The answer of NCCL's RAS on a job that hangs, by the run's own ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

__all__ = ["SILENT", "late_ranks"]

SILENT = ("unresponsive", "dead")  # states of a process that did not answer
_LOOPBACK = ("127.0.0.1", "::1")
_ONE_SIDED = "(?i)send|recv|put|signal|wait"  # operations that ranks of a communicator launch in different numbers

_COLUMNS = {
    "rank": pl.Int32,
    "communicator": pl.String,
    "operation": pl.String,
    "launched": pl.Int64,
    "most": pl.Int64,
    "state": pl.String,
    "time_ns": pl.Int64,
}


def late_ranks(
    ras: pl.DataFrame, ranks: pl.DataFrame, run: Mapping[int, Mapping[str, Any]], since_ns: int
) -> pl.DataFrame:
    """Return the ranks that, in RAS's last answer, had launched fewer operations than others, or did not answer.

    One row per rank, communicator and operation: rank, communicator, operation, launched, most (that any rank of the
    communicator had launched), state, time_ns; of a rank that did not answer one row, without numbers. Nothing if the
    answer is older than `since_ns`, when the last rank began anything. `run` is the JSON of each node; a rank that said
    goodbye did not need to answer.
    """
    last = ras.filter(pl.col("time_ns") == pl.col("time_ns").max(), pl.col("time_ns") > since_ns)
    most = pl.col("launched").max().over("communicator", "operation").alias("most")
    counted = pl.col("launched").is_not_null() & ~pl.col("operation").str.contains(_ONE_SIDED)
    placed = last.with_columns(most).join(_places(ranks, run), on=["pid", "host"], how="inner")
    silent = placed.filter(pl.col("state").is_in(SILENT), ~pl.col("rank").is_in(_gone(run)))
    silent = silent.sort("rank", "state").unique("rank", keep="first", maintain_order=True)
    silent = silent.with_columns(launched=None, most=None, operation=pl.lit(""))
    behind = placed.filter(counted & (pl.col("launched") < pl.col("most")))
    rows = pl.concat([table.select(pl.col(c).cast(t) for c, t in _COLUMNS.items()) for table in (silent, behind)])
    return rows.sort("rank", "communicator", "operation")


def _places(ranks: pl.DataFrame, run: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """(pid, host, rank): of each rank its process, at every address of its node."""
    own = _LOOPBACK if len(run) == 1 else ()
    addresses = [(node, address) for node, said in run.items() for address in (*said.get("addresses", ()), *own)]
    hosts = pl.DataFrame(addresses, {"node": pl.Int32, "host": pl.String}, orient="row")
    return (
        ranks.select("rank", "node", pl.col("pid").cast(pl.Int64)).join(hosts, on="node").select("pid", "host", "rank")
    )


def _gone(run: Mapping[int, Mapping[str, Any]]) -> list[int]:
    last = {entry["rank"]: entry for said in run.values() for entry in said.get("ranks", ())}
    return [rank for rank, entry in last.items() if entry.get("bye")]
