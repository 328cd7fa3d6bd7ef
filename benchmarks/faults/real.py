"""How often the verdict is right on real jobs, and whether fixes bring what it says.

    sudo python benchmarks/faults/real.py record FOLDER --seeds 0 1 2    # namespaces need root; 15 minutes a seed
    python benchmarks/faults/real.py score FOLDER

Jobs of gloo on CPU ranks of this machine. Every faulty job is followed by the same job with the fault really removed;
the difference of their mean steps, by the job's own clock, is what the fault costs. Nodes are network namespaces, slow
links are shaped by `tc tbf`. Nothing else may run on the machine meanwhile. Recordings are kept, and analyzed again
by each `score`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from three_nodes import MASTER_PORT, network

import rankscope
from rankscope.analysis.model.finding import Finding
from score import answer, is_culprit, said

JOB = Path(__file__).with_name("job.py")
ODDS = {"loud": 0.5, "quiet": 0.14, "masked": 0.065}  # what a fault is to add to the healthy step
STEP_MS = {"ddp": 185, "fsdp2": 260, "tp": 240, "pp-1f1b": 310, "pp-gpipe": 325, "tp+pp": 290}  # without a fault
EVERY = {"sporadic_rank": 4, "gc_stall": 5, "recompile": 4}  # it acts in one step of so many
SETTLED = 2  # steps left out of means, as rankscope leaves them out
LAST = -1  # what a script does after its last optimizer is in no step of rankscope's, and in this one of its own
LIMIT_S = 150


@dataclass(frozen=True, slots=True)
class Job:
    """One planted fault in one job."""

    kind: str
    parallel: str
    ranks: tuple[int, ...] = ()  # which have it
    blamed: tuple[int, ...] | None = None  # if not the same
    nodes: int = 1  # of two ranks each, one alone has four, or two with tensor parallelism, which keeps a core busy

    def options(self, dose: str, seed: int) -> tuple[list[str], list[str], int | None, int | None]:
        """The job's options with the fault and without, and the last node's and all nodes' Mbit/s."""
        both = ["--parallel", self.parallel, "--seed", str(seed)]
        ms = ODDS[dose] * STEP_MS[self.parallel] * EVERY.get(self.kind, 1)
        stages = {"pp-1f1b": 4, "pp-gpipe": 4, "tp+pp": 2}.get(self.parallel, 1)
        repaired: list[str] = []
        slow_mbit = all_mbit = None
        match self.kind:
            case "load_imbalance":
                ms = {"loud": 95, "quiet": 35, "masked": 18}[dose]  # the most by which a sequence is shorter, %
                repaired = ["--factor", str(1 - ms / 200)]
            case "stage_imbalance":
                ms *= 160 / STEP_MS[self.parallel] * {"loud": 1.6, "quiet": 1.3, "masked": 1.2}[dose]
                repaired = ["--factor", str(1 + ms / 160 / stages)]
            case "slow_link":
                both += ["--width", "384"]
                slow_mbit = {"loud": 260, "quiet": 420, "masked": 540}[dose]
            case "exposed_communication":
                both += ["--width", "384"]
                all_mbit = {"loud": 600, "quiet": 1_500, "masked": 3_000}[dose]
        faulty = (
            ["--fault", self.kind, "--ranks", ",".join(map(str, self.ranks)), "--ms", str(ms)] if self.ranks else []
        )
        return [*both, *faulty], both + repaired, slow_mbit, all_mbit


ALL = (0, 1, 2, 3)
JOBS = (
    Job("slow_rank", "ddp", (2,)),
    Job("slow_rank", "fsdp2", (1,)),
    Job("slow_rank", "tp", (1,)),
    Job("sporadic_rank", "ddp", (1,)),
    Job("sporadic_rank", "tp", (0,)),
    Job("input_stall", "ddp", (3,)),
    Job("input_stall", "fsdp2", ALL),
    Job("gc_stall", "ddp", (0,)),
    Job("gc_stall", "fsdp2", (2,)),
    Job("gc_stall", "pp-1f1b", (1,)),
    Job("load_imbalance", "ddp", ALL, ()),
    Job("recompile", "ddp", (1,)),
    Job("stage_imbalance", "pp-1f1b", (2,)),
    Job("stage_imbalance", "pp-gpipe", (1,)),
    Job("stage_imbalance", "tp+pp", (2, 3)),
    Job("slow_node", "ddp", (4, 5), nodes=3),
    Job("slow_link", "ddp", (), (4, 5), nodes=3),
    Job("exposed_communication", "ddp", (0, 1, 2, 3, 4, 5), (), nodes=3),
    Job("hang", "ddp", (2,)),
)


def record(folder: Path, seeds: list[int]) -> None:
    for seed in seeds:
        for number, job in enumerate(JOBS):
            dose = "loud" if job.kind == "hang" else list(ODDS)[(seed + number) % 3]
            place = folder / f"{job.kind}-{job.parallel}-{dose}-{seed}"
            if (place / "truth.json").exists():
                continue
            place.mkdir(parents=True, exist_ok=True)
            faulty, repaired, slow_mbit, all_mbit = job.options(dose, seed)
            steps_ns = {"faulty": _run(place, "faulty", faulty, job.nodes, slow_mbit, all_mbit)}
            if job.kind != "hang":
                steps_ns["repaired"] = _run(place, "repaired", repaired, job.nodes, None, all_mbit)
            truth = {"job": asdict(job), "dose": dose, "seed": seed, "steps_ns": steps_ns, "load": os.getloadavg()[1]}
            (place / "truth.json").write_text(json.dumps(truth))
            took = {name: round(float(np.mean(ns[SETTLED:LAST])) / 1e6, 1) for name, ns in steps_ns.items() if ns}
            print(f"{place.name:44}{took}", flush=True)


