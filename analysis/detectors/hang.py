"""The job hangs: some ranks do not reach an operation, or do not finish one, and all others wait.

**Signal.** Each rank's oldest operation that has not ended is what holds it. In that operation it waits for the
members of the group that have not enqueued it, or have but are held by something older themselves; it does not wait
for those that have finished it or are in it too. Ranks that others wait for, directly or through others, and that wait
for no other themselves, are the root cause:

- nothing outstanding: the host does not reach the next operation;
- held in an operation that others have finished: the device, or its link, does not finish it;
- all ranks in the same operation, and none finishes it: the transport, or a desync if they do not do the same thing,
  with the same data type and, where the operation asks for it, as many bytes.

In a recorded run an operation counts only if the job hung for 10 s and for 5 steps at its end; 1 s and 5 steps are
enough where an operation that needs all its ranks ended though one never reached it: it failed. Ranks that wait for
each other in a circle are a deadlock; one that is alone in its operation, against several in another, is named. A
pipeline neighbour of a hung rank is behind in its counters too; it is not the root cause, since it waits itself.

NCCL's operations have no ends in a recording. Node 0's agent asks NCCL's RAS when the job hangs: where it says
that ranks have launched less than others, or do not answer, operations that not all members have called count as
outstanding, and what it said is among the evidence. A process that does not answer is the root cause
if there is no other.

**Why it costs time.** Nothing is computed until the watchdog ends the job, and a restart costs the work since the last
checkpoint. There is no cost per step; `lost_fraction` is 1.

**False positives.** A flight recorder's dump of a job that runs looks like a very short hang. By the date of its file
it is recognized: where a rank began or ended an operation in the 10 s before, only a desync is reported. A copy without
the date is not. Where a rank died first the others wait for it, and that is `rank_failure`. A state that was saved but
cannot be read says nothing: no rank is named for it. A rank that left no state is named only where nothing else
explains the hang, and then at the level likely, with severity medium; and not where those of most ranks are missing.

**What to try.** Look at the stacks of the named ranks (`rankscope trigger RUN --stacks`), their kernel log and device
errors, and at what RAS said (`run/ras.txt`). If the host has nothing outstanding: data loading, checkpointing, a lock,
an exception on one rank. If the device does not finish: hardware, or a kernel that does not end. Where ranks do
different things: a branch that depends on the rank.

**Source.** PyTorch's flight recorder analyser compares sequence numbers per group and stops there; following waits
across groups spares the healthy neighbours. NCCL user guide, "RAS".
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from rankscope.analysis.metrics.desync import Done, apart
from rankscope.analysis.model.finding import Evidence, Finding, NotChecked
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import joined, plural, text
from rankscope.analysis.text.phrases import NO_ROLES, counted, group_title, named
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.nccl_ras import SILENT
from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import NO_PEER, P2P_OPS
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    judges_speed=False,
)

_SILENT_ADVICE = text("See whether the process is stopped or has ended, and whether its node can be reached.")
_ALIVE_NS = 10_000_000_000  # a job of which an operation began or ended this short before its state was saved
_COUNTERPART = {"send": ("recv", "recv_any_source"), "recv": ("send",), "recv_any_source": ("send",)}


@dataclass(frozen=True, slots=True)
class _Group:
    """A process group: `name` is what says what it is for, else its own name; `title` says that it is a group."""

    id: int
    name: str
    title: str
    members: tuple[int, ...]
    p2p: bool  # its numbers count point-to-point operations


@dataclass(frozen=True, slots=True)
class _Count:
    """A rank's numbers in a group; -1: none."""

    enqueued: int
    completed: int


@dataclass(frozen=True, slots=True)
class _Held:
    """The oldest operation of a rank that has not ended."""

    group: _Group
    seq: int
    op: str
    peer: int
    dtype: str | None
    size_bytes: int | None
    start_ns: int
    started: bool | None

    def is_same(self, other: _Held) -> bool:
        return (
            self.group.id == other.group.id and self.seq == other.seq and (self.op in P2P_OPS) == (other.op in P2P_OPS)
        )

    def __str__(self) -> str:
        return text("{op} number {seq} of {name}", op=self.op, seq=self.seq, name=self.group.title)


