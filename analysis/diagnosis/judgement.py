"""From a timeline to its findings: run the checks on its tables, and order their findings.

Replay, wait attribution and the sweep of fixes run only where a finding or the report asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import polars as pl

from rankscope.analysis.detectors import detectors
from rankscope.analysis.diagnosis.by_replay import blamed_by_replay
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.diagnosis.checks import ask, least_fraction, waits_unseen
from rankscope.analysis.diagnosis.judged_tables import judged_tables
from rankscope.analysis.diagnosis.longer_part import longer_steps, with_part
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.savings import (
    as_replayed,
    cures,
    depends_on_replay,
    measure_of,
    predicted_fixes,
    replayable,
    with_gains,
    with_hidden,
)
from rankscope.analysis.diagnosis.summary import step_summary
from rankscope.analysis.diagnosis.verdict import with_levels
from rankscope.analysis.metrics.mfu import count_flops, demand
from rankscope.analysis.metrics.wait_attribution import Delays, delays
from rankscope.analysis.model.finding import Fidelity, Finding, Healthy, NotChecked, PredictedFix, StepSummary
from rankscope.analysis.replay.protocol import Replay, Unreplayable
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.clocks import apply_clocks

__all__ = ["Judgement", "Model", "judge"]

Model = tuple[pl.DataFrame, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The findings of a timeline, root causes first, and the tables that detectors read.

    `model` is the model's demand on the devices, and its counted share (`mfu.demand`, `mfu.count_flops`).
    `waits_unseen`: ranks may wait for each other in what the tables show as computing. `run`, `costs` and `fixes` (with
    the replay's fidelity) are made at their first call.
    """

    tables: dict[str, pl.DataFrame]
    model: Model
    ranks: tuple[int, ...]
    steps: StepSummary
    findings: tuple[Finding, ...]
    healthy: list[Healthy]
    not_checked: list[NotChecked]
    waits_unseen: bool
    run: Callable[[], Replay | Unreplayable]
    costs: Callable[[], Delays]
    fixes: Callable[[], tuple[tuple[PredictedFix, ...], Fidelity | None]]


def judge(trace: Trace, timeline: Timeline, options: ReportOptions, *, replays: bool = True) -> Judgement:
    """Return the findings in a run whose timeline has been built.

    Without `replays` the run is replayed only where a finding's cost, or which of several is the cause, depends on it:
    a single finding whose cost was measured has no gain then, and is not confirmed.
    """
    said = trace.table("gaps").collect()  # what collectors were off
    addresses = {node: launch.get("addresses", ()) for node, launch in trace.run.items()}
    model = _model(trace, timeline, options)
    tables, reasons = judged_tables(timeline, addresses, trace.reader.cannot(), model)
    steps, ranks = step_summary(timeline.steps), tuple(timeline.ranks["rank"].unique().sort().to_list())
    run = cache(lambda: replayable(timeline, tables["links"]))
    measure = cache(lambda: measure_of(run, tables["breakdown"], timeline))
    costs = cache(lambda: delays(timeline.phases, timeline.collectives))
    measured, healthy, not_checked = ask(detectors(), tables, said, reasons)
    longer = longer_steps(tables["breakdown"])
    if longer:
        judged = pl.col("judged") & pl.col("step").is_in(longer)
        part, part_reasons = judged_tables(
            replace(timeline, steps=timeline.steps.with_columns(judged)), addresses, trace.reader.cannot(), model
        )
        measured = with_part(measured, ask(detectors(), part, said, part_reasons)[0], longer, tables["breakdown"])
        there = {one.detector for one in measured}
        healthy = [check for check in healthy if check.detector not in there]
        not_checked = [check for check in not_checked if check.detector not in there]
    findings, fidelity = tuple(measured), None
    if replays or depends_on_replay(measured, tables):
        found, hidden = as_replayed(measured, measure, lambda kind: least_fraction(kind, tables))
        healthy = with_hidden(healthy, hidden, found, not_checked)
        findings, fidelity = with_gains(tuple(found), measure)
    fixes = cache(lambda: predicted_fixes(measure(), findings, costs(), fidelity))
    blamed = blamed_by_replay(lambda: fixes()[0], findings, tables)
    all_found = findings if blamed is None else (*findings, blamed)
    named = None if blamed is None else blamed.detector
    ordered = root_causes_first(all_found, ranks, lambda cause, finding: cures(cause, finding, measured, measure))
    return Judgement(
        tables=tables,
        model=model,
        ranks=ranks,
        steps=steps,
        findings=with_levels(ordered, steps, fidelity),
        healthy=[check for check in healthy if check.detector != named],
        not_checked=[check for check in not_checked if check.detector != named],
        waits_unseen=waits_unseen(tables, said),
        run=run,
        costs=costs,
        fixes=fixes if blamed is None else cache(lambda: _asked_for_by(blamed, *fixes())),
    )


def _asked_for_by(
    finding: Finding, fixes: tuple[PredictedFix, ...], fidelity: Fidelity | None
) -> tuple[tuple[PredictedFix, ...], Fidelity | None]:
    """Return the same, the finding beside its fix."""
    return tuple(replace(fix, finding=finding.detector) if fix.fix == finding.fix else fix for fix in fixes), fidelity


def _model(trace: Trace, timeline: Timeline, options: ReportOptions) -> Model:
    """Return the model's demand: as given, or by the shapes of the recorded operators."""
    if options.flops_per_step is not None:
        return demand(timeline.ranks, options.flops_per_step, options.peak_tflops), None
    operators = apply_clocks(trace.table("operators").collect(), timeline.clocks)
    return count_flops(timeline.ranks, operators, timeline.kernels, timeline.steps, options.peak_tflops)
