"""Views of a Report for its readable forms: parts per rank, extreme ranks, grouped gaps, missing ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rankscope.analysis.model.finding import (
    REST,
    Blame,
    Clock,
    DevicePart,
    Finding,
    GroupState,
    Look,
    NotChecked,
    Part,
    PathPart,
    Report,
)
from rankscope.analysis.model.money import is_standstill
from rankscope.analysis.model.parts import BLOCKED, PART_ORDER
from rankscope.analysis.text.phrases import group_title

__all__ = [
    "Breakdown",
    "GapGroup",
    "breakdown",
    "by_reason",
    "extreme_devices",
    "extreme_ranks",
    "gap_groups",
    "is_healthy",
    "looks_of",
    "main_blames",
    "main_path",
    "marked_ranks",
    "missing_ranks",
    "states_of_findings",
    "status",
    "worst_clocks",
]

_FEW = 8  # causes of waiting, and parts of the critical path, that people are shown
_LEAST_OF_LARGEST = 0.05  # a cause is not shown that is so much less than the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Mean ns per step of each rank, in the order of `parts`; parts that take no time on any rank are left out."""

    parts: tuple[str, ...]
    rows: dict[int, tuple[int, ...]]

    @property
    def sums(self) -> tuple[int, ...]:
        """Per part the sum over the ranks; divided by the number of ranks it is the mean step."""
        return tuple(sum(column) for column in zip(*self.rows.values(), strict=True))

    @property
    def longest_ns(self) -> int:
        return max((sum(row) for row in self.rows.values()), default=0)


def breakdown(parts: Iterable[Part]) -> Breakdown:
    by_rank: dict[int, dict[str, int]] = {}
    for part in parts:
        parts_of_rank = by_rank.setdefault(part.rank, {})
        parts_of_rank[part.part] = parts_of_rank.get(part.part, 0) + part.ns_per_step
    used = {name for parts in by_rank.values() for name, ns in parts.items() if ns}
    order = [*(p for p in PART_ORDER if p in used), *sorted(used - set(PART_ORDER))]
    if not order:
        return Breakdown(parts=(), rows={})
    rows = {rank: tuple(by_rank[rank].get(name, 0) for name in order) for rank in sorted(by_rank)}
    return Breakdown(parts=tuple(order), rows=rows)


def is_of_hosts(report: Report, split: Breakdown) -> bool:
    """Say whether the parts are the hosts' time alone, in which devices may have waited for peers."""
    is_unseen = any(check.detector == "device_time" for check in report.not_checked)
    return is_unseen and not set(split.parts) & set(BLOCKED)  # gloo's hosts wait themselves


def extreme_ranks(split: Breakdown, findings: Sequence[Finding], limit: int) -> list[int]:
    """At most `limit` ranks, sorted: those that findings name, then those whose parts are furthest from the median."""
    medians = [statistics.median(column) for column in zip(*split.rows.values(), strict=True)]
    distance = {
        rank: sum(abs(ns - median) for ns, median in zip(row, medians, strict=True)) for rank, row in split.rows.items()
    }
    named = dict.fromkeys(rank for finding in findings for rank in finding.ranks if rank in split.rows)
    others = sorted((rank for rank in split.rows if rank not in named), key=lambda rank: -distance[rank])
    return sorted([*named, *others][:limit])


def main_blames(blames: Sequence[Blame]) -> list[Blame]:
    """Return the few causes that ranks waited for most, and one for all the rest."""
    if not blames:
        return []
    least = max(_LEAST_OF_LARGEST * blames[0].blocked_ns, 1)
    listed = [blame for blame in blames if blame.rank is not None and blame.blocked_ns >= least][:_FEW]
    rest = [sum(getattr(one, ns) for one in blames if one not in listed) for ns in ("waited_ns", "blocked_ns")]
    if rest[1]:
        listed.append(Blame(rank=None, part=REST, label="", waited_ns=rest[0], blocked_ns=rest[1]))
    return listed


