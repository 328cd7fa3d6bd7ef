"""Run folders, table by table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankscope.analysis.runs.trace import Trace
from rankscope.collectors.schema import OPS, REGION_KINDS, TABLES

RANK_ROW = {
    "start_ns": 0,
    "local_rank": 0,
    "world_size": 2,
    "node": 0,
    "hostname": "h",
    "pid": 1,
    "device": "cpu",
    "torch": "2",
    "python": "3",
    "command": "train.py",
}
REGION = {"kind": REGION_KINDS.index("gc"), "name_id": 1, "thread": 0}
COLLECTIVE = {
    "issued_ns": 1,
    "group_id": 7,
    "seq": 0,
    "op": OPS.index("allreduce"),
    "dtype": 2,
    "peer": -1,
    "tag": 0,
    "size_bytes": 4,
    "thread": 0,
}


def batch(table: str, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    columns = TABLES[table].columns
    schema = pa.schema([pa.field(c.name, pa.type_for_alias(c.type)) for c in columns])
    return pa.RecordBatch.from_pylist([{c.name: row.get(c.name) for c in columns} for row in rows], schema=schema)


def write(root: Path, table: str, owner: str, *batches: Sequence[Mapping[str, Any]], attempt: int = 0) -> Path:
    """One sealed part; `owner` is rank=N or node=N, each argument a batch."""
    kind, _, number = owner.partition("=")
    folder = root / table / f"{kind}={int(number):05}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("part-0000.arrow" if kind == "node" else f"a{attempt}-part-0000.arrow")
    made = [batch(table, rows) for rows in batches]
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", 1))
    with pa.ipc.new_file(str(path), made[0].schema, options=options) as file:
        for part in made:
            file.write_batch(part)
    return path


def write_run(root: Path, node: int = 0, **launch: Any) -> None:
    (root / "run").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"state": "closed", "schema_version": 1, **launch})
    (root / "run" / f"node={node:05}.json").write_text(text)


def write_rank(root: Path, rank: int, world: int = 2, node: int = 0, attempt: int = 0) -> None:
    write(root, "ranks", f"rank={rank}", [{**RANK_ROW, "world_size": world, "node": node}], attempt=attempt)
    write(root, "strings", f"rank={rank}", [{"name_id": 1, "name": f"gen {rank}"}], attempt=attempt)


def whys(trace: Trace) -> list[str]:
    return [gap.why for gap in trace.gaps()]
