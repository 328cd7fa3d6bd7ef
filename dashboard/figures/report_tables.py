"""The report's lists as tables, so that they can be downloaded and queried in SQL."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import polars as pl

from rankscope.collectors.rank_ranges import as_ranges
from rankscope.dashboard.run import Run

__all__ = ["REPORT_TABLES", "frame_of"]

_LISTS = ("findings", "breakdown", "blames", "critical_path", "healthy", "not_checked", "gaps")


def frame_of(rows: Sequence[Any]) -> pl.DataFrame:
    """Return a row for each of these values of one dataclass, with its plain fields; ranks and steps as ranges."""
    return pl.DataFrame([{field.name: _plain(getattr(row, field.name)) for field in fields(row)} for row in rows])


def _plain(value: object) -> object:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tuple):
        whole = all(isinstance(one, int) for one in value)
        return as_ranges(value) if whole else ", ".join(one for one in value if isinstance(one, str))
    return value if value is None or isinstance(value, (int, float)) else str(value)


def _listed(name: str, run: Run) -> pl.DataFrame:
    return frame_of(getattr(run.report, name))


REPORT_TABLES: Mapping[str, Callable[[Run], pl.DataFrame]] = {
    f"report_{name}": partial(_listed, name) for name in _LISTS
}
