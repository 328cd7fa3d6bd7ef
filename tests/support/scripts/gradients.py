"""Eight layers whose backward takes 20 ms each and makes 4 MB of gradients.

DDP reduces them while backward runs, layer by layer; with `--late` they are reduced by hand afterwards. With
`--accumulate` a step has two backward passes, and DDP one bucket: reduced in both, or with `--no-sync` in the last.
"""

import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, LAYERS, WIDTH = 16, 8, 1024


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)  # a device would be busy, not the host
        return grad


class Layer(nn.Linear):
    def forward(self, x):
        return Slow.apply(super().forward(x))


dist.init_process_group("gloo")
layers = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
late, twice = "--late" in sys.argv, "--accumulate" in sys.argv
cap_mb = 100 if twice else 4
model = layers if late else DistributedDataParallel(layers, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(STEPS):
    if twice:
        with model.no_sync() if "--no-sync" in sys.argv else nullcontext():
            model(torch.randn(4, WIDTH)).square().mean().backward()
    model(torch.randn(4, WIDTH)).square().mean().backward()
    if late:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
