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
from rankscope.analysis.model.finding import (
    Blame,
    CodeShare,
    DevicePart,
    Finding,
    GroupTime,
    PathPart,
    Pipeline,
    Report,
    Wait,
)
from rankscope.analysis.report.labels import (
    detector_name,
    part_label,
    part_meaning,
    part_short,
    say,
    together,
)
from rankscope.analysis.report.phrases import (
    clock_error,
    code_means,
    code_row,
    cost,
    fix_row,
    fixes_mean,
    gain,
    gap_extent,
    head_facts,
    healthy_items,
    history_lines,
    label,
    lead_line,
    level,
    no_finding,
    one_or_many,
    operator_row,
    others_waited,
    path_row,
    phase_rows,
    resolution,
    who,
    window_lines,
)
from rankscope.analysis.text.message import speaking, spoken
from rankscope.analysis.text.phrases import some_ranges
from rankscope.analysis.text.units import duration, percent, scale_for, shares

__all__ = ["render", "render_short", "wants_color"]

_SEVERITY_STYLE = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan"}
_STATUS_STYLE = {"green": "bold green", "amber": "bold yellow", "red": "bold red"}
_CONTROL = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")  # names come from users: no escape sequences
_SHORT_FINDINGS = 3
_SHORT_GAPS = 3
_ALL_RANKS = 16  # with more, quantiles and the extreme ranks are shown
_EXTREME_RANKS = 8
_SHARE_BAR = 24


def wants_color(stream: TextIO) -> bool:
    """True for a terminal whose user did not set NO_COLOR (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def render(report: Report, *, width: int = 100, color: bool = False, language: str = "en") -> str:
    """The full report, lines of at most `width` columns; without `color` it holds no escape sequence."""
    with speaking(language):
        return _print(_blocks(spoken(report)), width=width, color=color)


def render_short(report: Report, *, width: int = 100, color: bool = False, language: str = "en") -> str:
    """Verdict, the costliest findings, and one line each for time, what was checked, and the gaps."""
    with speaking(language):
        return _print(_short_blocks(spoken(report)), width=width, color=color)


def _blocks(report: Report) -> list[RenderableType]:
    return [
        _head(report),
        _heading("findings"),
        *_findings(report, report.findings),
        *_fixes(report),
        _heading("time"),
        *_time(report),
        *_code(report.code),
        _heading("waits"),
        *_waits(report.waits),
        *_blames(digest.main_blames(report.blames)),
        *_path(digest.main_path(report.critical_path)),
        *_pipeline(report.pipeline),
        *_device(report.device),
        *_groups(report.groups),
        *_phases(report),
        *_windows(report),
        _heading("healthy"),
        _healthy(report),
        _heading("not_checked"),
        _not_checked(report),
        _heading("gaps"),
        *_gaps(report, limit=None),
        _heading("clocks"),
        *_clocks(report),
        _heading("environment"),
        _environment(report),
    ]


def _short_blocks(report: Report) -> list[RenderableType]:
    blocks: list[RenderableType] = [_head(report)]
    if report.findings or not report.healthy:
        blocks += [Text(), *_findings(report, report.findings[:_SHORT_FINDINGS])]
    if len(report.findings) > _SHORT_FINDINGS:
        hidden = len(report.findings) - _SHORT_FINDINGS
        blocks.append(_indented(_text(say("findings.more", hidden, len(report.findings)), "dim")))
    blocks += [Text(), _pairs([(say("time.step"), _time_in_a_line(report)), *_checked_in_lines(report)])]
    if report.gaps:
        blocks += [_text(say("gaps"), "bold"), *_gaps(report, limit=_SHORT_GAPS)]
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
        _environ={},  # COLUMNS and the like have no say: the caller decides
    )
    for block in blocks:
        console.print(block)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _text(text: str, style: str = "") -> Text:
    return Text(text.translate(_CONTROL), style)


def _heading(key: str) -> RenderableType:
    return Group(Text(), _text(say(key), "bold underline"))


def _indented(block: RenderableType, by: int = 3) -> RenderableType:
    return Padding(block, (0, 0, 0, by))


def _pairs(pairs: Iterable[tuple[str, Text | str]], *, least: int = 8) -> Table:
    """Two columns, name and text; the text wraps."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=least, no_wrap=True, style="dim")
    grid.add_column(ratio=1, overflow="fold")
    for name, text in pairs:
        grid.add_row(_text(name), text if isinstance(text, Text) else _text(text))
    return grid


