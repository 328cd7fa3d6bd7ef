"""Findings in the replay: what each of them costs at most, and what fixes save."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity, spec_of, specs
from rankscope.analysis.metrics.step_matrix import step_grid
from rankscope.analysis.metrics.wait_attribution import Delays
from rankscope.analysis.model.finding import (
    Fidelity,
    Finding,
    Healthy,
    NotChecked,
    PredictedFix,
)
from rankscope.analysis.replay.fixes import together
from rankscope.analysis.replay.protocol import Replay, Unreplayable
from rankscope.analysis.replay.sweep import fixes_more, is_apart, sweep
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.build import Timeline
from rankscope.errors import BadFix, NotReplayable

__all__ = [
    "Measure",
    "as_replayed",
    "cures",
    "depends_on_replay",
    "measure_of",
    "predicted_fixes",
    "replayable",
    "tried",
    "with_gains",
    "with_hidden",
]

_Made = TypeVar("_Made")
Measure = Callable[[], Replay | Unreplayable]  # the run is replayed where something asks for it
_UNMATCHED = 0.03  # share of the step that a rank waits in unmatched operations, from which no replay counts
_REPLAYED = 8  # of one kind; each takes a replay
_HALF = 0.5


def replayable(timeline: Timeline, links: pl.DataFrame) -> Replay | Unreplayable:
    """Return the run, ready to be replayed, or why it cannot be."""
    return tried(lambda: rerun(timeline, links))


def measure_of(run: Measure, breakdown: pl.DataFrame, timeline: Timeline) -> Replay | Unreplayable:
    """Return the run as a measure of the findings' costs, or why it is none."""
    return (_why_no_measure(breakdown, timeline.ranks) if timeline.marks.is_empty() else None) or run()


def _why_no_measure(breakdown: pl.DataFrame, ranks: pl.DataFrame) -> Unreplayable | None:
    """Return why a replay is no measure for findings.

    A rank waits in operations of which others are not known, or has no steps. Such a rank stays as long in a replay
    whatever is fixed, and the job waits for it.
    """
    grid = step_grid(breakdown)
    if len(grid.ranks) < 2 or not grid.steps:
        return None
    no_steps = sorted(set(ranks["rank"]) - set(grid.ranks))
    if no_steps:
        return Unreplayable(text("what {ranks} did between operations was not seen", ranks=named("rank", no_steps)))
    unsplit = np.median(grid.of("unsplit"), axis=1) / grid.step_ns  # a capture's first step may have some alone
    if unsplit.max() < _UNMATCHED:
        return None
    why = text(
        "rank {rank} waits {share} of the step in operations that were not matched across ranks",
        rank=grid.ranks[int(unsplit.argmax())],
        share=percent(unsplit.max()),
    )
    return Unreplayable(why)


def tried(make: Callable[[], _Made]) -> _Made | Unreplayable:
    """Return the result, or why there is none."""
    try:
        return make()
    except NotReplayable as reason:
        return Unreplayable(reason.args[0])
    except Exception as error:  # a replay that breaks must not take the findings away
        why = text("the replay failed: {kind}: {error}", kind=type(error).__name__, error=error)
        print(f"rankscope: {why}", file=sys.stderr)
        return Unreplayable(why)


def depends_on_replay(findings: Sequence[Finding], tables: Mapping[str, pl.DataFrame]) -> bool:
    """Say whether what findings cost, or which of several is the cause, depends on a replay."""
    if len(findings) != 1:
        return len(findings) > 1
    (one,), spec = findings, spec_of(findings[0].detector)
    if spec.cost == "measured" or spec.bound(one) is None:
        return False
    return spec.saves_at_least is None or spec.saves_at_least(one, tables) < one.lost_ns_per_step


