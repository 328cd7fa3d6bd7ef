"""Check a run for regressions, as a gate for CI.

Exit status 0: no finding that counts. 1: a finding, or a step that became longer. 2: the run cannot be read. 3: not
seen well enough to say, since ranks are missing, no step could be judged, or steps vary too much.

Example: rankscope check runs/new --against runs/old
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = ["command"]


def command(
    run: Annotated[list[Path], typer.Argument(help="The run; for nodes without shared storage, the folder of each.")],
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
) -> None:
    from rankscope.analysis.compare.gate import gate
    from rankscope.analysis.compare.two_runs import compare
    from rankscope.analysis.diagnosis.diagnose import read_run
    from rankscope.errors import NotComparable

    report, timeline = read_run(run)
    base = read_run(against) if against else None
    comparison, unseen = None, []
    if base:
        try:
            comparison = compare(*base, report, timeline)
        except NotComparable as why:
            unseen = [str(why)]
    said = gate(report, comparison, severity=severity, slower=slower)
    unseen += said.unseen
    outcome, status = ("failed", 1) if said.failures else ("not seen well enough", 3) if unseen else ("passed", 0)
    print(f"{outcome}: {report.path}")
    print("\n".join((*said.failures, *(f"not seen: {what}" for what in unseen)) or (report.verdict,)))
    print(f"{len(report.healthy)} checks found nothing, {len(report.not_checked)} were not made (rankscope report)")
    raise typer.Exit(status)
