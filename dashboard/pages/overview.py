"""What is wrong, in ten seconds; why that is so, in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import polars as pl
from dash import dcc, html

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Evidence, Finding, Report
from rankscope.analysis.report import charts, phrases
from rankscope.analysis.report.labels import part_label, part_meaning, say, together
from rankscope.analysis.report.view import COST, FindingView, Section, View, view_of
from rankscope.analysis.text.message import text
from rankscope.dashboard.at_once import facts_with_rate
from rankscope.dashboard.components import Chart
from rankscope.dashboard.figures.report_tables import REPORT_TABLES
from rankscope.dashboard.figures.waterfall import Bar, waterfall
from rankscope.dashboard.grids import Shown, away, everything, plain_table
from rankscope.dashboard.page_kit import Children, Page, Query, address, card, facts, quiet, section_body
from rankscope.dashboard.run import Run

_EVIDENCE = 3
_LISTS = {"path": "critical_path"}  # section -> list of the report, where they are called differently


def layout(run: Run, query: Query) -> Children:  # noqa: ARG001
    return of_report(run.report, run.key, pending=run.pending)


def of_report(report: Report, run: str, *, pending: bool = False) -> Children:
    """Return the page of the run with this key; nothing but its report is needed.

    `pending`: its other steps are being analyzed.
    """
    view = view_of(report)
    split = digest.breakdown(report.breakdown)
    findings = card(say("findings"), *_findings(run, view, split))
    return html.Div(
        [
            _verdict(view, pending=pending),
            findings
            if report.states
            else html.Div([findings, card(say("time"), *_time(run, view, split))], className="columns"),
            _states(run, report) if report.states else None,
            _beside(
                run, report, *view.of("path"), *(replace(blames, title=say("waits")) for blames in view.of("blames"))
            ),
            card(say("steps"), *_steps(report)) if any(report.step_ns.values()) or not report.states else None,
            _beside(run, report, *view.of("healthy", "not_checked")),
            card(say("time.per_rank"), *_ranks(report, split)) if len(split.rows) > 1 else None,
            _beside(run, report, *view.of("gaps")),
        ]
    )


def _verdict(view: View, *, pending: bool) -> Children:
    soon = text("The other steps are being analyzed; this page is renewed when they are.") if pending else ""
    history = [line for line in view.history if not (pending and line == say("history.recent"))]
    return html.Div(
        [
            html.Div(
                [
                    html.H1(view.report.verdict.replace(" %", "\u00a0%")),
                    facts(*facts_with_rate(view)),
                    *(quiet(line) for line in history),
                ],
                className=f"verdict {view.status}",
            ),
            *(html.P(said, className="warning") for said in (view.warning, soon) if said),
        ]
    )


def _findings(run: str, view: View, split: digest.Breakdown) -> list[Children]:
    if not view.findings:
        return [html.P(view.no_finding)]
    shown = (_finding(run, view.report, split, shown) for shown in view.findings)
    return [*shown, *([quiet(view.error_note)] if view.error_note else []), _away(run, "findings")]


def _finding(run: str, report: Report, split: digest.Breakdown, shown: FindingView) -> Children:
    finding = shown.finding
    return html.Article(
        [
            *_said(shown),
            _picture(split, finding) if shown.number == 1 else None,
            html.Div(
                [*_evidence(run, finding.evidence[:_EVIDENCE]), *_comparison(run, report, finding)], className="links"
            ),
        ],
        id=f"finding-{shown.number}",
        className=f"finding{' follows' if finding.caused_by else ''}",
    )


def _said(shown: FindingView) -> list[Children]:
    """Return a finding's title and facts."""
    facts_ = [
        part
        for fact in shown.facts
        for part in (html.Dt(fact.name), html.Dd(html.Strong(fact.value) if fact.key == COST else fact.value))
    ]
    severity = html.Span(shown.severity, className=f"severity {shown.finding.severity}")
    title: list[Children] = [
        severity,
        f"{shown.number}. ",
        shown.finding.title,
        " ",
        html.Span(shown.check, className="check"),
    ]
    return [html.H3(title), html.Dl(facts_)]


def _picture(split: digest.Breakdown, finding: Finding) -> Children:
    found = charts.picture(split, finding)
    if found is None or len(split.rows) < 2:
        return None
    return html.Div([Chart(found.chart, title=say("finding.evidence")), quiet(found.caption)], className="picture")


def _evidence(run: str, evidence: Sequence[Evidence]) -> list[Children]:
    """Links to the moments in the timeline, each with rank and time if others would have the same name.

    Of steps that the timeline does not hold the moment, and how to open them.
    """
    names = [_name(seen) for seen in evidence]
    links = []
    for name, seen in zip(names, evidence, strict=True):
        where = {"t0": seen.start_ns, "t1": seen.end_ns} | ({} if seen.rank is None else {"rank": seen.rank})
        whole = phrases.evidence(seen)
        if seen.steps:
            links.append(quiet(whole))
            continue
        shown = text("Show: {what}", what=name if names.count(name) == 1 else whole)
        links.append(dcc.Link(shown, href=address("timeline", run, **where), title=whole, className="button"))
    return links


