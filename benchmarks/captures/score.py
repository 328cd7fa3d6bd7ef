"""How often the verdict on a profiler's capture is right: simulated captures with a planted fault.

    python benchmarks/captures/score.py --quick                # two minutes
    python benchmarks/captures/score.py --half report          # 20 seeds of each kind, dose and number of steps
    python benchmarks/captures/score.py --files 2              # of each capture two ranks' files, one of those at fault
    python benchmarks/captures/score.py --nsight               # as exports of Nsight Systems
    python benchmarks/captures/score.py --case slow_rank/loud/3/tuning/0   # one capture and its report

Kinds and doses are in `planted.py`, noise and files in `variants.py`, verdicts are those of `rankscope.diagnose` on the
files. A verdict is right if the first root finding is of the planted kind and names exactly the ranks of
the fault. Thresholds are set on the half "tuning" and reported on "report", whose noise they have never met.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

import rankscope
from captures.planted import CLEAN, DOSES, KINDS, Capture, Case, Truth, cases, simulated
from captures.programs import groups
from captures.write import write
from captures.write_nsight import write_nsight
from rankscope.analysis.model.finding import Finding, Report

NOTHING = "healthy"
_ANSWERS = {  # by which detector's finding a planted fault is found, where it is not the one of its own name
    "slow_rank": ("slow_rank", "throttling"),
    "rank_stall": ("slow_rank", "host_bound", "noisy_host"),
    "slow_node": ("slow_rank",),
    "slow_link": ("slow_link", "low_bandwidth"),
}
# One replica: nothing distinguishes a stage with more work from one on a slower device.
_ONE_REPLICA = {"slow_rank": ("stage_imbalance",), "stage_imbalance": ("slow_rank",)}
_NO_COST = 0.01  # share of the step below which a planted fault is none
_LOST = 0.05  # share of the step from which time that is lost may be called unexplained
_ALWAYS = ("pipeline_bubble",)  # a pipeline has one; it is no answer, and no false positive

Row = dict[str, Any]


def judged(case: Case, files: int | None = None, *, nsight: bool = False) -> Row:
    """The truth of the capture, and the findings on it, or on the files of so many of its ranks."""
    capture = captured(case, files)
    with tempfile.TemporaryDirectory(prefix="rankscope-capture-") as folder:
        path = (write_nsight if nsight else write)(capture, Path(folder) / "capture")
        began = time.process_time()
        report = rankscope.diagnose(rankscope.open(path))
        cpu_s = time.process_time() - began
    said = [told(finding) for finding in roots(report)]
    truth = capture.truth
    return {
        "case": asdict(case) | {"name": case.name},
        "job": {"parallel": capture.job.parallel, "ranks": capture.job.ranks, "split": capture.job.split},
        "truth": None if truth is None else asdict(truth),
        "said": said,
        "right": truth is not None and bool(said) and is_right(said[0], truth, capture),
        "lost": lost_fraction(capture),
        "verdict": str(report.verdict),
        "cpu_s": cpu_s,
    }


def captured(case: Case, files: int | None) -> Capture:
    """The capture, with the files of so many ranks: one of those at fault, the others by chance."""
    capture = simulated(case)
    if files is None:
        return capture
    truth = capture.truth
    at_fault = list(truth.ranks[:1]) if truth else []
    others = [rank.number for rank in capture.ranks if rank.number not in at_fault]
    kept = {*at_fault, *np.random.default_rng(capture.case.seed).permutation(others)[: files - len(at_fault)]}
    if truth:
        truth = replace(truth, ranks=tuple(rank for rank in truth.ranks if rank in kept))
    return replace(capture, ranks=[rank for rank in capture.ranks if rank.number in kept], truth=truth)


def roots(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.caused_by is None and f.detector not in _ALWAYS]


def told(finding: Finding) -> Row:
    """A finding as JSON has it. Without a level of its own, it is taken to be confirmed."""
    return {
        "detector": finding.detector,
        "level": str(getattr(finding, "confidence", None) or "confirmed"),
        "ranks": list(finding.ranks),
        "groups": list(finding.groups),
        "fraction": finding.lost_fraction,
        "title": str(finding.title),
    }


def is_right(said: Row, truth: Truth, capture: Capture) -> bool:
    """Whether a finding has the planted kind, and names its ranks."""
    job, kind = capture.job, truth.kind
    detectors = _ANSWERS.get(kind, (kind,))
    if job.parallel == "pp" and job.ranks == job.split:
        detectors += _ONE_REPLICA.get(kind, ())
    if said["detector"] not in detectors or said["level"] == "unexplained":
        return False
    named, wanted = set(said["ranks"]), set(truth.ranks)
    if kind == "slow_link":
        return bool(named) and named <= wanted
    if kind == "expert_imbalance":  # all of a group are named where it is not always the same
        (group,) = (set(c.members) for c in groups(job)["ep"] if wanted <= set(c.members))
        return wanted <= named <= group
    return named == wanted if wanted else True


def lost_fraction(capture: Capture) -> float:
    """Share of the captured time in which devices compute nothing, mean over ranks."""
    shares = []
    for rank in capture.ranks:
        span = rank.now() - rank.marks[1]
        busy = sum(row[4] - row[3] for row in rank.rows if not row[6] and row[3] >= rank.marks[1])
        shares.append(1 - busy / span)
    return float(np.mean(shares))


def answer(row: Row) -> str:
    """The one word that the capture got: what was planted if the answer is right, else the first finding's kind."""
    if row["right"]:
        return str(row["truth"]["kind"])
    first = next(iter(row["said"]), None)
    if first is None or first["level"] == "unexplained":
        return NOTHING
    several = first["detector"] == "slow_rank" and len(first["ranks"]) > 1
    return "slow_node (wrong)" if several else f"{first['detector']} (wrong)"


