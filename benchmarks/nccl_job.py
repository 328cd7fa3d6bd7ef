"""A job for the checks in benchmarks/gpu_checks.py: all-reduces of one size, by ranks that can share one GPU.

    rankscope run --standalone --nproc-per-node 2 benchmarks/nccl_job.py --one-gpu

With `--one-gpu` all ranks use device 0, and NCCL takes each for a node of its own: it then talks through sockets, as
between nodes, which its proxies do. `--late 1:20` lets rank 1 come 20 ms late to each. `--captures 5` then captures so
many CUDA graphs on rank 0, each for 2 s, while an all-reduce is under way to which rank 1 comes 3 s late.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--mib", type=float, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--captures", type=int, default=0)
    parser.add_argument("--late", default="-1:0", help="RANK:MILLISECONDS")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    late_rank, late_ms = map(float, arguments.late.split(":"))
    device = begin(arguments)
    tensor = torch.ones(int(arguments.mib * 2**20 / 4), device=device)
    weights = torch.nn.Parameter(torch.zeros_like(tensor))
    weights.grad = tensor
    optimizer = torch.optim.SGD([weights], lr=0.0)  # so that there are steps
    started = time.perf_counter()
    for _ in range(arguments.steps):
        if rank == late_rank:
            time.sleep(late_ms / 1e3)
        dist.all_reduce(tensor)
        optimizer.step()
        tensor.fill_(1)
        if device.type == "cuda":
            torch.cuda.synchronize()
    for _ in range(arguments.captures):
        if rank == 1:
            time.sleep(3)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            capture(2.0)
        work.wait()
        torch.cuda.synchronize()
    end(device, started, arguments.steps)


def capture(seconds: float) -> None:
    """Capture a graph in the mode that other threads can break, and keep it open; what runs on the device runs on."""
    ones, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="global")
        ones.mul_(2)
        time.sleep(seconds)
        graph.capture_end()


def begin(arguments: argparse.Namespace) -> torch.device:
    """The process group, by `arguments.backend`, and the device of this rank: with `one_gpu` that of all."""
    if arguments.one_gpu:
        apart = {"NCCL_HOSTID": f"rank{os.environ['RANK']}", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
        os.environ.update(apart | {"NCCL_SOCKET_IFNAME": "lo"})
    device = torch.device("cpu")
    if arguments.backend == "nccl":
        device = torch.device("cuda", 0 if arguments.one_gpu else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    return device


def end(device: torch.device, started: float, steps: int) -> None:
    """Rank 0 says how long a step took since `started`, by `time.perf_counter`."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(f"{(time.perf_counter() - started) / steps * 1e3:.3f} ms per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
