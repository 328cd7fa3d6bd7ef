"""Reads traces of torch.profiler (Kineto): Chrome trace JSON of all its ages, gzipped or not, loose or in a tar.

One file is one rank's capture. Its device rows become `kernels`, its runtime and driver calls `launches`, its
annotations `regions`, `ProfilerStep` becomes `steps`, and the kernels of NCCL and RCCL become `collectives`, with what
the file says about them. Times are exact to the nanosecond, on the clock of the file.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.kernels import DEVICE_CATEGORIES, device_work, kernel_op, op_said
from rankscope.analysis.readers import collective_numbering
from rankscope.analysis.readers.base import FrameReader, files_in, gap, shaped
from rankscope.analysis.readers.flops import SHAPED, flops
from rankscope.analysis.readers.json_scan import (
    META_COLUMNS,
    MISSING,
    MISSING_SHORT,
    NO_NAME,
    OTHER_NAME,
    ROW_COLUMNS,
    Scan,
    new_scanner,
    scan_events,
)
from rankscope.analysis.readers.spill_file import Rows, Spill, joined
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted, named
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import ALL_TO_ALL_OPS, P2P_OPS, WINDOW_STEP
from rankscope.errors import BadInput

try:
    from isal import igzip_lib
except ImportError:  # four times slower where there is no wheel of it
    igzip_lib = None  # type: ignore[assignment]

__all__ = ["BRIEF", "WHOLE", "open_run", "recognises", "unpacked"]

# tarfile inflates with zlib
_GZIP_ERRORS: Any = (EOFError, OSError, zlib.error, *((igzip_lib.IsalError,) if igzip_lib else ()))
_GZIP = 31  # zlib's name for a stream with gzip's header and checksum
_PACKED = 1 << 17
_CANNOT = {
    "breakdown": text("the trace holds no device work, and a profiler's trace does not say for what the host waits"),
    "gc_pauses": text("a profiler's trace does not show when Python collects garbage"),
    "compile": text("a profiler's trace does not say what torch.compile builds"),
    "model": text(
        "how many FLOPs a step needs is not known: give --flops-per-step, or record the trace with record_shapes=True"
    ),
}
_NO_STEPS = {
    "steps": text("the trace has no ProfilerStep and no optimizer's name (call the profiler's step() once per step)")
}
_SNIFF = 1 << 16
_LARGE, _PIECE = ("kernels", "launches", "regions"), 1 << 14  # tables handed over in pieces of so many rows
_MOST_AT_ONCE = 8  # files; more would wait for the interpreter
_MAX_HEADER = 64 << 20  # groups of thousands of ranks are listed before the events
_HEADER_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"deviceProperties"', b'"distributedInfo"')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb'\s*\[\s*\{[^}]*"ph"\s*:')
_TRACE_NAME = re.compile(r"\.pt\.trace\.json(\.gz)?$")
_JSON_NAME = re.compile(r"\.json(\.gz)?$")
_TAR_NAME = re.compile(r"\.(tar|tar\.gz|tgz)$")
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)
_HOST_IN_NAME = re.compile(r"^(.+?)_\d+\.\d+\.pt\.trace\.json")

_LAUNCHES = ("cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver", "xpu_runtime")
_ANNOTATIONS = ("user_annotation",)
_OPERATORS = ("cpu_op", "Operator")  # the oldest files have annotations among these
# What becomes rows. Most others are Python frames, where stacks were recorded, and arrows between rows.
WHOLE = tuple(name.encode() for name in (*DEVICE_CATEGORIES, *_LAUNCHES))
BRIEF = tuple(name.encode() for name in (*_OPERATORS, *_ANNOTATIONS))
_LONG_OPERATOR_NS = 1_000_000  # long enough to explain why a device stood idle, and too few to take memory
_ANNOTATION_NAME = re.compile(rf"ProfilerStep#|{WINDOW_STEP}|enumerate\(DataLoader\)|Optimizer\.|gloo:")
_STEP_NAME = re.compile(r"ProfilerStep#(\d+)")
_REGION_KINDS = {"Optimizer.step": "optimizer", "enumerate(DataLoader)": "input"}  # by how the name begins
_COMMUNICATION_REGIONS = ("nccl:", "gloo:", "c10d::")

# What torch calls a type in its traces: the schema's name, and its size in bytes.
_DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "Float8_e4m3fn": ("float8_e4m3fn", 1),
    "Float8_e5m2": ("float8_e5m2", 1),
    "Float8_e4m3fnuz": ("float8_e4m3fn", 1),  # AMD's
    "Float8_e5m2fnuz": ("float8_e5m2", 1),
    "UInt16": ("unknown", 2),
    "UInt32": ("unknown", 4),
    "UInt64": ("unknown", 8),
}

_OTHER, _DEVICE, _LAUNCH, _SPAN, _OPERATOR = range(5)  # what a row's category makes of it
_UNKNOWN_GROUP = ""
_BATCH = "SendRecv"  # in the name of the kernel
_NO_TIME_NS = -(10**15)  # before the trace's base: what is left of a time of 0
_FEW = 0.01  # share of the device rows that another device may have
_MAX_WORLD = 1 << 20  # what is beyond is no number of ranks

Ints = NDArray[Any]
_Calls = dict[str, Any]  # columns of collectives: arrays and lists
_Frames = Iterator[tuple[int, pl.DataFrame]]  # each of a rank
_Builder = Callable[[int | None], _Frames]  # in pieces of at most so many rows


def recognises(path: Path) -> bool:
    """Whether this is a profiler's trace, by its content or by the name that torch gives it, or holds at least one."""
    if path.is_dir():
        return any(_is_trace(file) for file in _files_of(path))
    return _is_trace(path)


