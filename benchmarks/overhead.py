"""What recording costs a training job: pairs of jobs, one under torchrun and one under `rankscope run`, in turns.

    python benchmarks/overhead.py --pairs 30
    python benchmarks/overhead.py --pairs 30 --ranks 1 --job benchmarks/gpu_step.py

The job is `examples/train_transformer.py`, or another that reads its own clocks after every step. Of each job the mean
over all ranks and all steps after the warm-up counts (and the median step, which a busy machine disturbs less); of the
pairs the mean difference, with its 95 % interval (Student's t).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from rankscope.collectors import native_hook

SCRIPT = Path(__file__).parents[1] / "examples/train_transformer.py"
PLAIN = [sys.executable, "-m", "torch.distributed.run"]
RECORDED = [str(Path(sys.executable).with_name("rankscope")), "run", "--no-report"]
QUANTITIES = ("step time", "main thread's CPU", "process's CPU", "median step")


def measure(launcher: list[str], args: argparse.Namespace) -> np.ndarray:
    """Run one job; each of QUANTITIES per step, ms."""
    with tempfile.TemporaryDirectory() as folder:
        job = [*args.job, "--steps", str(args.steps), "--timings", "timings"]
        subprocess.run(
            [*launcher, "--nproc-per-node", str(args.ranks), *job], cwd=folder, check=True, capture_output=True
        )
        clocks = [json.loads(file.read_text()) for file in Path(folder, "timings").iterdir()]
    assert len(clocks) == args.ranks
    steps_ns = np.diff(np.array(clocks), axis=1)[:, args.warmup :]
    return np.append(steps_ns.mean(axis=(0, 1)), np.median(steps_ns[:, :, 0])) / 1e6


def half_width_95(differences: np.ndarray) -> np.ndarray:
    """Half of the 95 % interval of the mean, by Student's t (expansion in 1/n, good to 0.5 % from 6 pairs on)."""
    z, freedom = 1.95996, len(differences) - 1
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return np.asarray(t * differences.std(axis=0, ddof=1) / math.sqrt(len(differences)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start of each job that do not count")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--job", nargs=argparse.REMAINDER, help="another script, with its options; goes last")
    args = parser.parse_args()
    name = Path(args.job[0]).stem if args.job else args.parallel
    args.job = [Path(args.job[0]).resolve(), *args.job[1:]] if args.job else [SCRIPT, "--parallel", args.parallel]

    native_hook.build()  # else the agent of the first pair would build it beside the job
    pairs = []
    for number in range(args.pairs):
        # Which one goes first alternates, so that a machine that slows down favours neither.
        order = (PLAIN, RECORDED) if number % 2 == 0 else (RECORDED, PLAIN)
        first, second = (measure(launcher, args) for launcher in order)
        pairs.append((first, second) if number % 2 == 0 else (second, first))
        plain, recorded = pairs[-1]
        print(f"pair {number + 1}: {plain[0]:.2f} ms without, {recorded[0]:.2f} ms with", file=sys.stderr, flush=True)

    plain, recorded = np.array(pairs).transpose(1, 0, 2)
    mean, half_width = (recorded - plain).mean(axis=0), half_width_95(recorded - plain)
    print(f"{name}, {args.ranks} ranks, {args.pairs} pairs, steps {args.warmup + 1} to {args.steps}; ms per step")
    print(f"{'':20}{'without':>10}{'with':>10}{'difference':>12}{'95 %':>9}{'of the step':>13}")
    for i, quantity in enumerate(QUANTITIES):
        print(
            f"{quantity:20}{plain[:, i].mean():10.3f}{recorded[:, i].mean():10.3f}{mean[i]:+12.3f}{half_width[i]:>9.3f}"
            f"{mean[i] / plain[:, 0].mean():+12.2%} ± {half_width[i] / plain[:, 0].mean():.2%}"
        )


if __name__ == "__main__":
    main()
