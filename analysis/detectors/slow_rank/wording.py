"""The findings of the straggler in words."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import price
from rankscope.analysis.detectors.slow_rank.late_by_durations import Late, WaitedFor, guilty_layer, paced_ranks
from rankscope.analysis.detectors.slow_rank.shape import Slow, Steps
from rankscope.analysis.metrics.step_matrix import TRIM, Floats, StepGrid, estimate
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.text.message import Text, plural, text
from rankscope.analysis.text.phrases import every_nth, how_to_profile, named
from rankscope.analysis.text.units import duration, percent

__all__ = ["advice_on", "finding_of", "late_finding"]


def finding_of(grid: StepGrid, slow: Slow, steps: pl.DataFrame) -> Finding:
    """Return the finding of ranks that take longer, or that come late by single operations."""
    ranks = tuple(grid.ranks[row] for row in slow.rows)
    shown = tuple(np.array(grid.steps)[slow.when].tolist())
    costs = price(grid, slow.lost)
    how = text("longer than its peers") if slow.last is None else text("late in its collectives, added up")
    return Finding(
        detector="slow_rank",
        title=_title(ranks, slow, shown),
        where=slow.where,
        advice=advice_on(ranks),
        ranks=ranks,
        nodes=slow.nodes,
        steps=() if slow.when.all() else shown,
        chance=slow.chance,
        fix=_fix(ranks, slow),
        evidence=_typical_step(grid, ranks[0], slow.excess, slow.when, steps, how),
        **costs,
    )


def advice_on(ranks: tuple[int, ...]) -> Text:
    """Return the advice on these ranks, if it is unknown whether their host or their GPU is slow."""
    return plural(
        "See what only {ranks} does there. Compare the host with the others: clock speed, "
        "temperature, other processes, CPU pinning.",
        "See what only {ranks} do there. Compare their hosts with the others: clock speed, "
        "temperature, other processes, CPU pinning.",
        len(ranks),
        ranks=named("rank", ranks),
    )


def late_finding(waited_for: WaitedFor, late: Late, steps: pl.DataFrame, proxies: pl.DataFrame | None) -> Finding:
    """Return the finding of ranks that come late by NCCL's durations."""
    grid = waited_for.grid
    shown = tuple(np.array(grid.steps)[late.when].tolist())
    layer = guilty_layer(late, grid, proxies)
    pace = paced_ranks(waited_for.collectives, late.ranks)
    where = {"GPU": text("before collectives, on its GPU"), "host": text("before collectives, on its host")}
    if late.factor is None:
        place = where.get(layer, text("before collectives"))
        advice = plural(
            "See what only {ranks} does before its collectives, in a profiled window ({how}). Compare "
            "its GPU (clocks, temperature, throttling) and its host with the others.",
            "See what only {ranks} do before their collectives, in a profiled window ({how}). Compare "
            "their GPUs (clocks, temperature, throttling) and their hosts with the others.",
            len(late.ranks),
            ranks=named("rank", late.ranks),
            how=how_to_profile(),
        )
    else:
        place = text("all that it computes")
        advice = text(
            "Compare the GPU of {ranks} with the others: clocks, temperature, power limit, what else runs on it. Swap "
            "two hosts: what stays with the rank is its work, what moves with the host is the machine.",
            ranks=named("rank", late.ranks),
        )
    return Finding(
        detector="slow_rank",
        title=_late_title(late, layer, has_pace=bool(pace)),
        where=place,
        advice=advice,
        ranks=late.ranks,
        nodes=() if late.node is None else (late.node,),
        steps=() if late.when.all() else shown,
        fix=f"rank:{','.join(map(str, pace))}" if pace else None,
        gain_why=text("what the others computed while they waited was not recorded"),
        evidence=_typical_step(grid, late.ranks[0], late.excess, late.when, steps, text("that others waited for it")),
        **price(grid, late.cost),
    )


