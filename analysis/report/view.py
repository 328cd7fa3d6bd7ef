"""The facts of a report as values: the terminal, the page and the browser draw them, and add only charts.

Every fact has its words, its digits and its place here, once. What a form leaves out it leaves out as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Finding, Report
from rankscope.analysis.model.money import is_standstill
from rankscope.analysis.report import phrases
from rankscope.analysis.report.labels import detector_name, part_label, part_meaning, say, together
from rankscope.analysis.text.phrases import some_ranges
from rankscope.analysis.text.units import duration, percent, scale_for, shares

__all__ = ["COST", "Column", "Fact", "FindingView", "Section", "ShownTable", "View", "facts_of", "view_of"]

COST = "finding.cost"
_SHOWN_ROWS = 16  # of ranks or nodes; longer tables keep the extremes
_EVIDENCE = 4
# Sections that need single operations: of a long run they are of the last steps.
_OF_LAST = ("fixes", "code", "waits", "blames", "path", "pipeline", "device", "groups", "phases")
_METHODS = ("parts", "wait", "cost", "gain", "silence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of a finding."""

    key: str
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView:
    """A finding, with its words; `evidence` of a long list ends with how many more there are."""

    number: int
    finding: Finding
    severity: str
    check: str
    facts: tuple[Fact, ...]
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table; numbers stand to the right."""

    key: str
    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTable:
    """Rows of texts, by `columns`; the total, where there is one, is the sum of the rows as they are shown."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    total: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, lines of what was found (or why nothing is shown), a table, and what the table means.

    Without a title it goes on the section before.
    """

    key: str
    title: str
    lines: tuple[str, ...] = ()
    table: ShownTable | None = None
    means: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The whole report; `sections` come after the findings, in this order, and those with nothing to say are absent."""

    report: Report
    status: str
    facts: tuple[str, ...]
    history: tuple[str, ...]
    warning: str
    findings: tuple[FindingView, ...]
    no_finding: str
    error_note: str  # what ± means; empty where no finding has one
    sections: tuple[Section, ...]

    def of(self, *keys: str) -> tuple[Section, ...]:
        """Give the sections with these keys that there are."""
        return tuple(section for section in self.sections if section.key in keys)


def view_of(report: Report) -> View:
    """Put a report, whose texts are in the language that is spoken, into words."""
    sections = (
        *_fixes(report),
        *_states(report),
        _time(report),
        *_code(report),
        *_waits(report),
        *_path(report),
        *_pipeline(report),
        *_device(report),
        *_groups(report),
        *_phases(report),
        *_windows(report),
        _healthy(report),
        _not_checked(report),
        _gaps(report),
        *_clocks(report),
        Section(key="method", title=say("method"), lines=tuple(say(f"method.{key}") for key in _METHODS)),
        _environment(report),
    )
    of_last = phrases.of_last(report)
    sections = tuple(
        replace(one, means=together(" ", filter(None, (of_last, one.means)))) if one.key in _OF_LAST else one
        for one in sections
    )
    return View(
        report=report,
        status=digest.status(report),
        facts=tuple(phrases.head_facts(report)),
        history=tuple(phrases.history_lines(report)),
        warning=_warning(report),
        findings=tuple(_finding(report, number, finding) for number, finding in enumerate(report.findings, 1)),
        no_finding="" if report.findings else phrases.no_finding(report),
        error_note="" if all(map(is_standstill, report.findings)) else say("finding.error"),
        sections=sections,
    )


def facts_of(report: Report, finding: Finding) -> tuple[Fact, ...]:
    """Return a finding's ranks, place, start, cost and advice, as far as each is known."""
    facts = {
        "finding.who": phrases.who(finding.ranks, finding.nodes, finding.groups),
        "finding.where": phrases.label(finding.where),
        "finding.code": finding.code,
        "finding.steps": some_ranges(finding.steps),
        "finding.level": phrases.level(finding),
        COST: phrases.cost(report, finding),
        "finding.others_waited": phrases.others_waited(report, finding),
        "finding.gain": phrases.gain(report, finding),
        "finding.advice": finding.advice,
        "finding.cause": detector_name(finding.caused_by) if finding.caused_by else "",
    }
    return tuple(Fact(key=key, name=say(key), value=value) for key, value in facts.items() if value)


def _finding(report: Report, number: int, finding: Finding) -> FindingView:
    shown = [phrases.evidence(seen) for seen in finding.evidence[:_EVIDENCE]]
    if len(finding.evidence) > _EVIDENCE:
        shown.append(say("finding.evidence.more", len(finding.evidence) - _EVIDENCE))
    return FindingView(
        number=number,
        finding=finding,
        severity=say(f"severity.{finding.severity}"),
        check=detector_name(finding.detector),
        facts=facts_of(report, finding),
        evidence=tuple(shown),
    )


