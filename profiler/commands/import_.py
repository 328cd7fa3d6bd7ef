"""Convert what another tool recorded into a run folder.

Takes whatever `rankscope report` takes: traces of torch.profiler, Nsight Systems, the flight recorder and others. The
reports on the folder and on the files are the same; the folder is smaller and read faster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.collectors.schema import DEVICE_WORK, DTYPES, OPS, REGION_KINDS, SCHEMA_VERSION, TABLES
from rankscope.profiler.errors import NotRecorded, RankscopeError, clear_input_errors
from rankscope.profiler.folder import claim

if TYPE_CHECKING:
    import polars as pl

    from rankscope.analysis.trace import Trace

__all__ = ["command"]

_CODES = {"kind": REGION_KINDS, "op": OPS, "dtype": DTYPES, "work": DEVICE_WORK}


def command(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of one run, as for `rankscope report`.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run folder to make; without: runs/<time>-<name>.")
    ] = None,
) -> None:
    from rankscope.analysis.readers import native
    from rankscope.analysis.trace import Trace

    if any(native.recognises(path) for path in paths):
        raise RankscopeError(f"{paths[0]} is a run folder already: `rankscope report` reads it")
    if output is not None and output.exists():
        raise RankscopeError(f"{output} exists already: name a folder that does not, or leave -o away")
    with clear_input_errors():
        trace = Trace.open(paths)
    try:
        folder = claim(str(output) if output else None, paths[0].name.split(".")[0])
    except NotRecorded as error:
        raise RankscopeError(str(error)) from None
    try:
        with clear_input_errors():
            rows = _write(trace, folder)
    except BaseException as error:  # half a run would give other answers
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RankscopeError(f"cannot write {folder}: {error.strerror or error}") from None
        raise
    print(f"{folder}: {rows:,} rows of {', '.join(trace.tables())}")
    for gap in trace.gaps():
        print(f"  {gap.table}: {gap.why}")


def _write(trace: Trace, folder: Path) -> int:
    """The trace is a run folder; how many rows it has. What the source's reader knows besides goes to `run/`."""
    names: dict[tuple[str, int], dict[str, int]] = {}  # by partition: the codes of its names
    rows = sum(
        _write_partition(folder, table, key, part, names.setdefault(key, {}))
        for table in trace.tables()
        for key, part in _partitions(trace, table)
    )
    for key, codes in names.items():
        _write_strings(folder, key, codes)
    known = {
        "schema_version": SCHEMA_VERSION,
        "state": "closed",
        "source": trace.source,
        "cannot": dict(trace.reader.cannot()),
        "gaps": [asdict(gap) for gap in trace.gaps()],
    }
    for node, launch in (trace.run or {0: {}}).items():
        path = folder / "run" / f"node={node:05d}.json"
        path.write_text(json.dumps(known | launch, indent=1), encoding="utf-8")
        known |= {"cannot": {}, "gaps": []}  # they are told once
    return rows


def _partitions(trace: Trace, table: str) -> Iterator[tuple[tuple[str, int], pl.DataFrame]]:
    """The rows of each rank or node."""
    owner = "node" if TABLES[table].partition == "node" else "rank"
    frame = trace.table(table).collect()
    for (number,), part in frame.partition_by(owner, as_dict=True, maintain_order=True).items():
        yield (owner, int(number)), part


def _write_partition(folder: Path, table: str, key: tuple[str, int], frame: pl.DataFrame, codes: dict[str, int]) -> int:
    """The rows lie in the folder as the schema has them, names as ids; `codes` has all of these."""
    import polars as pl

    columns: dict[str, Any] = {}
    for column in TABLES[table].columns:
        known = _CODES.get(column.name)
        if column.name.endswith("_id") and column.name != "group_id":
            values = frame[column.name.removesuffix("_id")]
            for name in values.unique(maintain_order=True).drop_nulls():
                codes.setdefault(name, len(codes))
            columns[column.name] = values.replace_strict(codes, default=None, return_dtype=pl.UInt32)
        elif known:
            numbers = {name: number for number, name in enumerate(known)}
            columns[column.name] = frame[column.name].replace_strict(numbers, default=None, return_dtype=pl.UInt8)
        else:
            columns[column.name] = frame[column.name]
    _write_rows(folder, table, key, pl.DataFrame(columns))
    return len(frame)


def _write_strings(folder: Path, key: tuple[str, int], codes: dict[str, int]) -> None:
    import polars as pl

    if codes:
        _write_rows(folder, "strings", key, pl.DataFrame({"name_id": [*codes.values()], "name": [*codes]}))


def _write_rows(folder: Path, table: str, key: tuple[str, int], frame: pl.DataFrame) -> None:
    import pyarrow as pa

    from rankscope.collectors.writer import write_sealed

    schema = pa.schema([(column.name, pa.type_for_alias(column.type)) for column in TABLES[table].columns])
    owner, number = key
    rows = pa.table({name: frame[name].to_arrow() for name in schema.names}).cast(schema)
    write_sealed(folder / table / f"{owner}={number:05d}", "a0-" if owner == "rank" else "", rows)
