"""From one run's step to another's: one bar per part that changed, each beginning where the one before ended."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.analysis.compare.two_runs import Comparison
from rankscope.analysis.report.diff_text import part_columns

__all__ = ["Step", "steps_from_a_to_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row. `start` and `length` are shares of the longest bar; `a`, `b`, `change` and `error` as they are shown."""

    kind: str  # "sum" | "longer" | "shorter"
    part: str
    label: str
    start: float
    length: float
    a: str = ""
    b: str = ""
    change: str = ""
    error: str = ""


def steps_from_a_to_b(found: Comparison) -> tuple[list[Step], str]:
    """A's step, what became longer, what became shorter, B's step; and the unit. The changes add up as shown."""
    unit, columns = part_columns(found)
    *texts, whole = columns
    rows = sorted(zip(found.parts, texts, strict=True), key=lambda row: -row[0].change_ns)
    longest = max(found.step.a_ns + sum(max(part.change_ns, 0) for part in found.parts), 1)
    steps = [Step(kind="sum", part="step", label="A, mean step", start=0, length=found.step.a_ns / longest, a=whole[1])]
    at = found.step.a_ns
    for part, (label, a, b, change, error) in rows:
        low = min(at, at + part.change_ns)
        steps.append(
            Step(
                kind="longer" if part.change_ns >= 0 else "shorter",
                part=part.part,
                label=label,
                start=low / longest,
                length=abs(part.change_ns) / longest,
                a=a,
                b=b,
                change=change,
                error=error,
            )
        )
        at += part.change_ns
    _, _, b, change, error = whole
    label = "B, mean step"
    return [
        *steps,
        Step(kind="sum", part="step", label=label, start=0, length=at / longest, b=b, change=change, error=error),
    ], unit
