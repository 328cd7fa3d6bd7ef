"""What marks around the waits of the compute stream would have shown of real captures, against their kernels.

    python benchmarks/device_waits.py CAPTURE…

CAPTURE: a torch.profiler trace, or a folder of one per rank, with `cudaStreamWaitEvent` in it. Of a wait, the mark
before it is reached when the compute stream has done what was launched earlier, and the one after it when the last
collective that was launched earlier is done too, or the stream goes on. Marked: the sum of these, a step. Kernels: the
time in which a collective's kernel ran and nothing else did. (Collectives in the compute stream itself count in both.)
"""

from __future__ import annotations

import sys

import numpy as np
import polars as pl

import rankscope
from rankscope.analysis.timeline.build import build_timeline

COMMUNICATION = "communication"


def union(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same time as disjoint spans, in order."""
    order = np.argsort(start)
    start, end = start[order], np.maximum.accumulate(end[order])
    first = np.r_[True, start[1:] > end[:-1]]
    return start[first], np.r_[end[:-1][first[1:]], end[-1:]]


def within(spans: tuple[np.ndarray, np.ndarray], at: np.ndarray) -> np.ndarray:
    """How much of the spans lies before each of these times."""
    start, end = spans
    length = np.r_[0, np.cumsum(end - start)]
    nth = np.searchsorted(start, at, side="right")
    return length[nth] - np.maximum(0, np.r_[0, end][nth] - at) * (nth > 0)


def covered(spans: tuple[np.ndarray, np.ndarray], start: int, end: int) -> int:
    """How much of the spans lies between two times."""
    before, until = within(spans, np.array([start, end]))
    return int(until - before)


def compare(kernels: pl.DataFrame, launches: pl.DataFrame, steps: pl.DataFrame) -> tuple[float, float, float]:
    """Mean ms a step of one rank: its length, what marks show of waiting, and what kernels do."""
    calls = launches.sort("start_ns").select("start_ns", "name", "thread", "correlation")
    launched = kernels.join(
        calls.group_by("correlation").agg(pl.col("start_ns").min().alias("called_ns"), pl.col("thread").first()),
        on="correlation",
    ).sort("called_ns")
    is_communication = pl.col("work") == COMMUNICATION
    compute = kernels.filter(~is_communication)
    stream = compute.group_by("stream").agg((pl.col("end_ns") - pl.col("start_ns")).sum()).sort("end_ns")["stream"][-1]
    mine = launched.filter(pl.col("stream") == stream)
    theirs = launched.filter(is_communication, pl.col("stream") != stream)
    inline = mine.filter(is_communication)
    done, called = np.maximum.accumulate(mine["end_ns"].to_numpy()), mine["called_ns"].to_numpy()
    awaited, issued = np.maximum.accumulate(theirs["end_ns"].to_numpy()), theirs["called_ns"].to_numpy()
    waits = calls.filter(pl.col("name").str.contains("StreamWaitEvent")).rename({"start_ns": "waited_ns"})
    following = launched.select("thread", "stream", waited_ns="called_ns")
    waits = waits.sort("waited_ns").join_asof(
        following.sort("waited_ns"), on="waited_ns", by="thread", strategy="forward", check_sortedness=False
    )
    at = waits.filter(pl.col("stream") == stream)["waited_ns"].to_numpy()  # else another stream waits
    nth, of = np.searchsorted(called, at), np.searchsorted(issued, at)
    at, nth, of = (values[(nth > 0) & (of > 0)] for values in (at, nth, of))
    begin = np.maximum(done[nth - 1], at)
    goes_on = np.r_[mine["start_ns"].to_numpy(), np.iinfo(np.int64).max][nth]  # with what was launched next
    end = np.maximum(begin, np.minimum(awaited[of - 1], goes_on))
    marked = union(np.r_[begin, inline["start_ns"].to_numpy()], np.r_[end, inline["end_ns"].to_numpy()])
    busy = union(*(compute[c].to_numpy() for c in ("start_ns", "end_ns")))
    both = union(*(kernels[c].to_numpy() for c in ("start_ns", "end_ns")))
    spans = steps.select("start_ns", "end_ns").rows()
    length = sum(end - start for start, end in spans)
    shown = sum(covered(marked, *span) for span in spans)
    true = sum(covered(both, *span) - covered(busy, *span) for span in spans)
    return tuple(ns / len(spans) / 1e6 for ns in (length, shown, true))


def main() -> None:
    """Print a line for each rank of each capture."""
    for path in sys.argv[1:]:
        timeline = build_timeline(rankscope.open(path))
        for (rank,), kernels in timeline.kernels.group_by("rank", maintain_order=True):
            of_rank = pl.col("rank") == rank
            steps = timeline.steps.filter(of_rank)
            length, shown, true = compare(kernels, timeline.launches.filter(of_rank), steps)
            print(
                f"{path} rank {rank}: {len(steps)} steps of {length:.1f} ms; marks {shown:.2f}, kernels {true:.2f} ms; "
                f"apart by {abs(shown - true) / length:.1%} of the step"
            )


if __name__ == "__main__":
    main()