def open_run(paths: list[str], *, operators_from_ns: int = _LONG_OPERATOR_NS) -> FrameReader:
    """The run of which these files are the ranks, with operators that take this long. Raises `BadInput`."""
    captures: list[_Capture] = []
    gaps: list[Gap] = []
    for capture in _captures(paths, Spill(), operators_from_ns):
        if isinstance(capture, str):
            gaps.append(gap("kernels", capture))
        else:
            captures.append(capture)
    if not captures:
        raise BadInput(gaps[0].why if gaps else f"{', '.join(paths)} holds no trace of torch.profiler")
    ranks = _by_rank(captures, gaps)
    nodes = _nodes(ranks)
    groups = {rank: _Groups(capture) for rank, capture in ranks.items()}
    collectives = {rank: _collectives(capture, groups[rank]) for rank, capture in ranks.items()}
    _number(collectives, groups, ranks, one_clock=len(set(nodes.values())) == 1)
    tables = _Tables(nodes, _builders(ranks, groups, collectives))
    for rank, capture in ranks.items():
        gaps += [gap(table, why, rank=rank, count=count) for table, count, why in capture.problems()]
    gaps += _missing_ranks(ranks)
    lacks = _CANNOT if "steps" in tables else _CANNOT | _NO_STEPS
    pieces = {name: functools.partial(tables.pieces, name, _PIECE) for name in tables if name in _LARGE}
    rows = {
        "kernels": sum(len(c.device) for c in ranks.values()),
        "launches": sum(len(c.launches) for c in ranks.values()),
    }
    return FrameReader(frames=tables, missing=tuple(gaps), lacks=lacks, large=pieces, large_rows=rows)


class _Tables(Mapping[str, pl.DataFrame]):
    """The tables that have rows, each made when it is read: the columns behind the large ones are not in memory."""

    def __init__(self, nodes: Mapping[int, int], builders: Mapping[str, _Builder]) -> None:
        self._nodes = nodes
        self._builders = builders

    def __getitem__(self, name: str) -> pl.DataFrame:
        return shaped(name, pl.concat(self._of_ranks(name, None)))

    def pieces(self, name: str, most_rows: int) -> Iterator[pl.DataFrame]:
        """The table in pieces; each has rows of one rank."""
        for frame in self._of_ranks(name, most_rows):
            yield shaped(name, frame)

    def _of_ranks(self, name: str, most_rows: int | None) -> Iterator[pl.DataFrame]:
        for rank, frame in self._builders[name](most_rows):
            where = {"rank": pl.lit(rank, pl.Int32), "node": pl.lit(self._nodes[rank], pl.Int32)}
            yield frame.with_columns(**where)

    def __contains__(self, name: object) -> bool:
        return name in self._builders  # a mapping's own would make the table to see whether there is one

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)


def _builders(
    ranks: Mapping[int, _Capture], groups: Mapping[int, _Groups], collectives: Mapping[int, _Calls]
) -> dict[str, _Builder]:
    """How each table that has rows is made: rank after rank, large ones in pieces of at most so many rows."""

    def of_each(frame_of: Callable[[int], pl.DataFrame]) -> _Builder:
        return lambda _: ((rank, frame_of(rank)) for rank in ranks)

    def in_pieces(
        frames_of: Callable[[_Capture, int | None], Iterator[pl.DataFrame]],
    ) -> _Builder:
        return lambda most: ((rank, frame) for rank, c in ranks.items() for frame in frames_of(c, most))

    builders = {
        "ranks": of_each(lambda rank: _ranks_frame(ranks[rank])),
        "groups": of_each(lambda rank: groups[rank].frame()),
        "steps": of_each(lambda rank: _steps_frame(ranks[rank])),
        "regions": in_pieces(_regions_frames),
        "collectives": of_each(lambda rank: _collectives_frame(collectives[rank], groups[rank])),
        "kernels": in_pieces(_kernels_frames),
        "launches": in_pieces(_launches_frames),
        "operators": in_pieces(_operators_frames),
    }
    return {name: make for name, make in builders.items() if any(len(frame) for _, frame in make(_PIECE))}


# ---------------------------------------------------------------- files


@dataclass(slots=True)
class _Source:
    """Bytes of a file that may end early: what then is wrong is kept, and reading ends."""

    stream: IO[bytes] | _Gunzip
    problem: str = ""

    def read1(self, size: int) -> bytes:
        """Some bytes, at most `size`; none where the file ends."""
        try:
            return b"" if self.problem else self.stream.read(size)
        except _GZIP_ERRORS as error:
            cut = isinstance(error, EOFError)
            self.problem = "is cut off" if cut else f"cannot be read further ({str(error).strip() or 'broken'})"
            return b""

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only where the file ends."""
        parts = []
        while size and (data := self.read1(size)):
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


class _Gunzip:
    """Unpacks as far as there are bytes; gzip's own reader drops its last buffer where a file was cut."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._member = _new_member()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, none at the end. Raises `EOFError` where the file was cut."""
        while True:
            packed = b""
            if self._member.eof:
                packed = (self._member.unused_data or self._file.read(_PACKED)).lstrip(b"\0")  # padding
                if not packed:
                    return b""
                self._member = _new_member()
            elif self._member.needs_input:
                packed = self._file.read(_PACKED)
                if not packed:
                    raise EOFError
            data: bytes = self._member.decompress(packed, size)
            if data:
                return data


class _ZlibMember:
    """What `igzip_lib.IgzipDecompressor` is, for one member of a gzip file."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    def decompress(self, data: bytes, size: int) -> bytes:
        return self._member.decompress(data or self._member.unconsumed_tail, size)


def _new_member() -> Any:  # noqa: ANN401  (isal has no types)
    return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP) if igzip_lib else _ZlibMember()


def _files_of(folder: Path) -> list[Path]:
    """The files in the folder that may be traces; if there are none, those one level below."""
    for pattern in ("*", "*/*"):
        files = [f for f in sorted(folder.glob(pattern)) if f.is_file() and _may_be_trace(f.name)]
        if files:
            return files
    return []


def _may_be_trace(name: str) -> bool:
    return not name.startswith(".") and bool(_JSON_NAME.search(name) or _TAR_NAME.search(name))


def _is_trace(path: Path) -> bool:
    if _TRACE_NAME.search(path.name):
        return True
    try:
        if _TAR_NAME.search(path.name):
            with tarfile.open(path) as tar:
                members = (m for m in tar if m.isfile() and _JSON_NAME.search(m.name))
                return any(_begins_as_trace(_member(tar, m), m.name) for m in members)
        with path.open("rb") as file:
            return _begins_as_trace(file, path.name)
    except (tarfile.TarError, *_GZIP_ERRORS):
        return False


def _begins_as_trace(file: IO[bytes], name: str) -> bool:
    if _TRACE_NAME.search(name):
        return True
    begin = unpacked(file).read(_SNIFF)
    return any(key in begin for key in _HEADER_KEYS) or bool(_BARE_ARRAY.match(begin))


def _captures(paths: Sequence[str], spill: Spill, operators_from_ns: int) -> Iterator[_Capture | str]:
    """What each file holds, or one line that says what is wrong with it, in the order of the files.

    Several are read at once: unpacking and scanning leave the interpreter to other threads.
    """
    files = [(path, file) for path in paths for file in _given(Path(path))]
    alone = Counter(path for path, _ in files)
    labels = [str(file) if alone[path] == 1 else file.name for path, file in files]
    with ThreadPoolExecutor(max_workers=min(len(files), os.cpu_count() or 1, _MOST_AT_ONCE) or 1) as pool:
        of_each = map if len(files) == 1 else pool.map  # Ctrl-C ends what runs in this thread at once
        read = functools.partial(_captures_of, spill=spill, operators_from_ns=operators_from_ns)
        for captures in of_each(read, [file for _, file in files], labels):
            yield from captures


def _given(path: Path) -> list[Path]:
    """The file, or the folder's traces; a folder with one file only has that."""
    if not path.is_dir():
        return files_in([str(path)])
    files = _files_of(path)
    return files if len(files) == 1 else [file for file in files if _TAR_NAME.search(file.name) or _is_trace(file)]


