"""From a run to the verdict: every detector is asked, and what could not be asked is said."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import polars as pl

from rankscope.analysis.compare.run_phases import look_around
from rankscope.analysis.detectors import detectors, refuse_unseen, severity, spec_of, specs
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.diagnosis.losses import losses_of
from rankscope.analysis.diagnosis.operations import CHECKS
from rankscope.analysis.diagnosis.remarks import not_read, of_outliers
from rankscope.analysis.diagnosis.verdict import Seen, status_of, verdict_of, with_levels, without_coarse
from rankscope.analysis.metrics.arrival_skew import charged_to_last
from rankscope.analysis.metrics.device_lead import lead_of
from rankscope.analysis.metrics.exposed_communication import by_group
from rankscope.analysis.metrics.host_stalls import device_waits, only_hosts_seen
from rankscope.analysis.metrics.links import judged_links
from rankscope.analysis.metrics.mfu import count_flops, demand, utilisation
from rankscope.analysis.metrics.step_matrix import step_grid
from rankscope.analysis.metrics.wait_attribution import Delays, caused_by_rank, delays, victims
from rankscope.analysis.model.finding import (
    COUNTED,
    REST,
    Blame,
    Fidelity,
    Finding,
    Gap,
    GroupTime,
    Healthy,
    NotChecked,
    OthersWaited,
    Part,
    PathPart,
    Pipeline,
    PredictedFix,
    Rate,
    Report,
    StepSummary,
    Wait,
)
from rankscope.analysis.readers.native import NativeReader
from rankscope.analysis.replay.critical_path import critical_path
from rankscope.analysis.replay.device_graph import device_graph, first_steps
from rankscope.analysis.replay.host_graph import HostGraph
from rankscope.analysis.replay.pipeline import pipeline
from rankscope.analysis.replay.sweep import sweep
from rankscope.analysis.replay.whatif import PipelineRerun, Rerun, rerun
from rankscope.analysis.runs.deep_windows import windows_of
from rankscope.analysis.runs.memory_budget import MOST_ROWS, check_share
from rankscope.analysis.runs.trace import PathLike, Trace
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import percent, rounded
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.analysis.timeline.clocks import apply_clocks
from rankscope.analysis.timeline.code_samples import Code
from rankscope.analysis.timeline.cuda_events import phase_times
from rankscope.analysis.timeline.device_time import device_parts
from rankscope.collectors.schema import LEFT_OFF
from rankscope.errors import BadFix, NotReplayable, NotResolvable

__all__ = ["ask", "code_of", "conclude", "diagnose", "read_run", "report_on"]

Tables = Mapping[str, pl.DataFrame]
_Made = TypeVar("_Made")

_EMPTY = {
    "breakdown": text("no step was judged"),
    "phases": text("no step was judged"),
    "steps": text("no step was judged"),
    "ranks": text("no rank was recorded"),
    "regions": text("no regions were recorded"),
    "collectives": text("no communication was recorded"),
    "ops": text("no operations of pipeline stages were recorded"),
    "kernels": text("no work of a device was recorded"),
    "launches": text("the calls that launch the device's work were not recorded"),
    "model": text("how many FLOPs a step needs is not known: give --flops-per-step"),
    "progress": text("no state of a job that hangs was saved (PyTorch's flight recorder does)"),
    "links": text("no TCP traffic between nodes was recorded"),
    "counters": text("no counters of the nodes were recorded"),
    "memory": text("no memory of the ranks was recorded"),
    "gpus": text("it was not recorded which GPU a rank uses"),
}
_UNMATCHED = 0.03  # share of the step that a rank waits in unmatched operations, from which no replay counts
_REPLAYED = 8  # of one kind; each takes a replay
_OUT_OF_STEP = text("the ranks number their steps differently; call rankscope.step() at the end of each step")
_READINGS = 3
_LISTED = 20  # of the causes of waiting and of the critical path


def diagnose(
    trace: Trace,
    *,
    flops_per_step: float | None = None,
    peak_tflops: float | None = None,
    price: float | None = None,
) -> Report:
    """Judge a run. What was not seen is part of the report, and a detector that fails does not take the rest down.

    `flops_per_step` are those that the model needs, on all ranks together; `peak_tflops` those of one device per second
    (None: by its name). `price` is that of an hour of one GPU, for ranks on CPUs of one rank.
    """
    timeline = build_timeline(trace)
    report = report_on(trace, timeline, flops_per_step=flops_per_step, peak_tflops=peak_tflops, price=price)
    return with_looks(trace, report, timeline)


def read_run(
    path: PathLike | Sequence[PathLike],
    *,
    flops_per_step: float | None = None,
    peak_tflops: float | None = None,
    price: float | None = None,
) -> tuple[Report, Timeline]:
    """The report, as by `diagnose`, and the timeline of the run at this path. Raises BadInput.

    A running job whose older records make room meanwhile is read again.
    """
    for _ in range(_READINGS):
        trace = Trace.open(path)
        timeline = build_timeline(trace)
        report = report_on(trace, timeline, flops_per_step=flops_per_step, peak_tflops=peak_tflops, price=price)
        if not (isinstance(trace.reader, NativeReader) and trace.reader.has_shrunk):
            break
    return with_looks(trace, report, timeline), timeline


def with_looks(trace: Trace, report: Report, timeline: Timeline) -> Report:
    """The report, where only part of the run was read with a look at other parts that differ from it."""

    def read(first: int, last: int) -> tuple[Report, Timeline]:
        if isinstance(trace.reader, NativeReader) and trace.stretch:
            check_share(trace.reader, trace.stretch.share(first, last), beside=True)
        return read_run([f"{path}/steps={first}-{last}" for path in trace.paths])

    return look_around(report, timeline, read)


def report_on(
    trace: Trace,
    timeline: Timeline,
    *,
    flops_per_step: float | None = None,
    peak_tflops: float | None = None,
    price: float | None = None,
) -> Report:
    """The report on a run whose timeline has been built; the rest as `diagnose` has it."""
    said = trace.table("gaps").collect()
    addresses = {node: launch.get("addresses", ()) for node, launch in trace.run.items()}
    if flops_per_step is not None:
        model: tuple[pl.DataFrame, float | None] = demand(timeline.ranks, flops_per_step, peak_tflops), None
    else:
        operators = trace.table("operators").pipe(apply_clocks, timeline.clocks).collect()
        model = count_flops(timeline.ranks, operators, timeline.kernels, timeline.steps, peak_tflops)
    report = conclude(timeline, addresses, said, trace.reader.cannot(), model, price)
    report = replace(report, path=trace.path, source=trace.source, environment=_environment(trace.run))
    return replace(report, windows=windows_of(trace, lambda window: diagnose(window).verdict))


def conclude(
    timeline: Timeline,
    addresses: Mapping[int, Iterable[str]],
    said: pl.DataFrame,
    cannot: Mapping[str, str],
    model: tuple[pl.DataFrame, float | None],
    price: float | None,
) -> Report:
    """The report on a timeline.

    `said` is the table `gaps`, which tells what collectors were off; `cannot` what the source does not allow; `model`
    what it needs of the devices, and how far that was counted (`utilisation.demand`, `count_flops`); `price` that of an
    hour of a rank.
    """
    tables = _judged_only(timeline, addresses)
    needs, share = model
    if share is None or share >= COUNTED:
        tables["model"] = needs
    reasons = _EMPTY | dict(cannot) | {gap.table: gap.why for gap in timeline.gaps if gap.table == "ops"}
    if share and "model" not in tables:
        reasons["model"] = text(
            "shapes tell the FLOPs of {share} of the time of matrix products only: give --flops-per-step",
            share=percent(share),
        )
    if not timeline.comparable:
        tables["breakdown"] = tables["breakdown"].clear()
        reasons["breakdown"] = _OUT_OF_STEP
    if timeline.ranks["node"].n_unique() < 2:
        reasons["links"] = text("all ranks that were seen run on one node")
    found, healthy, not_checked = ask(detectors(), tables, said, reasons)
    run = _replayable(timeline, tables["links"])
    measure = (_unmatched(tables["breakdown"], timeline.ranks) if timeline.marks.is_empty() else None) or run
    found, hidden = _as_replayed(found, measure)
    healthy = _with_hidden(healthy, hidden, found, not_checked)
    findings, fidelity = _with_gains(root_causes_first(found), measure)
    costs = delays(timeline.phases, timeline.collectives)
    code = code_of(timeline)
    findings = tuple(
        replace(finding, others_waited=_others_waited(costs, finding), code=code.of_finding(finding))
        for finding in findings
    )
    caused, to_last = caused_by_rank(costs), charged_to_last(timeline.collectives)
    steps, lead = _summary(timeline.steps), lead_of(tables["breakdown"], tables["marks"])
    findings = with_levels(findings, steps, fidelity)
    fixes, fidelity = _fixes(measure, findings, costs, fidelity)
    losses = losses_of(tables["breakdown"], tables["phases"], findings)
    healthy, too_coarse = without_coarse(healthy, losses, steps)
    not_checked += too_coarse
    ranks = tuple(timeline.ranks["rank"].unique().sort().to_list())
    world_size = max(timeline.ranks["world_size"].drop_nulls().to_list(), default=None)
    rate = Rate(ranks=world_size or len(ranks), unit=_unit(timeline), price=price)
    seen = Seen(
        ranks=ranks,
        world_size=world_size,
        steps=steps,
        rate=rate,
        breakdown=tables["breakdown"],
        lead=lead,
        hosts_only="device_waits" in tables,
        profiled=not timeline.kernels.is_empty(),
        code=code,
        aside=joined("", (of_outliers(steps, timeline, code), not_read(timeline.stretch))),
    )
    return Report(
        path="",
        source="",
        verdict=verdict_of(findings, healthy, not_checked, losses, seen),
        status=status_of(findings, healthy, not_checked, losses, seen),
        losses=losses,
        ranks=ranks,
        world_size=world_size,
        nodes=tuple(timeline.ranks["node"].unique().sort().to_list()),
        rate=rate,
        steps=steps,
        findings=findings,
        healthy=tuple(healthy),
        not_checked=(*not_checked, *_not_observed(timeline)),
        breakdown=_mean_parts(tables["breakdown"]),
        history=timeline.stretch.history() if timeline.stretch else None,
        device=device_parts(timeline.kernels),
        groups=_groups(tables["collectives"], tables["phases"], timeline.groups),
        phases=phase_times(tables["marks"]),
        lead=lead,
        code=code.shares(),
        waits=tuple(
            Wait(rank=rank, waited_ns=ns, caused_ns=caused.get(rank, 0) + to_last.get(rank, 0))
            for rank, ns in timeline.waits.select("rank", "waited_ns").iter_rows()
        ),
        blames=_blames(costs),
        critical_path=_path(run, timeline),
        pipeline=_pipeline(tables["ops"]),
        fixes=fixes,
        fidelity=fidelity,
        utilisation=utilisation(needs, steps.mean_ns, share),
        gaps=(*timeline.gaps, *_incomplete(timeline.steps), *_left_out(run, timeline)),
        clocks=tuple(timeline.clocks),
        matched_fraction=timeline.matched_fraction,
        step_ns=_lengths(tables["steps"]),
    )


def ask(
    modules: Mapping[str, ModuleType],
    tables: Tables,
    said: pl.DataFrame,
    reasons: Mapping[str, str],
) -> tuple[list[Finding], list[Healthy], list[NotChecked]]:
    """Ask every detector: each ends in findings, or in healthy, or in not checked with the reason.

    `reasons` says why a table that is missing or empty is so. One whose parameter is named after another detector is
    asked after that one, and gets its findings.
    """
    findings: list[Finding] = []
    healthy: list[Healthy] = []
    not_checked: list[NotChecked] = []
    unseen = {name: why for name, why in reasons.items() if name not in tables}
    if "breakdown" in tables and tables["breakdown"]["rank"].n_unique() > 1 and tables["collectives"].is_empty():
        unseen["collectives"] = reasons["collectives"]  # so they wait for each other in what looks like computing
    answers: dict[str, list[Finding] | NotChecked] = {}
    for name in _in_order(modules):
        module = modules[name]
        of_ops = _of_ops(name, tables)
        detect, resolution = of_ops or (module.detect, None)
        try:
            answers[name] = found = _with_tables(detect, tables, reasons, answers)
            findings += found
            blind = None if of_ops else _blind(name, module, said, unseen)
            if blind:
                not_checked.append(blind)
            elif not found:
                resolution_ns = _with_tables(resolution or module.resolution_ns, tables, reasons)
                if module.detector.per_rank and not of_ops:
                    _with_tables(refuse_unseen, tables, reasons)
                healthy.append(Healthy(detector=name, resolution_ns=resolution_ns))
        except NotResolvable as reason:
            told = NotChecked(detector=name, why=reason.args[0], unclear=reason.unclear)
            unchecked = answers[name] = (None if of_ops else _blind(name, module, said, unseen)) or told
            not_checked.append(unchecked)
        except Exception as error:  # one broken detector must not take the others' findings away
            why = text("the detector failed: {kind}: {error}", kind=type(error).__name__, error=error)
            print(f"rankscope: detector '{name}': {why}", file=sys.stderr)
            unchecked = answers[name] = NotChecked(detector=name, why=why, unclear=True)
            not_checked.append(unchecked)
    return findings, healthy, not_checked


def _of_ops(name: str, tables: Tables) -> tuple[Callable[..., list[Finding]], Callable[..., int]] | None:
    """How a detector judges a source that has operations of a pipeline and nothing of what the hosts did."""
    only_ops = "ops" in tables and not tables["ops"].is_empty() and tables["breakdown"].is_empty()
    return CHECKS.get(name) if only_ops else None


def _in_order(modules: Mapping[str, ModuleType]) -> list[str]:
    """The detectors' names, each after those whose findings it takes, else as they are."""
    placed: list[str] = []

    def place(name: str) -> None:
        if name not in placed:
            for other in inspect.signature(modules[name].detect).parameters:
                if other in modules:
                    place(other)
            placed.append(name)

    for name in modules:
        place(name)
    return placed


