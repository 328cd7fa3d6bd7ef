"""How far each rank had come in each process group when the job hung: the table behind the finding."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from rankscope.analysis.model.finding import Finding, GroupState
from rankscope.analysis.model.money import is_standstill
from rankscope.analysis.text.phrases import group_title, place_in_code
from rankscope.analysis.timeline.build import Timeline

__all__ = ["group_states"]


def group_states(timeline: Timeline, findings: Sequence[Finding]) -> tuple[GroupState, ...]:
    """Return the ranks of every group in which an operation is outstanding; none where the job does not hang.

    Ranks that a finding names come first, each with the groups that it is furthest behind in first.
    """
    named = {rank for finding in findings if is_standstill(finding) for rank in finding.ranks}
    if not named:
        return ()
    at = _last_places(timeline)
    titles = {
        group_id: group_title(name, role)
        for group_id, name, role in timeline.groups.select("group_id", "name", "role").unique("group_id").iter_rows()
    }
    rows = (
        timeline.progress.filter(pl.col("seq").is_not_null().any().over("group_id"))
        .with_columns(_state().alias("state"), (pl.col("enqueued").max().over("group_id")).alias("_most"))
        .sort(
            pl.col("rank").is_in(list(named)).not_(),
            "rank",
            pl.col("enqueued") - pl.col("_most"),
            pl.col("start_ns"),
            "group_id",
            nulls_last=True,
        )
    )
    return tuple(
        GroupState(
            rank=row["rank"],
            group=titles.get(row["group_id"], ""),
            enqueued=row["enqueued"],
            started=row["started"],
            completed=row["completed"],
            op=row["op"] or "",
            seq=row["seq"],
            state=row["state"],
            frame=row["frame"] or at.get(row["rank"], ""),
        )
        for row in rows.iter_rows(named=True)
    )


def _state() -> pl.Expr:
    most = pl.col("enqueued").max().over("group_id")
    return (
        pl.when(pl.all_horizontal(pl.col("enqueued", "completed", "seq").is_null()))
        .then(pl.lit("unread"))
        .when(pl.col("seq").is_not_null() & pl.col("is_started").fill_null(value=False))
        .then(pl.lit("started"))
        .when(pl.col("seq").is_not_null())
        .then(pl.lit("enqueued"))
        .when(~pl.col("is_p2p") & (pl.col("enqueued") < most))
        .then(pl.lit("behind"))
        .otherwise(pl.lit("idle"))
    )


def _last_places(timeline: Timeline) -> dict[int, str]:
    """Return the place of each rank's training thread in its last sample."""
    last = timeline.samples.filter(pl.col("time_ns") == pl.col("time_ns").max().over("rank")).unique("rank")
    found = last.join(timeline.places, on="place").select("rank", "function", "file", "line")
    return {rank: place_in_code(function, file, line) for rank, function, file, line in found.iter_rows()}
