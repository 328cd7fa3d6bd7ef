"""The device's waits for communication, from the marks around them.

The marks are put by `collectors/rank/device_waits.py`. Their meaning is defined in docs/definitions.md, "On a device,
by marks".
"""

from __future__ import annotations

import polars as pl

__all__ = ["WAITS", "known_waits", "without_waits"]

WAITS = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}
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
    waits = around.filter(is_end & pl.col("step").is_in(known.implode())).rename({"device_ns": "end_ns"})
    return waits.select(pl.col(c).cast(t) for c, t in WAITS.items())