def _with_gains(
    findings: tuple[Finding, ...], run: Rerun | PipelineRerun | NotReplayable
) -> tuple[tuple[Finding, ...], Fidelity | None]:
    """The findings with what their fixes bring in a replay, and how far the replay can be trusted.

    No gain is more than what was lost. A finding without a fix keeps what its detector says.
    """
    if not any(finding.fix for finding in findings):
        return findings, None
    if isinstance(run, NotReplayable):
        return tuple(replace(f, gain_why=run.args[0]) if f.fix else f for f in findings), None
    return tuple(_with_gain(f, run) if f.fix else f for f in findings), run.fidelity


def _fixes(
    run: Rerun | PipelineRerun | NotReplayable, findings: Sequence[Finding], costs: Delays, known: Fidelity | None
) -> tuple[tuple[PredictedFix, ...], Fidelity | None]:
    """The fixes that are worth trying, and how far the replay can be trusted where it was used."""
    if isinstance(run, NotReplayable):
        return (), known
    fixes = _tried(lambda: sweep(run, findings, costs.charges))
    if isinstance(fixes, NotReplayable) or not fixes:
        return (), known
    return fixes, run.fidelity


def _replayable(timeline: Timeline, links: pl.DataFrame) -> Rerun | PipelineRerun | NotReplayable:
    """The run, ready to be replayed, or why it cannot be."""
    return _tried(lambda: rerun(timeline, links))


