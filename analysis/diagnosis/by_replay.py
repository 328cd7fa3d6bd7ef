"""The root cause by replay where ranks wait, steps are few, and no check names the rank that they wait for.

Of few steps a check must exclude chance by single operations: of a stall that comes once in each of them there are as
many as steps. That a replay with this rank's own time like that of its peers is clearly shorter, and with no other
rank's nearly as much, is evidence of another sort. So it is of a node, of which no rank by itself brings as much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, longest_rows, severity, spec_of
from rankscope.analysis.detectors.slow_rank.wording import advice_on
from rankscope.analysis.diagnosis.verdict import LIKELY
from rankscope.analysis.metrics.step_matrix import StepGrid, above_peers, own_by_label, step_grid
from rankscope.analysis.model.finding import Finding, PredictedFix
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.parallelism import may_be_stages, roles_of

__all__ = ["blamed_by_replay"]

_MOST_STEPS = 2 * ENOUGH_STEPS  # with more, steps show by themselves what is not chance
_LEAST = 0.03  # share of the step that it must bring, as of a slow rank otherwise
_STANDS_OUT = 1.5  # times what any other rank would bring


def blamed_by_replay(
    fixes: Callable[[], Sequence[PredictedFix]], findings: Sequence[Finding], tables: Mapping[str, pl.DataFrame]
) -> Finding | None:
    """Return the finding of the rank whose fix brings most, as likely; None where there is none, or one is known."""
    grid = step_grid(tables["breakdown"])
    if not 1 < len(grid.steps) < _MOST_STEPS or any(_explains_waits(finding) for finding in findings):
        return None
    if may_be_stages(tables["collectives"], grid.step_ns * len(grid.steps)):
        return None
    units = sorted((fix for fix in fixes() if _unit_of(fix) is not None), key=lambda fix: -fix.gain_ns)
    if not units:
        return None
    best, (kind, number) = units[0], _unit_of(units[0]) or ("", 0)
    is_alone = all(best.gain_ns >= _STANDS_OUT * other.gain_ns for other in units[1:])
    of_unit = tables["ranks"].filter(pl.col(kind) == number)["rank"].to_list()
    ranks = tuple(rank for rank in grid.ranks if rank in of_unit)
    if not ranks or best.gain_fraction < _LEAST or not is_alone:
        return None
    cost = duration(best.gain_ns)
    named = text("Rank {rank}", rank=number) if kind == "rank" else text("Node {node}", node=number)
    return Finding(
        detector="slow_rank",
        severity=severity(best.gain_fraction),
        title=text(
            "{named} makes steps {cost} longer: a replay in which it takes no longer than its peers saves as much",
            named=named,
            cost=cost,
        ),
        where=_where(ranks[0], grid, tables),
        advice=advice_on(ranks),
        ranks=ranks,
        nodes=(number,) if kind == "node" else (),
        fix=best.fix,
        confidence=LIKELY,
        evidence=longest_rows(tables["steps"].filter(pl.col("rank").is_in(ranks)), "steps"),
        lost_ns_per_step=best.gain_ns,
        lost_ns_total=best.gain_ns * len(grid.steps),
        lost_fraction=best.gain_fraction,
        uncertainty_ns=best.uncertainty_ns,
        gain_fraction=best.gain_fraction,
        gain_uncertainty_fraction=best.uncertainty_ns / grid.step_ns,
    )


def _unit_of(fix: PredictedFix) -> tuple[str, int] | None:
    """Return what the fix is of, where that is a single rank or node."""
    one = Fix.parse(fix.fix)
    return (one.kind, one.numbers[0]) if one.kind in ("rank", "node") and len(one.numbers) == 1 else None


def _explains_waits(finding: Finding) -> bool:
    """Say whether it explains why ranks wait for each other."""
    spec = spec_of(finding.detector)
    return "wait" in spec.lost_as and not spec.slows_all_alike


def _where(rank: int, grid: StepGrid, tables: Mapping[str, pl.DataFrame]) -> str:
    """Return the label under which the rank's own time is longest beyond that of its peers."""
    role = roles_of(grid.ranks, *(tables.get(name) for name in ("groups", "regions", "collectives")))
    row = grid.ranks.index(rank)
    excess = {
        label: float(above_peers(values, role)[row].mean())
        for label, values in own_by_label(tables["phases"], grid).items()
    }
    return max(excess, key=lambda label: excess[label], default="the step")
