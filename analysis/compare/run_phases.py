"""The rest of a long run: steps that are longer or shorter than those which were read, and what some of them tell.

A report holds one part of such a run. Lengths are known of all steps, so it can look into the parts that differ most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from rankscope.analysis.compare.two_runs import compare
from rankscope.analysis.model.finding import Change, Found, History, Look, Report, Span
from rankscope.analysis.model.parts import part_change
from rankscope.analysis.runs.step_range import FEWEST, Stretch
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import percent, ranges
from rankscope.analysis.timeline.build import Timeline
from rankscope.errors import BadInput, NotComparable

__all__ = ["look_around"]

_BLOCK = 20  # steps whose median counts as one
_SMOOTH = 5  # blocks, so that a phase lasts some 50 steps
_DIFFERENT = 1.1  # as in Greyhound: a shift above 10 %
_STILL = 1.05  # a phase that has begun goes on: noise does not cut it into pieces
_WORTH = 0.01  # of the run's time, that all phases in one direction take more or less
_MOST_LOOKS, _MOST_STEPS = 3, 200
_PART = 0.02  # of the step that was read: changes of a part below are not listed

Floats = NDArray[np.float64]
ReadSteps = Callable[[int, int], tuple[Report, Timeline]]


def look_around(report: Report, timeline: Timeline, read: ReadSteps) -> Report:
    """The report with `looks` in its history, which altogether read no more steps than the report itself.

    `read` gives the report and timeline of other steps of the run, first to last. It may raise `BadInput`.
    """
    stretch, history = timeline.stretch, report.history
    if stretch is None or history is None or stretch.asked:
        return report
    count = stretch.last - stretch.first + 1
    phases = _phases(stretch, history)
    chosen = phases[: max(1, min(_MOST_LOOKS, count // FEWEST))]
    if not chosen:
        return report
    steps = max(FEWEST, min(_MOST_STEPS, count // len(chosen)))
    looks = [_look(report, timeline, phase, stretch.kept, steps, read) for phase in chosen]
    rest = Counter(_is_longer(phase, history) for phase in phases[len(chosen) :])
    looks = [replace(look, others=rest.pop(_is_longer(look.phase, history), 0)) for look in looks]
    in_order = tuple(sorted(looks, key=lambda look: look.phase.first))
    verdict = joined(" ", (report.verdict, _sentence(looks[0], history.read)))
    return replace(report, verdict=verdict, history=replace(history, looks=in_order))


def _is_longer(phase: Span, history: History) -> bool:
    return phase.median_ns > history.read.median_ns


def _sentence(look: Look, read: Span) -> str:
    """What the verdict says of the phase that differs most."""
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


def _phases(stretch: Stretch, history: History) -> list[Span]:
    """The phases of the run whose steps are longer or shorter than those that were read; what differs most first."""
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
    """Where it is above `_DIFFERENT`, and from there on, both ways, as long as it is above `_STILL`."""
    above = ratio > _STILL
    piece = np.cumsum(np.diff(above, prepend=False))
    lasting: NDArray[np.bool_] = above & np.isin(piece, piece[ratio > _DIFFERENT])
    return lasting


def _medians(stretch: Stretch) -> Floats:
    """The median length of the judged steps of each block, smoothed over some; of a block without one that of all."""
    rows = stretch.counted
    lengths = (rows["end_ns"] - rows["start_ns"]).to_numpy().astype(float)
    judged = np.where(rows["judged"].to_numpy(), lengths, np.nan)
    padded = np.append(judged, np.full(-len(judged) % _BLOCK, np.nan)).reshape(-1, _BLOCK)
    some = ~np.isnan(padded).all(axis=1)
    blocks = np.full(len(padded), np.median(lengths))
    blocks[some] = np.nanmedian(padded[some], axis=1)
    smooth: Floats = np.median(sliding_window_view(np.pad(blocks, _SMOOTH // 2, mode="edge"), _SMOOTH), axis=1)
    return smooth


def _look(report: Report, timeline: Timeline, phase: Span, kept: int, steps: int, read: ReadSteps) -> Look:
    """What steps in the midst of a phase tell, and how they differ from those that were read."""
    first = max(phase.first, kept)
    steps = min(steps, phase.last - first + 1)
    if steps < FEWEST:
        return Look(phase=phase)
    first += (phase.last - first + 1 - steps) // 2
    try:
        other, of_other = read(first, first + steps - 1)
        changed = compare(report, timeline, other, of_other)
    except (BadInput, NotComparable) as error:
        return Look(phase=phase, why=str(error))
    except Exception as error:  # the report on what was read is done, and must not be lost for this
        why = text("analyzing it failed: {error}", error=f"{type(error).__name__}: {error}")
        return Look(phase=phase, why=why)
    least_ns = _PART * changed.step.a_ns
    clear = (c for c in changed.parts if c.uncertainty_ns is not None and abs(c.change_ns) > c.uncertainty_ns)
    parts = sorted((c for c in clear if abs(c.change_ns) >= least_ns), key=lambda c: abs(c.change_ns), reverse=True)
    return Look(
        phase=phase,
        first=first,
        last=first + steps - 1,
        findings=tuple(
            Found(detector=finding.detector, severity=finding.severity, title=finding.title)
            for finding in other.findings
            if not finding.caused_by
        ),
        changes=tuple(Change(part=c.part, ns=c.change_ns) for c in parts),
    )