def _table(*columns: str, text_columns: Sequence[int] = (0,)) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        if i in text_columns:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _head(report: Report) -> RenderableType:
    lines = [
        _text(f"{say('title')}  {report.path}", "dim"),
        _text(report.verdict, _STATUS_STYLE[digest.status(report)]),
    ]
    facts = head_facts(report)
    lines.append(_text(together("; ", facts), "dim"))
    lines += [_text(line) for line in history_lines(report)]
    missing = digest.missing_ranks(report)
    if not report.ranks and not report.steps.count:
        lines.append(_text(say("head.unreadable"), "yellow"))
    elif missing:
        lines.append(_text(say("head.missing", who(tuple(missing))), "yellow"))
    return Group(*lines)


def _findings(report: Report, findings: Sequence[Finding]) -> list[RenderableType]:
    if not findings:
        return [_text(no_finding(report), "green" if digest.is_healthy(report) else "yellow")]
    blocks: list[RenderableType] = []
    for number, finding in enumerate(findings, 1):
        blocks += [_finding_title(number, finding), _indented(_finding_facts(report, finding))]
    return [*blocks, _indented(_text(say("finding.error"), "dim"))]


def _finding_title(number: int, finding: Finding) -> Text:
    severity = say(f"severity.{finding.severity}").upper()
    title = _text(f"{number}  ")
    title.append(severity, _SEVERITY_STYLE[finding.severity])
    title.append_text(_text(f"  {finding.title}", "bold"))
    title.append_text(_text(f"  ({detector_name(finding.detector)})", "dim"))
    return title


def _finding_facts(report: Report, finding: Finding) -> Table:
    facts: list[tuple[str, Text | str]] = [(say("finding.who"), who(finding.ranks, finding.nodes, finding.groups))]
    if finding.where:
        facts.append((say("finding.where"), label(finding.where)))
    if finding.code:
        facts.append((say("finding.code"), finding.code))
    if finding.steps:
        facts.append((say("finding.steps"), some_ranges(finding.steps)))
    facts += [
        (say("finding.level"), level(finding)),
        (say("finding.cost"), _text(cost(report, finding), "bold")),
        *((say("finding.others_waited"), said) for said in [others_waited(report, finding)] if said),
        (say("finding.gain"), gain(report, finding)),
        (say("finding.advice"), finding.advice),
    ]
    if finding.caused_by:
        facts.append((say("finding.cause"), detector_name(finding.caused_by)))
    return _pairs(facts)


def _fixes(report: Report) -> list[RenderableType]:
    if not report.fixes:
        return []
    columns = ("fix", "step", "gain", "share", "finding")
    table = _table(*(say(f"fixes.{column}") for column in columns), text_columns=(0, 4))
    for fix in report.fixes:
        table.add_row(*map(_text, fix_row(report, fix)))
    return [_heading("fixes"), _text(fixes_mean(report), "dim"), table]


def _time_in_a_line(report: Report) -> str:
    split = digest.breakdown(report)
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


def _time(report: Report) -> list[RenderableType]:
    split = digest.breakdown(report)
    if not split.rows:
        return [_text(say("time.none"))]
    scale = scale_for(split.longest_ns)
    times, total = scale.row(split.sums, divisor=len(split.rows))
    percents = shares(split.sums)
    summary = _table(say("time.part"), scale.unit, say("time.share"), "", say("time.meaning"), text_columns=(0, 3, 4))
    for part, time, share in zip(split.parts, times, percents, strict=True):
        bar = "█" * round(float(share or 0) / 100 * _SHARE_BAR)
        summary.add_row(part_label(part), time, share, bar, _text(part_meaning(part), "dim"))
    whose = "time.mean.device" if report.device else "time.mean.marks" if report.phases else "time.mean"
    summary.add_row(say("time.total"), total, "100.0" if percents[0] else "", "", "", style="bold")
    return [
        _text(say(whose, who(tuple(split.rows)), f"{total} {scale.unit}"), "dim"),
        summary,
        Text(),
        *_per_rank(report, split),
    ]


def _code(code: Sequence[CodeShare]) -> list[RenderableType]:
    if not code:
        return []
    table = _table(*(say(f"code.{column}") for column in ("share", "time", "part", "place")), text_columns=(2, 3))
    for share in code:
        table.add_row(*map(_text, code_row(share)))
    return [_heading("code"), _text(code_means(code), "dim"), table]