def _captures_of(file: Path, label: str, *, spill: Spill, operators_from_ns: int) -> list[_Capture | str]:
    if not _TAR_NAME.search(file.name):
        with file.open("rb") as opened:
            return [_read(label, unpacked(opened), spill, operators_from_ns)]
    captures: list[_Capture | str] = []
    try:
        with tarfile.open(file) as tar:
            for member in tar:
                if member.isfile() and _JSON_NAME.search(member.name):
                    inside = unpacked(_member(tar, member))
                    captures.append(_read(f"{file.name}:{member.name}", inside, spill, operators_from_ns))
    except (tarfile.TarError, *_GZIP_ERRORS):
        captures.append(f"{file.name} is cut off or damaged")
    return captures


def _member(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    file = tar.extractfile(member)
    assert file is not None  # regular files have bytes
    return file


def unpacked(file: IO[bytes]) -> _Source:
    """The file's bytes, unpacked where it is gzip."""
    magic = file.read(2)
    file.seek(0)
    return _Source(_Gunzip(file) if magic == b"\x1f\x8b" else file)


def _header(source: _Source) -> tuple[bytes, bytes] | str:
    """The text before the events and what was read after it; or what is wrong."""
    begun = source.read(_SNIFF)
    if not begun:
        return source.problem or "is empty"
    bare = _BARE_ARRAY.match(begun)
    if bare:
        at = begun.index(b"[") + 1
        return b"[", begun[at:]
    while not (found := _EVENTS.search(begun)):
        more = source.read(_SNIFF)
        if not more or len(begun) > _MAX_HEADER:
            is_execution_trace = b'"nodes"' in begun and b'"schema"' in begun
            kind = "an execution trace, not a profiler's trace" if is_execution_trace else "no trace of torch.profiler"
            return f"is {kind}: it has no traceEvents" if not source.problem else source.problem
        begun += more
    return begun[: found.end()], begun[found.end() :]


# ---------------------------------------------------------------- one file


@dataclass(slots=True)
class _Capture:
    """What one file holds: its own words, the names behind the codes, and the rows that are kept."""

    label: str
    info: dict[str, Any]
    names: list[str]
    device: Rows
    launches: Rows
    spans: Rows
    operators: Rows  # the long ones
    shaped: Rows  # those whose shapes tell their FLOPs
    device_metas: dict[str, Ints]
    operator_metas: dict[str, Ints]
    devices: list[int]  # the one that most rows are of first
    threads: Ints  # by code of its name: the number of each thread
    found: list[tuple[str, int | None, str]] = field(default_factory=list)  # table, rows missing, why

    def text(self, codes: Ints) -> pl.Series:
        return pl.Series(self.names, dtype=pl.String).gather(codes)

    @property
    def distributed(self) -> dict[str, Any]:
        info = self.info.get("distributedInfo")
        return info if isinstance(info, dict) else {}

    @property
    def world_size(self) -> int | None:
        size = self.distributed.get("world_size")
        return size if isinstance(size, int) and 0 < size <= _MAX_WORLD else None

    @property
    def main_device(self) -> int | None:
        return self.devices[0] if self.devices else None

    @property
    def file_name(self) -> str:
        return self.label.rsplit("/", 1)[-1].rsplit(":", 1)[-1]

    def problems(self) -> list[tuple[str, int | None, str]]:
        several = text("its work on {devices} counts as that of one", devices=counted(len(self.devices), "device"))
        return [*self.found, *self._unlaunched(), *([("kernels", None, several)] if len(self.devices) > 1 else [])]

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


_KEPT: dict[str, tuple[str, ...]] = {
    "device": ("ts", "dur", "correlation", "cat", "name", "stream", "device"),
    "launches": ("ts", "dur", "correlation", "name", "tid"),
    "spans": ("ts", "dur", "name", "tid"),
    "operators": ("ts", "dur", "name", "tid"),
    "shaped": ("ts", "dur", "name", "tid", "dims"),
}
_META_KEPT = ("in_nelems", "out_nelems", "seq", "src", "dst", "collective", "group", "ranks", "description", "dtype")
_ABOUT_KERNELS = {c: META_COLUMNS[c] for c in _META_KEPT} | {"row": "i8"}
_ABOUT_OPERATORS = {c: META_COLUMNS[c] for c in _META_KEPT} | {c: ROW_COLUMNS[c] for c in ("ts", "dur", "tid")}


def _read(label: str, source: _Source, spill: Spill, operators_from_ns: int) -> _Capture | str:
    """The capture in this file, or one line that says what is wrong with it."""
    header = _header(source)
    if isinstance(header, str):
        return f"{label} {header}"
    before, begun = header
    scanner, result = new_scanner(WHOLE, BRIEF, SHAPED), Scan()
    device, launches, spans, operators, shaped = tables = [
        Rows({c: ROW_COLUMNS[c] for c in columns}, spill) for columns in _KEPT.values()
    ]
    on_device, of_operators = [_no_rows(_ABOUT_KERNELS)], [_no_rows(_ABOUT_OPERATORS)]
    names: list[str] = [""]
    roles: list[int] = [_OTHER]  # by code: what a row of the category with this name is
    is_annotation = [False]  # by code: whether an operator of this name is an annotation
    without_time = 0
    role_of, annotates = np.array(roles, np.int8), np.array(is_annotation)
    for batch in scan_events(scanner, source, begun, result):
        for raw in scanner.names(len(names)):
            names.append(_decoded(raw))
            roles.append(_role(names[-1]))
            is_annotation.append(bool(_ANNOTATION_NAME.match(names[-1])))
        if len(role_of) < len(names):
            role_of, annotates = np.array(roles, np.int8), np.array(is_annotation)
        role = role_of[batch.rows["cat"]]
        role[(role == _OPERATOR) & annotates[batch.rows["name"]]] = _SPAN
        ts, dur = batch.rows["ts"], batch.rows["dur"]
        timeless = (role == _DEVICE) & ((ts < _NO_TIME_NS) | ((ts == 0) & (dur == 0)))
        role[timeless] = _OTHER
        without_time += int(timeless.sum())
        long_operator = (role == _OPERATOR) & (batch.rows["dur"] >= operators_from_ns)
        if len(batch.metas["row"]):
            at = batch.metas["row"]
            of_device, position = role[at] == _DEVICE, np.cumsum(role == _DEVICE) - 1 + len(device)
            on_device.append({c: batch.metas[c][of_device] for c in _META_KEPT} | {"row": position[at][of_device]})
            in_op = role[at] == _OPERATOR
            of_operators.append(
                {c: batch.metas[c][in_op] for c in _META_KEPT}
                | {c: batch.rows[c][at[in_op]] for c in ("ts", "dur", "tid")}
            )
        has_shapes = (role == _OPERATOR) & (batch.rows["dims"] != NO_NAME)
        chosen = (role == _DEVICE, role == _LAUNCH, role == _SPAN, long_operator, has_shapes)
        for table, columns, where in zip(tables, _KEPT.values(), chosen, strict=True):
            table.add({c: batch.rows[c][where] for c in columns})
    info, base = _information(before, result.trailer)
    about_operators = joined(of_operators)
    about_operators["ts"] += base
    for table in tables:
        table.shift_ns = base
    if not (len(device) or len(launches) or len(spans)) and not scanner.counts()[0]:
        return f"{label} holds no event{': it ' + source.problem if source.problem else ''}"
    return _Capture(
        label=label,
        info=info,
        names=names,
        device=device,
        launches=launches,
        spans=spans,
        operators=operators,
        shaped=shaped,
        device_metas=joined(on_device),
        operator_metas=about_operators,
        devices=_devices(device),
        threads=_threads(names, spans, launches, operators, shaped),
        found=[*_scan_problems(scanner.counts(), result, source.problem), *_timeless(without_time)],
    )


def _timeless(count: int) -> list[tuple[str, int | None, str]]:
    why = text("{rows} to which the driver gave no time were left out", rows=counted(count, "device row"))
    return [("kernels", count, why)] if count else []


def _no_rows(kinds: Mapping[str, str]) -> dict[str, Ints]:
    return {name: np.empty(0, kind) for name, kind in kinds.items()}


def _role(category: str) -> int:
    if device_work(category, "") is not None:
        return _DEVICE
    if category in _LAUNCHES:
        return _LAUNCH
    if category in _ANNOTATIONS:
        return _SPAN
    return _OPERATOR if category in _OPERATORS else _OTHER


def _decoded(raw: bytes) -> str:
    """The name, with JSON's escapes undone where they are sound."""
    text = raw.decode("utf-8", "replace")
    if "\\" not in text:
        return text
    try:
        said = str(json.loads(f'"{text}"', strict=False))
        return said.encode("utf-8", "replace").decode()  # half a character may be escaped, but cannot be text
    except ValueError:
        return text


def _information(before: bytes, after: bytes) -> tuple[dict[str, Any], int]:
    """What stands around the events, and ns to add to every time; of broken text, what can be found in it."""
    try:
        whole = json.loads(before + (b"]" + after if before != b"[" else b"]"), strict=False)
        info = whole if isinstance(whole, dict) else {}
    except (ValueError, RecursionError):
        info = {}
        text = before + b" " + after
        for key in (b"distributedInfo", b"deviceProperties"):
            if found := re.search(b'"' + key + rb'"\s*:\s*', text):
                try:
                    rest = text[found.end() :].decode("utf-8", "replace")
                    info[key.decode()] = json.JSONDecoder(strict=False).raw_decode(rest)[0]
                except (ValueError, RecursionError):
                    pass
        if found := re.search(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,18})', text):
            info["baseTimeNanoseconds"] = int(found[1])
    base = info.get("baseTimeNanoseconds", 0)
    return info, base if isinstance(base, int) and 0 <= base <= 3 * 10**18 else 0


