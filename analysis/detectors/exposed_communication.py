"""Gradients are reduced after backward although most of it could happen meanwhile.

**Signal.** Transfer that blocks a rank between the last computation of backward and the optimizer, compared with what
would be left if the same bytes were reduced in `k` buckets while backward runs: bucket i is ready after i / k of it,
and takes 1 / k of the time that the gradients' communication took. The best k up to `max_buckets`, of 1 MiB or more
each, is the measure; what is above it is the loss, reported above `min_fraction` of the step, or above
`min_fraction_unhidden` where less than half of this communication is hidden and a step has one backward.

**Why it costs time.** Backward makes the gradients of the last layers first. A bucket that is sent at once is hidden
behind the rest of backward; one bucket for all (`bucket_cap_mb` too large, `no_sync`, a reduction by hand after
backward) leaves the links idle first and the ranks idle then.

On a device backward is what autograd's thread launched, and lies where its kernels do.

**False alarms.** On CPU ranks computation and communication share the processors: hiding one slows down the other, and
less is gained than the model says. Waiting for slow peers is not counted, slow links are: see `slow_link`.

**What to try.** A smaller `bucket_cap_mb` in DistributedDataParallel, `gradient_as_bucket_view=True`,
`static_graph=True`; for a reduction by hand, issue it per layer from a hook, asynchronously.

**Source.** The bucket model of DDP: e_k = max(ready_k, e_(k-1)) + S_k / B; Li et al. 2020, PyTorch Distributed.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_rows, price
from rankscope.analysis.metrics.backward import last_backwards
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, estimate, sums
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration, percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("backward", "collectives"),
    lost_as=AS_EXPOSED,
)

_TRIM = 0.1
_REDUCTIONS = ("allreduce", "allreduce_coalesced", "reduce_scatter", "reduce_scatter_base")
_NEARLY_ALL = 0.98  # of backward's computation: it is over then
_LEAST_BUCKET_BYTES = 1 << 20  # smaller ones are bound by latency: to send more of them takes longer
_AS_GOOD = 1.1  # the fewest buckets that leave no more than this times the least


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_fraction_unhidden: float = 0.03,
    max_buckets: int = 8,
) -> list[Finding]:
    """What reducing the gradients during backward would hide, as one finding for all ranks."""
    grid, rows, spans, is_alone = _spans(breakdown, phases, regions, collectives, kernels)
    most = min(max_buckets, max(1, int(np.median(spans["bytes"]) // _LEAST_BUCKET_BYTES)))
    left = np.stack([_left_over(spans, buckets) for buckets in range(1, most + 1)])
    saved = np.median(spans["exposed"] - left, axis=1)  # (buckets, step), of the median rank
    means = [estimate(np.maximum(of_buckets, 0.0), _TRIM) for of_buckets in saved]
    best = max(means, key=lambda mean: mean.ns)
    unhidden = np.median(spans["exposed"] - spans["hidden"]) > 0 and is_alone
    if not best.clear or best.ns < (min_fraction_unhidden if unhidden else min_fraction) * grid.step_ns:
        return []
    buckets = 1 + next(i for i, mean in enumerate(means) if mean.ns * _AS_GOOD >= best.ns)
    lost = means[buckets - 1]
    exposed, communication = float(np.median(spans["exposed"])), float(np.median(spans["exposed"] + spans["hidden"]))
    size_mb = float(np.median(spans["bytes"])) / buckets / 2**20
    return [
        Finding(
            detector="exposed_communication",
            title=text(
                "Of {communication} per step for reducing gradients, {exposed} come after backward and block all ranks",
                communication=duration(communication),
                exposed=duration(exposed),
            ),
            where="after backward",
            advice=text(
                "In {buckets} buckets, each sent while backward goes on, {share} of that would be left: "
                "set bucket_cap_mb to about {size_mb:.2g} in DistributedDataParallel; where gradients "
                "are reduced by hand, do it layer by layer from hooks.",
                buckets=buckets,
                share=percent(1 - lost.ns / exposed),
                size_mb=size_mb,
            ),
            evidence=longest_rows(rows, "collectives"),
            **price(grid, lost, lost.ns),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    kernels: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
) -> int:
    """The smallest loss per step that would have been reported."""
    grid, *_ = _spans(breakdown, phases, regions, collectives, kernels)
    return round(min_fraction * grid.step_ns)


@once
def _spans(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    regions: pl.DataFrame,
    collectives: pl.DataFrame,
    kernels: pl.DataFrame | None,
) -> tuple[StepGrid, pl.DataFrame, dict[str, Floats], bool]:
    """The grid, the transfers after backward, and by (rank, step): ns of backward, hidden and exposed, and bytes; and
    whether most steps have one backward: no gradients accumulate, and there is no pipeline.

    `backward` reaches to its last computation; `hidden` and `exposed` is the gradients' communication before and after.
    """
    grid = judged_grid(breakdown, FEW_STEPS)
    if grid.of(MIXED).any():
        raise NotResolvable(text("CUDA events do not tell transfers from what the devices compute meanwhile"))
    if not grid.blocked.any():
        raise NotResolvable(text("no rank was seen blocked on communication"))
    window = last_backwards(regions, phases, kernels)
    if window.is_empty():
        raise NotResolvable(text("no backward was recorded that an optimizer follows"))
    inside = (
        phases.join(window, on=["rank", "step"])
        .filter(pl.col("end_ns") > pl.col("backward_ns"), pl.col("start_ns") < pl.col("update_ns"))
        .with_columns(start_ns=pl.max_horizontal("start_ns", "backward_ns"))
    )
    worked = inside.filter(pl.col("part").is_in(["compute", "overlapped"]), pl.col("start_ns") < pl.col("returned_ns"))
    # What little comes after the last transfer (copies into the gradients) is not what buckets could hide behind.
    length, by_step = pl.col("end_ns") - pl.col("start_ns"), ["rank", "step"]
    nearly_all = length.cum_sum().over(by_step) >= _NEARLY_ALL * length.sum().over(by_step)
    computed = worked.sort("start_ns").filter(nearly_all).group_by(by_step).agg(computed_ns=pl.col("end_ns").min())
    window = window.join(computed, on=by_step)
    exposed = inside.join(window.select("rank", "step", "computed_ns"), on=["rank", "step"]).filter(
        pl.col("part") == "transfer", pl.col("start_ns") >= pl.col("computed_ns"), pl.col("label").is_in(_REDUCTIONS)
    )
    began = pl.coalesce(pl.col("^device_start_ns$"), "start_ns")
    reductions = (
        collectives.with_columns(start_ns=began)
        .join(window, on=["rank", "step"])
        .filter(
            pl.col("op").is_in(_REDUCTIONS),
            pl.col("start_ns").is_between("backward_ns", "update_ns", closed="left"),
            pl.col("wait_ns").is_not_null(),
            pl.col("end_ns").is_not_null(),
        )
    )
    begin = pl.max_horizontal(pl.col("start_ns") + pl.col("wait_ns"), pl.col("end_ns").cum_max().shift(1).over("rank"))
    hidden = reductions.sort("rank", "start_ns").with_columns(
        hidden_ns=(pl.min_horizontal("end_ns", "computed_ns") - begin).clip(0, None)
    )
    per_step = (
        window.select("rank", "step", backward=pl.col("computed_ns") - pl.col("backward_ns"))
        .join(exposed.group_by("rank", "step").agg(exposed=length.sum()), on=["rank", "step"], how="left")
        .join(
            hidden.group_by("rank", "step").agg(hidden=pl.col("hidden_ns").sum(), bytes=pl.col("size_bytes").sum()),
            on=["rank", "step"],
            how="left",
        )
        .fill_null(0)
    )
    if per_step.is_empty() or per_step["bytes"].sum() == 0:
        raise NotResolvable(text("no reduction of gradients was seen between backward and optimizer"))
    spans = {name: sums(grid, per_step, name) for name in ("backward", "exposed", "hidden", "bytes")}
    return grid, exposed, spans, 2 * int(window["alone"].sum()) > len(window)


def _left_over(spans: dict[str, Floats], buckets: int) -> Floats:
    """ns by (rank, step) that the last of so many equal buckets ends after backward."""
    each = (spans["hidden"] + spans["exposed"]) / buckets
    end = np.zeros_like(each)
    for bucket in range(1, buckets + 1):
        end = np.maximum(end, spans["backward"] * bucket / buckets) + each
    return end - spans["backward"]