def _comparison(run: str, report: Report, finding: Finding) -> list[Children]:
    """Links to the finding's rank beside the others, if it names one."""
    if len(finding.ranks) != 1 or len(report.ranks) < 2:
        return []
    sampled = text("Flame graph of {rank}", rank=phrases.who(finding.ranks)) if finding.code else None
    said = text("Compare {rank} with the median", rank=phrases.who(finding.ranks))
    links = {"compare": said} | ({"flame": sampled} if sampled else {})
    return [
        dcc.Link(said, href=address(page, run, rank=finding.ranks[0]), className="button")
        for page, said in links.items()
    ]


def _name(seen: Evidence) -> str:
    if not seen.note:
        return phrases.evidence(seen)
    ranks, nodes = (() if one is None else (one,) for one in (seen.rank, seen.node))
    return together(", ", (phrases.who(ranks, nodes), seen.note)) if ranks or nodes else seen.note


def _away(run: str, listed: str) -> Children:
    """Return the downloads of this list of the report."""
    return away(run, everything(f"report_{listed}"))


def _time(run: str, view: View, split: digest.Breakdown) -> list[Children]:
    (shown,) = view.of("time")
    if shown.table is None:
        return [html.P(line) for line in shown.lines]
    _, unit, share, _ = shown.table.columns
    head = html.Tr([html.Th(), html.Th(), *(html.Th(column.title, className="number") for column in (unit, share))])
    bars = waterfall(view.report, split, shown.table)
    return [
        quiet(shown.means),
        html.Table([html.Thead(head), html.Tbody([_row(bar) for bar in bars])], className="waterfall"),
        _away(run, "breakdown"),
    ]


def _row(bar: Bar) -> Children:
    place = {"left": f"{bar.start * 100:.3f}%", "width": f"{bar.length * 100:.3f}%"}
    if bar.kind == "part":
        place["background"] = f"var(--{bar.part}, var(--other))"
    drawn = html.Div(className=f"bar bar-{bar.part}", style=place)
    return html.Tr(
        [
            html.Td(bar.label, className="label"),
            html.Td(html.Div(drawn, className="track"), title=bar.meaning),
            html.Td(bar.time, className="number"),
            html.Td(bar.share, className="number"),
        ],
        className=bar.kind,
        title=bar.meaning,
    )


def _beside(run: str, report: Report, *sections: Section) -> Children:
    """Cards of sections of the report, beside each other; nothing where there are none."""
    cards = []
    for section in sections:
        listed = _LISTS.get(section.key, section.key)
        taken = _away(run, listed) if getattr(report, listed) else None
        cards.append(card(section.title, *section_body(section), taken))
    return html.Div(cards, className="columns") if len(cards) > 1 else (cards[0] if cards else None)


def _states(run: str, report: Report) -> Children:
    """Return how far each rank had come in each process group when the job hung."""
    columns = phrases.known_columns(report.states)
    numbers = ("rank", "enqueued", "started", "completed")
    rows = [dict(zip(phrases.STATE_COLUMNS, phrases.state_row(state), strict=True)) for state in report.states]
    frame = (
        pl.DataFrame(rows)
        .select(columns)
        .with_columns(pl.col(c).cast(pl.Int64, strict=False) for c in numbers if c in columns)
    )
    shown = {column: Shown(say(f"states.{column}")) for column in columns}
    return card(say("states"), quiet(say("states.means", "")), plain_table(run, frame, shown))


def _steps(report: Report) -> list[Children]:
    drawn = charts.lengths_of_steps(report)
    if drawn is None:
        return [html.P(say("steps.none"))]
    shown = [Chart(drawn.chart, title=say("steps")), quiet(drawn.caption)]
    whole = charts.course(report.history)
    return [*shown, Chart(whole.chart, title=say("history")), quiet(whole.caption)] if whole else shown


def _ranks(report: Report, split: digest.Breakdown) -> list[Children]:
    drawn = charts.ranks_beside_each_other(report, split)
    shown = [Chart(drawn.chart, title=say("time.per_rank")), _legend(report, split)]
    return [*shown, quiet(drawn.caption)] if drawn.caption else shown


def _legend(report: Report, split: digest.Breakdown) -> Children:
    return html.Ul(
        [
            html.Li(
                [html.I(style={"background": f"var(--{part}, var(--other))"}), part_label(part)],
                title=part_meaning(part, of_hosts=digest.is_of_hosts(report, split)),
            )
            for part in split.parts
        ],
        className="levels",
    )


page = Page(title=text("Overview"), order=0, layout=layout, of_report=of_report, tables=REPORT_TABLES)
