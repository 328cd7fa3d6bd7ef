"""Of few steps: ranks that single operations are charged to, and the places where they lose the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors.slow_rank.shape import Slow
from rankscope.analysis.metrics.step_matrix import Floats, Ints, StepGrid, above_peers, estimate
from rankscope.analysis.metrics.stragglers import Charged, charged, stragglers
from rankscope.analysis.metrics.wait_attribution import delays
from rankscope.analysis.model.kernels import COMMUNICATION, COMPUTE, MEMORY
from rankscope.analysis.model.parts import IDLE_LABELS
from rankscope.analysis.timeline.parallelism import wait_by_design

__all__ = ["charged_operations", "latecomer", "no_more_than_late", "nodes_by_rank", "places_of"]

# Regions that other detectors judge, or that follow from others.
_NOT_OWN = ("wait", "gc", "input", "compile", "checkpoint")
_VAGUE = (*IDLE_LABELS, COMMUNICATION, COMPUTE, MEMORY)  # labels that name no place in the program


def charged_operations(
    phases: pl.DataFrame, collectives: pl.DataFrame, grid: StepGrid, ranks: pl.DataFrame
) -> tuple[Charged | None, list[tuple[int, ...]]]:
    """Return which rank made others wait in each operation, and the nodes of several ranks; nothing of a pipeline.

    There ranks wait for their neighbours by design.
    """
    judged_ns = grid.step_ns * len(grid.steps)
    if wait_by_design(collectives, judged_ns):
        return None, []
    node_of = nodes_by_rank(ranks)
    units: dict[int, list[int]] = {}  # node -> rows of the grid
    for row, rank in enumerate(grid.ranks):
        if rank in node_of:
            units.setdefault(node_of[rank], []).append(row)
    costs = delays(phases, collectives)
    several = [tuple(units[node]) for node in sorted(units) if len(units[node]) > 1]
    return charged(costs, phases, collectives, grid), several


def latecomer(
    seen: Charged | None,
    units: Sequence[tuple[int, ...]],
    by_label: dict[str, Floats],
    node_of: dict[int, int],
    *,
    any_several: bool,
) -> list[Slow]:
    """Return the rank, or ranks, that operations are charged to more than chance makes any rank, if there is one."""
    late = None if seen is None else stragglers(seen, units, any_several=any_several)
    if late is None or seen is None:
        return []
    row = late.rows[0]
    share = {label: float(values[row].sum()) for label, values in by_label.items()}
    where = max(share, key=lambda label: share[label], default="the step")
    nodes = {node_of.get(seen.grid.ranks[row], -1) for row in late.rows}
    is_node = late.rows in units and len(nodes) == 1 and -1 not in nodes
    return [
        Slow(
            *(late.rows, late.per_step, late.when, late.cost, where),
            nodes=tuple(nodes) if is_node else (),
            last=(late.charged, late.operations),
            chance=late.chance,
        )
    ]


def no_more_than_late(slow: Slow, margin: Floats) -> Slow:
    """Return the rank with what it costs, which is no more than what it was late."""
    late = estimate(margin[slow.rows[0]])
    return replace(slow, lost=min(slow.lost, late, key=lambda bound: bound.ns)) if slow.when.all() else slow


def nodes_by_rank(ranks: pl.DataFrame) -> dict[int, int]:
    return dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())


def places_of(slow: Slow, grid: StepGrid, role: Ints, regions: pl.DataFrame | None) -> str:
    """Return the place on the device, and the regions that take the host much longer than its peers each step."""
    if regions is None:
        return slow.where
    row = slow.rows[0]
    rank, length = grid.ranks[row], pl.col("end_ns") - pl.col("start_ns")
    rows = regions.filter(pl.col("rank").is_in(grid.ranks), pl.col("step").is_in(grid.steps))
    rows = rows.filter(~pl.col("kind").is_in(_NOT_OWN))
    much = rows.filter(pl.col("rank") == rank).group_by("name").agg(length.sum())
    names = much.filter(pl.col("end_ns") >= slow.lost.ns / 2 * len(grid.steps))["name"]
    longer: dict[str, pl.DataFrame] = {}
    for (name,), of_name in rows.filter(pl.col("name").is_in(names.implode())).group_by("name"):
        values = np.zeros((len(grid.ranks), len(grid.steps)))
        index = (np.searchsorted(grid.ranks, of_name["rank"]), np.searchsorted(grid.steps, of_name["step"]))
        np.add.at(values, index, of_name.select(length).to_series().to_numpy())
        if (above_peers(values, role)[row][slow.when] >= slow.lost.ns / 2).all():
            longer[str(name)] = of_name.filter(pl.col("rank") == rank)
    inner = sorted(longer, key=lambda name: (longer[name].select(length.sum()).item(), name))
    places = [name for i, name in enumerate(inner) if not any(_holds(longer[name], longer[o]) for o in inner[:i])]
    return ", ".join(dict.fromkeys([*places, slow.where] if slow.where in _VAGUE else [slow.where, *places]))


def _holds(outer: pl.DataFrame, inner: pl.DataFrame) -> bool:
    """Say whether each of the inner spans lies within one of the outer ones."""
    starts = outer.sort("start_ns")
    at = np.searchsorted(starts["start_ns"], inner["start_ns"], side="right") - 1
    return bool((at >= 0).all() and (starts["end_ns"].to_numpy()[at] >= inner["end_ns"].to_numpy()).all())
