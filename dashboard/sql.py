"""SQL queries on a run: they read the run's tables and nothing else.

DuckDB runs them, in a process of its own (`sql_worker`) that is ended when it takes too long: no query can crash the
server.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

import polars as pl

from rankscope.errors import BadQuery

__all__ = ["LIMIT", "answer", "narrowed", "written"]

LIMIT = 5_000_000  # rows of an answer: a join can make more than memory holds
_PATIENCE_S = 20.0
_MOST_CHARACTERS = 20_000
_MEMORY_BYTES = 2 << 30
_ANSWER_BYTES = 1 << 30
_AT_ONCE = threading.BoundedSemaphore(2)

_ASKS = re.compile(r"\s*(?:select|with|from)\b", re.IGNORECASE)
_OF_FILES = re.compile(r"permission error|external access|(?:are disabled|disabled) by configuration", re.IGNORECASE)
_ONLY_TABLES = "only the run's own tables can be read here, no files"
_DIED = "the question is too deep, or takes too much memory; ask for less"


def answer(tables: Mapping[str, pl.DataFrame], query: str) -> pl.DataFrame:
    """Return the answer's first LIMIT rows. Raises BadQuery."""
    asked = query.strip().rstrip(";")
    if len(asked) > _MOST_CHARACTERS:
        raise BadQuery(f"a question has at most {_MOST_CHARACTERS:,} characters")
    if not _ASKS.match(asked):
        raise BadQuery("begin with SELECT or WITH: the tables can be read, not changed")
    words = set(re.findall(r"\w+", asked.lower()))
    named = {name: tables[name] for name in tables if name.lower() in words}
    if not _AT_ONCE.acquire(timeout=_PATIENCE_S):
        raise BadQuery("other questions are still being answered; ask again")
    try:
        with ExitStack() as files:
            return _in_worker(named, asked, files)
    except OSError as error:
        raise BadQuery(f"no room for temporary files in {tempfile.gettempdir()} ({error.strerror})") from None
    except pl.exceptions.PolarsError as error:
        raise BadQuery(_one_line(str(error))) from None
    finally:
        _AT_ONCE.release()


def _in_worker(tables: Mapping[str, pl.DataFrame], query: str, files: ExitStack) -> pl.DataFrame:
    """Return the answer of a worker, which reads the tables from files without names and writes into one."""

    def file() -> IO[bytes]:
        return files.enter_context(tempfile.TemporaryFile(prefix="rankscope-"))

    held = {name: file() for name in tables}
    for name, frame in tables.items():
        frame.write_ipc_stream(held[name], compat_level=pl.CompatLevel.oldest())
        held[name].flush()
    found = file()
    asked = {
        "query": query,
        "tables": {name: one.fileno() for name, one in held.items()},
        "answer": found.fileno(),
        "rows": LIMIT,
        "memory_bytes": _MEMORY_BYTES,
        "answer_bytes": _ANSWER_BYTES,
        "alarm_s": int(_PATIENCE_S) + 10,
    }
    said = _run(json.dumps(asked), [found.fileno(), *asked["tables"].values()])  # type: ignore[attr-defined]
    if "error" in said:
        raise BadQuery(_ONLY_TABLES if _OF_FILES.search(said["error"]) else _one_line(said["error"]))
    found.seek(0)
    return _with_usual_numbers(pl.read_ipc_stream(found))


