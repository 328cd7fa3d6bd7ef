"""Whether the root cause is named first when a fault is put into a real capture.

    python benchmarks/captures/inject.py [--mutants 200] [--seed 0] [--data ../shared/data]

A stall of a host, a class of kernels that one device runs slowly, or a kind of collective whose transfers take longer,
on a random rank and at a random place of a real capture of several ranks, re-timed by `retime.py`. Half of the stalls
are in each step, half in one. What was launched before the capture is as it was: its collectives cannot be matched.
Captures that have a straggler of their own get a fault that is twice as large. Where the steps of the others became
longer by 5 % at least, the first root finding must be of the kind and name the rank. Findings of the original, with
the same ranks, are true of the mutant too and are passed over; where one is the answer itself, it must cost more
by half of what was put in. So are late hosts, but for those of the stalled rank alone, if devices of the original idle
for their hosts as long, be it unexplained there. A stall in the middle of a call that asks the driver for memory looks
as if that call took long, and may be called so. The originals are judged too.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import rankscope
from captures.retime import Change, Real, load, retimed, write
from captures.score import roots, told
from rankscope.analysis.model.finding import Report

DATA = Path(__file__).parents[2].parent / "shared" / "data"
# Path, share of the step that its own straggler costs by the sets' description, weight among the mutants.
SETS = {
    "resnet18": ("kineto/torchrec/resnet18", 0.06, 5),
    "long_a2a_5": ("kineto/torchrec/sst_long_a2a_optimizer_5", 0.14, 5),
    "long_a2a_3": ("kineto/torchrec/sst_long_a2a_optimizer_3", 0.14, 5),
    "dlrm8": ("kineto/param-dlrm8/dlrm_kineto.tar.gz", 0.40, 3),
    "nanogpt": ("kineto/nanogpt-normuon", 0.16, 2),
}
KINDS = ("stall", "kernels", "link")
_ANSWERS = {
    "stall": ("slow_rank", "host_bound", "host_sync", "noisy_host", "input_stall"),
    "kernels": ("slow_rank", "throttling"),
    "link": ("exposed_communication", "slow_link", "low_bandwidth"),
}
_MEMORY = re.compile(r"(cuda|hip)(Malloc|Free)|cu(da)?Mem(Create|Map|Unmap|Release)")
_COSTS = 0.05  # share of the step from which the cause must be named
_CLASS = 0.05  # least share of a device's computation that a class of kernels has

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Original:
    """Findings on an unchanged set, and for how long its devices idle for their hosts at most, ns per step."""

    said: list[Row]
    idle_ns: int


Mutant = tuple[str, Path, str, int, Original]


@lru_cache(maxsize=1)
def _real(path: Path) -> Real:
    return load(path)


def mutants(count: int, data: Path, own: dict[str, Original], seed: int) -> Iterator[Mutant]:
    """Set, path, kind, seed and the original of each, one set after the other; `seed` is the first one's."""
    weights = {name: weight for name, (_, _, weight) in SETS.items()}
    for name, (place, _, weight) in SETS.items():
        for number in range(round(count * weight / sum(weights.values()))):
            yield name, data / place, KINDS[number % len(KINDS)], seed, own[name]
            seed += 1


def judged(mutant: Mutant) -> Row:
    name, path, kind, seed, own = mutant
    rng = np.random.default_rng(seed)
    real = _real(path)
    rank = int(rng.choice(sorted(real.documents)))
    for row in real.rows:
        row.extra = 0.0
    step_us = float(np.mean([(mine[-1].end - mine[0].start) / len(mine) for mine in real.steps.values()]))
    share = max(0.1, 2 * SETS[name][1]) + float(rng.uniform(0, 0.3))
    change, what, answers = Change(), "", _ANSWERS[kind]
    if kind == "stall":
        change = _stall(real, rank, share * step_us, rng)
        what = f"{len(change.stalls[rank])} times"
        answers += ("memory_pressure",) if _asks_for_memory(real, rank, change) else ()
    elif kind == "kernels":
        what = _slow_kernels(real, rank, share * step_us, rng)
    else:
        what = _slow_transfers(real, share * step_us, rng)
    # If no rank waits for it before the capture ends, it makes its own steps longer, and the job's not yet.
    longer = retimed(real, change)
    cost = float(np.mean([share for of, share in longer.items() if kind == "link" or of != rank]))
    with tempfile.TemporaryDirectory(prefix="rankscope-inject-") as folder:
        said = _said(rankscope.diagnose(rankscope.open(write(real, Path(folder) / "capture"))))
    of_others = [one for one in said if not _is_the_originals(one, own.said, cost / 2)]
    of_others = [one for one in of_others if not _idled_before(one, own.idle_ns) or one["ranks"] == [rank]]
    first = next(iter(of_others), None)
    right = first is not None and first["level"] != "unexplained" and first["detector"] in answers
    if kind != "link":
        right = right and first["ranks"] == [rank]
    name = f"{name}/{kind}/{seed}"
    row = {"name": name, "kind": kind, "rank": rank, "what": what, "cost": cost}
    return row | {"right": right, "said": said, "first": first}


