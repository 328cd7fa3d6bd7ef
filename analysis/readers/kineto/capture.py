"""The content of one file: its metadata, and its rows as columns of tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.annotations import without_hash
from rankscope.analysis.readers.kineto.groups import Groups
from rankscope.analysis.readers.spill_file import Rows
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted

__all__ = ["MAX_WORLD", "META_KEPT", "Calls", "Capture", "Ints", "or_null", "span_columns", "spans_frame"]

MAX_WORLD = 1 << 20  # what is beyond is no number of ranks

Ints = NDArray[Any]
Calls = dict[str, Any]  # columns of collectives: arrays and lists


@dataclass(slots=True)
class Capture:
    """The content of one file: its metadata, the names behind the codes, and the rows that are kept.

    Whoever reads the file also finds its `calls`, and what is missing.
    """

    label: str
    info: dict[str, Any]
    names: list[str]
    device: Rows
    launches: Rows
    spans: Rows
    operators: Rows  # the long ones
    shaped: Rows  # those whose shapes give their FLOPs
    device_metas: dict[str, Ints]
    operator_metas: dict[str, Ints]
    devices: list[int]  # the one that most rows are of first
    threads: Ints  # by code of its name: the number of each thread
    found: list[tuple[str, int | None, str]]  # table, rows missing, why
    groups: Groups = field(init=False)
    calls: Calls = field(init=False)  # of NCCL or RCCL

    def __post_init__(self) -> None:
        """Note the groups that the metadata name, and name alike on all ranks what runs on all."""
        self.names = [without_hash(name) for name in self.names]
        self.groups = Groups(self.distributed, self.device.first_ns if len(self.device) else 0)

    def text(self, codes: Ints) -> pl.Series:
        return pl.Series(self.names, dtype=pl.String).gather(codes)

    @property
    def distributed(self) -> dict[str, Any]:
        info = self.info.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def world_size(self) -> int | None:
        size = self.distributed.get("world_size")
        return size if isinstance(size, int) and 0 < size <= MAX_WORLD else None

    @property
    def main_device(self) -> int | None:
        return self.devices[0] if self.devices else None

    @property
    def file_name(self) -> str:
        return self.label.rsplit("/", 1)[-1].rsplit(":", 1)[-1]

    def find_problems(self) -> None:
        """Look for device rows whose launch is missing, and for more than one device."""
        self.found += self._unlaunched()
        if len(self.devices) > 1:
            several = text("its work on {devices} counts as that of one", devices=counted(len(self.devices), "device"))
            self.found.append(("kernels", None, several))

    def _unlaunched(self) -> list[tuple[str, int | None, str]]:
        if not len(self.launches):
            return []
        wanted = (np.sort(rows["correlation"]) for rows in self.device.blocks("correlation"))
        lost = sum(len(self.launches.without("correlation", values)) for values in wanted)
        if not lost:
            return []
        rows = counted(len(self.device), "device row")
        why = text(
            "{lost} of {rows} were launched outside of the capture: they count all the same", lost=lost, rows=rows
        )
        return [("launches", lost, why)]


META_KEPT = ("in_nelems", "out_nelems", "seq", "src", "dst", "collective", "group", "ranks", "description", "dtype")


def span_columns(columns: Mapping[str, Ints]) -> dict[str, Ints]:
    return {"start_ns": columns["ts"], "end_ns": columns["ts"] + columns["dur"]}


def or_null(values: Ints, missing: int) -> pl.Series:
    series = pl.Series(values)
    return series.set(series == missing, None)


def spans_frame(capture: Capture, rows: Mapping[str, Ints]) -> pl.DataFrame:
    return pl.DataFrame(
        {**span_columns(rows), "name": capture.text(rows["name"]), "thread": capture.threads[rows["tid"]]}
    )
