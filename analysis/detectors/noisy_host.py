"""A rank is slow because its host does not let it run: no processor, or no memory.

**Signal.** For the ranks that `slow_rank` finds slow, what their host's counters say they lost in the analyzed steps:

- the time in which their main thread could run and had no processor, beyond what nine of ten other ranks queue for as
  much processor time: other processes on the node, or the limit of a control group;
- their running time that the hypervisor gave away (steal), beyond the other nodes';
- the time in which the node waited for memory (swapping, pages read again), beyond the other nodes'.

Reported where this explains at least `min_explained` of what the slow rank costs, and `min_fraction` of the step; the
loss is what it explains.

**Why it costs time.** A main thread that waits for a processor launches nothing, and all ranks wait for its rank.

**False positives.** Counters are read about once a second and give a mean over the analyzed steps. Only the main
thread's queue is known: helper threads of the rank that have no processor look like work of its own. What all ranks
lose alike, on an overcommitted cluster or under the same limit everywhere, is not seen: there is no peer to compare
with.

**What to try.** See what else runs on the node, and move it or pin it away from the ranks' processors. A control group:
raise its limit (in Kubernetes the pod's CPU limit), or start fewer loader workers and threads (`OMP_NUM_THREADS`).
Steal: another machine, or one that is not shared. Memory: fewer or smaller loader workers, no swap.

**Source.** Linux schedstat (run-queue wait), pressure stall information, `/proc/stat`, control groups. Thresholds are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import as_cause, judged_grid
from rankscope.analysis.detectors.slow_rank import resolution_ns as resolution_of_slow_rank_ns
from rankscope.analysis.metrics.step_matrix import StepGrid
from rankscope.analysis.model.finding import Evidence, Finding, NotChecked
from rankscope.analysis.model.parts import OWN_WORK
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.analysis.timeline.counters import during, growth, well_read
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    explains=("slow_rank", "input_stall", "gradual_slowdown"),
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    parts=OWN_WORK,
    lost_as=(*AS_WAITING, "input"),
)

_MOSTLY = 0.5
_OTHERS = 0.9  # chance makes some ranks queue longer on a busy machine: of few, the one that does most is the measure
_QUEUED, _STOLEN, _STALLED = "queued", "stolen", "stalled"
_OF_NODE, _OF_RANK = ("cpu_steal_s", "memory_stalled_s"), ("main_thread_queued_s",)
_RANK = r"^rank(\d+)$"


@dataclass(frozen=True, slots=True)
class _Hosts:
    """The counters in the judged steps, as shares of the time, by rank or by node; unknown ones are absent."""

    queued: dict[int, float]  # of a rank's main thread
    used: dict[int, float]  # processors that the rank's process used
    throttled: dict[int, float]  # of a rank: by a control group of its own, or its node's
    busy: dict[int, float]  # processors of the node that were busy
    stolen: dict[int, float]  # of the time in which the node's processors were wanted
    stalled: dict[int, float]  # of a node, for memory
    node_of: dict[int, int]
    first_ns: int
    last_ns: int


def detect(
    counters: pl.DataFrame,
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    slow_rank: list[Finding] | NotChecked,
    *,
    min_explained: float = 0.5,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Return the slow ranks, or the slow nodes, whose host explains most of what they take longer."""
    hosts = _hosts(counters, steps, ranks)
    if isinstance(slow_rank, NotChecked):
        raise NotResolvable(slow_rank.why)
    grid = judged_grid(breakdown, 1)
    found: list[Finding] = []
    for slow in slow_rank:
        lost = _lost(hosts, grid, slow.ranks)
        share = min(1.0, sum(lost.values()) / slow.lost_ns_per_step)
        if share >= min_explained and share * slow.lost_fraction >= min_fraction:
            found.append(_finding(hosts, slow, lost, share))
    if not found:
        _require_readings(counters, steps, hosts, slow_rank)
    return found


def resolution_ns(
    counters: pl.DataFrame,
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> int:
    """Return the least visible cost of a slow rank: a host that slows no rank costs nothing."""
    _hosts(counters, steps, ranks)
    return resolution_of_slow_rank_ns(breakdown, collectives, regions, groups, ranks, min_fraction=min_fraction)


def _hosts(counters: pl.DataFrame, steps: pl.DataFrame, ranks: pl.DataFrame) -> _Hosts:
    rows = during(counters, "host", steps)
    if rows.is_empty():
        raise NotResolvable(text("no counter of a host was read during the analyzed steps"))
    grown = growth(rows).with_columns(rate=pl.col("grown") * 1e9 / pl.col("over_ns"))
    of_rank = grown.with_columns(pl.col("device").str.extract(_RANK, 1).cast(pl.Int64).alias("rank")).drop_nulls("rank")
    of_node = grown.filter(pl.col("device") == "")
    node_of = dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())

    def by(owner: str, frame: pl.DataFrame, name: str) -> dict[int, float]:
        return dict(frame.filter(pl.col("name") == name).select(owner, "rate").iter_rows())

    queued = by("rank", of_rank, "main_thread_queued_s")
    busy, steal = by("node", of_node, "cpu_busy_s"), by("node", of_node, "cpu_steal_s")
    stalled = by("node", of_node, "memory_stalled_s")
    if not queued and not steal and not stalled:
        raise NotResolvable(text("no counter of other load on a host was read twice in the analyzed steps"))
    of_group = by("node", of_node, "cgroup_throttled_s")
    throttled = {rank: of_group[node] for rank, node in node_of.items() if node in of_group}
    return _Hosts(
        queued=queued,
        used=by("rank", of_rank, "cpu_s"),
        throttled=throttled | by("rank", of_rank, "cgroup_throttled_s"),
        busy=busy,
        stolen={node: s / (s + busy[node]) for node, s in steal.items() if s + busy.get(node, 0.0) > 0},
        stalled=stalled,
        node_of=node_of,
        first_ns=int(rows["time_ns"].min()),  # type: ignore[arg-type]
        last_ns=int(rows["time_ns"].max()),  # type: ignore[arg-type]
    )


