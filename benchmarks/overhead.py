"""What recording costs a training job: pairs of jobs, one under torchrun and one under `rankscope run`, in turns.

    python benchmarks/overhead.py --pairs 10
    python benchmarks/overhead.py --pairs 10 --ranks 1 --job benchmarks/gpu_step.py

The job is `examples/train_transformer.py`, or another that reads its own clocks after every step. The two jobs of a
pair are there at the same time, and one of them is always stopped (SIGSTOP, with its agent): what else the machine
does, which changes from minute to minute, is the same for both. Of each job the mean over all ranks and all steps
after the warm-up counts, but those in which it was stopped or had just been continued (and the median step, which a
busy machine disturbs less); of the pairs the mean difference, with its 95 % interval (Student's t). The typical
difference of the step time is that of Hodges and Lehmann with the interval of Wilcoxon's test: a step that the machine
held up for long moves the mean, and hardly this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import psutil

from rankscope.collectors.native import collectives_hook

SCRIPT = Path(__file__).parents[1] / "examples/train_transformer.py"
PLAIN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
RANKSCOPE = str(Path(sys.executable).with_name("rankscope"))
RECORDED = [RANKSCOPE, "run", "--no-report", "--profile-first", "0", "--standalone"]
QUANTITIES = ("step time", "main thread's CPU", "process's CPU", "median step")
SETTLE_NS = 300_000_000  # after it was continued: caches and clocks are cold


class Running(NamedTuple):
    """A job, and when it was not stopped."""

    process: psutil.Popen
    folder: Path
    turns: list[tuple[int, int]]

    def send(self, *, stop: bool) -> None:
        """Stop or continue all that the job consists of; twice, since a process may just have started another."""
        for _ in range(2):
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (self.process, *self.process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend() if stop else process.resume()

    def turn(self, seconds: float) -> bool:
        """Let the job run for so long; return whether it has ended."""
        self.send(stop=False)
        began = time.perf_counter_ns()
        with contextlib.suppress(psutil.TimeoutExpired):
            self.process.wait(seconds)
        self.turns.append((began + SETTLE_NS, time.perf_counter_ns()))
        self.send(stop=True)
        return self.process.poll() is not None

    def result(self, args: argparse.Namespace) -> np.ndarray:
        """Each of QUANTITIES per step, ms."""
        if self.process.returncode:
            raise SystemExit((self.folder / "log").read_text()[-2000:])
        clocks = [np.array(json.loads(file.read_text())) for file in (self.folder / "timings").iterdir()]
        assert len(clocks) == args.ranks
        kept = [self.steps_of(clock[args.warmup :]) for clock in clocks]
        return np.append(np.concatenate(kept).mean(axis=0), np.median(np.concatenate(kept)[:, 0])) / 1e6

    def steps_of(self, clock: np.ndarray) -> np.ndarray:
        """What the steps took that lie within one turn, (steps, 3)."""
        within = [(clock[:-1, 0] >= began) & (clock[1:, 0] <= ended) for began, ended in self.turns]
        return np.diff(clock, axis=0)[np.any(within, axis=0)]


def pair(number: int, args: argparse.Namespace, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Run one job without and one with rankscope, in turns; QUANTITIES of each."""
    jobs = []
    for name, launcher in (("without", PLAIN), ("with", RECORDED)):
        at = folder / name
        at.mkdir()
        command = [*launcher, "--nproc-per-node", args.ranks, *args.job, "--steps", args.steps, "--timings", "timings"]
        with (at / "log").open("wb") as log:
            process = psutil.Popen([str(word) for word in command], cwd=at, stdout=log, stderr=subprocess.STDOUT)
        jobs.append(Running(process, at, []))
        jobs[-1].send(stop=True)
    left = jobs if number % 2 == 0 else jobs[::-1]
    while left:
        left = [job for job in left if not job.turn(args.turn_s)]
    without, recorded = (job.result(args) for job in jobs)
    return without, recorded


def module_of(script: Path) -> ModuleType:
    """The script as the module `job`, which its `main` has not run."""
    spec = spec_from_file_location("job", script)
    assert spec
    assert spec.loader
    sys.modules["job"] = job = module_from_spec(spec)
    spec.loader.exec_module(job)
    return job


def half_width_95(differences: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of the mean, by Student's t (expansion in 1/n, good to 0.5 % from 6 pairs on)."""
    z, freedom = 1.95996, len(differences) - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return np.asarray(t * differences.std(axis=0, ddof=1) / math.sqrt(len(differences)))


def typical_with_half_width_95(differences: np.ndarray) -> tuple[float, float]:
    """Return the median of the means of any two differences, and half of its 95 % interval (from 10 pairs on)."""
    n = len(differences)
    one, other = np.triu_indices(n)
    means = np.sort((differences[one] + differences[other]) / 2)
    below = max(int(n * (n + 1) / 4 - 1.95996 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24)), 0)
    return float(np.median(means)), float(means[-1 - below] - means[below]) / 2


def print_table(plain: np.ndarray, recorded: np.ndarray) -> None:
    """Print each of QUANTITIES, (pairs, quantities) in ms: the means, their difference, and its share of the step."""
    mean, half_width = (recorded - plain).mean(axis=0), half_width_95(recorded - plain)
    print(f"{'':20}{'without':>10}{'with':>10}{'difference':>12}{'95 %':>9}{'of the step':>13}")
    for i, quantity in enumerate(QUANTITIES):
        print(
            f"{quantity:20}{plain[:, i].mean():10.3f}{recorded[:, i].mean():10.3f}{mean[i]:+12.3f}{half_width[i]:>9.3f}"
            f"{mean[i] / plain[:, 0].mean():+12.2%} ± {half_width[i] / plain[:, 0].mean():.2%}"
        )
    typical, within = typical_with_half_width_95(recorded[:, 0] - plain[:, 0])
    share = 1 / plain[:, 0].mean()
    print(f"{'typical step time':40}{typical:+12.3f}{within:>9.3f}{typical * share:+12.2%} ± {within * share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start of each job that do not count")
    parser.add_argument(
        "--turn-s", type=float, default=3, help="seconds for which one job runs and the other is stopped"
    )
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--job", nargs=argparse.REMAINDER, help="another script, with its options; goes last")
    args = parser.parse_args()
    name = Path(args.job[0]).stem if args.job else args.parallel
    args.job = [Path(args.job[0]).resolve(), *args.job[1:]] if args.job else [SCRIPT, "--parallel", args.parallel]

    collectives_hook.build()  # else the agent of the first pair would build it beside the job
    pairs = []
    for number in range(args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            pairs.append(pair(number, args, Path(folder)))
        plain, recorded = pairs[-1]
        print(f"pair {number + 1}: {plain[0]:.2f} ms without, {recorded[0]:.2f} ms with", file=sys.stderr, flush=True)

    print(f"{name}, {args.ranks} ranks, {args.pairs} pairs, steps {args.warmup + 1} to {args.steps}; ms per step")
    print_table(*np.array(pairs).transpose(1, 0, 2))


if __name__ == "__main__":
    main()
