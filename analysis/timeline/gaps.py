"""What a timeline lacks, and why: one row of `gaps` for each."""

from __future__ import annotations

from collections.abc import Callable

import polars as pl

from rankscope.analysis.model.finding import Clock, Gap
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.text.phrases import how_to_profile
from rankscope.analysis.timeline.hang_progress import given_up
from rankscope.analysis.timeline.host_breakdown import InvariantError
from rankscope.analysis.timeline.steps import CAPTURE, UPDATES

__all__ = ["broken", "clock_gaps", "early_gaps", "step_gaps", "timing_gaps", "unmatched_gaps"]

_FEW_STEPS = 3


def clock_gaps(clocks: list[Clock]) -> list[Gap]:
    """Give one gap per node whose clock could not be brought together with the others."""
    how = {
        "unix time": text("its time comes from the hosts' unix time, with an unknown error"),
        "none": text("its times were left as they are"),
    }
    return [
        Gap(
            table="clocks",
            rank=None,
            node=c.node,
            count=None,
            why=text(
                "no pings between node {node} and 0, nor operations that bind its clock: {how}",
                node=c.node,
                how=how[c.source],
            ),
        )
        for c in clocks
        if c.error_ns is None
    ]


def unmatched_gaps(collectives: pl.DataFrame) -> list[Gap]:
    """One gap per reason; where operations differ also which."""
    unmatched = collectives.filter(pl.col("unmatched").is_not_null())
    reasons = unmatched.group_by("unmatched").len().sort("unmatched")
    gaps = [
        Gap(
            table="collectives",
            rank=None,
            node=None,
            count=count,
            why=text(
                "{count} of {all} collectives were not matched across ranks: {reason}",
                count=count,
                all=len(collectives),
                reason=Text(reason, {}),
            ),
        )
        for reason, count in reasons.iter_rows()
    ]
    differing = unmatched.filter(pl.col("unmatched") == "operations differ").sort("start_ns")
    if len(differing):
        first = differing.row(0, named=True)
        same_key = (pl.col("group_id") == first["group_id"]) & (pl.col("seq") == first["seq"])
        of_rank = differing.filter(same_key).select("rank", "op").iter_rows()
        said = joined(", ", (text("rank {rank} {op}", rank=rank, op=op) for rank, op in of_rank))
        why = text(
            "desynchronized: operation {seq} of group {group} is {said}",
            seq=first["seq"],
            group=first["group"],
            said=said,
        )
        gaps.append(Gap(table="collectives", rank=None, node=None, count=None, why=why))
    return gaps


def timing_gaps(records: pl.DataFrame) -> list[Gap]:
    """Said where torch's Flight Recorder has operations and not how long they took."""
    if records.is_empty() or records["duration_ns"].is_not_null().any():
        return []
    why = text(
        "torch's Flight Recorder has no durations, so stragglers and bandwidth are unknown; "
        "TORCH_NCCL_ENABLE_TIMING=1 records them (with CUDA_DEVICE_MAX_CONNECTIONS=1 communication then overlaps "
        "less: for a short run only), as does a profiled window ({how})",
        how=how_to_profile(),
    )
    return [Gap(table="flight_records", rank=None, node=None, count=len(records), why=why)]


def step_gaps(steps: pl.DataFrame, ranks: pl.DataFrame, reported: set[int | None], why_none: str) -> list[Gap]:
    """Give gaps of missing steps: all, those of some ranks (not of `reported` ones), or too few."""
    if not len(steps):
        return [Gap(table="steps", rank=None, node=None, count=None, why=why_none)]
    if steps["source"][0] == CAPTURE:
        why = text("{why_none}; the whole capture is taken as one step", why_none=why_none)
        return [Gap(table="steps", rank=None, node=None, count=None, why=why)]
    inferred = steps["source"][0] == UPDATES
    why = text("nothing names the steps: they end where the kernels of the optimizer do")
    gaps = [Gap(table="steps", rank=None, node=None, count=None, why=why)] if inferred else []
    without = sorted(set(ranks["rank"].to_list()) - set(steps["rank"].to_list()) - reported)
    gaps += [
        Gap(table="steps", rank=rank, node=None, count=None, why=text("rank {rank} has no step", rank=rank))
        for rank in without
    ]
    judged = steps.filter("judged")["step"].n_unique()
    if judged < _FEW_STEPS:
        why = text(
            "only {judged} of {count} steps can be analyzed; record more",
            judged=judged,
            count=steps["step"].n_unique(),
        )
        gaps.append(Gap(table="steps", rank=None, node=None, count=None, why=why))
    return gaps


def early_gaps(collectives: pl.DataFrame, steps: pl.DataFrame) -> list[Gap]:
    """Return the gap of operations that ended before their last rank arrived.

    How many, by how much at most, why, and what was done about it.
    """
    gave_up = given_up(collectives, steps).select("rank", "instance_id", why=pl.lit("given up"))
    by_device = pl.when(pl.col("device_start_ns").is_not_null()).then(pl.lit("device")).otherwise(pl.lit("clock"))
    done = {
        "clock": text("clocks or stamps are wrong by that, and these ends were moved to that arrival"),
        "device": text("the devices' clocks are wrong by that, and times were left as they are"),
        "given up": text(
            "a timeout or an error ended them before it arrived, and these ends were moved to that arrival"
        ),
    }
    early = collectives.filter(pl.col("early_ns").is_not_null()).join(gave_up, on=["rank", "instance_id"], how="left")
    return [
        Gap(
            table="collectives",
            rank=None,
            node=None,
            count=count,
            why=text(
                "{count} rows of operations end before their last rank arrived, by up to {worst} ns: {done}",
                count=count,
                worst=worst,
                done=done[why],
            ),
        )
        for why, count, worst in early.group_by(pl.col("why").fill_null(by_device))
        .agg(pl.len(), pl.col("early_ns").max())
        .sort("why")
        .iter_rows()
    ]


def broken(table: str, check: Callable[[], None]) -> list[Gap]:
    """Give a failed check of a table as a gap."""
    try:
        check()
    except InvariantError as error:
        return [Gap(table=table, rank=None, node=None, count=None, why=str(error))]
    return []
