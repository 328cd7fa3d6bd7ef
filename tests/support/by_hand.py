"""A run in memory whose ranks, steps and lengths are written down."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.schema import TABLES

MS = 1_000_000
STEPS = 12  # the first 2 are warm-up


class Tables:
    """A run that is in memory: rows by table, as a reader gives them."""

    folder = None  # it lies in none

    def __init__(self, rows):
        self.frames = {
            name: pl.DataFrame(rows.get(name, []), schema_of(name), strict=False, infer_schema_length=None)
            for name in TABLES
        }

    def tables(self):
        return tuple(name for name, frame in self.frames.items() if len(frame))

    def read(self, name):
        return self.frames[name]

    def rows(self, name):
        return len(self.frames[name])

    def gaps(self):
        return []

    def cannot(self):
        return {}


def run(backward_ms, *, world_size=None, device="cpu", gaps=(), steps=STEPS, recorded=True, collections=()):
    """A run whose ranks compute 60 ms forward, then backward as given, reduce in 10 ms and optimize in 10 ms.

    Backward is a number, or a list that is gone through again and again. Those of `collections`, (rank, step), collect
    garbage for 30 ms of it.
    """
    cycles = {rank: own if isinstance(own, list) else [own] for rank, own in backward_ms.items()}
    last = [max(own[step % len(own)] for own in cycles.values()) for step in range(steps)]
    begins = [sum(60 + each + 10 + 10 for each in last[:step]) for step in range(steps)]
    rows = {name: [] for name in TABLES} | {"gaps": list(gaps)}
    for rank, cycle in cycles.items():
        by = {"rank": rank, "node": 0, "attempt": 0}
        rows["ranks"].append(
            by | {"start_ns": 0, "local_rank": rank, "world_size": world_size or len(backward_ms), "device": device}
        )
        rows["groups"].append(by | {"start_ns": 0, "group_id": 7, "name": "0", "backend": "gloo", "members": "0-3"})
        rows["groups"][-1]["members"] = ",".join(str(r) for r in backward_ms)
        for step in range(steps):
            at = begins[step]
            arrived, done = at + 60 + cycle[step % len(cycle)], at + 60 + last[step] + 10

            def region(kind, start, end, by=by):
                span = {"start_ns": start * MS, "end_ns": end * MS, "kind": kind, "name": kind, "thread": 0}
                rows["regions"].append(by | span)

            region("user", at, at + 1)
            region("backward", at + 60, arrived)
            if recorded:
                region("wait", arrived, done)
            if (rank, step) in collections:
                region("gc", at + 60, at + 90)
            region("optimizer", done, done + 10)
            call = {
                "start_ns": arrived * MS,
                "issued_ns": arrived * MS,
                "end_ns": done * MS,
                "group_id": 7,
                "seq": step,
            }
            what = {"op": "allreduce", "dtype": "float32", "is_async": True, "peer": -1, "tag": 0, "size_bytes": 4}
            if recorded:
                rows["collectives"].append(by | call | what | {"thread": 0})
    return Trace(paths=("by hand",), source="native", run={}, reader=Tables(rows))


def not_checked(report):
    return {n.detector: n.why for n in report.not_checked}
