"""Steps with 2,000 spans each, for 20 seconds; rank 1 takes 10 ms longer."""

import time

import torch
import torch.distributed as dist

import rankscope

dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = torch.optim.SGD([weight], lr=0.1)
began, steps, goes_on = time.monotonic(), 0, torch.ones(1)
while goes_on:
    for _ in range(2000):
        with rankscope.annotate("span"):
            pass
    time.sleep(0.01 * dist.get_rank())
    (weight * 2).sum().backward()
    dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    goes_on.fill_(time.monotonic() - began < 20)
    dist.broadcast(goes_on, 0)
if dist.get_rank() == 0:
    print(f"JOB {steps} steps")
dist.destroy_process_group()