def _scan_problems(counts: tuple[int, int, int, int], result: Scan, cut: str) -> list[tuple[str, int | None, str]]:
    _, malformed, untimed, unnamed = counts
    malformed += result.too_long
    problems: list[tuple[str, int | None, str]] = []
    if malformed:
        problems.append(
            (
                "*",
                malformed,
                text("{events} could not be read: the JSON is broken there", events=counted(malformed, "event")),
            )
        )
    if untimed:
        problems.append(
            (
                "*",
                untimed,
                text("{events} without a time or duration were left out", events=counted(untimed, "event")),
            )
        )
    if unnamed:
        problems.append(
            (
                "strings",
                unnamed,
                text("{names} beyond the first 262,142 are not kept", names=counted(unnamed, "name")),
            )
        )
    if result.cut:
        problems.append(
            (
                "*",
                None,
                text(
                    "the file {ends}: what came after is lost",
                    ends=cut or text("ends before its list of events does"),
                ),
            )
        )
    return problems


# ---------------------------------------------------------------- ranks


def _by_rank(captures: list[_Capture], gaps: list[Gap]) -> dict[int, _Capture]:
    """The captures by rank, in order. A rank that is neither in the file nor in its name is asked for."""
    ranks: dict[int, _Capture] = {}
    for capture in captures:
        rank = _rank_of(capture)
        if rank is None and len(captures) == 1:
            rank = 0
            gaps.append(gap("ranks", text("the file does not say its rank: it is taken to be rank 0"), rank=0))
        if rank is None:
            raise BadInput(
                f"{capture.file_name} does not say which rank it is: put it into the file's name, as in rank3.json"
            )
        if rank in ranks:
            raise BadInput(
                f"rank {rank} is in both {ranks[rank].file_name} and {capture.file_name}: "
                "these are two captures, give the files of one"
            )
        ranks[rank] = capture
    return dict(sorted(ranks.items()))


