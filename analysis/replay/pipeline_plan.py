"""Predicts a step whose operations take other times.

A `Plan` says what waits for what, once for all steps; `replay` runs it on whole arrays of durations, one lane per
step and replica. Waiting is never an input: communication enters as transfer alone, and the waits come out again.

Source: dPRO, Lumos, and ByteDance's what-if analysis of stragglers, whose definitions of ideal, slowdown and share
are kept: on its published trace the figures agree to 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.analysis.text.message import text
from rankscope.errors import NotReplayable

__all__ = ["Group", "Plan", "WhatIf", "ends", "ideal", "plan", "replay", "step_ns", "transfers"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that transfer together: none moves data before the last has started.

    With `across_replicas` the group is the same operations of all replicas.
    """

    members: tuple[int, ...]
    across_replicas: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Dependencies: `before[op]` must have ended before `op` starts; `order` is a topological order.

    An operation without a transfer is a group of its own.
    """

    before: tuple[tuple[int, ...], ...]
    order: tuple[Group, ...]


def plan(before: Mapping[int, Iterable[int]], groups: Iterable[Group], ops: int) -> Plan:
    """Return a plan of `ops` operations, numbered from 0.

    Raises `NotReplayable` if they wait for each other in a circle.
    """
    group_of = {op: group for group in groups for op in group.members}
    all_groups = list(dict.fromkeys(group_of.get(op, Group((op,))) for op in range(ops)))
    number = {op: i for i, group in enumerate(all_groups) for op in group.members}
    waits: list[set[int]] = [set() for _ in all_groups]
    followers: list[set[int]] = [set() for _ in all_groups]
    for op, earlier in before.items():
        for other in earlier:
            waits[number[op]].add(number[other])
            followers[number[other]].add(number[op])
    ready = [i for i, waiting in enumerate(waits) if not waiting]
    order: list[Group] = []
    while ready:
        done = ready.pop()
        order.append(all_groups[done])
        for follower in followers[done]:
            waits[follower].discard(done)
            if not waits[follower]:
                ready.append(follower)
    if len(order) < len(all_groups):
        raise NotReplayable(text("{n} operations wait for each other in a circle", n=len(all_groups) - len(order)))
    return Plan(tuple(tuple(dict.fromkeys(before.get(op, ()))) for op in range(ops)), tuple(order))


def replay(plan: Plan, duration_ns: Floats) -> tuple[Floats, Floats]:
    """Start and end of every operation, as [op, step, replica] like `duration_ns`; each step starts at 0.

    An operation starts when all it waits for have ended. It ends its duration after it started, or after the last
    of its group did.
    """
    start, end = np.zeros_like(duration_ns), np.empty_like(duration_ns)
    for group in plan.order:
        for op in group.members:
            before = plan.before[op]
            if before:
                start[op] = end[before[0]]
                for other in before[1:]:
                    np.maximum(start[op], end[other], out=start[op])
        last = start[group.members[0]]
        for op in group.members[1:]:
            last = np.maximum(last, start[op])
        if group.across_replicas:
            last = last.max(axis=1, keepdims=True)
        for op in group.members:
            np.add(last, duration_ns[op], out=end[op])
    return start, end


def transfers(plan: Plan, start_ns: Floats, end_ns: Floats) -> Floats:
    """Each operation's own time: without the wait for the others of its group. Never negative."""
    began = start_ns.copy()
    for group in plan.order:
        if len(group.members) > 1 or group.across_replicas:
            members = list(group.members)
            last = start_ns[members].max(axis=0)
            began[members] = last.max(axis=1, keepdims=True) if group.across_replicas else last
    own: Floats = np.maximum(end_ns - began, 0.0)
    return own


def ends(plan: Plan, duration_ns: Floats) -> Floats:
    """Return when each step ends, its start being 0: one value per step."""
    longest: Floats = replay(plan, duration_ns)[1].max(axis=(0, 2))
    return longest


def step_ns(plan: Plan, duration_ns: Floats) -> float:
    """Return the mean length of a step."""
    return float(ends(plan, duration_ns).mean())


def ideal(duration_ns: Floats, kinds: Sequence[str], communicates: Callable[[str], bool]) -> Floats:
    """Every operation takes what is usual for its kind: the mean of a computation, the median of a communication."""
    usual = np.empty_like(duration_ns)
    for kind in dict.fromkeys(kinds):
        rows = [i for i, k in enumerate(kinds) if k == kind]
        usual[rows] = np.median(duration_ns[rows]) if communicates(kind) else duration_ns[rows].mean()
    return usual


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Two replays of the same plan: with the durations as measured, and with the ideal ones."""

    plan: Plan
    actual_ns: Floats
    ideal_ns: Floats

    @property
    def actual_step_ns(self) -> float:
        return step_ns(self.plan, self.actual_ns)

    @property
    def ideal_step_ns(self) -> float:
        return step_ns(self.plan, self.ideal_ns)

    @property
    def slowdown(self) -> float:
        """S: how many times longer the steps are than ideal ones."""
        return self.actual_step_ns / self.ideal_step_ns

    def only_ns(self, chosen: Bools) -> Floats:
        """Length of each step if only the chosen operations took as long as they did, all others being ideal."""
        return ends(self.plan, np.where(chosen, self.actual_ns, self.ideal_ns))

    def without_ns(self, chosen: Bools) -> Floats:
        """Length of each step if the chosen operations were ideal, all others as they were."""
        return ends(self.plan, np.where(chosen, self.ideal_ns, self.actual_ns))

    def share(self, chosen: Bools) -> float:
        """M: what making the chosen operations ideal saves, as a share of what making all ideal saves.

        It exceeds 1 where the others stay below the ideal, which is the mean.
        """
        actual = self.actual_step_ns
        return (actual - float(self.without_ns(chosen).mean())) / (actual - self.ideal_step_ns)
