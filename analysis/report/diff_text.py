"""How two runs side by side are written, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable

from rankscope.analysis.compare.two_runs import Comparison, FindingChange, StepChange
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.report.phrases import who
from rankscope.analysis.text.units import duration, duration_with_error, percent, scale_for

__all__ = ["arrow", "finding_row", "part_columns", "step_change"]


def arrow(a: float | None, b: float | None, write: Callable[[float], str]) -> str:
    """`3 -> 4`, or one value where both are written alike; `none` where there is nothing."""
    one, other = ("none" if value is None else write(value) for value in (a, b))
    return one if one == other else f"{one} -> {other}"


def step_change(step: StepChange) -> str:
    """`30.1 ± 2.0 ms longer (25 %)`; or that it is not clear of chance, or that nobody can tell."""
    way = "longer" if step.change_ns > 0 else "shorter"
    share = percent(abs(step.change_ns) / step.a_ns) if step.a_ns else "?"
    if step.uncertainty_ns is None:
        return f"{duration(abs(step.change_ns))} {way} ({share}); one step of a run does not tell whether by chance"
    change = duration_with_error(abs(step.change_ns), step.uncertainty_ns)
    return f"{change} {way} ({share})" + ("" if step.clear else ", which is not clear of chance")


def part_columns(found: Comparison) -> tuple[str, list[tuple[str, str, str, str, str]]]:
    """The unit, and label, A, B, change and its ± of each part and of the step. What is shown of a column adds up."""
    scale = scale_for(max(found.step.a_ns, found.step.b_ns))
    (a, a_sum), (b, b_sum) = (scale.row([getattr(part, side) for part in found.parts]) for side in ("a_ns", "b_ns"))
    errors = [part.uncertainty_ns for part in found.parts]
    labels = [part_label(part.part) for part in found.parts]
    rows = zip([*labels, "step"], [*a, a_sum], [*b, b_sum], [*errors, found.step.uncertainty_ns], strict=True)
    return scale.unit, [
        (
            label,
            one,
            other,
            f"{float(other) - float(one):+.{scale.decimals}f}",
            "" if error is None else scale.text(round(error / scale.quantum_ns)),
        )
        for label, one, other, error in rows
    ]


def finding_row(change: FindingChange) -> tuple[str, str, str]:
    """Status, cost per step and what it is."""
    costs = [
        None if one is None else duration_with_error(one.lost_ns_per_step, one.uncertainty_ns)
        for one in (change.a, change.b)
    ]
    cost = " -> ".join(text for text in costs if text)
    finding = change.b or change.a
    assert finding is not None
    why = f" ({change.why})" if change.why else ""
    concerned = who(finding.ranks, finding.nodes, finding.groups)
    return change.status, cost, f"{finding.detector}, {concerned}: {finding.title}{why}"
