"""A mixture of experts on gloo, one expert per rank. The last rank's expert is popular with --popular.

Tokens go to the experts by `all_to_all_single` with uneven splits and come back. A sleep stands for the accelerator.
"""

import sys
import time

import torch
import torch.distributed as dist

import rankscope

TOKENS, WIDTH, STEPS = 120, 256, 14

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
popular = TOKENS // 2 if "--popular" in sys.argv else 0
to_each = [(TOKENS - popular) // world + (popular if r == world - 1 else 0) for r in range(world)]
from_each = [to_each[rank]] * world
router = torch.nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.SGD(router.parameters(), lr=0.01)
for _ in range(STEPS):
    tokens = router(torch.ones(TOKENS, WIDTH))
    received = torch.empty(sum(from_each), WIDTH)
    dist.all_to_all_single(received, tokens.detach(), from_each, to_each)
    time.sleep(0.5e-3 * len(received))
    back = torch.empty(TOKENS, WIDTH)
    dist.all_to_all_single(back, received, to_each, from_each)
    tokens.backward(back)
    dist.all_reduce(router.weight.grad)
    optimizer.step()
    rankscope.step()
dist.destroy_process_group()
