"""Steps become longer throughout the run, little by little.

**Signal.** The line through the lengths of the analyzed steps (half of all pairs of steps are steeper than it) rises:
its mean is at least `min_fraction` of the step above what it is at the first recorded step, and the rise is `min_z`
standard deviations clear of chance, where values that resemble the ones before count as fewer; from 3 on it is not
called healthy. The line must come closer to the steps than two levels do: a change at one step is `step_change`.
`where` is the part that grows most, `ranks` are those on which it grows by at least half of what the step does; where
it does so on all, or no rank that was seen blocks the others, none is named. Where the steps' own scatter hides it, the
same is asked of the rank that falls behind its peers most: lengths that vary on all ranks alike do not matter there.
Of a run that is too long to be held at once the same is asked of all its steps too, by their lengths on one rank: what
rises by too little for any stretch of it is a likely finding over the run. Where other findings make its last third
longer than its first, their ranks are those that grow.

**Why it costs time.** Each step is only a little longer than the one before, so no two neighbours look different, and a
look at the first minutes finds a healthy job. The cost is what the steps take longer than the first one did, by the
line; of single ranks no more than what the longest rank of each step is longer by theirs, and of one that falls behind
its peers no more than the steps grow.

**False positives.** Work that grows by design: a curriculum of longer sequences, a growing batch. Silence on a short
run says little: a creep of 1 % per hour is not seen in 10 minutes.

**What to try.** Compute time on all ranks: clocks and temperature, fragmentation of the allocator, lists that grow
(logged tensors that keep their graph, metrics). On one rank: its cooling, other processes on its host. Garbage
collection: objects that pile up. Input: a cache that runs full, files that are farther away. Transfer: other traffic.

**Source.** Theil 1950, Sen 1968; the test of Mann and Kendall with the correction of Hamed and Rao 1998. Thresholds are
ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from rankscope.analysis.detectors import judged_grid, price, visible
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, StepGrid, gain_ns
from rankscope.analysis.metrics.trend import Trend, follows_line, longest_stretch, trend
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.parts import MIXED, part_name
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = ["ADVICE", "SECONDARY", "detect", "detector", "over_steps", "resolution_ns", "title_of"]

detector = Detector(
    explains_of_ranks=("slow_rank", "load_imbalance"),
    explains_by_part={
        "input": ("input_stall",),
        "gc": ("gc_stall",),
        "compile": ("recompile",),
        "host": ("host_bound",),
        "transfer": ("slow_link", "exposed_communication"),
    },
    explains_within_error=True,
)

_MAYBE_Z = 3.0  # from which a rise is not taken for chance, nor yet for sure
SECONDARY = ("wait", "bubble", "unsplit", "overlapped")  # grow because something else does, or beside it


def detect(
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    all_steps: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_steps: int = 30,
    min_z: float = 5.0,
) -> list[Finding]:
    """Return steps that creep up, as one finding; `all_steps` are also those that are not judged."""
    first = _first(all_steps)
    grid = judged_grid(breakdown, min_steps)

    def found(seen: _Seen, where: str, ranks: tuple[int, ...]) -> list[Finding]:
        line = _creeping(seen.lengths, min_fraction, min_z)
        if line is None:
            return []
        lost = _lost(grid, line, first, ranks)
        if seen.beyond_peers:  # ranks that wait for it lose no more than the steps grow
            grown = _lost(grid, trend(_job(grid).lengths), first)
            lost = replace(lost, ns=min(lost.ns, grown.ns + grown.half_width_ns))
        if lost.ns < min_fraction * grid.step_ns:
            return []
        return [
            Finding(
                detector="gradual_slowdown",
                title=_title(seen, line, where, ranks),
                where=where,
                advice=ADVICE.get(where, ADVICE["compute"]),
                ranks=ranks,
                evidence=_first_and_last(steps, grid, ranks),
                **price(grid, lost, lost.ns),
            )
        ]

    job = _job(grid)
    where, ranks = _what_grows(job)
    findings = found(job, where, ranks) if where != "wait" else []
    for rank in () if findings else _falling_behind(grid):
        findings = found(rank, *_what_grows(rank))
    # Else no recorded rank delays the others more and more; the steps may grow all the same.
    findings = findings or found(job, where, ())
    line = trend(job.lengths)
    lost = _lost(grid, line, first)
    if not findings and lost.ns >= min_fraction * grid.step_ns and line.z >= _MAYBE_Z:
        why = text(
            "steps seem to become longer, which costs {lost} ± {error}, but they vary too much to be sure",
            lost=duration(lost.ns),
            error=duration(lost.half_width_ns),
        )
        raise NotResolvable(why, unclear=True)
    return findings


def over_steps(
    lengths: Floats, *, min_fraction: float = 0.03, min_steps: int = 30, min_z: float = 5.0
) -> tuple[Trend, Estimate] | None:
    """Return the line through the lengths of a run's steps, and what the mean of them lost, if `detect` would say so.

    It would by lengths alone: no rank and no part of the step is asked.
    """
    line = _creeping(lengths, min_fraction, min_z) if len(lengths) >= min_steps else None
    if line is None or line.growth / 2 < min_fraction * lengths.mean():
        return None
    return line, Estimate(line.growth / 2, line.half_width / 2)


def _creeping(lengths: Floats, min_fraction: float, min_z: float) -> Trend | None:
    """Return the line through lengths that rise clear of chance, and come closer to it than to two levels."""
    line = trend(lengths)
    rises = line.z >= min_z and follows_line(lengths, longest_stretch(lengths, 1 + min_fraction))
    return line if rises else None


def resolution_ns(
    breakdown: pl.DataFrame,
    all_steps: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.03,
    min_steps: int = 30,
    min_z: float = 5.0,
) -> int:
    """Return the smallest cost per step of a drift that would have been reported."""
    grid = judged_grid(breakdown, min_steps)
    scatter = _lost(grid, trend(_job(grid).lengths), _first(all_steps)).half_width_ns
    return visible(grid, max(min_fraction * grid.step_ns, min_z / 1.96 * scatter))


ADVICE = {
    "compute": text(
        "Compare the first and the last steps: clocks and temperature, memory that fills up or fragments, "
        "Python lists that grow (losses kept with their graph, metrics)."
    ),
    "input": text(
        "See what the loader does later that it did not do at first: a cache that runs full, longer files, "
        "storage that others use."
    ),
    "gc": text("Objects pile up from step to step: look for lists and caches that grow; gc.freeze() after warm-up."),
    "compile": text("Compilations become more frequent: see which guards fail (TORCH_LOGS=recompiles)."),
    "transfer": text("Compare the first and the last transfers: other traffic, retransmits, sizes that grow."),
    "wait": text(
        "Ranks drift apart, and a different one is late each time: compare their compute time in the last steps."
    ),
}


@dataclass(frozen=True, slots=True)
class _Seen:
    """Lengths by step, and what they are made of, by (rank, step); of the job, or of one rank beyond its peers."""

    lengths: Floats
    parts: dict[str, Floats]
    ranks: tuple[int, ...]
    beyond_peers: bool


def _first(all_steps: pl.DataFrame | None) -> int:
    """Return the first step that was recorded, judged or not; of part of a run, that was read."""
    return 0 if all_steps is None else int(all_steps["step"].to_numpy().min())


def _lost(grid: StepGrid, line: Trend, first: int, ranks: tuple[int, ...] = ()) -> Estimate:
    """Return how much longer the mean judged step is than the first.

    It grew through the warm-up too, which is not judged.

    Where only some ranks grow, that is no more than what the longest rank of each step is longer by their lines: at
    first others are, by chance.
    """
    since = (np.array(grid.steps) - first) / (grid.steps[-1] - grid.steps[0])
    grown = Estimate(line.growth * float(since.mean()), line.half_width * float(since.mean()))
    named = np.isin(grid.ranks, ranks)
    if not named.any() or grown.ns <= 0:
        return grown
    busy, without = grid.busy, grid.busy
    for row in np.flatnonzero(named):
        without[row] -= trend(busy[row] - np.median(busy[~named], axis=0)).growth * since
    # Where CUDA events time only some of what the ranks compute, the rest is paid for as these parts are.
    all_ns = grown.ns if not grid.of(MIXED).any() else float((busy - without)[named].mean(axis=1).max())
    paid = float(np.clip(gain_ns(busy, without) / all_ns, 0.0, 1.0)) if all_ns > 0 else 0.0
    return Estimate(paid * grown.ns, paid * grown.half_width_ns)


def _job(grid: StepGrid) -> _Seen:
    return _Seen(np.asarray(grid.of(*grid.parts).mean(axis=0)), grid.parts, grid.ranks, beyond_peers=False)


def _falling_behind(grid: StepGrid) -> Iterator[_Seen]:
    """Yield the rank that takes longer and longer than its peers by most; the lengths are a usual step and that."""
    if len(grid.ranks) < 2:
        return
    busy = grid.busy
    worst = int(_growth(busy - np.median(busy, axis=0)).argmax())

    def beyond(values: Floats) -> Floats:
        return np.asarray(values[worst] - np.median(np.delete(values, worst, axis=0), axis=0))

    parts = {part: beyond(values)[np.newaxis] for part, values in grid.parts.items()}
    yield _Seen(grid.step_ns + beyond(busy), parts, (grid.ranks[worst],), beyond_peers=True)


def _what_grows(seen: _Seen) -> tuple[str, tuple[int, ...]]:
    """Return the part that grows most, waiting last of all.

    And the ranks where it holds half of the growth, if not all.
    """
    line = trend(seen.lengths)
    # Where a peer is late, what computes beside communication and what computes alone change places.
    together = sum((seen.parts[part] for part in ("compute", "overlapped") if part in seen.parts), np.zeros(1))
    parts = seen.parts | ({"compute": together} if together.ndim > 1 else {})
    grown = {part: _growth(values) for part, values in parts.items() if part not in SECONDARY}
    where = max(grown, key=lambda part: float(grown[part].max()), default="wait")
    if where not in grown or grown[where].max() < line.growth / 2:
        return "wait", seen.ranks if seen.beyond_peers else ()
    enough = line.growth / 2
    if where == MIXED:  # the parts timed beside it show whose computation grows, by their share of the step
        timed = together + parts.get("optimizer", np.zeros(1))
        whole = float(sum(values.mean() for values in seen.parts.values()))
        if not whole:  # the rank was faster than its peers at first, by as much as it is slower at last
            return where, ()
        enough *= float(timed.mean()) / whole
        if timed.ndim > 1 and _growth(timed).max() >= enough:
            where, grown = "compute", {"compute": _growth(timed)}
        else:
            return where, ()
    here = grown[where] >= enough
    everywhere = here.all() and not seen.beyond_peers
    return where, () if everywhere else tuple(np.array(seen.ranks)[here].tolist())


def _title(seen: _Seen, line: Trend, where: str, ranks: tuple[int, ...]) -> str:
    if seen.beyond_peers:
        return plural(
            "{ranks} becomes slower than its peers, by {growth} at the end of the run; what grows is {where}",
            "{ranks} become slower than their peers, by {growth} at the end of the run; what grows is {where}",
            len(ranks),
            ranks=named("Rank", ranks),
            growth=duration(line.growth),
            where=part_name(where),
        )
    return title_of(line, where, ranks)


def title_of(line: Trend, where: str, ranks: tuple[int, ...] = ()) -> str:
    """Say from what to what all steps grow; `ranks`: where this part does, if not on all."""
    on = text(" on {ranks}", ranks=named("rank", ranks)) if ranks else ""
    return text(
        "Steps become longer throughout the run, from {first} to {last} ({growth}); what grows is {where}{on}",
        first=duration(line.first),
        last=duration(line.first + line.growth),
        growth=percent(line.growth / line.first),
        where=part_name(where),
        on=on,
    )


def _growth(values: Floats) -> Floats:
    """Return the growth of each rank's values over the run, by the medians of its first and last third."""
    count = values.shape[1]
    third = count // 3
    apart = np.median(values[:, -third:], axis=1) - np.median(values[:, :third], axis=1)
    return np.asarray(apart * (count - 1) / (count - third))


def _first_and_last(steps: pl.DataFrame, grid: StepGrid, ranks: tuple[int, ...]) -> tuple[Evidence, ...]:
    """Return the first and the last judged step on the first rank where it grows."""
    rank = (ranks or grid.ranks)[0]
    rows = steps.filter(pl.col("rank") == rank, pl.col("step").is_in([grid.steps[0], grid.steps[-1]])).sort("step")
    return tuple(
        Evidence(
            table="steps",
            rank=rank,
            start_ns=start,
            end_ns=end,
            note=text("step {step}: {length}", step=step, length=duration(end - start)),
        )
        for step, start, end in rows.select("step", "start_ns", "end_ns").iter_rows()
    )
