"""Cost of `rankscope export` for a large run, beyond reading it: CPU time, memory and size, beside Python's json.

    python benchmarks/export.py TRACE.json.gz --size-mb 1500

The trace, of one rank, is repeated up to a size. json writes the run's parts of the step as Chrome's trace events.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from isal import igzip

from large_trace import write_large
from rankscope.analysis.diagnosis.conclude import report_on
from rankscope.analysis.report import perfetto
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline, build_timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--size-mb", type=float, default=1500)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.pt.trace.json.gz"
        write_large(options.trace, large, int(options.size_mb * 1e6))
        trace = Trace.open(large)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline).report
        held, gaps, file = most_held_mb(), trace.table("gaps").collect(), Path(folder) / "large.pftrace.gz"
        begun = time.process_time()
        with igzip.open(file, "wb", compresslevel=2) as packed:
            events = perfetto.write(timeline, timeline, report, gaps, packed)
        took = time.process_time() - begun
        print(f"report: {held:,.0f} MB at most")
        print(f"export: {events:,} events, {took:.1f} s of CPU more, {events / took:,.0f} events per s, ", end="")
        print(f"{most_held_mb() - held:,.0f} MB more, file of {file.stat().st_size / 1e6:,.1f} MB")
        rows, took = by_json(timeline)
        print(f"json, not packed: {rows / took:,.0f} rows per s")


def by_json(timeline: Timeline) -> tuple[int, float]:
    """How many rows, and the CPU time."""
    begun = time.process_time()
    rows = timeline.phases.to_dicts()
    same = {"ph": "X", "tid": 1, "cat": "phases"}
    json.dumps(
        [
            same
            | {"pid": row["rank"], "name": row["part"], "args": {"step": row["step"], "label": row["label"]}}
            | {"ts": row["start_ns"] / 1000, "dur": (row["end_ns"] - row["start_ns"]) / 1000}
            for row in rows
        ]
    )
    return len(rows), time.process_time() - begun


def most_held_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    main()
