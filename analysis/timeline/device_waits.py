"""The device's waits for communication, from the marks around them.

The marks are put by `collectors/rank/device_waits.py`. Their meaning is defined in docs/definitions.md, "On a device,
by marks".
"""

from __future__ import annotations

import polars as pl

from rankscope.analysis.timeline.host_breakdown import PHASE_COLUMNS

__all__ = ["WAITS", "awaited", "known_waits", "split_by_durations", "without_waits"]

WAITS = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64, "enqueued_ns": pl.Int64}
_AROUND, _NOTES = ("wait_start", "wait_end"), ("waits_seen", "waits_missed")


def without_waits(marks: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows of `device_marks` that are of phases, and those of waits, by rank and the host's time.

    A stream comes to its marks in order: a device's time before that of an earlier mark is moved there.
    """
    marks = marks.sort("rank", "recorded_ns", maintain_order=True)
    marks = marks.with_columns(pl.col("device_ns").cum_max().over("rank"))  # nulls stay
    of_waits = pl.col("mark").is_in((*_AROUND, *_NOTES))
    return marks.filter(~of_waits), marks.filter(of_waits)


def known_waits(of_waits: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """Return the waits as the devices made them (columns of WAITS), by rank and time, of steps in which all are known.

    `enqueued_ns` is when the host had enqueued the wait.

    A step's are known if on every rank of `hosts`, the hosts' steps, at least one wait has both of its marks, none has
    only one or was not seen on the device, and the rank says that it missed none.
    """
    ends = hosts.select("rank", "step", pl.col("end_ns").alias("recorded_ns")).sort("recorded_ns")
    placed = (
        of_waits.sort("recorded_ns", maintain_order=True)
        .join_asof(ends, on="recorded_ns", by="rank", strategy="forward", check_sortedness=False)
        .drop_nulls("step")
        .sort("rank", "recorded_ns", maintain_order=True)
    )
    around = placed.filter(pl.col("mark").is_in(_AROUND)).with_columns(
        pl.col("device_ns").shift(1).over("rank", "step").alias("start_ns"),
        (pl.col("mark") != pl.col("mark").shift(1).over("rank", "step")).fill_null(value=True).alias("_alternates"),
    )
    is_end = pl.col("mark") == "wait_end"
    whole = around.group_by("rank", "step").agg(
        _whole=pl.col("_alternates").all()
        & pl.col("device_ns").is_not_null().all()
        & (is_end.sum() * 2 == pl.len())
        & is_end.last()
    )
    noted = placed.group_by("rank", "step").agg(
        _noted=(pl.col("mark") == "waits_seen").any() & ~(pl.col("mark") == "waits_missed").any()
    )
    every = (
        hosts.select("rank", "step")
        .join(whole, on=["rank", "step"], how="left")
        .join(noted, on=["rank", "step"], how="left")
        .group_by("step")
        .agg((pl.col("_whole") & pl.col("_noted")).fill_null(value=False).all())
    )
    known = every.filter("_whole")["step"]
    waits = around.filter(is_end & pl.col("step").is_in(known.implode()))
    waits = waits.rename({"device_ns": "end_ns", "recorded_ns": "enqueued_ns"})
    return waits.select(pl.col(c).cast(t) for c, t in WAITS.items())


def awaited(collectives: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return the rows, in their order, with `awaited_ns`: when the device began the first wait enqueued after each.

    Null where none was. `waits` has the columns of WAITS.
    """
    waits = waits.select("rank", "enqueued_ns", awaited_ns="start_ns").sort("enqueued_ns")
    numbered = collectives.select("rank", "start_ns").with_row_index("_row").sort("start_ns")
    found = numbered.join_asof(
        waits,
        left_on="start_ns",
        right_on="enqueued_ns",
        by="rank",
        strategy="forward",
        check_sortedness=False,
    ).sort("_row")
    return collectives.with_columns(found["awaited_ns"])


def split_by_durations(phases: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the phases, of each step's unsplit communication that part as transfer which no wait for peers can be.

    A rank waits no longer for peers than its operations lasted longer than on the rank where each was shortest
    (`wait_ns`; where that is unknown, than they lasted). The rest is transfer: the same share of each phase, at its
    end. What may be either stays unsplit, and so do steps of whose operations one has no duration. A transfer's label
    is the last operation that was enqueued before the wait (`awaited`).
    """
    if not {"duration_ns", "awaited_ns"} <= {*collectives.columns}:
        return phases
    by_step = ["rank", "step"]
    at_most = pl.coalesce("wait_ns", "duration_ns")
    waited = collectives.group_by(by_step).agg(_waited=pl.when(~at_most.has_nulls()).then(at_most.sum()))
    length, is_unsplit = pl.col("end_ns") - pl.col("start_ns"), pl.col("part") == "unsplit"
    unsplit = length.filter(is_unsplit).sum().over(by_step)
    rows = phases.join(waited, on=by_step, how="left", maintain_order="left").with_columns(
        _share=pl.when(is_unsplit).then((1 - pl.col("_waited") / unsplit).clip(0, 1)).fill_null(0.0)
    )
    rows = rows.with_columns(_from=pl.col("end_ns") - (pl.col("_share") * length).round().cast(pl.Int64))
    is_transfer = pl.col("_share") > 0
    before = rows.with_columns(end_ns=pl.when(is_transfer).then("_from").otherwise("end_ns"))
    after = (
        rows.filter(is_transfer)
        .join_asof(
            collectives.select("rank", "awaited_ns", "start_ns", "op")
            .drop_nulls("awaited_ns")
            .sort("awaited_ns", "start_ns"),
            left_on="start_ns",
            right_on="awaited_ns",
            by="rank",
            suffix="_of_call",
            check_sortedness=False,
        )
        .with_columns(
            start_ns=pl.col("_from"), part=pl.lit("transfer", PHASE_COLUMNS["part"]), label=pl.coalesce("op", "label")
        )
        .select(rows.columns)
    )
    return (
        pl.concat([before, after])
        .filter(pl.col("start_ns") < pl.col("end_ns"))
        .sort("rank", "start_ns")
        .select(phases.columns)
    )
