"""The report as one self-contained page: no network, no script."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Finding, History, Report
from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.report import labels, palette, phrases, svg
from rankscope.analysis.report.labels import say
from rankscope.analysis.text import units
from rankscope.analysis.text.message import LANGUAGES, speaking, spoken
from rankscope.analysis.text.phrases import some_ranges

__all__ = ["chart_styles", "course", "picture", "render"]

_BARS = 32  # ranks that get a bar each; more become thin columns
_TABLE_ROWS = 16  # of ranks or nodes; longer tables keep the extremes
_STEP_POINTS = 240
_STEP_ROWS = 64
_EVIDENCE = 4


def render(report: Report, *, language: str = "en") -> str:
    """The whole page, in one of `LANGUAGES`; everything that comes from the job is escaped."""
    with speaking(language):
        page = _environment().get_template("report.html.j2").render(_page(spoken(report)), lang=LANGUAGES[language])
    return page.encode("utf-8", "replace").decode("utf-8")  # a path may hold lone surrogates


def chart_styles() -> tuple[str, str]:
    """What a page needs to show these charts elsewhere: rules for its style sheet, and markup for its body."""
    environment = _environment()
    return environment.get_template("charts.css.j2").render(), environment.get_template("hatches.svg.j2").render()


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["detector_name"] = labels.detector_name
    environment.globals.update(
        say=say,
        LIGHT=palette.LIGHT,
        DARK=palette.DARK,
        css_variables=palette.css_variables,
        duration=units.duration,
        percent=units.percent,
        some_ranges=some_ranges,
        detector_name=labels.detector_name,
        clock_error=phrases.clock_error,
        one_or_many=phrases.one_or_many,
        operator_row=phrases.operator_row,
        code_means=phrases.code_means,
        code_row=phrases.code_row,
        cost=phrases.cost,
        cost_per_step=phrases.cost_per_step,
        evidence=phrases.evidence,
        fix_row=phrases.fix_row,
        fixes_mean=phrases.fixes_mean,
        gain=phrases.gain,
        label=phrases.label,
        level=phrases.level,
        no_finding=phrases.no_finding,
        part_order=PART_ORDER,
        part_short=labels.part_short,
        path_row=phrases.path_row,
        resolution=phrases.resolution,
        others_waited=phrases.others_waited,
        who=phrases.who,
        window_lines=phrases.window_lines,
        lead_line=phrases.lead_line,
        phase_rows=phrases.phase_rows,
        swatch=svg.swatch,
    )
    return environment


def _page(report: Report) -> dict[str, Any]:
    split = digest.breakdown(report)
    _, marked = digest.marked_ranks(report)
    devices = digest.extreme_devices(report.device, _TABLE_ROWS)
    clocks = digest.worst_clocks(report.clocks, _TABLE_ROWS)
    return {
        "report": report,
        "status": digest.status(report),
        "facts": phrases.head_facts(report),
        "history": phrases.history_lines(report),
        "course": None if report.history is None else course(report.history),
        "missing": tuple(digest.missing_ranks(report)),
        "time": _time(report, split) if split.rows else None,
        "findings": [(finding, picture(split, finding)) for finding in report.findings],
        "evidence_limit": _EVIDENCE,
        "steps": _steps(report) if any(report.step_ns.values()) else None,
        "waits": _waits(report, marked) if report.waits else None,
        "blames": digest.main_blames(report.blames),
        "path": digest.main_path(report.critical_path),
        "devices": devices,
        "group_times": ("exposed", "wait", "unattributed", "overlapped"),
        "devices_hidden": tuple({part.rank for part in report.device} - {part.rank for part in devices}),
        "device_fields": ("busy", "idle", "compute", "communication", "memory", "overlap", "exposed"),
        "not_checked": digest.by_reason(report.not_checked),
        **_states(report),
        "gaps": digest.gap_groups(report),
        "clocks": clocks,
        "clocks_hidden": tuple({clock.node for clock in report.clocks} - {clock.node for clock in clocks}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Time:
    caption: str
    bar: Markup
    unit: str
    rows: list[tuple[str, str, str, str, str]]  # part, label, time, share, meaning
    total: str
    ranks: Markup
    ranks_caption: str


def _states(report: Report) -> dict[str, Any]:
    """The table of a job that hangs: its columns and rows."""
    states = digest.states_of_findings(report)
    rows = [dict(zip(phrases.STATE_COLUMNS, phrases.state_row(state), strict=True)) for state in states]
    numbers = ("enqueued", "started", "completed")
    return {"states": rows, "state_columns": phrases.known_columns(states), "state_numbers": numbers}


def _time(report: Report, split: digest.Breakdown) -> _Time:
    number, marked = digest.marked_ranks(report)
    scale = units.scale_for(split.longest_ns)
    times, total = scale.row(split.sums, divisor=len(split.rows))
    rows = [
        (part, labels.part_label(part), time, share, labels.part_meaning(part))
        for part, time, share in zip(split.parts, times, units.shares(split.sums), strict=True)
    ]
    missing = digest.missing_ranks(report)
    if len(split.rows) + len(missing) <= _BARS:
        chart, caption = svg.rank_bars(split, marked, missing), ""
    else:
        chart = svg.rank_columns(split, marked)
        caption = say("time.per_rank.columns", svg.COLUMNS_IN_A_ROW)
    if marked:
        said = say("time.per_rank.marked", phrases.who(tuple(marked)), number)
        caption = labels.together(" ", (caption, said)) if caption else said
    whose = "time.mean.device" if report.device else "time.mean.marks" if report.phases else "time.mean"
    return _Time(
        caption=say(whose, phrases.who(tuple(split.rows)), f"{total} {scale.unit}"),
        bar=svg.mean_bar(split),
        unit=scale.unit,
        rows=rows,
        total=total,
        ranks=chart,
        ranks_caption=caption,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    chart: Markup
    caption: str
    numbers: str


def picture(split: digest.Breakdown, finding: Finding) -> Picture | None:
    """Chart the ranks' time that a finding is about; None where no part of the step shows it."""
    values = _picture_values(split, finding)
    if not values:
        return None
    parts = spec_of(finding.detector).parts
    caption = say("finding.picture", labels.part_label(parts[0])) if len(parts) == 1 else say("finding.picture.own")
    marked = frozenset(finding.ranks) & set(values)
    if len(marked) == len(values):  # all are concerned, so none is set off
        numbers = say("finding.picture.spread", *(units.duration(f(values.values())) for f in (min, max)))
        return Picture(chart=svg.columns(values, frozenset()), caption=caption, numbers=numbers)
    medians = [
        units.duration(statistics.median(ns for rank, ns in values.items() if (rank in marked) == inside))
        for inside in (True, False)
    ]
    numbers = say("finding.picture.numbers", phrases.who(tuple(marked)), *medians)
    return Picture(chart=svg.columns(values, marked), caption=caption, numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    chart: Markup
    caption: str


def _steps(report: Report) -> list[_Chart]:
    step_ns = {rank: report.step_ns[rank] for rank in sorted(report.step_ns) if report.step_ns[rank]}
    line, per_point = svg.step_chart(step_ns, points=_STEP_POINTS)
    caption = say("steps.chart" if len(step_ns) > 1 else "steps.chart.one")
    if per_point > 1:
        caption = labels.together(" ", (caption, say("steps.binned", per_point)))
    charts = [_Chart(chart=line, caption=caption)]
    if len(step_ns) > 1:
        median = statistics.median(ns for row in step_ns.values() for ns in row)
        strip, per_row, per_cell = svg.step_strip(step_ns, median, rows=_STEP_ROWS, points=_STEP_POINTS)
        caption = say("steps.strip.binned", per_row, per_cell) if per_row * per_cell > 1 else say("steps.strip")
        charts.append(_Chart(chart=strip, caption=caption))
    return charts


def course(history: History) -> _Chart:
    """The length of a step over the whole run."""
    lengths = {history.rank: [span.median_ns for span in history.spans]}
    ends = say("history.first"), say("history.last", history.count - 1)
    per_span = history.spans[0].last - history.spans[0].first + 1
    line, _ = svg.step_chart(lengths, points=len(history.spans), ends=ends)
    return _Chart(chart=line, caption=say("history.chart", per_span, history.rank))


def _waits(report: Report, marked: frozenset[int]) -> Markup:
    return svg.columns({wait.rank: wait.waited_ns for wait in report.waits}, marked)


def _picture_values(split: digest.Breakdown, finding: Finding) -> dict[int, int]:
    """Per rank the ns per step of the part that a finding is about; empty if no single part shows it."""
    about = spec_of(finding.detector).parts
    columns = [i for i, part in enumerate(split.parts) if part in about]
    if not columns or not set(finding.ranks) & set(split.rows):
        return {}
    return {rank: sum(row[i] for i in columns) for rank, row in split.rows.items()}
