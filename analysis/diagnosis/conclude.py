"""From the findings in a timeline to the report: its losses, its verdict, and all other facts that it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.diagnosis.group_states import group_states
from rankscope.analysis.diagnosis.judged_tables import code_of
from rankscope.analysis.diagnosis.judgement import Judgement, Model, judge
from rankscope.analysis.diagnosis.losses import losses_of
from rankscope.analysis.diagnosis.not_seen import incomplete_steps, left_out, not_observed
from rankscope.analysis.diagnosis.options import ReportOptions
from rankscope.analysis.diagnosis.outliers import outlier_steps, why_outliers
from rankscope.analysis.diagnosis.remarks import not_read
from rankscope.analysis.diagnosis.summary import (
    blames,
    group_times,
    mean_parts,
    others_waited,
    path_parts,
    pipeline_of,
    step_lengths,
    waits,
)
from rankscope.analysis.diagnosis.verdict import Seen, status_of, verdict_of, without_coarse
from rankscope.analysis.metrics.device_lead import lead_of
from rankscope.analysis.metrics.mfu import utilisation
from rankscope.analysis.model.finding import Finding, Healthy, Loss, NotChecked, Pipeline, Rate, Report, Window
from rankscope.analysis.runs.deep_windows import windows_of
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.analysis.timeline.code_samples import Code
from rankscope.analysis.timeline.cuda_events import phase_times
from rankscope.analysis.timeline.device_time import device_parts
from rankscope.analysis.timeline.parallelism import schedule

__all__ = ["Concluded", "by_windows", "losses_in", "report_on", "with_places"]

_SHOWN_BY_WINDOWS = "host_bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """The report on a timeline, and what it was concluded from.

    `healthy` and `not_checked` are the answers of the checks; the report has them as far as they agree with its tables,
    and `not_observed` besides. `model` is that of the judgement.
    """

    report: Report
    seen: Seen
    model: Model
    healthy: tuple[Healthy, ...]
    not_checked: tuple[NotChecked, ...]
    not_observed: tuple[NotChecked, ...]


def report_on(trace: Trace, timeline: Timeline, options: ReportOptions | None = None) -> Concluded:
    """Report on a run whose timeline has been built; of a long one only on what was read of it."""
    options = options or ReportOptions()
    judged = judge(trace, timeline, options)
    report, seen = _conclude(timeline, judged, options.price, is_running=trace.is_running)
    unseen = tuple(not_observed(timeline))
    windows = windows_of(trace, lambda window: report_on(window, build_timeline(window)).report.verdict)
    report = replace(
        report,
        path=trace.path,
        source=trace.source,
        environment=_environment(trace.run),
        windows=windows,
        not_checked=by_windows((*report.not_checked, *unseen), windows),
    )
    return Concluded(
        report=report,
        seen=seen,
        model=judged.model,
        healthy=tuple(judged.healthy),
        not_checked=tuple(judged.not_checked),
        not_observed=unseen,
    )


def by_windows(not_checked: Sequence[NotChecked], windows: Sequence[Window]) -> tuple[NotChecked, ...]:
    """Return the same; where CUDA events left open whether devices idle, with the last of the windows that show it."""
    profiled = [window.number for window in windows if window.kernels]
    if not profiled:
        return tuple(not_checked)
    shown = text("; see window {number} of this run", number=profiled[-1])
    return tuple(
        replace(one, why=joined("", (one.why, shown))) if one.detector == _SHOWN_BY_WINDOWS else one
        for one in not_checked
    )


def losses_in(judged: Judgement, pipeline: Pipeline | None) -> tuple[Loss, ...]:
    """Return what is lost in the judged steps."""
    tables, scheduled = judged.tables, pipeline.needed_fraction if pipeline else 0.0
    return losses_of(tables["breakdown"], tables["phases"], tables["launches"], judged.findings, scheduled)


def with_places(findings: Sequence[Finding], code: Code) -> tuple[Finding, ...]:
    """Return the findings with their place in the code, as far as samples show it, and the parts that show them."""
    return tuple(
        replace(finding, code=code.of_finding(finding), parts=spec_of(finding.detector).parts) for finding in findings
    )


def _conclude(timeline: Timeline, judged: Judgement, price: float | None, *, is_running: bool) -> tuple[Report, Seen]:
    """Report on a timeline, by this evidence; `price` is that of an hour of a rank."""
    tables = judged.tables
    groups = group_times(tables["collectives"], tables["phases"], timeline.groups)  # before the graph takes memory
    run, costs = judged.run(), judged.costs()
    needs, share = judged.model
    pipeline = pipeline_of(tables["ops"])
    seen = replace(
        _seen(timeline, judged, price, is_running=is_running),
        scheduled=pipeline.needed_fraction if pipeline else 0.0,
    )
    findings = tuple(
        replace(finding, others_waited=others_waited(costs, finding))
        for finding in with_places(judged.findings, seen.code)
    )
    losses = losses_in(judged, pipeline)
    healthy, too_coarse = without_coarse(judged.healthy, losses, seen.steps)
    not_checked = [*judged.not_checked, *too_coarse]
    fixes, fidelity = judged.fixes()
    report = Report(
        path="",
        source="",
        verdict=verdict_of(findings, healthy, not_checked, losses, seen),
        status=status_of(findings, healthy, not_checked, losses, seen),
        losses=losses,
        ranks=seen.ranks,
        world_size=seen.world_size,
        nodes=tuple(timeline.ranks["node"].drop_nulls().unique().sort().to_list()),
        rate=seen.rate,
        steps=seen.steps,
        findings=findings,
        healthy=tuple(healthy),
        not_checked=tuple(not_checked),
        breakdown=mean_parts(tables["breakdown"]),
        history=timeline.stretch.history() if timeline.stretch else None,
        device=device_parts(timeline.kernels),
        groups=groups,
        phases=phase_times(tables["marks"]),
        lead=seen.lead,
        code=seen.code.shares(),
        waits=waits(timeline, costs),
        blames=blames(costs),
        critical_path=path_parts(run, timeline),
        pipeline=pipeline,
        fixes=fixes,
        fidelity=fidelity,
        utilisation=utilisation(needs, seen.steps.mean_ns, share),
        states=group_states(timeline, findings),
        gaps=(
            *timeline.gaps,
            *incomplete_steps(timeline.steps),
            *outlier_steps(seen.steps, timeline, seen.code),
            *left_out(run, timeline),
        ),
        clocks=tuple(timeline.clocks),
        matched_fraction=timeline.matched_fraction,
        step_ns=step_lengths(tables["steps"]),
    )
    return report, seen


def _seen(timeline: Timeline, judged: Judgement, price: float | None, *, is_running: bool) -> Seen:
    """Return the evidence of the verdict."""
    tables, steps = judged.tables, judged.steps
    world_size = max(timeline.ranks["world_size"].drop_nulls().to_list(), default=None)
    code, profiled = code_of(timeline), not timeline.kernels.is_empty()
    return Seen(
        ranks=judged.ranks,
        world_size=world_size,
        steps=steps,
        rate=Rate(ranks=world_size or len(judged.ranks), unit=_unit(timeline), price=price),
        breakdown=tables["breakdown"],
        waits=timeline.waits,
        lead=lead_of(tables["breakdown"], tables["marks"]),
        device_waits=tables.get("device_waits"),
        waits_unseen=judged.waits_unseen,
        profiled=profiled,
        schedule=schedule(timeline.groups, timeline.regions, timeline.collectives) if profiled else None,
        is_running=is_running,
        code=code,
        outliers=why_outliers(steps, timeline, code),
        aside=not_read(timeline.stretch),
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