def _run(
    place: Path, name: str, options: list[str], nodes: int, slow_mbit: int | None, all_mbit: int | None
) -> list[int]:
    """The lengths of rank 0's steps, ns; empty if the job did not end well."""
    lengths = place / f"{name}.json"
    command = [sys.executable, "-m", "rankscope", "run", "--no-report", "--out", str(place / name)]
    job = [str(JOB), *options, "--lengths", str(lengths)]
    with (place / f"{name}.log").open("wb") as log:
        if nodes == 1:
            ranks = "2" if options[1] == "tp" else "4"
            here = [*command, "--standalone", "--nproc-per-node", ranks, *job]
            _wait([subprocess.Popen(here, stdout=log, stderr=log)])
            return _lengths(lengths)
        with network(nodes) as hosts:
            for host in hosts:
                mbit = slow_mbit if host is hosts[-1] and slow_mbit else all_mbit
                if mbit:
                    host.limit_bandwidth(mbit)
            environment = {
                "PET_NNODES": str(nodes),
                "PET_NPROC_PER_NODE": "2",
                "PET_MASTER_ADDR": hosts[0].address,
                "PET_MASTER_PORT": MASTER_PORT,
            }
            _wait([host.popen([*command, *job], environment, log=log) for host in hosts])
        return _lengths(lengths)


def _lengths(path: Path) -> list[int]:
    return json.loads(path.read_text()) if path.exists() else []


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def judged(folder: Path) -> Iterator[dict]:
    """Each recorded job, as `score` has them: truth and findings; the repaired jobs are healthy ones."""
    for path in sorted(folder.glob("*/truth.json")):
        truth = json.loads(path.read_text())
        job, steps_ns = truth["job"], truth["steps_ns"]
        mean = {name: float(np.mean(ns[SETTLED:LAST])) for name, ns in steps_ns.items() if ns}
        cost = mean["faulty"] - mean["repaired"] if len(mean) == 2 else 0.0
        ranks = job["ranks"] if job["blamed"] is None else job["blamed"]
        several = job["kind"] in ("slow_node", "slow_link")
        for name in steps_ns:
            report = rankscope.diagnose(rankscope.open(path.parent / name))
            wrong = {
                "kind": job["kind"],
                "ranks": ranks,
                "nodes": [job["nodes"] - 1] if several else [],
                "cost_ns": cost,
                "cost_fraction": cost / mean["faulty"] if "faulty" in mean else 0.0,
            }
            roots = [f for f in report.findings if f.caused_by is None]
            yield {
                "name": f"{path.parent.name}/{name}",
                "case": {"kind": job["kind"] if name == "faulty" else "clean", "dose": truth["dose"]},
                "truth": [wrong] if name == "faulty" else [],
                "step_ns": mean.get(name, 0.0),
                "found": [said(f) | {"gain_ns": _gain_ns(f)} for f in roots],
                "not_checked": [check.detector for check in report.not_checked],
            }


def _gain_ns(finding: Finding) -> float | None:
    """What the finding says a fix would gain per step; its shares are of the median step."""
    if finding.gain_fraction is None or not finding.lost_fraction:
        return None
    return finding.gain_fraction / finding.lost_fraction * finding.lost_ns_per_step


def score(folder: Path) -> None:
    rows = list(judged(folder))
    print(f"{'job':52}{'true cost':>10}  {'first finding':24}{'who':>6}{'cost':>8}{'gain':>8}{'off':>8}")
    off = []
    for row in rows:
        if not row["truth"]:
            if row["found"]:
                print(f"{row['name']:52}{'healthy':>10}  {row['found'][0]['title']}")
            continue
        (truth,), first = row["truth"], next(iter(row["found"]), None)
        print(f"{row['name']:52}{truth['cost_fraction']:10.1%}  {answer(row):24}", end="")
        if first and first["kind"] == truth["kind"]:
            print(f"{'right' if is_culprit(first, truth) else 'wrong':>6}", end="")
            if truth["cost_ns"]:
                print(f"{first['cost_ns'] / row['step_ns']:8.1%}", end="")
                if first["gain_ns"] is not None:
                    off.append((first["gain_ns"] - truth["cost_ns"]) / row["step_ns"])
                    print(f"{first['gain_ns'] / row['step_ns']:8.1%}{off[-1]:+8.1%}", end="")
        print()
    with_fault = [r for r in rows if r["truth"]]
    clean = [r for r in rows if not r["truth"]]
    for dose in ODDS:
        some = [r for r in with_fault if r["case"]["dose"] == dose]
        right = [r for r in some if answer(r) == r["truth"][0]["kind"]]
        exact = sum(is_culprit(r["found"][0], r["truth"][0]) for r in right)
        print(f"{dose}: {len(right)} of {len(some)} found, {exact} with exactly those to blame")
    print(f"false alarms in {sum(bool(r['found']) for r in clean)} of {len(clean)} healthy jobs")
    if off:
        size = np.abs(off)
        print(
            f"predicted against real gain, {len(off)} jobs: off by {np.median(size):.1%} of the step in the median, "
            f"{np.quantile(size, 0.9):.1%} at the 90th percentile, {sum(size <= 0.02)} within 2 points"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "score"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    if arguments.what == "record":
        record(arguments.folder, arguments.seeds)
    else:
        score(arguments.folder)


if __name__ == "__main__":
    main()
