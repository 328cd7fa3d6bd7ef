r"""A job that does little else than small collectives: `--per-step` all-reduces of 8 numbers a step, on every rank.

    python benchmarks/overhead_within.py --steps 300 --block 3 --job benchmarks/many_collectives.py
    python benchmarks/overhead_within.py --ranks 1 --steps 300 --block 2 --job benchmarks/many_collectives.py \
        --functional
    python benchmarks/soak.py

With `--across N` only every N-th is one of all ranks, and the others are of groups of one rank, which gloo completes
without waiting. With `--functional` they are functional collectives of torch. With `--forks` a child that ends at once
is forked every so many steps; `--timings` is that of the example.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import rankscope


def clocks() -> tuple[int, int, int]:
    """Wall time, this thread's CPU time and this process's CPU time, ns."""
    return time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--per-step", type=int, default=1000)
    parser.add_argument("--across", type=int, default=1, help="collectives from one of all ranks to the next")
    parser.add_argument("--functional", action="store_true")
    parser.add_argument("--forks", type=int, default=0, help="steps from one fork to the next")
    parser.add_argument("--timings", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    numbers, stamps = torch.ones(8), []

    def all_reduce(group: dist.ProcessGroup | None) -> None:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)

    def functional_all_reduce(group: dist.ProcessGroup | None) -> None:
        funcol.wait_tensor(funcol.all_reduce(numbers, "max", group or dist.group.WORLD))

    call = functional_all_reduce if args.functional else all_reduce
    for step in range(args.steps):
        for number in range(args.per_step):
            call(alone if number % args.across else None)
        rankscope.step()
        stamps.append(clocks())
        if args.forks and step % args.forks == args.forks - 1:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
    assert numbers.tolist() == [1.0] * 8
    if args.timings:
        args.timings.mkdir(parents=True, exist_ok=True)
        (args.timings / f"rank-{dist.get_rank()}.json").write_text(json.dumps(stamps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