def f1(rows: list[Row], kind: str) -> float:
    """Twice the right ones over those with this kind and those that got it."""
    planted = [r for r in rows if r["truth"] and r["truth"]["kind"] == kind]
    hits = sum(r["right"] for r in planted)
    names = {f"{d} (wrong)" for d in (kind, *(["slow_rank"] if kind == "rank_stall" else []))}
    wrongly = sum(answer(r) in names and r["truth"]["kind"] not in (kind, "rank_stall") for r in rows if r["truth"])
    return 2 * hits / (hits + wrongly + len(planted)) if planted else float("nan")


def is_false_positive(row: Row) -> bool:
    """A healthy capture with a finding. Time that is lost, and that nothing explains, may be called so."""
    return any(s["level"] != "unexplained" or row["lost"] < _LOST for s in row["said"])


def show(rows: list[Row], out: Callable[[str], None] = print) -> None:
    planted = [r for r in rows if r["truth"]]
    single = [r for r in planted if r["truth"]["cost_fraction"] >= _NO_COST]
    if len(single) < len(planted):
        out(f"left out, as the fault costs less than {_NO_COST:.0%} of the step: {len(planted) - len(single)}")
    for steps in sorted({r["case"]["steps"] for r in single}):
        _table([r for r in single if r["case"]["steps"] == steps], steps, out)
    out("\nplanted -> first finding")
    for kind in KINDS:
        got = Counter(answer(r) for r in single if r["truth"]["kind"] == kind)
        if got:
            out(f"{kind:24}" + ", ".join(f"{name} {n}" for name, n in got.most_common()))
    _clean([r for r in rows if not r["truth"]], out)
    cpu = np.array([r["cpu_s"] for r in rows])
    out(f"\n{len(rows)} captures; CPU of a verdict: median {np.median(cpu):.2f} s, most {cpu.max():.2f} s")


