"""Two ranks of DDP whose device is `driver.c`, which waits for communication in four ways.

    device_waits.py DRIVER

After that come some 20 steps a second with 300 waits each.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pretend import on_device, pretend, wait_for_anchors

import rankscope

MS = 1_000_000
STEPS = 6


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return compute.apply(self.layer(x))


dist.init_process_group("gloo")
device = pretend(Path(sys.argv[1]))
compute = on_device(device, 20 * MS, 40 * MS)
rankscope.step()  # the first only shows the collector that CUDA is there
wait_for_anchors(device, 2)
model = torch.nn.parallel.DistributedDataParallel(Layers())
parameters = torch.ones(8)
rankscope.step()  # waits are seen from here on

for _ in range(STEPS):
    gathered = torch.cuda.Event(30 * MS)
    device.current_stream = 7  # FSDP gathers there; its own wait delays nothing
    dist.all_reduce(parameters)
    gathered.record()
    device.current_stream = 0
    torch.cuda.Event(5 * MS).wait()  # not behind communication: a copy of the input, say
    loss = model(torch.ones(1, 8)).sum()
    gathered.wait()
    loss.backward()
    dist.all_reduce(parameters)  # an operation that is not async, then `Work.wait`
    functional.wait_tensor(functional.all_reduce(parameters, "sum", dist.group.WORLD))
    device.fake_synchronize()
    rankscope.step()

until = time.monotonic() + 3
while time.monotonic() < until:
    for _ in range(300):
        gathered.wait()
        gathered.takes_ns = 1000
    device.fake_synchronize()
    time.sleep(0.04)
    rankscope.step()
wait_for_anchors(device, 2)
