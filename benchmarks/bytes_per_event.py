"""How many bytes an event takes on disk, in an event-dense job, and how many events a second the agent can take: where
all is kept, and where the recording may take a quarter of that.

    python benchmarks/bytes_per_event.py

The job is `examples/train_transformer.py` without emulated device work: steps of few ms, an event every 0.3 ms or so.
The agent's speed is measured with the records of such a job, from the ring to the written Arrow file, on one core.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from threading import get_ident

from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.agent import ring_reader
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.retention import Retention
from rankscope.collectors.in_rank import ring_writer
from rankscope.collectors.schema import RING_SLOTS, RecordType

SCRIPT = Path(__file__).parents[1] / "examples/train_transformer.py"
RANKSCOPE = str(Path(sys.executable).with_name("rankscope"))


def bytes_on_disk(ranks: int, steps: int) -> None:
    """Run the job and print rows and bytes of each table of its ranks."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["--nproc-per-node", str(ranks), str(SCRIPT), "--steps", str(steps), "--device-ms", "0"]
        subprocess.run([RANKSCOPE, "run", "--no-report", "--out", "run", *job], cwd=folder, check=True)
        size_bytes: dict[str, int] = defaultdict(int)
        for file in Path(folder, "run").glob("*/rank=*/*.arrow"):
            size_bytes[file.parts[-3]] += file.stat().st_size
        trace = Trace.open(Path(folder, "run"))
        rows = {table: trace.table(table).collect().height for table in trace.tables() if table in size_bytes}
    print(f"{ranks} ranks, {steps} steps")
    print(f"{'':14}{'rows':>10}{'bytes':>12}{'bytes per row':>16}")
    for table, count in rows.items():
        print(f"{table:14}{count:10}{size_bytes[table]:12}{size_bytes[table] / max(count, 1):16.1f}")
    events = rows["regions"] + rows["collectives"]
    total = sum(size_bytes.values())
    print(f"all tables of the ranks, per event (region or collective): {total / events:.1f} bytes of {events} events")


def fill(target: ring_writer.Ring, number: int) -> None:
    """Write a step's worth of records: 8 collectives with their ends, 5 regions, on a clock that moves on."""
    now = time.perf_counter_ns() + number * 1_000_000
    for seq in range(8):
        start = now + seq * 90_000 + (number * 7919 + seq * 104_729) % 20_000
        group_id, size_bytes = 1 << 60, 4096 * (1 + seq % 3)
        written = target.write(RecordType.COLLECTIVE, 1, 2, number, start, start + 31_000, group_id, size_bytes, 1)
        target.write(RecordType.DONE, 0, 0, 0, start + 70_000 + start % 9_000, written, 0, 0, 0)
    for kind in range(5):
        start = now + kind * 150_000 + (number * 7919 + kind * 15_485) % 20_000
        target.write(RecordType.REGION, kind, 0, kind, start, start + 120_000 + start % 7_000, get_ident(), -1, -1)


def agent_speed(rings: int, most_bytes: int = 0) -> int:
    """Fill a ring `rings` times, and print what reading it, making columns and writing Arrow files costs.

    Returns the bytes on disk, which may be no more than `most_bytes` if that is not 0.
    """
    target = ring_writer.Ring()
    source = ring_reader.Ring(target.fd)
    threads = ring_reader.Threads(get_ident())
    spent_ns, pause_ns, events, number = 0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        partition = Partition(RunFolder(Path(folder)), "rank=00000", "a0-")
        retention = Retention(most_bytes)
        retention.watch(partition)
        for _ in range(rings):
            before = number
            while (number - before + 1) * 21 < RING_SLOTS:
                fill(target, number)
                number += 1
            start_ns = time.process_time_ns()
            for table, columns in ring_reader.columns_by_table(source.read(time.perf_counter_ns()), threads).items():
                partition.add(table, columns)
            partition.flush()
            written_ns = time.process_time_ns()
            retention.decide()
            retention.work()
            pause_ns = max(pause_ns, time.process_time_ns() - written_ns)
            spent_ns += time.process_time_ns() - start_ns
            events += (number - before) * 13
        start_ns = time.process_time_ns()
        partition.close()
        spent_ns += time.process_time_ns() - start_ns
        size_bytes = partition.size_bytes
        reduced = sum(
            p.size_bytes for table in ("regions", "collectives") for p in partition.sealed(table) if p.reduced
        )
    os.close(target.fd)
    kept = f", {size_bytes / 1e6:.1f} MB on disk"
    if most_bytes:
        kept += f" of at most {most_bytes / 1e6:.1f}: {reduced / 1e6:.2f} MB are lengths of older steps"
        kept += f"; the longest pause is {pause_ns / 1e6:.0f} ms"
    speed = events / (spent_ns / 1e9) / 1e6
    print(f"agent, ring to sealed Arrow files: {speed:.2f} M events per CPU-second, {number} steps{kept}")
    return size_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rings", type=int, default=40)
    args = parser.parse_args()
    bytes_on_disk(args.ranks, args.steps)
    everything = agent_speed(args.rings)
    agent_speed(args.rings, everything // 4)


if __name__ == "__main__":
    main()
