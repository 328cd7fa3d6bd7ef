"""Reads what NCCL's profiler plugins write: NCCL (and RCCL) Inspector, `minimal-profiler` and NCCL's own example.

| plugin | file | times |
|---|---|---|
| Inspector | JSON lines, a file per process | unix µs under `NCCL_INSPECTOR_DUMP_VERBOSE=1`; else durations only |
| minimal-profiler | JSON lines | host µs; device work from CUPTI |
| example | Chrome events, one per line, `ncclFloat32` and `0x…` unquoted | host µs, 0 where not known |

All count ranks within their communicator. The largest communicator gives the global ranks, the processes in it those
of the smaller ones; operations of processes that are not in it are left out and counted.

Source: `ext-profiler/inspector` and `ext-profiler/example` in NCCL 2.28.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any

import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.model.kernels import OPS_BY_NAME, device_work
from rankscope.analysis.readers.base import NO_STEPS, FrameReader, Reader, files_in, gap, table
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import counted
from rankscope.analysis.text.units import ranges
from rankscope.collectors.schema import NO_PEER, P2P_OPS
from rankscope.errors import BadInput

__all__ = ["open_run", "reader", "recognises"]

_HEAD = 8192
_BROKEN = (KeyError, TypeError, ValueError, ArithmeticError, AttributeError)
_BARE = re.compile(r":\s*(0x[0-9a-fA-F]+|nccl\w+)")
_EXAMPLE = re.compile(rb'"cat": "(?:GROUP_API|COLL_API|P2P_API|KERNEL_LAUNCH|PROXY|NET_)')
_COMMUNICATION_ONLY = text("the log holds communication only")
_LACKS = dict.fromkeys(("breakdown", "phases", "regions"), _COMMUNICATION_ONLY) | {"steps": NO_STEPS}
_DTYPES = {
    "ncclInt8": ("int8", 1),
    "ncclUint8": ("uint8", 1),
    "ncclInt32": ("int32", 4),
    "ncclUint32": ("int32", 4),
    "ncclInt64": ("int64", 8),
    "ncclUint64": ("int64", 8),
    "ncclFloat16": ("float16", 2),
    "ncclFloat32": ("float32", 4),
    "ncclFloat64": ("float64", 8),
    "ncclBfloat16": ("bfloat16", 2),
    "ncclFloat8e4m3": ("float8_e4m3fn", 1),
    "ncclFloat8e5m2": ("float8_e5m2", 1),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One operation; ranks are those of the communicator."""

    comm: str
    rank: int
    process: tuple[str, ...]
    op: str
    seq: int
    size_bytes: int
    start_ns: int
    issued_ns: int
    device_start_ns: int | None = None
    end_ns: int | None = None
    peer: int = NO_PEER
    dtype: str = "unknown"


@dataclass(slots=True)
class _Log:
    """The content of the files, as they are read."""

    ops: list[_Op] = field(default_factory=list)
    kernels: list[tuple[str, tuple[str, ...], Row]] = field(default_factory=list)  # communicator, process, row
    broken: Counter[str] = field(default_factory=Counter)  # lines, by file
    untimed: Counter[str] = field(default_factory=Counter)  # operations, by file
    sizes: dict[str, int] = field(default_factory=dict)  # ranks, by communicator
    places: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)  # rank, by communicator and process

    def place(self, comm: str, rank: int, process: tuple[str, ...], size: int) -> tuple[str, int]:
        """Note that the process is this rank of the communicator, which has at least `size` ranks."""
        self.places[comm, process] = rank
        self.sizes[comm] = max(self.sizes.get(comm, 0), rank + 1, size)
        return comm, rank


def recognises(path: Path) -> bool:
    """Such a log, or a folder in which one lies."""
    if path.is_dir():
        return any(f.is_file() and _format(f) for f in path.iterdir())
    return _format(path) is not None


