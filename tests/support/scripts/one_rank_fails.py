"""Trains; at step 12 the last rank ends: `kill` (by SIGKILL), `raise`, or `leave` (exit code 0).

With `skip` it lives, but skips an operation there.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

STEPS, FAILS = 20, 12

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(STEPS):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    if step == FAILS and dist.get_rank() == dist.get_world_size() - 1:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raise":
            raise ValueError("no label for sample 7\nsecond line")
        if sys.argv[1] == "leave":
            sys.exit(0)
    elif step == FAILS and sys.argv[1] == "skip":
        dist.all_reduce(torch.zeros(3))
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
dist.destroy_process_group()