def _warning(report: Report) -> str:
    if not report.ranks and not report.steps.count:
        return say("head.unreadable")
    missing = digest.missing_ranks(report)
    return say("head.missing", phrases.who(tuple(missing))) if missing else ""


def _table(key: str, columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()) -> ShownTable:
    """Give the table of a section, whose columns have the titles `key.column`."""
    named = tuple(Column(key=name, title=say(f"{key}.{name}"), is_number=name in numbers) for name in columns)
    return ShownTable(columns=named, rows=tuple(map(tuple, rows)))


def _time(report: Report) -> Section:
    split = digest.breakdown(report.breakdown)
    if not split.rows:
        return Section(key="time", title=say("time"), lines=(say("time.none"),))
    scale = scale_for(split.longest_ns)
    times, total = scale.row(split.sums, divisor=len(split.rows))
    percents = shares(split.sums)
    names = ("part", "unit", "share", "meaning")
    titles = (say("time.part"), scale.unit, say("time.share"), say("time.meaning"))
    columns = [
        Column(key=key, title=title, is_number=key in ("unit", "share"))
        for key, title in zip(names, titles, strict=True)
    ]
    of_hosts = digest.is_of_hosts(report, split)
    rows = [
        (part_label(part), time, share or "", part_meaning(part, of_hosts=of_hosts))
        for part, time, share in zip(split.parts, times, percents, strict=True)
    ]
    whose = "time.mean.device" if report.device else "time.mean.marks" if report.phases else "time.mean"
    whose = "time.mean.host" if of_hosts else whose
    return Section(
        key="time",
        title=say("time"),
        means=say(whose, phrases.who(tuple(split.rows)), f"{total} {scale.unit}"),
        table=ShownTable(
            columns=tuple(columns),
            rows=tuple(rows),
            total=(say("time.total"), total, "100.0" if percents[0] else "", ""),
        ),
    )


def _fixes(report: Report) -> list[Section]:
    if not report.fixes:
        return []
    columns = ("fix", "step", "gain", "share", "finding")
    rows = [phrases.fix_row(report, fix) for fix in report.fixes]
    table = _table("fixes", columns, rows, ("step", "gain", "share"))
    return [Section(key="fixes", title=say("fixes"), table=table, means=phrases.fixes_mean(report))]


def _states(report: Report) -> list[Section]:
    """Show how far each rank had come when the job hung, in the groups of the finding."""
    if not report.states:
        return []
    shown = digest.states_of_findings(report)
    known = phrases.known_columns(shown)
    rows = [dict(zip(phrases.STATE_COLUMNS, phrases.state_row(state), strict=True)) for state in shown]
    cells = [[row[name] for name in known] for row in rows]
    few = say("states.few") if len(shown) < len(report.states) else ""
    table = _table("states", known, cells, ("enqueued", "started", "completed"))
    return [Section(key="states", title=say("states"), table=table, means=say("states.means", few).rstrip())]


def _code(report: Report) -> list[Section]:
    if not report.code:
        return []
    rows = [phrases.code_row(share) for share in report.code]
    table = _table("code", ("share", "time", "part", "place"), rows, ("share", "time"))
    return [Section(key="code", title=say("code"), table=table, means=phrases.code_means(report.code))]


def _waits(report: Report) -> list[Section]:
    lines = phrases.wait_lines(report.waits, _SHOWN_ROWS) or (say("waits.none"),)
    means = say("waits.means") if report.waits else ""
    waits = [Section(key="waits", title=say("waits"), lines=lines, means=means)]
    blames = digest.main_blames(report.blames)
    if not blames:
        return waits
    rows = [(duration(blame.blocked_ns), *phrases.path_row(blame)) for blame in blames]
    table = _table("blames", ("time", "rank", "part", "label"), rows, ("time", "rank"))
    return [*waits, Section(key="blames", title="", table=table, means=say("blames.means"))]


def _path(report: Report) -> list[Section]:
    path = digest.main_path(report.critical_path)
    if not path:
        return []
    step_ns = sum(part.ns_per_step for part in path)
    rows = [(percent(part.ns_per_step / step_ns), duration(part.ns_per_step), *phrases.path_row(part)) for part in path]
    table = _table("path", ("share", "time", "rank", "part", "label"), rows, ("share", "time", "rank"))
    return [Section(key="path", title=say("path"), table=table, means=say("path.means", duration(step_ns)))]


