"""Some ranks' experts get more tokens than others, and the rest waits for them.

**Signal.** Bytes that each rank receives in the all-to-alls of a mixture of experts, one of a step at a time: the first
takes tokens to the experts, the next brings them back. What a rank computes between one that is uneven (the most over
the mean above `min_uneven`) and the next one must grow with what it received: the correlation over ranks and steps,
without each step's mean, is at least `min_correlation`, over `min_operations` uneven all-to-alls or more. The cost is
by how much the longest of these stretches would be shorter had all ranks of the group received the same, at the growth
with the bytes that the group's stretches show together: added up over the step, in the group for which that takes
longest before and after. Reported above `min_fraction` of the step. Of fewer than five steps the all-to-alls are the
samples. It is
persistent where the same ranks get more all the time (at least `persistence` of the imbalance stays when each rank's
bytes are averaged over the steps): these are named. Else all ranks of the group are. What is computed after the last
all-to-all of a step counts until the rank's next collective.

Where bytes show nothing, because they were not recorded or are padded, the compute does: of the all-to-alls of a group
in a step, without tiny ones, experts compute after the first, the third, and so on, forward and backward. A slow rank
that computes longer there than the rest of its group, in nearly every step and clear of scatter, has popular experts if
all of them compute as long elsewhere: the share by which any of them differs there is at most a quarter of that. It
costs what the slow rank costs, as far as this explains it.

**Why it costs time.** The tokens can only go back when every expert has done with its own, so a layer takes as long as
its most popular expert. No machine is at fault, though the rank looks slow.

**False positives.** All-to-alls that carry something else of uneven size, such as embeddings spread over ranks by
table: the finding holds for these too. With a capacity per expert and padding every rank receives the same: nothing
uneven is to be seen, and nothing is wasted but padding, which this does not see. Kernels that only experts use, and
that are slow on one GPU, look like popular experts where bytes show nothing.

**What to try.** Persistent: place experts so that each rank has popular and unpopular ones, replicate the popular ones.
Changing: a load-balancing loss or bias in the router, larger micro-batches, a capacity factor.

**Source.** Switch Transformers for the balancing loss and the capacity factor; DeepSeek-V3 for the bias in the router
and replicated experts. Thresholds are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.detectors import ENOUGH_STEPS, as_cause, judged_grid, longest_rows, price
from rankscope.analysis.metrics.expert_compute import ExpertCompute, expert_compute, until_next
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, StepGrid, estimate, estimate_of_operations
from rankscope.analysis.model.finding import Evidence, Finding, NotChecked
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration
from rankscope.collectors.schema import ALL_TO_ALL_OPS
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("collectives",),
    explains=("slow_rank", "load_imbalance"),
    # A rank with popular experts is up to twice as far above its peers as above the mean, which is what those cost.
    explains_share=0.5,
    explains_within_error=True,
    lost_as=AS_WAITING,
)

_AMONG_MOST = 0.5  # of the largest excess, above which a rank is one of those that get more
_MOSTLY = 0.5  # of what a slow rank costs: what its experts compute longer, if they are the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The all-to-alls of one group. `bytes` (rank, step): received in the uneven ones.

    By step of the job, ns: what is computed between them by the longest rank of each stretch, `measured` and `even`, as
    it would be had all ranks received the same; the latter is the same where none is uneven.
    """

    name: str
    ranks: tuple[int, ...]
    bytes: Floats
    measured: Floats
    even: Floats
    correlation: float
    uneven: int  # operations
    of_each: Floats  # what each operation's stretch loses

    @property
    def lost_ns(self) -> float:
        return float((self.measured - self.even).mean())

    @property
    def most_over_mean(self) -> float:
        return float((self.bytes.max(axis=0) / self.bytes.mean(axis=0)).mean())

    @property
    def persistent_share(self) -> float:
        """How much of the imbalance of single steps is left in the mean over steps."""
        of_steps = (self.bytes.max(axis=0) - self.bytes.mean(axis=0)).mean()
        usual = self.bytes.mean(axis=1)
        return float((usual.max() - usual.mean()) / of_steps) if of_steps else 0.0

    def popular(self) -> tuple[int, ...]:
        """Return the ranks that usually receive much more than the mean."""
        over = self.bytes.mean(axis=1) - self.bytes.mean()
        return tuple(rank for rank, x in zip(self.ranks, over, strict=True) if x >= _AMONG_MOST * over.max())