def _per_rank(report: Report, split: digest.Breakdown) -> list[RenderableType]:
    scale = scale_for(split.longest_ns)
    table = _table(say("time.rank"), *(part_short(part) for part in split.parts), say("time.step"))
    table.padding = (0, 1, 0, 0)
    caption = say("time.per_rank.caption", scale.unit)
    if len(split.rows) <= _ALL_RANKS:
        for rank, row in split.rows.items():
            _add_rank(table, str(rank), *scale.row(row), shares(row))
        return [_text(caption, "dim"), table]
    _add_rank(table, say("time.mean_row"), *scale.row(split.sums, divisor=len(split.rows)), shares(split.sums))
    columns = [*zip(*split.rows.values(), strict=True), tuple(sum(row) for row in split.rows.values())]
    for key, quantile in (("min", min), ("median", statistics.median_low), ("max", max)):
        table.add_row(say(f"time.{key}_row"), *(scale.row([quantile(c)])[1] for c in columns), style="dim")
    shown = digest.extreme_ranks(split, report.findings, _EXTREME_RANKS)
    for rank in shown:
        _add_rank(table, str(rank), *scale.row(split.rows[rank]), shares(split.rows[rank]))
    hidden = tuple(rank for rank in split.rows if rank not in shown)
    notes = [say("time.quantiles"), say("time.shown", len(shown), len(split.rows), who(hidden))]
    return [_text(caption, "dim"), table, *(_text(note, "dim") for note in notes)]


def _add_rank(table: Table, name: str, times: Sequence[str], total: str, percents: Sequence[str]) -> None:
    cells = [_over(time, f"{share} %" if share else "") for time, share in zip(times, percents, strict=True)]
    table.add_row(name, *cells, _over(total, ""))


def _over(time: str, share: str) -> Text:
    return Text.assemble(time, "\n", (share, "dim"))


def _waits(waits: Sequence[Wait]) -> list[RenderableType]:
    if not waits:
        return [_text(say("waits.none"))]
    ordered = sorted(waits, key=lambda wait: (wait.waited_ns, wait.rank))
    blocks: list[RenderableType] = [_text(say("waits.means"), "dim")]
    if len(ordered) <= _ALL_RANKS:
        return [*blocks, _text(_wait_items(ordered))]
    median = duration(statistics.median(wait.waited_ns for wait in ordered))
    half = _EXTREME_RANKS // 2
    return [
        *blocks,
        _text(say("waits.least", _wait_items(ordered[:half]))),
        _text(say("waits.median", median)),
        _text(say("waits.most", _wait_items(ordered[-half:]))),
        _text(say("waits.hidden", len(ordered) - 2 * half), "dim"),
    ]


def _blames(blames: Sequence[Blame]) -> list[RenderableType]:
    if not blames:
        return []
    table = _table(*(say(f"blames.{column}") for column in ("time", "rank", "part", "label")), text_columns=(2, 3))
    for blame in blames:
        rank, part, what = path_row(blame)
        table.add_row(duration(blame.blocked_ns), rank, part, _text(what))
    return [_text(say("blames.means"), "dim"), table]


def _path(path: Sequence[PathPart]) -> list[RenderableType]:
    if not path:
        return []
    step_ns = sum(part.ns_per_step for part in path)
    columns = ("share", "time", "rank", "part", "label")
    table = _table(*(say(f"path.{column}") for column in columns), text_columns=(3, 4))
    for part in path:
        table.add_row(percent(part.ns_per_step / step_ns), duration(part.ns_per_step), *map(_text, path_row(part)))
    return [_heading("path"), _text(say("path.means", duration(step_ns)), "dim"), table]


def _wait_items(waits: Iterable[Wait]) -> str:
    return together(", ", (say("waits.item", wait.rank, duration(wait.waited_ns)) for wait in waits))


