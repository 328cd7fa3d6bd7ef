"""Which fixes would make the step shorter: tries all likely ones in the replay, with or without a finding.

Candidates are what wait attribution charges most to (ranks, nodes, stages), where only operations were recorded what
computes longest, and every fix without an argument that the run allows, but for `balance`. A fix is listed if it brings
more than 2 % of the step and more than its own error. One that changes all ranks of another fix, and more, is listed
only if it brings clearly more. So is the best pair, if it brings that much more than either alone.

Source: what-if analysis of stragglers, ByteDance 2025: one worker, one stage, one kind of operation at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import LEAST_GAIN, Finding, PredictedFix
from rankscope.analysis.model.pipeline_ops import COMPUTES
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.replay.protocol import Gain, Replay
from rankscope.analysis.replay.whatif import PipelineRerun, Rerun
from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import told
from rankscope.errors import BadFix

__all__ = ["fixes_more", "is_apart", "sweep"]

_TRIED = 4  # ranks, nodes and stages each; a replay takes about a hundredth of the report's time
_LISTED = 8
_PAIRED = 5  # of the largest gains, all pairs are tried
_DISAGREE = 2.0  # times that a finding's cost and the replay of its fix differ, from which on both are shown
_NAMED = ("rank:", "node:", "stage:", "link:", "op:", "overlap:")  # fixes with an argument
_ASKED = {  # start of a fix -> the detector whose findings ask for it
    "balance": "",  # by its fix only: removes the scatter of equal ranks too, so that healthy jobs would have it
    "prefetch:": "exposed_communication",
    "reshard:": "exposed_communication",
    "bucket-mb:": "exposed_communication",
}


def sweep(run: Replay, findings: Sequence[Finding], charges: pl.DataFrame) -> tuple[PredictedFix, ...]:
    """Return the fixes worth trying, the largest gain first, and those of findings whose cost the replay contradicts.

    `charges` say which ranks blocked others, as `wait_attribution.Delays` has them.
    """
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.fix and finding.lost_ns_per_step:
            found.setdefault(finding.fix, finding)
    candidates = _candidates(run, charges, {finding.detector for finding in findings})
    trials = dict.fromkeys((*found, *candidates))
    gains = {fix: gain for fix in told(text("fixes"), trials, len(trials)) if (gain := _tried(run, fix))}
    worth = {fix: gain for fix, gain in gains.items() if _is_clear(gain, run.step_ns)}
    kept = [fix for fix in worth if fix in found or not _covered(fix, worth, run)]
    kept += [fix for fix in found if fix in gains and fix not in worth and _contradicts(gains[fix], found[fix])]
    kept.sort(key=lambda fix: -gains[fix].gain_ns)
    rows = [_row(gains[fix], run.step_ns, found.get(fix)) for fix in kept[:_LISTED]]
    pair = _best_pair([gains[fix] for fix in kept][:_PAIRED], run)
    rows += [_row(pair, run.step_ns, None)] if pair else []
    return tuple(sorted(rows, key=lambda row: -row.gain_ns))


def fixes_more(gain: Gain, finding: Finding) -> bool:
    """Say whether a finding's fix brings more than the finding costs, beyond the error: it fixes other things too."""
    return gain.gain_ns > finding.lost_ns_per_step + max(finding.uncertainty_ns, gain.uncertainty_ns)


def _best_pair(gains: Sequence[Gain], run: Replay) -> Gain | None:
    """Return the two fixes that bring most together, if clearly more than either alone."""
    best: Gain | None = None
    for one, other in combinations(gains, 2):
        both = _tried(run, *one.fixes, *other.fixes)
        if both is None or both.gain_ns <= (best.gain_ns if best else 0.0):
            continue
        more_ns = both.gain_ns - max(one.gain_ns, other.gain_ns)
        best = both if more_ns > max(both.uncertainty_ns, LEAST_GAIN * run.step_ns) else best
    return best


def _tried(run: Replay, *fixes: str) -> Gain | None:
    try:
        return run.gain(*fixes)
    except BadFix:
        return None


def _is_clear(gain: Gain, step_ns: float) -> bool:
    return gain.gain_ns > max(gain.uncertainty_ns, LEAST_GAIN * step_ns)


def _differs(gain: Gain, finding: Finding) -> bool:
    """Say whether a finding's cost and what its fix brings differ by more than the error."""
    apart_ns = abs(finding.lost_ns_per_step - max(gain.gain_ns, 0.0))
    return apart_ns > max(finding.uncertainty_ns, gain.uncertainty_ns)


def is_apart(gain: Gain, finding: Finding) -> bool:
    """Say whether a finding's cost is shown beside what its fix brings: they differ clearly, or much."""
    return _contradicts(gain, finding) or _differs(gain, finding)


def _contradicts(gain: Gain, finding: Finding) -> bool:
    cost_ns, gain_ns = finding.lost_ns_per_step, max(gain.gain_ns, 0.0)
    return cost_ns > _DISAGREE * gain_ns or gain_ns > _DISAGREE * cost_ns


