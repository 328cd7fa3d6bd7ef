"""A pipeline on two devices that are `driver.c`: 10 ms for each forward, 20 for each backward.

pipeline_marks.py DRIVER SCHEDULE
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pretend import on_device, pretend, wait_for_anchors
from torch.distributed.pipelining import PipelineStage, schedules

import rankscope

STEPS, MICROBATCHES, WIDTH = 4, 4, 8
MS = 1_000_000


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(compute.apply(self.first(x)))


dist.init_process_group("gloo")
device = pretend(Path(sys.argv[1]))
compute = on_device(device, 10 * MS, 20 * MS)
rankscope.step()
wait_for_anchors(device, 2)
rank, kind = dist.get_rank(), getattr(schedules, sys.argv[2])
stage = PipelineStage(Layers(), rank, 2, torch.device("cpu"))
several = issubclass(kind, schedules.PipelineScheduleMulti)
schedule = kind([stage] if several else stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum())
optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
batch = torch.ones(MICROBATCHES, WIDTH)
for _ in range(STEPS):
    schedule.step(*([batch] if rank == 0 else []), **({"target": batch} if rank == 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
    device.fake_synchronize()
wait_for_anchors(device, 2)
dist.destroy_process_group()
