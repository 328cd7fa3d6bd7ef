"""Run every detector on the tables: each has findings, finds nothing, or is not checked, with the reason."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeVar

import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, FEW_STEPS, detectors, refuse_unseen
from rankscope.analysis.diagnosis.operations import CHECKS
from rankscope.analysis.diagnosis.pieces import BUBBLES, STAGES, UNEVEN
from rankscope.analysis.metrics.step_matrix import step_grid
from rankscope.analysis.model.finding import (
    Finding,
    Healthy,
    NotChecked,
)
from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.progress import told
from rankscope.analysis.timeline.parallelism import roles
from rankscope.collectors.schema import LEFT_OFF, P2P_OPS
from rankscope.errors import NotResolvable

__all__ = ["ask", "least_fraction", "waits_unseen"]

_Answer = TypeVar("_Answer")

_Check = tuple[Callable[..., list[Finding]], Callable[..., int]]
Tables = Mapping[str, pl.DataFrame]

_SHOW_WAITS = ("collectives", "backward")  # collectors: without one of them a rank seems to compute while it waits


def ask(
    modules: Mapping[str, ModuleType],
    tables: Tables,
    said: pl.DataFrame,
    reasons: Mapping[str, str],
) -> tuple[list[Finding], list[Healthy], list[NotChecked]]:
    """Run every detector: each ends in findings, or in healthy, or in not checked with the reason.

    `reasons` says why a table that is missing or empty is so. One whose parameter is named after another detector is
    asked after that one, and gets its findings.
    """
    findings: list[Finding] = []
    healthy: list[Healthy] = []
    not_checked: list[NotChecked] = []
    unseen = {name: why for name, why in reasons.items() if name not in tables}
    switched_off = _switched_off(said)
    if _compares_ranks(tables) and tables["collectives"].is_empty():
        unseen["collectives"] = reasons["collectives"]  # so they wait for each other in what looks like computing
    answers: dict[str, list[Finding] | NotChecked] = {}
    for name in told(text("checks"), _in_order(modules), len(modules)):
        module = modules[name]
        of_ops = _of_ops(name, tables)
        detect, resolution = of_ops or (module.detect, None)
        try:
            answers[name] = found = _with_tables(detect, tables, reasons, answers)
            findings += found
            blind = None if of_ops else _blind(name, module, tables, switched_off, unseen)
            if blind:
                not_checked.append(blind)
            elif not found:
                resolution_ns = _with_tables(resolution or module.resolution_ns, tables, reasons)
                if module.detector.per_rank and not of_ops:
                    _with_tables(refuse_unseen, tables, reasons)
                healthy.append(Healthy(detector=name, resolution_ns=resolution_ns))
        except NotResolvable as reason:
            refused = NotChecked(detector=name, why=reason.args[0], unclear=reason.unclear)
            blind = None if of_ops else _blind(name, module, tables, switched_off, unseen)
            unchecked = answers[name] = blind or refused
            not_checked.append(unchecked)
        except Exception as error:  # one broken detector must not take the others' findings away
            why = text("the detector failed: {kind}: {error}", kind=type(error).__name__, error=error)
            print(f"rankscope: detector '{name}': {why}", file=sys.stderr)
            unchecked = answers[name] = NotChecked(detector=name, why=why, unclear=True)
            not_checked.append(unchecked)
    return findings, healthy, not_checked


def waits_unseen(tables: Tables, said: pl.DataFrame) -> bool:
    """Say whether ranks may wait for each other in what looks like computing, since what would show it is missing."""
    is_off = _switched_off(said)["source"].is_in(_SHOW_WAITS).any()
    return _compares_ranks(tables) and (tables["collectives"].is_empty() or is_off)


def least_fraction(name: str, tables: Tables) -> float:
    """Return the share of the step from which on a detector reports, as it judges this source."""
    detect, _ = _of_ops(name, tables) or (detectors()[name].detect, None)
    return float(inspect.signature(detect).parameters["min_fraction"].default)


def _switched_off(said: pl.DataFrame) -> pl.DataFrame:
    """Return the collectors that were off, of the gaps that a run has recorded."""
    off = said.filter(pl.col("table") == "*", pl.col("count").is_null())
    return off.unique(["rank", "node", "source", "why"], maintain_order=True)


def _compares_ranks(tables: Tables) -> bool:
    return "breakdown" in tables and tables["breakdown"]["rank"].n_unique() > 1


def _of_ops(name: str, tables: Tables) -> _Check | None:
    """Return how a detector judges a source that lacks what it needs.

    Such a source has operations of a pipeline and nothing of what the hosts did; or kernels in a few steps, or of a
    pipeline's stages without their operations.
    """
    has = {table: table in tables and not tables[table].is_empty() for table in ("ops", "breakdown", "kernels")}
    if has["ops"] and not has["breakdown"]:
        return CHECKS.get(name)
    if not has["kernels"] or not has["breakdown"]:
        return None
    of_stages: dict[str, _Check] = {"stage_imbalance": STAGES, "pipeline_bubble": BUBBLES}
    if name in of_stages and not has["ops"] and _has_stages(tables):
        return of_stages[name]
    steps = len(step_grid(tables["breakdown"]).steps)
    is_named = steps >= ENOUGH_STEPS and bool((tables["phases"]["label"] == "forward").any())
    return UNEVEN if name == "load_imbalance" and steps >= FEW_STEPS and not is_named else None


def _has_stages(tables: Tables) -> bool:
    """Say whether ranks send to each other, or hang together as stages of a pipeline do."""
    groups, regions, collectives = (tables[name] for name in ("groups", "regions", "collectives"))
    return bool(collectives["op"].is_in(P2P_OPS).any()) or len(roles(groups, regions, collectives)) > 0


def _in_order(modules: Mapping[str, ModuleType]) -> list[str]:
    """Return the detectors' names, each after those whose findings it takes, else as they are."""
    placed: list[str] = []

    def place(name: str) -> None:
        if name not in placed:
            for other in inspect.signature(modules[name].detect).parameters:
                if other in modules:
                    place(other)
            placed.append(name)

    for name in modules:
        place(name)
    return placed


