"""The report on all of a long run: what reports on its stretches say together.

The findings, the losses and the breakdown are those of all analyzed steps. What needs the rows of the tables, such as
the critical path, stays that of the last steps, which are held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import polars as pl

from rankscope.analysis.detectors import severity, spec_of
from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps
from rankscope.analysis.diagnosis.causality import root_causes_first
from rankscope.analysis.diagnosis.conclude import Concluded, by_windows
from rankscope.analysis.diagnosis.losses import LABEL, LOST
from rankscope.analysis.diagnosis.remarks import not_analyzed
from rankscope.analysis.diagnosis.run_phases import changes, growth, sentence
from rankscope.analysis.diagnosis.stretch_summary import StretchSummary
from rankscope.analysis.diagnosis.verdict import status_of, verdict_of, without_coarse
from rankscope.analysis.metrics.mfu import utilisation
from rankscope.analysis.model.finding import Finding, Healthy, History, Loss, NotChecked, Report, StepSummary
from rankscope.analysis.runs.step_range import Stretch
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.units import ranges

__all__ = ["whole_report"]

_LEAST = 0.01  # share of the run's time from which on a finding is one of the run
_UNCHECKED = 0.05  # share of the run's time in which a check may not have been made that found nothing in the rest
_OVERLAP = 0.5  # share of the ranks of two findings that both have, from which on they are one
_NEARLY_ALL = 0.9  # of a loss: the steps that hold it are those of one stretch

_Found = tuple[StretchSummary, Finding]


def whole_report(
    last: Concluded, history: History, stretch: Stretch, every: Sequence[StretchSummary], steps: AnalyzedSteps
) -> Report:
    """Return the report on every stretch of a run, of which the last is the `stretch` that is held.

    `steps` are those of all of them.
    """
    if not steps.count:
        return replace(last.report, history=history)
    report, summary, losses = last.report, _steps(every, steps), _losses(every, steps)
    findings = _findings(every, steps, stretch, last.seen.ranks)
    healthy, not_checked = _checks(every, {finding.detector for finding in findings})
    healthy, too_coarse = without_coarse(healthy, losses, summary)
    not_checked += too_coarse
    seen = replace(last.seen, steps=summary, breakdown=_mean_table(steps), aside=not_analyzed(history))
    said = verdict_of(findings, healthy, not_checked, losses, seen)
    needs, share = last.model
    return replace(
        report,
        verdict=joined(" ", filter(None, (said, sentence(history, findings)))),
        status=status_of(findings, healthy, not_checked, losses, seen),
        steps=summary,
        findings=findings,
        losses=losses,
        healthy=tuple(healthy),
        not_checked=by_windows((*not_checked, *last.not_observed), report.windows),
        breakdown=steps.breakdown,
        utilisation=utilisation(needs, summary.mean_ns, share),
        history=history,
    )


def _mean_table(steps: AnalyzedSteps) -> pl.DataFrame:
    """Return a breakdown of one step, the mean one."""
    rows = [(one.rank, 0, one.part, one.ns_per_step) for one in steps.breakdown]
    return pl.DataFrame(rows, {"rank": pl.Int32, "step": pl.Int32, "part": pl.String, "ns": pl.Int64}, orient="row")


def _steps(every: Sequence[StretchSummary], steps: AnalyzedSteps) -> StepSummary:
    """Return the steps of all stretches; what outliers take is of the time of all."""
    known = [one.steps for one in every if one.steps]
    usual_ns = [(one.count + one.outliers) * (one.mean_ns or 0) for one in known]  # if outliers took as long as others
    beyond_ns = [
        ns * one.outliers_fraction / max(1 - one.outliers_fraction, 1e-9)
        for ns, one in zip(usual_ns, known, strict=True)
    ]
    return replace(
        known[-1],
        count=steps.count,
        warmup=sum(one.warmup for one in known),
        outliers=sum(one.outliers for one in known),
        outliers_fraction=sum(beyond_ns) / max(sum(usual_ns) + sum(beyond_ns), 1),
        mean_ns=steps.mean_ns,
        median_ns=steps.median_ns,
        p90_ns=steps.p90_ns,
    )


def _findings(
    every: Sequence[StretchSummary], steps: AnalyzedSteps, stretch: Stretch, ranks: Collection[int]
) -> tuple[Finding, ...]:
    """Return what was found, each added up over the stretches: what costs the run enough, or is no matter of cost.

    What follows from another finding in a stretch does so in the run. Changes over the run are asked of all its steps.
    """
    found = [_together(of, every, steps) for of in _alike(every)]
    found = [one for one in found if not one.lost_ns_per_step or one.lost_fraction >= _LEAST]
    known = {one.detector for one in found}
    roots = [replace(one, caused_by=None) for one in found if one.caused_by not in known]
    over_all = (*growth(stretch, every, roots, ranks), *changes(steps, every))
    within = [one for one in roots if one.detector not in {of.detector for of in over_all}]
    ordered = list(root_causes_first((*within, *over_all), ranks))
    effects = (one for one in found if one.caused_by in known)
    for effect in sorted(effects, key=lambda one: one.lost_ns_total):
        causes = (number for number, one in enumerate(ordered, 1) if one.detector == effect.caused_by)
        ordered.insert(next(causes, len(ordered)), effect)
    return tuple(ordered)


def _alike(every: Sequence[StretchSummary]) -> Iterable[list[_Found]]:
    """Return findings of stretches that are the same one: by its check and its cause, on most of the same ranks.

    One without a cost, as that of a job that hangs, is of the last stretch only.
    """
    found = [(at, one) for at in every for one in at.findings if one.lost_ns_per_step or at is every[-1]]
    alike: dict[tuple[str, str | None], list[list[_Found]]] = defaultdict(list)
    for at, one in sorted(found, key=lambda of: -of[1].lost_ns_total):
        of_kind = alike[one.detector, one.caused_by]
        for same in of_kind:
            if _is_same(one, same[0][1]) and all(at is not there for there, _ in same):
                same.append((at, one))
                break
        else:
            of_kind.append([(at, one)])
    return (sorted(same, key=lambda of: of[0].first) for same in chain(*alike.values()))


def _is_same(one: Finding, other: Finding) -> bool:
    pairs: tuple[tuple[Sequence[object], Sequence[object]], ...] = (
        (one.ranks, other.ranks),
        (one.nodes, other.nodes),
        (one.groups, other.groups),
    )
    return all(a == b or len({*a} & {*b}) >= _OVERLAP * len({*a, *b}) for a, b in pairs)


def _together(of: Sequence[_Found], every: Sequence[StretchSummary], steps: AnalyzedSteps) -> Finding:
    """Return one finding for those of some stretches: the costliest one, with what all of them cost the run."""
    where, worst = max(of, key=lambda one: one[1].lost_ns_total)
    lost_ns = sum(one.lost_ns_total for _, one in of)
    share = lost_ns / (steps.count * steps.mean_ns) if lost_ns else worst.lost_fraction  # all is lost in a hang
    weights = np.array([summary.time_ns for summary, _ in of]) / (steps.count * steps.mean_ns)
    errors_ns = [one.uncertainty_ns * summary.analyzed for summary, one in of]
    # Of one that was not replayed, since its cost is clear, this is what a fix saves.
    gains = [one.lost_fraction if one.gain_fraction is None else one.gain_fraction for _, one in of]
    gain_errors = [one.gain_uncertainty_fraction or 0.0 for _, one in of]
    is_predicted = any(one.gain_fraction is not None for _, one in of)
    is_everywhere = {at.first for at, _ in of} == {one.first for one in every if one.analyzed}
    seen = chain(*(one.steps or at.numbers for at, one in of))
    said = text("{what} (in steps {steps})", what=worst.title, steps=ranges(range(of[0][0].first, of[-1][0].last + 1)))
    return replace(
        worst,
        title=worst.title if is_everywhere or worst.steps else said,
        severity=severity(share) if lost_ns else worst.severity,
        steps=() if is_everywhere and not any(one.steps for _, one in of) else tuple(sorted({*seen})),
        lost_ns_per_step=round(lost_ns / steps.count),
        lost_ns_total=lost_ns,
        lost_fraction=share,
        uncertainty_ns=round(float(np.linalg.norm(errors_ns)) / steps.count),
        gain_fraction=float(weights @ gains) if is_predicted else None,
        gain_why=None if is_predicted else worst.gain_why,
        gain_uncertainty_fraction=float(np.linalg.norm(weights * gain_errors)) if any(gain_errors) else None,
        confidence=min(one.confidence for _, one in of),  # "confirmed" where it is so anywhere
        others_waited=None,
        evidence=tuple(
            replace(one, steps=None if where is every[-1] else (where.first, where.last)) for one in worst.evidence
        ),
    )


def _losses(every: Sequence[StretchSummary], steps: AnalyzedSteps) -> tuple[Loss, ...]:
    """Return the losses of the mean step of all stretches, the largest first."""
    run_ns = steps.count * steps.mean_ns
    found: dict[str, list[tuple[StretchSummary, Loss]]] = defaultdict(list)
    for summary in every:
        for loss in summary.losses:
            found[loss.kind].append((summary, loss))
    losses = []
    for kind, of in found.items():
        total_ns = [loss.ns_per_step * summary.analyzed for summary, loss in of]
        largest = of[int(np.argmax(total_ns))][1]
        is_once = max(total_ns) >= _NEARLY_ALL * sum(total_ns)
        by_rank = {rank: parts[LOST[kind]] for rank, parts in steps.by_rank.items()} if kind not in LABEL else {}
        least, most = (f(by_rank, key=lambda rank: by_rank[rank], default=None) for f in (min, max))
        losses.append(
            replace(
                largest,
                ns_per_step=round(sum(total_ns) / steps.count),
                fraction=sum(total_ns) / run_ns,
                least_rank=largest.least_rank if least is None else least,
                least_ns=largest.least_ns if least is None else by_rank[least],
                most_rank=largest.most_rank if most is None else most,
                most_ns=largest.most_ns if most is None else by_rank[most],
                steps=largest.steps if is_once else (),
                explained_by=tuple(dict.fromkeys(chain(*(loss.explained_by for _, loss in of)))),
                unexplained_fraction=sum(loss.unexplained_fraction * summary.time_ns for summary, loss in of) / run_ns,
            )
        )
    return tuple(sorted(losses, key=lambda loss: -loss.fraction))


def _checks(every: Sequence[StretchSummary], found: Container[str]) -> tuple[list[Healthy], list[NotChecked]]:
    """Return the checks that found nothing in the run, and those that were not made in much of it, and why.

    The detection limit is that of the mean step: where a check was not made all may be lost. How the job ended, which
    is no matter of speed, only the last stretch shows.
    """
    answers = [_answers(one) for one in every]
    healthy, not_checked = [], []
    for detector in dict.fromkeys(chain(*answers)):
        if detector in found:
            continue
        asked = list(zip(every, answers, strict=True))[0 if spec_of(detector).judges_speed else -1 :]
        time_ns, count = sum(one.time_ns for one, _ in asked), sum(one.analyzed for one, _ in asked)
        limits_ns = [limit for one, of in asked if (limit := _limit_ns(one, of.get(detector), detector)) is not None]
        open_ = [(one, check) for one, of in asked if isinstance(check := of.get(detector), NotChecked)]
        if open_ and sum(one.time_ns for one, _ in open_) >= _UNCHECKED * time_ns:
            not_checked.append(_not_made(open_, partly=len(open_) < len(asked)))
        else:
            limit_ns = round(sum(limits_ns) / count) if limits_ns and count else None
            healthy.append(Healthy(detector=detector, resolution_ns=limit_ns))
    return healthy, not_checked


def _answers(one: StretchSummary) -> dict[str, Healthy | NotChecked]:
    checks: tuple[Healthy | NotChecked, ...] = (*one.healthy, *one.not_checked)
    return {check.detector: check for check in checks}


def _limit_ns(one: StretchSummary, check: Healthy | NotChecked | None, detector: str) -> int | None:
    """Return what a check may have overlooked in a stretch, with what it found, ns in all; None: it has no limit."""
    if isinstance(check, NotChecked):
        return one.time_ns
    if check is not None:
        return None if check.resolution_ns is None else check.resolution_ns * one.analyzed
    lost = (of.lost_ns_total + of.uncertainty_ns * one.analyzed for of in one.findings if of.detector == detector)
    return sum(lost)


def _not_made(open_: Sequence[tuple[StretchSummary, NotChecked]], *, partly: bool) -> NotChecked:
    """Return why a check was not made; where it was made in other stretches, in which steps."""
    one = max(open_, key=lambda of: of[0].time_ns)[1]
    if partly:
        steps = ranges(step for summary, _ in open_ for step in summary.numbers)
        one = replace(one, why=text("{why} (in steps {steps})", why=one.why, steps=steps))
    return replace(one, unclear=any(other.unclear for _, other in open_))
