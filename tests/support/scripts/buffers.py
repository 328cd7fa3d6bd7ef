"""A model with buffers, which DDP broadcasts before each forward; before that one rank, the argument, sleeps."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SLEEP_S = 24, 0.06


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.03)  # a device would be busy, not the host
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.05)
        return grad


class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(Slow.apply(x))


dist.init_process_group("gloo")
model = DistributedDataParallel(Model(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    if dist.get_rank() == int(sys.argv[1]):
        time.sleep(SLEEP_S)
    x = torch.randn(16, 64, requires_grad=True)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