def _unmatched(breakdown: pl.DataFrame, ranks: pl.DataFrame) -> NotReplayable | None:
    """Why a replay is no measure for findings: a rank waits in operations of which others are not known, or it
    has no steps.

    Such a rank stays as long in a replay whatever is fixed, and the job waits for it.
    """
    grid = step_grid(breakdown)
    if len(grid.ranks) < 2 or not grid.steps:
        return None
    no_steps = sorted(set(ranks["rank"]) - set(grid.ranks))
    if no_steps:
        return NotReplayable(text("what {ranks} did between operations was not seen", ranks=named("rank", no_steps)))
    unsplit = grid.of("unsplit").mean(axis=1) / grid.step_ns
    if unsplit.max() < _UNMATCHED:
        return None
    why = text(
        "rank {rank} waits {share} of the step in operations that were not matched across ranks",
        rank=grid.ranks[int(unsplit.argmax())],
        share=percent(unsplit.max()),
    )
    return NotReplayable(why)


def _tried(make: Callable[[], _Made]) -> _Made | NotReplayable:
    """What is made, or why it cannot be."""
    try:
        return make()
    except NotReplayable as reason:
        return reason
    except Exception as error:  # a replay that breaks must not take the findings away
        why = text("the replay failed: {kind}: {error}", kind=type(error).__name__, error=error)
        print(f"rankscope: {why}", file=sys.stderr)
        return NotReplayable(why)