def as_replayed(
    findings: Sequence[Finding], measure: Measure, least_fraction: Callable[[str], float]
) -> tuple[list[Finding], list[Healthy]]:
    """Return the findings: those that can be replayed, and what makes them so, at no more than their fix brings.

    What takes longer is partly hidden where ranks meet several times in a step, or behind another pipeline stage.
    Of several, fixing one alone may bring nothing: each costs what fixing it brings when the others of its kind are
    fixed; or those of all kinds, where it is hidden behind these, so that without them it brings less than half of it.
    What then costs less than its detector reports, clearly so or not clearly anything, is hidden: no finding, but what
    it may cost at most. `least_fraction`: the share of the step from which on a detector reports.
    """
    bounded: list[Finding] = list(findings)
    hidden: list[Healthy] = []
    by_kind = {kind: _with_fixes(kind, findings) for kind, spec in specs().items() if spec.cost != "measured"}
    kinds = {kind: by_fix for kind, by_fix in by_kind.items() if by_fix}
    run = measure() if kinds else None
    if run is None or isinstance(run, Unreplayable):
        return bounded, hidden
    every = list(dict.fromkeys(fix for by_fix in kinds.values() for fix in by_fix))
    beside_all = _brings(every, run) if len(kinds) > 1 and len(every) <= _REPLAYED else {}
    for kind, by_fix in kinds.items():
        for fix, beside_kind in _brings(list(by_fix), run).items():
            one = by_fix[fix]
            if not one.lost_ns_per_step:
                continue
            least_ns = least_fraction(kind) * one.lost_ns_per_step / one.lost_fraction
            gain_ns, uncertainty_ns = beside_all.get(fix, beside_kind)
            if beside_kind[0] > _HALF * gain_ns:
                gain_ns, uncertainty_ns = beside_kind
            if _is_too_little(gain_ns, uncertainty_ns, least_ns):
                bounded = [other for other in bounded if (other.detector, other.fix) != (kind, one.fix)]
                hidden.append(Healthy(detector=kind, resolution_ns=round(max(gain_ns, 0) + uncertainty_ns)))
            else:
                bounded = _bounded(bounded, one, gain_ns, uncertainty_ns)
    return bounded, hidden


def _with_fixes(kind: str, findings: Sequence[Finding]) -> dict[str, Finding]:
    """Return the findings of a kind by the fix that is replayed for each. None where one serves several, or of many."""
    bound = spec_of(kind).bound
    of_kind = [(fix, one) for one in findings if one.detector == kind and one.chance is None and (fix := bound(one))]
    by_fix = dict(of_kind)
    return by_fix if len(by_fix) == len(of_kind) <= _REPLAYED else {}


def _is_too_little(gain_ns: float, uncertainty_ns: float, least_ns: float) -> bool:
    return gain_ns < least_ns and (gain_ns <= uncertainty_ns or gain_ns + uncertainty_ns < least_ns)


def with_hidden(
    healthy: Sequence[Healthy], hidden: Sequence[Healthy], found: Sequence[Finding], not_checked: Sequence[NotChecked]
) -> list[Healthy]:
    """Return the checks that found nothing, those among them whose findings cost nothing in the replay."""
    said = {*(finding.detector for finding in found), *(check.detector for check in not_checked)}
    coarsest = {one.detector: one for one in sorted(hidden, key=lambda one: one.resolution_ns or 0)}
    return [*healthy, *(one for kind, one in coarsest.items() if kind not in said)]


def _brings(fixes: Sequence[str], run: Replay) -> dict[str, tuple[float, float]]:
    """Return the gain of each fix beside the others, ns per step, and its uncertainty.

    Empty where they cannot be replayed.
    """
    every = together(fixes)
    rest = {fix: together([other for other in fixes if other != fix]) for fix in fixes}
    try:
        gains = {fix: run.gain(*every, beyond=tuple(others)) for fix, others in rest.items()}
    except BadFix:
        return {}
    return {fix: (gain.gain_ns, gain.uncertainty_ns) for fix, gain in gains.items()}


