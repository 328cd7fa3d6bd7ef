"""Some ranks' experts get more tokens than others, and the rest waits for them.

**Signal.** Bytes that each rank receives in the all-to-alls of a mixture of experts, one of a step at a time: the first
takes tokens to the experts, the next brings them back. What a rank computes between one that is uneven (the most over
the mean above `min_uneven`) and the next one must grow with what it received: the correlation over ranks and steps,
without each step's mean, is at least `min_correlation`. The cost is by how much the longest of these stretches would be
shorter had all ranks of the group received the same, at the time per byte that the run itself shows: added up over the
step, in the group for which that takes longest before and after. Reported above `min_fraction` of the step. It is
persistent where the same ranks get more all the time (at least `persistence` of the imbalance stays when each rank's
bytes are averaged over the steps): these are named. Else all ranks of the group are.

**Why it costs time.** The tokens can only go back when every expert has done with its own, so a layer takes as long as
its most popular expert. No machine is at fault, though the rank looks slow.

**False alarms.** All-to-alls that carry something else of uneven size, such as embeddings spread over ranks by table:
what is said holds for these too. With a capacity per expert and padding every rank receives the same: nothing uneven is
to be seen, and nothing is wasted but padding, which this does not see.

**What to try.** Persistent: place experts so that each rank has popular and unpopular ones, replicate the popular ones.
Changing: a load-balancing loss or bias in the router, larger micro-batches, a capacity factor.

**Source.** Switch Transformers for the balancing loss and the capacity factor; DeepSeek-V3 for the bias in the router
and replicated experts. Thresholds are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import ENOUGH_STEPS, judged_grid, price
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, estimate
from rankscope.analysis.model.finding import Evidence, Finding
from rankscope.analysis.model.spec import AS_WAITING, Detector
from rankscope.analysis.text.message import text
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
        """The ranks that usually receive much more than the mean."""
        over = self.bytes.mean(axis=1) - self.bytes.mean()
        return tuple(rank for rank, x in zip(self.ranks, over, strict=True) if x >= _AMONG_MOST * over.max())


def detect(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_uneven: float = 0.10,
    min_correlation: float = 0.5,
    persistence: float = 0.6,
) -> list[Finding]:
    """Experts that make the job wait, as one finding; groups in which that is so are named."""
    grid = judged_grid(breakdown)
    every = _groups(collectives, grid.steps, min_uneven)
    groups = [group for group in every if group.correlation >= min_correlation]
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
    usual = text(
        "{ranks} always {en_receive}",
        ranks=named("rank", ranks),
        en_receive="receives" if len(ranks) == 1 else "receive",
    )
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


def resolution_ns(
    breakdown: pl.DataFrame,
    collectives: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_uneven: float = 0.10,
) -> int:
    """The smallest cost that would have been reported."""
    grid = judged_grid(breakdown)
    if _partial(collectives):
        raise NotResolvable(_NOT_ALL)
    return round(max(min_fraction * grid.step_ns, _lost(_groups(collectives, grid.steps, min_uneven)).half_width_ns))


_NOT_ALL = text("all-to-alls were not recorded on all ranks of their group")
_STAYS = text(
    "Place popular and unpopular experts on the same rank, or replicate the popular ones; see the router's bias."
)
_CHANGES = text("Balance the router (auxiliary loss or bias), use larger micro-batches, or a capacity factor.")


def _lost(groups: list[_Group]) -> Estimate:
    """Groups wait for each other at the end of a step at the latest: it lasts as long as the one that takes longest."""
    return estimate(np.max([group.measured for group in groups], axis=0) - np.max([g.even for g in groups], axis=0))


def _groups(collectives: pl.DataFrame, steps: tuple[int, ...], min_uneven: float) -> list[_Group]:
    """What the all-to-alls of each group make it wait for. Raises NotResolvable where none can be judged."""
    if "received_bytes" not in collectives.columns or collectives["received_bytes"].null_count() == len(collectives):
        raise NotResolvable(text("no all-to-all was recorded, or not how many bytes each rank received"))
    rows = _stretches(collectives).filter(pl.col("step").is_in(steps))
    if rows.is_empty():
        raise NotResolvable(text("the end of all-to-alls was not seen, so what is computed between them is not known"))
    rows = rows.filter(~pl.col("group").is_in(_partial(collectives)))
    if rows.is_empty():
        raise NotResolvable(_NOT_ALL)
    by_group = rows.group_by("group", maintain_order=True)
    return [_judged(str(name), of_group, steps, min_uneven) for (name,), of_group in by_group]


def _partial(collectives: pl.DataFrame) -> list[str]:
    """The groups that have all-to-alls, and members without any."""
    calls = collectives.filter(pl.col("op").is_in(ALL_TO_ALL_OPS))
    seen = calls.group_by("group").agg(pl.col("rank").n_unique(), pl.col("group_size").max())
    return seen.filter(~(pl.col("rank") >= pl.col("group_size")).fill_null(value=False))["group"].to_list()


def _stretches(collectives: pl.DataFrame) -> pl.DataFrame:
    """group, rank, step, place, received_bytes, own_ns: from each all-to-all's end to the rank's next one in the step.

    `place` counts a group's all-to-alls in a step.
    """
    begin = pl.coalesce("device_start_ns", "start_ns")
    rows = collectives.filter(pl.col("op").is_in(ALL_TO_ALL_OPS), pl.col("received_bytes").is_not_null())
    of_rank = ["group", "rank", "step"]
    return (
        rows.sort("group", "rank", "seq")
        .with_columns(
            (begin.shift(-1).over(of_rank) - pl.col("end_ns")).alias("own_ns"),
            (pl.col("seq") - pl.col("seq").min().over("group", "step")).alias("place"),
        )
        .drop_nulls("own_ns")
        .select("group", "rank", "step", "place", "received_bytes", pl.col("own_ns").clip(0))
    )


def _judged(name: str, rows: pl.DataFrame, steps: tuple[int, ...], min_uneven: float) -> _Group:
    """The group's stretches; a place is uneven if it is in enough steps that all its ranks have."""
    ranks = tuple(rows["rank"].unique().sort().to_list())
    total, measured, even = np.zeros((len(ranks), len(steps))), np.zeros(len(steps)), np.zeros(len(steps))
    expected, found = [np.zeros(0)], [np.zeros(0)]  # own time of a rank beyond the mean of the step's
    for _, of_place in rows.group_by("place", maintain_order=True):
        received, own = (_array(of_place, value, ranks, steps) for value in ("received_bytes", "own_ns"))
        whole = np.isfinite(received).all(axis=0)
        longest = np.nan_to_num(own).max(axis=0)
        measured += longest
        even += longest
        received, own = received[:, whole], own[:, whole]
        most_over_mean = received.max(axis=0) / np.maximum(received.mean(axis=0), 1.0)
        if whole.sum() < ENOUGH_STEPS or most_over_mean.mean() - 1 < min_uneven:
            continue
        x, y = received - received.mean(axis=0), own - own.mean(axis=0)
        per_byte = max(float((x * y).sum() / (x * x).sum()), 0.0)
        even[whole] += (own - per_byte * x).max(axis=0) - longest[whole]
        total[:, whole] += received
        expected.append((per_byte * x).ravel())
        found.append(y.ravel())
    return _Group(
        name=name,
        ranks=ranks,
        bytes=total[:, total.any(axis=0)],
        measured=measured,
        even=even,
        correlation=_correlation(np.concatenate(expected), np.concatenate(found)),
    )


def _array(rows: pl.DataFrame, value: str, ranks: tuple[int, ...], steps: tuple[int, ...]) -> Floats:
    """The values by (rank, step); NaN where there is none."""
    values = np.full((len(ranks), len(steps)), np.nan)
    values[np.searchsorted(ranks, rows["rank"]), np.searchsorted(steps, rows["step"])] = rows[value]
    return values


def _correlation(x: Floats, y: Floats) -> float:
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / scale) if scale > 0 else 0.0


def _largest(collectives: pl.DataFrame, group: _Group, ranks: list[int]) -> tuple[Evidence, ...]:
    """The all-to-all in which one of these ranks received most, on each of the first four."""
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
