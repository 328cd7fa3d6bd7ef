"""From one step to another, of two runs or two ranks: a bar per part, each beginning where the one before ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dash import html

from rankscope.analysis.model.comparison import PartChange, StepChange
from rankscope.analysis.report.diff_text import part_columns
from rankscope.analysis.text.message import text

__all__ = ["Bar", "change_table", "from_a_to_b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
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


def from_a_to_b(step: StepChange, parts: Sequence[PartChange], names: tuple[str, str]) -> tuple[list[Bar], str]:
    """A's step, what became longer, what became shorter, B's step; and the unit. The changes add up as shown."""
    unit, columns = part_columns(step, parts)
    *texts, whole = columns
    rows = sorted(zip(parts, texts, strict=True), key=lambda row: -row[0].change_ns)
    longest = max(step.a_ns + sum(max(part.change_ns, 0) for part in parts), 1)
    first, last = (text("{of}, mean step", of=of) for of in names)
    bars = [Bar(kind="sum", part="step", label=first, start=0, length=step.a_ns / longest, a=whole[1])]
    at = step.a_ns
    for part, (label, a, b, change, error) in rows:
        low = min(at, at + part.change_ns)
        bars.append(
            Bar(
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
    bars.append(Bar(kind="sum", part="step", label=last, start=0, length=at / longest, b=b, change=change, error=error))
    return bars, unit


def change_table(bars: Sequence[Bar], unit: str, names: tuple[str, str]) -> html.Table:
    """Return the bars with their numbers, as a table."""
    titles = (f"{names[0]}, {unit}", f"{names[1]}, {unit}", text("change"), "±")
    head = html.Tr([html.Th(), html.Th(), *(html.Th(title, className="number") for title in titles)])
    return html.Table([html.Thead(head), html.Tbody([_row(bar) for bar in bars])], className="waterfall")


def _row(bar: Bar) -> html.Tr:
    place = {"left": f"{bar.start * 100:.3f}%", "width": f"{bar.length * 100:.3f}%"}
    drawn = html.Div(className=f"bar {'bar-step' if bar.kind == 'sum' else f'bar-{bar.kind}'}", style=place)
    numbers = [html.Td(text, className="number") for text in (bar.a, bar.b, bar.change, bar.error)]
    return html.Tr(
        [html.Td(bar.label, className="label"), html.Td(html.Div(drawn, className="track")), *numbers],
        className=bar.kind,
    )
