"""Whether a job of very many collectives stays unharmed while windows open, ranks fork and the agent is killed.

    python benchmarks/soak.py --across 10                # 4 ranks × 1,000,000 collectives, 18 min on 2 cores
    python benchmarks/soak.py --across 10 --kill-agent
    python benchmarks/soak.py --steps 10 --window-s 10 --minutes 10

The job is many_collectives.py, with a fork every 20 steps (without `--across` all its collectives are of all ranks:
4 ranks on 2 cores take 8 ms for each, two hours in all); a deep window of two steps is asked for every `--window-s`.
Prints how the job ended, the memory that the agent and a rank held over time, and of how many collectives there are
rows: what is missing must be counted in `gaps`.

With `--minutes` jobs follow each other for that long, and one thing is done to each by a seed: its agent is killed at a
random second, its run folder is on a disk of 1 MB (as root), or nothing. The last line counts the jobs that ended well,
and the ranks that lack rows without a gap.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

import rankscope
from rankscope.analysis.readers.native.arrow_files import read_rows
from rankscope.collectors.schema import OPS

JOB = Path(__file__).with_name("many_collectives.py")
RANKSCOPE = [sys.executable, "-m", "rankscope"]
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000, help="of 1,000 collectives each")
    parser.add_argument("--across", type=int, default=1, help="collectives from one of all ranks to the next")
    parser.add_argument("--window-s", type=float, default=120, help="seconds from one deep window to the next; 0: none")
    parser.add_argument("--kill-agent", action="store_true", help="in the middle")
    parser.add_argument("--minutes", type=float, help="jobs one after the other, each disturbed at random")
    parser.add_argument("--seed", type=int, default=0, help="of what is done to which job")
    args = parser.parse_args()
    if args.minutes is None:
        soak(args, kill_at_s=args.steps // 4 if args.kill_agent else math.inf)
        return
    chance, began, counts = random.Random(args.seed), time.monotonic(), Counter[str]()
    longest_s = 20.0
    while time.monotonic() - began < 60 * args.minutes:
        fate = chance.choice(("agent killed", "disk full", "nothing"))
        print(f"-- {fate}", flush=True)
        job_began = time.monotonic()
        kill_at_s = chance.uniform(0, longest_s) if fate == "agent killed" else math.inf
        ended_well, unnamed = soak(args, kill_at_s=kill_at_s, small_disk=fate == "disk full")
        longest_s = time.monotonic() - job_began
        counts.update({fate: 1, "ended well": int(ended_well), "ranks that lack rows without a gap": unnamed})
    print(f"{time.monotonic() - began:.0f} s:", ", ".join(f"{what} {count}" for what, count in counts.items()))


@contextlib.contextmanager
def folder_of_runs(small_disk: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        is_mounted = small_disk and os.geteuid() == 0
        if is_mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            if is_mounted:
                subprocess.run(["umount", "-l", folder], check=True)


def soak(args: argparse.Namespace, *, kill_at_s: float, small_disk: bool = False) -> tuple[bool, int]:
    """Return whether the job ended well, and how many ranks lack rows without a gap."""
    with folder_of_runs(small_disk) as folder, tempfile.TemporaryFile() as output:
        out, job = folder / "run", [JOB, "--steps", args.steps, "--across", args.across, "--forks", 20]
        launch = [*RANKSCOPE, "run", "--no-report", "--out", out, "--standalone", "--nproc-per-node", args.ranks, *job]
        began = time.monotonic()
        process = psutil.Popen([str(word) for word in launch], stdout=output, stderr=subprocess.STDOUT)
        held = watch(process, out, args.window_s, kill_at_s)
        seconds, status = time.monotonic() - began, process.wait()
        print(f"exit status {status} after {seconds:.0f} s, {args.ranks} ranks × {args.steps * 1000:,} collectives")
        if status:
            output.seek(0)
            print(output.read()[-3000:].decode(errors="replace"))
        for name, sizes in held.items():
            n = max(len(sizes) // 10, 1)
            if len(sizes) > 2 * n:
                early, late = (statistics.median(part) for part in (sizes[n : 2 * n], sizes[-2 * n : -n]))
                print(f"memory of {name}: {early:.0f} MiB early, {late:.0f} late, {max(sizes):.0f} at most")
        return status == 0, count_rows(out, args)


def watch(process: psutil.Popen, out: Path, window_s: float, kill_at_s: float) -> dict[str, list[float]]:
    """Return MiB per second of the agent and the first rank, until the job ends; kill the agent after `kill_at_s`."""
    held: dict[str, list[float]] = {"the agent": [], "a rank": []}
    began = time.monotonic()
    next_window = began + window_s
    asked: list[subprocess.Popen[bytes]] = []
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
                    if name == "the agent" and time.monotonic() - began > kill_at_s:
                        kill_at_s = math.inf
                        child.kill()
            except psutil.Error:
                continue  # it has ended
        if window_s and time.monotonic() > next_window:
            next_window += window_s
            trigger = [*RANKSCOPE, "trigger", str(out), "--count", "2"]  # may wait long for ranks that have no agent
            asked.append(subprocess.Popen(trigger, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for waiting in asked:
        waiting.kill()
        waiting.wait()
    return held


def count_rows(out: Path, args: argparse.Namespace) -> int:
    """Print the rows of each rank and the gaps; return how many ranks lack rows and have no gap."""
    try:
        run = rankscope.open(out)
    except rankscope.RankscopeError as error:
        print(f"no run: {error}")
        return 0  # said by the launcher too
    found = {}  # in the files: the tables of a long run hold its last steps
    for folder in sorted((out / "collectives").glob("rank=*")):
        tables = [
            read_rows(file, closed=False)[0] for file in folder.glob("*.arrow")
        ]  # an agent's death leaves one open
        count = sum((table["op"].to_numpy() == OPS.index("allreduce")).sum() for table in tables if table)
        found[int(folder.name.removeprefix("rank="))] = count
    print(
        "rows of all_reduce by rank:",
        *(f"{rank}: {count:,}" for rank, count in found.items()),
        f"of {args.steps * 1000:,}",
    )
    said = run.gaps()
    gaps: dict[tuple[str, str], list[int]] = {}
    for gap in said:
        gaps.setdefault((gap.table, gap.why), []).append(gap.count or 0)
    for (table, why), counts in gaps.items():
        print(f"gap: {table}: {why} ({len(counts)} times, {sum(counts):,} records)")
    lacking = [rank for rank in range(args.ranks) if found.get(rank, 0) < args.steps * 1000]
    # A node's counters explain no lost row; its run that was not closed does.
    of_rows = [gap.rank for gap in said if gap.table in ("*", "collectives", "run")]
    return sum(rank not in of_rows and None not in of_rows for rank in lacking)


if __name__ == "__main__":
    main()