def _table(rows: list[Row], steps: int, out: Callable[[str], None]) -> None:
    doses = [dose for dose in DOSES if any(r["case"]["dose"] == dose for r in rows)]
    out(f"\n{steps} steps: F1 (right of planted)" + "".join(f"{dose:>16}" for dose in doses))
    means: dict[str, list[float]] = {dose: [] for dose in doses}
    for kind in KINDS:
        cells = []
        for dose in doses:
            some = [r for r in rows if r["case"]["dose"] == dose]
            mine = [r for r in some if r["truth"]["kind"] == kind]
            if mine:
                means[dose].append(f1(some, kind))
                cells.append(f"{means[dose][-1]:6.2f} ({sum(r['right'] for r in mine)} of {len(mine)})")
        if cells:
            out(f"{kind:32}" + "".join(f"{cell:>16}" for cell in cells))
    out(f"{'macro-F1':32}" + "".join(f"{np.mean(means[dose]):10.3f}      " for dose in doses))


def _clean(rows: list[Row], out: Callable[[str], None]) -> None:
    wrong = [r for r in rows if is_false_positive(r)]
    levels = Counter(r["said"][0]["level"] for r in wrong)
    out(f"\nhealthy captures: {len(rows)}, {len(wrong)} false positives {dict(levels)}")
    for row in wrong:
        first, job = row["said"][0], row["job"]
        where = f"{row['case']['name']} ({job['parallel']}, {job['ranks']} ranks, {row['lost']:.0%} lost)"
        out(f"  {where}: {first['level']} {first['detector']} {first['ranks']} {first['fraction']:.1%}")


def results(wanted: Iterable[Case], processes: int, path: Path | None, **how: Any) -> list[Row]:
    """Each case's row; those that the file has already are taken from it."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    known = {r["case"]["name"] for r in rows}
    missing = [case for case in wanted if case.name not in known]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for row in pool.map(partial(judged, **how), missing, chunksize=4):
            rows.append(row)
            if path:
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def one(name: str, folder: Path | None, files: int | None, *, nsight: bool) -> None:
    """Print the report on a single capture; `folder` keeps its files."""
    kind, dose, steps, half, seed = name.split("/")
    case = Case(kind, dose, int(steps), int(seed), half)
    if folder:
        print((write_nsight if nsight else write)(captured(case, files), folder))
    row = judged(case, files, nsight=nsight)
    print(json.dumps({k: row[k] for k in ("job", "truth", "right", "lost", "verdict")}, indent=1))
    for said in row["said"]:
        print(f"  {said['level']} {said['detector']} {said['ranks']} {said['fraction']:.1%} {said['title']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=("tuning", "report"), default="tuning")
    parser.add_argument("--seeds", type=int, default=20, help="of each kind, dose and number of steps")
    parser.add_argument("--clean", type=int, default=300, help="healthy captures")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--doses", nargs="+", choices=tuple(DOSES), default=list(DOSES))
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, CLEAN), help="only these")
    parser.add_argument("--quick", action="store_true", help="2 seeds of 1 and 3 steps, 30 healthy captures")
    parser.add_argument("--files", type=int, help="of so many ranks; without: of all")
    parser.add_argument(
        "--nsight", action="store_true", help="exports of Nsight Systems; without: torch.profiler's files"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, help="keeps each capture's result, and goes on where it was stopped")
    parser.add_argument("--case", help="KIND/DOSE/STEPS/HALF/SEED: this one only")
    parser.add_argument("--keep", type=Path, help="with --case: where its files are written")
    arguments = parser.parse_args()
    if arguments.case:
        one(arguments.case, arguments.keep, arguments.files, nsight=arguments.nsight)
        return
    seeds, clean, steps = arguments.seeds, arguments.clean, arguments.steps
    if arguments.quick:
        seeds, clean, steps = 2, 30, [1, 3]
    wanted = cases(seeds, clean, tuple(steps), arguments.half, tuple(arguments.doses))
    if arguments.kinds:
        wanted = (case for case in wanted if case.kind in arguments.kinds)
    how = {"files": arguments.files, "nsight": arguments.nsight}
    show(results(wanted, arguments.processes, arguments.results, **how))


if __name__ == "__main__":
    main()
