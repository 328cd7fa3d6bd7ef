"""A training step of a transformer of 1 B parameters in bf16, for the checks in benchmarks/gpu_checks.py.

    rankscope run --standalone --nproc-per-node 1 benchmarks/gpu_step.py --peak-tflops 989
    rankscope run --standalone --nproc-per-node 2 benchmarks/gpu_step.py --one-gpu --size 100m --parallel fsdp2

Prints the time per step and its MFU from FLOPs that are counted by hand. `torchrun` in place of `rankscope run` gives
the same without recording; `benchmarks/overhead_within.py --job benchmarks/gpu_step.py` compares both within one job.
`--size tiny` runs on a CPU. With `--one-gpu` all ranks use device 0, see `nccl_job.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from nccl_job import begin


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    def flops_per_step(self) -> float:
        """What one rank's step needs: 6 for each weight of a matrix product and token, and causal attention."""
        weights = 12 * self.layers * self.width**2 + self.width * self.vocabulary
        attention = 6 * self.layers * self.width * self.length
        return float((6 * weights + attention) * self.batch * self.length)


SIZES = {
    "1b": Size(layers=18, width=2048, heads=16, vocabulary=32_768, length=2048, batch=4),
    "100m": Size(layers=12, width=768, heads=12, vocabulary=32_768, length=1024, batch=8),
    "tiny": Size(layers=2, width=64, heads=2, vocabulary=256, length=32, batch=2),
}


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it; `tokens` is batch × (length + 1)."""
        x = self.layers(self.embedding(tokens[:, :-1]), mask=self.mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def capture(seconds: float) -> None:
    """Capture a forward and backward pass in the mode that other threads can break, and keep it open for so long."""
    layer, x, side = nn.Linear(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        layer(x).sum().backward()
    torch.cuda.synchronize()
    layer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="global"):
        layer(x).sum().backward()
        time.sleep(seconds)
    graph.replay()
    torch.cuda.synchronize()


def clocks() -> tuple[int, int, int]:
    """Wall time, this thread's CPU time and this process's CPU time, ns."""
    return time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()


def parallelized(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard  # torch 2.6 and later

    for layer in model.layers.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(model: nn.Module, tokens: torch.Tensor, steps: int, warmup: int) -> list[tuple[int, int, int]]:
    """`clocks` at the start and each step's end.

    The device has done everything at the end of the warm-up and of the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=tokens.is_cuda)
    stamps = [clocks()]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()
        if step in (warmup, steps):
            synchronize(tokens.device)
        stamps.append(clocks())
    return stamps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start that do not count")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the device, for its MFU")
    parser.add_argument("--captures", type=int, default=0, help="then capture so many CUDA graphs, for 1 s each")
    parser.add_argument("--timings", type=Path, help="folder for each rank's clocks at each step's end, as JSON")
    args = parser.parse_args()

    args.backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = begin(args)
    torch.manual_seed(0)
    size = SIZES[args.size]
    tokens = torch.randint(size.vocabulary, (size.batch, size.length + 1), device=device)
    with device:
        model = parallelized(Model(size).to(torch.bfloat16), args.parallel)
    stamps = train(model, tokens, args.steps, args.warmup)
    for _ in range(args.captures):
        capture(1.0)

    if args.timings:
        args.timings.mkdir(parents=True, exist_ok=True)
        (args.timings / f"rank-{dist.get_rank()}.json").write_text(json.dumps(stamps))
    if dist.get_rank() == 0:
        seconds = (stamps[-1][0] - stamps[args.warmup][0]) / (args.steps - args.warmup) / 1e9
        flops = size.flops_per_step()
        text = f"{seconds * 1e3:.3f} ms per step, {flops:.4g} FLOPs, {flops / seconds / 1e12:.3g} TFLOP/s per device"
        if args.peak_tflops:
            text += f", MFU {flops / seconds / args.peak_tflops / 1e12:.1%}"
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