def _others_waited(costs: Delays, finding: Finding) -> OthersWaited | None:
    """Who waited because the finding's ranks came late; those with a hundredth of what the most had, or more."""
    rows = victims(costs, finding.ranks).filter(~pl.col("rank").is_in(finding.ranks))
    rows = rows.filter(pl.col("blocked_ns") > 0, pl.col("blocked_ns") >= 0.01 * pl.col("blocked_ns").max())
    return OthersWaited(ranks=tuple(rows["rank"]), ns=int(rows["blocked_ns"].sum())) if len(rows) else None


def _blames(costs: Delays) -> tuple[Blame, ...]:
    """The causes of most standing still, over the whole run."""
    rows = costs.charges.group_by("rank", "part", "label").agg(
        (pl.col("direct_ns") + pl.col("indirect_ns")).sum().alias("waited_ns"), pl.col("blocked_ns").sum()
    )
    order = ["blocked_ns", "waited_ns", "rank", "part", "label"]
    rows = rows.sort(order, descending=[True, True, False, False, False])
    listed = tuple(Blame(**row) for row in rows.head(_LISTED).iter_rows(named=True))
    rest = rows.slice(_LISTED).select(pl.col("waited_ns", "blocked_ns").sum()).row(0)
    if not any(rest):
        return listed
    return (*listed, Blame(rank=None, part=REST, label="", waited_ns=rest[0], blocked_ns=rest[1]))


