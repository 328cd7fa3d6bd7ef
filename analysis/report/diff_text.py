"""How two runs side by side are written, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rankscope.analysis.model.comparison import FindingChange, PartChange, StepChange
from rankscope.analysis.model.parts import part_name
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.report.phrases import who
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration_with_error, scale_for

__all__ = ["arrow", "finding_row", "part_columns"]

_NONE = text("none")
_STATUS = {
    "new": text("new"),
    "gone": text("gone"),
    "changed": text("changed"),
    "stays": text("stays"),
    "not checked in A": text("not checked in A"),
    "not checked in B": text("not checked in B"),
}


def arrow(a: float | None, b: float | None, write: Callable[[float], str]) -> str:
    """`3 -> 4`, or one value where both are written alike; `none` where there is nothing."""
    one, other = (_NONE if value is None else write(value) for value in (a, b))
    return one if one == other else text("{one} -> {other}", one=one, other=other)


def part_columns(step: StepChange, parts: Sequence[PartChange]) -> tuple[str, list[tuple[str, str, str, str, str]]]:
    """Return the unit, and label, A, B, change and its ± of each part and of the step.

    What is shown of a column adds up.
    """
    scale = scale_for(max(step.a_ns, step.b_ns))
    (a, a_sum), (b, b_sum) = (scale.row([getattr(part, side) for part in parts]) for side in ("a_ns", "b_ns"))
    errors = [part.uncertainty_ns for part in parts]
    labels = [part_name(part.part) for part in parts]
    rows = zip([*labels, text("step")], [*a, a_sum], [*b, b_sum], [*errors, step.uncertainty_ns], strict=True)
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
    cost = " -> ".join(filter(None, costs))
    finding = change.b or change.a
    assert finding is not None
    why = text(" ({causes})", causes=change.why) if change.why else ""
    said = text(
        "{detector}, {concerned}: {title}{why}",
        detector=name_of(finding.detector),
        concerned=who(finding.ranks, finding.nodes, finding.groups),
        title=finding.title,
        why=why,
    )
    return _STATUS[change.status], cost, said
