"""Remarks of the headline on time that no check has judged; each may be empty."""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from rankscope.analysis.metrics.step_matrix import step_grid
from rankscope.analysis.model.finding import History, Lead, NotChecked
from rankscope.analysis.model.parts import APART, MIXED, part_name
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.runs.step_range import Stretch
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import duration, percent, percent_at_most
from rankscope.analysis.timeline.code_samples import Code

__all__ = [
    "devices_wait",
    "left_open",
    "made_of",
    "not_analyzed",
    "not_read",
    "stopped",
    "unclear",
    "unknown",
    "waited_for",
]

LARGE = 0.05  # share of the step from which a remark mentions a part
_FAR_LESS = 4.0  # times: of ranks that are alike the one that waits least waits up to 1.5 times less than the next one
MUCH = 0.2  # share of the step from which it mentions what no check can judge


def unclear(not_checked: Sequence[NotChecked]) -> str:
    """Return which check was unclear, though what it looks for may be there."""
    unclear = sorted((check for check in not_checked if check.unclear), key=lambda check: check.detector != "slow_rank")
    if not unclear:
        return ""
    others = counted(len(unclear) - 1, "other check")
    more = text(" (the same holds for {others})", others=others) if unclear[1:] else ""
    return text(
        "; {detector} has no verdict: {why}{more}", detector=name_of(unclear[0].detector), why=unclear[0].why, more=more
    )


def stopped(breakdown: pl.DataFrame) -> str:
    """Return the share of the step in which hosts are stopped, if large: the devices' work meanwhile is unknown."""
    grid = step_grid(breakdown)
    share = float(grid.of(*APART).mean()) / grid.step_ns
    said = text(
        "; hosts are busy with input, garbage collection, compilation or checkpoints for {share} of the step, and "
        "what devices did meanwhile was not recorded",
        share=percent(share),
    )
    return said if share >= LARGE else ""


def devices_wait(waits: pl.DataFrame, breakdown: pl.DataFrame) -> str:
    """Return how long devices wait for peers, if long, where only the hosts' time is split into parts.

    In one operation of each step, the longest wait (of `waits`, as `host_stalls.device_waits` has it): a step waits in
    several, but while it waits in one the device may compute what it needs for the next.
    """
    by_step = waits.group_by("rank", "step").agg(pl.col("wait_ns").max())
    by_rank = by_step.group_by("rank").agg(pl.col("wait_ns").fill_null(0).mean()).sort("wait_ns", "rank")
    if by_rank.is_empty():
        return ""
    mean_ns = by_rank.select(pl.col("wait_ns").mean()).item()
    share = mean_ns / step_grid(breakdown).step_ns
    rank, least_ns = by_rank.row(0)
    said = text(
        "; by NCCL's durations devices wait for peers for {share} of the step in a single operation (rank {rank} waits "
        "least: {least}, others up to {most})",
        share=percent(share),
        rank=rank,
        least=duration(least_ns),
        most=duration(by_rank.row(-1)[1]),
    )
    return said if share >= LARGE else ""


def left_open(breakdown: pl.DataFrame, lead: Lead | None, code: Code) -> str:
    """Return the devices' time that CUDA events leave open, if much."""
    if lead is None:
        return ""
    said = []
    if lead.idle_fraction >= MUCH:
        place = code.most_of(None)
        said += [
            text(
                "; devices may be idle for up to {share} of the step, which rankscope run --profile-steps A-B measures",
                share=percent_at_most(lead.idle_fraction),
            ),
            text(" (the hosts are mostly at {place})", place=place) if place else "",
        ]
    grid = step_grid(breakdown)
    mixed = float(grid.of(MIXED).mean() / grid.step_ns)
    if mixed >= MUCH:
        said.append(
            text("; in {share} of the step compute and communication are not distinguished", share=percent(mixed))
        )
    return joined("", said)


def waited_for(waits: pl.DataFrame) -> str:
    """Return the rank that the others wait for, if it waits far less than any of them; `waits`: (rank, waited_ns)."""
    ordered = waits.sort("waited_ns")
    if len(ordered) < 3 or ordered["waited_ns"][0] * _FAR_LESS > ordered["waited_ns"][1]:
        return ""
    least, second, most = (duration(ordered["waited_ns"][at]) for at in (0, 1, -1))
    return text(
        "; rank {rank} arrives late: it waited {least} in the matched operations, the others {second} to {most}",
        rank=ordered["rank"][0],
        least=least,
        second=second,
        most=most,
    )


def not_read(stretch: Stretch | None) -> str:
    """Say that steps were left out without a request."""
    if stretch is None or stretch.asked or not stretch.said:
        return ""
    if stretch.counted.is_empty():
        return text("; {only}", only=stretch.said)
    count = len(stretch.counted)
    said = text("; this is of steps {first}-{last} of {count}", first=stretch.first, last=stretch.last, count=count)
    if stretch.kept:
        said += text(" (of those before step {kept} only the length was kept)", kept=stretch.kept)
    return said


def not_analyzed(history: History) -> str:
    """Say how many steps of a long run the report does not cover; why not is among the gaps."""
    missing = history.count - history.analyzed
    if missing and missing == history.kept:
        return text("; of steps before {kept} only the length was kept", kept=history.kept)
    return (
        text("; {missing} of {count} steps were not analyzed", missing=missing, count=history.count) if missing else ""
    )


def unknown(breakdown: pl.DataFrame, code: Code) -> str:
    """Return the share of the step in which main threads do what no collector knows, if much, and where in the code."""
    place = code.most_of("other")
    grid = step_grid(breakdown)
    share = float(grid.of("other").mean()) / grid.step_ns if place else 0.0
    if place is None or share < MUCH:
        return ""
    return text(
        "; {share} of the step is in code of no known part, mostly at {place}",
        share=percent(share),
        place=place,
    )


def made_of(breakdown: pl.DataFrame) -> str:
    """Return the largest parts of the step, where it could be cut into parts."""
    total = breakdown["ns"].sum()
    if not total:
        return ""
    share = pl.col("ns").sum() / total
    parts = breakdown.group_by("part").agg(share).filter(pl.col("ns") >= LARGE).sort("ns", "part", descending=True)
    largest = parts.head(3).iter_rows()
    shares = (text("{share} {part}", share=percent(ns), part=part_name(part)) for part, ns in largest)
    return text("; the step is {parts}", parts=joined(", ", shares))