def _path(run: Rerun | PipelineRerun | NotReplayable, timeline: Timeline) -> tuple[PathPart, ...]:
    """The critical path: mean per judged step, the largest parts and the rest. Empty where no replay is trusted."""
    judged = timeline.steps.filter("judged")["step"].unique()
    host = run.host if isinstance(run, Rerun) else _graph_of_one_step(timeline, len(judged))
    if host is None:
        return ()
    judged = judged.filter(judged.is_in(host.steps["step"].unique().implode()))
    path = critical_path(host).filter(pl.col("step").is_in(judged.implode()))
    rows = path.group_by("rank", "part", "label").agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("ns"))
    rows = rows.sort(["ns", "rank", "part", "label"], descending=[True, False, False, False])
    if rows.is_empty():
        return ()
    largest, rest = rows.head(_LISTED), int(rows["ns"].slice(_LISTED).sum())
    means = rounded([*largest["ns"].to_list(), rest], len(judged))
    parts = [
        PathPart(rank=rank, part=part, label=label, ns_per_step=ns)
        for (rank, part, label), ns in zip(largest.select("rank", "part", "label").iter_rows(), means, strict=False)
    ]
    return (*parts, PathPart(rank=None, part=REST, label="", ns_per_step=means[-1]))


def _graph_of_one_step(timeline: Timeline, judged: int) -> HostGraph | None:
    """A single step cannot show how well a replay predicts, and tells what it waited for all the same."""
    if judged != 1 or timeline.kernels.is_empty():
        return None
    graph = _tried(lambda: device_graph(first_steps(timeline)))
    return None if isinstance(graph, NotReplayable) else graph


def _groups(collectives: pl.DataFrame, phases: pl.DataFrame, groups: pl.DataFrame) -> tuple[GroupTime, ...]:
    """Where the communication of each group goes."""
    if collectives.is_empty() or phases.is_empty():
        return ()
    return tuple(GroupTime(**row) for row in by_group(collectives, phases, groups).iter_rows(named=True))


def _left_out(run: Rerun | PipelineRerun | NotReplayable, timeline: Timeline) -> list[Gap]:
    """What a graph of all kernels and launches would take too much memory for."""
    rows = len(timeline.kernels) + len(timeline.launches)
    if timeline.kernels.is_empty() or rows <= MOST_ROWS:
        return []
    if isinstance(run, Rerun):
        done = text(
            "the critical path and gains are those of the first {first} of {steps}",
            first=run.host.steps["step"].n_unique(),
            steps=counted(timeline.steps["step"].n_unique(), "step"),
        )
    else:
        why_none = run.args[0] if isinstance(run, NotReplayable) else text("a pipeline")
        done = text("there is no critical path and no gain ({why})", why=why_none)
    why = text("{rows:,} kernels and launches are too many to replay at once: {done}", rows=rows, done=done)
    return [Gap(table="kernels", rank=None, node=None, count=None, why=why)]