@dataclass(frozen=True, slots=True)
class _State:
    """All states that were saved and could be read."""

    members: Mapping[int, tuple[int, ...]]  # by group
    held: Mapping[int, _Held]
    counts: Mapping[int, Mapping[int, _Count]]  # rank, group
    unread: frozenset[tuple[int, int]]  # rank, group: saved, but damaged
    quiet_ns: int | None  # how long before its state was saved the rank that was busy last began or ended an operation

    def is_known(self, rank: int, group_id: int) -> bool:
        return rank in self.counts and (rank, group_id) not in self.unread

    def left_nothing(self, rank: int, group_id: int) -> bool:
        return rank not in self.counts and (rank, group_id) not in self.unread


def detect(
    progress: pl.DataFrame,
    groups: pl.DataFrame,
    ras: pl.DataFrame | None = None,
    rank_failure: list[Finding] | NotChecked | None = None,
) -> list[Finding]:
    """Name the ranks that the others wait for; nothing if no rank is blocked, or a rank failed before."""
    if isinstance(rank_failure, list) and rank_failure:
        return []
    state = _state(progress, groups)
    if not state.held:
        if ras is not None and ras["state"].is_in(SILENT).any():
            return [_silent(ras.filter(pl.col("state").is_in(SILENT)))]
        if len(progress.filter(pl.col("enqueued").is_not_null() & pl.col("completed").is_null())):
            raise NotResolvable(
                text("whether the job hung at its end, or which operations had ended then, was not seen")
            )
        members = {rank for group_id in progress["group_id"].unique() for rank in state.members.get(group_id, ())}
        unseen = len(members - state.counts.keys())
        if unseen:
            raise NotResolvable(
                text(
                    "{unseen} of {members} left no state, and the others are not held",
                    unseen=counted(unseen, "rank"),
                    members=len(members),
                )
            )
        return []
    findings = _explained(state)
    if not findings:
        raise NotResolvable(text("operations are outstanding, but which ranks wait for which is unknown"))
    return findings if ras is None else [_with_ras(finding, ras) for finding in findings]


def _explained(state: _State) -> list[Finding]:
    """Return the findings by the states that were read; only if they explain nothing, those by missing states.

    Raises `NotResolvable` where an unreadable state may be the explanation.
    """
    waits = {rank: _waits_for(state, rank) for rank in state.held}
    if state.quiet_ns is not None and state.quiet_ns < _ALIVE_NS:
        unlike = [found for ranks in _in_one_operation(state, state.held) if (found := _apart(state, waits, ranks))]
        if unlike:
            return unlike
        raise NotResolvable(
            text(
                "the job ran when its state was saved, {quiet} after its last operation: save it when nothing has "
                "happened for a minute",
                quiet=duration(state.quiet_ns),
            ),
            unclear=True,
        )
    unsure = {rank: unknown for rank in state.held if (unknown := _may_wait_for(state, rank, waits[rank]))}
    findings = [*_circles(state, waits), *_root_causes(state, waits, unsure.keys())]
    if findings or not unsure:
        return findings
    damaged = sorted(
        {other for rank, others in unsure.items() for other in others if not _is_absent_for(state, other, rank)}
    )
    if damaged:
        raise NotResolvable(
            text("the state of {ranks} could not be read, and others may wait there", ranks=named("rank", damaged))
        )
    _check_most_are_here(state, unsure)
    return _root_causes(state, waits | unsure, ())


def _check_most_are_here(state: _State, unsure: Mapping[int, frozenset[int]]) -> None:
    """Not resolvable where the states of most ranks are missing: more likely they were not given than not left."""
    members = frozenset[int]().union(*state.members.values())
    if 2 * len(state.counts) < len(members):
        raise NotResolvable(
            text(
                "{ranks} may wait for {others}, and the states of {given} of {members} ranks were given: give "
                "those of all",
                ranks=named("rank", sorted(unsure)),
                others=named("rank", sorted(frozenset[int]().union(*unsure.values()))),
                given=len(state.counts),
                members=len(members),
            ),
            unclear=True,
        )


def _is_absent_for(state: _State, other: int, rank: int) -> bool:
    return state.left_nothing(other, state.held[rank].group.id)


def resolution_ns(progress: pl.DataFrame) -> int | None:  # noqa: ARG001 - what a detector must offer
    return None


