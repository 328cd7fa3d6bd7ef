"""Every step of every rank of a long run: its length and its parts, kept in the run's folder as Arrow files.

`RUN/summary/steps-FIRST-LAST.arrow` has the steps of one stretch (`docs/tables.md`). It is used for the run and
by the code that it was made of, and may be deleted. Where the folder cannot be written to, the file's bytes are held.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from pyarrow import ipc

from rankscope.analysis.diagnosis.kept_values import FOLDER, keep_file
from rankscope.analysis.model.lookup import row_of
from rankscope.analysis.model.parts import PARTS
from rankscope.analysis.timeline.build import Timeline
from rankscope.collectors.schema import Column, Table

__all__ = [
    "STEP_SUMMARIES",
    "StepSummaries",
    "keep_steps",
    "kept_steps",
    "remove_other_steps",
    "step_summaries",
    "steps_file",
]

_FILE = re.compile(r"steps-(\d+)-(\d+)\.arrow")
_MADE_OF = b"made_of"

STEP_SUMMARIES = Table(
    name="step_summaries",
    doc="One step of one rank of a run that is too long to be held at once, as its report leaves it in "
    "`summary/steps-FIRST-LAST.arrow`. `polars.scan_ipc` reads these files, `Trace.table` does not. The parts of a "
    "step, which sum to it, are null where it could not be cut.",
    partition="stretch of steps",
    order="rank",
    columns=(
        Column("rank", "int32", "", "Global rank."),
        Column("step", "int64", "", "Number of the step in the whole run."),
        Column("start_ns", "int64", "ns", "When it began on this rank, on node 0's clock."),
        Column("step_ns", "int64", "ns", "How long it took."),
        Column("judged", "bool", "", "It is analyzed; false: warm-up, outlier, incomplete, lost or profiled."),
        Column("matched", "int64", "", "Operations in it that were matched on all their ranks."),
        Column("came_last", "int64", "", "Those of these at which the rank came last."),
        *(
            Column(f"{name}_ns", "int64", "ns", f"Part {part.label}: {part.means}.", nullable=True)
            for name, part in PARTS.items()
        ),
    ),
)
_SCHEMA = pa.schema([(column.name, pa.type_for_alias(column.type)) for column in STEP_SUMMARIES.columns])
_NONE = pl.DataFrame(pl.from_arrow(_SCHEMA.empty_table()))


@dataclass(frozen=True, slots=True)
class StepSummaries:
    """The steps of a run: a file for each stretch, or its bytes, by its first and last step, in order."""

    files: Mapping[tuple[int, int], Path | bytes]

    def read(self, *columns: str, since: int = 0) -> pl.DataFrame:
        """Return these columns, `step` among them, of the steps from `since` on, as far as files can be read."""
        return pl.concat([_NONE.select(columns), *self.each(*columns, since=since)]).filter(pl.col("step") >= since)

    def each(self, *columns: str, since: int = 0) -> Iterator[pl.DataFrame]:
        """Yield these columns stretch by stretch, from that on which has the step `since`."""
        wanted = (file for (_, last), file in self.files.items() if last >= since)
        yield from (rows for file in wanted if (rows := _read(file, columns)) is not None)


def step_summaries(timeline: Timeline) -> pl.DataFrame:
    """Return the steps of a timeline with the columns of `STEP_SUMMARIES`; the parts of each sum to it."""
    steps, split, by = timeline.steps, timeline.breakdown, ["rank", "step"]
    operations = timeline.collectives.select(*by, "is_last").drop_nulls()
    of_step = row_of(operations, steps, by)
    last = of_step[operations["is_last"].to_numpy()]
    of_part = row_of(split, steps, by)
    uncut = np.bincount(of_part, minlength=len(steps)) == 0
    parts = {f"{name}_ns": np.zeros(len(steps), np.int64) for name in PARTS}
    for name, spent in parts.items():
        is_it = (split["part"] == name.removesuffix("_ns")).to_numpy()
        spent[of_part[is_it]] = split["ns"].to_numpy()[is_it]
    return steps.select(
        *by,
        "start_ns",
        (pl.col("end_ns") - pl.col("start_ns")).alias("step_ns"),
        "judged",
        *(
            pl.Series(name, np.bincount(rows[rows >= 0], minlength=len(steps)))
            for name, rows in (("matched", of_step), ("came_last", last))
        ),
        *(pl.when(~pl.Series(uncut)).then(pl.Series(spent)).alias(name) for name, spent in parts.items()),
    ).cast(_NONE.schema)


def steps_file(timeline: Timeline, of: str) -> bytes:
    """Return the file of a stretch's steps, as made `of` this."""
    table = step_summaries(timeline).to_arrow().replace_schema_metadata({_MADE_OF: of})
    held = io.BytesIO()
    with ipc.new_file(held, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return held.getvalue()


def keep_steps(run: Path, stretch: tuple[int, int], file: bytes) -> bool:
    """Keep the file of a stretch's steps in the run's folder; say whether it is there."""
    first, last = stretch
    return keep_file(run, f"steps-{first}-{last}.arrow", lambda out: out.write(file))


def kept_steps(run: Path, of: str) -> StepSummaries | None:
    """Return those kept in the run's folder that were made of exactly this, each step once; None: there are none."""
    found, end = {}, -1
    for (first, last), file in sorted(_files(run).items()):
        if first > end and _made_of(file) == of:
            found[first, last] = file
            end = last
    return StepSummaries(found) if found else None


def remove_other_steps(run: Path, stretches: Collection[tuple[int, int]]) -> None:
    """Remove what is kept of other stretches than these: some of the same steps."""
    for stretch, file in _files(run).items():
        if stretch not in stretches:
            with suppress(OSError):
                file.unlink()


def _files(run: Path) -> dict[tuple[int, int], Path]:
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return {}
    return {(int(m[1]), int(m[2])): run / FOLDER / m[0] for m in map(_FILE.fullmatch, names) if m}


def _made_of(file: Path) -> str | None:
    try:
        schema = ipc.open_file(pa.memory_map(str(file))).schema
        return str(schema.metadata[_MADE_OF].decode()) if schema.equals(_SCHEMA) else None
    except (OSError, pa.ArrowException, LookupError, TypeError, UnicodeError):
        return None  # gone, torn, or another's


def _read(file: Path | bytes, columns: Sequence[str]) -> pl.DataFrame | None:
    """Return these columns; None: the file is gone, or torn."""
    fields = [_SCHEMA.get_field_index(name) for name in columns]
    try:
        source = pa.py_buffer(file) if isinstance(file, bytes) else pa.memory_map(str(file))
        table = ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=fields)).read_all()
        table.validate(full=True)
        return pl.DataFrame(pl.from_arrow(table)).select(columns)
    except (OSError, pa.ArrowException):
        return None
