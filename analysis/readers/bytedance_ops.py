"""Reads op-level traces of pipeline-parallel jobs: the Parquet files of ByteDance's straggler study.

One file holds all ranks. Each row is one operation of one step: dp_rank, stage, rank, step, optype, start_ts, duration
(seconds), seq_id, mc (model chunk), mb_id (microbatch), gmc. Starts count from the beginning of their step, on a clock
that all ranks share; the steps are laid end to end here. The meta file beside it is not needed.

Source: https://github.com/ByteDance-Seed/StragglerAnalysis
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.pipeline_ops import FORWARD
from rankscope.analysis.readers.base import FrameReader, Reader, files_in, gap, in_one_line, shaped, table
from rankscope.analysis.readers.bounds import check_bytes, check_ranks
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.errors import BadInput

__all__ = ["OPS_LACK", "end_to_end", "open_run", "reader", "recognises", "virtual_stages"]

_MAGIC = b"PAR1"
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id")
_NS_PER_S = 1e9
_LONGEST_S = 1e6  # no step takes eleven days
_WIDEST_BYTES = 8  # of a value
_OPS_ONLY = text("the trace holds operations of pipeline stages, not what each host did")
OPS_LACK = dict.fromkeys(("breakdown", "phases", "regions", "collectives"), _OPS_ONLY)


def recognises(path: Path) -> bool:
    """Such a file, or a folder in which one lies."""
    if path.is_dir():
        return any(_is_op_trace(f) for f in path.glob("*.parquet"))
    return _is_op_trace(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """Return the one op trace that lies there. Raises `BadInput`."""
    files = [f for f in files_in(paths) if _is_op_trace(f)]
    if len(files) != 1:
        what = "is no whole op trace" if not files else f"holds {len(files)} op traces: give one of them"
        raise BadInput(f"{', '.join(paths)} {what}")
    from pyarrow import parquet  # 6 MB, and few have such files

    try:
        _check_size(files[0])
        # polars panics on damaged files, pyarrow raises.
        columns = parquet.read_table(files[0], columns=list(_COLUMNS))
        columns.validate(full=True)
        bare = pa.table({name: columns[name] for name in _COLUMNS})  # without metadata, at which polars panics too
        ops, missing = _ops(pl.DataFrame(pl.from_arrow(bare)), files[0].name)
        ops = shaped("ops", ops)
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError) as error:
        raise BadInput(f"{files[0]} cannot be read: {in_one_line(error)}") from None
    if ops.is_empty():
        raise BadInput(f"{files[0]} holds no operation")
    check_ranks(files[0], ops["rank"].unique())
    ranks = ops.group_by("rank").agg(pl.col("start_ns").min()).sort("rank")
    world = _world_size(ranks["rank"].to_list())
    return FrameReader(
        frames={
            "ranks": table("ranks", [dict(row, world_size=world) for row in ranks.iter_rows(named=True)]),
            "ops": ops,
        },
        missing=missing,
        lacks=OPS_LACK,
    )


def _check_size(path: Path) -> None:
    """Check that its rows fit once they are unpacked: equal ones take next to no space in the file."""
    from pyarrow import parquet

    rows = parquet.read_metadata(path).num_rows
    check_bytes(path, rows * len(_COLUMNS) * _WIDEST_BYTES, path.stat().st_size)


def end_to_end(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the operations, whose times count from the start of their step, with the steps one after the other."""
    lengths = ops.group_by("step").agg(pl.col("end_ns").max()).sort("step")
    offsets = lengths.select("step", (pl.col("end_ns").cum_sum() - pl.col("end_ns")).alias("_offset"))
    shifted = (pl.col("start_ns", "end_ns") + pl.col("_offset")).name.keep()
    return ops.join(offsets, on="step", how="left", maintain_order="left").with_columns(shifted).drop("_offset")


def _world_size(ranks: Sequence[int]) -> int:
    """Return the world size; if one rank of each tensor-parallel group was recorded, by the distance of ranks."""
    apart = math.gcd(*(rank - ranks[0] for rank in ranks)) or 1
    return ranks[-1] + (apart if ranks[0] == 0 else 1)


def virtual_stages(ops: pl.DataFrame) -> pl.DataFrame:
    """Return the operations with each model chunk of a stage as a stage of its own, as microbatches pass through them.

    Chunk c of stage s is stage c × p + s of p; where the second chunk begins on the last stage (a V), odd chunks count
    from there. Operations are numbered from 0 within it.
    """
    if ops["chunk"].fill_null(0).max() in (None, 0):
        return ops
    stages = int(ops["stage"].to_numpy().max()) + 1
    chunk, of = pl.col("chunk").fill_null(0), ["rank", "step", "stage", "name"]
    begins = ops.filter(chunk == 1, name=FORWARD).sort("start_ns")["stage"]
    turns = len(begins) > 0 and stages > 1 and begins[0] == stages - 1
    along = pl.when((chunk % 2 == 1) & turns).then(stages - 1 - pl.col("stage")).otherwise("stage")
    placed = ops.with_columns((chunk.cast(pl.Int32) * stages + along).alias("stage"))
    return placed.with_columns((pl.col("seq").rank("ordinal").over(of) - 1).cast(pl.Int32).alias("seq"))


def _is_op_trace(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                return False
        from pyarrow import parquet

        return set(_COLUMNS) <= set(parquet.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False


def _ops(raw: pl.DataFrame, name: str) -> tuple[pl.DataFrame, list[Gap]]:
    """Return the operations in ns, and what was left out."""
    # The study adds in the file's own precision (float32), so that must be done here too: it is worth up to 0.1 µs.
    times = raw.with_columns((pl.col("start_ts") + pl.col("duration")).alias("_end"))
    good = times.drop_nulls().filter(
        pl.col("start_ts").abs() < _LONGEST_S, pl.col("_end").abs() < _LONGEST_S, pl.col("duration") >= 0
    )
    ops = good.select(
        pl.col("rank", "step", "stage"),
        (pl.col("start_ts").cast(pl.Float64) * _NS_PER_S).round().cast(pl.Int64).alias("start_ns"),
        (pl.col("_end").cast(pl.Float64) * _NS_PER_S).round().cast(pl.Int64).alias("end_ns"),
        pl.col("optype").cast(pl.String).alias("name"),
        pl.col("dp_rank").alias("replica"),
        pl.when(pl.col("mc") >= 0).then("mc").alias("chunk"),
        pl.when(pl.col("mb_id") >= 0).then("mb_id").alias("microbatch"),
        pl.col("seq_id").alias("seq"),
    )
    lost = len(raw) - len(good)
    why = text(
        "{lost} of {name} lack a value or have an impossible time; they were left out",
        lost=counted(lost, "operation"),
        name=name,
    )
    return end_to_end(virtual_stages(ops)), [gap("ops", why, count=lost)] if lost else []


reader = Reader(recognises=recognises, open_run=open_run)
