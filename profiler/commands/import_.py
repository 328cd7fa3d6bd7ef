"""Convert what another tool recorded into a run folder.

Takes whatever `rankscope report` takes: traces of torch.profiler, Nsight Systems, the flight recorder and others. The
reports on the folder and on the files are the same; the folder is smaller and read faster. Without --out it is
runs/<time>-<name>.

Example: rankscope import traces/ -o runs/NAME
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankscope.analysis.text.message import text
from rankscope.analysis.text.progress import reached
from rankscope.collectors.schema import DEVICE_WORK, DTYPES, OPS, REGION_KINDS, SCHEMA_VERSION, TABLES
from rankscope.errors import RankscopeError
from rankscope.profiler.folder import claim
from rankscope.profiler.options import Dask, Out
from rankscope.profiler.progress import shown

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

    from rankscope.analysis.runs.trace import Trace

__all__ = ["command", "write"]

_Key = tuple[str, int]  # of a partition: "rank" or "node", and which
# polars' allocator (jemalloc), before polars is loaded: one heap, and what is free goes back to the system at once.
_GIVEN_BACK = "narenas:1,dirty_decay_ms:0,muzzy_decay_ms:0"
_CODES = {"kind": REGION_KINDS, "op": OPS, "dtype": DTYPES, "work": DEVICE_WORK}


def command(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of one run, as for `rankscope report`.")],
    out: Out = None,
    dask: Dask = None,
) -> None:
    os.environ.setdefault("_RJEM_MALLOC_CONF", _GIVEN_BACK)
    import pyarrow as pa

    from rankscope.analysis.readers import native
    from rankscope.analysis.readers.dask_cluster import on_cluster
    from rankscope.analysis.runs.trace import Trace

    pa.set_memory_pool(pa.system_memory_pool())
    if any(native.recognises(path) for path in paths):
        raise RankscopeError(f"{paths[0]} is a run folder already: `rankscope report` reads it")
    if out is not None and out.exists():
        raise RankscopeError(f"{out} exists already: name a folder that does not, or leave --out away")
    with shown(), on_cluster(dask):
        trace = Trace.open(paths)
    folder = claim(str(out) if out else None, paths[0].name.split(".")[0])
    try:
        with shown():
            rows = write(trace, folder)
    except BaseException as error:  # half a run would give other answers
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RankscopeError(f"cannot write {folder}: {error.strerror or error}") from None
        raise
    print(f"{folder}: {rows:,} rows of {', '.join(trace.tables())}")
    for gap in trace.gaps():
        print(f"  {gap.table}: {gap.why}")


def write(trace: Trace, folder: Path) -> int:
    """Write the trace as a run folder; return how many rows it has. What its reader knows besides goes to `run/`."""
    import polars as pl

    names: dict[_Key, dict[str, int]] = {}  # by partition: the codes of its names
    rows = 0
    for table in trace.tables():
        parts: dict[_Key, int] = {}  # how many are written
        for key, frame in _partitions(trace, table):
            columns = _as_written(table, frame, names.setdefault(key, {}))
            parts[key] = _write_rows(folder, table, key, columns, parts.get(key, 0))
            rows += len(frame)
            reached(text("rows"), rows)
    for key, codes in names.items():
        if codes:
            ids = pl.Series(codes.values(), dtype=pl.UInt32)
            _write_rows(folder, "strings", key, {"name_id": ids, "name": [*codes]}, 0)
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
        known |= {"cannot": {}, "gaps": []}  # once for all nodes
    return rows


def _partitions(trace: Trace, table: str) -> Iterator[tuple[_Key, pl.DataFrame]]:
    """Yield the rows of each rank or node; of a large table a piece at a time."""
    owner = "node" if TABLES[table].partition == "node" else "rank"
    for piece in trace.pieces(table):
        for (number,), part in piece.partition_by(owner, as_dict=True, maintain_order=True).items():
            yield (owner, int(number)), part


def _as_written(table: str, frame: pl.DataFrame, codes: dict[str, int]) -> dict[str, pl.Series]:
    """Return the columns as the schema has them, names as ids; `codes` has all of these."""
    import polars as pl

    columns: dict[str, pl.Series] = {}
    for column in TABLES[table].columns:
        known = _CODES.get(column.name)
        if column.name.endswith("_id") and column.name != "group_id":
            values = frame[column.name.removesuffix("_id")]
            different = values.unique(maintain_order=True).drop_nulls().to_list()
            for name in different:
                codes.setdefault(name, len(codes))
            columns[column.name] = _coded(values, different, [codes[name] for name in different], pl.UInt32)
        elif known:
            columns[column.name] = _coded(frame[column.name], known, range(len(known)), pl.UInt8)
        else:
            columns[column.name] = frame[column.name]
    return columns


def _coded(values: pl.Series, names: Sequence[str], codes: Sequence[int], kind: type[pl.DataType]) -> pl.Series:
    """Return each name's code; null for other names. An expression that replaces them takes 5 MB for itself."""
    import polars as pl

    return pl.Series(codes, dtype=kind).gather(values.cast(pl.Enum(names), strict=False).to_physical())


def _as_arrow(values: pl.Series, kind: pa.DataType) -> pa.Array:
    """Return the values as this type, without Arrow's casts where that can be: they alone take 8 MB."""
    import polars as pl
    import pyarrow as pa

    array = pa.array(values.to_list(), kind) if values.dtype == pl.String else values.to_arrow()
    return array if array.type == kind else array.cast(kind)


def _write_rows(folder: Path, table: str, key: _Key, columns: Mapping[str, Any], first: int) -> int:
    """Write the rows as parts from this number on; return the number after the last."""
    import polars as pl
    import pyarrow as pa

    from rankscope.collectors.agent.arrow_writer import write_sealed

    schema = pa.schema([(column.name, pa.type_for_alias(column.type)) for column in TABLES[table].columns])
    owner, number = key
    frame = pl.DataFrame({name: columns[name] for name in schema.names})
    rows = pa.table([_as_arrow(frame[field.name], field.type) for field in schema], schema=schema)
    prefix = "a0-" if owner == "rank" else ""
    return write_sealed(folder / table / f"{owner}={number:05d}", prefix, rows, first)
