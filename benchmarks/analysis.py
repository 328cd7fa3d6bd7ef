"""Cost of the analysis commands: CPU time, memory, and rows per CPU second.

    python benchmarks/analysis.py startup [--before CHECKOUT]
    python benchmarks/analysis.py rows --ranks 64 --steps 600 [--before CHECKOUT]
    python benchmarks/analysis.py grows --ranks 64 --steps 6000 [--before CHECKOUT]
    python benchmarks/analysis.py trace TRACE.json.gz --size-mb 606 [--before CHECKOUT]
    python benchmarks/analysis.py files FOLDER --ranks 4 --size-mb 150 [--before CHECKOUT]

`startup` is a command with nearly nothing to do: 4 ranks, 40 steps. `rows` is a report on a simulated
FSDP job. Of both reports, also one that finds the one before in the run's folder. `grows` is two reports on such a job
while it goes on, after nine tenths of its steps and a hundredth of them later. `trace` is
a report on a profiler's trace that is repeated up to the size, `files` one on those of several ranks (the first in the
folder), after which one and two workers of a Dask cluster on this machine scan them.

Every command runs in a process of its own, its children's time included, in alternation with the same one of another
checkout (compiled in place) where that is given; the least of the rounds counts, since other work only ever adds to it.
Memory below that of this script itself (some 90 MB) is not seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "faults"))

HERE = Path(__file__).resolve().parent.parent


class Cost(NamedTuple):
    cpu_s: float
    wall_s: float
    memory: int  # bytes, the most of any process


def cost_of(arguments: list[str], checkout: Path, compiled: Path) -> Cost:
    """What `rankscope` with these arguments takes; its modules are compiled once, as an installation's are."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout / "src"),
        "PYTHONPYCACHEPREFIX": str(compiled / checkout.name),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "rankscope", *arguments], stdout=subprocess.DEVNULL, env=environment
    )
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rankscope {' '.join(arguments)} of {checkout} failed")
    return Cost(used.ru_utime + used.ru_stime, time.perf_counter() - began, used.ru_maxrss * 1024)


def compare(
    commands: list[list[str]],
    checkouts: list[Path],
    rounds: int,
    rows: int | None = None,
    forget: Path | None = None,
) -> None:
    """Print a line for each command and checkout; the folder `forget` is removed before each command."""
    with tempfile.TemporaryDirectory() as compiled:
        for arguments in commands:
            costs: dict[Path, list[Cost]] = {checkout: [] for checkout in checkouts}
            for _ in range(rounds):
                for checkout, of in costs.items():
                    if forget is not None:
                        shutil.rmtree(forget, ignore_errors=True)
                    of.append(cost_of(arguments, checkout, Path(compiled)))
            for checkout, of in costs.items():
                cpu_s, wall_s, memory = (min(values) for values in zip(*of, strict=True))
                each = f"  {cpu_s * 1e6 / rows:6.2f} us a row" if rows else ""
                name = "now" if checkout == HERE else "before"
                print(
                    f"{arguments[0]:8} {name:8} CPU {cpu_s:7.2f} s  wall {wall_s:7.2f} s  {memory / 1e6:6,.0f} MB{each}"
                )


def again(command: list[str], checkouts: list[Path], rounds: int, rows: int | None = None) -> None:
    """Print the same for each checkout where the run's folder has the report that it made before."""
    print("with the report that was made before:")
    for checkout in checkouts:  # one after the other: what one has kept is of no use to the other
        compare([command], [checkout], rounds + 1, rows)


def simulated(folder: Path, ranks: int, steps: int) -> Path:
    """The run folder of a simulated FSDP job."""
    from record import write
    from simulate import Job, healthy_resources, run

    job = Job(parallel="fsdp", ranks=ranks, steps=steps, seed=1)
    return write(run(job, healthy_resources(job)), folder)


def report_while_it_grows(run: Path, folder: Path, checkouts: list[Path]) -> None:
    """Print what two reports on the run take, at 0.90 and 0.91 of its time, for each checkout."""
    from rankscope.analysis.runs.trace import Trace
    from record import as_it_was

    trace = Trace.open(run)
    assert trace.reader.folder
    seconds = (trace.reader.folder.extent("regions", 0)["last"].max() - trace.run[0]["start_ns"]) / 1e9
    for checkout in checkouts:
        shutil.rmtree(folder, ignore_errors=True)
        for share in (0.9, 0.91):
            as_it_was(run, folder, share * seconds)
            print(f"after {share * seconds:.0f} s:")
            compare([["report", str(folder), "--json", os.devnull]], [checkout], 1)


def large_files(source: Path, folder: Path, ranks: int, size_mb: int) -> Path:
    """The folder, with the first traces of the source, each repeated up to the size."""
    from large_trace import write_large

    folder.mkdir()
    found = sorted(source.glob("*.json.gz"))[:ranks]
    size = sum(write_large(file, folder / file.name, size_mb * 1_000_000) for file in found)
    print(f"{len(found)} files, {size / 1e6:,.0f} MB of JSON")
    return folder


def scan_s(files: Path, workers: int, rounds: int) -> list[float]:
    """Seconds in which the files become tables on so many workers."""
    from distributed import LocalCluster

    from rankscope.analysis.readers.dask_cluster import on_cluster
    from rankscope.analysis.runs.trace import Trace

    took = []
    with LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster:
        for _ in range(rounds + 1):  # the first one imports
            with on_cluster(cluster.scheduler_address):
                began = time.perf_counter()
                Trace.open(files)
                took.append(time.perf_counter() - began)
    return took[1:]


def rows_of(run: Path) -> int:
    from rankscope.analysis.runs.trace import Trace

    trace = Trace.open(run)
    return sum(trace.reader.rows(name) for name in trace.tables())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("startup", "rows", "grows", "trace", "files"))
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--before", type=Path, help="another checkout, whose commands run in alternation")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size-mb", type=int, default=606)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    checkouts = [*([asked.before.resolve()] if asked.before else []), HERE.resolve()]
    with tempfile.TemporaryDirectory() as folder:
        if asked.part == "startup":
            run = simulated(Path(folder, "run"), 4, 40)
            commands = [["--help"], ["ls", str(run)], ["report", str(run)]]
            compare(commands, checkouts, asked.rounds + 1, forget=run / "summary")  # the first one compiles
            again(commands[-1], checkouts, asked.rounds)
        elif asked.part == "rows":
            run = simulated(Path(folder, "run"), asked.ranks, asked.steps)
            rows = rows_of(run)
            print(f"{rows:,} rows")
            command = ["report", str(run), "--json", os.devnull]
            compare([command], checkouts, asked.rounds, rows, forget=run / "summary")
            again(command, checkouts, asked.rounds, rows)
        elif asked.part == "grows":
            run = simulated(Path(folder, "run"), asked.ranks, asked.steps)
            report_while_it_grows(run, Path(folder, "grows"), checkouts)
        elif asked.part == "files":
            files = large_files(asked.trace, Path(folder, "traces"), asked.ranks, asked.size_mb)
            compare([["report", str(files), "--json", os.devnull]], checkouts, asked.rounds)
            for workers in (1, 2):
                print(f"scan, {workers} Dask workers: wall {min(scan_s(files, workers, asked.rounds)):.2f} s")
        else:
            from large_trace import write_large

            large = Path(folder, "rank0.json.gz")
            print(f"{write_large(asked.trace, large, asked.size_mb * 1_000_000) / 1e6:,.0f} MB of JSON")
            compare([["report", str(large), "--json", os.devnull]], checkouts, asked.rounds)


if __name__ == "__main__":
    main()