def _state(progress: pl.DataFrame, groups: pl.DataFrame) -> _State:
    p2p = set(progress.filter("is_p2p")["group_id"].to_list())
    once = groups.unique("group_id", keep="last", maintain_order=True)  # each of its ranks has a row
    known = {}
    for group_id, name, role, members in once.select("group_id", "name", "role", "members").iter_rows():
        called = "" if role in NO_ROLES else role
        title = called or group_title(name, role)
        known[group_id] = _Group(group_id, called or name, title, tuple(members_of(members)), group_id in p2p)
    held: dict[int, _Held] = {}
    counts: dict[int, dict[int, _Count]] = {}
    unread: set[tuple[int, int]] = set()
    for row in progress.iter_rows(named=True):
        group = known.get(row["group_id"])
        if group is None:
            continue
        enqueued, completed = row["enqueued"], row["completed"]
        if enqueued is None and completed is None and row["seq"] is None:
            unread.add((row["rank"], group.id))
            continue
        mine = counts.setdefault(row["rank"], {})
        if enqueued is not None and completed is not None:
            mine[group.id] = _Count(enqueued, completed)
        if row["seq"] is None:
            continue
        of_it = (row[column] for column in ("seq", "op", "peer", "dtype", "size_bytes", "start_ns", "is_started"))
        here = _Held(group, *of_it)
        if row["rank"] not in held or here.start_ns < held[row["rank"]].start_ns:
            held[row["rank"]] = here
    members = {group_id: group.members for group_id, group in known.items()}
    quiet_ns = min(progress["quiet_ns"].drop_nulls(), default=None)
    return _State(members, held, counts, frozenset(unread), quiet_ns)


def _waits_for(state: _State, rank: int) -> frozenset[int]:
    """Return the ranks that are known to block this one; empty if none is."""
    held = state.held[rank]
    if held.op in P2P_OPS:
        known = state.is_known(held.peer, held.group.id)
        return frozenset({held.peer}) if known and _peer_is_away(state, rank, held) else frozenset()
    others = (other for other in held.group.members if other != rank)
    return frozenset(other for other in others if other in state.counts and _is_away(state, other, held))


def _may_wait_for(state: _State, rank: int, away: frozenset[int]) -> frozenset[int]:
    """Return the unknown ranks that may block this one, where no known one does."""
    held = state.held[rank]
    others = {held.peer} - {NO_PEER} if held.op in P2P_OPS else {*held.group.members} - {rank}
    if away or any(_has_finished(state, other, held) for other in others):
        return frozenset()
    return frozenset(other for other in others if not state.is_known(other, held.group.id))


def _is_away(state: _State, other: int, held: _Held) -> bool:
    """Say whether the other rank is not in this collective: it has not enqueued it, or something older holds it."""
    count = state.counts[other].get(held.group.id)
    if count is None or held.group.p2p or _has_finished(state, other, held):
        return False
    if count.enqueued < held.seq:
        return True
    its = state.held.get(other)
    if its is None:
        return False
    return not its.is_same(held) or (held.started is True and its.started is False)


def _has_finished(state: _State, other: int, held: _Held) -> bool:
    count = state.counts.get(other, {}).get(held.group.id)
    return count is not None and count.completed >= held.seq and not held.group.p2p


def _peer_is_away(state: _State, rank: int, held: _Held) -> bool:
    """Say whether the peer of a transfer is not at its other end."""
    if held.peer == NO_PEER:
        return False
    its = state.held.get(held.peer)
    if its is not None and its.op in _COUNTERPART[held.op] and its.peer in (rank, NO_PEER):
        return False
    count = state.counts.get(held.peer, {}).get(held.group.id)
    # With two members both count the same transfers.
    counted_alike = held.group.p2p and len(held.group.members) == 2
    return not (counted_alike and count is not None and count.completed >= held.seq)