def _run(asked: str, descriptors: Sequence[int]) -> dict[str, str]:
    """Return the worker's answer.

    It starts in the root folder, so that no module of the current one is taken for its own.
    """
    command = [sys.executable, "-m", "rankscope.dashboard.sql_worker"]
    try:
        worker = subprocess.run(
            command,
            input=asked.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=descriptors,
            cwd="/",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BadQuery(f"no answer within {_PATIENCE_S:.0f} s; ask for less") from None
    try:
        said = json.loads(worker.stdout)
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {"error": _DIED}


def _with_usual_numbers(frame: pl.DataFrame) -> pl.DataFrame:
    """Return sums of integers, which come as decimals, as int64 where they fit, else as floats."""
    for name, dtype in frame.schema.items():
        if isinstance(dtype, pl.Decimal):
            whole = frame[name].cast(pl.Int64, strict=False) if dtype.scale == 0 else None
            exact = whole is not None and whole.null_count() == frame[name].null_count()
            frame = frame.with_columns(whole if exact and whole is not None else frame[name].cast(pl.Float64))
    return frame


def _one_line(said: str) -> str:
    """Return DuckDB's message, without its marker in the query."""
    first = said.split("\n\n")[0]
    return " ".join(first.split("\nLINE ")[0].split())[:300] or _DIED


def narrowed(frame: pl.DataFrame, filters: Mapping[str, Any], order: Sequence[Mapping[str, str]]) -> pl.DataFrame:
    """Return the rows that a grid's filters let through, in its order.

    Source: ag-grid's filter model, https://www.ag-grid.com/javascript-data-grid/filter-api/
    """
    for name, model in filters.items():
        if name in frame.columns:
            frame = frame.filter(_condition(pl.col(name), model))
    by = [(o["colId"], o["sort"] == "desc") for o in order if o["colId"] in frame.columns]
    if by:
        frame = frame.sort([name for name, _ in by], descending=[down for _, down in by], nulls_last=True)
    return frame


def _condition(column: pl.Expr, model: Mapping[str, Any]) -> pl.Expr:
    if "conditions" in model:
        both = [_condition(column, part) for part in model["conditions"]]
        return pl.all_horizontal(both) if model["operator"] == "AND" else pl.any_horizontal(both)
    kind, wanted = model["type"], model.get("filter")
    if kind in ("blank", "notBlank"):
        return column.is_null() if kind == "blank" else column.is_not_null()
    if model.get("filterType") == "number":
        compared = {
            "equals": column == wanted,
            "notEqual": column != wanted,
            "lessThan": column < wanted,
            "lessThanOrEqual": column <= wanted,
            "greaterThan": column > wanted,
            "greaterThanOrEqual": column >= wanted,
        }
        return column.is_between(wanted, model["filterTo"]) if kind == "inRange" else compared[kind]
    text, part = column.cast(pl.String).str.to_lowercase(), str(wanted).lower()
    found = {
        "equals": text == part,
        "notEqual": text != part,
        "contains": text.str.contains(part, literal=True),
        "notContains": ~text.str.contains(part, literal=True),
        "startsWith": text.str.starts_with(part),
        "endsWith": text.str.ends_with(part),
    }
    return found[kind]


def written(query: str, filters: Mapping[str, Any], order: Sequence[Mapping[str, str]]) -> str:
    """Return the query with what `narrowed` does to its answer, in SQL."""
    wheres = [_written_condition(_quoted(name, '"'), model) for name, model in filters.items()]
    by = [f"{_quoted(o['colId'], chr(34))} {o['sort'].upper()} NULLS LAST" for o in order]
    if wheres or by:
        query = query if re.fullmatch(r"SELECT \* FROM \w+", query) else f"SELECT * FROM ({query})"
    where = f" WHERE {' AND '.join(wheres)}" if wheres else ""
    return f"{query}{where}{' ORDER BY ' + ', '.join(by) if by else ''}"


def _quoted(said: str, mark: str = "'") -> str:
    return f"{mark}{said.replace(mark, 2 * mark)}{mark}"


def _written_condition(column: str, model: Mapping[str, Any]) -> str:
    if "conditions" in model:
        parts = (_written_condition(column, part) for part in model["conditions"])
        return f"({(' AND ' if model['operator'] == 'AND' else ' OR ').join(parts)})"
    kind, wanted = model["type"], model.get("filter")
    if kind in ("blank", "notBlank"):
        return f"{column} IS {'NULL' if kind == 'blank' else 'NOT NULL'}"
    if model.get("filterType") == "number":
        if kind == "inRange":
            return f"{column} BETWEEN {wanted} AND {model['filterTo']}"
        return f"{column} {_COMPARED[kind]} {wanted}"
    text, part = f"lower(CAST({column} AS VARCHAR))", _quoted(str(wanted).lower())
    return _FOUND[kind].format(text=text, part=part)


_COMPARED = {
    "equals": "=",
    "notEqual": "<>",
    "lessThan": "<",
    "lessThanOrEqual": "<=",
    "greaterThan": ">",
    "greaterThanOrEqual": ">=",
}
_FOUND = {
    "equals": "{text} = {part}",
    "notEqual": "{text} <> {part}",
    "contains": "contains({text}, {part})",
    "notContains": "NOT contains({text}, {part})",
    "startsWith": "starts_with({text}, {part})",
    "endsWith": "ends_with({text}, {part})",
}
