"""Ranks whose device is `driver.c`, each with a lot of its own; 20 ms forward, 40 backward, 10 optimizer.

    device_marks.py DRIVER OUT

Rank 0 also captures a graph and forks; 1 has one connection, changes the device and meets an error that stays; the
device of 2 hangs; 3 has no driver. Ranks 0 and 1 write into OUT when the device really came to each mark.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from pretend import learn, on_device, pretend, wait_for_anchors

import rankscope

MS = 1_000_000
STEPS = 10
rank = int(os.environ["RANK"])


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        device.fake_work(10 * MS)
        return super().step(closure)


def train(steps):
    for _ in range(steps):
        compute.apply(parameter).sum().backward()
        optimizer.step()
        device.fake_synchronize()  # as `loss.item()` does
        rankscope.step()


dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = Optimizer([parameter], lr=0.1)
if rank == 3:
    torch.cuda.is_initialized = lambda: True
    learn(0)
    for _ in range(3):
        rankscope.step()
    sys.exit()

device = pretend(Path(sys.argv[1]), drift_ppm=40, connections=8 if rank == 0 else 1)
compute = on_device(device, 20 * MS, 40 * MS)
rankscope.step()  # the first only shows the collector that CUDA is there
wait_for_anchors(device, 2)
train(STEPS)
if rank == 0:
    device.fake_begin_capture()
    compute.apply(parameter).sum().backward()
    rankscope.step()
    wait_for_anchors(device, 2)
    assert device.fake_end_capture() == 0, "the capture is broken"
    child = os.fork()
    if child == 0:
        rankscope.step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    train(1)
if rank == 1:
    device.current_device = 1
    train(2)
    device.current_device = 0
    wait_for_anchors(device, 2)
    device.fake_fail(719)
    train(2)
if rank == 2:
    wait_for_anchors(device, 2)
    device.fake_work(3600_000 * MS)
    for _ in range(5000):
        rankscope.step()
if rank in (0, 1):
    truth = [device.fake_truth(number) for number in range(device.fake_records())]
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(truth))
print(f"rank {rank} has trained", flush=True)