def detect(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame,
    phases: pl.DataFrame | None = None,
    slow_rank: Sequence[Finding] | NotChecked = (),
    *,
    min_fraction: float = 0.03,
    min_uneven: float = 0.10,
    min_correlation: float = 0.5,
    min_operations: int = 5,
    persistence: float = 0.6,
) -> list[Finding]:
    """Experts that make the job wait: one finding by bytes, else the cause of each slow rank that these make slow."""
    grid = judged_grid(breakdown, 1)
    try:
        groups = _groups(collectives, grid.steps, min_uneven)
    except NotResolvable:
        found = _by_compute(grid, collectives, phases, slow_rank, min_fraction)
        if not found:
            raise
        return found
    guilty = [g for g in groups if g.correlation >= min_correlation and g.uneven >= min_operations]
    by_bytes = _by_bytes(grid, collectives, groups, guilty, min_fraction, persistence)
    return by_bytes or _by_compute(grid, collectives, phases, slow_rank, min_fraction)


def _by_bytes(
    grid: StepGrid,
    collectives: pl.DataFrame,
    every: list[_Group],
    groups: list[_Group],
    min_fraction: float,
    persistence: float,
) -> list[Finding]:
    """Return the finding of `groups` of which some ranks receive more bytes; those that cost most are named."""
    if not groups:
        return []
    lost = _lost(every)
    if lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    worst = max(groups, key=lambda group: group.lost_ns)
    guilty = [group for group in groups if group.lost_ns >= _AMONG_MOST * worst.lost_ns]
    stays = worst.persistent_share >= persistence
    ranks = sorted({rank for group in guilty for rank in (group.popular() if stays else group.ranks)})
    uneven = text("{ratio:.1f} × the mean", ratio=worst.most_over_mean)
    usual = plural("{ranks} always receives", "{ranks} always receive", len(ranks), ranks=named("rank", ranks))
    who = usual if stays else text("now one rank, now another receives")
    return [
        Finding(
            detector="expert_imbalance",
            title=text(
                "All-to-alls (experts) are uneven: {who} {uneven}, and the others wait {lost} per step "
                "for what is computed with that",
                who=who,
                uneven=uneven,
                lost=duration(lost.ns),
            ),
            where=text("between all-to-alls"),
            advice=_STAYS if stays else _CHANGES,
            ranks=tuple(ranks),
            groups=tuple(group.name for group in guilty),
            evidence=_largest(collectives, worst, ranks),
            # What a fix brings is known from the stretches; `balance` would even out a label's whole time instead.
            **price(grid, lost, lost.ns),
        )
    ]


def _by_compute(
    grid: StepGrid,
    collectives: pl.DataFrame,
    phases: pl.DataFrame | None,
    slow_rank: Sequence[Finding] | NotChecked,
    min_fraction: float,
) -> list[Finding]:
    """Return the causes of slow ranks that compute longer than the rest of their group for experts, and for no more."""
    if phases is None or isinstance(slow_rank, NotChecked) or not slow_rank:
        return []
    groups = expert_compute(phases, collectives, grid.steps)
    found = []
    for slow in slow_rank:
        hot = {
            rank: (ns, group)
            for rank in slow.ranks
            for group in groups
            if rank in group.ranks and (ns := group.longer(rank, slow.ranks))
        }
        if len(hot) < len(slow.ranks) or not hot:
            continue
        longer_ns = sum(ns for ns, _ in hot.values()) / len(hot)
        share = min(1.0, longer_ns / slow.lost_ns_per_step)
        if share >= _MOSTLY and share * slow.lost_fraction >= min_fraction:
            found.append(_hot(slow, share, longer_ns, [group for _, group in hot.values()]))
    return found


