"""From a timeline to the report: run the checks on its tables, and order their findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from rankscope.analysis.detectors import detectors
from rankscope.analysis.diagnosis.by_replay import blamed_by_replay
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.diagnosis.checks import ask
from rankscope.analysis.diagnosis.group_states import group_states
from rankscope.analysis.diagnosis.judged_tables import code_of, judged_tables
from rankscope.analysis.diagnosis.losses import losses_of
from rankscope.analysis.diagnosis.not_seen import incomplete_steps, left_out, not_observed
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.remarks import not_read, of_outliers
from rankscope.analysis.diagnosis.savings import (
    as_replayed,
    measure_of,
    predicted_fixes,
    replayable,
    with_gains,
    with_hidden,
)
from rankscope.analysis.diagnosis.summary import (
    blames,
    group_times,
    mean_parts,
    others_waited,
    path_parts,
    pipeline_of,
    step_lengths,
    step_summary,
    waits,
)
from rankscope.analysis.diagnosis.verdict import Seen, status_of, verdict_of, with_levels, without_coarse
from rankscope.analysis.metrics.device_lead import lead_of
from rankscope.analysis.metrics.mfu import count_flops, demand, utilisation
from rankscope.analysis.metrics.wait_attribution import Delays, delays
from rankscope.analysis.model.finding import (
    Fidelity,
    Finding,
    Healthy,
    Loss,
    NotChecked,
    PredictedFix,
    Rate,
    Report,
)
from rankscope.analysis.replay.protocol import Replay, Unreplayable
from rankscope.analysis.runs.deep_windows import windows_of
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import joined
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.analysis.timeline.clocks import apply_clocks
from rankscope.analysis.timeline.cuda_events import phase_times
from rankscope.analysis.timeline.device_time import device_parts

__all__ = ["conclude", "report_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """The findings of the checks, their replays, and the time that they explain."""

    findings: tuple[Finding, ...]
    healthy: list[Healthy]
    not_checked: list[NotChecked]
    fixes: tuple[PredictedFix, ...]
    fidelity: Fidelity | None
    losses: tuple[Loss, ...]


def report_on(trace: Trace, timeline: Timeline, options: ReportOptions | None = None) -> Report:
    """Return the report on a run whose timeline has been built; of a long one only on what was read of it."""
    options = options or ReportOptions()
    said = trace.table("gaps").collect()
    addresses = {node: launch.get("addresses", ()) for node, launch in trace.run.items()}
    if options.flops_per_step is not None:
        needs = demand(timeline.ranks, options.flops_per_step, options.peak_tflops)
        model: tuple[pl.DataFrame, float | None] = needs, None
    else:
        operators = trace.table("operators").pipe(apply_clocks, timeline.clocks).collect()
        model = count_flops(timeline.ranks, operators, timeline.kernels, timeline.steps, options.peak_tflops)
    report = conclude(timeline, addresses, said, trace.reader.cannot(), model, options.price)
    report = replace(report, path=trace.path, source=trace.source, environment=_environment(trace.run))
    return replace(report, windows=windows_of(trace, lambda window: report_on(window, build_timeline(window)).verdict))


def conclude(
    timeline: Timeline,
    addresses: Mapping[int, Iterable[str]],
    said: pl.DataFrame,
    cannot: Mapping[str, str],
    model: tuple[pl.DataFrame, float | None],
    price: float | None,
) -> Report:
    """Return the report on a timeline.

    `said` is the table `gaps`, which names collectors that were off; `cannot` what the source does not allow; `model`
    what it needs of the devices, and how far that was counted (`utilisation.demand`, `count_flops`); `price` that of an
    hour of a rank.
    """
    tables, reasons = judged_tables(timeline, addresses, cannot, model)
    needs, share = model
    run = replayable(timeline, tables["links"])
    costs = delays(timeline.phases, timeline.collectives)
    seen = _seen(timeline, tables, price)
    checked = ask(detectors(), tables, said, reasons)
    it = _judged(checked, tables, measure_of(run, tables["breakdown"], timeline), costs, seen)
    return Report(
        path="",
        source="",
        verdict=verdict_of(it.findings, it.healthy, it.not_checked, it.losses, seen),
        status=status_of(it.findings, it.healthy, it.not_checked, it.losses, seen),
        losses=it.losses,
        ranks=seen.ranks,
        world_size=seen.world_size,
        nodes=tuple(timeline.ranks["node"].unique().sort().to_list()),
        rate=seen.rate,
        steps=seen.steps,
        findings=it.findings,
        healthy=tuple(it.healthy),
        not_checked=(*it.not_checked, *not_observed(timeline)),
        breakdown=mean_parts(tables["breakdown"]),
        history=timeline.stretch.history() if timeline.stretch else None,
        device=device_parts(timeline.kernels),
        groups=group_times(tables["collectives"], tables["phases"], timeline.groups),
        phases=phase_times(tables["marks"]),
        lead=seen.lead,
        code=seen.code.shares(),
        waits=waits(timeline, costs),
        blames=blames(costs),
        critical_path=path_parts(run, timeline),
        pipeline=pipeline_of(tables["ops"]),
        fixes=it.fixes,
        fidelity=it.fidelity,
        utilisation=utilisation(needs, seen.steps.mean_ns, share),
        states=group_states(timeline, it.findings),
        gaps=(*timeline.gaps, *incomplete_steps(timeline.steps), *left_out(run, timeline)),
        clocks=tuple(timeline.clocks),
        matched_fraction=timeline.matched_fraction,
        step_ns=step_lengths(tables["steps"]),
    )


def _seen(timeline: Timeline, tables: Mapping[str, pl.DataFrame], price: float | None) -> Seen:
    """Return the evidence of the verdict."""
    ranks = tuple(timeline.ranks["rank"].unique().sort().to_list())
    world_size = max(timeline.ranks["world_size"].drop_nulls().to_list(), default=None)
    steps, code = step_summary(timeline.steps), code_of(timeline)
    return Seen(
        ranks=ranks,
        world_size=world_size,
        steps=steps,
        rate=Rate(ranks=world_size or len(ranks), unit=_unit(timeline), price=price),
        breakdown=tables["breakdown"],
        lead=lead_of(tables["breakdown"], tables["marks"]),
        hosts_only="device_waits" in tables,
        profiled=not timeline.kernels.is_empty(),
        code=code,
        aside=joined("", (of_outliers(steps, timeline, code), not_read(timeline.stretch))),
    )


def _judged(
    checked: tuple[list[Finding], list[Healthy], list[NotChecked]],
    tables: Mapping[str, pl.DataFrame],
    measure: Replay | Unreplayable,
    costs: Delays,
    seen: Seen,
) -> _Judgement:
    """Return the checks' answers with replayed costs, root causes first, and the unexplained losses."""
    found, healthy, not_checked = checked
    found, hidden = as_replayed(found, measure)
    healthy = with_hidden(healthy, hidden, found, not_checked)
    findings, fidelity = with_gains(tuple(found), measure)
    fixes, fidelity = predicted_fixes(measure, findings, costs, fidelity)
    blamed = blamed_by_replay(fixes, findings, tables)
    if blamed is not None:
        findings = (*findings, blamed)
        fixes = tuple(replace(fix, finding=blamed.detector) if fix.fix == blamed.fix else fix for fix in fixes)
        healthy = [check for check in healthy if check.detector != blamed.detector]
        not_checked = [check for check in not_checked if check.detector != blamed.detector]
    findings = tuple(
        replace(finding, others_waited=others_waited(costs, finding), code=seen.code.of_finding(finding))
        for finding in root_causes_first(findings, seen.ranks)
    )
    findings = with_levels(findings, seen.steps, fidelity)
    losses = losses_of(tables["breakdown"], tables["phases"], findings)
    healthy, too_coarse = without_coarse(healthy, losses, seen.steps)
    return _Judgement(
        findings=findings,
        healthy=healthy,
        not_checked=[*not_checked, *too_coarse],
        fixes=fixes,
        fidelity=fidelity,
        losses=losses,
    )


def _unit(timeline: Timeline) -> str:
    """Return the unit of an hour of a rank.

    Ranks on devices, and those whose device's work was seen, use a GPU each.
    """
    on_device = len(timeline.kernels) > 0 or (timeline.ranks["device"].drop_nulls() != "cpu").any()
    return "GPU-hours" if on_device else "rank-hours"


def _environment(run: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """Return the first node's facts on the launch: command, host, versions, settings."""
    first = run.get(min(run, default=0), {})
    command = " ".join(first.get("launch", {}).get("command", ()))
    said = {"command": command, "hostname": first.get("hostname", ""), **first.get("versions", {})}
    return {name: str(value) for name, value in said.items() if value != ""}