def _row(gain: Gain, step_ns: float, finding: Finding | None) -> PredictedFix:
    gain_ns = max(gain.gain_ns, 0.0)
    differs = finding is not None and is_apart(gain, finding)
    return PredictedFix(
        fix=" + ".join(gain.fixes),
        step_ns=round(step_ns - gain_ns),
        gain_ns=round(gain_ns),
        gain_fraction=gain_ns / step_ns,
        uncertainty_ns=round(gain.uncertainty_ns),
        finding=finding.detector if finding else None,
        finding_lost_ns=finding.lost_ns_per_step if finding and differs else None,
    )


# ---------------------------------------------------------------- candidates


def _candidates(run: Replay, charges: pl.DataFrame, asking: Collection[str]) -> list[str]:
    unasked = tuple(start for start, detector in _ASKED.items() if detector not in asking)
    possible = run.possible(without=unasked)
    if isinstance(run, PipelineRerun):
        (ranks, stages), nodes = _longest(run), {}
    else:
        assert isinstance(run, Rerun)
        ranks = _of_charges(run, charges)
        nodes, stages = (_summed(ranks, run.places(kind)) for kind in ("node", "stage"))
    has_ranks = any(Fix.parse(fix).kind == "rank" for fix in possible)
    of_ranks = [str(Fix.numbered("rank", rank)) for rank in _largest(ranks)] if has_ranks else []
    others = [str(Fix.numbered(kind, n)) for kind, of in (("node", nodes), ("stage", stages)) for n in _largest(of)]
    known = [*of_ranks, *(fix for fix in others if fix in possible)]
    return [*known, *(fix for fix in possible if not fix.startswith((*_NAMED, *unasked)))]


def _largest(ns: Mapping[int, float]) -> list[int]:
    return sorted((of for of in ns if ns[of] > 0), key=lambda of: (-ns[of], of))[:_TRIED]


def _of_charges(run: Rerun, charges: pl.DataFrame) -> dict[int, float]:
    """Return how long each rank blocked others, if `LEAST_GAIN` of a step or more: else its fix saves less."""
    sums = charges.group_by("rank").agg(pl.col("blocked_ns").sum()).drop_nulls().iter_rows()
    least = LEAST_GAIN * float(run.lengths_ns[run.judged].sum()) / len(run.nodes)
    return {rank: float(ns) for rank, ns in sums if rank in run.nodes and ns >= least}


def _summed(ns: Mapping[int, float], places: Mapping[int, Iterable[int]]) -> dict[int, float]:
    """Return the values of ranks, by their places."""
    sums: dict[int, float] = {}
    for rank, of_rank in ns.items():
        for place in places.get(rank, ()):
            sums[place] = sums.get(place, 0.0) + of_rank
    return sums


def _longest(run: PipelineRerun) -> tuple[dict[int, float], dict[int, float]]:
    """Return each rank's computation beyond its peers in the other replicas, and each stage's computation."""
    grid = run.grid
    computes = np.isin(grid.kinds, COMPUTES)
    spent = grid.duration_ns[computes].sum(axis=1)  # [op, replica]
    excess = np.maximum(spent - np.median(spent, axis=1, keepdims=True), 0.0)
    ranks, of = np.unique(grid.ranks[computes], return_inverse=True)
    stages, at = np.unique([key.stage for key in grid.keys], return_inverse=True)
    of_stage = np.bincount(at[computes], weights=spent.sum(axis=1), minlength=len(stages))
    of_rank = np.bincount(of.ravel(), weights=excess.ravel())
    return _by(ranks, of_rank), _by(stages, of_stage)


def _by(of: NDArray[np.generic], ns: NDArray[np.generic]) -> dict[int, float]:
    return dict(zip(of.tolist(), ns.tolist(), strict=True))


# ---------------------------------------------------------------- of fixes that say the same the smallest


def _covered(fix: str, worth: Mapping[str, Gain], run: Replay) -> bool:
    """Say whether a fix of fewer of these ranks brings as much, but for the error."""
    ranks, gain = _ranks(fix, run), worth[fix]
    return any(
        0 < len(fewer := _ranks(other, run)) < len(ranks)
        and fewer < ranks
        and gain.gain_ns <= worth[other].gain_ns + max(gain.uncertainty_ns, LEAST_GAIN * run.step_ns)
        for other in worth
    )


def _ranks(fix: str, run: Replay) -> frozenset[int]:
    """Return the ranks whose own time a fix changes; empty if none."""
    parsed = Fix.parse(fix)
    if parsed.kind == "rank":
        return frozenset(parsed.numbers)
    if parsed.kind == "balance":
        return frozenset(run.places("rank"))
    places = run.places(parsed.kind)
    return frozenset(rank for rank in places if {*parsed.numbers} & {*places[rank]})
