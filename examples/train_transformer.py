"""Train a small language model on made-up text with DDP or FSDP2 on CPU ranks, healthy or with one known fault.

    rankscope run --nproc-per-node 4 examples/train_transformer.py --fault slow-rank

Device work is emulated by a sleep in forward and backward, so that several ranks fit on a few cores; all else is
a real job. It knows nothing of rankscope: `torchrun` in place of `rankscope run` gives the same weights, bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FAULT_RANK = {"slow-rank": 2, "input": 1, "gc": 3}
WORDS = (
    "the",
    "a",
    "small",
    "large",
    "slow",
    "fast",
    "rank",
    "node",
    "waits",
    "sends",
    "reads",
    "trains",
    "and",
    "then",
)
LAYERS, HEADS, BATCH = 2, 4, 4
GC_EVERY = 5


class MadeUpText(Dataset):
    """Characters of random sentences; item i is a window of `length + 1` characters, each read after `delay_s`."""

    def __init__(self, length: int, delay_s: float) -> None:
        rng = random.Random(0)
        text = " ".join(rng.choice(WORDS) for _ in range(20_000))
        self.alphabet = sorted(set(text))
        self.codes = torch.tensor([self.alphabet.index(c) for c in text])
        self.length, self.delay_s = length, delay_s

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, i: int) -> torch.Tensor:
        time.sleep(self.delay_s)
        return self.codes[i * self.length : (i + 1) * self.length + 1]


class DeviceWork(torch.autograd.Function):
    """The identity; takes `seconds` in forward and twice that in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


class Block(nn.Module):
    """One transformer layer; at full length its emulated device work takes `device_s` in forward."""

    def __init__(self, width: int, length: int, device_s: float) -> None:
        super().__init__()
        self.seconds_per_token = device_s / length
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return DeviceWork.apply(x, self.seconds_per_token * length)


class Transformer(nn.Module):
    """A causal language model; `lag_s` is the fault of a slow rank, a sleep in each forward."""

    def __init__(self, alphabet: int, width: int, length: int, device_s: float, lag_s: float) -> None:
        super().__init__()
        self.lag_s = lag_s
        self.token, self.position = nn.Embedding(alphabet, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, length, device_s / LAYERS) for _ in range(LAYERS))
        self.head = nn.Linear(width, alphabet)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(self.lag_s)
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x.flatten(0, 1))


def parallelize(model: Transformer, how: str) -> nn.Module:
    """The model wrapped for data-parallel training over all ranks."""
    if how == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.2)
    from torch.distributed.fsdp import fully_shard  # torch 2.6 and later

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over all full weights; every rank must call it."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        value = parameter.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def collect_garbage() -> int:
    """Run a full collection; the time it took, ns."""
    start_ns = time.perf_counter_ns()
    gc.collect()
    return time.perf_counter_ns() - start_ns


def clocks() -> tuple[int, int, int]:
    """Wall time, this thread's CPU time and this process's CPU time, ns."""
    return time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()


def train(args: argparse.Namespace) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    fault_rank = FAULT_RANK.get(args.fault) if args.fault_rank is None else args.fault_rank
    fault = args.fault if rank == fault_rank else "none"
    fault_s = args.fault_ms / 1000
    lengths = random.Random(rank)  # of the sequences, if they are uneven

    data = MadeUpText(args.length, fault_s / BATCH if fault == "input" else 0)
    sampler = DistributedSampler(data, world_size, rank, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    lag_s = fault_s if fault == "slow-rank" else 0
    model = Transformer(len(data.alphabet), args.width, args.length, args.device_ms / 3000, lag_s)
    model = parallelize(model, args.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    heap = [[i] for i in range(args.heap)] if fault == "gc" else []

    gc_ns: list[int] = []
    stamps = [clocks()]
    for step, batch in zip(range(1, args.steps + 1), epochs(loader, sampler), strict=False):
        if args.fault == "uneven":
            batch = batch[:, : lengths.randint(args.length // 4, args.length) + 1]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if heap and step % GC_EVERY == 0:
            gc_ns.append(collect_garbage())
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        stamps.append(clocks())

    if gc_ns:
        print(f"collections_ns {gc_ns}", flush=True)
    if args.timings:
        args.timings.mkdir(parents=True, exist_ok=True)
        (args.timings / f"rank-{rank}.json").write_text(json.dumps(stamps))
    if args.digest:
        digest = weights_digest(model)
        if rank == 0:
            print(f"digest {digest}", flush=True)


def epochs(loader: DataLoader, sampler: DistributedSampler):
    """The loader's batches, epoch after epoch, without end."""
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--fault", choices=("none", "slow-rank", "input", "gc", "uneven"), default="none")
    parser.add_argument("--fault-rank", type=int, help="default: 2 for slow-rank, 1 for input, 3 for gc")
    parser.add_argument("--fault-ms", type=float, default=30, help="of slow-rank and input, per step")
    parser.add_argument("--heap", type=int, default=1_000_000, help="objects on the heap that gc has to visit")
    parser.add_argument("--device-ms", type=float, default=180, help="emulated device work per step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="characters per sequence")
    parser.add_argument("--timings", type=Path, help="folder for each rank's clocks at each step's end, as JSON")
    parser.add_argument("--digest", action="store_true", help="print a digest of the final weights")
    args = parser.parse_args()

    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    dist.init_process_group("gloo")
    try:
        train(args)
    finally:
        time.sleep(0.05)  # a thread of gloo that waits for Python's lock when the interpreter ends aborts the process
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
