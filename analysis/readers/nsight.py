"""Reads Nsight Systems' SQLite exports (`nsys export --type sqlite`).

Device work, the calls that launched it, and NVTX ranges; several GPUs may share one file. A file does not say which
ranks its GPUs are: where each file is of one GPU, the numbers in the files' names are taken; else ranks are counted in
the order of the names and, within a file, of the devices. Tables that an export lacks are no error, but `gaps` names
them. Times are on one clock per file, or per host where the files say when they began.

Source: Nsight Systems user guide, "SQLite schema reference"; exports of 2021 to 2026.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.analysis.model.annotations import STEP, range_kind
from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.kernels import MEMORY, device_work, op_said
from rankscope.analysis.readers.base import (
    FrameReader,
    Reader,
    by_name,
    files_in,
    gap,
    in_one_line,
    shaped,
    table,
)
from rankscope.analysis.readers.nsight_collectives import Inferred, infer_groups
from rankscope.analysis.readers.workers import Lost, each, scratch_folder
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]

_DAMAGED = (sqlite3.Error, UnicodeDecodeError)  # the latter where the damage is in a name
_MAGIC = b"SQLite format 3\0"
_REPORTS = (".nsys-rep", ".qdrep")  # what is exported from
_PREFIX = "CUPTI_ACTIVITY_KIND_"
_KERNEL, _MEMCPY, _MEMSET, _GRAPH, _RUNTIME = (
    f"{_PREFIX}{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
_DEVICE = (_KERNEL, _MEMCPY, _MEMSET, _GRAPH)
_META = ("META_DATA_EXPORT", "EXPORT_META_DATA")
_NVTX = "NVTX_EVENTS"
_RANK = re.compile(r"rank[-_ ]?([0-9]{1,6})(?![0-9])", re.IGNORECASE)
_RANGES = (59, 60)  # NVTX push/pop and start/end ranges
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
# Torch numbers each call of an operator (`aten::add, op_id = 17`): the name alone is what is alike.
_NUMBERS = r", (?:seq|op_id|sizes|input_op_ids) = .*$"
_OPERATION = "nccl:"  # how torch's ranges of operations begin
_SENT = {"ncclSend": "send", "ncclRecv": "recv"}  # NCCL's own ranges; kernels of its other operations have their names
_VERSION = r"_v\d+$"  # of the interface, at the end of a call's name
_PID_STEP = 1 << 24  # a thread's global id is the process's number times this, plus the thread's id
_CHUNK = 100_000  # rows that are held as Python objects at a time
_PATIENCE_S = 600.0  # a query that an export was given to run never comes to an end
_OPERATIONS = 1_000_000  # of SQLite, between two looks at the clock
_NOT_MAIN = 65535
_SAME_START_NS = 1_000_000_000  # hosts that were started within so long are one, if they have the same name
_BYTES_PER_S = 40_000_000  # of a core
_LACKS = {
    "breakdown": text("NVTX ranges do not show what the host waited for"),
    "phases": text("NVTX ranges do not show what the host waited for"),
    "gc_pauses": text("the export does not show when Python collects garbage"),
    "compile": text("the export does not show what torch.compile compiles"),
    "collectives": text(
        "no communication of several GPUs was matched: export all ranks' reports, and give them together"
    ),
    "steps": text(
        "no NVTX range says where steps are (give each step one on the thread that trains, named as in `step 12`)"
    ),
}


@dataclass(frozen=True, slots=True)
class _Capture:
    """The content of one file. `process` is null where the export does not distinguish processes.

    `frames` are the files of its device work, launches and ranges. `places` are process and device of each rank.
    """

    name: str
    frames: Mapping[str, Path]
    device_rows: int
    places: Sequence[tuple[int | None, int]]
    gpus: Mapping[int, str]
    host: str
    since: tuple[int, int | None] | None  # when time 0 was: unix time, and the host's own clock if that is known
    version: str
    problems: tuple[tuple[str, int | None, str], ...]  # table, count, why

    def frame(self, name: str) -> pl.DataFrame:
        return pl.read_ipc(self.frames[name])


def recognises(path: Path) -> bool:
    """Such an export, the report that it is made from, or a folder in which an export lies."""
    if path.is_dir():
        return any(f.is_file() and _is_export(f) for f in path.iterdir())
    return path.name.endswith(_REPORTS) or _is_export(path)


def open_run(paths: Sequence[str]) -> FrameReader:
    """Return the run in these exports. Raises `BadInput`."""
    files = sorted((f for f in files_in(paths) if _is_export(f)), key=by_name)
    if not files:
        raise BadInput(f"{paths[0]} is no SQLite export: make one with `nsys export --type sqlite {paths[0]}`")
    with scratch_folder() as folder:
        return _run_of(files, _read_all(files, Path(folder)))


def _read_all(files: Sequence[Path], folder: Path) -> list[_Capture]:
    tasks = [(file.absolute(), str(file), folder / str(number)) for number, file in enumerate(files)]
    captures = []
    for file, capture in zip(files, each(read_export, tasks, [_cpu_s(file) for file in files]), strict=True):
        if isinstance(capture, Lost):
            raise BadInput(f"{file} was not read: {capture.why}")
        captures.append(capture)
    return captures


def _cpu_s(file: Path) -> float:
    """About what reading this file takes."""
    return file.stat().st_size / _BYTES_PER_S


def _run_of(files: Sequence[Path], captures: Sequence[_Capture]) -> FrameReader:
    ranks: list[dict[str, Any]] = []
    missing: list[Gap] = []
    numbers = _numbers(files) if all(len(capture.places) == 1 for capture in captures) else None
    if len(files) > 1 and numbers is None:
        missing.append(
            gap("ranks", text("the files do not name their ranks: they are numbered in the order of their names"))
        )
    firsts = numbers or [sum(len(before.places) for before in captures[:number]) for number in range(len(captures))]
    nodes = _nodes(captures)
    tables, inferred = _matched(captures, firsts, nodes)
    apart = [(number, 0) for number in range(len(captures))]
    if inferred.alone and nodes != apart:  # their times may not be what they say
        of_own_clocks = _matched(captures, firsts, apart)
        if of_own_clocks[1].alone < inferred.alone:
            nodes, (tables, inferred) = apart, of_own_clocks
    for capture, first, (node, later_ns) in zip(captures, firsts, nodes, strict=True):
        ranks += _ranks(capture, first, node, later_ns)
        kernels = tables["kernels"].filter(pl.col("rank").is_between(first, first + len(capture.places) - 1))
        missing += _of_capture(capture, len(kernels))
    tables |= {"collectives": inferred.collectives, "groups": inferred.groups}
    missing += _of_groups(inferred)
    return FrameReader(
        frames={"ranks": table("ranks", ranks)}
        | {name: shaped(name, frame) for name, frame in tables.items() if len(frame)},
        missing=missing,
        lacks=_LACKS if inferred.groups.is_empty() else {k: why for k, why in _LACKS.items() if k != "collectives"},
        run={
            node: {"hostname": capture.host, "versions": {"nsys": capture.version}}
            for capture, (node, _) in zip(captures, nodes, strict=True)
        },
    )


def _matched(
    captures: Sequence[_Capture], firsts: Sequence[int], nodes: Sequence[tuple[int, int]]
) -> tuple[dict[str, pl.DataFrame], Inferred]:
    """Return the rows of all files, by table, and the groups that they show."""
    frames: dict[str, list[pl.DataFrame]] = {"kernels": [], "launches": [], "regions": [], "operations": []}
    for capture, first, (node, later_ns) in zip(captures, firsts, nodes, strict=True):
        for name, frame in _rows_of_ranks(capture, first, node).items():
            frames[name].append(frame.with_columns(pl.col("start_ns", "end_ns") + later_ns))
    tables = {name: pl.concat(parts) for name, parts in frames.items()}
    firsts_of = {node: capture for capture, (node, _) in reversed(list(zip(captures, nodes, strict=True)))}
    unix_ns = {node: capture.since[0] for node, capture in firsts_of.items() if capture.since}
    return tables, infer_groups(tables["kernels"], tables["launches"], tables.pop("operations"), unix_ns)


def _nodes(captures: Sequence[_Capture]) -> list[tuple[int, int]]:
    """Return each file's node, and what to add to its times.

    Files of one host that say when they began share its clock: its own, else unix time. A host is the same if it has
    the name and, where its own clock is known, was started at the same time.
    """
    found: list[tuple[int, int]] = []
    hosts: list[tuple[str, int | None, int]] = []  # of each node: name, when it was started, time 0 of its first file
    for capture in captures:
        unix_ns, own_ns = capture.since or (0, None)
        started_ns = None if own_ns is None else unix_ns - own_ns
        began_ns = unix_ns if own_ns is None else own_ns
        node = len(hosts)
        for known, (name, known_ns, _) in enumerate(hosts if capture.since else []):
            if name == capture.host and _is_same(started_ns, known_ns):
                node = known
        if node == len(hosts):
            hosts.append((capture.host if capture.since else "", started_ns, began_ns))
        found.append((node, began_ns - hosts[node][2]))
    return found


def _is_same(started_ns: int | None, other_ns: int | None) -> bool:
    if started_ns is None or other_ns is None:
        return started_ns is other_ns
    return abs(started_ns - other_ns) < _SAME_START_NS


def _ranks(capture: _Capture, first: int, node: int, start_ns: int) -> list[dict[str, Any]]:
    """Return the ranks of one file, numbered from `first` on."""
    return [
        {
            "rank": first + i,
            "node": node,
            "local_rank": i,
            "start_ns": start_ns,
            "hostname": capture.host,
            "pid": None if process is None else process // _PID_STEP % _PID_STEP,
            "device": capture.gpus.get(device, "GPU"),
        }
        for i, (process, device) in enumerate(capture.places)
    ]


def _rows_of_ranks(capture: _Capture, first: int, node: int) -> dict[str, pl.DataFrame]:
    """Return the rows of one file, each with its rank, numbered from `first` on."""
    rank_of = pl.DataFrame(
        [(process, device, first + i, node) for i, (process, device) in enumerate(capture.places)],
        schema={"process": pl.Int64, "device": pl.Int64, "rank": pl.Int32, "node": pl.Int32},
        orient="row",
    )
    kernels = capture.frame("device").join(rank_of, on=["process", "device"], nulls_equal=True)
    launched = kernels.select("process", "correlation", "rank", "node").drop_nulls("correlation")
    launched = launched.unique(["process", "correlation"], keep="first")
    # What launched nothing (a synchronization, say), and a range, belongs to its process's rank: where a process drives
    # several GPUs, to the first.
    own = rank_of.drop("device").unique("process", keep="first", maintain_order=True)
    calls = capture.frame("launches").join(own, on="process", nulls_equal=True)
    calls = calls.join(launched, on=["process", "correlation"], how="left", nulls_equal=True, suffix="_of_work")
    launches = calls.with_columns(rank=pl.coalesce("rank_of_work", "rank")).drop("rank_of_work", "node_of_work")
    ranges = capture.frame("ranges").join(own, on="process", nulls_equal=True)
    names = ranges["name"].unique()
    kind, op = ({name: of(name) for name in names} for of in (_kind_of_range, _op_of_range))
    regions, operations = (
        ranges.with_columns(pl.col("name").replace_strict(said, return_dtype=pl.String).alias(column)).drop_nulls(
            column
        )
        for column, said in (("kind", kind), ("op", op))
    )
    found = {"kernels": kernels, "launches": launches, "regions": regions, "operations": operations}
    return {name: frame.drop("process") for name, frame in found.items()}


def _kind_of_range(name: str) -> str | None:
    """Return the kind of its region; a profiler's step is the user's range for a step, as any of such a name."""
    return "user" if re.match(STEP, name) else range_kind(name)


def _op_of_range(name: str) -> str | None:
    """Return the operation of a range of this name: torch's, as `nccl:all_to_all`, or NCCL's own; None: none."""
    return _SENT.get(name) or (op_said(name.removeprefix(_OPERATION)) if name.startswith(_OPERATION) else None)


def _of_capture(capture: _Capture, kernels: int) -> list[Gap]:
    """Return gaps on one file: uncertain ranks, and tables that could not be read."""
    missing, ranks = [], len(capture.places)
    if kernels < capture.device_rows:
        why = text("{file}: copies on GPUs on which their process computes nothing", file=capture.name)
        missing.append(gap("kernels", why, count=capture.device_rows - kernels))
    if ranks > 1:
        why = text(
            "{name} holds {gpus}: their ranks are taken in the order of the devices",
            name=capture.name,
            gpus=counted(ranks, "GPU"),
        )
        missing.append(gap("ranks", why))
    return missing + [
        gap(name, text("{file}: {why}", file=capture.name, why=why), count=count)
        for name, count, why in capture.problems
    ]


def _of_groups(inferred: Inferred) -> list[Gap]:
    """Return gaps on the process groups: uncertain and unknown ones."""
    missing = []
    if len(inferred.groups):
        why = text(
            "the export names no process groups: {groups} inferred from order, names and ends of the kernels of NCCL",
            groups=counted(inferred.groups["group_id"].n_unique(), "group"),
        )
        missing.append(gap("groups", why))
    if inferred.alone:
        why = text("communication kernels whose counterpart on another GPU is not in these exports, or not certain")
        missing.append(gap("collectives", why, count=inferred.alone))
    return missing


def _numbers(files: Sequence[Path]) -> list[int] | None:
    """Return the rank that each name says.

    After the word, or the one number in which they differ (`report_0`, `report_1`).
    """
    said = [_RANK.search(file.stem) for file in files]
    numbers = [int(match[1]) for match in said if match]
    if len(numbers) < len(files):
        parts = list(zip(*(by_name(Path(file.stem)) for file in files), strict=False))
        differ = [part for part in parts if len(set(part)) > 1]
        alike = len({len(by_name(Path(file.stem))) for file in files}) == 1
        numbers = [number for number in differ[0] if isinstance(number, int)] if alike and len(differ) == 1 else []
    return numbers if len(set(numbers)) == len(files) else None


def _is_export(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                return False
        with _opened(path) as database:
            names = _tables(database)
    except (OSError, *_DAMAGED):
        # Count it as a database: reading it reports what is wrong.
        return path.suffix == ".sqlite" and path.stat().st_size > 0
    return bool(names & {*_DEVICE, *_META, _RUNTIME, _NVTX})


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database for a while, never to write: no journal is made beside it, not even in a read-only folder."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        until = time.monotonic() + _PATIENCE_S
        database.set_progress_handler(lambda: time.monotonic() > until, _OPERATIONS)
        database.text_factory = lambda text: text.decode("utf-8", errors="replace")
        yield database


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def read_export(path: Path, shown: str, into: Path) -> _Capture:
    """One export, its rows in files in this folder. Raises `BadInput` if no device work in it can be read."""
    try:
        into.mkdir()
        with _opened(path) as database:
            return _Reading(database, path.name, shown).capture(into)
    except _DAMAGED as error:
        raise BadInput(f"{shown} is cut or damaged ({in_one_line(error)}): export it again") from None


def _places(device: pl.DataFrame) -> list[tuple[int | None, int]]:
    """Process and device of each rank: a GPU on which a process only copies is no rank of its own."""
    computes = (pl.col("work") != MEMORY).any()
    places = device.group_by("process", "device").agg(computes.alias("computes")).sort("device", "process")
    any_computes = pl.col("computes").any().over("process")
    return places.filter(pl.col("computes") | ~any_computes).select("process", "device").rows()


def _stored(into: Path, frames: Mapping[str, pl.DataFrame]) -> dict[str, Path]:
    files = {name: into / f"{name}.arrow" for name in frames}
    try:
        for name, frame in frames.items():
            frame.write_ipc(files[name])
    except OSError as error:
        raise BadInput(f"no room for temporary files in {into}: set TMPDIR to another folder ({error})") from None
    return files


class _Reading:
    """One database while it is read, a chunk of rows at a time; notes what it lacks."""

    def __init__(self, database: sqlite3.Connection, name: str, shown: str) -> None:
        self._database = database
        self._name, self._shown = name, shown
        self._tables = _tables(database)
        self._problems: list[tuple[str, int | None, str]] = []
        self._strings = self._select("StringIds", "run", id=("id", pl.Int64), text=("value", pl.String))
        self._has_processes = _KERNEL not in self._tables or "globalPid" in self._columns(_KERNEL)

    def capture(self, into: Path) -> _Capture:
        device = pl.concat([self._device(kind) for kind in _DEVICE])
        if device.is_empty():
            raise BadInput(f"{self._shown} holds no device work: record with `nsys profile --trace=cuda,nvtx`")
        frames = {"device": device, "launches": self._launches(), "ranges": self._ranges()}
        gpus = dict(self._select("TARGET_INFO_GPU", "ranks", id=("id", pl.Int64), name=("name", pl.String)).iter_rows())
        if not gpus:
            self._problems.append(("ranks", None, text("it has no TARGET_INFO_GPU, so the GPUs' names are unknown")))
        meta = {name: value for table in _META for name, value in self._settings(table)}
        if not meta:
            self._problems.append(("run", None, text("it has no META_DATA_EXPORT, so the version of nsys is unknown")))
        for kind, lacking in ((_KERNEL, "kernels"), (_RUNTIME, "launches"), (_NVTX, "regions")):
            if kind not in self._tables:
                self._problems.append(
                    (lacking, None, text("it has no {kind}, so there are no {lacking}", kind=kind, lacking=lacking))
                )
        return _Capture(
            name=self._name,
            frames=_stored(into, frames),
            device_rows=len(device),
            places=_places(device),
            gpus=gpus,
            host=dict(self._settings("TARGET_INFO_SYSTEM_ENV")).get("Hostname", ""),
            since=self._since(),
            version=meta.get("EXPORT_PRODUCT_VERSION", ""),
            problems=tuple(self._problems),
        )

    def _settings(self, name: str) -> list[tuple[str, str]]:
        return self._select(name, "run", name=("name", pl.String), value=("value", pl.String)).rows()

    def _since(self) -> tuple[int, int | None] | None:
        columns = {"unix": ("utcEpochNs", pl.Int64), "own": ("systemClockNs", pl.Int64)}
        found = self._select("TARGET_INFO_SESSION_START_TIME", "clocks", **columns).drop_nulls("unix")
        if found.is_empty():
            return None
        unix_ns, own_ns = found.row(0)
        first = self._select("ANALYSIS_DETAILS", "clocks", start_ns=("startTime", pl.Int64)).drop_nulls()
        start_ns = first["start_ns"][0] if len(first) else 0  # the time in the file when the recording began
        return unix_ns - start_ns, None if own_ns is None else own_ns - start_ns

    def _columns(self, name: str) -> set[str]:
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{name}")')}

    def _select(self, name: str, into: str, /, **columns: tuple[str, Any]) -> pl.DataFrame:
        """Return these columns of a table, null where it has none of that name; no rows where there is no such table.

        `into` is the table of ours that lacks what cannot be read.
        """
        schema = {alias: dtype for alias, (_, dtype) in columns.items()}
        parts = [pl.DataFrame(schema=schema)]
        if name in self._tables:
            known = self._columns(name)
            chosen = ", ".join(f'"{column}"' if column in known else "NULL" for column, _ in columns.values())
            try:
                cursor = self._database.execute(f'SELECT {chosen} FROM "{name}"')
                while rows := cursor.fetchmany(_CHUNK):
                    values = zip(schema, zip(*rows, strict=True), strict=True)
                    parts.append(
                        pl.DataFrame(
                            [pl.Series(alias, column, schema[alias], strict=False) for alias, column in values]
                        )
                    )
            except _DAMAGED as error:
                good = sum(map(len, parts))
                self._problems.append(
                    (
                        into,
                        None,
                        text(
                            "{name} cannot be read after {rows} ({error})",
                            name=name,
                            rows=counted(good, "row"),
                            error=in_one_line(error),
                        ),
                    )
                )
        return pl.concat(parts)

    def _device(self, kind: str) -> pl.DataFrame:
        what = {_KERNEL: "demangledName", _MEMCPY: "copyKind", _GRAPH: "graphId"}.get(kind, "")
        rows = self._select(
            kind,
            "kernels",
            start_ns=("start", pl.Int64),
            end_ns=("end", pl.Int64),
            what=(what, pl.Int64),
            short=("shortName", pl.Int64),
            process=("globalPid", pl.Int64),
            device=("deviceId", pl.Int64),
            stream=("streamId", pl.Int64),
            correlation=("correlationId", pl.Int64),
            bytes=("bytes", pl.Int64),
        )
        if kind == _GRAPH and len(rows):
            why = text("kernels inside CUDA graphs are not distinguished; record with `--cuda-graph-trace=node`")
            self._problems.append(("kernels", len(rows), why))
        if kind == _KERNEL:
            name = pl.coalesce("text", "short_text", pl.lit("kernel without a name"))
            rows = rows.pipe(self._named, "what", "text").pipe(self._named, "short", "short_text")
        else:
            name = {
                _MEMCPY: pl.format("Memcpy {}", pl.col("what").replace_strict(_COPIES, default="")).str.strip_chars(),
                _GRAPH: pl.format("CUDA graph {}", pl.col("what").fill_null(0)),
            }.get(kind, pl.lit("Memset"))
        rows = self._with_times(rows.drop_nulls("device"), kind, "kernels").with_columns(name.alias("name"))
        copies = kind in (_MEMCPY, _MEMSET)
        work = {text: MEMORY if copies else device_work("kernel", text) for text in rows["name"].unique()}
        return rows.select(
            *("start_ns", "end_ns", "name", "process", "device", "stream", "correlation"),
            pl.when(pl.col("bytes") >= 0).then("bytes").alias("bytes"),
            pl.col("name").replace_strict(work, return_dtype=pl.String).alias("work"),
        )

    def _launches(self) -> pl.DataFrame:
        rows = self._select(
            _RUNTIME,
            "launches",
            start_ns=("start", pl.Int64),
            end_ns=("end", pl.Int64),
            what=("nameId", pl.Int64),
            tid=("globalTid", pl.Int64),
            correlation=("correlationId", pl.Int64),
        )
        rows = self._with_times(rows.pipe(self._named, "what", "text"), _RUNTIME, "launches")
        name = pl.col("text").fill_null("").str.replace(_VERSION, "")
        return rows.select("start_ns", "end_ns", name.alias("name"), *self._thread(), "correlation")

    def _ranges(self) -> pl.DataFrame:
        rows = self._select(
            _NVTX,
            "regions",
            start_ns=("start", pl.Int64),
            end_ns=("end", pl.Int64),
            own_text=("text", pl.String),
            what=("textId", pl.Int64),
            tid=("globalTid", pl.Int64),
            event=("eventType", pl.Int64),
        ).filter(pl.col("event").is_in(_RANGES))
        unended = rows["end_ns"].null_count()
        if unended:
            self._problems.append(
                (
                    "regions",
                    unended,
                    text("{ranges} did not end in the capture", ranges=counted(unended, "NVTX range")),
                )
            )
        rows = rows.drop_nulls("end_ns").pipe(self._named, "what", "text")
        rows = self._with_times(rows, _NVTX, "regions")
        name = pl.coalesce("own_text", "text", pl.lit("")).str.replace(_NUMBERS, "")
        return rows.select("start_ns", "end_ns", name.alias("name"), *self._thread())

    def _named(self, rows: pl.DataFrame, id_column: str, into: str) -> pl.DataFrame:
        texts = self._strings.unique("id").rename({"id": id_column, "text": into})
        return rows.join(texts, on=id_column, how="left", maintain_order="left")

    def _thread(self) -> tuple[pl.Expr, pl.Expr]:
        """Process and thread, 0 being the main one. Without process ids in the device's rows there is one process."""
        if not self._has_processes:
            return pl.lit(None, pl.Int64).alias("process"), pl.lit(0).alias("thread")
        number, tid = pl.col("tid") // _PID_STEP, pl.col("tid") % _PID_STEP
        is_main = tid == number % _PID_STEP
        thread = pl.when(is_main).then(0).otherwise(_NOT_MAIN)
        return (number * _PID_STEP).alias("process"), thread.alias("thread")

    def _with_times(self, rows: pl.DataFrame, kind: str, into: str) -> pl.DataFrame:
        good = rows.filter(pl.col("start_ns") <= pl.col("end_ns"))
        lost = len(rows) - len(good)
        if lost:
            why = text(
                "{rows} of {kind} have no times, or end before they start; they were left out",
                rows=counted(lost, "row"),
                kind=kind,
            )
            self._problems.append((into, lost, why))
        return good


reader = Reader(recognises=recognises, open_run=open_run)
