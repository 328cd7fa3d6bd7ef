"""How many rows per second are matched across ranks, on one core, beside what the machine allows.

    POLARS_MAX_THREADS=1 python benchmarks/matching.py [--ranks 1024] [--operations 5000]

The job is tensor, pipeline and data parallel: of each rank's operations most are in its tensor-parallel group of 8,
some in its data-parallel group, some are sends and receives to the next stage, some are of all ranks. Rows per second
are of CPU time. The limits, in the same run: a polars group-by of the same rows by group and ordinal that finds the
least duration only, and one read of the columns that matching needs.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # before polars is loaded

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Clock
from rankscope.analysis.timeline.matching import match_collectives
from rankscope.collectors.schema import OPS

TENSOR, STAGES = 8, 4
MIX = ("tp", "tp", "tp", "dp", "tp", "tp", "p2p", "tp", "tp", "world")  # one after the other


def job(ranks: int, operations: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables `collectives` and `groups` of such a job. Each rank's rows are by start."""
    rank = np.arange(ranks)
    per_stage = ranks // STAGES
    group_of = {
        "world": np.zeros(ranks, np.int64),
        "p2p": np.zeros(ranks, np.int64),
        "tp": 1 + rank // TENSOR,
        "dp": 1 + ranks + rank // per_stage * TENSOR + rank % TENSOR,
    }
    kind = np.array(MIX)[np.arange(operations) % len(MIX)]
    seq = np.zeros(operations, np.uint32)
    for name in set(MIX):
        seq[kind == name] = np.arange((kind == name).sum())
    rng = np.random.default_rng(0)
    n = ranks * operations
    group = np.stack([group_of[k] for k in kind], axis=1).ravel() * 1_000_003 + 7
    in_p2p = np.tile(kind == "p2p", ranks)
    # Stages 0 and 1 exchange, and 2 and 3: the even one sends, the odd one receives.
    sends = np.repeat(rank // per_stage % 2 == 0, operations)
    peer = np.repeat(np.where(rank // per_stage % 2 == 0, rank + per_stage, rank - per_stage), operations)
    usual = {"tp": "allreduce", "dp": "reduce_scatter_base", "world": "allgather_base", "p2p": "send"}
    op = np.tile(np.array([OPS.index(usual[k]) for k in kind]), ranks)
    op[in_p2p & ~sends] = OPS.index("recv")
    start = np.tile(np.arange(operations) * 1_000_000, ranks) + rng.integers(0, 300_000, n)
    end = np.tile(np.arange(operations) * 1_000_000, ranks) + rng.integers(350_000, 400_000, n)
    collectives = pl.DataFrame(
        {
            "rank": np.repeat(rank, operations).astype(np.int32),
            "node": np.repeat(rank // TENSOR, operations).astype(np.int32),
            "start_ns": start,
            "end_ns": end,
            "device_start_ns": pl.Series([None], dtype=pl.Int64).new_from_index(0, n),
            "group_id": group,
            "seq": np.tile(seq, ranks),
            "op": pl.Series(OPS).gather(op),
            "peer": np.where(in_p2p, peer, -1).astype(np.int32),
            "tag": np.zeros(n, np.int32),
        }
    )
    members: dict[int, list[str]] = {int(g): [] for name in group_of for g in np.unique(group_of[name])}
    for name in ("world", "tp", "dp"):
        for r in rank:
            members[int(group_of[name][r])].append(str(r))
    groups = pl.DataFrame(
        {
            "group_id": [g * 1_000_003 + 7 for g in members],
            "name": [f"group {g}" for g in members],
            "members": [",".join(m) for m in members.values()],
        }
    )
    return collectives, groups


def timed(what: str, rows: int, run: Callable[[], object]) -> None:
    """The best of three, since what else runs on the machine only takes away."""
    seconds = []
    for _ in range(3):
        begun = time.process_time()
        run()
        seconds.append(time.process_time() - begun)
    print(f"{what:<44}{rows / min(seconds) / 1e6:8.1f} M rows/s of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--operations", type=int, default=5000)
    args = parser.parse_args()
    collectives, groups = job(args.ranks, args.operations)
    rows = len(collectives)
    clocks = [
        Clock(node=n, offset_ns=0, drift_ppm=0.0, error_ns=1_000 if n else 0, source="pings")
        for n in collectives["node"].unique().sort()
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    matched = match_collectives(collectives, groups, clocks)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    share = 1 - matched["instance_id"].null_count() / rows
    print(f"{rows} rows of {args.ranks} ranks, {len(groups)} groups; {share:.0%} matched")
    print(f"memory: {grown * 1024 / rows:.0f} bytes per row more at the peak, result included")
    needed = ["start_ns", "end_ns", "group_id", "seq", "rank"]
    least = (pl.col("end_ns") - pl.col("start_ns")).min()
    timed("match_collectives", rows, lambda: match_collectives(collectives, groups, clocks))
    timed("polars group-by, least duration only", rows, lambda: collectives.group_by("group_id", "seq").agg(least))
    timed("one read of five columns", rows, lambda: [collectives[c].sum() for c in needed])


if __name__ == "__main__":
    main()