def _hot(slow: Finding, share: float, longer_ns: float, groups: list[ExpertCompute]) -> Finding:
    windows = pl.concat([group.windows for group in groups]).filter(pl.col("rank").is_in(slow.ranks))
    cause = as_cause(
        slow,
        share,
        detector="expert_imbalance",
        title=plural(
            "{ranks} computes {longer} longer per step than its peers, but only between all-to-alls (experts)",
            "{ranks} compute {longer} longer per step than their peers, but only between all-to-alls (experts)",
            len(slow.ranks),
            ranks=named("Rank", slow.ranks),
            longer=duration(longer_ns),
        ),
        where=text("between all-to-alls"),
        advice=_COUNT,
        evidence=longest_rows(windows, "collectives"),
    )
    return replace(cause, groups=tuple(dict.fromkeys(group.name for group in groups)))


def resolution_ns(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_uneven: float = 0.10,
) -> int:
    """Return the smallest cost that would have been reported."""
    grid = judged_grid(breakdown, 1)
    if _partial(collectives):
        raise NotResolvable(_NOT_ALL)
    return round(max(min_fraction * grid.step_ns, _lost(_groups(collectives, grid.steps, min_uneven)).half_width_ns))


_NOT_ALL = text("all-to-alls were not recorded on all ranks of their group")
_STAYS = text(
    "Place popular and unpopular experts on the same rank, or replicate the popular ones; see the router's bias."
)
_COUNT = text(
    "Count the tokens of each expert. Place popular and unpopular experts on the same rank, or replicate the popular "
    "ones; see the router's bias."
)
_CHANGES = text("Balance the router (auxiliary loss or bias), use larger micro-batches, or a capacity factor.")


def _lost(groups: list[_Group]) -> Estimate:
    """Return the cost where groups wait for each other at the end of a step at the latest.

    It lasts as long as the one that takes longest.
    """
    lost = np.max([group.measured for group in groups], axis=0) - np.max([g.even for g in groups], axis=0)
    if len(lost) >= ENOUGH_STEPS:
        return estimate(lost)
    worst = max(groups, key=lambda group: group.lost_ns)
    half_width_ns = estimate_of_operations(worst.of_each, len(lost)).half_width_ns
    return Estimate(float(lost.mean()), half_width_ns)


def _groups(collectives: pl.DataFrame, steps: tuple[int, ...], min_uneven: float) -> list[_Group]:
    """Return the loss by the all-to-alls of each group. Raises NotResolvable where none can be judged."""
    if "received_bytes" not in collectives.columns or collectives["received_bytes"].null_count() == len(collectives):
        raise NotResolvable(text("no all-to-all was recorded, or not how many bytes each rank received"))
    rows = _stretches(collectives).filter(pl.col("step").is_in(steps))
    if rows.is_empty():
        raise NotResolvable(text("the end of all-to-alls was not seen, so what is computed between them is unknown"))
    rows = rows.filter(~pl.col("group").is_in(_partial(collectives)))
    if rows.is_empty():
        raise NotResolvable(_NOT_ALL)
    by_group = rows.group_by("group", maintain_order=True)
    return [_judged(str(name), of_group, steps, min_uneven) for (name,), of_group in by_group]


def _partial(collectives: pl.DataFrame) -> list[str]:
    """Return the groups that have all-to-alls, and members without any."""
    calls = collectives.filter(pl.col("op").is_in(ALL_TO_ALL_OPS))
    seen = calls.group_by("group").agg(pl.col("rank").n_unique(), pl.col("group_size").max())
    return seen.filter(~(pl.col("rank") >= pl.col("group_size")).fill_null(value=False))["group"].to_list()


