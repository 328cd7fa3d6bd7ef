"""Reads the run folders that rankscope's own agent writes (layout: docs/architecture.md)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from rankscope.analysis.finding import Gap
from rankscope.analysis.language import Text, joined, text
from rankscope.analysis.phrases import named
from rankscope.analysis.trace import BadInput
from rankscope.collectors.schema import (
    DEVICE_MARKS,
    DEVICE_WORK,
    DTYPES,
    NCCL_ALGORITHMS,
    NCCL_EVENTS,
    NCCL_PROTOCOLS,
    OPS,
    REGION_KINDS,
    SCHEMA_VERSION,
    TABLES,
)

__all__ = ["NativeReader", "open_run", "read_rows", "recognises", "schema_of"]

_MAGIC = b"ARROW1"
_HEADER = 8  # the magic, padded
_PARTITION = re.compile(r"(rank|node)=(\d+)")
_FILE = re.compile(r"(?:a(\d+)-)?part-(\d+)\.arrow")
_RUN_FILE = re.compile(r"node=(\d+)\.json")
_CODES = {
    "kind": (REGION_KINDS, "user"),
    "op": (OPS, "unknown"),
    "dtype": (DTYPES, "unknown"),
    "work": (DEVICE_WORK, "compute"),
    "event": (NCCL_EVENTS, "unknown"),
    "algorithm": (NCCL_ALGORITHMS, "unknown"),
    "protocol": (NCCL_PROTOCOLS, "unknown"),
    "mark": (DEVICE_MARKS, "unknown"),
}
_ENDS_LATER = "completions"
_READ_BY_OTHERS = ("ranks", "strings", "gaps", _ENDS_LATER)  # by what makes the other tables
_LARGE = ("kernels", "launches")  # whoever reads them keeps what is needed of them
_POLARS = {
    "int32": pl.Int32,
    "int64": pl.Int64,
    "uint8": pl.UInt8,
    "uint16": pl.UInt16,
    "uint32": pl.UInt32,
    "uint64": pl.UInt64,
    "float64": pl.Float64,
    "bool": pl.Boolean,
    "string": pl.String,
}
# What a file's folder and name add to its rows; `node` of a rank's rows comes from `ranks`.
_WRITTEN_BY = {"rank": ("rank", "attempt"), "node": ("node",), "rank or node": ("rank", "node", "attempt")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One file: a piece of `table` from one rank's attempt, or from one node."""

    path: Path
    table: str
    rank: int | None
    node: int | None
    attempt: int | None
    number: int


def schema_of(name: str) -> dict[str, Any]:
    """Columns of a table as `Trace.table` gives it, with their polars types."""
    table = TABLES[name]
    by = ("node",) if table.partition == "node" else ("rank", "node", "attempt")
    schema: dict[str, Any] = dict.fromkeys(by, pl.Int32)
    for column in table.columns:
        named = name != "strings" and (_is_id(column.name) or column.name in _CODES)
        schema[_named(column.name) if named else column.name] = pl.String if named else _POLARS[column.type]
    return schema


def recognises(path: Path) -> bool:
    """Whether this is a run folder: it says what was launched, or holds at least one table."""
    return path.is_dir() and (any(path.glob("run/node=*.json")) or any(True for _ in _parts(path)))


def open_run(folders: list[str]) -> NativeReader:
    """Everything that these folders hold of one run. Raises `BadInput` if that is nothing."""
    roots = list(dict.fromkeys(_existing_folder(folder) for folder in folders))
    run, torn = _run_files(roots)
    parts = [part for root in roots for part in _parts(root)]
    _refuse_two_runs(parts)
    where = ", ".join(folders)
    if not run and not torn and not parts:
        raise BadInput(_no_run(roots[0], where) if roots else "no run folder was given")
    for node, launch in run.items():
        version = launch.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise BadInput(
                f"{where}: node {node} wrote schema version {version}, this rankscope reads up to {SCHEMA_VERSION}: "
                "update rankscope"
            )
    reader = NativeReader(run, parts, torn, _windows(roots))
    if not reader.ranks():
        raise BadInput(f"{where}: no rank reported{reader.why_no_rank()}")
    return reader


