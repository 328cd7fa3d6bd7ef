"""Check a run for regressions, as a gate for CI.

Exit status 0: no finding that counts. 1: a finding, or a step that became longer. 2: the run cannot be read. 3: not
enough data: ranks are missing, no step could be analyzed, or steps vary too much.

Example: rankscope check runs/new --against runs/old
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rankscope.analysis.text.message import speaking, spoken, text
from rankscope.analysis.text.phrases import counted
from rankscope.profiler.options import Json, Lang, Runs, Steps, World, part_of, write

if TYPE_CHECKING:
    from rankscope.analysis.model.finding import Report

__all__ = ["command"]

_STATUS = {"passed": 0, "failed": 1, "not enough data": 3}


def command(
    run: Runs,
    steps: Steps = None,
    world: World = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Baseline run: its findings are ignored unless worse; step time must not regress."),
    ] = None,
    slower: Annotated[
        float, typer.Option(min=0, help="The share by which the mean step may be longer than that of --against.")
    ] = 0.03,
    severity: Annotated[
        Literal["low", "medium", "high"],
        typer.Option(help="Findings from here on count: low is any, medium 5 % of the step, high 10 %."),
    ] = "low",
    json: Json = None,
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.compare.compared_run import compared_run
    from rankscope.analysis.compare.gate import gate
    from rankscope.analysis.compare.two_runs import compare
    from rankscope.analysis.diagnosis.kept_report import report_of
    from rankscope.analysis.report.json_form import strict
    from rankscope.errors import NotComparable

    asked = part_of(run, steps, world)
    comparison, unseen = None, []
    if against:
        checked = compared_run(asked)
        report = checked.report
        try:
            comparison = compare(compared_run(against), checked)
        except NotComparable as why:
            unseen = [why.args[0]]
    else:
        report = report_of(asked)
    said = gate(report, comparison, severity=severity, slower=slower)
    unseen = [*unseen, *said.unseen]
    outcome = "failed" if said.failures else "not enough data" if unseen else "passed"
    if json:
        write(json, strict(_as_json(report.path, outcome, said.failures, unseen)))
    if json != "-":
        with speaking(lang):
            print("\n".join(map(spoken, _text(report, outcome, said.failures, unseen))))
    raise typer.Exit(_STATUS[outcome])


def _as_json(path: str, outcome: str, failures: Sequence[str], unseen: Sequence[str]) -> dict[str, object]:
    known = {"path": path, "outcome": outcome, "status": _STATUS[outcome]}
    return {"schema_version": 1, **known, "failures": list(failures), "unseen": list(unseen)}


def _text(report: Report, outcome: str, failures: Sequence[str], unseen: Sequence[str]) -> Iterator[str]:
    heads = {
        "passed": text("passed: {run}", run=report.path),
        "failed": text("failed: {run}", run=report.path),
        "not enough data": text("not enough data: {run}", run=report.path),
    }
    yield heads[outcome]
    yield from [*failures, *(text("not seen: {what}", what=what) for what in unseen)] or [report.verdict]
    yield text(
        "{healthy} found nothing; not made: {skipped} (rankscope report)",
        healthy=counted(len(report.healthy), "check"),
        skipped=len(report.not_checked),
    )