def _root_causes(state: _State, waits: Mapping[int, frozenset[int]], unsure: Container[int]) -> list[Finding]:
    """One finding for each way to be stuck, with the stuck ranks that wait for no other.

    Ranks that may wait for others (`unsure`) do not show that their operation is what does not finish.
    """
    awaited = frozenset().union(*waits.values())
    free = sorted({rank for rank, others in waits.items() if not others} | {r for r in awaited if r not in waits})
    absent = [rank for rank in free if rank not in state.counts]
    idle = [rank for rank in free if rank in state.counts and rank not in state.held]
    stuck = _in_one_operation(state, [rank for rank in free if rank in state.held])
    findings = []
    if absent:
        title = text("{subject} left no state", subject=_subject(absent))
        advice = text("Find out whether the process still lives; if its state was saved, give that file too.")
        findings.append(replace(_finding(state, waits, absent, title, advice), severity="medium", confidence="likely"))
    if idle:
        awaited_in = _most_awaited(state, waits, idle)
        title = plural(
            "{subject} does not reach {awaited_in}",
            "{subject} do not reach {awaited_in}",
            len(idle),
            subject=_subject(idle),
            awaited_in=awaited_in,
        )
        advice = plural(
            "Look at the host's stacks of {idle}: no operation of it is outstanding.",
            "Look at the hosts' stacks of {idle}: no operation of theirs is outstanding.",
            len(idle),
            idle=named("rank", idle),
        )
        findings.append(_finding(state, waits, idle, title, advice))
    alone = [rank for ranks in stuck for rank in ranks if _others_finished(state, rank)]
    if alone:
        where = state.held[alone[0]]
        title = plural(
            "{subject} does not finish {op}, which its peers finished",
            "{subject} do not finish {op}, which their peers finished",
            len(alone),
            subject=_subject(alone),
            op=where.op,
        )
        advice = text(
            "Check the devices of {alone}: Xid errors, ECC, links; then the kernel that was running.",
            alone=named("rank", alone),
        )
        findings.append(_finding(state, waits, alone, title, advice))
    for ranks in stuck:
        together = [rank for rank in ranks if rank not in alone]
        if any(rank in unsure for rank in together):
            continue
        if together and (len(together) > 1 or not findings):
            findings.append(_together(state, waits, together))
    return findings


def _in_one_operation(state: _State, ranks: Iterable[int]) -> list[list[int]]:
    """Return the ranks that are held in the same operation together; those of a transfer are alone."""
    together: dict[tuple[int, int], list[int]] = {}
    for rank in ranks:
        held = state.held[rank]
        place = (rank, held.seq) if held.op in P2P_OPS else (held.group.id, held.seq)
        together.setdefault(place, []).append(rank)
    return list(together.values())


def _together(state: _State, waits: Mapping[int, frozenset[int]], ranks: Sequence[int]) -> Finding:
    """Ranks that are in the same operation, which none of them finishes."""
    unlike = _apart(state, waits, ranks)
    if unlike is not None:
        return unlike
    held = state.held[ranks[0]]
    title = text("All of {ranks} are in {held}, and none finishes", ranks=named("rank", ranks), held=held)
    advice = text("Check the links and devices between these ranks: the operation was started everywhere.")
    return _finding(state, waits, ranks, title, advice)


def _apart(state: _State, waits: Mapping[int, frozenset[int]], ranks: Sequence[int]) -> Finding | None:
    """Ranks that do something else in the same operation than most others do."""
    held = {rank: state.held[rank] for rank in ranks}
    found = apart({rank: Done(its.op, its.dtype, its.size_bytes) for rank, its in held.items()})
    return None if found is None else _finding(state, waits, found.ranks, found.title, found.advice)


def _circles(state: _State, waits: Mapping[int, frozenset[int]]) -> list[Finding]:
    """Return sets of ranks that wait only for each other; of two operations between them, who is in one alone."""
    reach = {rank: _reachable(waits, rank) for rank in waits}
    circles = {frozenset(r for r in reach[rank] if rank in reach.get(r, ())) for rank in waits if rank in reach[rank]}
    findings = []
    for circle in sorted(circles, key=min):
        if all(waits[rank] <= circle for rank in circle):
            ranks = sorted(circle)
            title = text("{subject} wait for each other: deadlock", subject=_subject(ranks))
            together = sorted(_in_one_operation(state, ranks), key=len)
            named_ones = ranks
            if len(together) == 2 and len(together[0]) == 1 < len(together[1]):
                named_ones, others = together
                title = text(
                    "{subject} calls operations in another order than {others}: deadlock",
                    subject=_subject(named_ones),
                    others=named("rank", others),
                )
            each = joined(
                "; ", (text("rank {rank} is in {held}", rank=rank, held=state.held[rank]) for rank in ranks[:4])
            )
            findings.append(
                _finding(
                    state,
                    waits,
                    named_ones,
                    title,
                    text("Issue the operations in the same order on all ranks: {each}.", each=each),
                )
            )
    return findings


