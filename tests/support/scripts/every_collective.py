"""Run DDP, FSDP2, tensor parallel, functional and Python collectives and a pipeline, each in a group of its own.

Each rank writes `expected-RANK.json` into the folder that it is given: {section: {name: count}}, counted by
torch's profiler (the spans that the gloo backend makes) or, for the pipeline, which has none, from the schedule.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

STEPS, WIDTH, MICROBATCHES = 5, 64, 6
expected: dict[str, dict[str, int]] = {}


@contextlib.contextmanager
def section(name: str):
    """A process group described as `name`; what the gloo backend does inside is counted under that name."""
    group = dist.new_group(group_desc=name)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield group
        time.sleep(0.2)  # gloo's threads end a span after its work
    spans = collections.Counter(e.name for e in profiler.events() if e.name.startswith("gloo:"))
    expected[name] = {span.removeprefix("gloo:"): count for span, count in spans.items()}


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(8, WIDTH)).sum().backward()
        optimizer.step()


def data_parallel() -> None:
    with section("ddp") as group:
        train(DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.03))


def fully_sharded() -> None:
    if torch.__version__.startswith(("2.5.", "2.6.")):  # where FSDP2 needs a GPU
        return
    from torch.distributed.fsdp import fully_shard

    with section("fsdp2") as group:
        mesh, model = DeviceMesh.from_group(group, "cpu"), mlp()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        train(fully_shard(model, mesh=mesh))


def tensor_parallel() -> None:
    with section("tensor") as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        train(parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def functional() -> None:
    with section("functional") as group:
        x = torch.ones(8, WIDTH)
        for _ in range(STEPS):
            y = funcol.all_reduce(x, "sum", group)
            y = y + funcol.all_gather_tensor(x, 0, group)[:8]
            y = y + funcol.reduce_scatter_tensor(torch.cat([x] * dist.get_world_size()), "sum", 0, group)
            funcol.wait_tensor(y)


def python_calls() -> None:
    with section("python") as group:
        x, world_size = torch.ones(8), dist.get_world_size()
        for _ in range(STEPS):
            dist.all_reduce(x, group=group)
            dist.broadcast(x, 0, group=group)
            dist.reduce(x, 0, group=group)
            dist.all_gather([torch.empty(8) for _ in range(world_size)], x, group=group)
            dist.all_to_all_single(torch.empty(8), x, group=group)
            dist.barrier(group=group)


def pipeline() -> None:
    """One stage per rank: each microbatch crosses each border between two stages once forward and once backward.

    Before the first step torch connects the stages: at first not at all, later (2.10) one dummy tensor each way, from
    2.15 on forward only, between three all-reduces.
    """
    if torch.__version__.startswith("2.9."):  # its stages connect with messages of two sizes, which gloo refuses
        return
    group, stages, me = dist.new_group(group_desc="pipeline"), dist.get_world_size(), dist.get_rank()
    batch = torch.ones(MICROBATCHES, WIDTH)
    # With the shapes given, the stages need not send them to each other first.
    into, out = torch.ones(1, WIDTH, requires_grad=me > 0), torch.ones(1, WIDTH, requires_grad=True)
    part = PipelineStage(mlp(), me, stages, torch.device("cpu"), into, out, group=group)
    schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum())
    optimizer = torch.optim.SGD(part.submod.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        schedule.step(*([batch] if me == 0 else []), **({"target": batch} if me == stages - 1 else {}))
        optimizer.step()
    before, after = me > 0, me < stages - 1
    crossings = STEPS * MICROBATCHES * (before + after)
    if find_spec("torch.distributed.pipelining._p2p"):  # 2.15
        expected["pipeline"] = {"send": crossings + after, "recv": crossings + before, "all_reduce": 3}
    else:
        dummies = before + after if hasattr(part, "_get_init_p2p_neighbors_ops") else 0
        expected["pipeline"] = dict.fromkeys(("send", "recv"), crossings + dummies)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for part in (data_parallel, fully_sharded, tensor_parallel, functional, python_calls, pipeline):
        part()
        dist.barrier()
    Path(sys.argv[1], f"expected-{dist.get_rank()}.json").write_text(json.dumps(expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
