"""The nodes' counters in the judged steps, and the ranks that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.collectors.counters import GAUGES

__all__ = ["during", "gpus_of_ranks", "growth", "rates", "well_read"]


def gpus_of_ranks(run: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """(rank, node, device): the GPU that each rank used, as the counters call it, where torch and the driver report it.

    `run` is the JSON of each node.
    """
    rows: dict[int, tuple[int, int, str]] = {}
    for node, said in run.items():
        index = {gpu["uuid"]: gpu["index"] for gpu in said.get("topology", {}).get("gpus", ()) if gpu.get("uuid")}
        for entry in said.get("ranks", ()):  # a later attempt takes the place of an earlier one
            if entry.get("gpu_uuid") in index:
                rows[entry["rank"]] = entry["rank"], node, f"gpu{index[entry['gpu_uuid']]}"
    schema = {"rank": pl.Int32, "node": pl.Int32, "device": pl.String}
    return pl.DataFrame(list(rows.values()), schema, orient="row").sort("rank")


def during(counters: pl.DataFrame, source: str, steps: pl.DataFrame) -> pl.DataFrame:
    """Return one source's rows that were read between the first start and the last end of these steps, in order."""
    first, last = steps.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    rows = counters.filter(pl.col("source") == source, pl.col("time_ns").is_between(first, last))
    return rows.sort("node", "device", "name", "time_ns")


def well_read(rows: pl.DataFrame) -> set[tuple[int, str, str]]:
    """(node, device, name) of what was read at least half as often as what was read most often of that name."""
    counts = rows.group_by("node", "device", "name").len().filter(2 * pl.col("len") >= pl.col("len").max().over("name"))
    return set(counts.select("node", "device", "name").iter_rows())


def growth(rows: pl.DataFrame) -> pl.DataFrame:
    """(node, device, name, grown, over_ns): by how much each cumulative counter grew from its first to its last row."""
    value, time = pl.col("value"), pl.col("time_ns")
    return (
        rows.group_by("node", "device", "name", maintain_order=True)
        .agg((value.last() - value.first()).alias("grown"), (time.last() - time.first()).alias("over_ns"))
        .filter(pl.col("over_ns") > 0, pl.col("grown") >= 0)
    )


def rates(counters: pl.DataFrame) -> pl.DataFrame:
    """Return (node, source, device, name, time_ns, value).

    Gauges are as read, cumulative counters what they grow per second until their next reading. One that was set back in
    between has a null there, and the last reading is left out.
    """
    one = ["node", "source", "device", "name"]
    passed_s = (pl.col("time_ns").shift(-1) - pl.col("time_ns")).over(one) / 1e9
    rate = (pl.col("value").shift(-1) - pl.col("value")).over(one) / passed_s
    is_gauge = pl.col("name").is_in(tuple(GAUGES))
    value = pl.when(is_gauge).then("value").when(rate >= 0).then(rate)
    rows = counters.sort(*one, "time_ns").with_columns(value, is_gauge.alias("_gauge"), passed_s.alias("_passed_s"))
    return rows.filter(pl.col("_gauge") | (pl.col("_passed_s") > 0)).select(*one, "time_ns", "value")
