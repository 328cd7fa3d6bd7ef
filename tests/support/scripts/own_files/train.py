"""A script beside files named like rankscope's own folders, with forked and spawned workers; prints what came out."""

import hashlib
import multiprocessing

import profiler
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import analysis
import collectors

STEPS, BATCH = 12, 4


class Numbers(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, x.sum()


def offset(rank):
    """Runs in a spawned process, which imports this file and torch again."""
    torch.manual_seed(rank)
    return torch.rand(()).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with multiprocessing.get_context("spawn").Pool(1) as spawned:
        shift = spawned.apply(offset, (rank,))

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(
        Numbers(), BATCH, num_workers=1, multiprocessing_context="fork", collate_fn=collectors.stack, shuffle=False
    )
    losses = []
    with profiler.Stopwatch() as stopwatch:
        for x, target in loader:
            optimizer.zero_grad()
            loss = (model(x + shift).squeeze(1) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert stopwatch.seconds > 0
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    if rank == 0:
        print(f"mean loss {analysis.mean(losses)!r} digest {hashlib.sha256(weights).hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