def _pipeline(report: Report) -> list[Section]:
    found = report.pipeline
    if found is None:
        return []
    shape = say("pipeline.shape", found.schedule, found.stages, found.microbatches)
    return [Section(key="pipeline", title=say("pipeline"), lines=(shape, found.explanation))]


def _device(report: Report) -> list[Section]:
    shown = digest.extreme_devices(report.device, _SHOWN_ROWS)
    if not shown:
        return []
    fields = ("busy", "idle", "compute", "communication", "memory", "overlap", "exposed")
    rows = [
        (
            str(part.rank),
            duration(part.window_ns),
            *(percent(getattr(part, f"{field}_ns") / max(part.window_ns, 1)) for field in fields),
        )
        for part in shown
    ]
    table = _table("device", ("rank", "window", *fields), rows, ("window", *fields))
    hidden = tuple({part.rank for part in report.device} - {part.rank for part in shown})
    means = say("device.means")
    if hidden:
        means = together(" ", (means, say("device.hidden", phrases.who(hidden))))
    return [Section(key="device", title=say("device"), table=table, means=means)]


def _groups(report: Report) -> list[Section]:
    if not report.groups:
        return []
    times = ("exposed", "wait", "unattributed", "overlapped")
    rows = [
        (
            group.group,
            group.kind,
            group.op,
            *(duration(getattr(group, f"{column}_ns")) for column in times),
            group.hidden_by,
        )
        for group in report.groups
    ]
    table = _table("groups", ("group", "kind", "op", *times, "hidden_by"), rows, times)
    return [Section(key="groups", title=say("groups"), table=table, means=say("groups.means"))]


def _phases(report: Report) -> list[Section]:
    if report.lead is None:
        return []
    numbers = ("mean", "least", "most", "communication", "ahead")
    table = _table("phases", ("phase", *numbers), phrases.phase_rows(report.phases), numbers)
    lines = (phrases.lead_line(report.lead, report.windows),)
    return [Section(key="phases", title=say("phases"), lines=lines, table=table, means=say("phases.means"))]


def _windows(report: Report) -> list[Section]:
    sections: list[Section] = []
    for window in report.windows:
        rows = [phrases.operator_row(operator) for operator in window.operators]
        numbers = ("time", "calls", "slowest", "its")
        table = _table("windows", (*numbers, "operator"), rows, numbers) if rows else None
        sections.append(
            Section(
                key="windows",
                title="" if sections else say("windows"),
                lines=tuple(phrases.window_lines(report, window)),
                table=table,
                means=say("windows.means") if rows else "",
            )
        )
    return sections


def _healthy(report: Report) -> Section:
    rows = [(detector_name(one.detector), phrases.resolution(report, one.resolution_ns)) for one in report.healthy]
    return _listed("healthy", ("check", "sees"), rows)


def _not_checked(report: Report) -> Section:
    reasons = digest.by_reason(report.not_checked)
    rows = [(together(", ", map(detector_name, names)), why) for why, names in reasons.items()]
    return _listed("not_checked", ("check", "why"), rows)


def _gaps(report: Report) -> Section:
    rows = [(group.table, phrases.gap_extent(group), group.why) for group in digest.gap_groups(report)]
    return _listed("gaps", ("table", "who", "why"), rows)


def _listed(key: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """Give a section of rows, or that there are none."""
    if not rows:
        return Section(key=key, title=say(key), lines=(say(f"{key}.none"),))
    return Section(key=key, title=say(key), table=_table(key, columns, rows))


def _clocks(report: Report) -> list[Section]:
    shown = digest.worst_clocks(report.clocks, _SHOWN_ROWS)
    if not shown:
        return [Section(key="clocks", title=say("clocks"), lines=(say("clocks.none"),))]
    rows = [
        (
            str(clock.node),
            duration(clock.offset_ns),
            say("clocks.drift.value", f"{clock.drift_ppm:.3g}"),
            phrases.clock_error(clock),
            clock.source,
        )
        for clock in shown
    ]
    table = _table("clocks", ("node", "offset", "drift", "error", "source"), rows, ("offset", "drift"))
    hidden = tuple({clock.node for clock in report.clocks} - {clock.node for clock in shown})
    notes = [say("clocks.hidden", phrases.one_or_many("node", hidden))] if hidden else []
    if report.matched_fraction is not None:
        notes.append(say("clocks.matched", percent(report.matched_fraction)))
    return [Section(key="clocks", title=say("clocks"), table=table, means=together(" ", notes))]


def _environment(report: Report) -> Section:
    return _listed("environment", ("name", "value"), list(report.environment.items()))
