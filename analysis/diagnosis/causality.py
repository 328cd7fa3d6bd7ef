"""Which finding explains which: a walk over the graph that the detectors declare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from rankscope.analysis.detectors import spec_of
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import Detector

__all__ = ["root_causes_first"]

Cures = Callable[[Finding, Finding], bool]


def root_causes_first(
    findings: Sequence[Finding], ranks: Collection[int], cures: Cures = lambda _cause, _finding: False
) -> tuple[Finding, ...]:
    """Put the costliest first, as far as the replay agrees, and after each the findings that follow from it.

    What all `ranks` of the job do alike does not explain that some of them are slower than the others, unless fixing
    that `cures` them: of ranks that are slow alike one has to be last, and the others wait for it.
    """
    ordered = sorted(findings, key=_rank)
    everyone = frozenset(ranks)
    causes: dict[int, Finding | None] = {}
    for finding in ordered:
        is_of_some = 0 < len(finding.ranks) < len(everyone)
        causes[id(finding)] = next(
            (
                cause
                for cause in ordered
                if _follows(finding, cause)
                and not _reversed(finding, cause)
                and (not (is_of_some and everyone.issubset(cause.ranks)) or cures(cause, finding))
            ),
            None,
        )
    for finding in ordered:  # of findings that explain each other in a ring the costliest is the root
        if _is_in_ring(finding, causes):
            causes[id(finding)] = None
    placed: list[Finding] = []
    for root in ordered:
        if causes[id(root)] is None:
            placed += [root, *_following(root, ordered, causes)]
    return tuple(placed)


def _rank(finding: Finding) -> tuple[float, float]:
    """Give the sort key of the costliest: its cost, at most what its fix saves in the replay, but for its error.

    A fix may save more than its finding costs, as that of all hosts does where one of them stalls besides.
    """
    share = finding.lost_fraction
    if finding.gain_fraction is not None and not spec_of(finding.detector).has_other_fixes:
        share = min(share, finding.gain_fraction + (finding.gain_uncertainty_fraction or 0.0))
    return -share, -finding.lost_ns_per_step


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
    return finding.detector in _explained(finding, cause, spec) and about_the_same and costs_no_more


def _reversed(finding: Finding, cause: Finding) -> bool:
    """Say whether of two findings that explain each other the first is the cause: the one that was seen at work."""
    if not _follows(cause, finding):
        return False
    mine, other = (spec_of(one.detector).explains_share for one in (finding, cause))
    return (mine, -finding.lost_ns_per_step) < (other, -cause.lost_ns_per_step)


def _is_in_ring(finding: Finding, causes: Mapping[int, Finding | None]) -> bool:
    """Say whether the causes of a finding lead back to it."""
    seen: set[int] = set()
    cause = causes[id(finding)]
    while cause is not None and id(cause) not in seen and cause is not finding:
        seen.add(id(cause))
        cause = causes[id(cause)]
    return cause is finding


def _explained(finding: Finding, cause: Finding, spec: Detector) -> tuple[str, ...]:
    """Give the names of its possible effects; more for a finding that names a late rank without the reason."""
    if cause.where in spec.explains_by_part:
        return spec.explains_by_part[cause.where]
    is_just_late = finding.chance is not None and set(finding.ranks) <= set(cause.ranks)
    late = spec.explains_late if is_just_late else ()
    return (*spec.explains, *(spec.explains_of_ranks if cause.ranks else ()), *late)