def _rank_of(capture: _Capture) -> int | None:
    rank = capture.distributed.get("rank")
    if isinstance(rank, int) and 0 <= rank < _MAX_WORLD:
        return rank
    found = _RANK_IN_NAME.search(capture.file_name)
    return int(found[1]) if found else None


def _nodes(ranks: Mapping[int, _Capture]) -> dict[int, int]:
    """Each rank's node: by the host in the file's name; else a device that comes again begins another node."""
    hosts = {rank: found[1] for rank, c in ranks.items() if (found := _HOST_IN_NAME.match(c.file_name))}
    if len(hosts) == len(ranks) and not all(_RANK_IN_NAME.search(host) for host in hosts.values()):
        order = list(dict.fromkeys(hosts.values()))
        return {rank: order.index(host) for rank, host in hosts.items()}
    seen: dict[int, int] = {}
    nodes = {}
    for rank, capture in ranks.items():
        device = capture.main_device
        nodes[rank] = seen.get(device, 0) if device is not None else 0
        if device is not None:
            seen[device] = nodes[rank] + 1
    return nodes


def _devices(rows: Rows) -> list[int]:
    """The devices that work for this process, the one with most rows first, without those that hardly have any."""
    seen: Counter[int] = Counter()
    for block in rows.blocks("device"):
        which, count = np.unique(block["device"], return_counts=True)
        seen.update(dict(zip(which.tolist(), count.tolist(), strict=True)))
    del seen[MISSING_SHORT]
    return [d for d in sorted(seen, key=lambda d: (-seen[d], d)) if seen[d] >= _FEW * seen.total()]


def _missing_ranks(ranks: Mapping[int, _Capture]) -> list[Gap]:
    world = max((capture.world_size or 0 for capture in ranks.values()), default=0)
    missing = sorted(set(range(world)) - set(ranks))
    if not missing:
        return []
    why = text("{missing} of {world}: no trace of them is here", missing=named("rank", missing), world=world)
    return [gap("ranks", why, rank=missing[0] if len(missing) == 1 else None, count=len(missing))]


# ---------------------------------------------------------------- tables


def _ranks_frame(capture: _Capture) -> pl.DataFrame:
    starts = [rows.first_ns for rows in (capture.device, capture.launches, capture.spans) if len(rows)]
    host = _HOST_IN_NAME.match(capture.file_name)
    row = {
        "start_ns": min(starts, default=0),
        "local_rank": capture.main_device,
        "world_size": capture.world_size,
        "hostname": host[1] if host else None,
        "device": _device_name(capture),
    }
    schema = {"start_ns": pl.Int64, "local_rank": pl.Int32, "world_size": pl.Int32}
    return pl.DataFrame([row], schema=schema | {"hostname": pl.String, "device": pl.String})


def _device_name(capture: _Capture) -> str:
    if not len(capture.device):
        return "cpu"
    listed = capture.info.get("deviceProperties")
    for device in listed if isinstance(listed, list) else []:
        if isinstance(device, dict) and device.get("id") == capture.main_device and device.get("name"):
            return str(device["name"])
    return "accelerator"


def _span(columns: Mapping[str, Ints]) -> dict[str, Ints]:
    return {"start_ns": columns["ts"], "end_ns": columns["ts"] + columns["dur"]}


