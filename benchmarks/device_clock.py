"""Where the marks of CUDA events lie between the kernels that a deep window saw, for benchmarks/gpu_checks.py.

    python benchmarks/device_clock.py RUN

The device comes to a mark after the last kernel that was launched before it and before the first one launched after
it, on one stream. Prints by how much it does not, and the errors that marks and kernels claim.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl


def table(run: Path, name: str) -> pl.DataFrame:
    """All ranks' rows, with the rank."""
    parts = sorted(run.glob(f"{name}/rank=*/*.arrow"))
    return pl.concat([pl.read_ipc(part).with_columns(rank=int(part.parent.name.split("=")[1])) for part in parts])


def outside(marks: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Marks within what the window saw, with `outside_ns`: how far each lies out of its place; 0: it does not."""
    busiest = pl.col("stream") == pl.col("stream").mode().first().over("rank")
    launched = kernels.filter(busiest & (pl.col("work") == 0)).sort("launched_ns")
    before = launched.select("rank", "launched_ns", last_ns=pl.col("end_ns").cum_max().over("rank"))
    after = launched.select("rank", "launched_ns", first_ns="start_ns")
    keys = {"left_on": "recorded_ns", "right_on": "launched_ns", "by": "rank", "check_sortedness": False}
    placed = (
        marks.drop_nulls("device_ns")
        .sort("recorded_ns")
        .join_asof(before, strategy="backward", **keys)
        .join_asof(after, strategy="forward", **keys)
        .drop_nulls(["last_ns", "first_ns"])
    )
    early, late = pl.col("last_ns") - pl.col("device_ns"), pl.col("device_ns") - pl.col("first_ns")
    return placed.with_columns(outside_ns=pl.max_horizontal(early, late, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--window", default="window-0001")
    args = parser.parse_args()
    window = args.run / args.window
    launches = table(window, "launches").select("rank", "correlation", launched_ns="start_ns")
    kernels = table(window, "kernels").join(launches, on=["rank", "correlation"])
    placed = outside(table(args.run, "device_marks"), kernels)
    claimed = placed["clock_error_ns"].max(), kernels["clock_error_ns"].max()
    wrong = placed.filter(pl.col("outside_ns") > pl.col("clock_error_ns") + (claimed[1] or 0)).height
    print(f"{placed.height} marks; out of place by up to {placed['outside_ns'].max()} ns, {wrong} beyond the errors")
    print(f"claimed: marks {claimed[0]} ns, kernels {claimed[1]} ns")


if __name__ == "__main__":
    main()
