"""The charts of a report, with their captions: the page and the browser show the same."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from markupsafe import Markup

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Finding, History, Report
from rankscope.analysis.report import labels, phrases, svg
from rankscope.analysis.report.labels import say
from rankscope.analysis.text import units

__all__ = ["Drawn", "course", "lengths_of_steps", "picture", "ranks_beside_each_other", "strip_of_steps", "waited"]

_BARS = 32  # ranks that get a bar each; more become thin columns
_POINTS = 240
_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A chart, and what it shows; the caption is empty where the chart says it."""

    chart: Markup
    caption: str


def picture(split: digest.Breakdown, finding: Finding) -> Drawn | None:
    """Chart the ranks' time that a finding is about; None where no part of the step shows it."""
    values = _picture_values(split, finding)
    if not values:
        return None
    one, *others = finding.parts
    caption = say("finding.picture.own") if others else say("finding.picture", labels.part_label(one))
    marked = frozenset(finding.ranks) & set(values)
    if len(marked) == len(values):  # all are concerned, so none is set off
        numbers = say("finding.picture.spread", *(units.duration(f(values.values())) for f in (min, max)))
        marked = frozenset()
    else:
        medians = [
            units.duration(statistics.median(ns for rank, ns in values.items() if (rank in marked) == inside))
            for inside in (True, False)
        ]
        numbers = say("finding.picture.numbers", phrases.who(tuple(marked)), *medians)
    return Drawn(chart=svg.columns(values, marked), caption=labels.together(" ", (caption, numbers)))


def lengths_of_steps(report: Report) -> Drawn | None:
    """Draw the step time over the analyzed steps; None where no lengths of single steps are known."""
    step_ns = _lengths(report)
    if not step_ns:
        return None
    line, per_point = svg.step_chart(step_ns, points=_POINTS)
    caption = say("steps.chart" if len(step_ns) > 1 else "steps.chart.one")
    if per_point > 1:
        caption = labels.together(" ", (caption, say("steps.binned", per_point)))
    caption = labels.together(" ", filter(None, (phrases.of_last(report), caption)))
    return Drawn(chart=line, caption=caption)


def strip_of_steps(report: Report) -> Drawn | None:
    """Draw a cell per rank and step; None for less than two ranks."""
    step_ns = _lengths(report)
    if len(step_ns) < 2:
        return None
    median = statistics.median(ns for row in step_ns.values() for ns in row)
    strip, per_row, per_cell = svg.step_strip(step_ns, median, rows=_ROWS, points=_POINTS)
    caption = say("steps.strip.binned", per_row, per_cell) if per_row * per_cell > 1 else say("steps.strip")
    caption = labels.together(" ", filter(None, (phrases.of_last(report), caption)))
    return Drawn(chart=strip, caption=caption)


def _lengths(report: Report) -> dict[int, tuple[int, ...]]:
    return {rank: report.step_ns[rank] for rank in sorted(report.step_ns) if report.step_ns[rank]}


def course(history: History | None) -> Drawn | None:
    """Draw the length of a step over the whole run; None where all of it was read."""
    if history is None:
        return None
    lengths = {history.rank: [span.median_ns for span in history.spans]}
    ends = say("history.first"), say("history.last", history.count - 1)
    per_span = history.spans[0].last - history.spans[0].first + 1
    line, _ = svg.step_chart(lengths, points=len(history.spans), ends=ends)
    return Drawn(chart=line, caption=say("history.chart", per_span, history.rank))


def ranks_beside_each_other(report: Report, split: digest.Breakdown) -> Drawn:
    """Draw each rank's step with its parts; those of the first finding that names some are marked."""
    number, marked = digest.marked_ranks(report)
    missing = digest.missing_ranks(report)
    said = []
    if len(split.rows) + len(missing) <= _BARS:
        chart = svg.rank_bars(split, marked, missing)
    else:
        chart = svg.rank_columns(split, marked)
        said.append(say("time.per_rank.columns", svg.COLUMNS_IN_A_ROW))
    if marked:
        said.append(say("time.per_rank.marked", phrases.who(tuple(marked)), number))
    return Drawn(chart=chart, caption=labels.together(" ", said))


def waited(report: Report) -> Markup | None:
    """Draw how long each rank waited; None where that could not be measured."""
    if not report.waits:
        return None
    _, marked = digest.marked_ranks(report)
    return svg.columns({wait.rank: wait.waited_ns for wait in report.waits}, marked)


def _picture_values(split: digest.Breakdown, finding: Finding) -> dict[int, int]:
    """Give per rank the ns per step of the part that a finding is about; empty if no single part shows it."""
    columns = [i for i, part in enumerate(split.parts) if part in finding.parts]
    if not columns or not set(finding.ranks) & set(split.rows):
        return {}
    return {rank: sum(row[i] for i in columns) for rank, row in split.rows.items()}