def _reachable(waits: Mapping[int, frozenset[int]], rank: int) -> frozenset[int]:
    seen: set[int] = set()
    todo = [*waits[rank]]
    while todo:
        other = todo.pop()
        if other not in seen:
            seen.add(other)
            todo += waits.get(other, ())
    return frozenset(seen)


def _others_finished(state: _State, rank: int) -> bool:
    held = state.held[rank]
    return held.op not in P2P_OPS and any(_has_finished(state, r, held) for r in held.group.members if r != rank)


def _most_awaited(state: _State, waits: Mapping[int, frozenset[int]], ranks: Sequence[int]) -> _Held:
    """Return the operation in which most ranks wait for one of these, of equals the oldest."""
    waiting = [state.held[rank] for rank, others in waits.items() if others & set(ranks)]
    return max(waiting, key=lambda held: (sum(held.is_same(other) for other in waiting), -held.start_ns))


def _finding(
    state: _State, waits: Mapping[int, frozenset[int]], ranks: Sequence[int], title: str, advice: str
) -> Finding:
    victims = sorted(rank for rank in waits if rank not in ranks)
    own = [state.held[rank] for rank in ranks if rank in state.held]
    awaiting = {rank: state.held[rank] for rank, others in waits.items() if others & set(ranks)}
    where = own[0] if own else _most_awaited(state, waits, ranks)
    return Finding(
        detector="hang",
        severity="high",
        title=title,
        where=str(where),
        advice=advice,
        ranks=tuple(ranks),
        groups=(where.group.name,),
        lost_ns_per_step=0,
        lost_ns_total=0,
        lost_fraction=1.0,
        uncertainty_ns=0,
        gain_fraction=1.0,
        evidence=tuple(
            Evidence(
                table="collectives",
                rank=rank,
                start_ns=held.start_ns,
                end_ns=held.start_ns,
                note=text("waits in {held}", held=held) if rank in victims else text("is held in {held}", held=held),
            )
            for rank, held in [*((r, state.held[r]) for r in ranks if r in state.held), *sorted(awaiting.items())][:8]
        ),
    )


def _silent(ras: pl.DataFrame) -> Finding:
    """Return processes that do not answer, where all that was seen of the operations is the same on all ranks."""
    ranks = tuple(ras["rank"].to_list())
    return Finding(
        detector="hang",
        severity="high",
        title=plural(
            "{subject} does not answer NCCL's RAS, and the job hangs",
            "{subject} do not answer NCCL's RAS, and the job hangs",
            len(ranks),
            subject=_subject(ranks),
        ),
        where=text("the process"),
        advice=_SILENT_ADVICE,
        ranks=ranks,
        lost_ns_per_step=0,
        lost_ns_total=0,
        lost_fraction=1.0,
        uncertainty_ns=0,
        gain_fraction=1.0,
        evidence=_said_by_ras(ras, ranks),
    )


def _with_ras(finding: Finding, ras: pl.DataFrame) -> Finding:
    """Return the finding with RAS's answer on its ranks before the rest of its evidence."""
    said = _said_by_ras(ras, finding.ranks)
    silent = set(ras.filter(pl.col("state").is_in(SILENT))["rank"].to_list())
    advice = joined(" ", (_SILENT_ADVICE, finding.advice)) if silent & set(finding.ranks) else finding.advice
    return replace(finding, evidence=(*said, *finding.evidence), advice=advice)


def _said_by_ras(ras: pl.DataFrame, ranks: Sequence[int]) -> tuple[Evidence, ...]:
    rows = ras.filter(pl.col("rank").is_in(ranks)).unique("rank", keep="first", maintain_order=True).head(4)
    evidence = []
    for rank, state, operation, launched, most, time_ns in rows.select(
        "rank", "state", "operation", "launched", "most", "time_ns"
    ).iter_rows():
        note = text(
            "NCCL's RAS: has launched {launched} {operation}, others up to {most}",
            operation=operation,
            launched=launched,
            most=most,
        )
        if state in SILENT:
            note = text("NCCL's RAS: its process is {state}", state=state)
        evidence.append(Evidence(table="ras", rank=rank, start_ns=time_ns, end_ns=time_ns, note=note))
    return tuple(evidence)


def _subject(ranks: Sequence[int]) -> str:
    return named("Rank", ranks)
