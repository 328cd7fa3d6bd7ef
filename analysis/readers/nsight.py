"""Reads Nsight Systems' SQLite exports (`nsys export --type sqlite`).

Device work, the calls that launched it, and NVTX ranges; several GPUs may share one file. A file does not say which
ranks its GPUs are: they are taken in the order of the files and, within a file, of the devices. Tables that an export
lacks are no error, but `gaps` names them. Times are ns since the capture began, on one clock per file.

Source: Nsight Systems user guide, "SQLite schema reference"; exports of 2021 to 2026.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.analysis.finding import Gap
from rankscope.analysis.kinds import MEMORY, device_work
from rankscope.analysis.phrases import counted
from rankscope.analysis.readers.frames import NO_STEPS, FrameReader, files_in, gap, shaped, table
from rankscope.analysis.trace import BadInput

__all__ = ["open_run", "recognises"]

_MAGIC = b"SQLite format 3\0"
_REPORTS = (".nsys-rep", ".qdrep")  # what is exported from
_PREFIX = "CUPTI_ACTIVITY_KIND_"
_KERNEL, _MEMCPY, _MEMSET, _GRAPH, _RUNTIME = (
    f"{_PREFIX}{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
_DEVICE = (_KERNEL, _MEMCPY, _MEMSET, _GRAPH)
_META = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_NVTX = "NVTX_EVENTS"
_RANGES = (59, 60)  # NVTX push/pop and start/end ranges
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
# Torch numbers each call of an operator (`aten::add, op_id = 17`): the name alone is what is alike.
_NUMBERS = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*$")
_PID_BITS = 24  # a thread's global id holds the process's above these bits
_NOT_MAIN = 65535
_LACKS = {
    "breakdown": "NVTX ranges do not say what the host waited for",
    "phases": "NVTX ranges do not say what the host waited for",
    "collectives": "the export does not say which process group a communication kernel is of",
    "steps": NO_STEPS,
}
_ROWS = {"start_ns": pl.Int64, "end_ns": pl.Int64, "name": pl.String, "process": pl.Int64}
_DEVICE_ROWS = _ROWS | {"device": pl.Int64, "stream": pl.Int64, "correlation": pl.Int64, "work": pl.String}
_HOST_ROWS = _ROWS | {"thread": pl.Int64, "correlation": pl.Int64}


@dataclass(frozen=True, slots=True)
class _Capture:
    """What one file holds. `process` is null where the export does not tell processes apart."""

    name: str
    device: pl.DataFrame
    launches: pl.DataFrame
    ranges: pl.DataFrame
    gpus: Mapping[int, str]
    host: str
    version: str
    problems: tuple[tuple[str, int | None, str], ...]  # table, count, why


def recognises(path: Path) -> bool:
    """Such an export, the report that it is made from, or a folder in which an export lies."""
    if path.is_dir():
        return any(f.is_file() and _is_export(f) for f in path.iterdir())
    return path.name.endswith(_REPORTS) or _is_export(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """What these exports hold of one run. Raises `BadInput`."""
    files = [f for f in files_in(paths) if _is_export(f)]
    if not files:
        raise BadInput(f"{paths[0]} is no SQLite export: make one with `nsys export --type sqlite {paths[0]}`")
    captures = [_read(file) for file in files]
    frames: dict[str, list[pl.DataFrame]] = {"kernels": [], "launches": [], "regions": []}
    ranks: list[dict[str, Any]] = []
    missing: list[Gap] = []
    for node, capture in enumerate(captures):
        places = capture.device.select("process", "device").unique().sort("device", "process").rows()
        rank_of = pl.DataFrame(
            {
                "process": [process for process, _ in places],
                "device": [device for _, device in places],
                "rank": range(len(ranks), len(ranks) + len(places)),
                "node": node,
            },
            schema={"process": pl.Int64, "device": pl.Int64, "rank": pl.Int32, "node": pl.Int32},
        )
        ranks += [
            {
                "rank": len(ranks) + i,
                "node": node,
                "local_rank": i,
                "start_ns": 0,
                "hostname": capture.host,
                "pid": None if process is None else process >> _PID_BITS & 0xFFFFFF,
                "device": capture.gpus.get(device, "GPU"),
            }
            for i, (process, device) in enumerate(places)
        ]
        on_rank = capture.device.join(rank_of, on=["process", "device"], how="left", nulls_equal=True)
        frames["kernels"].append(on_rank.drop("process"))
        launched = on_rank.select("process", "correlation", "rank", "node").drop_nulls("correlation")
        launched = launched.unique(["process", "correlation"], keep="first")
        launches = capture.launches.join(launched, on=["process", "correlation"], nulls_equal=True)
        frames["launches"].append(launches.drop("process"))
        # A range belongs to its process's rank: where a process drives several GPUs, to the first.
        own = rank_of.drop("device").unique("process", keep="first", maintain_order=True)
        frames["regions"].append(
            capture.ranges.join(own, on="process", nulls_equal=True)
            .drop("process", "correlation")
            .with_columns(kind=pl.lit("user"))
        )
        if len(places) > 1:
            why = (
                f"{capture.name} holds {counted(len(places), 'GPU')}: their ranks are taken in the order of the devices"
            )
            missing.append(gap("ranks", why))
        missing += [gap(name, f"{capture.name}: {why}", count=count) for name, count, why in capture.problems]
    tables = {name: pl.concat(parts) for name, parts in frames.items()}
    return FrameReader(
        frames={"ranks": table("ranks", ranks)}
        | {name: shaped(name, frame) for name, frame in tables.items() if len(frame)},
        missing=missing,
        lacks=_LACKS,
        run={
            node: {"hostname": capture.host, "versions": {"nsys": capture.version}}
            for node, capture in enumerate(captures)
        },
    )


def _is_export(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with _opened(path) as database:
            names = _tables(database)
    except (OSError, sqlite3.Error):
        # A database all the same: what is wrong with it is said when it is read.
        return path.suffix == ".sqlite" and path.stat().st_size > 0
    return bool(names & {*_DEVICE, *_META, _RUNTIME, _NVTX})


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, never written to: no journal is made beside it, not even in a read-only folder."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        yield database


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}


def _read(path: Path) -> _Capture:
    """One export. Raises `BadInput` if no device work in it can be read."""
    try:
        with _opened(path) as database:
            capture = _Reading(database, path.name).capture()
    except sqlite3.Error as error:
        raise BadInput(f"{path} is cut or damaged ({error}): export it again") from None
    if capture.device.is_empty():
        raise BadInput(f"{path} holds no device work: record with `nsys profile --trace=cuda,nvtx`")
    return capture


class _Reading:
    """One database while it is read; notes what it lacks."""

    def __init__(self, database: sqlite3.Connection, name: str) -> None:
        self._database = database
        self._name = name
        self._tables = _tables(database)
        self._problems: list[tuple[str, int | None, str]] = []
        self._strings = dict(self._select("StringIds", "id", "value"))
        self._tells_processes = _KERNEL not in self._tables or "globalPid" in self._columns(_KERNEL)

    def capture(self) -> _Capture:
        device = pl.concat([self._device(kind) for kind in _DEVICE])
        launches = self._host(_RUNTIME, "nameId", "correlationId")
        ranges = self._ranges()
        gpus = dict(self._select("TARGET_INFO_GPU", "id", "name"))
        if not gpus:
            self._problems.append(("ranks", None, "it has no TARGET_INFO_GPU, so the GPUs' names are not known"))
        meta = dict(row for name in _META for row in self._select(name, "name", "value"))
        if not meta:
            self._problems.append(("run", None, "it has no META_DATA_EXPORT, so the version of nsys is not known"))
        for name, lacking in ((_KERNEL, "no kernels"), (_RUNTIME, "no launches"), (_NVTX, "no NVTX ranges")):
            if name not in self._tables:
                what = {_KERNEL: "kernels", _RUNTIME: "launches", _NVTX: "regions"}[name]
                self._problems.append((what, None, f"it has no {name}, so there are {lacking}"))
        system = dict(self._select("TARGET_INFO_SYSTEM_ENV", "name", "value"))
        return _Capture(
            name=self._name,
            device=device,
            launches=launches,
            ranges=ranges,
            gpus=gpus,
            host=str(system.get("Hostname", "")),
            version=str(meta.get("EXPORT_PRODUCT_VERSION", "")),
            problems=tuple(self._problems),
        )

    def _select(self, name: str, *columns: str) -> list[tuple[Any, ...]]:
        """These columns of a table, null where it has none of that name; no rows where there is no such table."""
        if name not in self._tables:
            return []
        known = self._columns(name)
        chosen = ", ".join(f'"{column}"' if column in known else "NULL" for column in columns)
        try:
            return self._database.execute(f'SELECT {chosen} FROM "{name}"').fetchall()
        except sqlite3.Error as error:
            self._problems.append(("kernels" if name in _DEVICE else "run", None, f"{name} cannot be read ({error})"))
            return []

    def _columns(self, name: str) -> set[str]:
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{name}")')}

    def _device(self, kind: str) -> pl.DataFrame:
        named = {_KERNEL: ("demangledName", "shortName"), _MEMCPY: ("copyKind", "copyKind")}
        first, second = named.get(kind, ("graphId", "graphId"))
        rows = self._select(kind, "start", "end", first, second, "globalPid", "deviceId", "streamId", "correlationId")
        if kind == _GRAPH and rows:
            why = "what ran inside CUDA graphs is not told apart; record with `--cuda-graph-trace=node`"
            self._problems.append(("kernels", len(rows), why))
        frame = self._frame(
            _DEVICE_ROWS,
            kind,
            [
                (start, end, name, process, device, stream, correlation, self._work(kind, name))
                for start, end, a, b, process, device, stream, correlation in rows
                for name in (self._device_name(kind, a, b),)
            ],
        )
        return frame.filter(pl.col("device").is_not_null())

    def _device_name(self, kind: str, first: int | None, second: int | None) -> str:
        if kind == _KERNEL:
            return str(self._strings.get(first) or self._strings.get(second) or "kernel without a name")
        if kind == _GRAPH:
            return f"CUDA graph {first}"
        return f"Memcpy {_COPIES.get(first or 0, '')}".strip() if kind == _MEMCPY else "Memset"

    def _work(self, kind: str, name: str) -> str | None:
        return MEMORY if kind in (_MEMCPY, _MEMSET) else device_work("kernel", name)

    def _host(self, kind: str, name: str, correlation: str) -> pl.DataFrame:
        rows = self._select(kind, "start", "end", name, "globalTid", correlation)
        return self._frame(
            _HOST_ROWS,
            kind,
            [
                (start, end, str(self._strings.get(text, "")), *self._thread(thread), number)
                for start, end, text, thread, number in rows
            ],
        )

    def _ranges(self) -> pl.DataFrame:
        rows = self._select(_NVTX, "start", "end", "text", "textId", "globalTid", "eventType")
        ranges = [
            (start, end, _NUMBERS.sub("", text or str(self._strings.get(text_id, ""))), *self._thread(thread), None)
            for start, end, text, text_id, thread, event in rows
            if event in _RANGES and end is not None
        ]
        unended = sum(1 for row in rows if row[5] in _RANGES and row[1] is None)
        if unended:
            self._problems.append(("regions", unended, f"{counted(unended, 'NVTX range')} did not end in the capture"))
        return self._frame(_HOST_ROWS, _NVTX, ranges)

    def _thread(self, thread: int | None) -> tuple[int | None, int]:
        """Process and thread, 0 being the main one. Without process ids in the device's rows there is one process."""
        if thread is None or not self._tells_processes:
            return None, 0
        process = thread >> _PID_BITS << _PID_BITS
        is_main = thread & 0xFFFFFF == process >> _PID_BITS & 0xFFFFFF
        return process, 0 if is_main else _NOT_MAIN

    def _frame(self, schema: Mapping[str, Any], kind: str, rows: Sequence[tuple[Any, ...]]) -> pl.DataFrame:
        frame = pl.DataFrame(rows, schema=dict(schema), orient="row", strict=False)
        good = frame.filter(pl.col("start_ns") <= pl.col("end_ns"))
        lost = len(frame) - len(good)
        if lost:
            why = f"{counted(lost, 'row')} of {kind} have no times, or end before they start; they were left out"
            self._problems.append(("kernels" if kind in _DEVICE else "launches", lost, why))
        return good
