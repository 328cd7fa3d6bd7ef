"""Resolves rows as they were written: ids become names, codes words, late ends are filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from rankscope.analysis.model.lookup import gathered, row_of
from rankscope.analysis.model.tables import CODES, WORDS, is_id, named_as
from rankscope.collectors.schema import NO_PEER

__all__ = ["with_codes", "with_late_ends", "with_names", "with_node", "with_peers"]


def with_node(frame: pl.DataFrame, ranks: pl.DataFrame, node: int | None) -> pl.DataFrame:
    """Return the node of each row's rank; where the rank's own row was lost `node`, or null if that is None."""
    found = gathered(ranks["node"], row_of(frame, ranks, ["rank"]))
    return frame.with_columns(found if node is None else found.fill_null(node))


def with_names(frame: pl.DataFrame, strings: pl.DataFrame) -> pl.DataFrame:
    """Ids become names, codes words; an id whose name was lost becomes `#id`."""
    ids = [c for c in frame.columns if is_id(c)]
    owner = "rank" if "rank" in frame.columns else "node"
    if ids:
        names = strings.filter(pl.col("attempt").is_null() == (owner == "node"))
        for column in ids:
            found = row_of(frame, names.select(owner, pl.col("name_id").alias(column)), [owner, column])
            named = gathered(names["name"], found).alias(named_as(column))
            if named.null_count() > frame[column].null_count():
                named = frame.select(pl.coalesce(named, pl.format("#{}", column)).alias(named.name)).to_series()
            frame = frame.drop(column).with_columns(named)
    return with_codes(frame)


def with_codes(frame: pl.DataFrame) -> pl.DataFrame:
    """Replace codes by their words."""
    for column in frame.columns:
        if column not in CODES:
            continue
        known, default = CODES[column]
        words = pl.Series(column, [*known, default], WORDS.get(column, pl.String))
        code = frame[column].clip(upper_bound=len(known))  # a newer recording may have more
        frame = frame.with_columns(words.gather(code))
    return frame


def with_peers(clocks: pl.DataFrame, run: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """Replace the number of each pinged node by its current one, which may have changed since."""
    number = {launch["agent"]: node for node, launch in run.items() if "agent" in launch}
    pinged = {node: number[launch["peer"]] for node, launch in run.items() if launch.get("peer") in number}
    peer = pl.col("node").replace_strict(pinged, default=pl.col("peer"), return_dtype=pl.Int32)
    is_ping = pl.col("peer") != NO_PEER
    return clocks.with_columns(pl.when(is_ping).then(peer).otherwise("peer").alias("peer")) if pinged else clocks


def with_late_ends(collectives: pl.DataFrame, completions: pl.DataFrame) -> pl.DataFrame:
    """Fill in ends that came after the row had been written."""
    if completions.is_empty():
        return collectives
    keys = ["rank", "attempt", "number"]
    late = completions.select(*keys, pl.col("end_ns").alias("_late")).unique(keys)
    return (
        collectives.join(late, on=keys, how="left", maintain_order="left")
        .with_columns(pl.coalesce("end_ns", "_late").alias("end_ns"))
        .drop("_late")
    )
