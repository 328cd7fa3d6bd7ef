"""How often the verdict is right: simulated jobs with a planted fault, judged by `rankscope.diagnose`.

    python benchmarks/faults/score.py --quick

Prints precision, recall, F1 and the root cause per kind of fault and dose, what was taken for what, how wrong the costs
are, every false alarm on healthy jobs, and the same for two published rules. A run whose detector said "not checked"
is an abstention, not a healthy job. Half of the seeds are for setting thresholds ("tune"); the figures are those of
the other half ("report").
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np

import rankscope
from faults import CLEAN, DOSES, KINDS, LASTING_KINDS, UNPROFILED_KINDS, Case, cases, simulated
from rankscope.analysis.detectors import detectors
from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.runs import memory_budget
from record import write
from simulate import Recording, cut

NOTHING, NOT_CHECKED = "healthy", "not checked"
_DETECTOR = {"sporadic_rank": "slow_rank", "slow_node": "slow_rank"}  # else the kind's own name
_SEEDS, _QUICK = 40, 3  # seeds of each kind and dose, half of them for each split; of each split when quick
_NVRX_SCORE = 0.75
_NO_COST = 0.01  # share of the step below which a planted fault is none
_WARMUP, _LENGTHS = 2, (*range(4, 13), 14, 17, 22)  # steps, after which a recording is judged
_ALARM_LENGTHS = (4, 5, 6, 8, 10, 14, 20)  # the same, of healthy jobs

Row = dict[str, Any]


def judged(case: Case, *, delays: bool = False, stretches: int = 1, **how: bool | str) -> Row:
    """The truth of the case, and the findings: one row of the results, as JSON has it."""
    log, truths = simulated(case, **how)
    began = time.process_time()
    report = _report(log, stretches)
    loud = (
        delays and case.dose == "loud" and case.kind not in ("hang", "gradual_slowdown")
    )  # of a drift most is still to come
    return {
        "delay": _delay(log, asdict(truths[0])) if loud else None,
        "early": _early_alarms(log) if delays and not truths else None,
        "case": asdict(case),
        "job": {"parallel": log.job.parallel, "ranks": log.job.ranks},
        "truth": [asdict(truth) for truth in truths],
        "found": [said(finding, **how) for finding in report.findings if finding.caused_by is None],
        "not_checked": [check.detector for check in report.not_checked],
        "nvrx": nvrx(log),
        "hta": hta(log),
        "cpu_s": time.process_time() - began,
    }


def _report(log: Recording, stretches: int = 1) -> Report:
    """The report; in several stretches as on a run of which so small a part fits into memory."""
    with tempfile.TemporaryDirectory(prefix="rankscope-fault-") as folder:
        path = write(log, Path(folder) / "run")
        most = memory_budget._MOST
        if stretches > 1:
            rows = memory_budget.bytes_of_rows(rankscope.open(path).reader)
            memory_budget._MOST = memory_budget._BEFORE + rows * 1.01 / stretches
        try:
            report = rankscope.diagnose(rankscope.open(path))
        finally:
            memory_budget._MOST = most
    failed = [check.why for check in report.not_checked if "the detector failed" in check.why]
    if failed:
        raise RuntimeError(failed[0])
    return report


def _delay(log: Recording, truth: Row) -> list[int] | None:
    """Steps after the 2 of warm-up until a recording that ends there gets the right verdict, and in how many of them
    the fault acted; None: not in these.
    """
    for steps in _LENGTHS:
        first = [said(f) for f in _report(cut(log, steps)).findings[:1]]
        if any(f["kind"] == truth["kind"] and is_culprit(f, truth) for f in first):
            return [steps - _WARMUP, sum(_WARMUP <= step < steps for step in truth["acts"])]
    return None


def _early_alarms(log: Recording) -> Row:
    """What is found in recordings of so many steps."""
    found = {steps: [said(f)["kind"] for f in _report(cut(log, steps)).findings] for steps in _ALARM_LENGTHS}
    return {str(steps): kinds for steps, kinds in found.items() if kinds}


def said(finding: Finding, *, part: bool = False, **_: bool | str) -> Row:
    kind = finding.detector
    if kind == "slow_rank":
        kind = "slow_node" if finding.nodes else "sporadic_rank" if finding.steps and not part else "slow_rank"
    return {
        "kind": kind,
        "ranks": list(finding.ranks),
        "nodes": list(finding.nodes),
        "cost_ns": finding.lost_ns_per_step,
        "cost_fraction": finding.lost_fraction,
        "title": finding.title,
    }


def nvrx(log: Recording) -> list[int]:
    """Ranks whose relative score is below 0.75: of each section the best median over ranks by the rank's own, weighted
    with the section's time. It gets the true work of every section, without waiting, as kernels would show it.

    Source: NVIDIA Resiliency Extension, straggler detection, `Report.identify_stragglers`.
    """
    medians = np.array([np.median(times, axis=0) for times in log.busy_ns.values()])
    best = np.where(medians > 0, medians, np.inf).min(axis=1, keepdims=True)
    scores = np.where(medians > 0, np.minimum(best, medians) / np.maximum(medians, 1.0), 1.0)
    score = (scores * medians).sum(axis=0) / np.maximum(medians.sum(axis=0), 1.0)
    return np.flatnonzero(score < _NVRX_SCORE).tolist()


def hta(log: Recording) -> list[int]:
    """The two ranks that start a step's last long collective latest most often; this rule always names two.

    The operation is that whose duration differs most between ranks. Starts are compared on a common, true clock.

    Source: Holistic Trace Analysis, `get_potential_stragglers`.
    """
    ends = log.optimizer_end
    step_ns = float(np.nanmean(np.diff(ends[np.isfinite(ends).all(axis=1)].max(axis=1)))) if len(ends) > 1 else 1.0
    last: dict[str, np.ndarray] = {}  # op -> [2 (start, duration), step, rank]
    for row in log.collectives:
        if row["op"] in ("send", "recv"):
            continue
        start, end = row["start_ns"], row["end_ns"]
        length = np.where(np.isfinite(end), end, 0.0) - np.where(np.isfinite(start), start, np.inf)
        long = length >= 0.01 * step_ns
        ranks = row["rank"][long]
        step = (ends[:, ranks] < start[long]).sum(axis=0)
        kept = step < len(ends)
        table = last.setdefault(row["op"], np.full((2, *ends.shape), np.nan))
        table[:, step[kept], ranks[kept]] = np.stack([start[long], length[long]])[:, kept]
    if not last:
        return []
    with np.errstate(invalid="ignore"):
        spread = {op: np.nanmean(np.nanstd(np.where(_several(t[1]), t[1], 0.0), axis=1)) for op, t in last.items()}
    start = np.nan_to_num(last[max(spread, key=lambda op: spread[op])][0], nan=-np.inf)
    latest = np.argsort(start, axis=1)[:, -2:]
    counts = np.bincount(latest[np.isfinite(start.max(axis=1))].ravel(), minlength=log.job.ranks)
    return np.argsort(-counts, kind="stable")[:2].tolist()


def _several(values: np.ndarray) -> np.ndarray:
    return np.broadcast_to((np.isfinite(values).sum(axis=1) > 1)[:, np.newaxis], values.shape) & np.isfinite(values)


def answer(row: Row) -> str:
    """The one word that the run got: the kind of its first finding, "healthy" or "not checked"."""
    if row["found"]:
        return str(row["found"][0]["kind"])
    wanted = {_DETECTOR.get(t["kind"], t["kind"]) for t in row["truth"]}
    seen = set(detectors()) - set(row["not_checked"])
    return NOTHING if wanted & seen or not wanted else NOT_CHECKED


def is_culprit(found: Row, truth: Row) -> bool:
    """Whether a finding names exactly the ranks of the fault; where it has none in particular, all are right."""
    if not truth["ranks"]:
        return True
    if truth["nodes"]:
        return found["nodes"] == list(truth["nodes"])
    return found["ranks"] == list(truth["ranks"])


def scores(rows: list[Row], kind: str) -> tuple[int, float, float, float, float]:
    """Runs with this kind, precision, recall, F1, and the share of the found ones whose root cause is right."""
    with_kind = [r for r in rows if any(t["kind"] == kind for t in r["truth"])]
    hits = [(f, t) for r in with_kind for t in r["truth"] if t["kind"] == kind if (f := _match(r, kind))]
    said = sum(f["kind"] == kind for r in rows for f in r["found"])
    precision = len(hits) / said if said else float("nan")
    recall = len(hits) / len(with_kind) if with_kind else float("nan")
    f1 = 2 * len(hits) / (said + len(with_kind)) if with_kind else float("nan")
    right = sum(is_culprit(f, t) for f, t in hits) / len(hits) if hits else float("nan")
    return len(with_kind), precision, recall, f1, right


def _match(row: Row, kind: str) -> Row | None:
    """The run's finding of this kind, if it comes first: of one fault, one finding is the verdict."""
    first = row["found"][: len(row["truth"])]
    return next((f for f in first if f["kind"] == kind), None)


