"""A GPU runs at a lower clock than the others, and the driver says why; its rank is slow for that.

**Signal.** The sampled clocks of each GPU while it works (`busy_fraction` of one half or more, and not idle by the
driver's word) are compared with the median of the other GPUs of its kind. A GPU is throttled if its mean clock is more
than `min_drop` below and the driver names a reason (power cap, thermal, power brake, hardware slowdown) in at least
half of the readings in which it is. Reported for the ranks that `slow_rank` finds slow as well: the loss is theirs, but
no more than the share of their compute time by which the clock is lower, and above `min_fraction` of the step.

**Why it costs time.** Most kernels take as much longer as the clock is lower, and all ranks wait for the slowest.

**False positives.** Clocks are read about once a second: a throttling of milliseconds is not seen. Where all GPUs are
throttled alike there is none to compare with.

**What to try.** Thermal: fans, dust, a blocked air path, the neighbours' exhaust, the inlet temperature. Power cap: the
limit that `nvidia-smi -q -d POWER` shows, against the others. Power brake and hardware slowdown: power and cabling
of the node. Until it is fixed, leave it out of the job.

**Source.** NVML's clock event reasons; that compute slows down as the clock does is used as by Greyhound. Thresholds
are ours.
"""

from __future__ import annotations

import polars as pl

from rankscope.analysis.detectors import as_cause, judged_grid
from rankscope.analysis.model.finding import Evidence, Finding, NotChecked
from rankscope.analysis.model.parts import MIXED, OWN_WORK
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import joined, plural, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.counters import during, well_read
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    explains=("slow_rank", "gradual_slowdown", "low_mfu"),
    explains_share=0.5,  # seen at work: it need not explain all of what follows, only the larger part
    parts=OWN_WORK,
    lost_as=AS_WAITING,
)

_BUSY = 0.5
_IDLE = 0x1
_MOSTLY = 0.5
_FEWEST = 5  # readings of a GPU at work
# NVML's bits: what it is, and what to do about it. The most specific first.
_REASONS = {
    0x40: (text("thermal slowdown by the hardware"), text("look at its cooling")),
    0x80: (text("power brake"), text("look at the node's power supply and cabling")),
    0x20: (text("thermal slowdown by the driver"), text("look at its cooling")),
    0x08: (text("slowdown by the hardware"), text("look at its cooling and the node's power supply")),
    0x04: (text("power cap"), text("compare its power limit with the others' (nvidia-smi -q -d POWER)")),
}
_NEEDED = ("sm_clock_hz", "clock_event_reasons", "busy_fraction")


def detect(
    counters: pl.DataFrame,
    gpus: pl.DataFrame,
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    slow_rank: list[Finding] | NotChecked,
    *,
    min_drop: float = 0.05,
    min_fraction: float = 0.03,
) -> list[Finding]:
    """Return the slow ranks, or the slow nodes, whose GPUs are throttled."""
    clocks = _clocks(counters, gpus, steps)
    throttled = clocks.filter(pl.col("clock_hz") < (1 - min_drop) * pl.col("usual_hz"), pl.col("named") >= _MOSTLY)
    if throttled.is_empty():
        _require_readings(counters, gpus, steps, slow_rank)
        return []
    if isinstance(slow_rank, NotChecked):
        raise NotResolvable(
            text("{which}; the cost is unknown: {reason}", which=_which(throttled), reason=slow_rank.why)
        )
    grid = judged_grid(breakdown, 1)
    worked = grid.own + grid.of(MIXED)  # a rank that the others wait for hardly waits itself
    own_ns = dict(zip(grid.ranks, worked.mean(axis=1), strict=True))
    found: list[Finding] = []
    for finding in slow_rank:
        mine = throttled.filter(pl.col("rank").is_in(finding.ranks))
        if len(mine) < len(finding.ranks):
            continue
        lower = 1 - pl.col("clock_hz") / pl.col("usual_hz")
        explained_ns = sum(own_ns[rank] * part for rank, part in mine.select("rank", lower).iter_rows()) / len(mine)
        share = min(1.0, explained_ns / finding.lost_ns_per_step)
        if share * finding.lost_fraction >= min_fraction:
            found.append(_finding(finding, mine, share))
    if not found:
        _require_readings(counters, gpus, steps, slow_rank)
    return found


def resolution_ns(
    counters: pl.DataFrame,
    gpus: pl.DataFrame,
    breakdown: pl.DataFrame,
    steps: pl.DataFrame,
    *,
    min_drop: float = 0.05,
    min_fraction: float = 0.03,
) -> int:
    """Return the cost of a GPU that is just not throttled, or the least that is reported."""
    _clocks(counters, gpus, steps)
    grid = judged_grid(breakdown, 1)
    return round(max(min_drop * float(grid.own.mean()), min_fraction * grid.step_ns))


def _require_readings(
    counters: pl.DataFrame, gpus: pl.DataFrame, steps: pl.DataFrame, slow_rank: list[Finding] | NotChecked
) -> None:
    """Not resolvable if the clock of a slow rank's GPU was not read, or stopped being read."""
    read = {(node, device) for node, device, name in well_read(during(counters, "gpu", steps)) if name in _NEEDED}
    known = {rank for rank, *where in gpus.iter_rows() if tuple(where) in read}
    for slow in slow_rank if isinstance(slow_rank, list) else ():
        if unread := set(slow.ranks) - known:
            raise NotResolvable(
                plural(
                    "{ranks} is slow, and the GPU's clock was not read there, or not all the time",
                    "{ranks} are slow, and the GPU's clock was not read there, or not all the time",
                    len(unread),
                    ranks=named("rank", sorted(unread)),
                )
            )