def _stretches(collectives: pl.DataFrame) -> pl.DataFrame:
    """group, rank, step, place, received_bytes, own_ns: from each all-to-all's end to the rank's next one in the step.

    After the last one it is to the rank's next collective. `place` counts a group's all-to-alls in a step.
    """
    rows = collectives.filter(pl.col("op").is_in(ALL_TO_ALL_OPS), pl.col("received_bytes").is_not_null())
    place = pl.col("seq") - pl.col("seq").min().over("group", "step")
    own_ns = (pl.col("next_ns") - pl.col("end_ns")).clip(0)
    return (
        until_next(rows.with_columns(place=place), collectives)
        .drop_nulls("next_ns")
        .select("group", "rank", "step", "place", "received_bytes", own_ns=own_ns)
    )


def _judged(name: str, rows: pl.DataFrame, steps: tuple[int, ...], min_uneven: float) -> _Group:
    """Return the group's stretches; a place is uneven if it is so in the mean of the steps that all its ranks have."""
    ranks = tuple(rows["rank"].unique().sort().to_list())
    measured = np.zeros(len(steps))
    uneven: list[tuple[Floats, Floats, Floats, NDArray[np.bool_]]] = []
    for _, of_place in rows.group_by("place", maintain_order=True):
        received, own = (_array(of_place, value, ranks, steps) for value in ("received_bytes", "own_ns"))
        whole = np.asarray(np.isfinite(received).all(axis=0))
        measured += np.nan_to_num(own).max(axis=0)
        received, own = received[:, whole], own[:, whole]
        most_over_mean = received.max(axis=0) / np.maximum(received.mean(axis=0), 1.0)
        if whole.any() and most_over_mean.mean() - 1 >= min_uneven:
            uneven.append((received, own, (received / received.mean(axis=0) - 1) * own.mean(axis=0), whole))
    nothing = np.zeros((len(ranks), 0))
    x = np.concatenate([nothing, *(more for _, _, more, _ in uneven)], axis=1)
    y = np.concatenate([nothing, *(own - own.mean(axis=0) for _, own, _, _ in uneven)], axis=1)
    growth = max(float((x * y).sum() / max((x * x).sum(), 1.0)), 0.0)  # 1: as much longer as there is more
    total, even, of_each = np.zeros((len(ranks), len(steps))), measured.copy(), [np.zeros(0)]
    for received, own, more, whole in uneven:
        lost = own.max(axis=0) - (own - growth * more).max(axis=0)
        even[whole] -= lost
        total[:, whole] += received
        of_each.append(lost)
    return _Group(
        name=name,
        ranks=ranks,
        bytes=total[:, total.any(axis=0)],
        measured=measured,
        even=even,
        correlation=_correlation(growth * x, y),
        uneven=x.shape[1],
        of_each=np.concatenate(of_each),
    )


def _array(rows: pl.DataFrame, value: str, ranks: tuple[int, ...], steps: tuple[int, ...]) -> Floats:
    """Return the values by (rank, step); NaN where there is none."""
    values = np.full((len(ranks), len(steps)), np.nan)
    values[np.searchsorted(ranks, rows["rank"]), np.searchsorted(steps, rows["step"])] = rows[value]
    return values


def _correlation(x: Floats, y: Floats) -> float:
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def _largest(collectives: pl.DataFrame, group: _Group, ranks: list[int]) -> tuple[Evidence, ...]:
    """Return the all-to-all in which one of these ranks received most, on each of the first four."""
    rows = collectives.filter(
        pl.col("group") == group.name, pl.col("rank").is_in(ranks), pl.col("received_bytes").is_not_null()
    )
    most = rows.sort("received_bytes", descending=True).unique("rank", keep="first", maintain_order=True)
    return tuple(
        Evidence(
            table="collectives", rank=rank, start_ns=start, end_ns=end, note=text("received {size:,} bytes", size=size)
        )
        for rank, start, end, size in most.drop_nulls("end_ns")
        .sort("rank")
        .select("rank", "start_ns", "end_ns", "received_bytes")
        .head(4)
        .iter_rows()
    )
