"""Ranks wait for their next batch.

**Signal.** The input part of the step: the main thread is inside the data loader's `next()`. Ranks stand out when
they spend `min_fraction` of the step more there than the median of their peers, and twice as long; all ranks of a
node, or those that stall about as long, are one finding, and each step counts with the longest. Otherwise all ranks
that spend more than that are named together. Loaders with workers are ahead, so that slow ones make a rank wait in some
steps only, and with luck in none: where three ranks or more wait as long now and then, what they share is named, their
node or all ranks.
A device waits for a batch only when it has done its work. If all have to, the one that is behind does, and the others
get ahead: ranks whose hosts wait as long for batches as a named one's are named too.

Where ranks run on devices of which neither kernels nor CUDA events were recorded, input counts as far as it
is sure that devices waited for it, and is not checked if only all of it were enough.

**Why it costs time.** The main thread can launch nothing while it waits, and the other ranks wait for this one in
the next collective.

**False positives.** A loader without workers (`num_workers=0`) loads inside `next()`, so all of its work counts: that
time is lost, but storage need not be the reason. The first batch of an epoch starts the workers. Loaders with an
iterator of their own are not seen; their time is part of the rank's own.

**What to try.** More workers (`num_workers`), `prefetch_factor`, `persistent_workers=True`, decoding outside the
loop. If it is one rank only: its storage mount, its page cache, the file sizes of its shard, other processes on its
host.

**Source.** "Analyzing and Mitigating Data Stalls in DNN Training" (2021) for the effect; the threshold of 3 % is
ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import judged_grid, longest_regions, of_hosts, price, visible
from rankscope.analysis.metrics.host_stalls import held_up
from rankscope.analysis.metrics.slow_hosts import as_host_time, slow_hosts
from rankscope.analysis.metrics.step_matrix import TRIM, Floats, StepGrid, above_peers, estimates_by_step
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import every_nth, named
from rankscope.analysis.text.units import duration
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("input",),
    per_rank=True,
    cost="bounded",
    explains_late=("slow_rank",),
    explains_share=0.5,
    parts=("input",),
    lost_as=("input", *AS_WAITING),
)

_ALWAYS = 0.9  # share of the steps above which a stall is there in every step
_ALIKE = 0.5  # of the longest stall: ranks that stall for as long stall for the same reason
_OF_NODE = 0.1  # the same, where all ranks of a node stall
_TURNS, _SEVERAL = 2, 3  # steps in which a rank must have waited as long, and ranks that must
_AS_LONG = 0.2  # so much apart may hosts be that load alike; a device waits so much less than its host that is ahead


def detect(
    breakdown: pl.DataFrame,
    regions: pl.DataFrame,
    ranks: pl.DataFrame,
    device_waits: pl.DataFrame | None = None,
    phases: pl.DataFrame | None = None,
    launches: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Name the ranks that wait for input: those that stand out, together where they stall alike, or else all."""
    if phases is not None and launches is not None:
        breakdown = as_host_time(breakdown, slow_hosts(launches, phases))
    grid = _with_input(breakdown, regions)
    nodes, least_ns = _nodes(grid, ranks), min_fraction * grid.step_ns
    return of_hosts(lambda waits: _found(grid, held_up(grid, "input", waits), regions, nodes, least_ns), device_waits)


def _found(
    grid: StepGrid, waited: Floats, regions: pl.DataFrame, nodes: list[list[int]], least_ns: float
) -> list[Finding]:
    excess = above_peers(waited)
    usual_ns = (waited - excess).mean(axis=1)  # their peers'
    apart = [
        rows
        for rows in _alike(excess, nodes)
        if _longest(excess[rows]).mean() >= least_ns and excess[rows].mean() >= usual_ns[rows].mean()
    ]
    if apart and 2 * sum(map(len, apart)) <= len(waited):
        shared = _shared(waited, sorted(row for rows in apart for row in rows), least_ns, nodes)
        sets = [shared] if shared else _loading_as_long(apart, waited, grid, regions)
        findings = [
            _finding(grid, regions, rows, _longest((waited if len(rows) == len(waited) else excess)[rows]))
            for rows in sets
        ]
        return sorted(findings, key=lambda finding: -finding.lost_ns_per_step)
    means = estimates_by_step(waited)
    stalled = [row for row, mean in enumerate(means) if mean.clear and mean.ns >= least_ns]
    if not stalled:
        return []
    stalled = _shared(waited, stalled, least_ns, nodes) or _loading_as_long([stalled], waited, grid, regions)[0]
    return [_finding(grid, regions, stalled, _longest(waited[stalled]))]


def _shared(waited: Floats, stalled: list[int], least_ns: float, nodes: list[list[int]]) -> list[int] | None:
    """Return the rows whose loaders are slow for one reason: all of a node, else all; None where few ranks stall.

    Loaders with workers are ahead, and get further ahead while another rank waits for its batch: slow ones show in
    some steps only, and on a rank with luck in none. Where several ranks wait now and then, what they share is slow.
    """
    longest = _longest(waited[stalled])
    long_ns = max(least_ns, np.median(longest[longest >= least_ns]) / 2)
    waits = (waited >= long_ns).sum(axis=1)
    now_and_then = np.flatnonzero((waits >= _TURNS) & (waits < _ALWAYS * waited.shape[1]))
    if len(now_and_then) < _SEVERAL:
        return None
    rows = {*now_and_then.tolist(), *stalled}
    return next((of_node for of_node in nodes if rows <= set(of_node)), list(range(len(waited))))


