"""How fast and how true the replay is.

    python benchmarks/replay.py                  # operations a second and core
    python benchmarks/replay.py RUN …            # how well it meets the steps of recorded runs
    python benchmarks/replay.py --simulated 4    # predicted gains against jobs that really had no fault

Speed: graphs that are made up, CPU time of one process, the best of several rounds, since other programs only ever add
to it. Gains: jobs of `benchmarks/faults` with one planted fault, whose cost is what the same job, with the same random
numbers, takes less without it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

import rankscope
from rankscope.analysis.metrics.links import judged_links
from rankscope.analysis.model.pipeline_ops import BACKWARD, FORWARD
from rankscope.analysis.replay.graph import Nodes, assemble, replay
from rankscope.analysis.replay.host_graph import fidelity, graph_of, step_lengths
from rankscope.analysis.replay.pipeline import OpGrid, op_grid
from rankscope.analysis.replay.pipeline_plan import replay as replay_plan
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import build_timeline
from rankscope.errors import NotReplayable

sys.path.insert(0, str(Path(__file__).parent / "faults"))

FIXES = {
    "slow_rank": "rank:{rank}",
    "sporadic_rank": "rank:{rank}",
    "slow_node": "node:{node}",
    "slow_link": "link:node{node}",
    "input_stall": "input",
    "gc_stall": "gc",
    "recompile": "compile",
    "checkpoint_stall": "checkpoint",
    "load_imbalance": "balance",
}


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


def made_up_job(ranks: int, steps: int, collectives: int) -> tuple[Nodes, np.ndarray, np.ndarray]:
    """What `assemble` takes: each rank computes, all reduce, and so on."""
    rounds = steps * collectives
    own = np.arange(ranks * rounds).reshape(rounds, ranks)  # computation before each collective
    transfer = own.size + np.arange(rounds)
    end = own.size + rounds + np.arange(own.size).reshape(rounds, ranks)
    waits = [np.repeat(transfer, ranks), end.ravel(), own[1:].ravel()]
    waited_for = [own.ravel(), np.repeat(transfer, ranks), end[:-1].ravel()]
    n = 2 * own.size + rounds
    nothing = np.zeros(n, dtype=np.int64)
    nodes = Nodes(
        duration_ns=np.random.default_rng(0).uniform(0.9e6, 1.1e6, n),
        **dict.fromkeys(("rank", "step", "part", "label", "instance", "start_ns", "end_ns"), nothing),
        parts=(),
        labels=(),
        origin_ns=0,
    )
    return nodes, np.concatenate(waits), np.concatenate(waited_for)


def speed(rounds: int) -> None:
    print(f"{'graph of a job':40}{'nodes':>10}{'M nodes/s':>11}{'to build, s':>13}")
    for ranks, steps, collectives in ((8, 100, 50), (64, 200, 50), (1024, 20, 50)):
        job = made_up_job(ranks, steps, collectives)
        graph = assemble(*job)
        build = best_of(1, lambda job=job: assemble(*job))
        seconds = best_of(rounds, lambda graph=graph: replay(graph, graph.duration_ns))
        name = f"{ranks} ranks, {steps} steps, {collectives} collectives each"
        print(f"{name:40}{len(graph):10}{len(graph) / seconds / 1e6:11.0f}{build:13.2f}")
    print(f"\n{'pipeline':40}{'ops':>10}{'M ops/s':>11}{'copy alone':>13}")
    for shape in ((4, 4, 32, 2), (8, 16, 50, 8), (8, 16, 200, 16)):
        grid = op_grid(made_up(*shape))
        own = durations(grid)
        seconds = best_of(rounds, lambda grid=grid, own=own: replay_plan(grid.plan, own))
        # Each duration is read and each start and end written at least once.
        start, end = np.empty_like(own), np.empty_like(own)
        limit = best_of(rounds, lambda own=own, a=start, b=end: (np.copyto(a, own), np.copyto(b, own)))
        name = "{} stages, {} microbatches, {} steps, {} replicas".format(*shape)
        print(f"{name:40}{own.size:10}{own.size / seconds / 1e6:11.1f}{own.size / limit / 1e6:13.0f}")


def meets(runs: list[Path]) -> None:
    """How well each run is met: fitted to all of its steps, and to the other half of them."""
    print(f"{'run':30}{'steps':>7}{'ms':>8}{'fitted':>10}{'median':>9}{'p90':>8}{'mean':>8}{'unmatched':>11}")
    for path in runs:
        host = graph_of(build_timeline(Trace.open(path)))
        lengths = step_lengths(host, replay(host.graph, host.graph.duration_ns))
        measured = host.steps["measured_ns"].to_numpy()
        error = fidelity(host)
        print(
            f"{path.name:30}{error.steps:7}{measured.mean() / 1e6:8.1f}"
            f"{np.median(np.abs(lengths - measured) / measured):10.3%}"
            f"{error.median_error:9.2%}{error.p90_error:8.2%}{error.mean_error:+8.2%}{host.unmatched:11}"
        )


def gains(seeds: int) -> None:
    """Predicted against true gain of one fault in simulated jobs."""
    from faults import Case, simulated
    from record import write

    columns = ("ranks", 6), ("fix", 12), ("step ms", 9), ("true ms", 9), ("predicted", 17), ("off, of step", 14)
    print(f"{'job':28}" + "".join(f"{name:>{width}}" for name, width in (*columns, ("replay", 8))))
    for kind, fix in FIXES.items():
        for dose in ("loud", "quiet"):
            for seed in range(seeds):
                log, (truth,) = simulated(Case(kind, dose, seed), small=True)
                named = fix.format(rank=next(iter(truth.ranks), 0), node=next(iter(truth.nodes), 0))
                with tempfile.TemporaryDirectory() as folder:
                    trace = rankscope.open(write(log, Path(folder) / "run"))
                    timeline = build_timeline(trace)
                addresses = {node: launch.get("addresses", ()) for node, launch in trace.run.items()}
                name = f"{kind}/{dose}/{seed} {log.job.parallel}"
                try:
                    run = rerun(timeline, judged_links(timeline.counters, timeline.steps, addresses))
                    gain = run.gain(named)
                except (NotReplayable, ValueError) as reason:
                    print(f"{name:28}{log.job.ranks:6}{named:>12} {reason}"[:118])
                    continue
                off = (gain.gain_ns - truth.cost_ns) / run.step_ns
                print(
                    f"{name:28}{log.job.ranks:6}{named:>12}{run.step_ns / 1e6:9.1f}{truth.cost_ns / 1e6:9.1f}"
                    f"{gain.gain_ns / 1e6:9.1f} ± {gain.uncertainty_ns / 1e6:5.1f}{off:+14.2%}"
                    f"{run.fidelity.median_error:8.2%}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--simulated", type=int, metavar="SEEDS", help="of each kind of fault, in two doses")
    arguments = parser.parse_args()
    if arguments.runs:
        meets(arguments.runs)
    elif arguments.simulated:
        gains(arguments.simulated)
    else:
        speed(arguments.rounds)


if __name__ == "__main__":
    main()
