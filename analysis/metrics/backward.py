"""When ranks compute gradients: on hosts by the regions of backward, on devices by the thread that launched kernels.

A device is behind its host, so its backward lies where its own kernels do. PyTorch runs backward of work on a device in
a thread of autograd's; what that thread launches is backward, recomputed activations included.
"""

from __future__ import annotations

import polars as pl

from rankscope.analysis.metrics.once import once
from rankscope.analysis.model.kernels import COMPUTE

__all__ = ["last_backwards", "last_backwards_by_marks"]

_MAIN_THREAD = 0
_MUCH = 0.1  # share of what computes in a rank's steps that autograd's thread must have launched, or it is none


@once
def last_backwards(regions: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame | None) -> pl.DataFrame:
    """Of each step the last backward and the optimizer after it: with gradients accumulated only that one reduces.

    (rank, step, backward_ns, returned_ns, update_ns, alone), the last says whether the step has no other backward. On
    ranks with kernels the times are the device's: `update_ns` is when it begins with what the optimizer launched.
    `kernels` has the columns of `with_launches`.
    """
    on_hosts = _by_regions(regions)
    if kernels is None or kernels.is_empty():
        return on_hosts
    with_kernels = kernels["rank"].unique().implode()
    return pl.concat(
        [on_hosts.filter(~pl.col("rank").is_in(with_kernels)), _by_kernels(regions, phases, kernels)],
        how="vertical_relaxed",
    )


def last_backwards_by_marks(phases: pl.DataFrame) -> pl.DataFrame:
    """As `last_backwards`, on devices whose phases CUDA events close: these name what is computed."""
    by_step = ["rank", "step"]
    computes = phases.filter(pl.col("part") == "compute").sort("rank", "start_ns")
    of_forward, of_backward = (pl.col("label") == name for name in ("forward", "backward"))
    forward_end = pl.col("end_ns").filter(of_forward).max().over(by_step).fill_null(0)
    is_last = pl.col("start_ns") >= forward_end
    backwards = computes.with_columns(is_last=is_last).filter(of_backward)
    last = backwards.group_by(by_step).agg(
        backward_ns=pl.col("start_ns").filter("is_last").min(),
        returned_ns=pl.col("end_ns").max(),
        alone=pl.col("is_last").all(),
    )
    update = phases.filter(pl.col("part") == "optimizer").group_by(by_step).agg(update_ns=pl.col("start_ns").min())
    return (
        last.drop_nulls("backward_ns")
        .join(update, on=by_step)
        .select(*by_step, "backward_ns", "returned_ns", "update_ns", "alone")
    )


def _by_regions(regions: pl.DataFrame) -> pl.DataFrame:
    main = regions.filter(pl.col("thread") == _MAIN_THREAD, pl.col("kind").is_in(["backward", "optimizer"]))
    main, by_step = main.sort("start_ns"), ["rank", "step"]
    backward = main.filter(pl.col("kind") == "backward").group_by(by_step)
    update = main.filter(pl.col("kind") == "optimizer").group_by(by_step)
    last = backward.agg(backward_ns=pl.col("start_ns").last(), returned_ns=pl.col("end_ns").last(), alone=pl.len() == 1)
    return last.join(update.agg(update_ns=pl.col("start_ns").last()), on=by_step).select(
        *by_step, "backward_ns", "returned_ns", "update_ns", "alone"
    )


def _by_kernels(regions: pl.DataFrame, phases: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    by_step = ["rank", "step"]
    steps = phases.group_by(by_step).agg(start_ns=pl.col("start_ns").min(), _end=pl.col("end_ns").max())
    computes = (
        kernels.filter(pl.col("work") == COMPUTE)
        .select("rank", "start_ns", "end_ns", "launch_ns", "launch_thread")
        .sort("start_ns")
        .join_asof(steps.sort("start_ns"), on="start_ns", by="rank", check_sortedness=False)
        .filter(pl.col("start_ns") < pl.col("_end"))
    )
    length = pl.col("end_ns") - pl.col("start_ns")
    launched = (
        computes.with_columns(all_ns=length.sum().over("rank"))
        .filter(pl.col("launch_thread") != _MAIN_THREAD)
        .group_by("rank", "launch_thread")
        .agg(share=(length / pl.col("all_ns")).sum())
        .filter(pl.col("share") >= _MUCH)
        .sort("share")
        .group_by("rank", maintain_order=True)
        .agg(_autograd=pl.col("launch_thread").last())
    )
    updates = regions.filter(pl.col("kind") == "optimizer", pl.col("thread") == _MAIN_THREAD)
    updates = updates.select("rank", launch_ns="start_ns", _updated="end_ns").sort("launch_ns")
    computes = (
        computes.join(launched, on="rank")
        .sort("launch_ns")
        .join_asof(updates, on="launch_ns", by="rank", check_sortedness=False)
        .with_columns(
            is_backward=pl.col("launch_thread") == pl.col("_autograd"),
            is_update=(pl.col("launch_thread") == _MAIN_THREAD) & (pl.col("launch_ns") < pl.col("_updated")),
        )
        .drop_nulls("launch_ns")
        .sort("rank", "launch_ns")
    )
    # What the main thread launches besides ends a backward: the next microbatch's forward, or the optimizer.
    begins = pl.col("is_backward") & ~pl.col("is_backward").shift(1).over(by_step).fill_null(value=False)
    backward = (
        computes.filter(pl.col("is_backward") | (pl.col("launch_thread") == _MAIN_THREAD))
        .with_columns(_number=begins.cum_sum().over(by_step))
        .filter("is_backward")
    )
    last = backward.filter(pl.col("_number") == pl.col("_number").max().over(by_step))
    found = last.group_by(by_step).agg(
        backward_ns=pl.col("start_ns").min(), returned_ns=pl.col("end_ns").max(), alone=pl.col("_number").first() == 1
    )
    first = computes.filter("is_update").join(found, on=by_step).filter(pl.col("start_ns") >= pl.col("backward_ns"))
    return found.join(first.group_by(by_step).agg(update_ns=pl.col("start_ns").min()), on=by_step).select(
        *by_step, "backward_ns", "returned_ns", "update_ns", "alone"
    )