def open_run(paths: Sequence[str]) -> FrameReader:
    """Everything these logs hold of one run. Raises `BadInput`."""
    files = [f for f in files_in(paths) if _format(f)]
    formats = {_format(f) for f in files}
    if len(formats) > 1:
        raise BadInput(f"{', '.join(paths)} holds logs of {len(formats)} different plugins: give those of one run")
    log = _Log()
    for file in files:
        with file.open(encoding="utf-8", errors="replace") as lines:
            {"inspector": _inspector, "minimal": _minimal, "example": _example}[_format(file) or ""](log, file, lines)
    if not log.places:
        raise BadInput(f"{', '.join(paths)}: no operation could be read")
    frames, missing = _frames(log)
    for name, count in log.untimed.items():
        why = text(
            "{name} has no start times for {count}: set NCCL_INSPECTOR_DUMP_VERBOSE=1",
            name=name,
            count=counted(count, "operation"),
        )
        missing.append(gap("collectives", why, count=count))
    for name, count in (+log.broken).items():
        missing.append(
            gap(
                "collectives",
                text("{count} of {name} could not be read", count=counted(count, "line"), name=name),
                count=count,
            )
        )
    return FrameReader(frames=frames, missing=missing, lacks=_LACKS)


def _format(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return None
    if head.startswith(b"{") and b'"commId"' in head and b'"Profiler' in head:
        return "minimal"
    if head.startswith(b"{") and b'"header"' in head and (b'"coll_perf"' in head or b'"inspector_output' in head):
        return "inspector"
    return "example" if head.lstrip()[:1] == b"[" and _EXAMPLE.search(head) else None


def _inspector(log: _Log, file: Path, lines: Iterable[str]) -> None:
    header: Mapping[str, Any] = {}
    meta: Mapping[str, Any] = {}
    for record in _records(log, file, lines):
        # Newer versions write the header once, before the operations it belongs to.
        header, meta = record.get("header", header), record.get("metadata", meta)
        said = record.get("coll_perf")
        if not isinstance(said, Mapping):
            continue
        try:
            process = (str(meta.get("hostname", "")), str(meta.get("pid", file.name)))
            comm, rank = log.place(str(header["id"]), int(header["rank"]), process, int(header["n_ranks"]))
            times = said.get("event_trace_ts")
            if not isinstance(times, Mapping):
                log.untimed[file.name] += 1
                continue
            stops = [_ns(event["kernel_stop_ts"]) for event in times.get("kernel_events", ())]
            op = _Op(
                comm=comm,
                rank=rank,
                process=process,
                op=_op(said["coll"]),
                seq=int(said["coll_sn"]),
                size_bytes=int(said["coll_msg_size_bytes"]),
                start_ns=_ns(times["coll_start_ts"]),
                issued_ns=_ns(times["coll_stop_ts"]),
                end_ns=max(stops) if stops and min(stops) > 0 else None,
            )
        except _BROKEN:
            log.broken[file.name] += 1
        else:
            log.ops.append(op)


def _minimal(log: _Log, file: Path, lines: Iterable[str]) -> None:
    group_of: dict[str, str] = {}  # the group call that a collective call was made in, by address
    launches: dict[int, tuple[str, tuple[str, ...], str]] = {}  # by number: communicator, process, group call
    ends: dict[str, int] = {}  # when the host saw the device's work end, by the address of the operation
    ops: list[tuple[str, str, _Op]] = []  # addresses of the operation and of its call
    kernels: dict[int, Row] = {}  # by launch
    for record in _records(log, file, lines):
        try:
            kind = record.get("type")
            if kind == "KERNEL":
                kernels[record["extCorrId"]] = _kernel(record)
            if "commId" not in record:
                continue
            start_ns, stop_ns = _ns(record["start"]["ts"]), _ns(record["stop"]["ts"])
            said = record["details"]
            process = (str(record["start"]["pid"]), str(record["rank"]))
            comm, rank = log.place(str(record["commId"]), int(record["rank"]), process, int(said.get("nranks", 0)))
            if kind == "ncclProfileCollApi":
                group_of[record["eventAddr"]] = record["parentObj"]
            elif kind == "ncclProfileKernelCh":
                ends[record["parentObj"]] = max(ends.get(record["parentObj"], 0), stop_ns)
            elif kind == "ncclProfileKernelLaunch":
                launches[record["extCorrId"]] = (comm, process, record["parentObj"])
            elif kind == "ncclProfileColl":
                dtype, width = _DTYPES.get(said["dtype"], ("unknown", 1))
                op = _Op(
                    comm=comm,
                    rank=rank,
                    process=process,
                    op=_op(said["func"]),
                    seq=int(said["seq"]),
                    size_bytes=int(said["count"]) * width,
                    start_ns=start_ns,
                    issued_ns=stop_ns,
                    dtype=dtype,
                )
                ops.append((record["eventAddr"], record["parentObj"], op))
        except _BROKEN:
            log.broken[file.name] += 1
    # All rows of kernels carry the same GPU's id: whose kernel it is stands in the launch.
    log.kernels += [(*launches[launch][:2], row) for launch, row in kernels.items() if launch in launches]
    log.broken[file.name] += sum(launch not in launches for launch in kernels)
    on_device = {launches[launch]: row for launch, row in kernels.items() if launch in launches}
    together: dict[tuple[str, tuple[str, ...], str], _Op] = {}
    for address, call, op in ops:
        key = (op.comm, op.process, group_of.get(call, ""))
        row = on_device.get(key)
        if row is None:
            log.ops.append(replace(op, end_ns=ends.get(address)))
            continue
        # What was called together runs in one kernel: it is waited for once.
        first = together.get(key)
        together[key] = (
            replace(op, device_start_ns=row["start_ns"], end_ns=row["end_ns"])
            if first is None
            else replace(first, size_bytes=first.size_bytes + op.size_bytes)
        )
    log.ops += together.values()


def _kernel(record: Mapping[str, Any]) -> Row:
    name = str(record["name"])
    return {
        "start_ns": _ns(record["start"]["ts"]),
        "end_ns": _ns(record["stop"]["ts"]),
        "name": name,
        "work": device_work("kernel", name),
        "device": int(record["deviceId"]),
        "stream": int(record["stream"], 0),
        "correlation": int(record["corrId"]),
    }


def _example(log: _Log, file: Path, lines: Iterable[str]) -> None:
    ends: dict[str, int] = {}  # of the device's work, by the operation's id
    open_ops: dict[tuple[str, str], _Op] = {}
    ops: list[tuple[str, _Op]] = []
    seen: Counter[tuple[str, tuple[str, int, int]]] = Counter()  # by communicator, sender and receiver
    for event in _records(log, file, (_BARE.sub(r': "\1"', line) for line in lines)):
        try:
            category, number = event.get("cat"), str(event.get("id"))
            if category == "GPU" and event["ph"] == "e":
                ends[number] = max(ends.get(number, 0), _ns(event["ts"]))
            if category not in ("COLL", "P2P"):
                continue
            key = (str(event["name"]), number)
            if event["ph"] == "b":
                said = event["args"]
                process = (str(event["pid"]), str(said["Rank"]))
                comm, rank = log.place(str(said["CommHash"]), int(said["Rank"]), process, int(said.get("Peer", 0)) + 1)
                dtype, width = _DTYPES.get(said["Datatype"], ("unknown", 1))
                open_ops[key] = _Op(
                    comm=comm,
                    rank=rank,
                    process=process,
                    op=_op(key[0]),
                    seq=int(said.get("SeqNum", 0)),
                    size_bytes=int(said["Count"]) * width,
                    start_ns=_ns(event["ts"]),
                    issued_ns=_ns(event["ts"]),
                    peer=int(said.get("Peer", NO_PEER)),
                    dtype=dtype,
                )
                continue
            op = replace(open_ops.pop(key), issued_ns=_ns(event["ts"]))
            if op.op in P2P_OPS:
                sides = (op.comm, op.rank, op.peer) if op.op == "send" else (op.comm, op.peer, op.rank)
                op = replace(op, seq=seen[op.op, sides])
                seen[op.op, sides] += 1
            if op.start_ns > 0:
                ops.append((number, op))
            else:
                log.untimed[file.name] += 1
        except _BROKEN:
            log.broken[file.name] += 1
    if open_ops:
        log.broken[file.name] += len(open_ops)
    log.ops += [replace(op, end_ns=ends.get(number) or None) for number, op in ops]


def _records(log: _Log, file: Path, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects; others are counted, but for the brackets of the example's array."""
    for line in lines:
        text = line.strip().rstrip(",")
        if text in ("", "[", "]", "{}", "{}]"):
            continue
        try:
            record = json.loads(text, parse_float=Decimal)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield record
        else:
            log.broken[file.name] += 1


def _ns(microseconds: Decimal | int) -> int:
    return round(Decimal(microseconds) * 1000)


def _op(name: str) -> str:
    return OPS_BY_NAME.get(name.lower(), "unknown")


def _sequences(ops: Sequence[_Op]) -> dict[tuple[str, str, int], int]:
    """Return the number of each collective in its communicator: NCCL counts each kind of them by itself."""
    begin: dict[tuple[str, str, int], int] = {}
    for op in ops:
        if op.op not in P2P_OPS:
            key = op.comm, op.op, op.seq
            begin[key] = min(begin.get(key, op.start_ns), op.start_ns)
    counts: Counter[str] = Counter()
    numbers = {}
    for key in sorted(begin, key=lambda key: begin[key]):
        numbers[key] = counts[key[0]]
        counts[key[0]] += 1
    return numbers


def _frames(log: _Log) -> tuple[dict[str, pl.DataFrame], list[Gap]]:
    """Return the tables, with global ranks, and what could not be placed."""
    world = max(log.sizes, key=lambda comm: log.sizes[comm])
    rank_of = {process: rank for (comm, process), rank in log.places.items() if comm == world}
    members: dict[str, dict[int, int]] = {comm: {} for comm in log.sizes}  # rank in the communicator -> global
    for (comm, process), rank in log.places.items():
        if process in rank_of:
            members[comm][rank] = rank_of[process]
    group_id = {
        comm: int.from_bytes(blake2b(comm.encode(), digest_size=8).digest(), "little", signed=True)
        for comm in log.sizes
    }
    members[world] |= {rank: rank for rank in range(log.sizes[world])}
    placed = [op for op in log.ops if op.process in rank_of]
    seq_of = _sequences(placed)
    ranks = sorted(rank_of.values())
    frames: dict[str, list[Row]] = {
        "ranks": [{"rank": rank, "start_ns": 0, "world_size": log.sizes[world]} for rank in ranks],
        "groups": [
            {
                "rank": rank_of[process],
                "start_ns": 0,
                "group_id": group_id[comm],
                "name": comm,
                "backend": "nccl",
                "role": "",
                "members": ranges(sorted(members[comm].values())),
            }
            for comm, process in log.places
            # Without all its members it would look as if the others were not waited for.
            if process in rank_of and len(members[comm]) == log.sizes[comm]
        ],
        "collectives": [
            {
                "rank": rank_of[op.process],
                "start_ns": op.start_ns,
                "issued_ns": op.issued_ns,
                "device_start_ns": op.device_start_ns,
                "end_ns": op.end_ns,
                "group_id": group_id[op.comm],
                "seq": seq_of.get((op.comm, op.op, op.seq), op.seq),
                "op": op.op,
                "dtype": op.dtype,
                "peer": members[op.comm].get(op.peer, NO_PEER),
                "tag": 0,
                "size_bytes": op.size_bytes,
                "thread": 0,
                "number": number,
            }
            for number, op in enumerate(placed)
        ],
        "kernels": [dict(row, rank=rank_of[process]) for _, process, row in log.kernels if process in rank_of],
    }
    lost = len(log.ops) - len(placed)
    why = text(
        "{lost} are of processes outside the largest communicator, so their rank is unknown",
        lost=counted(lost, "operation"),
    )
    missing = [gap("collectives", why, count=lost)] if lost else []
    return {name: table(name, rows) for name, rows in frames.items() if rows}, missing


reader = Reader(recognises=recognises, open_run=open_run)
