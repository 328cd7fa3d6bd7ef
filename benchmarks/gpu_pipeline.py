"""A pipeline for benchmarks/gpu_checks.py: a stage per rank under 1F1B, of which one may have twice the layers.

    rankscope run --standalone --nproc-per-node 2 benchmarks/gpu_pipeline.py --long 1

With `--one-gpu` all ranks use device 0, see `nccl_job.py`; then they also take turns on it.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from nccl_job import begin, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--long", type=int, help="the stage that has twice the layers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=4096, help="of a microbatch")
    arguments = parser.parse_args()
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = begin(arguments)
    layers = arguments.layers * (2 if rank == arguments.long else 1)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(arguments.width, arguments.width, device=device) for _ in range(layers))
    )
    stage = PipelineStage(model, rank, stages, device)
    schedule = Schedule1F1B(stage, arguments.microbatches, loss_fn=lambda out, target: (out - target).square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(arguments.microbatches * arguments.rows, arguments.width, device=device)
    started = time.perf_counter()
    for _ in range(arguments.steps):
        schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == stages - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    end(device, started, arguments.steps)


if __name__ == "__main__":
    main()
