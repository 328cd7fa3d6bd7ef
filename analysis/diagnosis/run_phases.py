"""How the length of a step changes over a long run: phases whose steps are longer or shorter, changes, and growth.

The report holds the last steps of such a run; of all others there are summaries, and the lengths on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

from rankscope.analysis.detectors import gradual_slowdown, severity, step_change
from rankscope.analysis.diagnosis.analyzed_steps import AnalyzedSteps
from rankscope.analysis.diagnosis.stretch_summary import StretchSummary
from rankscope.analysis.metrics.step_matrix import error_of_change
from rankscope.analysis.model.finding import Change, Finding, Found, History, Look, Span
from rankscope.analysis.model.parts import part_change
from rankscope.analysis.runs.step_range import Stretch
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import percent, ranges
from rankscope.errors import NotResolvable

__all__ = ["changes", "growth", "looks_at", "phases_of", "sentence", "unexplained"]

_BLOCK = 20  # steps whose median counts as one
_SMOOTH = 5  # blocks, so that a phase lasts some 50 steps
_DIFFERENT = 1.1  # as in Greyhound: a shift above 10 %
_STILL = 1.05  # a phase that has begun goes on: noise does not cut it into pieces
_WORTH = 0.01  # of the run's time, that all phases in one direction take more or less
_GROWS = "gradual_slowdown"
_MOST_LOOKS = 3
_EXPLAINS = 0.5  # share of what a phase takes longer or less that findings explain
_PART = 0.02  # of the last steps: changes of a part below are not listed

_NO_STEPS = pl.DataFrame(schema=dict.fromkeys(("rank", "step", "start_ns", "end_ns"), pl.Int64))

Floats = NDArray[np.float64]


def looks_at(phases: Sequence[Span], read: Span, last: StretchSummary, others: Sequence[StretchSummary]) -> list[Look]:
    """Return what the stretches of the phases show that differ most from the steps that were read, in their order."""
    looks = [_look(phase, last, others) for phase in phases[:_MOST_LOOKS]]
    rest = Counter(phase.median_ns > read.median_ns for phase in phases[_MOST_LOOKS:])
    return [replace(look, others=rest.pop(look.phase.median_ns > read.median_ns, 0)) for look in looks]


def unexplained(history: History, findings: Sequence[Finding]) -> list[Look]:
    """Return the phases that no finding makes as much longer or shorter than the last steps as they are."""
    return [look for look in history.looks if not _is_explained(look.phase, history.read, findings)]


def sentence(history: History, findings: Sequence[Finding]) -> str:
    """Return the verdict's sentence on the phase that differs most, unless it is `findings` that make it differ."""
    looks, read = unexplained(history, findings), history.read
    if not looks:
        return ""
    look = max(looks, key=lambda one: abs(one.phase.median_ns - read.median_ns) * len(one.phase.steps))
    more = look.phase.median_ns / read.median_ns - 1
    what = next(iter((*(found.title for found in look.findings), *map(part_change, look.changes))), "")
    steps = ranges(look.phase.steps)
    if look.others:
        steps = text("{steps}, and {others},", steps=steps, others=counted(look.others, "other phase"))
    because = text(": {what}", what=what) if what else ""
    said = {"steps": steps, "share": percent(abs(more)), "last": ranges(read.steps), "because": because}
    if more > 0:
        return text("Steps {steps} took {share} longer than steps {last}{because}.", **said)
    return text("Steps {steps} took {share} less than steps {last}{because}.", **said)


def _is_explained(phase: Span, read: Span, findings: Sequence[Finding]) -> bool:
    """Say whether findings cost so much more in the phase than in the steps that were read, or less, as it differs."""
    differs_ns = phase.median_ns - read.median_ns
    more_ns = _cost_more(findings, phase.steps, read.steps) * np.sign(differs_ns)
    return bool(more_ns >= _EXPLAINS * abs(differs_ns))


def _cost_more(findings: Sequence[Finding], some: ArrayLike, others: ArrayLike) -> float:
    """Return by how much the findings cost more in some steps than in others, ns per step."""
    more_ns = 0.0
    for finding in findings:
        if finding.steps and finding.caused_by is None:
            acts = np.array(finding.steps)
            in_some, in_others = (float(np.isin(steps, acts).mean()) for steps in (some, others))
            more_ns += (in_some - in_others) * finding.lost_ns_total / len(acts)
    return more_ns


