"""Where a step's time goes: one bar per part, each beginning where the one before ended, and what could be instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rankscope.analysis.model.digest import Breakdown, is_of_hosts
from rankscope.analysis.model.finding import Report
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.report.view import ShownTable
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, scale_for, shares

__all__ = ["USEFUL", "Bar", "waterfall"]

# What a step needs in any case: work that the script asked for. All else is waiting, transport or overhead.
USEFUL = ("compute", "overlapped", "memory", "optimizer")
_WHOLE = 1_000_000  # of a share


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row. `start` and `length` are shares of the mean step."""

    kind: str  # "part" | "sum" | "ideal"
    part: str
    label: str
    meaning: str
    start: float
    length: float
    time: str
    share: str


def waterfall(report: Report, split: Breakdown, shown: ShownTable) -> list[Bar]:
    """Give the rows, top to bottom: those of the report's table of parts, their sum, and what could be instead."""
    sums, ranks = split.sums, len(split.rows)
    total = sum(sums)
    scale = scale_for(split.longest_ns)
    name, whole, *_ = shown.total
    bars = list(_parts(split.parts, sums, shown))
    bars.append(_bar("sum", "step", name, text("the parts above add up to it"), 1.0, whole))
    if MIXED not in split.parts and not is_of_hosts(report, split):  # else it is not known how much of it is work
        useful = sum(ns for part, ns in zip(split.parts, sums, strict=True) if part in USEFUL) / total
        said = text("if nothing but work were left: no waiting, no transfer that is not hidden, no overhead")
        time = scale.row([round(useful * total)], divisor=ranks)[1]
        bars.append(_bar("ideal", "useful", text("work only"), said, useful, time))
    best = max(report.findings, key=lambda finding: finding.gain_fraction or 0, default=None)
    if best is not None and best.gain_fraction and report.steps.mean_ns:
        gained_ns = best.gain_fraction * report.steps.mean_ns
        left_ns = max(total / ranks - gained_ns, 0)
        label = text("finding {number} fixed", number=report.findings.index(best) + 1)
        said = text("predicted: {gained} less", gained=duration(gained_ns))
        time = scale.row([round(left_ns)])[1]
        bars.append(_bar("ideal", "fixed", label, said, left_ns * ranks / total, time))
    return bars


def _parts(parts: Sequence[str], sums: Sequence[int], shown: ShownTable) -> Iterator[Bar]:
    total, start = sum(sums), 0
    for part, ns, (label, time, share, meaning) in zip(parts, sums, shown.rows, strict=True):
        yield Bar(
            kind="part",
            part=part,
            label=label,
            meaning=meaning,
            start=start / total,
            length=ns / total,
            time=time,
            share=share,
        )
        start += ns


def _bar(kind: str, part: str, label: str, meaning: str, length: float, time: str) -> Bar:
    (share, _) = shares([round(length * _WHOLE), _WHOLE - round(length * _WHOLE)])
    return Bar(kind=kind, part=part, label=label, meaning=meaning, start=0.0, length=length, time=time, share=share)