def _loading_as_long(sets: list[list[int]], waited: Floats, grid: StepGrid, regions: pl.DataFrame) -> list[list[int]]:
    """Return the sets with the rows whose hosts wait as long for batches, where that is longer than devices do.

    Of devices that all have to wait the one that is behind waits longest, which gives the others their lead.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    of_rank = dict(regions.filter(pl.col("kind") == "input").group_by("rank").agg(length).iter_rows())
    on_host = np.array([of_rank.get(rank, 0) for rank in grid.ranks]) / len(grid.steps)
    found: list[list[int]] = []
    for rows in sets:
        usual_ns = float(on_host[rows].mean())
        alike = np.abs(on_host - usual_ns) <= _AS_LONG * usual_ns
        alike &= waited.mean(axis=1) < (1 - _AS_LONG) * on_host
        taken = {row for others in found for row in others}
        left = sorted({*rows, *np.flatnonzero(alike).tolist()} - taken)
        if not taken.issuperset(rows):
            found.append(left)
    return found


def _nodes(grid: StepGrid, ranks: pl.DataFrame) -> list[list[int]]:
    """Return the rows of each node that has several, unless there is one node only."""
    node = dict(ranks.drop_nulls("node").select("rank", "node").iter_rows())
    of_node: dict[int, list[int]] = {}
    for row, rank in enumerate(grid.ranks):
        of_node.setdefault(node.get(rank, -1), []).append(row)
    return [rows for rows in of_node.values() if len(rows) > 1] if len(of_node) > 1 else []


def _alike(excess: Floats, nodes: list[list[int]]) -> list[list[int]]:
    """Return the rows whose mean is clear of chance, in sets that stall for one reason.

    Whole nodes, else about as long.
    """
    means = estimates_by_step(excess)
    clear = {row: mean.ns for row, mean in enumerate(means) if mean.clear}
    # A slow disk delays the ranks of its node unequally: after the longest wait more batches are ready next time.
    sets = [rows for rows in nodes if min(clear.get(r, 0.0) for r in rows) > _OF_NODE * max(means[r].ns for r in rows)]
    left = sorted(clear.keys() - {row for rows in sets for row in rows}, key=lambda row: -clear[row])
    while left:
        alike = [row for row in left if clear[row] >= _ALIKE * clear[left[0]]]
        sets.append(sorted(alike))
        left = left[len(alike) :]
    return sets


def _longest(excess: Floats) -> Floats:
    """Return ns per step that the longest of these rows stalls: they may take turns, and the job waits for each."""
    return np.asarray(excess.max(axis=0))


def resolution_ns(breakdown: pl.DataFrame, regions: pl.DataFrame, *, min_fraction: float = 0.03) -> int:
    """Return the smallest stall that would have been reported."""
    grid = _with_input(breakdown, regions)
    return visible(
        grid, max(min_fraction * grid.step_ns, *(mean.half_width_ns for mean in estimates_by_step(grid.of("input"))))
    )


def _with_input(breakdown: pl.DataFrame, regions: pl.DataFrame) -> StepGrid:
    if not (regions["kind"] == "input").any():
        raise NotResolvable(text("no data loader was seen; time spent on input counts as the ranks' own"))
    return judged_grid(breakdown, 1)


def _finding(grid: StepGrid, regions: pl.DataFrame, rows: list[int], stall: Floats) -> Finding:
    ranks = tuple(grid.ranks[row] for row in rows)
    (lost,) = estimates_by_step(stall[np.newaxis])
    shows = stall > lost.ns / 2
    steps = tuple(np.array(grid.steps)[shows].tolist())
    always = bool(shows.mean() >= _ALWAYS)
    if always:  # then single hiccups need not be taken for part of it
        (lost,) = estimates_by_step(stall[np.newaxis], TRIM)
    waits_ns = lost.ns if always else float(stall[shows].mean())  # where it does
    often = text("per step") if always else every_nth(steps, len(shows))
    advice = text(
        "Raise num_workers and prefetch_factor, keep the workers (persistent_workers=True), decode outside of the loop."
    )
    if len(rows) < len(grid.ranks):
        advice += text(" Compare storage and host of {ranks} with the others.", ranks=named("rank", ranks))
    return Finding(
        detector="input_stall",
        title=plural(
            "{ranks} waits {time} {often} for the next batch",
            "{ranks} wait {time} {often} for the next batch",
            len(ranks),
            ranks=named("Rank", ranks),
            time=duration(waits_ns),
            often=often,
        ),
        where="input",
        advice=advice,
        ranks=ranks,
        steps=() if always else steps,
        evidence=longest_regions(regions, "input", ranks),
        fix="input",
        **price(grid, lost),
    )
