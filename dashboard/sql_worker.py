"""Runs one SQL query in a process of its own, which may be ended at any time: `sql` starts it.

The tables come as files of Arrow's stream format that are open already, the answer goes to such a file. DuckDB may open
no file and load no extension; memory, threads, time and the size of the answer are limited.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa

__all__ = ["main"]

_BATCH_ROWS = 1 << 16
_BESIDE_BYTES = 1 << 30  # of the process besides DuckDB's memory
_MOST_NESTED = 250


def main() -> None:
    """Read what is asked from standard input; `{"error": "…"}` on standard output is why there is no answer."""
    asked = json.load(sys.stdin)
    signal.alarm(asked["alarm_s"])  # if the server has ended before
    most = asked["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (most + _BESIDE_BYTES, most + _BESIDE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    said: dict[str, str] = {}
    try:
        _answer(asked)
    except (duckdb.Error, pa.ArrowException, ValueError) as error:
        said = {"error": str(error)}
    except (MemoryError, RecursionError) as error:
        said = {"error": f"too much is asked for ({type(error).__name__})"}
    print(json.dumps(said), flush=True)
    os._exit(0)  # threads of DuckDB may still be at work


def _answer(asked: dict[str, Any]) -> None:
    config: dict[str, str | bool | int | float | list[str]] = {
        "enable_external_access": "false",
        "autoload_known_extensions": "false",
        "autoinstall_known_extensions": "false",
        "allow_community_extensions": "false",
        "python_enable_replacements": "false",
        "temp_directory": "",
        "threads": "2",
        "memory_limit": f"{asked['memory_bytes'] >> 20}MiB",
        "max_expression_depth": str(_MOST_NESTED),
    }
    connection = duckdb.connect(":memory:", config=config)
    for name, number in asked["tables"].items():
        connection.register(name, pa.ipc.open_stream(pa.memory_map(f"/dev/fd/{number}")).read_all())
    connection.execute("SET lock_configuration = true")
    statements = connection.extract_statements(asked["query"])
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ValueError("begin with SELECT or WITH, one question at a time: the tables can be read, not changed")
    found = connection.sql(asked["query"]).to_arrow_reader(_BATCH_ROWS)  # row by row, where `execute` holds them all
    named = zip(found.schema, _different(found.schema.names), strict=True)
    schema = pa.schema([field.with_name(name) for field, name in named])
    with os.fdopen(asked["answer"], "wb") as file, pa.ipc.new_stream(file, schema) as out:
        for batch in _first(found, asked["rows"], asked["answer_bytes"]):
            out.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))


def _different(names: list[str]) -> Iterator[str]:
    """Yield the names of the columns, each once: `rank`, `rank_1`."""
    seen: set[str] = set()
    for name in names:
        unlike, number = name, 0
        while unlike in seen:
            number += 1
            unlike = f"{name}_{number}"
        seen.add(unlike)
        yield unlike


def _first(found: pa.RecordBatchReader, rows: int, size_bytes: int) -> Iterator[pa.RecordBatch]:
    """Yield the first rows. Raises ValueError if they are too large."""
    for batch in found:
        size_bytes -= batch.nbytes
        if size_bytes < 0:
            raise ValueError("the answer is too large; ask for less")
        yield batch[:rows]
        rows -= batch.num_rows
        if rows <= 0:
            return


if __name__ == "__main__":
    main()
