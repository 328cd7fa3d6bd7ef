"""The report for a terminal: the whole story, and a short form for the end of a run."""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Report
from rankscope.analysis.report.labels import detector_name, part_short, say, together
from rankscope.analysis.report.phrases import healthy_items, who
from rankscope.analysis.report.view import COST, Column, FindingView, Section, ShownTable, View, view_of
from rankscope.analysis.text.message import speaking, spoken
from rankscope.analysis.text.units import scale_for, shares

__all__ = ["render", "render_short", "wants_color"]

_SEVERITY_STYLE = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan"}
_STATUS_STYLE = {"green": "bold green", "amber": "bold yellow", "red": "bold red"}
_CONTROL = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")  # names come from users: no escape sequences
_SHORT_FINDINGS = 3
_SHORT_GAPS = 3
_ALL_RANKS = 16  # with more, quantiles and the extreme ranks are shown
_EXTREME_RANKS = 8
_SHARE_BAR = 24
_LISTED = ("healthy", "not_checked", "gaps", "environment")  # their tables need no heads
_LEFT_OUT = ("method",)  # at length in docs/definitions.md
_NAME_COLUMNS = 40


def wants_color(stream: TextIO) -> bool:
    """Say whether this is a terminal whose user did not set NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def render(report: Report, *, width: int = 100, color: bool = False, language: str = "en") -> str:
    """Return the full report, lines of at most `width` columns; without `color` it holds no escape sequence."""
    with speaking(language):
        return _print(_blocks(spoken(report)), width=width, color=color)


def render_short(report: Report, *, width: int = 100, color: bool = False, language: str = "en") -> str:
    """Verdict, the costliest findings, and one line each for time, what was checked, and the gaps."""
    with speaking(language):
        return _print(_short_blocks(spoken(report)), width=width, color=color)


def _blocks(report: Report) -> list[RenderableType]:
    view = view_of(report)
    blocks = [_head(view), _heading(say("findings")), *_findings(view, view.findings)]
    for section in view.sections:
        if section.key not in _LEFT_OUT:
            blocks += _section(section)
        if section.key == "time":
            blocks += _per_rank(report)
    return blocks


def _short_blocks(report: Report) -> list[RenderableType]:
    view = view_of(report)
    blocks: list[RenderableType] = [_head(view)]
    if view.findings or not report.healthy:
        blocks += [Text(), *_findings(view, view.findings[:_SHORT_FINDINGS])]
    if len(view.findings) > _SHORT_FINDINGS:
        hidden = len(view.findings) - _SHORT_FINDINGS
        blocks.append(_indented(_text(say("findings.more", hidden, len(view.findings)), "dim")))
    blocks += [Text(), _pairs([(say("time.step"), _time_in_a_line(report)), *_checked_in_lines(report)])]
    for gaps in view.of("gaps"):
        rows = gaps.table.rows if gaps.table else ()
        if rows:
            blocks += [_text(gaps.title, "bold"), _listing(rows[:_SHORT_GAPS])]
        if len(rows) > _SHORT_GAPS:
            blocks.append(_text(say("gaps.more", len(rows) - _SHORT_GAPS, len(rows)), "dim"))
    return blocks


def _print(blocks: Iterable[RenderableType], *, width: int, color: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        _environ={},  # the caller decides, not COLUMNS and the like
    )
    for block in blocks:
        console.print(block)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _text(text: str, style: str = "") -> Text:
    return Text(text.translate(_CONTROL), style)


def _heading(title: str) -> RenderableType:
    return Group(Text(), _text(title, "bold underline"))


def _indented(block: RenderableType, by: int = 3) -> RenderableType:
    return Padding(block, (0, 0, 0, by))


def _pairs(pairs: Iterable[tuple[str, Text | str]], *, most: int | None = None) -> Table:
    """Two columns, name and text; the text wraps, and names where they may have no more than `most` columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=8, max_width=most, no_wrap=most is None, overflow="fold", style="dim")
    grid.add_column(ratio=1, overflow="fold")
    for name, text in pairs:
        grid.add_row(_text(name), text if isinstance(text, Text) else _text(text))
    return grid


def _listing(rows: Sequence[Sequence[str]]) -> Table:
    """Rows of two texts or three: a name and its text."""
    pairs = ((row[0], say("gaps.where", *row[1:]) if len(row) > 2 else row[1]) for row in rows)
    return _pairs(pairs, most=_NAME_COLUMNS)


