"""Two ranks whose device is `driver.c`, or that have none, with steps of 50 ms.

first_window.py [DRIVER]
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from pretend import pretend

dist.init_process_group("gloo")
if len(sys.argv) > 1:
    pretend(Path(sys.argv[1]))
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
for _ in range(100):
    parameter.square().sum().backward()
    dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(0.05)
