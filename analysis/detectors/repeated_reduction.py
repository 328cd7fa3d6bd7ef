"""Gradients are reduced in every backward pass of a step, and only the sum of the last one is needed.

**Signal.** A step with several backward passes (gradient accumulation), a forward pass between them, and in each of
them all-reduces of about as many bytes as in the last: `min_bytes` or more, by operations of a gradient bucket's size.
The loss is the transfer of those in all passes but the last that blocks the median rank after the last peer arrived,
reported from `min_fraction` of the step on. Groups of tensor, expert and pipeline parallelism do not count, and neither
does a group that all-reduces as much outside of backward: activations, not gradients.

**Why it costs time.** Gradients add up on each rank, so that one reduction of the sum gives the same update as one of
each part. With k microbatches per step the job moves k times the bytes, and stops k times for the slowest rank.

**False positives.** Two models of equal size with a backward pass each between two updates, such as twin critics, look
the same; there each reduction is needed. DeepSpeed's ZeRO-2 has to reduce each part, since it keeps only a share of the
sum. Reductions by reduce-scatter (FSDP) are not checked: to skip them costs memory.

**What to try.** `with model.no_sync():` around forward and backward of all microbatches but the last; Accelerate's
`accumulate(model)` and Lightning's `accumulate_grad_batches` do that. With FSDP2's replicas
`set_requires_all_reduce(False)`.

**Source.** `no_sync` of DistributedDataParallel; Li et al. 2020, PyTorch Distributed, 3.2.4. Thresholds are ours.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import longest_rows, price, transfer_grid
from rankscope.analysis.metrics.exposed_communication import described, kind_of_group, with_exposed
from rankscope.analysis.metrics.step_matrix import TRIM, estimate, sums
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(needs=("backward", "collectives"), waited_for=False, lost_as=AS_EXPOSED)

_REDUCTIONS = ("allreduce", "allreduce_coalesced")
_NEARLY_ALL = 0.9  # of the bytes of the last backward pass
_FEW = 0.1  # of the bytes in backward: so much may be reduced outside of it, for norms and logs
_LEAST_MEAN_BYTES = 65_536  # statistics of SyncBatchNorm are smaller
_MAIN_THREAD = 0


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame,
    *,
    min_fraction: float = 0.03,
    min_bytes: int = 1 << 20,
) -> list[Finding]:
    """Report what the reductions in all backward passes but the last cost."""
    grid = transfer_grid(breakdown)
    rows = _numbered(with_exposed(collectives, phases), regions)
    if rows.is_empty():
        return []
    rows = _repeated(rows, groups, min_bytes)
    lost = estimate(np.median(sums(grid, rows, "exposed_ns"), axis=0), TRIM)
    if not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    return [
        Finding(
            detector="repeated_reduction",
            title=text(
                "Gradients are reduced in each of {passes} backward passes per step: all but the last cost {lost}",
                passes=round(float(rows.group_by("rank", "step").agg(pl.col("last").max())["last"].to_numpy().mean())),
                lost=duration(lost.ns),
            ),
            where="backward",
            advice=text(
                "Reduce the sum, in the last pass only: run the others within model.no_sync() (Accelerate: "
                "accumulate(model), Lightning: accumulate_grad_batches)."
            ),
            groups=tuple(rows["group"].drop_nulls().unique().sort().to_list()),
            evidence=longest_rows(rows.filter(pl.col("exposed_ns") > 0), "collectives"),
            **price(grid, lost, lost.ns),
        )
    ]


def resolution_ns(breakdown: pl.DataFrame, *, min_fraction: float = 0.03) -> int:
    """Return the smallest loss per step that would have been reported."""
    return round(min_fraction * transfer_grid(breakdown).step_ns)


def _numbered(rows: pl.DataFrame, regions: pl.DataFrame) -> pl.DataFrame:
    """All-reduces of steps with several backward passes, with `nth`: the one in which each was called, null: in none.

    A pass that no forward pass precedes is part of the one before.
    """
    main, by_step = regions.filter(pl.col("thread") == _MAIN_THREAD), ["rank", "step"]
    backward = main.filter(pl.col("kind") == "backward").group_by(by_step).len()
    if backward.is_empty():
        raise NotResolvable(text("no backward pass was recorded"))
    several = backward.filter(pl.col("len") > 1)
    if several.is_empty():
        main, rows = main.clear(), rows.clear()
    main = main.join(several, on=by_step, how="semi").filter(pl.col("kind").is_in(["forward", "backward"]))
    follows = (pl.col("kind") == "backward") & (pl.col("kind").shift(1).over(by_step) == "forward")
    passes = (
        main.sort("rank", "start_ns")
        .with_columns(nth=follows.cum_sum().over(by_step))
        .filter(pl.col("kind") == "backward")
        .filter(pl.col("nth").n_unique().over(by_step) > 1)
        .select(*by_step, "nth", begin="start_ns", until="end_ns")
    )
    within = pl.col("start_ns") < pl.col("until")
    return (
        rows.join(passes, on=by_step, how="semi", maintain_order="left")
        .filter(pl.col("op").is_in(_REDUCTIONS))
        .sort("start_ns")
        .join_asof(passes.sort("begin"), left_on="start_ns", right_on="begin", by=by_step, check_sortedness=False)
        .with_columns(nth=pl.when(within).then("nth"))
    )


def _repeated(rows: pl.DataFrame, groups: pl.DataFrame, min_bytes: int) -> pl.DataFrame:
    """Return the reductions of all passes but the last that move about as much as its, with its number as `last`."""
    rows = rows.join(described(groups), on="group_id", how="left").filter(kind_of_group().is_in(["data", "unknown"]))
    in_step = ["rank", "step", "group_id"]
    size = pl.col("size_bytes").fill_null(0)
    outside = size.filter(pl.col("nth").is_null()).sum().over(in_step)
    inside = size.filter(pl.col("nth").is_not_null()).sum().over(in_step)
    rows = rows.filter(outside <= _FEW * inside, pl.col("nth").is_not_null())
    last = pl.col("nth").max().over(in_step)
    rows = rows.with_columns(
        last=last, bytes=size.sum().over([*in_step, "nth"]), count=pl.len().over([*in_step, "nth"])
    )
    of_last = pl.col("bytes").filter(pl.col("nth") == pl.col("last")).max().over(in_step)
    return rows.filter(
        pl.col("nth") < pl.col("last"),
        of_last >= min_bytes,
        pl.col("bytes") >= _NEARLY_ALL * of_last,
        pl.col("bytes") >= _LEAST_MEAN_BYTES * pl.col("count"),
    )