def _table(columns: Iterable[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        if column.is_number:
            table.add_column(column.title, justify="right", no_wrap=True)
        else:
            table.add_column(column.title, overflow="fold")
    return table


def _section(section: Section) -> list[RenderableType]:
    blocks: list[RenderableType] = [_heading(section.title)] if section.title else []
    blocks += [_text(line) for line in section.lines]
    blocks += [_text(section.means, "dim")] if section.means else []
    if section.table is None:
        return blocks
    if section.key in _LISTED:
        return [*blocks, _listing(section.table.rows)]
    return [*blocks, _of_parts(section.table) if section.key == "time" else _drawn(section.table)]


def _drawn(shown: ShownTable) -> Table:
    table = _table(shown.columns)
    for row in shown.rows:
        table.add_row(*map(_text, row))
    return table


def _of_parts(shown: ShownTable) -> Table:
    """Return the parts of the mean step, with a bar each."""
    *numbers, meaning = shown.columns
    table = _table((*numbers, Column(key="bar", title=""), meaning))
    for *row, means in shown.rows:
        bar = "█" * round(float(row[-1] or 0) / 100 * _SHARE_BAR)
        table.add_row(*map(_text, row), bar, _text(means, "dim"))
    *total, _ = shown.total
    table.add_row(*total, "", "", style="bold")
    return table


def _head(view: View) -> RenderableType:
    lines = [
        _text(f"{say('title')}  {view.report.path}", "dim"),
        _text(view.report.verdict, _STATUS_STYLE[view.status]),
        _text(together("; ", view.facts), "dim"),
        *(_text(line) for line in view.history),
    ]
    return Group(*lines, *([_text(view.warning, "yellow")] if view.warning else []))


def _findings(view: View, findings: Sequence[FindingView]) -> list[RenderableType]:
    if not findings:
        return [_text(view.no_finding, "green" if digest.is_healthy(view.report) else "yellow")]
    blocks: list[RenderableType] = []
    for shown in findings:
        facts = ((fact.name, _text(fact.value, "bold" if fact.key == COST else "")) for fact in shown.facts)
        blocks += [_finding_title(shown), _indented(_pairs(facts))]
    return [*blocks, *([_indented(_text(view.error_note, "dim"))] if view.error_note else [])]


def _finding_title(shown: FindingView) -> Text:
    title = _text(f"{shown.number}  ")
    title.append(shown.severity.upper(), _SEVERITY_STYLE[shown.finding.severity])
    title.append_text(_text(f"  {shown.finding.title}", "bold"))
    title.append_text(_text(f"  ({shown.check})", "dim"))
    return title


def _time_in_a_line(report: Report) -> str:
    split = digest.breakdown(report.breakdown)
    if not split.rows:
        return say("time.none")
    scale = scale_for(split.longest_ns)
    _, total = scale.row(split.sums, divisor=len(split.rows))
    order = sorted(range(len(split.parts)), key=lambda i: -split.sums[i])
    large = [i for i in order if split.sums[i] >= 0.01 * sum(split.sums)]
    large = order if len(order) - len(large) == 1 else large
    names = [part_short(split.parts[i]) for i in large]
    values = [split.sums[i] for i in large]
    if len(large) < len(order):
        names.append(say("time.smaller", len(order) - len(large)))
        values.append(sum(split.sums) - sum(values))
    named = (f"{name} {share} %" for name, share in zip(names, shares(values), strict=True))
    return f"{total} {scale.unit} = {' + '.join(named)}"


def _checked_in_lines(report: Report) -> list[tuple[str, str]]:
    lines = [(say("healthy"), healthy_items(report))]
    if report.not_checked:
        names = together(", ", (detector_name(unchecked.detector) for unchecked in report.not_checked))
        lines.append((say("not_checked"), say("not_checked.short", names)))
    return lines


def _per_rank(report: Report) -> list[RenderableType]:
    split = digest.breakdown(report.breakdown)
    if not split.rows:
        return []
    scale = scale_for(split.longest_ns)
    names = (say("time.rank"), *map(part_short, split.parts), say("time.step"))
    table = _table(Column(key=name, title=name, is_number=name != names[0]) for name in names)
    table.padding = (0, 1, 0, 0)
    caption = say("time.per_rank.caption", scale.unit)
    if len(split.rows) <= _ALL_RANKS:
        for rank, row in split.rows.items():
            _add_rank(table, str(rank), *scale.row(row), shares(row))
        return [Text(), _text(caption, "dim"), table]
    _add_rank(table, say("time.mean_row"), *scale.row(split.sums, divisor=len(split.rows)), shares(split.sums))
    columns = [*zip(*split.rows.values(), strict=True), tuple(sum(row) for row in split.rows.values())]
    for key, quantile in (("min", min), ("median", statistics.median_low), ("max", max)):
        table.add_row(say(f"time.{key}_row"), *(scale.row([quantile(c)])[1] for c in columns), style="dim")
    shown = digest.extreme_ranks(split, report.findings, _EXTREME_RANKS)
    for rank in shown:
        _add_rank(table, str(rank), *scale.row(split.rows[rank]), shares(split.rows[rank]))
    hidden = tuple(rank for rank in split.rows if rank not in shown)
    notes = [say("time.quantiles"), say("time.shown", len(shown), len(split.rows), who(hidden))]
    return [Text(), _text(caption, "dim"), table, *(_text(note, "dim") for note in notes)]


def _add_rank(table: Table, name: str, times: Sequence[str], total: str, percents: Sequence[str]) -> None:
    cells = [_over(time, f"{share} %" if share else "") for time, share in zip(times, percents, strict=True)]
    table.add_row(name, *cells, _over(total, ""))


def _over(time: str, share: str) -> Text:
    return Text.assemble(time, "\n", (share, "dim"))