def _with_gain(finding: Finding, run: Rerun | PipelineRerun) -> Finding:
    assert finding.fix is not None
    try:
        gain_ns = run.gain(finding.fix).gain_ns
    except BadFix:
        return replace(finding, gain_why=text("this run cannot be replayed with {fix}", fix=finding.fix))
    share = min(max(gain_ns, 0.0) / finding.lost_ns_per_step, 1.0) if finding.lost_ns_per_step else 0.0
    return replace(finding, gain_fraction=share * finding.lost_fraction)


def _as_replayed(
    findings: Sequence[Finding], run: Rerun | PipelineRerun | NotReplayable
) -> tuple[list[Finding], list[Healthy]]:
    """The findings: a kind that can be replayed, and what makes it so, at no more than mending brings in the replay.

    What takes longer is partly hidden where ranks meet several times in a step, or behind another pipeline stage.
    Of several, fixing one alone may bring nothing: each costs what fixing it brings when the others are fixed.
    What then costs less than its detector reports, and not clearly anything, is hidden: no finding, but what it may
    cost at most.
    """
    bounded: list[Finding] = list(findings)
    hidden: list[Healthy] = []
    if isinstance(run, NotReplayable):
        return bounded, hidden
    for kind in [name for name, spec in specs().items() if spec.cost != "measured"]:
        of_kind = [f for f in findings if f.detector == kind and f.fix and f.chance is None]
        fixes = list(dict.fromkeys(one.fix for one in of_kind if one.fix))
        if len(fixes) != len(of_kind) or len(fixes) > _REPLAYED:
            continue
        gains = _brings(fixes, run) if fixes else {}
        for one in of_kind:
            if one.fix not in gains or not one.lost_ns_per_step:
                continue
            gain_ns, uncertainty_ns = gains[one.fix]
            least_ns = _least_fraction(kind) * one.lost_ns_per_step / one.lost_fraction
            if gain_ns <= uncertainty_ns and gain_ns < least_ns:
                bounded = [other for other in bounded if (other.detector, other.fix) != (kind, one.fix)]
                hidden.append(Healthy(detector=kind, resolution_ns=round(max(gain_ns, 0) + uncertainty_ns)))
            else:
                bounded = _bounded(bounded, one, gain_ns, uncertainty_ns)
    return bounded, hidden


def _least_fraction(kind: str) -> float:
    """The share of the step from which on this detector reports."""
    return float(inspect.signature(detectors()[kind].detect).parameters["min_fraction"].default)


def _with_hidden(
    healthy: Sequence[Healthy], hidden: Sequence[Healthy], found: Sequence[Finding], not_checked: Sequence[NotChecked]
) -> list[Healthy]:
    """The checks that found nothing, those among them whose findings cost nothing in the replay."""
    said = {*(finding.detector for finding in found), *(check.detector for check in not_checked)}
    coarsest = {one.detector: one for one in sorted(hidden, key=lambda one: one.resolution_ns or 0)}
    return [*healthy, *(one for kind, one in coarsest.items() if kind not in said)]


def _brings(fixes: Sequence[str], run: Rerun | PipelineRerun) -> dict[str, tuple[float, float]]:
    """What each fix brings beside the others, ns per step, and its uncertainty; empty where they cannot be replayed."""
    try:
        whole = run.gain(*_together(fixes))
        rest = {fix: _together([other for other in fixes if other != fix]) for fix in fixes}
        others_ns = {fix: run.gain(*others).gain_ns if others else 0.0 for fix, others in rest.items()}
    except BadFix:
        return {}
    return {fix: (whole.gain_ns - others_ns[fix], whole.uncertainty_ns) for fix in fixes}


def _bounded(findings: Sequence[Finding], one: Finding, gain_ns: float, uncertainty_ns: float) -> list[Finding]:
    """The findings, those with the fix of `one` at no more than it brings."""
    share = gain_ns / one.lost_ns_per_step
    if gain_ns <= 0 or (share >= 1 and spec_of(one.detector).cost != "as_replayed"):
        return list(findings)
    fraction = share * one.lost_fraction
    cost: dict[str, Any] = {
        "severity": severity(fraction),
        "lost_ns_per_step": round(share * one.lost_ns_per_step),
        "lost_ns_total": round(share * one.lost_ns_total),
        "lost_fraction": fraction,
        "uncertainty_ns": round(uncertainty_ns),
    }
    return [
        replace(f, **cost) if f is one or (f.fix == one.fix and f.lost_fraction > fraction) else f for f in findings
    ]


