"""What the stretches of a long run show together: its root causes, and phases whose steps are longer or shorter.

The report holds the last steps of such a run; of all others there are summaries, and the lengths on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rankscope.analysis.detectors import gradual_slowdown, severity
from rankscope.analysis.diagnosis.stretch_summary import StretchFinding, StretchSummary
from rankscope.analysis.metrics.step_matrix import error_of_change
from rankscope.analysis.model.finding import Change, Found, Gap, History, Look, Report, RunFinding, Span
from rankscope.analysis.model.parts import part_change
from rankscope.analysis.runs.step_range import Stretch
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import percent, ranges

__all__ = ["over_the_run", "phases_of"]

_BLOCK = 20  # steps whose median counts as one
_SMOOTH = 5  # blocks, so that a phase lasts some 50 steps
_DIFFERENT = 1.1  # as in Greyhound: a shift above 10 %
_STILL = 1.05  # a phase that has begun goes on: noise does not cut it into pieces
_WORTH = 0.01  # of the run's time, that all phases in one direction take more or less, or that a root cause costs
_GROWS = "gradual_slowdown"
_MOST_LOOKS = 3
_PART = 0.02  # of the last steps: changes of a part below are not listed
_SEVERITIES = ("low", "medium", "high")

Floats = NDArray[np.float64]


def over_the_run(
    report: Report, stretch: Stretch, phases: Sequence[Span], last: StretchSummary, others: Sequence[StretchSummary]
) -> Report:
    """Return the report on the last steps with findings on the whole run, by summaries of them and of all others.

    `phases` are as of `phases_of`.
    """
    history = report.history
    assert history
    every = [*others, last]
    missing = [one for one in others if not one.analyzed and one.why]
    looks = [_look(phase, last, others) for phase in phases[:_MOST_LOOKS]]
    rest = Counter(_is_longer(phase, history) for phase in phases[_MOST_LOOKS:])
    looks = [replace(look, others=rest.pop(_is_longer(look.phase, history), 0)) for look in looks]
    findings = tuple(sorted((*_together(every), *_growth(stretch, every)), key=lambda one: -one.lost_ns_total))
    history = replace(
        history,
        analyzed=sum(one.last - one.first + 1 for one in every if one not in missing),
        stretches=len(every) - len(missing),
        findings=findings,
        looks=tuple(sorted(looks, key=lambda look: look.phase.first)),
    )
    if looks:
        sentence = _of_phase(looks[0], history.read)
    else:
        elsewhere = (one for one in findings if not _is_of(one, last))
        sentence = next(map(_of_finding, elsewhere), "") or _of_none(history)
    all_read = not (missing or history.kept)
    gaps = [gap for gap in report.gaps if gap.table != "*" or gap.why != stretch.said or not all_read]
    gaps += [Gap(table="*", rank=None, node=None, count=None, why=_not_analyzed(one)) for one in missing]
    return replace(
        report, verdict=joined(" ", filter(None, (report.verdict, sentence))), history=history, gaps=tuple(gaps)
    )


def _not_analyzed(one: StretchSummary) -> str:
    return text("steps {steps} were not analyzed: {why}", steps=ranges(range(one.first, one.last + 1)), why=one.why)


def _is_longer(phase: Span, history: History) -> bool:
    return phase.median_ns > history.read.median_ns


def _is_of(one: RunFinding, summary: StretchSummary) -> bool:
    return any((one.detector, one.ranks) == (found.detector, found.ranks) for found in summary.findings)


def _together(every: Sequence[StretchSummary]) -> Iterator[RunFinding]:
    """Root causes over all stretches, those that cost at least a hundredth of their time; the costliest first."""
    run_ns = sum(one.analyzed * one.step_ns for one in every)
    found: dict[tuple[object, ...], list[tuple[StretchSummary, StretchFinding]]] = {}
    for summary in every:
        for one in summary.findings:
            found.setdefault((one.detector, one.ranks, one.nodes, one.groups), []).append((summary, one))
    lost = {key: sum(one.lost_ns_total for _, one in of) for key, of in found.items()}
    for key in sorted(found, key=lambda key: -lost[key]):
        if lost[key] < _WORTH * run_ns:
            return
        of = found[key]
        _, worst = max(of, key=lambda one: one[1].lost_ns_total)
        errors = np.array([one.uncertainty_ns * float(summary.analyzed) for summary, one in of])
        yield RunFinding(
            detector=worst.detector,
            severity=max((one.severity for _, one in of), key=_SEVERITIES.index),
            confidence=min(one.confidence for _, one in of),  # "confirmed" where it is so anywhere
            title=worst.title,
            ranks=worst.ranks,
            nodes=worst.nodes,
            groups=worst.groups,
            steps=(of[0][0].first, of[-1][0].last),
            stretches=len(of),
            lost_ns_total=lost[key],
            lost_fraction=lost[key] / run_ns,
            uncertainty_ns=round(float(np.sqrt(np.square(errors).sum()))),
        )


def _growth(stretch: Stretch, every: Sequence[StretchSummary]) -> Iterator[RunFinding]:
    """Yield steps that become longer throughout the run, by too little to show in any stretch of it.

    By those of the counted rank, and by the rules for `gradual_slowdown` in one stretch: the cost is how much
    longer the mean step is than the first.
    """
    if any(found.detector == _GROWS for one in every for found in one.findings):
        return
    judged = stretch.counted.filter("judged")
    lengths = (judged["end_ns"] - judged["start_ns"]).to_numpy().astype(float)
    seen = gradual_slowdown.over_steps(lengths)
    if seen is None:
        return
    line, lost = seen
    share = lost.ns / float(lengths.mean())
    yield RunFinding(
        detector=_GROWS,
        severity=severity(share),
        confidence="likely",
        title=gradual_slowdown.title_of(line, _grown(every, line.growth)),
        ranks=(),
        nodes=(),
        groups=(),
        steps=(0, len(stretch.counted) - 1),
        stretches=len(every),
        lost_ns_total=round(lost.ns * len(lengths)),
        lost_fraction=share,
        uncertainty_ns=round(lost.half_width_ns * len(lengths)),
    )


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


def _of_phase(look: Look, read: Span) -> str:
    """Return the verdict's sentence on the phase that differs most."""
    more = look.phase.median_ns / read.median_ns - 1
    what = next(iter((*(found.title for found in look.findings), *map(part_change, look.changes))), "")
    steps = ranges(range(look.phase.first, look.phase.last + 1))
    if look.others:
        steps = text("{steps}, and {others},", steps=steps, others=counted(look.others, "other phase"))
    said = {"steps": steps, "share": percent(abs(more))}
    because = text(": {what}", what=what) if what else ""
    if more > 0:
        return text("Steps {steps} took {share} longer than these{because}.", because=because, **said)
    return text("Steps {steps} took {share} less than these{because}.", because=because, **said)


def _of_finding(found: RunFinding) -> str:
    """Return the verdict's sentence on a root cause that the last steps do not have."""
    steps = ranges(range(found.steps[0], found.steps[1] + 1))
    share = percent(found.lost_fraction)
    return text("Steps {steps}: {what} ({share} of the whole run).", steps=steps, what=found.title, share=share)


def _of_none(history: History) -> str:
    """Return the verdict's sentence if the other steps show nothing else."""
    number = history.analyzed - (history.read.last - history.read.first + 1)
    if not number:
        return ""
    others = counted(number, "other step")
    return text("In the {others} that were analyzed nothing else was found.", others=others)


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
    findings = {(one.detector, one.ranks): one for summary in analyzed for one in summary.findings}
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
        if uncertainty_ns is not None and abs(change_ns) > max(uncertainty_ns, _PART * last.step_ns):
            changes.append(Change(part=part, ns=change_ns))
    return sorted(changes, key=lambda change: (-abs(change.ns), change.part))
