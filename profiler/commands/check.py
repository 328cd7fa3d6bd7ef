"""Check a run for regressions, as a gate for CI.

Exit status 0: no finding that counts. 1: a finding, or a step that became longer. 2: the run cannot be read. 3: not
enough data: ranks are missing, no step could be analyzed, or steps vary too much.

Example: rankscope check runs/new --against runs/old
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rankscope.analysis.text.message import speaking, spoken, text
from rankscope.profiler.options import Lang, Runs, Steps, World, part_of

__all__ = ["command"]


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
    lang: Lang = "en",
) -> None:
    from rankscope.analysis.compare.gate import gate
    from rankscope.analysis.compare.two_runs import compare
    from rankscope.analysis.diagnosis.diagnose import read_run
    from rankscope.errors import NotComparable

    report, timeline = read_run(part_of(run, steps, world))
    base = read_run(against) if against else None
    comparison, unseen = None, []
    if base:
        try:
            comparison = compare(*base, report, timeline)
        except NotComparable as why:
            unseen = [why.args[0]]
    said = gate(report, comparison, severity=severity, slower=slower)
    unseen += said.unseen
    outcome, status = (text("passed: {run}", run=report.path), 0)
    if said.failures:
        outcome, status = (text("failed: {run}", run=report.path), 1)
    elif unseen:
        outcome, status = (text("not enough data: {run}", run=report.path), 3)
    reasons = [*said.failures, *(text("not seen: {what}", what=what) for what in unseen)] or [report.verdict]
    checks = text(
        "{healthy} checks found nothing, {skipped} were not made (rankscope report)",
        healthy=len(report.healthy),
        skipped=len(report.not_checked),
    )
    with speaking(lang):
        print("\n".join(map(spoken, (outcome, *reasons, checks))))
    raise typer.Exit(status)