def _bounded(findings: Sequence[Finding], one: Finding, gain_ns: float, uncertainty_ns: float) -> list[Finding]:
    """Return the findings, those with the fix of `one` at no more than it brings."""
    share = gain_ns / one.lost_ns_per_step
    if gain_ns <= 0 or (share >= 1 and spec_of(one.detector).cost != "as_replayed"):
        return list(findings)
    cost = _cost(one, share, uncertainty_ns)
    return [
        replace(f, **cost) if f is one or (f.fix == one.fix and f.lost_fraction > cost["lost_fraction"]) else f
        for f in findings
    ]


def _cost(finding: Finding, share: float, uncertainty_ns: float) -> dict[str, Any]:
    """Return the fields of a finding's cost, of which this share counts."""
    fraction = share * finding.lost_fraction
    return {
        "severity": severity(fraction),
        "lost_ns_per_step": round(share * finding.lost_ns_per_step),
        "lost_ns_total": round(share * finding.lost_ns_total),
        "lost_fraction": fraction,
        "uncertainty_ns": round(uncertainty_ns),
    }


def with_gains(findings: tuple[Finding, ...], measure: Measure) -> tuple[tuple[Finding, ...], Fidelity | None]:
    """Return the findings with what their fixes bring in a replay, and how far the replay can be trusted.

    A finding without a fix keeps what its detector says. One of late ranks, of which the waits give the least cost,
    costs what its fix brings if that is more, beyond the error; and what is the cause of a part of it, that part of it.
    """
    if not any(finding.fix for finding in findings):
        return findings, None
    run = measure()
    if isinstance(run, Unreplayable):
        return tuple(replace(f, gain_why=run.reason) if f.fix else f for f in findings), None
    late = {f.fix: f for f in findings if f.chance is not None and spec_of(f.detector).cost != "measured"}
    return tuple(_with_gain(f, run, late.get(f.fix, f)) if f.fix else f for f in findings), run.fidelity


def _with_gain(finding: Finding, run: Replay, late: Finding) -> Finding:
    assert finding.fix is not None
    try:
        gain = run.gain(finding.fix)
    except BadFix:
        return replace(finding, gain_why=text("this run cannot be replayed with {fix}", fix=finding.fix))
    if finding.chance is not None and fixes_more(gain, late):
        share = gain.gain_ns / late.lost_ns_per_step
        finding = replace(finding, **_cost(finding, share, gain.uncertainty_ns))
    error = gain.uncertainty_ns / run.step_ns
    saves = max(gain.gain_ns, 0.0) / run.step_ns
    if is_apart(gain, finding):  # what it brings beyond the cost is of other things
        saves = min(saves, finding.lost_fraction)
    return replace(finding, gain_fraction=saves, gain_uncertainty_fraction=error)


def cures(cause: Finding, finding: Finding, measured: Sequence[Finding], measure: Measure) -> bool:
    """Say whether fixing a cause cures a finding that is hardly cured by its own fix.

    In the replay most of its cost as `measured` stays with its own fix, since others are next; and little of what that
    brings is left with the cause fixed.
    """
    costs_ns = [one.lost_ns_per_step for one in measured if (one.detector, one.fix) == (finding.detector, finding.fix)]
    if not cause.fix or not finding.fix or not costs_ns:
        return False
    run = measure()
    if isinstance(run, Unreplayable):
        return False
    brings = _brings([cause.fix, finding.fix], run)
    if not brings:
        return False
    alone_ns, (left_ns, error_ns) = run.gain(finding.fix).gain_ns, brings[finding.fix]
    return alone_ns <= _HALF * max(costs_ns) and left_ns <= max(_HALF * alone_ns, error_ns)


def predicted_fixes(
    run: Replay | Unreplayable, findings: Sequence[Finding], costs: Delays, known: Fidelity | None
) -> tuple[tuple[PredictedFix, ...], Fidelity | None]:
    """Return the fixes that are worth trying, and how far the replay can be trusted where it was used."""
    if isinstance(run, Unreplayable):
        return (), known
    fixes = tried(lambda: sweep(run, findings, costs.charges))
    if isinstance(fixes, Unreplayable) or not fixes:
        return (), known
    return fixes, run.fidelity
