"""What is wrong, in ten seconds; why that is so, in a minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dash_mantine_components as dmc
import polars as pl
from dash import dcc, html

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Evidence, Finding, Report
from rankscope.analysis.report import phrases, svg
from rankscope.analysis.report.html import course, picture
from rankscope.analysis.report.labels import detector_name, part_label, part_meaning, say, together
from rankscope.analysis.text import units
from rankscope.analysis.text.message import text
from rankscope.dashboard.components import Chart
from rankscope.dashboard.figures.waterfall import Bar, waterfall
from rankscope.dashboard.finding_facts import COST, finding_facts
from rankscope.dashboard.grids import Shown, plain_table
from rankscope.dashboard.page_kit import Page, Query, address, card, facts, quiet
from rankscope.dashboard.run import Run

_EVIDENCE = 3
_STEP_POINTS, _STEP_ROWS = 240, 24
_PATH, _BLAMES = ("share", "time", "rank", "part", "label"), ("time", "rank", "part", "label")
_NUMBERS = {"share": "number", "time": "number"}
_BARS = 32  # ranks that get a bar each


def layout(run: Run, query: Query) -> Any:  # noqa: ANN401, ARG001
    report = run.report
    split = digest.breakdown(report)
    findings = card(say("findings"), *_findings(run, split))
    return html.Div(
        [
            _verdict(report),
            findings
            if report.states
            else html.Div([findings, card(say("time"), *_time(report, split))], className="columns"),
            _states(run) if report.states else None,
            _waiting(report),
            card(say("steps"), *_steps(report)) if any(report.step_ns.values()) or not report.states else None,
            _checked(report),
            card(say("time.per_rank"), *_ranks(report, split)) if len(split.rows) > 1 else None,
            card(say("gaps"), *_gaps(report)),
        ]
    )


def _verdict(report: Report) -> Any:  # noqa: ANN401
    missing = digest.missing_ranks(report)
    warning = None
    if not report.ranks and not report.steps.count:
        warning = say("head.unreadable")
    elif missing:
        warning = say("head.missing", phrases.who(tuple(missing)))
    rate = text("{rate:.3g} steps per second", rate=1000000000.0 / report.steps.mean_ns) if report.steps.mean_ns else ""
    return html.Div(
        [
            html.Div(
                [
                    html.H1(report.verdict.replace(" %", "\u00a0%")),
                    facts(*phrases.head_facts(report), rate),
                    *(quiet(line) for line in phrases.history_lines(report)),
                ],
                className=f"verdict {digest.status(report)}",
            ),
            html.P(warning, className="warning") if warning else None,
        ]
    )


def _findings(run: Run, split: digest.Breakdown) -> list[Any]:
    if not run.report.findings:
        return [html.P(phrases.no_finding(run.report))]
    found = [_finding(run, split, number, finding) for number, finding in enumerate(run.report.findings, 1)]
    return [*found, quiet(say("finding.error"))]


def _finding(run: Run, split: digest.Breakdown, number: int, finding: Finding) -> Any:  # noqa: ANN401
    shown = [
        part
        for fact, name, value in finding_facts(run.report, finding)
        for part in (html.Dt(name), html.Dd(html.Strong(value) if fact == COST else value))
    ]
    severity = html.Span(say(f"severity.{finding.severity}"), className=f"severity {finding.severity}")
    return html.Article(
        [
            html.H3(
                [
                    severity,
                    f"{number}. ",
                    finding.title,
                    " ",
                    html.Span(detector_name(finding.detector), className="check"),
                ]
            ),
            html.Dl(shown),
            _picture(split, finding) if number == 1 else None,
            dmc.Group([*_evidence(run, finding.evidence[:_EVIDENCE]), *_comparison(run, finding)], gap="xs", mt=6),
        ],
        id=f"finding-{number}",
        className=f"finding{' follows' if finding.caused_by else ''}",
    )


def _picture(split: digest.Breakdown, finding: Finding) -> Any:  # noqa: ANN401
    found = picture(split, finding)
    if found is None or len(split.rows) < 2:
        return None
    said = quiet(together(" ", (found.caption, found.numbers)))
    return html.Div([Chart(found.chart, title=say("finding.evidence")), said], className="picture")


def _evidence(run: Run, evidence: Sequence[Evidence]) -> list[Any]:
    """Links to the moments in the timeline. Each says whose it is, and when, where others would bear the same name."""
    names = [_name(seen) for seen in evidence]
    links = []
    for name, seen in zip(names, evidence, strict=True):
        where = {"t0": seen.start_ns, "t1": seen.end_ns} | ({} if seen.rank is None else {"rank": seen.rank})
        whole = phrases.evidence(seen)
        shown = text("Show: {what}", what=name if names.count(name) == 1 else whole)
        links.append(dcc.Link(shown, href=address("timeline", run.key, **where), title=whole, className="button"))
    return links


def _comparison(run: Run, finding: Finding) -> list[Any]:
    """Links to the finding's rank beside the others, if it names one."""
    if len(finding.ranks) != 1 or len(run.report.ranks) < 2:
        return []
    sampled = text("Flame graph of {rank}", rank=phrases.who(finding.ranks)) if finding.code else None
    said = text("Compare {rank} with the median", rank=phrases.who(finding.ranks))
    links = {"compare": said} | ({"flame": sampled} if sampled else {})
    return [
        dcc.Link(said, href=address(page, run.key, rank=finding.ranks[0]), className="button")
        for page, said in links.items()
    ]


