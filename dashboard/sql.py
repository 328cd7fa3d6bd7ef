"""Questions to a run in SQL: they read the run's tables and nothing else."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from rankscope.errors import BadQuery

__all__ = ["LIMIT", "answer", "narrowed"]

LIMIT = 5_000_000  # rows of an answer: a join can make more than memory holds
_PATIENCE_S = 20.0
_WAIT_S = 0.02

# Polars' SQL can open files: `read_csv('/etc/passwd')`. Whatever looks like that is refused before it is planned,
# since planning alone opens the file; and a plan that reads a file after all is not carried out.
_READS = re.compile(r"\b(?:read|scan)_\w", re.IGNORECASE)
_ASKS = re.compile(r"\s*(?:select|with)\b", re.IGNORECASE)
_FILE_SCAN = re.compile(r"\bSCAN \[")


def answer(tables: Mapping[str, pl.DataFrame], query: str) -> pl.DataFrame:
    """The answer's first LIMIT rows. Raises BadQuery."""
    asked = query.strip().rstrip(";")
    if not _ASKS.match(asked):
        raise BadQuery("begin with SELECT or WITH: the tables can be read, not changed")
    if _READS.search(asked):
        raise BadQuery("only the run's own tables can be read here, no files")
    context = pl.SQLContext({name: frame.lazy() for name, frame in tables.items()})
    try:
        plan = context.execute(asked, eager=False).head(LIMIT)
        if _FILE_SCAN.search(plan.explain(optimized=False)):
            raise BadQuery("only the run's own tables can be read here, no files")
        return _within(plan, _PATIENCE_S)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise BadQuery(_one_line(error)) from None


def _within(plan: pl.LazyFrame, seconds: float) -> pl.DataFrame:
    """The result, unless it takes too long."""
    running = plan.collect(background=True)
    deadline = time.monotonic() + seconds
    while (found := running.fetch()) is None:
        if time.monotonic() > deadline:
            running.cancel()
            raise BadQuery(f"no answer within {seconds:.0f} s; ask for less")
        time.sleep(_WAIT_S)
    return found


def _one_line(error: BaseException) -> str:
    said = str(error).split("\n\n")[0].split("This error occurred")[0]
    return " ".join(said.split()) or type(error).__name__


def narrowed(frame: pl.DataFrame, filters: Mapping[str, Any], order: Sequence[Mapping[str, str]]) -> pl.DataFrame:
    """The rows that a grid's filters let through, in its order.

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