def _together(fixes: Sequence[str]) -> list[str]:
    """The fixes, those of single ranks as one: none of them is a measure for the others."""
    ranks = [fix.removeprefix("rank:") for fix in fixes if fix.startswith("rank:")]
    rest = [fix for fix in fixes if not fix.startswith("rank:")]
    return [*rest, f"rank:{','.join(ranks)}"] if ranks else rest


def _with_tables(
    function: Callable[..., Any],
    tables: Tables,
    reasons: Mapping[str, str],
    answers: Mapping[str, object] | None = None,
) -> Any:  # noqa: ANN401 - whatever the function returns
    """Call a detector's function with the tables that its parameters name; those with a default may be missing.

    And with the `answers` of the detectors that they name.
    """
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    there: dict[str, object] = {p.name: answers[p.name] for p in wanted if answers and p.name in answers}
    there |= {p.name: tables[p.name] for p in wanted if p.name in tables and not tables[p.name].is_empty()}
    for p in wanted:
        if p.name not in there and p.default is inspect.Parameter.empty:
            raise NotResolvable(reasons.get(p.name, text("the table '{name}' was not recorded", name=p.name)))
    return function(**there)


def _blind(name: str, module: ModuleType, said: pl.DataFrame, unseen: Mapping[str, str]) -> NotChecked | None:
    """Why a detector may have overlooked something: a collector that it lives on was off, or the source lacks it."""
    off = said.filter(
        pl.col("source").is_in(module.detector.needs), pl.col("table") == "*", pl.col("count").is_null()
    ).unique(["rank", "node", "source", "why"])
    if off.is_empty():
        lacking = next((table for table in module.detector.needs if table in unseen), None)
        if lacking is None:
            return None
        return NotChecked(detector=name, why=unseen[lacking], unclear=lacking == "collectives")
    ranks = off["rank"].drop_nulls().unique().sort().to_list()
    where = text(" on {ranks}", ranks=named("rank", ranks)) if ranks else ""
    source, why = off["source"][0], Text(off["why"][0], {})
    why = text("collector {collector}{where}: {why}", collector=source, where=where, why=why)
    return NotChecked(detector=name, why=why, unclear=(off["why"] != LEFT_OFF).any())


def _unit(timeline: Timeline) -> str:
    """What an hour of a rank is called: ranks on devices, and those whose device's work was seen, use a GPU each."""
    on_device = len(timeline.kernels) > 0 or (timeline.ranks["device"].drop_nulls() != "cpu").any()
    return "GPU-hours" if on_device else "rank-hours"


def _judged_only(timeline: Timeline, addresses: Mapping[int, Iterable[str]]) -> dict[str, pl.DataFrame]:
    """The tables for the detectors, rows of judged steps only."""
    steps = timeline.steps.filter("judged")
    judged = steps.select("rank", "step")
    every = ("phases", "breakdown") if len(steps) == len(timeline.steps) else ()  # large, and of steps only: no copies
    tables = {
        name: frame if name in every else frame.join(judged, on=["rank", "step"], how="semi")
        for name in ("collectives", "regions", "phases", "breakdown", "proxies")
        if (frame := getattr(timeline, name)) is not None
    }
    tables |= {"steps": steps, "all_steps": timeline.steps, "ranks": timeline.ranks, "counters": timeline.counters}
    tables |= {"groups": timeline.groups, "progress": timeline.progress, "ras": timeline.ras}
    tables |= {"kernels": timeline.kernels, "launches": timeline.launches, "memory": timeline.memory}
    tables["gpus"] = timeline.gpus
    tables["ops"] = timeline.ops.join(judged, on=["rank", "step"], how="semi")
    tables["links"] = judged_links(timeline.counters, timeline.steps, addresses)
    tables["marks"] = timeline.marks.join(judged, on=["rank", "step"], how="semi")
    if only_hosts_seen(timeline.ranks, timeline.collectives, timeline.kernels, timeline.marks):
        tables["device_waits"] = device_waits(steps, tables["collectives"])
    return tables


