"""The weights are on device 1, and the script never says `torch.cuda.set_device(1)`.

other_device.py DRIVER
"""

import sys
from pathlib import Path

import torch.distributed as dist
from pretend import learn, pretend

import rankscope

dist.init_process_group("gloo")
pretend(Path(sys.argv[1]))
learn(1)
for _ in range(5):
    rankscope.step()
