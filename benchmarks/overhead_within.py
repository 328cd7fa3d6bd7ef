"""What recording costs a training job, within one: its collectors are taken out and put in again, in blocks of steps.

    python benchmarks/overhead_within.py --steps 1500
    python benchmarks/overhead_within.py --steps 1500 --job examples/train_transformer.py --parallel fsdp2
    python benchmarks/overhead_within.py --steps 200 --block 4 --job benchmarks/many_collectives.py
    python benchmarks/overhead_within.py --ranks 1 --steps 800 --job benchmarks/gpu_step.py

Two jobs differ by more than recording costs: where their memory lies, which core each thread gets. So one job under
`rankscope run` has its hooks in for a block of steps, out for two, in for two, and so on, on all ranks alike; without
them its agent is stopped (SIGSTOP) as well. What is left are the modules that were loaded. (overhead.py compares whole
jobs.) Each block with hooks is compared with one beside it, in turns the one after it and the one before it, so that a
job that gets slower as it goes shows no cost; the first step of a block does not count. A GPU has done all its work at
the end of that step and of the last.

The job is a script with a function `clocks`, which it calls after every step and whose values it writes to --timings.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil

from overhead import RECORDED, module_of, print_table
from rankscope.collectors.native import collectives_hook

ROOT = Path(__file__).parents[1]
AGENT = "rankscope.collectors.agent.loop"


class Switch:
    """Takes this rank's hooks out and puts them in again; the first of a node also stops and continues its agent."""

    def __init__(self) -> None:
        from rankscope.collectors import rank
        from rankscope.collectors.in_rank import session

        assert session._session, "the job is not recorded"
        self._emit = session._session.emit
        self._collectors = [session._collector_of(module.name) for module in pkgutil.iter_modules(rank.__path__)]
        self._agent = _agent() if os.environ["LOCAL_RANK"] == "0" else None
        self.is_on = True

    def turn(self, *, on: bool) -> None:
        self.is_on = on
        if self._agent:
            self._agent.resume() if on else self._agent.suspend()
        self._emit.live = on
        if on:  # each collector asks for its calls again; the session asked first, and stays
            del self._emit._on_tick[1:], self._emit._on_step[:]
        for collector in self._collectors:
            collector.start(self._emit) if on else collector.stop()
        assert not self._emit._off, f"switched off: {self._emit._off}"


def _agent() -> psutil.Process:
    """The agent of this node: a child of the launcher's, as this rank is."""
    for parent in psutil.Process().parents():
        for child in parent.children(recursive=True):
            if AGENT in child.cmdline():
                return child
    raise SystemExit("there is no agent")


def has_hooks(block: int) -> bool:
    """Whether the block of this number has: in each pair one has, first the first and then the second."""
    return block % 4 in (0, 3)


def be_a_rank(script: Path, block: int) -> None:
    """Run the job in this process, with a switch in its clocks."""
    import torch

    job = module_of(script)
    clocks, steps, switch = job.clocks, 0, None

    def switched() -> tuple[int, ...]:
        nonlocal steps, switch
        if torch.cuda.is_initialized() and steps % block < 2:
            torch.cuda.synchronize()
        now = clocks()
        if steps and steps % block == 0:
            switch = switch or Switch()
            if switch.is_on != has_hooks(steps // block):
                switch.turn(on=not switch.is_on)
        steps += 1
        return now

    job.clocks = switched
    try:
        job.main()
    finally:
        if switch and not switch.is_on:
            switch.turn(on=True)


def compared(folder: Path, block: int, warmup: int) -> np.ndarray:
    """Each of overhead.QUANTITIES without and with, in ms: (pairs, 2, quantities)."""
    clocks = np.array([json.loads(file.read_text()) for file in folder.iterdir()])  # (rank, step, clock)
    steps = np.diff(clocks, axis=1).mean(axis=0) / 1e6
    found = []
    for first in range(-(-warmup // (2 * block)) * 2, len(steps) // block - 1, 2):
        each = [steps[n * block + 1 : (n + 1) * block] for n in (first, first + 1)]
        pair = [[*one.mean(axis=0), np.median(one[:, 0])] for one in each]
        found.append(pair[::-1] if has_hooks(first) else pair)
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--block", type=int, default=10, help="steps with hooks, and then without")
    parser.add_argument("--warmup", type=int, default=20, help="steps at the start that do not count")
    parser.add_argument("--job", nargs=argparse.REMAINDER, default=["examples/train_transformer.py"], help="goes last")
    parser.add_argument("--be-a-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    script, *words = args.job
    if args.be_a_rank:
        sys.argv = [script, *words]
        be_a_rank(Path(script), args.block)
        return
    collectives_hook.build()
    with tempfile.TemporaryDirectory() as folder:
        job = [(ROOT / script).resolve(), *words, "--steps", args.steps, "--timings", "timings"]
        rank = [Path(__file__).resolve(), "--be-a-rank", "--block", args.block, "--job", *job]
        command = [*RECORDED, "--nproc-per-node", args.ranks, *rank]
        subprocess.run([str(word) for word in command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        pairs = compared(Path(folder, "timings"), args.block, args.warmup)
    print(f"{Path(script).stem} {' '.join(words)}, {args.ranks} ranks, {len(pairs)} pairs of {args.block - 1} steps")
    print_table(*pairs.transpose(1, 0, 2))


if __name__ == "__main__":
    main()
