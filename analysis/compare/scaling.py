"""Runs of one job on different numbers of ranks: how far from linear, and which parts of the step the rest went to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.compare.compared_run import ComparedRun
from rankscope.analysis.model.parts import in_order
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import duration, rounded
from rankscope.analysis.timeline.build import Timeline
from rankscope.errors import NotComparable

__all__ = ["KINDS", "Law", "Point", "Scaling", "scaling"]

KINDS = ("weak", "strong")
_WORK = ("compute", "overlapped")  # what each rank's share of the data or of the model takes
_ALIKE = 1.3  # work that differs by no more than this factor is alike
_SAME_BYTES = 1.05
_FITS = 0.05  # of the efficiency: by how much a law may miss a run
_ENOUGH = 3  # rank counts, for a law


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run. Times are ns of the mean judged step; `lost` is by part what it takes beyond linear, and sums to that.

    `efficiency` is 1 where scaling from the base is linear; `speedup` is in units of the base's throughput.
    """

    path: str
    ranks: int
    nodes: int
    steps: int
    step_ns: int
    error_ns: float | None  # 95 % half width; None: one step only
    linear_ns: int
    efficiency: float
    efficiency_error: float | None
    speedup: float
    lost_ns: int
    lost: dict[str, int]  # empty: the runs' steps could not be cut into parts alike
    mostly: str  # the part that holds most of what is lost; empty: nothing is, clear of chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """`serial_fraction`: share of the base's step that does not shrink (strong), or grows with the ranks (weak).

    `misses` is by how much efficiency differs from the law's at most; `twice` the law's at twice the most ranks.
    """

    name: str  # "Amdahl" | "Gustafson"
    serial_fraction: float
    misses: float
    twice: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """`kind` is "weak" (each rank does the same whatever their number) or "strong" (all share the same work)."""

    kind: str
    why: str  # how it is known
    points: tuple[Point, ...]  # by ranks; the first is the base
    law: Law | None
    no_law: str  # why there is none
    notes: tuple[str, ...]


def scaling(runs: Sequence[ComparedRun], kind: str = "") -> Scaling:
    """Compare runs with the one on fewest ranks. `kind` is inferred from what a rank computes, unless given.

    Efficiency is throughput over what linear scaling of the base would give. Raises `NotComparable`.
    """
    for run in runs:
        if not run.steps.count:
            raise NotComparable(f"{run.report.path} has no analyzed step")
    runs = sorted(runs, key=lambda run: len(run.report.ranks))
    counts = sorted({len(run.report.ranks) for run in runs})
    if len(counts) < 2:
        raise NotComparable(f"all runs have {counted(counts[0], 'rank')}; give runs with different numbers of ranks")
    notes = list(_what_differs(runs))
    kind, why = (kind, text("as given")) if kind else _kind(runs)
    same_clock = len({run.timeline.kernels.is_empty() for run in runs}) == 1
    parts = [run.steps.parts for run in runs] if same_clock else []
    if not all(parts) or not parts:
        parts = []
        notes.append(text("the steps of these runs are not cut into the same parts, so which part grew is unknown"))
    points = tuple(
        _point(run, runs[0], parts[i] if parts else {}, parts[0] if parts else {}, kind) for i, run in enumerate(runs)
    )
    law, no_law = _law(points, kind)
    return Scaling(kind=kind, why=why, points=points, law=law, no_law=no_law, notes=tuple(notes))


def _kind(runs: Sequence[ComparedRun]) -> tuple[str, str]:
    """Return weak or strong, by what the median rank computes, and the evidence."""
    work = [_work(run) for run in runs]
    if not all(work):
        raise NotComparable("what a rank computes is unknown for some runs: say --weak or --strong")
    said = joined(
        ", ",
        (text("{time} on {n}", time=duration(ns), n=len(run.report.ranks)) for ns, run in zip(work, runs, strict=True)),
    )
    fewest = len(runs[0].report.ranks)
    ratios = [(len(run.report.ranks) / fewest, ns / work[0]) for ns, run in zip(work, runs, strict=True)]
    off = {
        "weak": max(abs(math.log(ratio)) for _, ratio in ratios),
        "strong": max(abs(math.log(ratio * n)) for n, ratio in ratios),
    }
    kind = min(KINDS, key=lambda one: off[one])
    if off[kind] > math.log(_ALIKE):
        raise NotComparable(
            f"these runs do not do the same work: a rank computes {said} ranks, which is neither always the same nor "
            "shared among all; --weak or --strong compares them all the same"
        )
    return kind, text("a rank computes {said} ranks", said=said)


def _work(run: ComparedRun) -> float:
    of_ranks = [sum(of.get(part, 0) for part in _WORK) for of in run.steps.by_rank.values()]
    return statistics.median(of_ranks) if of_ranks else 0.0


def _what_differs(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """Yield notes on limited comparability: steps left out, other devices, other communication, ranks not recorded."""
    for run in runs:
        if run.said:
            yield text("{name}: {said}", name=run.report.path, said=run.said)
    devices = {tuple(run.timeline.ranks["device"].unique().sort().to_list()) for run in runs}
    if len(devices) > 1:
        yield text(
            "not on the same devices: {devices}", devices=" / ".join(", ".join(names) for names in sorted(devices))
        )
    for report in (run.report for run in runs):
        if report.world_size not in (None, len(report.ranks)):
            yield text(
                "{run}: {seen} of {all} ranks were recorded; these are counted",
                run=report.path,
                seen=len(report.ranks),
                all=report.world_size,
            )
    sizes = [_largest_bytes(run.timeline) for run in runs]
    known = [size for size in sizes if size]
    if len(known) == len(runs) and max(known) > _SAME_BYTES * min(known):
        sizes_said = (
            text("{size} MB on {n}", size=f"{size / 1e6:.3g}", n=len(run.report.ranks))
            for size, run in zip(known, runs, strict=True)
        )
        yield text(
            "a rank's collectives carry {said} ranks per step: another model, or split differently",
            said=joined(", ", sizes_said),
        )


def _largest_bytes(timeline: Timeline) -> float | None:
    """Bytes of the collectives of the median rank in a judged step; None where not known."""
    judged = timeline.steps.filter("judged").select("rank", "step")
    rows = timeline.collectives.filter(pl.col("peer") == -1).join(judged, on=["rank", "step"], how="semi")
    of_ranks = rows.group_by("rank").agg(pl.col("size_bytes").sum())["size_bytes"]
    if rows.is_empty() or rows["size_bytes"].null_count():
        return None
    return float(np.median(of_ranks.to_numpy())) / judged["step"].n_unique()


def _point(run: ComparedRun, base: ComparedRun, parts: dict[str, int], of_base: dict[str, int], kind: str) -> Point:
    ranks, fewest = len(run.report.ranks), len(base.report.ranks)
    times, among = (1, 1) if kind == "weak" else (fewest, ranks)  # linear: the base's step, or its share of it
    names = in_order(parts, of_base)
    linear = rounded([of_base.get(name, 0) * times for name in names], among)
    lost = {name: parts.get(name, 0) - ns for name, ns in zip(names, linear, strict=True)}
    base_ns, step_ns = base.steps.mean_ns, run.steps.mean_ns
    if parts:
        base_ns, step_ns = sum(of_base.values()), sum(parts.values())
    linear_ns = sum(linear) if parts else round(base_ns * times / among)
    efficiency = base_ns * times / among / step_ns
    error, base_error = run.steps.error_ns, base.steps.error_ns
    known = error is not None and base_error is not None and run is not base
    return Point(
        path=run.report.path,
        ranks=ranks,
        nodes=len(run.report.nodes),
        steps=run.steps.count,
        step_ns=step_ns,
        error_ns=error,
        linear_ns=linear_ns,
        efficiency=efficiency,
        efficiency_error=efficiency * math.hypot((error or 0) / step_ns, (base_error or 0) / base_ns)
        if known
        else None,
        speedup=efficiency * ranks / fewest,
        lost_ns=step_ns - linear_ns,
        lost=lost,
        mostly=_mostly(lost) if step_ns - linear_ns > math.hypot(error or 0, base_error or 0) else "",
    )


def _mostly(lost: dict[str, int]) -> str:
    """Return the part that grew most. Compute beside communication and alone change places: they count as one."""
    work = sum(lost.get(part, 0) for part in _WORK)
    grown = {part: ns for part, ns in lost.items() if part not in _WORK} | {_WORK[0]: work}
    return max(grown, key=lambda part: grown[part]) if lost else ""


def _law(points: Sequence[Point], kind: str) -> tuple[Law | None, str]:
    """Return the law with one parameter that fits best, by least squares over 1 - 1/n, n being ranks over the base's.

    Strong: Amdahl 1967, step / base = s + (1 - s) / n. Weak: Gustafson 1988, efficiency = 1 - s (1 - 1/n).
    """
    n = np.array([point.ranks / points[0].ranks for point in points])
    if len(np.unique(n)) < _ENOUGH:
        return None, text("a law needs at least {n} numbers of ranks", n=_ENOUGH)
    efficiency = np.array([point.efficiency for point in points])
    x = 1 - 1 / n
    y = 1 - efficiency if kind == "weak" else 1 / (efficiency * n) - 1 / n
    serial = float((x * y).sum() / (x * x).sum())

    def of_law(n: np.ndarray) -> np.ndarray:
        return 1 - serial * (1 - 1 / n) if kind == "weak" else 1 / (n * serial + 1 - serial)

    misses = float(np.abs(of_law(n) - efficiency).max())
    name = "Gustafson" if kind == "weak" else "Amdahl"
    if misses > _FITS or not 0 <= serial <= 1:
        return None, text(
            "{name}'s law does not fit: it misses an efficiency by {misses}", name=name, misses=f"{misses:.2f}"
        )
    twice = float(of_law(np.array([2 * n.max()]))[0])
    return Law(name=name, serial_fraction=serial, misses=misses, twice=twice), ""