def changes(steps: AnalyzedSteps, every: Sequence[StretchSummary]) -> list[Finding]:
    """Return a stretch of the run in which all ranks are slower, as a finding; none where others explain most of it.

    By the rules for `step_change`, on the means over ranks.
    """
    if steps.by_step.is_empty():
        return []
    try:
        found = step_change.detect(steps.by_step, _NO_STEPS)
    except NotResolvable:
        return []
    return [replace(one, confidence="likely") for one in found if not _is_cost_of_others(one, every)]


def _is_cost_of_others(change: Finding, every: Sequence[StretchSummary]) -> bool:
    """Say whether other findings cost more in those stretches in which the change does, by most of what it costs."""
    number = np.array([one.analyzed for one in every])
    slower = np.array([np.isin(one.numbers, change.steps).mean() for one in every])
    others = np.array(
        [
            sum(of.lost_ns_per_step for of in one.findings if of.caused_by is None and of.detector != change.detector)
            for one in every
        ]
    )
    costs = slower * change.lost_ns_total / len(change.steps)
    costs, others = costs - costs.min(), others - others.min()  # what is alike in all stretches is no change
    return bool(number @ np.minimum(costs, others) >= _EXPLAINS * (number @ costs))


def growth(
    stretch: Stretch, every: Sequence[StretchSummary], findings: Sequence[Finding], ranks: Collection[int]
) -> list[Finding]:
    """Return steps that become longer throughout the run, by too little to show in any stretch of it, as a finding.

    By those of the counted rank, and by the rules for `gradual_slowdown` in one stretch: the cost is how much
    longer the mean step is than the first. Where a finding on the run makes the steps of its end longer, it is its
    ranks that slow down; there is nothing else to say if it names none of all `ranks` in particular.
    """
    if any(found.detector == _GROWS for one in every for found in one.findings):
        return []
    judged = stretch.counted.filter("judged")
    lengths = (judged["end_ns"] - judged["start_ns"]).to_numpy().astype(float)
    seen = gradual_slowdown.over_steps(lengths)
    if seen is None:
        return []
    line, lost = seen
    third = len(stretch.counted) // 3
    late, early, grows_ns = range(2 * third, 3 * third), range(third), _EXPLAINS * line.growth * 2 / 3
    cause = next((one for one in findings if _cost_more([one], late, early) >= grows_ns), None)
    if cause and len(cause.ranks) in (0, len(ranks)):
        return []
    share = lost.ns / float(lengths.mean())
    where = _grown(every, line.growth)
    return [
        Finding(
            detector=_GROWS,
            severity=severity(share),
            confidence="likely",
            title=gradual_slowdown.title_of(line, where, cause.ranks if cause else ()),
            where=where,
            advice=gradual_slowdown.ADVICE.get(where, gradual_slowdown.ADVICE["compute"]),
            ranks=cause.ranks if cause else (),
            lost_ns_per_step=round(lost.ns),
            lost_ns_total=round(lost.ns * len(lengths)),
            lost_fraction=share,
            uncertainty_ns=round(lost.half_width_ns),
            gain_fraction=share,
        )
    ]


