"""The server's state: the runs that were opened, read and analyzed in threads, and refreshed while a job goes on.

This is the app's only state. Browsers hold keys: a run is "" (the first one given) or "2".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import polars as pl

from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.diagnosis.kept_report import KeptReport
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.stretches import steps_of, with_whole_run
from rankscope.analysis.metrics.rank_placement import rank_places
from rankscope.analysis.model.address import run_folder
from rankscope.analysis.model.finding import Report
from rankscope.analysis.model.tables import as_texts
from rankscope.analysis.runs.deep_windows import with_windows
from rankscope.analysis.runs.fingerprint import files_fingerprint
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import text
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.analysis.timeline.clocks import apply_clocks
from rankscope.analysis.timeline.nccl_durations import nccl_durations, nccl_waits
from rankscope.collectors.schema import TABLES
from rankscope.dashboard.run import Run
from rankscope.dashboard.timeline.counter_lanes import CounterLane, counter_lanes
from rankscope.dashboard.timeline.lane_cache import build_or_store, load
from rankscope.dashboard.timeline.lanes import build_scene
from rankscope.dashboard.timeline.scene import Scene
from rankscope.dashboard.whatif_session import path as critical_path
from rankscope.errors import BadInput

__all__ = ["STAGES", "Progress", "State"]

STAGES = (text("Reading the run"), text("Matching operations and cutting up the steps"), text("Running the detectors"))
_POLL_S = 2.0  # how often a run that goes on is looked at
_REST = 3.0  # times the last analysis took, between two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run. `version` counts up whenever there is something new to show; `error` is one line."""

    name: str
    stage: int = 0
    version: int = 0
    error: str = ""
    report: Report | None = None  # kept of an earlier time, while the run is read
    sought: bool = False  # whether one was looked for
    run: Run | None = None
    scene: Scene | None = None  # made while the run is judged, it may come later


