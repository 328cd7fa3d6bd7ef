"""Whether a run is as fast as it should be: yes, no, or not enough data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rankscope.analysis.compare.two_runs import step_change
from rankscope.analysis.detectors import spec_of
from rankscope.analysis.diagnosis.run_phases import unexplained
from rankscope.analysis.model.comparison import Comparison, FindingChange, StepChange
from rankscope.analysis.model.digest import looks_of, missing_ranks
from rankscope.analysis.model.finding import COARSE, MANY_OUTLIERS, Finding, Found, Look, Report
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import duration, percent, ranges

__all__ = ["Gate", "gate"]

_NAMES = {"low": text("low"), "medium": text("medium"), "high": text("high")}
_SEVERITIES = tuple(_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Why the run does not pass, and what was not seen of it; it passes where both are empty."""

    failures: tuple[str, ...]
    unseen: tuple[str, ...]


def gate(report: Report, against: Comparison | None = None, *, severity: str = "low", slower: float = 0.03) -> Gate:
    """Judge a run by its findings of this severity and above, root causes only, and by the data that it must have.

    With a comparison, whose B is the run: findings that A has too, at no less, do not count; a mean step that is longer
    by more than the share `slower` does. Where the error of that change leaves open which, it was not seen.
    """
    no_worse = [change.b for change in against.findings if change.b and _no_worse(change)] if against else []
    known = {_cause(finding) for finding in no_worse}
    roots = [finding for finding in report.findings if finding.caused_by is None]
    counted_severities = _SEVERITIES[_SEVERITIES.index(severity) :]
    counting = [finding for finding in roots if finding.severity in counted_severities]
    failures: list[str] = [_sentence(finding) for finding in counting if _cause(finding) not in known]
    known |= {_cause(finding) for finding in roots}  # of the whole run
    elsewhere = [
        (_phase(look), found) for look in looks_of(report) for found in look.findings if _cause(found) not in known
    ]
    failures += [_sentence_of(*one) for one in elsewhere if one[1].severity in counted_severities]
    unseen = [*_unseen(report), *_outliers(report, slower, against)]
    bounded = False
    if against:
        longer, open_ = _step(against.step, slower)
        failures += longer
        unseen += open_
        if against.a.ranks != against.b.ranks:
            there = counted(against.a.ranks, "rank")
            unseen.append(text("{there} there and {here} here: not comparable", there=there, here=against.b.ranks))
        bounded = not open_  # what is new in a step that is no longer costs no more than that
    if not (failures or bounded):
        unseen += _hidden(report)
    return Gate(failures=tuple(failures), unseen=tuple(unseen))


def _cause(finding: Finding | Found) -> tuple[object, ...]:
    """Return what is found, and where: of a long run it costs something else in the last steps than in all."""
    return finding.detector, finding.ranks, finding.nodes, finding.groups


def _no_worse(change: FindingChange) -> bool:
    """Say whether `a` has the finding too, at no less cost, within the error."""
    if change.a is None or change.b is None:
        return False
    error_ns = change.a.uncertainty_ns + change.b.uncertainty_ns
    return change.status == "stays" or change.b.lost_ns_per_step <= change.a.lost_ns_per_step + error_ns


def _sentence(finding: Finding) -> Text:
    share = text(", {share} of the step", share=percent(finding.lost_fraction)) if finding.lost_fraction else ""
    return text(
        "{title} ({detector}, {severity}{share})",
        title=finding.title,
        detector=name_of(finding.detector),
        severity=_NAMES[finding.severity],
        share=share,
    )


def _sentence_of(phase: Text, found: Found) -> Text:
    return text(
        "{steps}: {title} ({detector}, {severity})",
        steps=phase,
        title=found.title,
        detector=name_of(found.detector),
        severity=_NAMES[found.severity],
    )


def _phase(look: Look) -> Text:
    return text("steps {steps}", steps=ranges(look.phase.steps))


def _unseen(report: Report) -> Iterator[str]:
    """Yield what was missing."""
    missing = missing_ranks(report)
    if missing:
        yield text("{ranks} of {world} not recorded", ranks=named("rank", missing), world=report.world_size)
    if report.world_size is None and report.source == "native":
        yield text("how many ranks the job had")
    if not report.findings and not _speed_was_judged(report):
        yield report.verdict
    for look in unexplained(report.history, report.findings) if report.history else ():
        if not look.findings:
            yield text(
                "why {steps} take {time}, and the last ones do not",
                steps=_phase(look),
                time=duration(look.phase.median_ns),
            )


def _outliers(report: Report, slower: float, against: Comparison | None) -> Iterator[str]:
    """Yield that outliers take much of the time; of a run that is compared, more than in the other one."""
    share = report.steps.outliers_fraction
    if share >= MANY_OUTLIERS and (against is None or share > against.a.outliers_fraction + slower):
        yield text(
            "why steps excluded as outliers ({count}) take {share} of the time",
            count=report.steps.outliers,
            share=percent(share),
        )


def _speed_was_judged(report: Report) -> bool:
    """Say whether a check that says anything about how fast the job is found it healthy."""
    return any(spec_of(check.detector).judges_speed for check in report.healthy)


def _hidden(report: Report) -> Iterator[str]:
    """Yield checks whose loss the steps' scatter, or a failed collector, may hide.

    A finding may cause such scatter itself.
    """
    unclear: dict[str, list[str]] = {}
    for unchecked in report.not_checked:
        if unchecked.unclear:
            unclear.setdefault(unchecked.why, []).append(name_of(unchecked.detector))
    for why, detectors in unclear.items():
        yield text("{checks}: {why}", checks=joined(", ", detectors), why=why)
    for check in report.healthy:
        if report.steps.mean_ns and (check.resolution_ns or 0) >= COARSE * report.steps.mean_ns:
            limit = duration(check.resolution_ns or 0)
            name = name_of(check.detector)
            yield text("{check} below {limit} per step, since steps vary so much", check=name, limit=limit)


def _step(step: StepChange, slower: float) -> tuple[list[Text], list[Text]]:
    """Say that it is longer than allowed, or that it may be."""
    allowed_ns = slower * step.a_ns
    said = text(
        "the mean step of {step} is {change}, and {allowed} is allowed",
        step=duration(step.b_ns),
        change=step_change(step),
        allowed=percent(slower),
    )
    if step.change_ns > allowed_ns and step.clear:
        return [said], []
    if step.uncertainty_ns is None or step.change_ns + step.uncertainty_ns > allowed_ns:
        return [], [said]
    return [], []
