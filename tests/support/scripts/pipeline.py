"""A pipeline of one stage per rank under 1F1B; a stage's device takes `MS` forward and twice that backward.

`pipeline.py 2` gives stage 2 twice the work.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

STEPS, MICROBATCHES, WIDTH = 6, 8, 64
MS = 20


class Device(torch.autograd.Function):
    """Gives on what it gets, after a while."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layers(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x):
        return self.linear(Device.apply(x + self.linear.bias, self.seconds))


dist.init_process_group("gloo")
torch.set_num_threads(1)
stages, me = dist.get_world_size(), dist.get_rank()
long = int(sys.argv[1]) if len(sys.argv) > 1 else None
part = PipelineStage(Layers(MS / 1e3 * (1 + (me == long))), me, stages, torch.device("cpu"))
schedule = Schedule1F1B(part, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum())
optimizer = torch.optim.SGD(part.submod.parameters(), lr=0.01)
batch = torch.ones(MICROBATCHES, WIDTH)
for _ in range(STEPS):
    schedule.step(*([batch] if me == 0 else []), **({"target": batch} if me == stages - 1 else {}))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
