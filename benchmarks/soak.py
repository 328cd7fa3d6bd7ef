"""Whether a job of very many collectives stays unharmed while windows open, ranks fork and the agent is killed.

    python benchmarks/soak.py                     # 4 ranks × 1,000,000 collectives, about an hour on 2 cores
    python benchmarks/soak.py --steps 100 --kill-agent

The job is many_collectives.py, with a fork every 20 steps; a deep window of two steps is asked for every `--window-s`.
Prints how the job ended, the memory that the agent and a rank held over time, and of how many collectives there are
rows: what is missing must be counted in `gaps`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import polars as pl
import psutil

import rankscope

JOB = Path(__file__).with_name("many_collectives.py")
RANKSCOPE = [sys.executable, "-m", "rankscope"]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000, help="of 1,000 collectives each")
    parser.add_argument("--window-s", type=float, default=120, help="seconds from one deep window to the next; 0: none")
    parser.add_argument("--kill-agent", action="store_true", help="in the middle")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, job = Path(folder, "run"), [JOB, "--steps", args.steps, "--forks", 20]
        launch = [*RANKSCOPE, "run", "--no-report", "--out", out, "--standalone", "--nproc-per-node", args.ranks, *job]
        began = time.monotonic()
        with Path(folder, "output").open("w") as to:
            process = psutil.Popen([str(word) for word in launch], stdout=to, stderr=subprocess.STDOUT)
            held = watch(process, out, args)
        seconds = time.monotonic() - began
        done = f"{args.ranks} ranks × {args.steps * 1000:,} collectives"
        print(f"exit status {process.wait()} after {seconds:.0f} s, {done}")
        for name, sizes in held.items():
            n = max(len(sizes) // 10, 1)
            early, late = (statistics.median(part) for part in (sizes[n : 2 * n], sizes[-2 * n : -n]))
            print(f"memory of {name}: {early:.0f} MiB early, {late:.0f} late, {max(sizes):.0f} at most")
        count_rows(out, args)


def watch(process: psutil.Popen, out: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return MiB per second of the agent and the first rank, until the job ends."""
    held: dict[str, list[float]] = {"the agent": [], "a rank": []}
    next_window = time.monotonic() + args.window_s
    killed = not args.kill_agent
    while process.poll() is None:
        time.sleep(1)
        found = {"the agent": "rankscope.collectors.agent.loop", "a rank": str(JOB)}
        for child in process.children(recursive=True):
            try:
                line = child.cmdline()
                for name in [
                    name for name, word in found.items() if word in line and "torch.distributed.run" not in line
                ]:
                    del found[name]
                    held[name].append(child.memory_info().rss / MIB)
                    if name == "the agent" and not killed and len(held[name]) > args.steps // 4:
                        killed = True
                        child.kill()
            except psutil.Error:
                continue  # it has ended
        if args.window_s and time.monotonic() > next_window:
            next_window += args.window_s
            subprocess.run([*RANKSCOPE, "trigger", str(out), "--count", "2"], capture_output=True, timeout=60)
    return held


def count_rows(out: Path, args: argparse.Namespace) -> None:
    run = rankscope.open(out)
    rows = run.table("collectives").filter(pl.col("op") == "allreduce").group_by("rank").len().sort("rank").collect()
    gaps = run.table("gaps").group_by("table", "why").agg(pl.len(), pl.col("count").sum()).sort("len").collect()
    print(
        "rows of all_reduce by rank:",
        *(f"{rank}: {count:,}" for rank, count in rows.rows()),
        f"of {args.steps * 1000:,}",
    )
    for table, why, times, count in gaps.rows():
        print(f"gap: {table}: {why} ({times} times, {count or 0:,} records)")


if __name__ == "__main__":
    main()