def code_of(timeline: Timeline) -> Code:
    """Where main threads are in the judged steps, or if there are none in the recording; and were at the end."""
    judged = timeline.steps.filter("judged")
    step_ns = judged.select((pl.col("end_ns") - pl.col("start_ns")).mean()).item()
    samples = timeline.samples
    if len(judged):
        samples = samples.join(judged, on=["rank", "step"], how="semi")
    last = timeline.samples.group_by("rank", maintain_order=True).agg(pl.col("place").last())
    return Code(samples, timeline.places, step_ns, dict(last.iter_rows()))


def _summary(steps: pl.DataFrame) -> StepSummary:
    """How many steps there were, and how long the judged ones took."""
    judged = steps.filter("judged")
    length = judged["end_ns"] - judged["start_ns"]
    mean, median, p90 = length.mean(), length.median(), length.quantile(0.9)
    aside = steps.filter(~pl.col("judged")).unique("step")["aside"]
    outliers = steps.filter(pl.col("aside") == "outlier")
    outliers_ns = (outliers["end_ns"] - outliers["start_ns"]).sum()
    beyond_ns = outliers_ns - len(outliers) * (mean or 0.0)
    return StepSummary(
        count=judged["step"].n_unique(),
        warmup=int((aside == "warm-up").sum()),
        outliers=int((aside == "outlier").sum()),
        outliers_fraction=max(beyond_ns, 0.0) / max(length.sum() + outliers_ns, 1),
        mean_ns=None if mean is None else round(mean),
        median_ns=None if median is None else round(median),
        p90_ns=None if p90 is None else round(p90),
        source=steps["source"][0] if steps.height else "none",
    )


def _mean_parts(breakdown: pl.DataFrame) -> tuple[Part, ...]:
    """Mean ns per judged step; a rank's parts sum exactly to its mean step, itself rounded to whole ns."""
    parts: list[Part] = []
    for (rank,), rows in breakdown.sort("rank").group_by("rank", maintain_order=True):
        sums = rows.group_by("part", maintain_order=True).agg(pl.col("ns").sum())
        means = rounded(sums["ns"].to_list(), rows["step"].n_unique())
        parts += [Part(rank=rank, part=part, ns_per_step=ns) for part, ns in zip(sums["part"], means, strict=True)]
    return tuple(parts)


def _lengths(steps: pl.DataFrame) -> dict[int, tuple[int, ...]]:
    lengths = steps.sort("rank", "step").select("rank", ns=pl.col("end_ns") - pl.col("start_ns"))
    return {rank: tuple(rows["ns"].to_list()) for (rank,), rows in lengths.group_by("rank", maintain_order=True)}


def _pipeline(ops: pl.DataFrame) -> Pipeline | None:
    """The pipeline's schedule and bubble; None where there is none, and the detectors say why."""
    if ops.is_empty():
        return None
    try:
        return pipeline(ops)
    except NotReplayable:
        return None


def _incomplete(steps: pl.DataFrame) -> list[Gap]:
    """The steps that were set aside because a rank lacks them."""
    count = steps.filter(pl.col("aside") == "incomplete")["step"].n_unique()
    why = text("{count} not judged, since not all ranks have them", count=counted(count, "step"))
    return [Gap(table="steps", rank=None, node=None, count=count, why=why)] if count else []


def _not_observed(timeline: Timeline) -> list[NotChecked]:
    """What this version cannot see of these ranks."""
    devices = timeline.ranks.filter(pl.col("device") != "cpu")["device"].unique().sort().to_list()
    if not devices or len(timeline.kernels) or len(timeline.marks):
        return []
    why = text(
        "ranks run on {devices}; what these do is recorded in deep windows only (`rankscope trigger`)",
        devices=", ".join(devices),
    )
    return [NotChecked(detector="device_time", why=why)]


def _environment(run: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    """What the first node's agent wrote about the launch: command, host, versions, settings."""
    first = run.get(min(run, default=0), {})
    command = " ".join(first.get("launch", {}).get("command", ()))
    said = {"command": command, "hostname": first.get("hostname", ""), **first.get("versions", {})}
    return {name: str(value) for name, value in said.items() if value != ""}