def _device(device: Sequence[DevicePart]) -> list[RenderableType]:
    if not device:
        return []
    fields = ("busy", "idle", "compute", "communication", "memory", "overlap", "exposed")
    table = _table(say("time.rank"), say("device.window"), *(say(f"device.{field}") for field in fields))
    shown = digest.extreme_devices(device, _ALL_RANKS)
    for part in shown:
        times = [getattr(part, f"{field}_ns") for field in fields]
        table.add_row(str(part.rank), duration(part.window_ns), *(percent(t / max(part.window_ns, 1)) for t in times))
    blocks = [_heading("device"), _text(say("device.means"), "dim"), table]
    hidden = {part.rank for part in device} - {part.rank for part in shown}
    return [*blocks, _text(say("device.hidden", who(tuple(hidden))), "dim")] if hidden else blocks


def _groups(groups: Sequence[GroupTime]) -> list[RenderableType]:
    if not groups:
        return []
    times = ("exposed", "wait", "unattributed", "overlapped")
    columns = ("group", "kind", "op", *times, "hidden_by")
    table = _table(*(say(f"groups.{column}") for column in columns), text_columns=(0, 1, 2, len(columns) - 1))
    for group in groups:
        spent = (duration(getattr(group, f"{column}_ns")) for column in times)
        table.add_row(group.group, group.kind, group.op, *spent, group.hidden_by)
    return [_heading("groups"), _text(say("groups.means"), "dim"), table]


def _phases(report: Report) -> list[RenderableType]:
    if report.lead is None:
        return []
    columns = ("phase", "mean", "least", "most", "communication", "ahead")
    table = _table(*(say(f"phases.{column}") for column in columns))
    for row in phase_rows(report.phases):
        table.add_row(*map(_text, row))
    return [_heading("phases"), _text(lead_line(report.lead)), _text(say("phases.means"), "dim"), table]


def _windows(report: Report) -> list[RenderableType]:
    if not report.windows:
        return []
    blocks: list[RenderableType] = [_heading("windows")]
    for window in report.windows:
        blocks += [_text(line) for line in window_lines(report, window)]
        if window.operators:
            columns = ("time", "calls", "slowest", "its", "operator")
            table = _table(*(say(f"windows.{column}") for column in columns), text_columns=(4,))
            for row in map(operator_row, window.operators):
                table.add_row(*map(_text, row))
            blocks += [_text(say("windows.means"), "dim"), table]
    return blocks


def _pipeline(pipeline: Pipeline | None) -> list[RenderableType]:
    if pipeline is None:
        return []
    shape = say("pipeline.shape", pipeline.schedule, pipeline.stages, pipeline.microbatches)
    return [_heading("pipeline"), _text(shape), _text(pipeline.explanation)]


def _healthy(report: Report) -> RenderableType:
    if not report.healthy:
        return _text(say("healthy.none"))
    return _pairs((detector_name(h.detector), resolution(report, h.resolution_ns)) for h in report.healthy)


def _not_checked(report: Report) -> RenderableType:
    if not report.not_checked:
        return _text(say("not_checked.none"))
    return _pairs((detector_name(unchecked.detector), unchecked.why) for unchecked in report.not_checked)


def _gaps(report: Report, *, limit: int | None) -> list[RenderableType]:
    groups = digest.gap_groups(report)
    if not groups:
        return [_text(say("gaps.none"))]
    table = _pairs((group.table, say("gaps.where", gap_extent(group), group.why)) for group in groups[:limit])
    if limit is None or len(groups) <= limit:
        return [table]
    return [table, _text(say("gaps.more", len(groups) - limit, len(groups)), "dim")]


def _clocks(report: Report) -> list[RenderableType]:
    shown = digest.worst_clocks(report.clocks, _ALL_RANKS)
    if not shown:
        return [_text(say("clocks.none"))]
    table = _table(
        *(say(f"clocks.{column}") for column in ("node", "offset", "drift", "error", "source")), text_columns=(0, 3, 4)
    )
    for clock in shown:
        drift = say("clocks.drift.value", f"{clock.drift_ppm:.3g}")
        table.add_row(str(clock.node), duration(clock.offset_ns), drift, _text(clock_error(clock)), _text(clock.source))
    lines = []
    hidden = {clock.node for clock in report.clocks} - {clock.node for clock in shown}
    if hidden:
        lines.append(say("clocks.hidden", one_or_many("node", tuple(hidden))))
    if report.matched_fraction is not None:
        lines.append(say("clocks.matched", percent(report.matched_fraction)))
    return [table, *(_text(line) for line in lines)]


def _environment(report: Report) -> RenderableType:
    if not report.environment:
        return _text(say("environment.none"))
    return _pairs(report.environment.items())
