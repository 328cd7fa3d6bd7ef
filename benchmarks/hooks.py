"""What the training thread does in each of rankscope's hooks while a job runs, in CPU time per step.

    python benchmarks/hooks.py examples/train_transformer.py --parallel fsdp2 --steps 100

In a job a hook costs several times what it costs in a loop (collectors.py): caches hold the job's work. Times are those
of rank 0 after 10 steps, each with the clock's own readings in it, which it takes twice a call. What compiled hooks do
is not in them, nor the little before a guard: looks at FSDP's spans, which are left out, and at short collections.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overhead import RECORDED, module_of
from rankscope.collectors.in_rank.session import Emit

ROOT = Path(__file__).parents[1]
WARMUP = 10
clock = time.thread_time_ns


class Watch:
    """Times the outermost of the guarded calls on the main thread."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = {}  # by hook: calls, ns
        self.steps = self._depth = 0

    def guard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(emit: object, collector: str, function: Callable[..., Any]) -> Callable[..., Any]:
            name = f"{collector}: {getattr(function, '__qualname__', function)}"
            call = original(emit, collector, function)
            main, is_step = threading.main_thread(), name == "optimizer: start.<locals>.after"

            def timed(*args: object) -> Any:
                if threading.current_thread() is not main or self._depth:
                    return call(*args)
                self._depth = 1
                begun = clock()
                try:
                    return call(*args)
                finally:
                    of = self.spent.setdefault(name, [0, 0])
                    of[0], of[1] = of[0] + 1, of[1] + clock() - begun
                    self._depth = 0
                    self.steps += is_step
                    if is_step and self.steps == WARMUP:
                        self.spent.clear()

            return timed

        return watched


def be_a_rank(script: str) -> None:
    watch = Watch()
    Emit.guard = watch.guard(Emit.guard)  # type: ignore[method-assign]
    job = module_of(Path(script))
    begun = time.perf_counter()
    job.main()
    step_ms = (time.perf_counter() - begun) / watch.steps * 1e3
    if os.environ["RANK"] != "0":
        return
    steps = watch.steps - WARMUP
    rows = sorted(watch.spent.items(), key=lambda row: -row[1][1])
    total = sum(ns for _, (_, ns) in rows) / steps / 1e3
    print(f"{total:.0f} µs of each step of about {step_ms:.0f} ms: {total / step_ms / 10:.3f} %")
    for name, (calls, ns) in rows[:20]:
        print(f"{name:60} {calls / steps:7.2f} calls {ns / steps / 1e3:8.1f} µs")


def main() -> None:
    if sys.argv[1] == "--be-a-rank":
        del sys.argv[:2]
        be_a_rank(sys.argv[0])
        return
    script, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        job = [str(Path(__file__).resolve()), "--be-a-rank", str((ROOT / script).resolve()), *words]
        subprocess.run([*RECORDED, "--nproc-per-node", "2", *job], cwd=folder, check=True)


if __name__ == "__main__":
    main()
