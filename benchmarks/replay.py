"""How many operations a second and core the replay takes, beside what memory allows; and a whole analysis of stages.

    python benchmarks/replay.py

The pipeline is made up: 1F1B with sends and receives, durations drawn at random. CPU time of one process, the best of
several rounds, since other programs only ever add to it.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable

import numpy as np
import polars as pl

from rankscope.analysis.detectors import NotResolvable, stage_imbalance
from rankscope.analysis.timeline.pipeline import BACKWARD, FORWARD, OpGrid, communicates, op_grid
from rankscope.analysis.timeline.replay import WhatIf, ideal, replay


def made_up(stages: int, microbatches: int, steps: int, replicas: int) -> pl.DataFrame:
    """Table `ops` of a 1F1B pipeline. Starts are in the order of the schedule; the replay finds the true ones."""
    rows = []
    for stage in range(stages):
        warmup = min(stages - stage - 1, microbatches)
        order = [(FORWARD, i) for i in range(warmup)]
        for i in range(warmup, microbatches):
            order += [(FORWARD, i), (BACKWARD, i - warmup)]
        order += [(BACKWARD, i) for i in range(microbatches - warmup, microbatches)]
        for place, (kind, i) in enumerate(order):
            way, step = kind.split("-")[0], 1 if kind == FORWARD else -1
            if 0 <= stage - step < stages:
                rows.append((stage, f"{way}-recv", i, place * 1000, place * 1000 + 10))
            rows.append((stage, kind, i, place * 1000 + 10, place * 1000 + 990))
            if 0 <= stage + step < stages:
                rows.append((stage, f"{way}-send", i, place * 1000 + 990, place * 1000 + 1000))
    one = pl.DataFrame(rows, ["stage", "name", "seq", "start_ns", "end_ns"], orient="row")
    lanes = pl.DataFrame({"step": range(steps)}).join(pl.DataFrame({"replica": range(replicas)}), how="cross")
    return one.join(lanes, how="cross").with_columns(
        rank=pl.col("stage") * replicas + pl.col("replica"), chunk=pl.lit(None, pl.Int32)
    )


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def durations(grid: OpGrid) -> np.ndarray:
    return np.random.default_rng(0).uniform(0.9e6, 1.1e6, grid.start_ns.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{'stages':>6}{'microbatches':>13}{'steps':>6}{'replicas':>9}{'ops':>10}{'M ops/s':>9}{'copy alone':>12}")
    for shape in ((4, 4, 32, 2), (8, 16, 50, 8), (8, 16, 200, 16)):
        ops = made_up(*shape)
        grid = op_grid(ops)
        own = durations(grid)
        seconds = best_of(rounds, lambda grid=grid, own=own: replay(grid.plan, own))
        # Each duration is read and each start and end written at least once.
        start, end = np.empty_like(own), np.empty_like(own)
        limit = best_of(rounds, lambda own=own, a=start, b=end: (np.copyto(a, own), np.copyto(b, own)))
        rates = (own.size / t / 1e6 for t in (seconds, limit))
        print(f"{shape[0]:6}{shape[1]:13}{shape[2]:6}{shape[3]:9}{own.size:10}" + "{:9.1f}{:12.0f}".format(*rates))
    load = best_of(1, lambda: op_grid(ops))
    whatif = WhatIf(grid.plan, own, ideal(own, grid.kinds, communicates))
    stages = best_of(
        1, lambda: [whatif.share(np.array([k.stage == s for k in grid.keys])[:, None, None]) for s in (0,)]
    )
    whole = best_of(1, lambda: _detect(ops))
    print(
        f"the last one: table to arrays {load:.2f} s, share of one stage {stages:.2f} s, stage_imbalance {whole:.2f} s"
    )


def _detect(ops: pl.DataFrame) -> None:
    # The starts are made up, so the replay does not meet them and the verdict is refused, after all the work.
    with contextlib.suppress(NotResolvable):
        stage_imbalance.detect(ops)


if __name__ == "__main__":
    main()