def show(rows: list[Row], out: Callable[[str], None] = print) -> None:
    """All tables."""
    single = _with_a_cost([r for r in rows if len(r["truth"]) == 1], out)
    clean = [r for r in rows if not r["truth"]]
    for dose in DOSES:
        some = [r for r in single if r["case"]["dose"] == dose]
        if some:
            _table(some, dose, out)
    _confusion(single, out)
    _costs(single, out)
    _delays(single, out)
    _two(rows, out)
    _clean(clean, out)
    _baselines(single, clean, out)


def _with_a_cost(rows: list[Row], out: Callable[[str], None]) -> list[Row]:
    """The rows whose fault costs something; what costs nothing is no fault. The others are counted."""
    kept = [r for r in rows if r["truth"][0]["kind"] == "hang" or r["truth"][0]["cost_fraction"] >= _NO_COST]
    left = [f"{_name(r)}: {answer(r)}" for r in rows if r not in kept]
    if left:
        out(
            f"\nleft out, a fault that costs less than {_NO_COST:.0%} of the step: {len(left)} runs ({', '.join(left)})"
        )
    return kept


def _table(rows: list[Row], dose: str, out: Callable[[str], None]) -> None:
    out(f"\n{dose}: {len(rows)} runs")
    out(f"{'kind':24}{'runs':>5}{'precision':>10}{'recall':>8}{'F1':>7}{'culprit':>9}{'abstained':>10}")
    f1s: dict[str, float] = {}
    for kind in KINDS:
        runs, precision, recall, f1, right = scores(rows, kind)
        if not runs:
            continue
        f1s[kind] = f1
        mine = [r for r in rows if r["truth"][0]["kind"] == kind]
        abstained = sum(answer(r) == NOT_CHECKED for r in mine)
        out(f"{kind:24}{runs:5}{precision:10.2f}{recall:8.2f}{f1:7.2f}{right:9.2f}{abstained:10}")
    there = [f1 for kind, f1 in f1s.items() if _DETECTOR.get(kind, kind) in detectors()]
    every = float(np.mean(list(f1s.values())))
    out(f"macro-F1 {every:.3f} of {len(f1s)} kinds; {np.mean(there):.3f} of the {len(there)} that have a detector")


