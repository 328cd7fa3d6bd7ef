"""Trainers and generators for them, as in RL: two worlds of two ranks each in one job, which meet in a store only."""

import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

STEPS, SLOW_S = 20, 0.03
PORTS = [int(port) for port in sys.argv[1:4]]  # of the trainers, of the engines, of the store that both use


def join(rank, port, delay_s):
    time.sleep(delay_s)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    is_master = port == PORTS[0] and rank == 0
    return dist.TCPStore("127.0.0.1", PORTS[2], None, is_master, timeout=datetime.timedelta(seconds=60))


def train(rank):
    store = join(rank, PORTS[0], delay_s=rank)  # rank 1 comes last of all
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        store.wait([f"batch{step}"])
        time.sleep(SLOW_S * rank)
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        if rank == 0:
            store.set(f"weights{step}", b"")
    dist.barrier()
    time.sleep(1)  # the engines may still ask the store


def generate(rank):
    store = join(rank, PORTS[1], delay_s=0.5)
    for step in range(STEPS):
        for _ in range(5):
            dist.all_reduce(torch.ones(100))
        if rank == 0:
            store.set(f"batch{step}", b"")
        store.wait([f"weights{step}"])


if __name__ == "__main__":
    worlds = [mp.spawn(work, nprocs=2, join=False) for work in (train, generate)]
    for world in worlds:
        world.join()
