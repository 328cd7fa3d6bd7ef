"""A small training job with gloo on CPU ranks, healthy or with one known fault; `real.py` runs it.

    torchrun --nproc-per-node 4 benchmarks/faults/job.py --parallel tp --fault slow_rank --ranks 2 --ms 20

A device's work is emulated by a sleep in forward and backward, so that several ranks fit on a few cores; all else is
real: process groups, DDP, FSDP2, DTensor, torch's pipelining, DataLoader, garbage collection, torch.compile.
It knows nothing of rankscope. Rank 0 writes the lengths of its steps, in ns, to `--lengths`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

LAYERS, ROWS, MICROBATCHES = 4, 16, 4
SLOW = ("slow_rank", "sporadic_rank", "slow_node")
BURSTS = 0.25  # share of the steps
FIRST = 5  # no fault in the steps before
HANG_S = 15  # a job that waits for less than 10 s does not hang


class Work:
    """What a layer's emulated device takes in forward; backward takes twice that."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.factor = seconds, 1.0


class Device(torch.autograd.Function):
    """The identity, after a while."""

    @staticmethod
    def forward(ctx, x, work):
        ctx.work = work
        time.sleep(work.seconds * work.factor)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.work.seconds * ctx.work.factor)
        return gradient, None


class Layer(nn.Module):
    def __init__(self, width: int, work: Work) -> None:
        super().__init__()
        self.up, self.down, self.work = nn.Linear(width, width), nn.Linear(width, width), work
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(Device.apply(x + self.bias, self.work))))


class Vectors(Dataset):
    """Item by item, each read after `delay_s`."""

    def __init__(self, width: int, delay_s: float) -> None:
        self.width, self.delay_s = width, delay_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.delay_s)
        return torch.full((self.width,), (i % 7) / 7)


def slow_compiler(seconds: float):
    def backend(graph, _inputs):
        time.sleep(seconds)  # real backends take seconds
        return graph.forward

    return backend


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def trainer(args: argparse.Namespace, works: list[Work]):
    """The parallel model's parameters and what one step does with a batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.parallel in ("pp-1f1b", "pp-gpipe", "tp+pp"):
        width = 2 if args.parallel == "tp+pp" else 1
        mesh = init_device_mesh("cpu", (world // width, width), mesh_dim_names=("pp", "tp"))
        stage, stages = mesh.get_local_rank("pp"), mesh.size(0)
        layers = nn.Sequential(*(Layer(args.width, work) for work in works[: LAYERS // stages]))
        if width > 1:
            tensor_parallel(layers, mesh["tp"])
        part = PipelineStage(layers, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = (ScheduleGPipe if args.parallel == "pp-gpipe" else Schedule1F1B)(part, MICROBATCHES, loss_fn=loss_of)

        def step(batch: torch.Tensor) -> None:
            inputs = [batch] if stage == 0 else []
            schedule.step(*inputs, **({"target": batch} if stage == stages - 1 else {}))

        return layers.parameters(), step
    model = nn.Sequential(*(Layer(args.width, work) for work in works))
    if args.parallel == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (world,)))
    elif args.parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # torch 2.6 and later

        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        late = args.fault == "exposed_communication"  # one bucket, complete when backward ends
        model = DistributedDataParallel(model, bucket_cap_mb=10_000 if late else 4 * args.width**2 / 2**20)
    if args.fault == "recompile" and rank in args.ranks:
        head = torch.compile(lambda x: x * 2 + 1, backend=slow_compiler(args.ms / 1e3), dynamic=False)
        torch._dynamo.config.cache_size_limit = 1000
    else:
        head = None

    def step(batch: torch.Tensor) -> None:
        out = model(batch)
        loss_of(out, batch).backward()
        if head is not None:
            head(torch.zeros(step.shape, 4))

    step.shape = 8
    return model.parameters(), step


def tensor_parallel(layers: nn.Module, mesh) -> None:
    for layer in layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(args: argparse.Namespace) -> list[int]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    mine = rank in args.ranks
    fault = args.fault if mine else "none"
    chance = random.Random(1000 * args.seed + rank)
    bursts = set(chance.sample(range(FIRST, args.steps), round(BURSTS * (args.steps - FIRST))))
    stages = {"pp-1f1b": 4, "pp-gpipe": 4, "tp+pp": 2}.get(args.parallel, 1)
    calls = LAYERS // stages * (MICROBATCHES if stages > 1 else 1)  # of a layer's forward in a step
    works = [Work(args.device_ms / 1e3 / calls / 3) for _ in range(LAYERS)]
    loader = DataLoader(Vectors(args.width, args.ms / 1e3 / ROWS if fault == "input_stall" else 0), ROWS)
    parameters, step = trainer(args, works)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    heap = [[i] for i in range(int(args.ms * args.per_ms))] if fault == "gc_stall" else []
    if heap:
        gc.disable()

    ends = [time.perf_counter_ns()]
    for i, batch in zip(range(args.steps), loader, strict=False):
        factor = args.factor
        if fault in ("slow_rank", "slow_node", "stage_imbalance") or (fault == "sporadic_rank" and i in bursts):
            factor += args.ms / args.device_ms
        elif fault == "load_imbalance":
            rows = round(ROWS * (1 - chance.random() * args.ms / 100))
            batch, factor = batch[:rows], rows / ROWS
        for work in works:
            work.factor = factor if i >= FIRST or args.fault == "stage_imbalance" else args.factor
        if fault == "recompile" and i >= FIRST and i % 4 == 0:
            step.shape += 1
        if fault == "hang" and i == args.steps // 2:
            time.sleep(2 * HANG_S)
        optimizer.zero_grad()
        step(batch)
        optimizer.step()
        if heap and i % 5 == 4:
            gc.collect()
        ends.append(time.perf_counter_ns())
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2", "tp", "pp-1f1b", "pp-gpipe", "tp+pp"), default="ddp")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--ranks", type=lambda text: [int(r) for r in text.split(",")], default=[], help="who has it")
    parser.add_argument("--ms", type=float, default=0, help="how much longer a step's work takes where the fault acts")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device-ms", type=float, default=160, help="emulated device work per step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--factor", type=float, default=1, help="of the work, in a job whose uneven work was evened out"
    )
    parser.add_argument(
        "--per-ms", type=float, default=13_000, help="objects on the heap that a collection visits in 1 ms"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=HANG_S if args.fault == "hang" else 600))
    lengths = train(args)
    if args.lengths and dist.get_rank() == 0:
        args.lengths.write_text(json.dumps(lengths))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