def _confusion(rows: list[Row], out: Callable[[str], None]) -> None:
    out("\nplanted -> first finding (all doses)")
    for kind in KINDS:
        named = Counter(answer(r) for r in rows if r["truth"][0]["kind"] == kind)
        if named:
            out(f"{kind:24}" + ", ".join(f"{name} {n}" for name, n in named.most_common()))


def _costs(rows: list[Row], out: Callable[[str], None]) -> None:
    out(f"\n{'cost, error of it':24}{'runs':>5}{'median':>8}{'p90':>7}")
    for kind in KINDS:
        pairs = [
            (f, t)
            for r in rows
            for t in r["truth"]
            if t["kind"] == kind and t["cost_ns"] > 0 and (f := _match(r, kind))
        ]
        if pairs:
            errors = [abs(f["cost_ns"] - t["cost_ns"]) / t["cost_ns"] for f, t in pairs]
            out(f"{kind:24}{len(errors):5}{np.median(errors):8.1%}{np.quantile(errors, 0.9):7.1%}")


def _delays(rows: list[Row], out: Callable[[str], None]) -> None:
    timed = [r for r in rows if "delay" in r and r["case"]["dose"] == "loud" and r["case"]["kind"] != "hang"]
    if all(r["delay"] is None for r in timed):
        return
    out("\nloud faults, steps after warm-up until the right verdict, and those among them in which the fault acted")
    out(f"{'kind':24}{'runs':>5}{'median':>8}{'p90':>7}{'acted, median':>15}{'p90':>7}{'later':>7}")
    for kind in (*KINDS, ""):
        delays = [r["delay"] for r in timed if r["case"]["kind"] == kind or not kind]
        seen = np.array([delay for delay in delays if delay is not None])
        if len(seen):
            median, p90 = np.median(seen, axis=0), np.quantile(seen, 0.9, axis=0)
            numbers = f"{median[0]:8.0f}{p90[0]:7.1f}{median[1]:15.0f}{p90[1]:7.1f}"
            out(f"{kind or 'all':24}{len(delays):5}{numbers}{len(delays) - len(seen):7}")


