"""Device work by name, and how it differs from rank to rank."""

from __future__ import annotations

import polars as pl

__all__ = ["by_name", "bytes_moved", "launch_delays"]


def by_name(kernels: pl.DataFrame) -> pl.DataFrame:
    """One row per kernel: count, time in all and its share, mean; per rank the least, the most and its rank.

    `longest_rank`, `start_ns` and `end_ns` are the longest one's.
    `excess` is the most of any rank over the median of the ranks, minus 1; null on one rank.
    """
    length = (pl.col("end_ns") - pl.col("start_ns")).alias("ns")
    longest = pl.col("start_ns", "end_ns").get(length.arg_max())
    per_rank = (
        kernels.group_by("name", "work", "rank")
        .agg(pl.len().alias("count"), length.sum(), longest, length.max().alias("longest_ns"))
        .sort("ns", "rank")
    )
    of_longest = pl.col("longest_ns").arg_max()
    several = kernels["rank"].n_unique() > 1
    return (
        per_rank.group_by("name", "work", maintain_order=True)
        .agg(
            pl.col("count").sum(),
            pl.col("ns").sum().alias("total_ns"),
            pl.col("ns").min().alias("least_ns"),
            pl.col("ns").max().alias("most_ns"),
            pl.col("rank").last().alias("most_rank"),
            pl.col("rank").get(of_longest).alias("longest_rank"),
            pl.col("start_ns", "end_ns").get(of_longest),
            (pl.col("ns").max() / pl.col("ns").median() - 1).alias("excess"),
            pl.len().alias("ranks"),
        )
        .with_columns(
            (pl.col("total_ns") / pl.col("total_ns").sum()).alias("share"),
            (pl.col("total_ns") / pl.col("count")).alias("mean_ns"),
            pl.when(pl.lit(several) & pl.col("excess").is_finite()).then("excess").alias("excess"),
        )
        .sort("total_ns", "name", descending=[True, False])
    )


def bytes_moved(kernels: pl.DataFrame) -> pl.DataFrame:
    """name, work, bytes, bytes_per_s of the copies and fills whose size is known; the others count for neither.

    The rate is null where these took no time.
    """
    sized = kernels.drop_nulls("bytes")
    length = (pl.col("end_ns") - pl.col("start_ns")).sum()
    return sized.group_by("name", "work").agg(
        pl.col("bytes").sum(), pl.when(length > 0).then(pl.col("bytes").sum() / length * 1e9).alias("bytes_per_s")
    )


def launch_delays(kernels: pl.DataFrame) -> pl.DataFrame:
    """One row per rank: how long after its launch device work began. Long: work queues up; short: the host is late."""
    known = kernels.drop_nulls("launch_ns").with_columns((pl.col("start_ns") - pl.col("launch_ns")).alias("_ns"))
    return (
        known.group_by("rank")
        .agg(
            pl.len().alias("count"),
            pl.col("_ns").quantile(0.05).alias("p5_ns"),
            pl.col("_ns").median().alias("median_ns"),
            pl.col("_ns").quantile(0.95).alias("p95_ns"),
        )
        .sort("rank")
    )