def _is_the_originals(said: Row, own: list[Row], more: float) -> bool:
    """Whether the original has this finding, at about the same cost."""
    same = [one for one in own if all(one[key] == said[key] for key in ("detector", "ranks", "groups"))]
    return any(said["fraction"] < one["fraction"] + more for one in same)


def _idled_before(said: Row, idle_ns: int) -> bool:
    """Whether devices of the original idle for their hosts for as long."""
    return bool(said["detector"] == "host_bound" and said["ns"] <= idle_ns)


def _asks_for_memory(real: Real, rank: int, change: Change) -> bool:
    """Whether the rank stalls in the middle of a call that asks the driver for memory."""
    calls = [row for row in real.rows if row.rank == rank and row.stream is None and _MEMORY.match(row.event["name"])]
    return any(row.start < at < row.end for row in calls for at, _ in change.stalls[rank])


def _said(report: Report) -> list[Row]:
    return [told(finding) | {"ns": finding.lost_ns_per_step} for finding in roots(report)]


def _original(path: Path) -> Original:
    report = rankscope.diagnose(rankscope.open(path))
    idle_ns = max((loss.most_ns for loss in report.losses if loss.kind == "idle"), default=0)
    return Original(_said(report), idle_ns)


def _stall(real: Real, rank: int, us: float, rng: np.random.Generator) -> Change:
    """At the same place of each step, or in one step as much as in all."""
    steps, place = real.steps[rank], float(rng.uniform(0.1, 0.9))
    if rng.random() < 0.5:
        one = steps[int(rng.integers(len(steps)))]
        return Change({rank: [(one.start + place * (one.end - one.start), us * len(steps))]})
    return Change({rank: [(step.start + place * (step.end - step.start), us) for step in steps]})


def _slow_kernels(real: Real, rank: int, us: float, rng: np.random.Generator) -> str:
    """One class of kernels, each as many times as long."""
    of_class = defaultdict(list)
    for row in real.rows:
        is_kernel = row.event["cat"] == "kernel" and row.launch is not None
        if row.rank == rank and is_kernel and not row.is_communication:
            of_class[row.event["name"]].append(row)
    took = {name: sum(row.end - row.start for row in rows) for name, rows in of_class.items()}
    large = sorted(name for name, lasts in took.items() if lasts >= _CLASS * sum(took.values()))
    name = str(rng.choice(large or [max(took, key=lambda one: took[one])]))
    times = us * len(real.steps[rank]) / took[name]
    for row in of_class[name]:
        row.extra = times * (row.end - row.start)
    return f"{name[:60]} {1 + times:.1f} x"


def _slow_transfers(real: Real, us: float, rng: np.random.Generator) -> str:
    """One kind of collective, all as much longer."""
    of_kind = defaultdict(list)
    for one in real.instances:
        of_kind[one[0].event["name"].split("(")[0]].append(one)
    name = str(rng.choice(sorted(of_kind)))
    steps = len(next(iter(real.steps.values())))
    for one in of_kind[name]:
        for row in one:
            row.extra = us * steps / len(of_kind[name])
    return f"{name} of {len(of_kind[name])}"


def show(rows: list[Row]) -> None:
    costly = [r for r in rows if r["cost"] >= _COSTS]
    for row in costly:
        if not row["right"]:
            first = row["first"]
            got = (
                f"{first['level']} {first['detector']} {first['ranks']} {first['fraction']:.0%}" if first else "nothing"
            )
            print(f"  {row['name']}: rank {row['rank']} {row['what']} costs {row['cost']:.0%}; said {got}")
    for title, key in (("set", 0), ("kind", 1)):
        counts = {of: [r for r in costly if r["name"].split("/")[key] == of] for of in (SETS, KINDS)[key]}
        told_ = ", ".join(f"{of} {sum(r['right'] for r in mine)} of {len(mine)}" for of, mine in counts.items())
        print(f"by {title}: {told_}")
    right = sum(r["right"] for r in costly)
    print(f"{len(rows)} mutants, {len(costly)} cost 5 % of the step or more: root cause first in {right}", end="")
    print(f" ({right / max(len(costly), 1):.0%}); findings {dict(Counter(len(r['said']) for r in rows))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first mutant; the others follow")
    parser.add_argument("--data", type=Path, default=DATA, help="where the public sets are")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="keeps each mutant's result")
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        print(f"The public sets are not at {arguments.data}: nothing to put faults into. --data says where they are.")
        return
    own = {name: _original(arguments.data / place) for name, (place, _, _) in SETS.items()}
    for name, one in own.items():
        print(f"original {name}: " + ("; ".join(f"{s['level']} {s['title']}" for s in one.said[:2]) or "no finding"))
    wanted = mutants(arguments.mutants, arguments.data, own, arguments.seed)
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        rows = list(pool.map(judged, wanted, chunksize=10))
    if arguments.results:
        arguments.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(rows)


if __name__ == "__main__":
    main()