def _name(seen: Evidence) -> str:
    if not seen.note:
        return phrases.evidence(seen)
    ranks, nodes = (() if one is None else (one,) for one in (seen.rank, seen.node))
    return together(", ", (phrases.who(ranks, nodes), seen.note)) if ranks or nodes else seen.note


def _time(report: Report, split: digest.Breakdown) -> list[Any]:
    bars, unit = waterfall(report, split)
    if not bars:
        return [html.P(say("time.none"))]
    head = html.Tr([html.Th(), html.Th(), html.Th(unit, className="number"), html.Th("%", className="number")])
    return [
        quiet(say("time.mean", phrases.who(tuple(split.rows)), f"{_step(bars).time} {unit}")),
        html.Table([html.Thead(head), html.Tbody([_row(bar) for bar in bars])], className="waterfall"),
    ]


def _step(bars: list[Bar]) -> Bar:
    return next(bar for bar in bars if bar.kind == "sum")


def _row(bar: Bar) -> Any:  # noqa: ANN401
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


def _waiting(report: Report) -> Any:  # noqa: ANN401
    """What a step cannot do without, and whom the ranks waited for; nothing where neither is known."""
    path, blames = digest.main_path(report.critical_path), digest.main_blames(report.blames)
    step_ns = sum(part.ns_per_step for part in path)
    chain = [
        (units.percent(part.ns_per_step / step_ns), units.duration(part.ns_per_step), *phrases.path_row(part))
        for part in path
    ]
    stood = [(units.duration(blame.blocked_ns), *phrases.path_row(blame)) for blame in blames]
    cards = [
        card(say("path"), quiet(say("path.means", units.duration(step_ns))), _table("path", _PATH, chain))
        if chain
        else None,
        card(say("waits"), quiet(say("blames.means")), _table("blames", _BLAMES, stood)) if stood else None,
    ]
    return html.Div(cards, className="columns") if any(cards) else None


def _table(texts: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:  # noqa: ANN401
    heads = html.Tr([html.Th(say(f"{texts}.{column}"), className=_NUMBERS.get(column, "")) for column in columns])
    cells = [
        html.Tr([html.Td(text, className=_NUMBERS.get(column, "")) for column, text in zip(columns, row, strict=True)])
        for row in rows
    ]
    return html.Table([html.Thead(heads), html.Tbody(cells)], className="plain")


def _checked(report: Report) -> Any:  # noqa: ANN401
    rows = [
        (f"✓ {detector_name(one.detector)}", phrases.resolution(report, one.resolution_ns)) for one in report.healthy
    ]
    reasons = digest.by_reason(report.not_checked)
    unchecked = [
        (together(", ", (f"? {detector_name(name)}" for name in names)), why) for why, names in reasons.items()
    ]
    return html.Div(
        [
            card(say("healthy"), _pairs(rows) if rows else html.P(say("healthy.none"))),
            card(say("not_checked"), _pairs(unchecked) if unchecked else html.P(say("not_checked.none"))),
        ],
        className="columns",
    )


def _pairs(rows: list[tuple[str, str]]) -> Any:  # noqa: ANN401
    cells = [html.Tr([html.Td(name), html.Td(text, className="quiet")]) for name, text in rows]
    return html.Table(html.Tbody(cells), className="plain")


def _states(run: Run) -> Any:  # noqa: ANN401
    """How far each rank had come in each process group when the job hung."""
    report = run.report
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


def _steps(report: Report) -> list[Any]:
    step_ns = {rank: report.step_ns[rank] for rank in sorted(report.step_ns) if report.step_ns[rank]}
    if not step_ns:
        return [html.P(say("steps.none"))]
    line, per_point = svg.step_chart(step_ns, points=_STEP_POINTS)
    caption = say("steps.chart" if len(step_ns) > 1 else "steps.chart.one")
    if per_point > 1:
        caption = together(" ", (caption, say("steps.binned", per_point)))
    shown = [Chart(line, title=say("steps")), quiet(caption)]
    if report.history is not None:
        whole = course(report.history)
        shown += [Chart(whole.chart, title=say("history")), quiet(whole.caption)]
    return shown


def _ranks(report: Report, split: digest.Breakdown) -> list[Any]:
    _, marked = digest.marked_ranks(report)
    missing = digest.missing_ranks(report)
    if len(split.rows) + len(missing) <= _BARS:
        return [Chart(svg.rank_bars(split, marked, missing), title=say("time.per_rank")), _legend(split)]
    caption = say("time.per_rank.columns", svg.COLUMNS_IN_A_ROW)
    return [Chart(svg.rank_columns(split, marked), title=say("time.per_rank")), _legend(split), quiet(caption)]


def _legend(split: digest.Breakdown) -> Any:  # noqa: ANN401
    return html.Ul(
        [
            html.Li(
                [html.I(style={"background": f"var(--{part}, var(--other))"}), part_label(part)],
                title=part_meaning(part),
            )
            for part in split.parts
        ],
        className="levels",
    )


def _gaps(report: Report) -> list[Any]:
    groups = digest.gap_groups(report)
    if not groups:
        return [html.P(say("gaps.none"))]
    return [_pairs([(group.table, say("gaps.where", phrases.gap_extent(group), group.why)) for group in groups])]


page = Page(title=text("Overview"), order=0, layout=layout)
