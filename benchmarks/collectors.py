"""Cost of each hook per call: the same small loops under torchrun and under `rankscope run`, in alternation.

    python benchmarks/collectors.py --rounds 5

`compiled` is with the collectives hook in C++ (`rankscope doctor --build`), `Python` without it, in the same rounds.
Times are CPU time of the whole process per call (gloo's threads included): the median over the rounds, and of what is
added the least and the most of a round. The group has one rank, so that nothing is waited for; with a GPU it is one of
NCCL. Without a GPU the last rows are with the tests' CUDA driver, which costs next to nothing and needs a C compiler.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rankscope.collectors.native import collectives_hook

PLAIN = [sys.executable, "-m", "torch.distributed.run"]
RECORDED = [str(Path(sys.executable).with_name("rankscope")), "run", "--no-report", "--profile-first", "0"]
REPEATS = 9


def cpu_ns_per_call(call: Callable[[], object], calls: int) -> float:
    """The median over REPEATS loops of `calls` calls each."""
    times = []
    for _ in range(REPEATS):
        start_ns = time.process_time_ns()
        for _ in range(calls):
            call()
        times.append((time.process_time_ns() - start_ns) / calls)
    return statistics.median(times)


def cpu_ns_of(thread: int | None) -> int:
    """CPU time that a thread of this process has had; 0 where there is no such thread."""
    return 0 if thread is None else int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0])


def measure() -> dict[str, float]:
    """CPU time per call of everything that rankscope hooks into, ns, in this process."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch.utils.data import DataLoader

    import rankscope
    from rankscope.collectors.in_rank import session
    from rankscope.collectors.in_rank.ring_writer import Ring

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support/cuda"))
    from pretend import build, pretend

    torch.set_num_threads(1)
    x = torch.ones(8)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        x = x.cuda()
    dist.init_process_group("nccl" if x.is_cuda else "gloo")
    parameter = torch.nn.Parameter(torch.ones_like(x))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    batches = iter(DataLoader(range(1_000_000), batch_size=None))
    ring = Ring()

    def optimizer_step() -> None:
        parameter.grad = x
        optimizer.step()

    def annotated() -> None:
        with rankscope.annotate("span"):
            pass

    def recorded_function() -> None:
        with torch.autograd.profiler.record_function("span"):
            pass

    gc.freeze()  # so that a collection costs little by itself
    loops: dict[str, tuple[Callable[[], object], int]] = {
        "add_ (for comparison)": (lambda: x.add_(1), 5000),
        "all_reduce": (lambda: dist.all_reduce(x), 500),
        "all_reduce, async, then wait": (lambda: dist.all_reduce(x, async_op=True).wait(), 500),
        "functional all_reduce, then wait_tensor": (
            lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD)),
            500,
        ),
        "barrier": (dist.barrier, 500),
        "a model's buffers, as DDP broadcasts them": (
            lambda: dist._broadcast_coalesced(dist.group.WORLD, [x], 1 << 20, 0),
            500,
        ),
        "backward": (lambda: (parameter * x).sum().backward(), 1000),
        "optimizer step": (optimizer_step, 1000),
        "next batch of a DataLoader": (lambda: next(batches), 2000),
        "garbage collection": (lambda: gc.collect(0), 2000),
        "record_function": (recorded_function, 5000),
        "rankscope.annotate": (annotated, 5000),
        "rankscope.step": (rankscope.step, 5000),
        "one record into the ring": (lambda: ring.region(0, 0, 0, 0), 5000),
    }
    for call, _ in loops.values():  # first calls import and cache
        for _ in range(20):
            call()
    results = {name: cpu_ns_per_call(call, calls) for name, (call, calls) in loops.items()}

    if torch.cuda.is_available():
        on_device = torch.ones(1, device="cuda")
        if session._session:
            session._session.emit.learn_device(on_device)  # as an optimizer's weights would
    else:
        with tempfile.TemporaryDirectory() as folder:
            pretend(build(Path(folder)))
    rankscope.step()  # marks begin
    time.sleep(0.5)
    mark = session._session.emit.mark if session._session else lambda _: None
    results["a mark of device_marks"] = cpu_ns_per_call(lambda: mark(0), 100)  # fewer than there are events
    waits = session._session.emit.waits if session._session else None
    results["two marks around a device's wait"] = cpu_ns_per_call(lambda: waits and waits[0]() and waits[1](), 100)
    time.sleep(1.5)  # until all of these marks were seen
    threads = {thread.name: thread.native_id for thread in threading.enumerate()}
    assert not session._session or "rankscope-device" in threads, "no mark was put"
    watched = {
        "the thread that sees 20 marks, per second": threads.get("rankscope-device"),
        "the thread that takes 5 samples, per second": threads.get("rankscope-samples"),
    }
    before = {name: cpu_ns_of(thread) for name, thread in watched.items()}
    for _ in range(100):
        mark(0)
        time.sleep(0.05)
    results |= {name: (cpu_ns_of(thread) - before[name]) / 5 for name, thread in watched.items()}
    dist.destroy_process_group()
    return results


def run(launcher: list[str], **environment: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [*launcher, "--nproc-per-node", "1", __file__, "--write", str(results)]
        subprocess.run(command, cwd=folder, env=os.environ | environment, check=True, capture_output=True)
        measured: dict[str, float] = json.loads(results.read_text())
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", type=Path, help="be the rank: measure and write the results there")
    args = parser.parse_args()
    if args.write:
        args.write.write_text(json.dumps(measure()))
        sys.stdout.flush()
        os._exit(0)

    collectives_hook.build()
    with tempfile.TemporaryDirectory() as empty:
        rounds = [(run(PLAIN), run(RECORDED), run(RECORDED, XDG_CACHE_HOME=empty)) for _ in range(args.rounds)]
    print(f"{args.rounds} rounds; CPU time per call, µs, and what recording adds to it (least to most of a round)")
    print(f"{'':42}{'without':>10}{'compiled':>24}{'Python':>24}")
    for name in rounds[0][0]:
        plain = [each[0][name] / 1e3 for each in rounds]
        compiled, python = ([each[i][name] / 1e3 - each[0][name] / 1e3 for each in rounds] for i in (1, 2))
        print(f"{name:42}{statistics.median(plain):10.2f}{_spread(compiled):>24}{_spread(python):>24}")


def _spread(added: list[float]) -> str:
    return f"{statistics.median(added):+.2f} ({min(added):+.1f} to {max(added):+.1f})"


if __name__ == "__main__":
    main()