def _two(rows: list[Row], out: Callable[[str], None]) -> None:
    two = [r for r in rows if len(r["truth"]) == 2]
    if not two:
        return
    both = top = 0
    for row in two:
        said = {f["kind"] for f in row["found"][:2]}
        both += said == {t["kind"] for t in row["truth"]} and all(
            any(f["kind"] == t["kind"] and is_culprit(f, t) for f in row["found"][:2]) for t in row["truth"]
        )
        first = row["found"][:1]
        top += any(f["kind"] == t["kind"] and is_culprit(f, t) for f in first for t in row["truth"])
    out(f"\ntwo faults at once: {len(two)} runs; both found, with their culprits {both / len(two):.0%}")
    out(f"the first finding is one of them, with its culprit {top / len(two):.0%}")


def _clean(rows: list[Row], out: Callable[[str], None]) -> None:
    alarms = [r for r in rows if r["found"]]
    out(f"\nhealthy jobs: {len(rows)} runs, {len(alarms)} false alarms")
    for row in alarms:
        for found in row["found"]:
            out(f"  {_name(row)}: {found['kind']} {found['cost_fraction']:.1%}: {found['title']}")
    early = [r for r in rows if r.get("early") is not None]
    if early:
        lengths = ", ".join(map(str, _ALARM_LENGTHS))
        out(f"judged after {lengths} steps: {len(early)} runs, {sum(bool(r['early']) for r in early)} false alarms")
        for row in filter(lambda r: r["early"], early):
            out(f"  {_name(row)}: {row['early']}")


def _baselines(rows: list[Row], clean: list[Row], out: Callable[[str], None]) -> None:
    """How often the published rules name the root cause, and how often they name one on healthy jobs."""
    out(f"\n{'names who is to blame':24}{'runs':>5}{'rankscope':>11}{'NVRx < 0.75':>13}{'HTA, 2 ranks':>14}")
    for kind in KINDS:
        mine = [r for r in rows if r["truth"][0]["kind"] == kind and r["truth"][0]["ranks"] and kind != "hang"]
        mine = [r for r in mine if len(r["truth"][0]["ranks"]) < r["job"]["ranks"]]
        if not mine:
            continue
        ours = np.mean([any(is_culprit(f, r["truth"][0]) for f in r["found"][:1]) for r in mine])
        theirs = [
            np.mean([set(r[rule]) >= set(r["truth"][0]["ranks"][:1]) and bool(r[rule]) for r in mine])
            for rule in ("nvrx", "hta")
        ]
        out(f"{kind:24}{len(mine):5}{ours:11.0%}{theirs[0]:13.0%}{theirs[1]:14.0%}")
    if clean:
        alarms = [np.mean([bool(r[rule]) for r in clean]) for rule in ("found", "nvrx", "hta")]
        out(f"{'blames somebody, healthy':24}{len(clean):5}{alarms[0]:11.0%}{alarms[1]:13.0%}{alarms[2]:14.0%}")


def _name(row: Row) -> str:
    case = row["case"]
    return f"{case['kind']}/{case['dose']}/{case['seed']} ({row['job']['parallel']}, {row['job']['ranks']} ranks)"