def _clocks(counters: pl.DataFrame, gpus: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """One row per GPU of a rank: `rank node device clock_hz usual_hz named reasons first_ns last_ns`.

    `usual_hz` is the median of the other GPUs' mean clocks, `named` the share of the slow readings for which the driver
    gives a reason, and `reasons` all the bits that it gives in them.
    """
    rows = during(counters, "gpu", steps)
    if rows.is_empty():
        raise NotResolvable(text("no GPU's clock was read during the analyzed steps"))
    lacking = [name for name in _NEEDED if name not in rows["name"].unique()]
    if lacking:
        raise NotResolvable(text("the GPUs' {counters} was not recorded", counters=", ".join(lacking)))
    readings = rows.pivot("name", index=["node", "device", "time_ns"], values="value", aggregate_function="last")
    if "sm_clock_max_hz" not in readings.columns:
        readings = readings.with_columns(sm_clock_max_hz=0.0)
    reasons = pl.col("clock_event_reasons").cast(pl.Int64)
    at_work = readings.drop_nulls(_NEEDED).filter(pl.col("busy_fraction") >= _BUSY, (reasons & _IDLE) == 0)
    by_gpu = pl.col("node").cast(pl.Int32), reasons.alias("bits")
    at_work = at_work.with_columns(*by_gpu).join(gpus, on=["node", "device"])
    at_work = at_work.filter(pl.len().over("rank") >= _FEWEST)
    means = at_work.group_by("rank").agg(
        pl.col("sm_clock_hz").mean().alias("clock_hz"), pl.col("sm_clock_max_hz").max().alias("kind")
    )
    if len(means) < 2:
        raise NotResolvable(text("fewer than two GPUs were seen at work, so there is no other to compare a clock with"))
    others = means.join(means, on="kind", suffix="_other").filter(pl.col("rank") != pl.col("rank_other"))
    usual = others.group_by("rank").agg(pl.col("clock_hz_other").median().alias("usual_hz"))
    slowed = (pl.col("bits") & sum(_REASONS)) != 0
    low = at_work.join(means, on="rank").join(usual, on="rank").filter(pl.col("sm_clock_hz") < pl.col("usual_hz"))
    return (
        low.group_by("rank", "node", "device", "clock_hz", "usual_hz")
        .agg(
            slowed.mean().alias("named"),
            pl.col("bits").bitwise_or().alias("reasons"),
            pl.col("time_ns").min().alias("first_ns"),
            pl.col("time_ns").max().alias("last_ns"),
        )
        .sort("rank")
    )


def _which(throttled: pl.DataFrame) -> str:
    """`gpu3 of node 1 runs at 1.10 GHz, the others at 1.75: power cap`, of the one that is lowest."""
    row = throttled.sort(pl.col("clock_hz") / pl.col("usual_hz"), "rank").row(0, named=True)
    clocks = text(
        "{clock:.2f} GHz, the others at {usual:.2f}",
        clock=row["clock_hz"] / 1e9,
        usual=row["usual_hz"] / 1e9,
    )
    return text(
        "{device} of node {node} runs at {clocks}: {reason}",
        device=row["device"],
        node=row["node"],
        clocks=clocks,
        reason=_reason(throttled)[0],
    )


def _reason(throttled: pl.DataFrame) -> tuple[str, str]:
    given = throttled["reasons"].to_list()
    return next(said for bit, said in _REASONS.items() if any(bits & bit for bits in given))


def _finding(slow: Finding, throttled: pl.DataFrame, share: float) -> Finding:
    reason, remedy = _reason(throttled)
    ratio = float((throttled["clock_hz"] / throttled["usual_hz"]).to_numpy().mean())
    whose = (
        text("The GPU of {ranks}", ranks=named("rank", slow.ranks))
        if len(slow.ranks) == 1
        else text("The GPUs of {ranks}", ranks=named("rank", slow.ranks))
    )
    where = joined(
        ", ",
        (
            text("{device} of node {node}", device=device, node=node)
            for node, device in throttled.select("node", "device").iter_rows()
        ),
    )
    evidence = tuple(
        Evidence(
            table="counters",
            node=node,
            start_ns=first,
            end_ns=last,
            note=text("{device}: {clock:.2f} GHz", device=device, clock=clock / 1e9),
        )
        for node, first, last, device, clock in throttled.head(4)
        .select("node", "first_ns", "last_ns", "device", "clock_hz")
        .iter_rows()
    )
    return as_cause(
        slow,
        share,
        detector="throttling",
        title=plural(
            "{whose} is throttled to {ratio} of the others' clock ({reason}), which makes it slow",
            "{whose} are throttled to {ratio} of the others' clock ({reason}), which makes them slow",
            len(slow.ranks),
            whose=whose,
            ratio=percent(ratio),
            reason=reason,
        ),
        where=where,
        advice=text(
            "{which}; {remedy}. Until then leave it out of the job: all ranks run at its pace.",
            which=_which(throttled),
            remedy=remedy,
        ),
        evidence=evidence,
    )