class NativeReader:
    """Reads a table when it is first asked for, and keeps it, unless it is large, together with what it lacked."""

    def __init__(
        self, run: dict[int, dict[str, Any]], parts: list[_Part], gaps: list[Gap], windows: list[list[Path]]
    ) -> None:
        self.run = run
        self._all_closed = bool(run) and all(launch.get("state") == "closed" for launch in run.values())
        self._windows = windows
        self.attempt = max((p.attempt for p in parts if p.attempt is not None), default=0)
        self._parts = [p for p in parts if p.attempt in (None, self.attempt)]
        self._earlier = sorted({p.attempt for p in parts if p.attempt is not None} - {self.attempt})
        self._raw: dict[str, pl.DataFrame] = {}
        self._tables: dict[str, pl.DataFrame] = {}
        self._seen: set[str] = set()  # tables whose gaps are noted
        self._gaps = gaps
        self._imported = [launch for launch in run.values() if "source" in launch]  # what the source's reader knew

    def tables(self) -> tuple[str, ...]:
        return tuple(name for name in TABLES if any(p.table == name for p in self._parts))

    def windows(self) -> list[list[Path]]:
        """Of each deep window the folders that hold its tables: a run of its own."""
        return self._windows

    def ranks(self) -> list[int]:
        """Ranks that left at least one file in the attempt that is read."""
        return sorted({p.rank for p in self._parts if p.rank is not None})

    def read(self, name: str) -> pl.DataFrame:
        if name not in self._tables:
            frame = self._read_raw(name)
            if name == "collectives":
                frame = _with_late_ends(frame, self._read_raw(_ENDS_LATER))
            if name == "ranks":
                frame = frame.unique("rank", keep="last", maintain_order=True)
            if "node" not in frame.columns:
                frame = self._with_node(frame)
            if name != "strings":
                frame = self._with_names(frame)
            if name not in _READ_BY_OTHERS:
                del self._raw[name]
            self._seen.add(name)
            if name in _LARGE:
                return frame.select(*schema_of(name))
            self._tables[name] = frame.select(*schema_of(name))
        return self._tables[name]

    def pieces(self, name: str) -> Iterator[pl.DataFrame]:
        return iter([self.read(name)])

    def rows(self, name: str) -> int:
        files = [part.path for part in self._parts if part.table == name]
        return sum(map(_rows_in, files))

    def gaps(self) -> list[Gap]:
        for name in self.tables():
            if name not in self._seen:
                self.read(name)
        if self._imported:
            return [*self._gaps, *(Gap(**gap) for launch in self._imported for gap in launch.get("gaps", ()))]
        return [*self._gaps, *self._run_gaps(), *self._end_gaps(), *self._said_gaps()]

    def cannot(self) -> dict[str, str]:
        return {table: why for launch in self._imported for table, why in launch.get("cannot", {}).items()}

    def why_no_rank(self) -> str:
        """What the agent wrote about the ranks that never came, as the end of a sentence."""
        said = [gap.why for gap in self._said_gaps() if gap.table == "ranks"]
        return f": {said[0]}" if said else ": the job made no process group, or ended before it"

    def _read_raw(self, name: str) -> pl.DataFrame:
        """The table with ids and codes as written; every gap that shows while reading is noted once."""
        if name not in self._raw:
            read = [(part, table) for part in self._parts if part.table == name for table in self._read_part(part)]
            alike = itertools.groupby(read, key=lambda one: one[1].schema)
            frames = [self._whole_rows(name, list(of_schema)) for _, of_schema in alike]
            schema: dict[str, Any] = dict.fromkeys(_WRITTEN_BY[TABLES[name].partition], pl.Int32)
            schema |= {c.name: _POLARS[c.type] for c in TABLES[name].columns}
            self._raw[name] = pl.concat(frames, rechunk=True) if frames else pl.DataFrame(schema=schema)
        return self._raw[name]

    def _read_part(self, part: _Part) -> list[pa.Table]:
        """The part's rows, if it has any."""
        table, problem = read_rows(part.path, closed=self._closed(part))
        if problem:
            self._note(
                part,
                None,
                joined(
                    "", (text("{name} {problem}", name=part.path.name, problem=problem), self._good_until(part, table))
                ),
            )
        if table is None or not table.num_rows:
            return []
        columns = TABLES[part.table].columns
        missing = [c.name for c in columns if c.name not in table.column_names and not c.nullable]
        if missing:
            self._note(
                part,
                table.num_rows,
                text("{name} has no column {column}: it was not read", name=part.path.name, column=missing[0]),
            )
            return []
        return [table.replace_schema_metadata()]

    def _whole_rows(self, name: str, parts: list[tuple[_Part, pa.Table]]) -> pl.DataFrame:
        """The rows of these parts, all with the same columns, and whose they are: together, since there may be many."""
        columns = TABLES[name].columns
        of_part = np.repeat(np.arange(len(parts)), [table.num_rows for _, table in parts])
        owners = (
            pl.Series(by, [getattr(part, by) for part, _ in parts], pl.Int32).gather(of_part)
            for by in _WRITTEN_BY[TABLES[name].partition]
        )
        frame = pl.DataFrame(pl.from_arrow(pa.concat_tables([table for _, table in parts])))
        frame = frame.with_columns(pl.lit(None).alias(c.name) for c in columns if c.name not in frame.columns)
        frame = frame.select(*owners, *(pl.col(c.name).cast(_POLARS[c.type]) for c in columns))
        needed = [] if self._imported else [c.name for c in columns if not c.nullable]
        if not any(frame[column].null_count() for column in needed):
            return frame
        lacking = frame.select(pl.any_horizontal(pl.col(needed).is_null())).to_series()
        for number, lost in enumerate(np.bincount(of_part[lacking.to_numpy()]).tolist()):
            if lost:
                part = parts[number][0]
                why = text(
                    "{name}: {lost} rows lack a value that must be there; they were left out",
                    name=part.path.name,
                    lost=lost,
                )
                self._note(part, lost, why)
        return frame.filter(~lacking)

    def _good_until(self, part: _Part, table: pa.Table | None) -> str:
        """Where the good rows of a cut file end, as the end of a sentence."""
        order = TABLES[part.table].order
        if table is None or order not in table.column_names or part.table == "ranks":
            return text("; nothing of it is good") if table is None else ""
        start = self._started_ns(pl.col("rank") == part.rank if part.rank is not None else pl.col("node") == part.node)
        last = pl.DataFrame(pl.from_arrow(table.select([order])))[order].max()
        if start is None or not isinstance(last, int) or not order.endswith("_ns"):
            return ""
        return text("; it is good until {last:.1f} s after the start", last=(last - start) / 1e9)

    def _started_ns(self, which: pl.Expr) -> int | None:
        start = self._read_raw("ranks").filter(which)["start_ns"].min()
        return start if isinstance(start, int) else None

    def _closed(self, part: _Part) -> bool:
        """Whether every agent that could still be writing this file has ended its run properly."""
        return self._all_closed if part.node is None else self.run.get(part.node, {}).get("state") == "closed"

    def _note(self, part: _Part, count: int | None, why: str) -> None:
        gap = Gap(table=part.table, rank=part.rank, node=part.node, count=count, why=why)
        if gap not in self._gaps:  # large tables may be read again
            self._gaps.append(gap)

    def _with_node(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The node of each row's rank; null where the rank's own row was lost and there are several nodes."""
        nodes = self._read_raw("ranks").select("rank", "node").unique("rank", keep="last")
        frame = frame.join(nodes, on="rank", how="left", maintain_order="left")
        return frame.with_columns(pl.col("node").fill_null(next(iter(self.run)))) if len(self.run) == 1 else frame

    def _with_names(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Ids become names; an id whose name was lost becomes `#id`."""
        ids = [c for c in frame.columns if _is_id(c)]
        owner = "rank" if "rank" in frame.columns else "node"
        if ids:
            names = self._read_raw("strings").filter(pl.col("attempt").is_null() == (owner == "node"))
            names = names.select(owner, "name_id", pl.col("name").alias("_name"))
            names = names.unique([owner, "name_id"], keep="last")
            for column in ids:
                different = (
                    frame.select(owner, column)
                    .unique()
                    .join(names, how="left", left_on=[owner, column], right_on=[owner, "name_id"])
                    .select(owner, column, pl.coalesce("_name", pl.format("#{}", column)).alias(_named(column)))
                )
                frame = frame.join(different, how="left", on=[owner, column], maintain_order="left").drop(column)
        for column, (known, default) in _CODES.items():
            if column in frame.columns:
                codes = dict(enumerate(known))
                name = pl.col(column).replace_strict(codes, default=default, return_dtype=pl.String)
                frame = frame.with_columns(pl.when(pl.col(column).is_not_null()).then(name).alias(column))
        return frame

    def _run_gaps(self) -> list[Gap]:
        """Nodes that did not close, ranks that left nothing, attempts that are not analysed."""
        ranks = self._read_raw("ranks")
        world = max(ranks["world_size"].to_list(), default=0)
        gaps = [
            Gap(table="run", rank=None, node=node, count=None, why=self._open_node(node))
            for node, launch in sorted(self.run.items())
            if launch.get("state") != "closed"
        ]
        missing = sorted(set(range(world)) - set(self.ranks()))
        if missing:
            why = text(
                "{missing} of {world} left no trace: if they ran on another node, give its folder "
                "too, else they never joined",
                missing=named("rank", missing),
                world=world,
            )
            rank = missing[0] if len(missing) == 1 else None
            gaps.append(Gap(table="ranks", rank=rank, node=None, count=len(missing), why=why))
        for attempt in self._earlier:
            why = text(
                "attempt {attempt} was restarted and is not analysed, only the last attempt ({last}) is",
                attempt=attempt,
                last=self.attempt,
            )
            gaps.append(Gap(table="ranks", rank=None, node=None, count=None, why=why))
        return gaps

    def _open_node(self, node: int) -> str:
        start = self._started_ns(pl.col("node") == node)
        last = self.read("regions").filter(pl.col("node") == node)["end_ns"].max()
        until = (
            text("; nothing after {last:.1f} s", last=(last - start) / 1e9)
            if start is not None and isinstance(last, int)
            else ""
        )
        return text(
            "node {node} has not closed its run: it is still recording, or its agent was killed{until}",
            node=node,
            until=until,
        )

    def _end_gaps(self) -> list[Gap]:
        collectives = self.read("collectives")
        timed = self.read("flight_records").drop_nulls("duration_ns")["rank"].unique()  # what lacks one is unmatched
        unseen = collectives.filter(pl.col("end_ns").is_null(), ~pl.col("rank").is_in(timed.implode()))
        open_ends = unseen.group_by("rank").len().sort("rank")
        return [
            Gap(
                table="collectives",
                rank=rank,
                node=None,
                count=n,
                why=text("the end of {n} collectives was never seen", n=n),
            )
            for rank, n in open_ends.iter_rows()
        ]

    def _said_gaps(self) -> list[Gap]:
        """What collectors, session and agent recorded themselves."""
        said = self._read_raw("gaps").select("table", "rank", "node", "count", "why")
        return [replace(Gap(**row), why=_as_recorded(row["why"])) for row in said.iter_rows(named=True)]


def _as_recorded(why: str) -> str:
    """What a rank or an agent wrote down in English, with what it quotes behind a colon; known words are translated."""
    head, _, quoted = why.partition(": ")
    return text("{file}: {why}", file=Text(head, {}), why=Text(quoted, {})) if quoted else Text(why, {})


def _is_id(column: str) -> bool:
    return column.endswith("_id") and column != "group_id"


def _named(column: str) -> str:
    return column.removesuffix("_id")


def _existing_folder(folder: str) -> Path:
    path = Path(folder)
    if not path.exists():
        raise BadInput(f"{folder} does not exist")
    if not path.is_dir():
        raise BadInput(f"{folder} is a file, not a run folder: give the folder that holds run/ and collectives/")
    return path.resolve()


def _no_run(root: Path, where: str) -> str:
    inner = sorted(p.name for p in root.iterdir() if (p / "run").is_dir())
    if inner:
        return f"{where} is not a run, but holds {len(inner)}: give one of them, the newest is {root / inner[-1]}"
    if (root / "run").is_dir():
        return (
            f"{where} holds no rank yet: a rank is recorded from its first process group on; "
            "if the job is over, it made none"
        )
    return (
        f"{where} is not a run: it holds no run/node=*.json and no table; `rankscope run` prints the folder it writes"
    )


def _run_files(roots: list[Path]) -> tuple[dict[int, dict[str, Any]], list[Gap]]:
    """The launch as each node wrote it, and a gap for each such file that is not whole."""
    run: dict[int, dict[str, Any]] = {}
    gaps = []
    for root in roots:
        for path in sorted((root / "run").glob("node=*.json")):
            if not (match := _RUN_FILE.fullmatch(path.name)):
                continue
            node = int(match[1])
            try:
                launch = json.loads(path.read_bytes())
            except (OSError, ValueError):
                launch = None
            if isinstance(launch, dict):
                run[node] = launch
            else:
                gaps.append(
                    Gap(table="run", rank=None, node=node, count=None, why=text("{name} is not whole", name=path.name))
                )
    return run, gaps


def _parts(root: Path) -> Iterable[_Part]:
    for path in sorted(root.glob("*/*/*.arrow")):
        partition, file = _PARTITION.fullmatch(path.parent.name), _FILE.fullmatch(path.name)
        if partition is None or file is None or path.parents[1].name not in TABLES:
            continue
        of_rank, owner = partition[1] == "rank", int(partition[2])
        yield _Part(
            path=path,
            table=path.parents[1].name,
            rank=owner if of_rank else None,
            node=None if of_rank else owner,
            attempt=int(file[1] or 0) if of_rank else None,
            number=int(file[2]),
        )


def _windows(roots: list[Path]) -> list[list[Path]]:
    """The windows' folders by window; one that is still being converted has no `run/node=*.json` yet."""
    folders: dict[str, list[Path]] = {}
    for root in roots:
        for file in sorted(root.glob("window-*/run/node=*.json")):
            of_window = folders.setdefault(file.parents[1].name, [])
            if file.parents[1] not in of_window:
                of_window.append(file.parents[1])
    return [folders[name] for name in sorted(folders)]


def _refuse_two_runs(parts: list[_Part]) -> None:
    """The same partition in two folders means two runs, not two nodes of one."""
    seen: dict[tuple[str, int | None, int | None], Path] = {}
    for part in parts:
        root = part.path.parents[2]
        first = seen.setdefault((part.table, part.rank, part.node), root)
        if first != root:
            who = f"rank {part.rank}" if part.rank is not None else f"node {part.node}"
            raise BadInput(f"{who} is in both {first} and {root}: these are two runs, give the folders of one")


def _rows_in(path: Path) -> int:
    """What the file's footer says; 0 where it has none."""
    from pyarrow import dataset  # 3 MB

    try:
        return int(dataset.dataset(path, format="ipc").count_rows())
    except (OSError, pa.ArrowException):
        return 0


def read_rows(path: Path, *, closed: bool) -> tuple[pa.Table | None, str | None]:
    """The good rows of an Arrow file, and what is wrong with it.

    The part that is being written has no footer: it is read as a stream. So is a file that was cut.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        return None, text("could not be read ({error})", error=error.strerror)
    if data.startswith(_MAGIC) and data.endswith(_MAGIC) and len(data) > 2 * _HEADER:
        try:
            return pa.ipc.open_file(pa.BufferReader(data)).read_all(), None
        except (pa.ArrowException, OSError):
            pass  # what is good of it may still be read as a stream
    batches: list[pa.RecordBatch] = []
    problem = text("has no footer although the run was closed: its last rows may be missing") if closed else None
    try:
        stream = pa.ipc.open_stream(pa.BufferReader(data[_HEADER:]))
        while True:
            batches.append(stream.read_next_batch())
    except StopIteration:
        pass
    except (pa.ArrowException, OSError):
        problem = text("was cut off: its last rows are lost")
    return (pa.Table.from_batches(batches) if batches else None), problem


def _with_late_ends(collectives: pl.DataFrame, completions: pl.DataFrame) -> pl.DataFrame:
    """Ends that came after the row had been written."""
    keys = ["rank", "attempt", "number"]
    late = completions.select(*keys, pl.col("end_ns").alias("_late")).unique(keys)
    return (
        collectives.join(late, on=keys, how="left", maintain_order="left")
        .with_columns(pl.coalesce("end_ns", "_late").alias("end_ns"))
        .drop("_late")
    )
