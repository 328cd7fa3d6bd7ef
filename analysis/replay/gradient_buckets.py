"""DDP's buckets of gradients: which there are, which fit together, and what one takes by its size."""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.metrics.bandwidth import fit_line
from rankscope.analysis.replay.graph import Floats, Ints
from rankscope.analysis.timeline.build import Timeline
from rankscope.errors import BadFix

__all__ = ["gradient_buckets", "latency_and_rate", "merged_buckets"]

_FIRST_BUCKET_BYTES = 1.1 * 2**20  # DDP keeps its first bucket below 1 MiB, whatever the others are


def gradient_buckets(timeline: Timeline) -> pl.DataFrame:
    """Return the asynchronous all-reduces that are matched and were called in backward: DDP's.

    Where torch did not say which are, these are the ones that went on when their call was over.
    """
    backward = timeline.regions.filter(pl.col("kind") == "backward", pl.col("thread") == 0)
    backward = backward.select("rank", backward_ns="start_ns", returned_ns="end_ns").sort("backward_ns")
    return (
        timeline.collectives.filter(
            pl.col("op") == "allreduce",
            pl.col("is_async").fill_null(pl.col("end_ns") > pl.col("issued_ns")),
            pl.col("instance_id").is_not_null(),
            pl.col("end_ns").is_not_null(),
            pl.col("size_bytes") > 0,
        )
        .sort("start_ns")
        .join_asof(backward, left_on="start_ns", right_on="backward_ns", by="rank", check_sortedness=False)
        .filter(pl.col("start_ns") < pl.col("returned_ns"), pl.col("step").is_not_null())
        .group_by("instance_id")
        .agg(pl.col("group_id", "step", "size_bytes", "start_ns").first())
        .sort("group_id", "step", "start_ns")
        .select("group_id", "step", "instance_id", "size_bytes")
    )


def merged_buckets(buckets: pl.DataFrame, cap_bytes: float) -> Ints:
    """Return the number of the bucket into which each one goes, in order: as many as fit, of one step and group."""
    number, filled, alone, place, numbers = -1, 0.0, False, None, []
    for group, step, size in buckets.select("group_id", "step", "size_bytes").iter_rows():
        first = (group, step) != place
        if first or alone or filled + size > cap_bytes:
            number, filled = number + 1, 0.0
        alone = first and size <= _FIRST_BUCKET_BYTES
        filled, place = filled + size, (group, step)
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def latency_and_rate(size: Floats, ns: Floats) -> tuple[float, float]:
    """α and 1 / B of α + S / B. Raises `BadFix` where the sizes hardly differ.

    Source: the bucket model of DDP, Li et al. 2020.
    """
    line = fit_line(size, ns)
    if line is None:
        raise BadFix("all buckets have about the same size, so their latency is unknown")
    return line.latency_ns, line.ns_per_byte
