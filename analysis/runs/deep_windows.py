"""Deep windows of a recorded run: torch.profiler's trace of a few of its steps, on the run's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Clock, Operator, Window
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.clocks import apply_clocks
from rankscope.analysis.timeline.device_breakdown import with_launches

__all__ = ["self_times", "windows_of", "with_windows"]

_LISTED = 10
_OTHER_THREADS = 1000  # a window numbers threads on its own; only the main one is sure to be the run's
_MAIN_THREAD = 0


def windows_of(trace: Trace, judge: Callable[[Trace], str]) -> tuple[Window, ...]:
    """Return the run's windows, with the operators that took most of their steps, and the verdict on device work."""
    stalls = trace.table("windows").group_by("window").agg(pl.col("start_stall_ns", "stop_stall_ns").max()).collect()
    held = {number: (start_ns, stop_ns) for number, start_ns, stop_ns in stalls.iter_rows()}
    is_window = any("window" in launch for launch in trace.run.values())
    seen = [trace] if is_window else [Trace.open(folders) for folders in _folders(trace)]
    found = ((window, _window(window, held)) for window in seen)
    return tuple(replace(w, verdict=judge(of)) if w.kernels and not is_window else w for of, w in found)


def with_windows(timeline: Timeline, trace: Trace) -> Timeline:
    """Return the timeline to show, with operators and device work of the windows.

    Do not run detectors on it.
    """
    seen = [Trace.open(folders) for folders in _folders(trace)]
    if not seen:
        return timeline
    thread = pl.col("thread")
    number = pl.when(thread == _MAIN_THREAD).then(thread).otherwise(thread + _OTHER_THREADS)
    regions, kernels, launches = (
        _on_one_clock([window.table(name).collect() for window in seen], timeline.clocks)
        for name in ("regions", "kernels", "launches")
    )
    operators = regions.filter(pl.col("kind") == "operator").with_columns(number.alias("thread"))
    return replace(
        timeline,
        regions=_joined(timeline.regions, operators),
        kernels=_joined(timeline.kernels, with_launches(kernels, launches)),
        launches=_joined(timeline.launches, launches),
    )


def self_times(operators: pl.DataFrame) -> pl.DataFrame:
    """Return the operators with `self_ns`: the time of each without that of the operators in it, on its thread.

    `operators` has rank, thread, start_ns, end_ns; those of a thread lie within each other or apart.
    """
    ordered = operators.sort("rank", "thread", "start_ns", "end_ns", descending=[False, False, False, True])
    threads = ordered.partition_by("rank", "thread", maintain_order=True)
    own = [_own_ns(part["start_ns"].to_numpy(), part["end_ns"].to_numpy()) for part in threads]
    return ordered.with_columns(self_ns=pl.Series(np.concatenate([np.empty(0, np.int64), *own])))


def _own_ns(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    own = end - start
    inside: list[int] = []
    for row, (begin, until) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while inside and end[inside[-1]] <= begin:
            inside.pop()
        if inside:
            own[inside[-1]] -= min(until, int(end[inside[-1]])) - begin
        inside.append(row)
    return own


def _folders(trace: Trace) -> list[list[Path]]:
    """Of each window the folders in which its tables lie, in order."""
    return trace.reader.folder.windows() if trace.reader.folder else []


def _window(trace: Trace, held: Mapping[int, tuple[int, int]]) -> Window:
    launch = next(launch for launch in trace.run.values() if "window" in launch)
    start_ns, stop_ns = held.get(int(launch["window"]), (None, None))
    errors = [int(error) for of_node in trace.run.values() for error in of_node.get("clock_error_ns", {}).values()]
    return Window(
        number=int(launch["window"]),
        folder=Path(trace.path.split(", ")[0]).name,
        reason=str(launch["reason"]),
        steps=tuple(range(int(launch["first_step"]), int(launch["first_step"]) + int(launch["steps"]))),
        ranks=tuple(trace.reader.read("ranks")["rank"].unique().sort().to_list()),
        clock_error_ns=max(errors, default=None),
        start_stall_ns=start_ns,
        stop_stall_ns=stop_ns,
        kernels=trace.reader.read("kernels").height,
        verdict="",
        operators=_operators(trace.reader.read("regions"), int(launch["steps"])),
    )


def _operators(regions: pl.DataFrame, steps: int) -> tuple[Operator, ...]:
    """Return the operators that took most time of their own, mean over ranks."""
    operators = self_times(regions.filter(pl.col("kind") == "operator"))
    ranks = operators["rank"].n_unique()
    of_ranks = operators.group_by("name", "rank").agg(ns=pl.col("self_ns").sum(), calls=pl.len())
    most = pl.col("ns").arg_max()
    rows = (
        of_ranks.sort("rank")
        .group_by("name")
        .agg(
            total=pl.col("ns").sum(),
            calls=pl.col("calls").sum(),
            slowest=pl.col("rank").get(most),
            slowest_ns=pl.col("ns").max(),
        )
    )
    rows = rows.sort("total", "name", descending=[True, False]).head(_LISTED)
    return tuple(
        Operator(
            name=row["name"],
            ns_per_step=round(row["total"] / ranks / steps),
            calls_per_step=row["calls"] / ranks / steps,
            slowest_rank=row["slowest"],
            slowest_ns_per_step=round(row["slowest_ns"] / steps),
        )
        for row in rows.iter_rows(named=True)
    )


def _on_one_clock(frames: list[pl.DataFrame], clocks: Iterable[Clock]) -> pl.DataFrame:
    clocks = list(clocks)
    return pl.concat([apply_clocks(frame, clocks) for frame in frames])


def _joined(rows: pl.DataFrame, more: pl.DataFrame) -> pl.DataFrame:
    return in_order(pl.concat([rows, more], how="diagonal_relaxed"), "rank", "start_ns") if len(more) else rows