class State:
    """The runs of one server. Reading is safe from any thread: what is held are frozen values, exchanged whole."""

    def __init__(self, paths: Sequence[Path], *, price: float | None = None) -> None:
        keys = ["", *(str(number) for number in range(2, len(paths) + 1))]
        self._paths = dict(zip(keys, paths, strict=True))
        self._progress = {key: Progress(name=path.resolve().name) for key, path in self._paths.items()}
        self._price = price  # of an hour of a rank, as `diagnose` has it
        self._ended = threading.Event()
        self._changed = threading.Condition()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._paths)

    def progress(self, run: str) -> Progress:
        """Raise KeyError for a run that was not opened here."""
        return self._progress[run]

    def ready(self, run: str) -> Run | None:
        """Return the run, or None while it is read, if it cannot be read, or if there is no such run."""
        progress = self._progress.get(run)
        return None if progress is None else progress.run

    def scene(self, run: str) -> Scene | None:
        """Return the run's lanes."""
        return self._progress[run].scene

    def report(self, run: str) -> Report | None:
        progress = self._progress[run]
        return progress.report if progress.run is None else progress.run.report

    def kept_report(self, run: str, timeout_s: float) -> Report | None:
        """Return the run's report, or the one kept of an earlier time, as soon as it is known whether there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._progress[run].sought or self._progress[run].error, timeout_s)
        return self.report(run)

    def critical_path(self, run: str) -> pl.DataFrame | None:
        """rank, start_ns, end_ns of the critical path; None where the run cannot be replayed."""
        loaded = self._progress[run].run
        return None if loaded is None else critical_path(loaded)

    def counters(self, run: str) -> Sequence[CounterLane] | None:
        """Return the nodes' counters that the timeline draws."""
        loaded = self._progress[run].run
        return None if loaded is None else _counters(loaded)

    def start(self) -> None:
        """Read the runs, each in a thread of its own."""
        for key in self._paths:
            threading.Thread(target=self._follow, args=(key,), name=f"run {key}", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until every run is ready or has failed. Raises TimeoutError."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(p.run is not None or p.error for p in self._progress.values()), timeout_s
            )
        if not done:
            raise TimeoutError(f"not read within {timeout_s} s")

    def _follow(self, key: str) -> None:
        """Read a run, and again when its files have changed, until its job has ended."""
        path = run_folder(self._paths[key])
        seen = None
        rest_s = 0.0
        while not self._ended.wait(rest_s):
            now = files_fingerprint(path)
            if now != seen:
                seen, began = now, time.monotonic()
                self._read(key, now)
                rest_s = max(_POLL_S, _REST * (time.monotonic() - began))
            loaded = self._progress[key].run
            may_begin = (path / "run").is_dir()  # a job that has just been started has no rank yet
            if not (may_begin if loaded is None else loaded.running):
                return

    def _read(self, key: str, files: str) -> None:
        """`files` is the fingerprint of what is there to be read."""
        path, options = self._paths[key], ReportOptions(price=self._price)
        try:
            self._set(key, stage=0)
            place = KeptReport([path], options)
            known = place.load()
            self._set(key, report=known, sought=True)
            trace = Trace.open(path)
            if trace.stretch:  # which steps are read of a large run depends on the memory that is free
                files += f" {trace.stretch.first}-{trace.stretch.last}"
            stored = load(path, files)
            if stored is not None:
                self._set(key, scene=stored)
            running = any(launch.get("state") == "running" for launch in trace.run.values())
            self._set(key, stage=1)
            timeline = build_timeline(trace)
            self._set(key, stage=2)
            with ThreadPoolExecutor(1) as beside:
                scene = beside.submit(lambda: stored or _lanes(path, files, with_windows(timeline, trace), running))
                report, last = known, None
                if report is None:
                    last = report_on(trace, timeline, options)
                    report = last.report
                run = Run(
                    key=key,
                    name=self._progress[key].name,
                    trace=trace,
                    timeline=timeline,
                    report=report,
                    tables=_tables(trace, timeline),
                    running=running,
                    read_at=time.time(),
                    steps=steps_of(trace, options) if known else None,
                    pending=last is not None and trace.stretch is not None and not trace.stretch.asked,
                )
                if self._progress[key].run is None:
                    self._set(key, run=run)  # the verdict does not wait for the lanes, nor for other steps
                if last:
                    whole = with_whole_run(trace, last, timeline, options)
                    if run.pending:
                        run = replace(run, report=whole.report, steps=whole.steps, pending=False)
                    if whole.is_complete and trace.has_ended:
                        place.keep(whole.report)
                self._set(key, scene=scene.result())
        except BadInput as error:
            self._set(key, error=str(error))
        except Exception as error:  # the page must say so; a thread that dies would leave it waiting for ever
            self._set(key, error=f"reading {path} failed: {type(error).__name__}: {error}")
            raise
        else:
            if self._progress[key].run is not run or self._progress[key].error:
                self._set(key, run=run, error="")

    def _set(self, key: str, **changes: object) -> None:
        with self._changed:
            before = self._progress[key]
            # A run on screen stays there until the next one is ready: its stages are no news, nor are its lanes.
            is_news = before.run is None or not changes.keys() & {"stage", "scene"}
            version = before.version + 1 if is_news else before.version
            self._progress[key] = replace(before, version=version, **changes)  # type: ignore[arg-type]
            self._changed.notify_all()


@lru_cache(maxsize=4)
def _counters(run: Run) -> list[CounterLane]:
    return counter_lanes(run.timeline)


def _lanes(path: Path, files: str, timeline: Timeline, running: bool) -> Scene:
    """Return the lanes; those of a running job are not stored, as its tables change."""
    return build_scene(timeline) if running else build_or_store(path, files, timeline)


def _tables(trace: Trace, timeline: Timeline) -> dict[str, pl.DataFrame]:
    """Every table that has rows, all times on one clock."""
    found = {name: value for name in TABLES if isinstance(value := getattr(timeline, name, None), pl.DataFrame)}
    found |= {name: getattr(timeline, name) for name in ("phases", "breakdown", "waits")}
    for name in ("memory", "clocks", "gaps", "nccl_calls", "nccl_events", "flight_records", "ras"):
        found[name] = apply_clocks(trace.table(name).collect(), timeline.clocks)
    found["nccl_waits"] = nccl_waits(timeline.collectives, found["nccl_calls"], found["nccl_events"])
    found["flight_records"] = nccl_durations(timeline.collectives, timeline.groups, found["flight_records"])
    found["places"] = rank_places(trace.run)
    return {name: as_texts(frame) for name, frame in sorted(found.items()) if len(frame)}