def _late_title(late: Late, layer: str, *, has_pace: bool) -> str:
    """Return the title; in a pipeline, which `has_pace`, not all that others wait makes the step longer."""
    who = text("Node {node}", node=late.node) if late.node is not None else named("Rank", late.ranks)
    count = 1 if late.node is not None else len(late.ranks)
    said = {"who": who, "last": late.last, "operations": late.operations}
    if late.factor is not None:
        return plural(
            "{who} takes {longer} longer for all that it computes, and begins {last} of {operations} collectives last",
            "{who} take {longer} longer for all that they compute, and begin {last} of {operations} collectives last",
            count,
            longer=percent(late.factor - 1),
            **said,
        )
    cost = _between(late.cost.ns, late.most_ns)
    of_them = plural("others wait {cost} per step for it", "others wait {cost} per step for them", count, cost=cost)
    layers = {"GPU": text("its GPU begins"), "host": text("its host begins")}
    return plural(
        "{who} is late: {begins} {last} of {operations} collectives last, {what}",
        "{who} are late: {begins} {last} of {operations} collectives last, {what}",
        count,
        begins=layers.get(layer, plural("it begins", "they begin", count)),
        what=of_them if has_pace else text("at a cost of {cost} per step", cost=cost),
        **said,
    )


def _fix(ranks: tuple[int, ...], slow: Slow) -> str:
    if slow.nodes and slow.last is None:
        return f"node:{slow.nodes[0]}"
    return f"rank:{','.join(map(str, ranks))}"


def _title(ranks: tuple[int, ...], slow: Slow, steps: tuple[int, ...]) -> str:
    subject = text("Node {node}", node=slow.nodes[0]) if slow.nodes else text("Rank {rank}", rank=ranks[0])
    if slow.last is not None:
        last, operations = slow.last
        if not slow.when.all():
            return plural(
                "{subject} arrives late in {steps}: the others wait {cost} or more there for it",
                "{subject} arrive late in {steps}: the others wait {cost} or more there for them",
                1 if slow.nodes else len(ranks),
                subject=subject if slow.nodes else named("Rank", ranks),
                steps=named("step", steps),
                cost=duration(slow.lost.ns * len(slow.when)),
            )
        return plural(
            "{subject} arrives late: the others wait {cost} or more per step for it, in {last} of {operations} "
            "collectives",
            "{subject} arrive late: the others wait {cost} or more per step for them, in {last} of {operations} "
            "collectives",
            1 if slow.nodes else len(ranks),
            subject=subject if slow.nodes else named("Rank", ranks),
            cost=duration(slow.lost.ns),
            last=last,
            operations=operations,
        )
    longer = duration(estimate(slow.excess[slow.when], TRIM).ns)  # which is not all lost
    often = text("per step") if slow.when.all() else every_nth(steps, len(slow.when))
    if len(ranks) == 1:
        return text(
            "{subject} is slow: it computes {time} longer {often} than its peers",
            subject=subject,
            time=longer,
            often=often,
        )
    if not slow.nodes:
        return text(
            "{ranks} are slow: they compute {time} longer {often} than their peers",
            ranks=named("Rank", ranks),
            time=longer,
            often=often,
        )
    return text(
        "{subject} is slow: {ranks} compute {time} longer {often} than their peers",
        subject=subject,
        ranks=named("rank", ranks),
        time=longer,
        often=often,
    )


def _between(least_ns: float, most_ns: float) -> str:
    least, most = duration(least_ns), duration(most_ns)
    return least if least == most else text("{least} to {most}", least=least, most=most)


def _typical_step(
    grid: StepGrid, rank: int, excess: Floats, when: Steps, steps: pl.DataFrame, how: str
) -> tuple[Evidence, ...]:
    """Return the step with the median excess among those where it shows."""
    among = np.flatnonzero(when)
    column = among[np.argsort(excess[among])[len(among) // 2]]
    step = grid.steps[column]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step") == step)
    note = text("step {step}: {excess} {how}", step=step, excess=duration(excess[column]), how=how)
    return tuple(
        Evidence(table="steps", rank=rank, start_ns=start, end_ns=end, note=note)
        for start, end in rows.select("start_ns", "end_ns").iter_rows()
    )
