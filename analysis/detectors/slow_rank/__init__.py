"""One rank, or one node, takes longer over its own work than its peers, and they wait for it.

**Signal.** Compute time (the step without communication that blocks the rank, and without input, garbage collection,
compilation and checkpoints) is compared with the median of the other ranks that do the same work, step by step: in a
pipeline those of the same stage. A rank is slow if

- it is above its peers in most analyzed steps (`persistence`) by at least `min_z` robust standard deviations of what
  the peers differ among themselves and of what its own steps, or stretches of steps, scatter; or it is above its peers
  for a part of the run, of 10 steps or more, by five times what stretches of steps differ; or its excess comes in
  bursts that hardly any other rank has;
- it costs at least `min_fraction` of the step, clear of its own scatter;
- the peers really were blocked longer than this rank: the loss is no larger than that, within two standard
  deviations.

The cost is by how much the longest rank of a step gets shorter without the excess, if those with at least half of it
were like the rest too: the job would still wait for the next one. The excess is that under those labels (forward,
backward, a region of yours, …) under which the rank stands out likewise, so that noise elsewhere in the step does not
hide it; `where` is the one that holds most of it. Four ranks or more that are slow alike all the time are one finding.
If the run can be replayed, the report gives the cost as no more than the replay says, of several ranks with the others
fixed: some of the excess may be hidden behind other waits.

Nodes are analyzed first, in the same way, by the mean of their ranks: what these have in common is distinguished from
chance sooner than what one of them has. A node is slow if all of its ranks take at least half of the loss longer; they
are then analyzed without what their node takes longer.

Where a profiler saw the devices, and a rank's host takes 1.5 times as long from call to call as the others, or longer,
its waits for input count as computing too, unless they are more than twice what a host so slow explains. There the
loss is no more than the time by which the rank began collectives after the second-last one; what others compute
meanwhile is no loss. Captures of fewer than 5 steps, and longer ones whose steps
show no slow rank, are analyzed by single operations, but for those of pipelines: what each collective blocked the ranks
for is charged to the rank that came last, or to the one for which that had waited. Where not all ranks of a group were
recorded, it is charged to the last of those that were, less what held that one up in its step in communication that may
have been waiting for others. A rank, a node, or two or three ranks together are late if all that is charged to them is
more than the largest charge of any rank in 99.5 % of 4,000 permutations of ranks within operations, in the earlier half
of the operations and in the later; if nearly each step has 2 % of a step or a third of the mean charge; and if each
other rank waits 2 % of the step for them, and half of them 5 %. Where each other rank waits 5 % of all steps for one
rank, half of them 10 %, and for no other rank two thirds as much, few operations are enough, be it a stall in one,
whose step the title names: such a finding is likely, not confirmed. A rank that is late in many operations, but of some
steps only, may have more data there, and is not named, unless its device idles for its host so long. Where operations
do not show for which rank the others wait, a replay of two to nine steps may: if these are 3 % shorter or more, clear
of their scatter, with one rank as fast as its peers, and by two thirds as much with no other rank, that rank is named,
as likely. No common clock is needed. The cost is what that rank waits for them that waits least. `where` is the region
in which its device, compared with the others', idled or worked longest, and every region that takes its host at least
half of the loss longer than the others in each step: that time may be hidden behind work that was queued before.

Where NCCL ran and no profiler, compute time may not show it, and what counts is how long the others waited in the
collectives that a rank began last, as NCCL's durations have it. A rank is late if this recurs as above; a node, if all
of its ranks are; and several ranks, half of them at most, that wait least by far and for which all others wait. The
cost is at least the longest such wait of a step, and at most their sum: what the others computed was not seen
meanwhile. The lower number is reported, the title has both. If it is late in some steps only, the cost is what these
are longer than the others, within these bounds. If only the sum is above `min_fraction`, that rank gets no verdict, and
the reason is given. With NCCL's profiler plugin the title says whether its GPU or its host is late. In a pipeline not
all that others wait makes the step longer: with CUDA events a replay says what it costs, in which the rank and those
that share its layers compute as the other replicas do. Of one replica the rank that is late by most is named, and those
that are late by half as much or more.

CUDA events give compute time in phases without communication; there the costlier of the two is reported. Where forward
and optimizer are longer by one factor (within a quarter), all that the rank computes is taken to be so, and the cost
follows from that, between the two bounds.

Of a table of pipeline operations the sample is the operation: forwards and backwards of a rank against the same ones of
the other replicas, less what the other stages of its replica take longer then (a long microbatch lengthens all stages).
The rank must be longer by 5 standard errors over steps, or over stretches of operations where there are fewer than five
steps, and by four times what other ranks differ; all the time, or since a step from which on it clearly is. It costs
what the replay saves with the rank as fast as its peers; 2 % of the step or more is reported.

**Why it costs time.** A collective ends when its last rank has arrived, so every rank runs at the pace of the
slowest.

**False positives.** Ranks that have other work by design (an uneven shard, a rank 0 that logs) are reported too: the
time is lost, though no machine is at fault. A stage that is longer than the others is `stage_imbalance`; where each
stage has one rank only this is not checked. Another process that keeps one core of the node busy looks like a slow
rank, and is one. Where all ranks are slow alike, there is no peer to compare with. Of two ranks, one that becomes slow
is distinguished from load that comes and goes where it was slow for 50 steps and not for 50.

**What to try.** See what only this rank does in the named region. Compare its host with the others: clock speed,
temperature, other processes, CPU pinning, memory pressure. Swap two hosts: what stays with the rank is the work,
what moves with the host is the machine.

**Source.** Max-statistic by permutation as in Westfall and Young (1993).
Robust z-score and persistence as in Greyhound; stretches of steps as in Schmeiser's batch means (1982);
the last arriver does not wait as in TraceLens; the gain by replacing one worker's time as in ByteDance's what-if
analysis of stragglers. Thresholds are measured on healthy jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, visible
from rankscope.analysis.detectors.slow_rank.late_by_durations import late_ranks, refuse_hidden, waits_by_durations
from rankscope.analysis.detectors.slow_rank.own_time import by_own_time, resolution_of_own_time
from rankscope.analysis.detectors.slow_rank.shape import Thresholds, least_apart
from rankscope.analysis.detectors.slow_rank.wording import late_finding
from rankscope.analysis.metrics.slow_hosts import as_host_time, slow_hosts
from rankscope.analysis.metrics.step_matrix import above_peers, step_grid
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.parts import OWN_WORK
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import joined, plural, text
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.matching import MUTUAL_OPS
from rankscope.analysis.timeline.parallelism import may_be_stages
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives", "backward"),
    per_rank=True,
    explains=("load_imbalance", "slow_link", "pipeline_bubble", "low_bandwidth"),
    cost="bounded",
    parts=OWN_WORK,
    lost_as=AS_WAITING,
)
_MOST_UNMATCHED = 0.1  # of the collectives


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    steps: pl.DataFrame,
    ranks: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    proxies: pl.DataFrame | None = None,
    device_waits: pl.DataFrame | None = None,
    launches: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    persistence: float = 0.65,
    min_z: float = 5.0,
) -> list[Finding]:
    """Name the ranks and nodes that compute longer than their peers, or arrive late; the costliest first."""
    thresholds = Thresholds(min_fraction, persistence, min_z)
    waited_for = waits_by_durations(breakdown, collectives, ranks, regions, groups, hosts_only=device_waits is not None)
    hosts = {} if launches is None else slow_hosts(launches, phases)
    own = as_host_time(breakdown, hosts), as_host_time(phases, hosts)
    try:
        found = by_own_time(*own, steps, ranks, collectives, regions, groups, thresholds)
    except NotResolvable:
        if waited_for is None:
            raise
        found = []
    found = [_with_pace(finding, hosts) for finding in found]
    if waited_for is None:
        return found
    for late in late_ranks(waited_for, thresholds):
        same = [finding for finding in found if set(finding.ranks) & set(late.ranks)]
        if all(late.cost.ns - late.cost.half_width_ns > finding.lost_ns_per_step for finding in same):
            one = late_finding(waited_for, late, steps, proxies)
            found = [finding for finding in found if finding not in same]
            found.append(replace(one, where=same[0].where) if same and late.factor is None else one)
    if not found:
        refuse_hidden(waited_for, thresholds)
    return sorted(found, key=lambda finding: -finding.lost_ns_per_step)


def _with_pace(finding: Finding, hosts: Mapping[int, float]) -> Finding:
    """Return the finding, of ranks with slow hosts with how slow these are."""
    if not finding.ranks or not set(finding.ranks) <= hosts.keys():
        return finding
    said = plural(
        "Its host takes {times:.2g} times as long from call to call as the others.",
        "Their hosts take {times:.2g} times as long from call to call as the others.",
        len(finding.ranks),
        times=float(np.mean([hosts[rank] for rank in finding.ranks])),
    )
    return replace(finding, advice=joined(" ", (said, finding.advice)))


def resolution_ns(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame | None = None,
    regions: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    ranks: pl.DataFrame | None = None,
    device_waits: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_z: float = 5.0,
) -> int:
    """Return the smallest constant excess, in any part of the step, that would have been reported of any rank."""
    seen = step_grid(breakdown)
    if (
        collectives is not None
        and len(seen.steps) < ENOUGH_STEPS
        and may_be_stages(collectives, seen.step_ns * len(seen.steps))
    ):
        raise NotResolvable(
            text("pairs of ranks wait for each other in operations without a name, as stages of a pipeline do")
        )
    waited_for = waits_by_durations(breakdown, collectives, ranks, regions, groups, hosts_only=device_waits is not None)
    try:
        own_ns = resolution_of_own_time(breakdown, collectives, regions, groups, min_fraction, min_z)
    except NotResolvable:
        if waited_for is None:
            raise
        own_ns = 0
    if waited_for is None:
        return own_ns
    unmatched = waited_for.collectives.filter(pl.col("op").is_in(MUTUAL_OPS))["instance_id"].is_null().mean()
    if isinstance(unmatched, float) and unmatched > _MOST_UNMATCHED:
        raise NotResolvable(
            text(
                "{share} of the collectives were not matched across ranks: their last rank is unknown",
                share=percent(unmatched),
            )
        )
    noise_ns = max(float(least_apart(above_peers(late.least), min_z)[1].max()) for late, _, _ in waited_for.judged)
    grid = waited_for.grid
    return max(own_ns, visible(grid, max(min_fraction * grid.step_ns, noise_ns)))
