"""Host stalls that delayed the job, where the devices' work meanwhile was not recorded."""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, above_peers, estimate
from rankscope.analysis.timeline.matching import MUTUAL_OPS

__all__ = ["device_waits", "held_up", "only_hosts_seen"]

_ALIKE = 0.5  # of the longest stop of a step: ranks that stop for as long are assumed to be late for it
_QUIET = 5  # steps without a stop that show how long a step usually is
_CLEARLY = 2.0  # standard deviations


def only_hosts_seen(ranks: pl.DataFrame, collectives: pl.DataFrame, kernels: pl.DataFrame, marks: pl.DataFrame) -> bool:
    """Say whether ranks run on devices without kernels or CUDA events that show when they had work.

    Not where most operations end on the hosts, as gloo's do: these wait for their devices themselves.
    """
    on_devices = bool((ranks["device"].drop_nulls() != "cpu").any())
    waits_itself = 2 * collectives["end_ns"].count() > len(collectives)
    return on_devices and kernels.is_empty() and marks.is_empty() and not waits_itself


def device_waits(steps: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return the devices' waits in each operation of all its ranks, by NCCL's durations.

    Columns rank, step, group_id, instance_id, wait_ns; a step without any has a row with nulls.
    """
    known = pl.col("end_ns").is_null() & pl.col("wait_ns").is_not_null() & pl.col("op").is_in(MUTUAL_OPS)
    waits = collectives.filter(known).select("rank", "step", "group_id", "instance_id", "wait_ns")
    return steps.select("rank", "step").join(waits, on=["rank", "step"], how="left")


def held_up(grid: StepGrid, part: str, waits: pl.DataFrame | None) -> Floats:
    """Return ns per (rank, step) of the part that held up the job: all, or what is sure where only hosts were seen.

    That is no more than the others' devices waited (`waits`, as `device_waits` has it) for those that stopped, in
    this step's operations or in the next one's; or, of stops in some steps only, the share of them by which these and
    the next are longer.
    """
    stopped = grid.of(part)
    if waits is None or not stopped.any():
        return stopped
    beyond = np.maximum(above_peers(stopped), 0)
    longest = beyond.max(axis=0)
    beyond = np.where(beyond >= _ALIKE * longest, beyond, 0)
    here = np.minimum(longest, _waited_for(beyond > 0, grid, waits, 0))
    later = np.maximum(_waited_for(beyond > 0, grid, waits, 1) - np.append(here[1:], 0), 0)
    shown = np.minimum(beyond, np.minimum(longest, here + later))
    return np.asarray(np.maximum(shown, _share_in_steps(grid, stopped.max(axis=0)) * stopped))


def _waited_for(late: NDArray[np.bool_], grid: StepGrid, waits: pl.DataFrame, ahead: int) -> Floats:
    """Return the least that all others waited for them in an operation of each step, or of the `ahead`-th after it, ns.

    Less what they waited themselves in other groups: that is why they were late.
    """
    row, column = np.nonzero(late)
    them = pl.DataFrame({"rank": np.array(grid.ranks)[row], "step": np.array(grid.steps)[column]})
    them = them.cast({"rank": pl.Int32, "step": pl.Int32}).with_columns(them=True)
    rows = waits.drop_nulls("instance_id").with_columns(pl.col("step") - ahead)
    rows = rows.join(them, on=["rank", "step"], how="left").with_columns(pl.col("them").fill_null(value=False))
    by_group = ["step", "group_id"]
    others = rows.group_by("instance_id").agg(
        pl.col(by_group).first(), pl.col("wait_ns").filter(~pl.col("them")).min().alias("ns")
    )
    theirs = rows.filter("them").group_by("rank", *by_group).agg(pl.col("wait_ns").sum())
    elsewhere = theirs.with_columns(pl.col("wait_ns").sum().over("rank", "step") - pl.col("wait_ns"))
    net = (
        others.group_by(by_group)
        .agg(pl.col("ns").max())
        .join(elsewhere.group_by(by_group).agg(pl.col("wait_ns").max()), on=by_group)
        .group_by("step")
        .agg((pl.col("ns") - pl.col("wait_ns")).max().clip(0))
        .drop_nulls("ns")
    )
    ns = np.zeros(len(grid.steps))
    known = net.filter(pl.col("step").is_in(grid.steps))
    ns[np.searchsorted(grid.steps, known["step"])] = known["ns"].to_numpy()
    return ns


def _share_in_steps(grid: StepGrid, stopped: Floats) -> float:
    """Return the excess of steps with a stop, and of those after them, over the stops; 0 if it may be chance.

    A host that was ahead of its device catches up in the next steps.
    """
    stops = stopped > stopped.mean() / 2
    touched = stops | np.append(False, stops[:-1])
    length = np.sum(list(grid.parts.values()), axis=0).mean(axis=0)
    if (~touched).sum() < _QUIET:
        return 0.0
    usual = estimate(length[~touched])
    scatter = length[~touched].std(ddof=1) * touched.sum() ** 0.5 + usual.half_width_ns / 1.96 * touched.sum()
    longer = float((length[touched] - usual.ns).sum())
    return min(longer / float(stopped[stops].sum()), 1.0) if longer > _CLEARLY * scatter else 0.0