def _require_readings(counters: pl.DataFrame, steps: pl.DataFrame, hosts: _Hosts, slow_rank: list[Finding]) -> None:
    """Not resolvable if what was read of other ranks and nodes was not of a slow one, or not all the time."""
    read = well_read(during(counters, "host", steps))
    names = {name for *_, name in read} & {*_OF_NODE, *_OF_RANK}
    for slow in slow_rank:
        unread = {
            rank
            for rank in slow.ranks
            for name in names
            if (hosts.node_of.get(rank), f"rank{rank}" if name in _OF_RANK else "", name) not in read
        }
        if unread:
            raise NotResolvable(
                plural(
                    "{ranks} is slow, and the host's counters were not read there, or not all the time",
                    "{ranks} are slow, and the host's counters were not read there, or not all the time",
                    len(unread),
                    ranks=named("rank", sorted(unread)),
                )
            )


def _lost(hosts: _Hosts, grid: StepGrid, ranks: tuple[int, ...]) -> dict[str, float]:
    """Return ns per step that the host took from these ranks, by how; mean over them."""
    step_ns = float(grid.of(*grid.parts).mean())
    own_ns = float(grid.own[[grid.ranks.index(rank) for rank in ranks]].mean())
    nodes = {hosts.node_of[rank] for rank in ranks if rank in hosts.node_of}
    return {
        _QUEUED: step_ns * float(np.mean([_queued_beyond(hosts, rank, ranks) for rank in ranks])),
        _STOLEN: own_ns * _beyond(hosts.stolen, nodes),
        _STALLED: step_ns * _beyond(hosts.stalled, nodes),
    }


def _queued_beyond(hosts: _Hosts, rank: int, slow: tuple[int, ...]) -> float:
    """Share of the time in which the rank's main thread queued, beyond what others queue for as much of it."""
    usual = [
        queued / hosts.used[other]
        for other, queued in hosts.queued.items()
        if other not in slow and hosts.used.get(other)
    ]
    if rank not in hosts.queued or rank not in hosts.used or not usual:
        return 0.0
    return max(0.0, hosts.queued[rank] - float(np.quantile(usual, _OTHERS, method="higher")) * hosts.used[rank])


def _beyond(of: dict[int, float], nodes: set[int]) -> float:
    """Return the mean over these nodes beyond the median of the others; 0 where there are none."""
    mine, others = [of[node] for node in nodes if node in of], [v for node, v in of.items() if node not in nodes]
    return max(0.0, float(np.mean(mine)) - float(np.median(others))) if mine and others else 0.0


def _finding(hosts: _Hosts, slow: Finding, lost: dict[str, float], share: float) -> Finding:
    how = max(lost, key=lambda way: lost[way])
    nodes = sorted({hosts.node_of[rank] for rank in slow.ranks if rank in hosts.node_of})
    what, why, advice = _explanation(hosts, slow.ranks, nodes, how)
    return as_cause(
        slow,
        share,
        detector="noisy_host",
        title=plural(
            "{whose} loses {time} per step {what}: {why}",
            "{whose} lose {time} per step {what}: {why}",
            len(slow.ranks),
            whose=named("Rank", slow.ranks),
            time=duration(min(lost[how], slow.lost_ns_per_step)),
            what=what,
            why=why,
        ),
        where=named("node", nodes) if nodes else text("the host"),
        advice=advice,
        evidence=tuple(
            Evidence(table="counters", node=node, start_ns=hosts.first_ns, end_ns=hosts.last_ns, note=why)
            for node in nodes[:4]
        ),
    )


def _explanation(hosts: _Hosts, ranks: tuple[int, ...], nodes: list[int], how: str) -> tuple[str, str, str]:
    """Return the loss, its cause, and the advice."""
    if how == _STOLEN:
        stolen = np.mean([hosts.stolen[node] for node in nodes])
        why = text("the hypervisor gives {stolen} of its processors' time to others", stolen=percent(float(stolen)))
        return text("to other machines"), why, text("Use another machine, or one that is not shared.")
    if how == _STALLED:
        stalled = np.mean([hosts.stalled[node] for node in nodes])
        why = text("the node waits for memory {stalled} of the time", stalled=percent(float(stalled)))
        return (
            text("to memory that is short"),
            why,
            text("Start fewer loader workers, or smaller ones; look at swap and page faults."),
        )
    throttled = float(np.mean([hosts.throttled.get(rank, 0.0) for rank in ranks]))
    queued = float(np.mean([hosts.queued[rank] for rank in ranks]))
    if throttled >= _MOSTLY * queued:
        why = text("its control group is throttled {share} of the time", share=percent(min(throttled, 1.0)))
        return (
            text("without a processor"),
            why,
            text("Raise the group's CPU limit, or start fewer threads and loader workers."),
        )
    used = {node: sum(cpus for rank, cpus in hosts.used.items() if hosts.node_of.get(rank) == node) for node in nodes}
    others = sum(max(0.0, hosts.busy.get(node, 0.0) - used[node]) for node in nodes)
    why = text(
        "processes that are no ranks, or are started by them, keep {others:.1f} processors of the node busy",
        others=others,
    )
    return (
        text("without a processor"),
        why,
        text("See what else runs there; pin it, and the ranks, to processors of their own."),
    )
