"""Which finding explains which: a walk over the graph that the detectors declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import Detector

__all__ = ["root_causes_first"]


def root_causes_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Put the costliest first, and after each the findings that follow from it."""
    ordered = sorted(findings, key=lambda finding: (-finding.lost_fraction, -finding.lost_ns_per_step))
    causes = {id(f): next((c for c in ordered if _follows(f, c)), None) for f in ordered}
    placed: list[Finding] = []
    for root in ordered:
        if causes[id(root)] is None:
            placed += [root, *_following(root, ordered, causes)]
    return tuple(placed)


def _following(root: Finding, ordered: Sequence[Finding], causes: Mapping[int, Finding | None]) -> list[Finding]:
    """Give the findings that follow from this one, directly or through others."""
    found: list[Finding] = []
    for finding in ordered:
        if causes[id(finding)] is root:
            found += [replace(finding, caused_by=root.detector), *_following(finding, ordered, causes)]
    return found


def _follows(finding: Finding, cause: Finding) -> bool:
    """Say whether a finding is explained by one that can bring it about and costs enough."""
    spec = spec_of(cause.detector)
    about_the_same = not finding.ranks or not cause.ranks or bool(set(finding.ranks) & set(cause.ranks))
    within = finding.uncertainty_ns if spec.explains_within_error else 0
    costs_no_more = finding.lost_ns_per_step * spec.explains_share <= cause.lost_ns_per_step + within
    return finding.detector in _explained(cause, spec) and about_the_same and costs_no_more


def _explained(cause: Finding, spec: Detector) -> tuple[str, ...]:
    """Give the names of what it can bring about."""
    if cause.where in spec.explains_by_part:
        return spec.explains_by_part[cause.where]
    return (*spec.explains, *(spec.explains_of_ranks if cause.ranks else ()))