def main_path(path: Sequence[PathPart]) -> list[PathPart]:
    """Return the few parts that make most of the critical path, and one for all the rest."""
    if not path:
        return []
    listed, rest = path[: min(_FEW, len(path) - 1)], path[min(_FEW, len(path) - 1) :]
    return [*listed, replace(path[-1], ns_per_step=sum(part.ns_per_step for part in rest))]


def extreme_devices(device: Sequence[DevicePart], limit: int) -> list[DevicePart]:
    """All devices by rank, or, of more than `limit`, as many of the least and of the most busy."""
    by_busy = sorted(device, key=lambda part: part.busy_ns / max(part.window_ns, 1))
    if len(by_busy) > limit:
        by_busy = [*by_busy[: limit // 2], *by_busy[-(limit // 2) :]]
    return sorted(by_busy, key=lambda part: part.rank)


def worst_clocks(clocks: Sequence[Clock], limit: int) -> list[Clock]:
    """All clocks by node, or, of more than `limit`, those with the largest errors; unknown is larger than any."""
    worst = sorted(clocks, key=lambda clock: (clock.error_ns is not None, -(clock.error_ns or 0), clock.node))
    return sorted(worst[:limit], key=lambda clock: clock.node)


def marked_ranks(report: Report) -> tuple[int, frozenset[int]]:
    """Return the number (from 1) and ranks of the first finding that names some ranks but not all.

    (0, none) if none does.
    """
    for number, finding in enumerate(report.findings, 1):
        if finding.ranks and set(finding.ranks) < set(report.ranks):
            return number, frozenset(finding.ranks)
    return 0, frozenset()


def missing_ranks(report: Report) -> list[int]:
    """Ranks of the job that left no record."""
    return sorted(set(range(report.world_size or 0)) - set(report.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GapGroup:
    """Gaps of one table with one reason; `count` is None if one of them could not be counted."""

    table: str
    why: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    count: int | None


def gap_groups(report: Report) -> list[GapGroup]:
    grouped: dict[tuple[str, str], list[int]] = {}
    for i, gap in enumerate(report.gaps):
        grouped.setdefault((gap.table, gap.why), []).append(i)
    groups = []
    for (table, why), members in grouped.items():
        gaps = [report.gaps[i] for i in members]
        counts = [gap.count for gap in gaps if gap.count is not None]
        groups.append(
            GapGroup(
                table=table,
                why=why,
                ranks=_known(gap.rank for gap in gaps),
                nodes=_known(gap.node for gap in gaps if gap.rank is None),
                count=sum(counts) if len(counts) == len(gaps) else None,
            )
        )
    return groups


def by_reason(not_checked: Sequence[NotChecked]) -> dict[str, list[str]]:
    """Return the detectors that were not asked, by the reason."""
    found: dict[str, list[str]] = {}
    for one in not_checked:
        found.setdefault(one.why, []).append(one.detector)
    return found


def states_of_findings(report: Report) -> list[GroupState]:
    """Return the states in the groups in which ranks that hang the job are behind or held.

    All, where no finding names one.
    """
    named = {rank for finding in report.findings if is_standstill(finding) for rank in finding.ranks}
    roles = {group for finding in report.findings if is_standstill(finding) for group in finding.groups}
    titles = (*roles, *(group_title(name, "") for name in roles))
    theirs = {state.group for state in report.states if state.rank in named and state.group.startswith(titles)}
    return [state for state in report.states if state.group in theirs] or list(report.states)


def _known(numbers: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number is not None}))


def looks_of(report: Report) -> tuple[Look, ...]:
    """Phases of the run that are not as those steps which were judged."""
    return report.history.looks if report.history else ()


def is_healthy(report: Report) -> bool:
    """Say whether the tables show that little is lost, and in no phase of the run."""
    return status(report) == "green"


def status(report: Report) -> str:
    """Return the headline's color.

    "green", "amber" or "red"; never green where other steps of the run show something else.
    """
    return "amber" if report.status == "green" and looks_of(report) else report.status
