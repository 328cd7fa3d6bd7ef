"""DDP with torch.compile; from step `FROM` on, every fifth step has a batch size that it has not seen."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, FROM, WIDTH = 40, 15, 32
COMPILE_S = 0.06


def slow_backend(graph, _inputs):
    time.sleep(COMPILE_S)  # real backends take seconds
    return graph.forward


dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = torch.compile(lambda x: model(x).square().mean(), backend=slow_backend, dynamic=False)
torch._dynamo.config.cache_size_limit = 64
for i in range(STEPS):
    size = 8 + (i if i >= FROM and i % 5 == 0 else 0)
    time.sleep(0.05)
    step(torch.randn(size, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
