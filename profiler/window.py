"""Converts the traces of a deep window to its tables, in a process that the agent starts.

A window's folder is a run folder inside the run's. It holds what torch.profiler saw, every operator included, on the
run's clock.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.analysis.readers import kineto
from rankscope.analysis.readers.native.arrow_files import read_rows
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.timeline.clocks import TIME_COLUMNS
from rankscope.collectors.agent.arrow_writer import write_sealed
from rankscope.errors import BadInput
from rankscope.profiler.commands.import_ import write

if TYPE_CHECKING:
    import polars as pl

    from rankscope.analysis.model.finding import Gap
    from rankscope.analysis.readers.base import FrameReader

__all__ = ["convert", "place"]

_NICE = 10


def main(arguments: list[str]) -> int:
    """Convert the traces that the agent describes on standard input; 1 and one line if that fails."""
    os.nice(_NICE)
    folder, described = Path(arguments[0]), json.load(sys.stdin)
    try:
        convert(folder, described)
    except Exception as error:  # half a window would give other answers
        for rank in map(int, described["ranks"]):
            for half in folder.glob(f"*/rank={rank:05d}"):
                shutil.rmtree(half, ignore_errors=True)
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


def convert(folder: Path, described: Mapping[str, Any]) -> int:
    """Turn the traces of these ranks into tables of the window's folder; return how many rows that makes.

    `described` has `node`, `window`, `first_step`, `steps`, `reason`, and `ranks`: by rank the `path` of its trace and
    its `marks`, for each span of a step between which ns of the run's clock it began. Raises `BadInput`, OSError.
    """
    (folder / "run").mkdir(exist_ok=True)
    paths = {int(rank): str(of_rank["path"]) for rank, of_rank in described["ranks"].items()}
    reader = kineto.open_run(list(paths.values()), operators_from_ns=0)
    begins = _begins(reader.read("steps"))
    clocks = {
        int(rank): place(begins.get(int(rank), ()), of_rank["marks"]) for rank, of_rank in described["ranks"].items()
    }
    known = {key: described[key] for key in ("window", "first_step", "steps", "reason")}
    known["clock_error_ns"] = {str(rank): error_ns for rank, (_, error_ns) in clocks.items()}
    node = int(described["node"])
    placed = _Placed(reader=reader, clocks=clocks, node=node, run={node: known})
    rows = write(Trace(paths=(str(folder),), source="kineto", run=placed.run, reader=placed), folder)
    _copy_clocks(folder, node)
    for path in paths.values():
        Path(path).unlink()
    return rows


def _copy_clocks(folder: Path, node: int) -> None:
    """Copy the clock relations so far to the window, if there are several nodes."""
    if len(list(folder.parent.glob("run/node=*.json"))) < 2:
        return
    place = Path("clocks") / f"node={node:05d}"
    parts = [read_rows(path, closed=False)[0] for path in sorted((folder.parent / place).glob("*.arrow"))]
    rows = [part for part in parts if part is not None]
    if rows:
        write_sealed(folder / place, "", pa.concat_tables(rows))


def place(begins_ns: Sequence[int], marks: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the offset from a trace's times to the run's clock, and its error, ns.

    Each span of a step began between two readings of the run's clock: so each bounds the offset from both sides. It is
    the middle of what all of them allow, and the error half of that, or how far they disagree. Raises `BadInput`.
    """
    if not marks or len(begins_ns) != len(marks):
        raise BadInput(f"the trace has {len(begins_ns)} of the {len(marks)} spans of steps that relate its clock")
    low = max(before - begin for begin, (_, before, _) in zip(begins_ns, marks, strict=True))
    high = min(after - begin for begin, (_, _, after) in zip(begins_ns, marks, strict=True))
    return (low + high) // 2, abs(high - low) // 2 + 1


def _begins(steps: pl.DataFrame) -> dict[int, list[int]]:
    return {
        rank: rows["start_ns"].sort().to_list() for (rank,), rows in steps.partition_by("rank", as_dict=True).items()
    }


@dataclass(slots=True, kw_only=True)
class _Placed:
    """A profiler's run with every time on the run's clock."""

    reader: FrameReader
    clocks: Mapping[int, tuple[int, int]]  # by rank: what to add, and its error
    node: int
    run: dict[int, dict[str, Any]]

    @property
    def folder(self) -> None:
        return None

    def tables(self) -> tuple[str, ...]:
        return tuple(self.reader.tables())

    def read(self, name: str) -> pl.DataFrame:
        return self._at_its_place(self.reader.read(name))

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        return (self._at_its_place(piece) for piece in self.reader.pieces(name))

    def rows(self, name: str) -> int:
        return self.reader.rows(name)

    def gaps(self) -> list[Gap]:
        return list(self.reader.gaps())

    def cannot(self) -> Mapping[str, str]:
        return self.reader.cannot()

    def _at_its_place(self, frame: pl.DataFrame) -> pl.DataFrame:
        import polars as pl

        def of_rank(which: int) -> pl.Expr:
            values = {rank: clock[which] for rank, clock in self.clocks.items()}
            return pl.col("rank").replace_strict(values, return_dtype=pl.Int64)

        moved = [(pl.col(name) + of_rank(0)).alias(name) for name in TIME_COLUMNS if name in frame.columns]
        error = [of_rank(1).alias("clock_error_ns")] if "clock_error_ns" in frame.columns else []
        return frame.with_columns(*moved, *error, node=pl.lit(self.node, pl.Int32))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
