"""What a deep window costs the rank that it is on, and the agent that converts it.

    python benchmarks/window.py --rounds 5

A model of many small layers, as many operators per step as asked for; rounds of steps without and with the profiler, in
turns. Times of the training thread are its CPU time, of which a busy machine changes little; its wall time and the
longest time that it paused while the trace was saved are given beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from rankscope.collectors.native import collectives_hook
from rankscope.collectors.rank.window import _Profile
from rankscope.profiler.window import convert

wall, cpu = time.perf_counter_ns, time.thread_time_ns


def step_of(layers: int, width: int) -> Callable[[], None]:
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return step


def cost(call: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall time of this thread, ms."""
    begun = cpu(), wall()
    call()
    return (cpu() - begun[0]) / 1e6, (wall() - begun[1]) / 1e6


def longest_stop(call: Callable[[], object]) -> tuple[float, float]:
    """How long the call took in a thread of its own, and the longest that this thread could not go on meanwhile, ms."""
    thread = threading.Thread(target=call)
    begun = last = wall()
    longest = 0
    thread.start()
    while thread.is_alive():
        now = wall()
        longest, last = max(longest, now - last), now
    return (wall() - begun) / 1e6, longest / 1e6


def one_window(step: Callable[[], None], steps: int, folder: Path) -> dict[str, float]:
    without = [cost(step) for _ in range(steps)]
    profile = _Profile(None, collectives_hook.load())
    prepare, start = cost(profile.prepare), cost(profile.start)
    within = []
    for number in range(steps):
        profile.next_step(number)
        within.append(cost(step))
    stop = cost(profile.stop)
    trace = folder / "rank0.pt.trace.json"
    save_ms, stopped_ms = longest_stop(lambda: profile.save(str(trace)))
    described = {"node": 0, "window": 1, "first_step": 0, "steps": steps, "reason": "benchmark"}
    of_rank = {"path": str(trace), "marks": profile.marks}
    size_mb = trace.stat().st_size / 1e6
    process = time.process_time_ns()
    rows = convert(folder, described | {"ranks": {"0": of_rank}})
    return {
        "events per step": rows / steps,
        "step without, CPU ms": statistics.median(c for c, _ in without),
        "step within, CPU ms": statistics.median(c for c, _ in within),
        "prepare, CPU ms": prepare[0],
        "start, CPU ms": start[0],
        "stop, CPU ms": stop[0],
        "stop, wall ms": stop[1],
        "save, wall ms": save_ms,
        "longest stop while saving, wall ms": stopped_ms,
        "trace, MB": size_mb,
        "convert, CPU ms": (time.process_time_ns() - process) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)

    columns = []
    for layers in args.layers:
        step = step_of(layers, args.width)
        for _ in range(3):
            step()
        rounds = []
        for _ in range(args.rounds + 1):
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(one_window(step, args.steps, Path(folder)))
        columns.append({name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]})
        if layers == args.layers[0]:
            first = rounds[0]
            print(f"the first window of a process: prepare {first['prepare, CPU ms']:.1f} ms of CPU")
    print(f"medians of {args.rounds} windows of {args.steps} steps; torch {torch.__version__}\n")
    print(f"{'layers':36}" + "".join(f"{layers:>12,}" for layers in args.layers))
    for name in columns[0]:
        print(f"{name:36}" + "".join(f"{column[name]:12,.2f}" for column in columns))
    events = np.array([column["events per step"] * args.steps for column in columns])
    for name in ("stop, CPU ms", "save, wall ms", "convert, CPU ms"):
        slope = np.polyfit(events, [column[name] for column in columns], 1)[0] if len(columns) > 1 else np.nan
        print(f"{name.split(',')[0] + ', µs per event':36}{1000 * slope:12.2f}")
    more = [column["step within, CPU ms"] / column["step without, CPU ms"] for column in columns]
    print(f"{'step within / without':36}" + "".join(f"{ratio:12.3f}" for ratio in more))


if __name__ == "__main__":
    main()