def _grown(every: Sequence[StretchSummary], growth_ns: float) -> str:
    """Return the part that grows by half of that or more between the first and the last third of the run."""
    ordered = sorted((one for one in every if one.analyzed), key=lambda one: one.first)
    third = max(len(ordered) // 3, 1)
    early, late = ordered[:third], ordered[-third:]

    def mean_ns(of: Sequence[StretchSummary], part: str) -> float:
        return float(np.average([one.parts.get(part, 0) for one in of], weights=[one.analyzed for one in of]))

    parts = {part for one in ordered for part in one.parts if part not in gradual_slowdown.SECONDARY}
    grown = {part: mean_ns(late, part) - mean_ns(early, part) for part in sorted(parts)}
    most = max(grown, key=lambda part: grown[part], default="wait")
    return most if grown.get(most, 0.0) >= growth_ns / 2 else "wait"


def phases_of(stretch: Stretch, history: History) -> list[Span]:
    """Return the phases of the run whose steps are longer or shorter than those that were read.

    What differs most first.
    """
    usual = history.read.median_ns
    lengths = _medians(stretch)
    longer, shorter = _lasting(lengths / usual), _lasting(usual / lengths)
    kind = np.where(longer, 1, np.where(shorter, -1, 0))
    first_block, last_block = stretch.first // _BLOCK, stretch.last // _BLOCK
    kind[first_block : last_block + 1] = 0
    excess_ns = np.abs(lengths - usual) * _BLOCK
    for sign in (1, -1):
        if excess_ns[kind == sign].sum() < _WORTH * history.median_ns * history.count:
            kind[kind == sign] = 0
    edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(kind)]
    found = []
    for begin, end in pairwise(edges):
        if kind[begin]:
            last = min(end * _BLOCK, history.count) - 1
            found.append((float(excess_ns[begin:end].sum()), stretch.span(begin * _BLOCK, last)))
    return [span for _, span in sorted(found, key=lambda one: one[0], reverse=True)]


def _lasting(ratio: Floats) -> NDArray[np.bool_]:
    """Return the blocks above `_DIFFERENT`, extended both ways while above `_STILL`."""
    above = ratio > _STILL
    piece = np.cumsum(np.diff(above, prepend=False))
    lasting: NDArray[np.bool_] = above & np.isin(piece, piece[ratio > _DIFFERENT])
    return lasting


def _medians(stretch: Stretch) -> Floats:
    """Return the median length of the judged steps of each block, smoothed over some.

    Of a block without one that of all.
    """
    rows = stretch.counted
    lengths = (rows["end_ns"] - rows["start_ns"]).to_numpy().astype(float)
    judged = np.where(rows["judged"].to_numpy(), lengths, np.nan)
    padded = np.append(judged, np.full(-len(judged) % _BLOCK, np.nan)).reshape(-1, _BLOCK)
    some = ~np.isnan(padded).all(axis=1)
    blocks = np.full(len(padded), np.median(lengths))
    blocks[some] = np.nanmedian(padded[some], axis=1)
    smooth: Floats = np.median(sliding_window_view(np.pad(blocks, _SMOOTH // 2, mode="edge"), _SMOOTH), axis=1)
    return smooth


def _look(phase: Span, last: StretchSummary, others: Sequence[StretchSummary]) -> Look:
    """Return the findings of a phase's stretches, and how its steps differ from the last ones."""
    inside = [one for one in others if phase.first <= (one.first + one.last) // 2 <= phase.last]
    analyzed = [one for one in inside if one.analyzed]
    if not analyzed:
        return Look(phase=phase, why=next((one.why for one in inside if one.why), ""))
    roots = [one for summary in analyzed for one in summary.findings if one.caused_by is None]
    findings = {(one.detector, one.ranks): one for one in roots}
    return Look(
        phase=phase,
        analyzed=sum(one.analyzed for one in analyzed),
        findings=tuple(
            Found(
                detector=one.detector,
                severity=one.severity,
                title=one.title,
                ranks=one.ranks,
                nodes=one.nodes,
                groups=one.groups,
            )
            for one in sorted(findings.values(), key=lambda one: -one.lost_ns_total)
        ),
        changes=tuple(_changes(analyzed, last)),
    )


def _changes(analyzed: Sequence[StretchSummary], last: StretchSummary) -> list[Change]:
    """Return the parts that take more or less time than in the last steps, clear of chance.

    The largest change first.
    """
    share = np.array([one.analyzed for one in analyzed]) / sum(one.analyzed for one in analyzed)
    changes = []
    for part in {part for one in (*analyzed, last) for part in one.parts}:
        mean_ns = float(share @ [one.parts.get(part, 0) for one in analyzed])
        error_ns = float(np.linalg.norm(share * [one.errors.get(part, 0) for one in analyzed]))
        change_ns = round(mean_ns) - last.parts.get(part, 0)
        uncertainty_ns = error_of_change(error_ns, last.errors.get(part, 0.0))
        if uncertainty_ns is not None and abs(change_ns) > max(uncertainty_ns, _PART * last.mean_ns):
            changes.append(Change(part=part, ns=change_ns))
    return sorted(changes, key=lambda change: (-abs(change.ns), change.part))
