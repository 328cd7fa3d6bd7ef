"""The report as one self-contained page: no network, no script."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rankscope.analysis.model import digest
from rankscope.analysis.model.finding import Report
from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.report import charts, palette, phrases, svg
from rankscope.analysis.report.labels import say
from rankscope.analysis.report.view import COST, Section, view_of
from rankscope.analysis.text.message import LANGUAGES, speaking, spoken

__all__ = ["chart_styles", "render"]

_CODE = (("fixes", "fix"), ("gaps", "table"), ("environment", "value"))  # columns of what is typed or named in code


def render(report: Report, *, language: str = "en") -> str:
    """Return the whole page, in one of `LANGUAGES`; everything that comes from the job is escaped."""
    with speaking(language):
        page = _environment().get_template("report.html.j2").render(_page(spoken(report)), lang=LANGUAGES[language])
    return page.encode("utf-8", "replace").decode("utf-8")  # a path may hold lone surrogates


def chart_styles() -> tuple[str, str]:
    """Return the parts that another page needs for these charts: rules for its style sheet, and markup for its body."""
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
    environment.globals.update(
        say=say,
        LIGHT=palette.LIGHT,
        DARK=palette.DARK,
        css_variables=palette.css_variables,
        cost_per_step=phrases.cost_per_step,
        part_order=PART_ORDER,
        swatch=svg.swatch,
    )
    return environment


def _page(report: Report) -> dict[str, Any]:
    split = digest.breakdown(report.breakdown)
    view = view_of(report)
    steps = charts.lengths_of_steps(report), charts.strip_of_steps(report)
    return {
        "view": view,
        "report": report,
        "groups": _grouped(view.sections),
        "COST": COST,
        "CODE": _CODE,
        "parts": split.parts,
        "pictures": [charts.picture(split, finding) for finding in report.findings],
        "bar": svg.mean_bar(split) if split.rows else None,
        "ranks": charts.ranks_beside_each_other(report, split) if len(report.ranks) > 1 and split.rows else None,
        "steps": [drawn for drawn in steps if drawn],
        "course": charts.course(report.history),
        "waits": charts.waited(report),
    }


def _grouped(sections: Iterable[Section]) -> list[list[Section]]:
    """Put those without a title to the one before, and what was not checked beside what was."""
    groups: list[list[Section]] = []
    for section in sections:
        if section.title and section.key != "not_checked":
            groups.append([])
        groups[-1].append(section)
    return groups
