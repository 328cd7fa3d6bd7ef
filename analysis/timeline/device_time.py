"""Device time of each rank over the whole capture, to the nanosecond."""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import DevicePart
from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, MEMORY

__all__ = ["by_rank", "device_parts", "union_ns"]

Ints = NDArray[np.int64]


def device_parts(kernels: pl.DataFrame) -> tuple[DevicePart, ...]:
    """One `DevicePart` per rank that has rows in `kernels`, by rank.

    All rows count, with or without a launch, and none is cut: the window is from the first start to the last end.
    Busy, compute, communication and memory are unions of intervals, so rows that overlap count once; idle is what is
    left of the window. Overlap is the time in which communication and compute both ran, exposed is communication
    without compute. Communication includes the time its kernels wait for other ranks.
    """
    return tuple(_part(rank, rows) for rank, rows in by_rank(kernels.select("rank", "start_ns", "end_ns", "work")))


def by_rank(frame: pl.DataFrame) -> list[tuple[int, pl.DataFrame]]:
    """Each rank's rows, by rank. Of a frame that is in order of rank, as large ones are, they are no copies."""
    if not frame["rank"].is_sorted():
        frame = frame.sort("rank", maintain_order=True)
    ranks = frame["rank"].unique().sort()
    bounds = [*frame["rank"].search_sorted(ranks, "left").to_list(), len(frame)]
    spans = zip(ranks, itertools.pairwise(bounds), strict=True)
    return [(rank, frame.slice(begin, end - begin)) for rank, (begin, end) in spans]


def union_ns(start: Ints, end: Ints) -> int:
    """Length of the union of these intervals, which are in order of start."""
    if not len(start):
        return 0
    reached = np.maximum.accumulate(end)
    begins = np.concatenate([start[:1], np.maximum(start[1:], reached[:-1])])
    return int(np.clip(end - begins, 0, None).sum())


def _part(rank: int, rows: pl.DataFrame) -> DevicePart:
    if not rows["start_ns"].is_sorted():
        rows = rows.sort("start_ns")
    start, end = rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy()

    def union_of(*work: str) -> int:
        chosen = rows["work"].is_in(work).to_numpy()
        return union_ns(start[chosen], end[chosen])

    window, busy = int(end.max() - start[0]), union_ns(start, end)
    compute, communication = union_of(COMPUTE), union_of(COMMUNICATION)
    overlap = compute + communication - union_of(COMPUTE, COMMUNICATION)
    return DevicePart(
        rank=rank,
        window_ns=window,
        busy_ns=busy,
        idle_ns=window - busy,
        compute_ns=compute,
        communication_ns=communication,
        memory_ns=union_of(MEMORY),
        overlap_ns=overlap,
        exposed_ns=communication - overlap,
    )