def run(wanted: Iterable[Case], results: Path | None, processes: int, **how: bool | int | str) -> list[Row]:
    """A row per case; those that `results` holds already are not run again."""
    known: dict[tuple[str, str, int], Row] = {}
    if results and results.exists():
        for row in map(json.loads, results.read_text().splitlines()):
            known[(row["case"]["kind"], row["case"]["dose"], row["case"]["seed"])] = row
    wanted = list(wanted)
    todo = [c for c in wanted if (c.kind, c.dose, c.seed) not in known]
    with ProcessPoolExecutor(processes) as pool:
        for case, row in zip(todo, pool.map(partial(judged, **how), todo), strict=True):
            known[(case.kind, case.dose, case.seed)] = row
            if results:
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return [known[(c.kind, c.dose, c.seed)] for c in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} seeds, few healthy jobs, few ranks")
    parser.add_argument("--small", action="store_true", help="few ranks: 8 or 16, or 4 nodes")
    parser.add_argument("--seeds", type=_listed, help="only these, of whatever split: 0,2,4")
    parser.add_argument("--clean", type=int, default=600, help="healthy jobs, half of them for each split")
    parser.add_argument("--split", choices=("tune", "report", "both"), default="report")
    parser.add_argument("--kinds", type=_listed, help="only these: slow_rank,slow_rank+gc_stall,clean")
    unprofiled = parser.add_mutually_exclusive_group()
    for option, parallel, what in (
        ("--nccl", "ddp-nccl", "jobs on GPUs, as they are recorded without a profiler"),
        ("--rccl", "ddp-rccl", "the same on AMD's GPUs: no events of the devices"),
        ("--pipelines", "pp-nccl", "the same of pipelines on NVIDIA's"),
        ("--split-pipelines", "3d-nccl", "the same where each stage's layers are split too"),
    ):
        unprofiled.add_argument(option, dest="parallel", action="store_const", const=parallel, default="", help=what)
    parser.add_argument("--part", action="store_true", help="faults act in a quarter to 85 %% of the steps only")
    parser.add_argument("--stretches", type=int, default=1, help="the run is analyzed in so many, as a long one is")
    parser.add_argument("--case", help="one case, as kind/dose/seed: prints its report and keeps its run in --folder")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where --case keeps the run")
    parser.add_argument("--results", type=Path, help="JSON lines; what is in it already is not run again")
    parser.add_argument("--delays", action="store_true", help="how many steps a loud fault takes to be found")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    how = {"small": args.quick or args.small, "parallel": args.parallel, "part": args.part}
    if args.case:
        one(args.case, args.folder, **how)
        return
    seeds, clean = (2 * _QUICK, 42) if args.quick and not args.seeds else (_SEEDS, args.clean)
    wanted = [c for c in cases(seeds, clean) if args.seeds or args.split in (c.split, "both")]
    wanted = [c for c in wanted if not args.kinds or c.kind in args.kinds]
    wanted = [c for c in wanted if not args.parallel or c.kind in (*UNPROFILED_KINDS[args.parallel], CLEAN)]
    wanted = [c for c in wanted if not args.part or c.kind in (*LASTING_KINDS, CLEAN)]
    wanted = [c for c in wanted if not args.seeds or str(c.seed) in args.seeds]
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    began = time.monotonic()
    rows = run(wanted, args.results, args.processes, delays=args.delays, stretches=args.stretches, **how)
    print(f"{len(rows)} runs of split {args.split}, {time.monotonic() - began:.0f} s")
    show(rows)


def _listed(text: str) -> list[str]:
    return text.split(",")


def one(name: str, folder: Path, **how: bool | str) -> None:
    """Everything about one case: the run folder, the truth, the report."""
    kind, dose, seed = name.split("/")
    log, truths = simulated(Case(kind, dose, int(seed)), **how)
    path = write(log, folder / name.replace("/", "-"))
    report: Report = rankscope.diagnose(rankscope.open(path))
    print(f"{path}: {log.job}")
    for truth in truths:
        place = f"ranks {truth.ranks} nodes {truth.nodes}"
        print(f"true: {truth.kind} {place} {truth.cost_ns / 1e6:.2f} ms {truth.cost_fraction:.1%}")
    print(f"said: {report.verdict}")
    for finding in report.findings:
        print(f"  {finding.detector} {finding.lost_fraction:.1%} {finding.title} (caused by {finding.caused_by})")
    for check in report.not_checked:
        print(f"  not checked: {check.detector}: {check.why}")
    print(f"NVRx: {nvrx(log)}, HTA: {hta(log)}")


if __name__ == "__main__":
    main()