def _with_tables(
    function: Callable[..., _Answer],
    tables: Tables,
    reasons: Mapping[str, str],
    answers: Mapping[str, object] | None = None,
) -> _Answer:
    """Call a detector's function with the tables that its parameters name; those with a default may be missing.

    And with the `answers` of the detectors that they name.
    """
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    there: dict[str, object] = {p.name: answers[p.name] for p in wanted if answers and p.name in answers}
    there |= {p.name: tables[p.name] for p in wanted if p.name in tables and not tables[p.name].is_empty()}
    for p in wanted:
        if p.name not in there and p.default is inspect.Parameter.empty:
            raise NotResolvable(reasons.get(p.name, text("the table '{name}' was not recorded", name=p.name)))
    return function(**there)


def _blind(
    name: str, module: ModuleType, tables: Tables, switched_off: pl.DataFrame, unseen: Mapping[str, str]
) -> NotChecked | None:
    """Return why a detector may have overlooked something: a collector it needs was off, or the source lacks it.

    One that the user left off makes nothing unclear, unless ranks seem to compute without it while they wait.
    """
    off = switched_off.filter(pl.col("source").is_in(module.detector.needs)) if len(switched_off) else switched_off
    if off.is_empty():
        lacking = next((table for table in module.detector.needs if table in unseen), None)
        if lacking is None:
            return None
        return NotChecked(detector=name, why=unseen[lacking], unclear=lacking == "collectives")
    ranks = off["rank"].drop_nulls().unique().sort().to_list()
    where = text(" on {ranks}", ranks=named("rank", ranks)) if ranks else ""
    source, why = off["source"][0], Text(off["why"][0], {})
    why = text("collector {collector}{where}: {why}", collector=source, where=where, why=why)
    hides_waits = _compares_ranks(tables) and off["source"].is_in(_SHOW_WAITS).any()
    return NotChecked(detector=name, why=why, unclear=hides_waits or (off["why"] != LEFT_OFF).any())