def _kernels_frames(capture: _Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.device.in_time(most):
        yield pl.DataFrame(
            {
                **_span(rows),
                "name": capture.text(rows["name"]),
                "work": _work(capture, rows),
                "device": _or_null(rows["device"], MISSING_SHORT),
                "stream": _or_null(rows["stream"], MISSING_SHORT),
                "correlation": _or_null(rows["correlation"], MISSING),
            }
        )


def _work(capture: _Capture, rows: Mapping[str, Ints]) -> pl.Series:
    """What each device row is: decided once for each category and name."""
    pairs, which = np.unique(rows["cat"].astype(np.int64) << 32 | rows["name"], return_inverse=True)
    kinds = [device_work(capture.names[int(p) >> 32], capture.names[int(p) & 0xFFFFFFFF]) for p in pairs]
    return pl.Series(kinds, dtype=pl.String).gather(which)


def _or_null(values: Ints, missing: int) -> pl.Series:
    series = pl.Series(values)
    return series.set(series == missing, None)


def _launches_frames(capture: _Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.launches.in_time(most):
        frame = _spans_frame(capture, rows).with_columns(correlation=pl.Series(rows["correlation"]))
        yield frame.filter(pl.col("correlation") != MISSING)


def _threads(names: Sequence[str], spans: Rows, launches: Rows, *operators: Rows) -> Ints:
    """By code of a thread's name: 0 for the main thread, then in order of appearance.

    The main thread announces the steps; else it runs the optimizer or waits for the loader (autograd's own thread may
    launch more); else it launches most.
    """
    trains = np.array([name.startswith(tuple(_REGION_KINDS)) for name in names], bool)
    chosen = (spans.where(which.__getitem__, "name")["tid"] for which in (_announces(names), trains))
    steps = next((tids for tids in chosen if len(tids)), np.empty(0, np.int64))

    def threads_of(*tables: Rows) -> Iterator[Ints]:
        return (rows["tid"] for table in tables for rows in table.blocks("tid"))

    def candidates() -> Iterator[Ints]:
        return iter([steps]) if len(steps) else threads_of(launches if len(launches) else spans)

    counts = sum((np.bincount(codes, minlength=len(names)) for codes in candidates()), np.zeros(len(names), np.int64))
    main = [int(counts.argmax())] if counts.any() else []
    seen = map(_as_seen, itertools.chain(candidates(), threads_of(spans, launches, *operators)))
    ordered = list(dict.fromkeys([*main, *itertools.chain.from_iterable(seen)]))
    number = np.zeros(max(ordered, default=0) + 1, np.uint16)
    number[ordered] = np.minimum(np.arange(len(ordered)), (1 << 16) - 1)
    return number


def _announces(names: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the names say that a step begins: in a deep window those of rankscope, and none of the script's own."""
    of_window = np.array([name.startswith(WINDOW_STEP) for name in names], bool)
    return of_window if of_window.any() else np.array([bool(_STEP_NAME.search(name)) for name in names], bool)


def _as_seen(codes: Ints) -> list[int]:
    """The different codes, in order of appearance."""
    first = np.full(codes.max(initial=-1) + 1, -1)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1, dtype=np.int32)  # of several, the last one assigned stays
    found = np.flatnonzero(first >= 0)
    return [int(code) for code in found[np.argsort(first[found])]]


def _regions_frames(capture: _Capture, most: int | None) -> Iterator[pl.DataFrame]:
    kinds = [_region_kind(name) for name in capture.names]
    for code in np.union1d(capture.device_metas["collective"], capture.operator_metas["collective"]):
        if code > OTHER_NAME:  # torch 2.15 calls the spans of NCCL's operations as it calls those, without `nccl:`
            kinds[code] = None
    kind_of, is_region = pl.Series(kinds, dtype=pl.String), np.array([kind is not None for kind in kinds])
    for rows in capture.spans.in_time(most):
        regions = {c: values[is_region[rows["name"]]] for c, values in rows.items()}
        yield _spans_frame(capture, regions).with_columns(kind=kind_of.gather(regions["name"]))
    for rows in capture.operators.in_time(most):
        yield _spans_frame(capture, rows).with_columns(kind=pl.lit("operator"))


def _region_kind(name: str) -> str | None:
    """The kind of an annotation of this name; None for a step, and for what collectives say better."""
    if name.startswith(("ProfilerStep#", WINDOW_STEP, *_COMMUNICATION_REGIONS)):
        return None
    return next((kind for begin, kind in _REGION_KINDS.items() if name.startswith(begin)), "user")


def _steps_frame(capture: _Capture) -> pl.DataFrame:
    rows = capture.spans.where(_announces(capture.names).__getitem__, "name")
    return _spans_frame(capture, rows).select("start_ns", "end_ns", "thread")


def _operators_frames(capture: _Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.shaped.in_time(most):
        pairs, of_row = np.unique(np.stack([rows["name"], rows["dims"]]), axis=1, return_inverse=True)
        done = [flops(capture.names[name], capture.names[dims]) for name, dims in pairs.T]
        yield _spans_frame(capture, rows).with_columns(flops=pl.Series(done, dtype=pl.Int64).gather(of_row.ravel()))


def _spans_frame(capture: _Capture, rows: Mapping[str, Ints]) -> pl.DataFrame:
    return pl.DataFrame({**_span(rows), "name": capture.text(rows["name"]), "thread": capture.threads[rows["tid"]]})


# ---------------------------------------------------------------- communication


class _Groups:
    """The process groups that a file knows of, by name; the group with the empty name is the one it does not name."""

    def __init__(self, capture: _Capture) -> None:
        self.members: dict[str, str] = {}
        self.roles: dict[str, str] = {}
        self.backends: dict[str, str] = {}
        self.start_ns = capture.device.first_ns if len(capture.device) else 0
        config = capture.distributed.get("pg_config")
        for entry in config if isinstance(config, list) else []:
            if isinstance(entry, dict) and isinstance(entry.get("ranks"), list) and entry.get("pg_name") is not None:
                name = str(entry["pg_name"])
                self.members[name] = ranges(sorted(r for r in entry["ranks"] if isinstance(r, int)))
                self.roles[name] = str(entry.get("pg_desc", ""))
                self.backends[name] = str(entry.get("backend_config", ""))

    def add(self, name: str, ranks: str, role: str) -> None:
        """A group as a collective names it; what is known of it already stays."""
        if self.members.get(name):  # the configuration may leave it open
            return
        try:
            listed = json.loads(ranks)
        except ValueError:  # shortened: `[0, 1, ..., 7]`
            listed = []
        self.members[name] = ranges(sorted(r for r in listed if isinstance(r, int))) if isinstance(listed, list) else ""
        self.roles.setdefault(name, role)

    def identity(self, name: str) -> int:
        """Equal on all ranks of the group, and on no other group's."""
        text = f"{name} {self.members.get(name, '')}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)

    def frame(self) -> pl.DataFrame:
        rows = [
            {
                "start_ns": self.start_ns,
                "group_id": self.identity(name),
                "name": name or "not named in the trace",
                "backend": self.backends.get(name, ""),
                "role": self.roles.get(name, ""),
                "members": members,
            }
            for name, members in self.members.items()
            if members
        ]
        schema = {"start_ns": pl.Int64, "group_id": pl.Int64, "name": pl.String, "backend": pl.String}
        return pl.DataFrame(rows, schema=schema | {"role": pl.String, "members": pl.String})


def _collectives(capture: _Capture, groups: _Groups) -> _Calls:
    """One row per kernel of NCCL or RCCL, in order, of a batch of sends and receives one for each of these.

    `group` and `seq` as far as the file tells (null: it does not).
    """
    used = np.zeros(len(capture.names), bool)
    for block in capture.device.blocks("name"):
        used[block["name"]] = True
    op_of = {int(code): kernel_op(capture.names[code]) for code in np.flatnonzero(used)}
    is_kernel = [device_work(name, "nccl") == "communication" for name in capture.names]
    of_library = np.array([op_of.get(code) is not None for code in range(len(used))])
    rows = capture.device.where(of_library.__getitem__, "name")
    order = np.argsort(rows["ts"], kind="stable")
    order = order[np.array(is_kernel)[rows["cat"][order]]]
    rows = {c: values[order] for c, values in rows.items()}
    launches = capture.launches.where(lambda values: np.isin(values, rows["correlation"]), "correlation")
    launch = _launch_of(launches["correlation"], rows["correlation"])
    is_batch = np.array([_BATCH in name for name in capture.names], bool)[rows["name"]]
    said = _said_of(capture, rows["row"], launches, launch, is_batch)
    rows, launch, meta = {c: values[said.kernel] for c, values in rows.items()}, launch[said.kernel], said.meta
    start, end = rows["ts"], rows["ts"] + rows["dur"]
    host_start, host_end, thread = start.copy(), start.copy(), np.zeros(len(start), np.int64)
    launched = launch >= 0
    calls = {c: values[launch[launched]] for c, values in launches.items()}
    host_start[launched], host_end[launched] = calls["ts"], calls["ts"] + calls["dur"]
    thread[launched] = capture.threads[calls["tid"]]
    names = {c: [capture.names[code] for code in meta[c]] for c in ("collective", "group", "ranks", "description")}
    for name, ranks, role in zip(names["group"], names["ranks"], names["description"], strict=True):
        if name:
            groups.add(name, ranks, role)
    ops = [
        op_said(said) or op_of[int(code)] or "unknown"
        for said, code in zip(names["collective"], rows["name"], strict=True)
    ]
    dtypes = [_DTYPES.get(capture.names[code], ("unknown", 0)) for code in meta["dtype"]]
    elements = np.maximum(meta["in_nelems"], meta["out_nelems"])
    known = (elements >= 0) & (elements < 1 << 58)
    sizes = [int(n) * size if ok and size else None for n, ok, (_, size) in zip(elements, known, dtypes, strict=True)]
    received = [
        int(n) * size if ok and n >= 0 and size and op in ALL_TO_ALL_OPS else None
        for n, ok, (_, size), op in zip(meta["out_nelems"], known, dtypes, ops, strict=True)
    ]
    return {
        "start_ns": host_start,
        "issued_ns": host_end,
        "end_ns": end,
        "device_start_ns": start,
        "group": np.array(names["group"], object),
        "seq": np.where((meta["seq"] < 0) | (meta["seq"] >= 1 << 32), MISSING, meta["seq"]),
        "op": ops,
        "dtype": [name for name, _ in dtypes],
        "peer": _peers(ops, meta),
        "tag": np.zeros(len(start), np.int64),
        "size_bytes": sizes,
        "received_bytes": received,
        "thread": thread,
        "number": np.arange(len(start)),
    }


def _launch_of(known: Ints, correlation: Ints) -> Ints:
    """Position among those known of each correlation, of several the first; -1 where there is none."""
    if not len(known):
        return np.full(len(correlation), -1)
    order = np.argsort(known, kind="stable")
    place = np.minimum(np.searchsorted(known[order], correlation), len(known) - 1)
    row = order[place]
    return np.where((known[row] == correlation) & (correlation != MISSING), row, -1)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the file says of communication: row by row the position of the kernel, and columns."""

    kernel: Ints
    meta: dict[str, Ints]


def _said_of(capture: _Capture, at: Ints, launches: Mapping[str, Ints], launch: Ints, is_batch: Ints) -> _Said:
    """What the file says about each of these kernels: on the kernel itself, else on the operator that launched it.

    A batch of sends and receives is launched where it ends, within none of their operators: its kernel has a row for
    each that came before it. One whose operators are not in the file is a send to nobody.
    """
    metas, ops = capture.device_metas, capture.operator_metas
    place, known = np.searchsorted(metas["row"], at), np.append(metas["row"], -1)
    own = np.where(known[place] == at, place, -1)
    of_operator = np.where(own < 0, _enclosing(ops, launches, launch), -1)
    op_of = [op_said(name) for name in capture.names]
    transfers = {c: values[[op_of[code] in P2P_OPS for code in ops["collective"]]] for c, values in ops.items()}
    of_batch = np.flatnonzero(is_batch & (own < 0) & (of_operator < 0)) if len(transfers["ts"]) else at[:0]
    batched, transfer = _batched(transfers, launches, launch, of_batch)
    alone = np.setdiff1d(of_batch, batched)
    kernel = np.concatenate([np.setdiff1d(np.arange(len(at)), batched), batched])
    order = np.argsort(kernel, kind="stable")
    found = {}
    for column in _META_KEPT:
        none = MISSING if column in ("in_nelems", "out_nelems", "seq", "src", "dst") else NO_NAME
        values = np.full(len(at), none, np.int64)
        values[own >= 0] = metas[column][own[own >= 0]]
        values[of_operator >= 0] = ops[column][of_operator[of_operator >= 0]]
        if len(alone) and column in ("collective", "group", "ranks", "description"):
            values[alone] = transfers[column][0]
        if column == "seq":
            values[alone] = 0
        found[column] = np.concatenate([np.delete(values, np.unique(batched)), transfers[column][transfer]])[order]
    return _Said(kernel[order], found)


def _batched(
    transfers: Mapping[str, Ints], launches: Mapping[str, Ints], launch: Ints, of_batch: Ints
) -> tuple[Ints, Ints]:
    """For each of these kernels the sends and receives called on its thread since the communication launched before."""
    kernels, ops = [of_batch[:0]], [of_batch[:0]]
    launched = of_batch[launch[of_batch] >= 0]
    all_launched = launch[launch >= 0]
    for thread in np.unique(transfers["tid"]):
        calls = np.flatnonzero(transfers["tid"] == thread)
        calls = calls[np.argsort(transfers["ts"][calls], kind="stable")]
        begins = np.unique(launches["ts"][all_launched[launches["tid"][all_launched] == thread]])
        for kernel in launched[launches["tid"][launch[launched]] == thread]:
            begin = launches["ts"][launch[kernel]]
            before = np.searchsorted(begins, begin) - 1
            since = begins[before] if before >= 0 else np.iinfo(np.int64).min
            first, last = np.searchsorted(transfers["ts"][calls], [since, begin])
            kernels.append(np.full(last - first, kernel))
            ops.append(calls[first:last])
    return np.concatenate(kernels), np.concatenate(ops)


def _enclosing(ops: Mapping[str, Ints], launches: Mapping[str, Ints], launch: Ints) -> Ints:
    """Row in `ops` of the operator within which each launch began, on its thread; -1 where there is none."""
    found = np.full(len(launch), -1)
    launched = np.flatnonzero(launch >= 0)
    its_thread = launches["tid"][launch[launched]]
    for thread in np.unique(ops["tid"]):
        rows = np.flatnonzero(ops["tid"] == thread)
        rows = rows[np.argsort(ops["ts"][rows], kind="stable")]
        mine = launched[its_thread == thread]
        begin = launches["ts"][launch[mine]]
        last = np.searchsorted(ops["ts"][rows], begin, side="right") - 1
        inside = (last >= 0) & (begin < (ops["ts"] + ops["dur"])[rows[last]])
        found[mine[inside]] = rows[last[inside]]
    return found


def _peers(ops: Sequence[str], meta: Mapping[str, Ints]) -> list[int]:
    """Global rank of the peer of a send or receive, where the file says it."""
    other = {"send": "dst", "recv": "src"}
    peers = [int(meta[other[op]][i]) if op in other else -1 for i, op in enumerate(ops)]
    return [peer if 0 <= peer < _MAX_WORLD else -1 for peer in peers]


def _number(
    collectives: Mapping[int, _Calls],
    groups: Mapping[int, _Groups],
    ranks: Mapping[int, _Capture],
    *,
    one_clock: bool,
) -> None:
    """Give each row its `seq` where the file does not: the sequences of all ranks are aligned."""
    everyone = _everyone(ranks)
    by_group: dict[str, dict[int, Ints]] = {}
    transfers: dict[tuple[str, int, int], dict[int, Ints]] = {}  # by group, sender and receiver
    for rank, calls in collectives.items():
        peer = np.array(calls["peer"], np.int64)
        sends = np.array(calls["op"]) == "send"
        for name in set(calls["group"]):
            of_group = calls["group"] == name
            by_group.setdefault(name, {})[rank] = np.flatnonzero(of_group & (peer < 0))
            for other, is_send in set(zip(peer[of_group].tolist(), sends[of_group].tolist(), strict=True)):
                ends = (rank, other) if is_send else (other, rank)
                at = np.flatnonzero(of_group & (peer == other) & (sends == is_send))
                if other >= 0:
                    transfers.setdefault((name, *ends), {})[rank] = at
    for rows in transfers.values():
        _number_transfers(collectives, rows, one_clock=one_clock)
    for name, rows in sorted(by_group.items()):
        if name != _UNKNOWN_GROUP and all((collectives[rank]["seq"][at] != MISSING).all() for rank, at in rows.items()):
            _tell_apart({rank: (collectives[rank], at) for rank, at in rows.items()})
            continue
        codes: dict[tuple[Any, ...], int] = {}
        sequences = {rank: _as_sequence(collectives[rank], at, codes) for rank, at in rows.items()}
        shifts = collective_numbering.align(sequences, one_clock=one_clock)
        if shifts is None:  # nothing is certain: no two ranks have a number in common
            lengths = [len(at) for at in rows.values()]
            shifts = dict(zip(rows, itertools.accumulate(lengths, initial=0), strict=False))
        elif name == _UNKNOWN_GROUP:
            for rank in rows:
                groups[rank].members[name] = everyone
        for rank, shift in shifts.items():
            collectives[rank]["seq"][rows[rank]] = np.arange(len(rows[rank])) + shift


def _number_transfers(collectives: Mapping[int, _Calls], rows: Mapping[int, Ints], *, one_clock: bool) -> None:
    """Number what one rank sends to another on both: torch counts there what the rank exchanges with all."""
    codes: dict[tuple[Any, ...], int] = {}
    sequences = {rank: _as_sequence(collectives[rank], at, codes, ("dtype", "size_bytes")) for rank, at in rows.items()}
    shifts = collective_numbering.align(sequences, one_clock=one_clock)
    if shifts is None:  # a small message may end on its sender long before
        first, last = sequences.values()
        last_begins = 0 if np.array_equal(first.kind, last.kind) else len(first.kind)
        shifts = dict(zip(rows, (0, last_begins), strict=True))
    for rank, at in rows.items():
        collectives[rank]["seq"][at] = np.arange(len(at)) + shifts[rank]


def _tell_apart(rows: Mapping[int, tuple[_Calls, Ints]]) -> None:
    """Kernels of one number get numbers of their own, in their order, where every rank has as many of it.

    torch 2.15 runs a coalesced operation as one kernel for each tensor.
    """
    whole = {rank: at[~np.isin(np.array(calls["op"])[at], P2P_OPS)] for rank, (calls, at) in rows.items()}
    counts: dict[int, set[int]] = {}
    for rank, at in whole.items():
        for seq, count in zip(*np.unique(rows[rank][0]["seq"][at], return_counts=True), strict=True):
            counts.setdefault(int(seq), set()).add(int(count))
    most = max((max(found) for found in counts.values()), default=1)
    if most == 1 or max(counts) * most >= 1 << 32:
        return
    for rank, at in whole.items():
        seen: dict[int, int] = {}
        numbers = rows[rank][0]["seq"]
        for i in at:
            seq = int(numbers[i])
            numbers[i] = seq * most + seen.get(seq, 0)
            if len(counts[seq]) == 1:
                seen[seq] = seen.get(seq, 0) + 1


def _as_sequence(
    calls: _Calls, at: Ints, codes: dict[tuple[Any, ...], int], kind_by: Sequence[str] = ("op", "dtype", "size_bytes")
) -> collective_numbering.Sequence:
    """These rows; `codes` are of the kinds on all ranks."""
    kinds = (tuple(calls[column][i] for column in kind_by) for i in at)
    kind = np.array([codes.setdefault(key, len(codes)) for key in kinds], np.int64)
    return collective_numbering.Sequence(kind=kind, end_ns=calls["end_ns"][at])


def _collectives_frame(calls: _Calls, groups: _Groups) -> pl.DataFrame:
    identity = {name: groups.identity(name) for name in set(calls["group"])}
    ids = pl.Series([identity[name] for name in calls["group"]], dtype=pl.Int64)
    columns = {c: values for c, values in calls.items() if c != "group"}
    types = {"size_bytes": pl.Int64, "received_bytes": pl.Int64, "op": pl.String, "dtype": pl.String, "peer": pl.Int64}
    frame = pl.DataFrame(columns, schema_overrides=types)
    return frame.with_columns(group_id=ids, seq=_or_null(calls["seq"], MISSING))


def _everyone(ranks: Mapping[int, _Capture]) -> str:
    """The ranks of the job, as far as the files tell."""
    world = max((capture.world_size or 0 for capture in ranks.values()), default=0)
    return ranges(sorted({*ranks, *range(world)}))
