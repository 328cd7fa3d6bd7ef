"""Writes a simulated capture as Nsight Systems exports it: SQLite files of each rank or of each host.

What a profiler's file says and an export does not is left out: process groups, sizes and peers of operations. Steps,
the optimizer and waits for input are NVTX ranges where the profiler's file has them.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from captures.planted import Capture
from captures.write import documents

__all__ = ["write_nsight"]

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER,
    streamId INTEGER, correlationId INTEGER, demangledName INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER,
    streamId INTEGER, correlationId INTEGER, copyKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER,
    streamId INTEGER, correlationId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER,
    nameId INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, globalTid INTEGER, text TEXT);
CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, systemClockNs INTEGER);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_PRODUCT_VERSION', '2026.2');
"""
_NAMED = ("Optimizer.step", "enumerate(DataLoader)")  # operators that are ranges too, by how their names begin
_PUSH_POP = 59
_COPIES = {"HtoD": 1, "DtoH": 2, "DtoD": 8}
_BEFORE_NS = 1_000_000_000  # of the capture's first row: when the recording began
_STARTED_NS = 1_700_000_000_000_000_000  # when all hosts were started
_PID = 1 << 24


def write_nsight(capture: Capture, folder: Path) -> Path:
    """One export of each rank, or of each host with several: by the capture's seed."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = capture.job.nodes
    of_file: dict[str, list[tuple[int, dict]]] = defaultdict(list)
    for number, document in documents(replace(capture, files=replace(capture.files, vendor="nvidia", unit="float us"))):
        name = f"rank{number}" if capture.case.seed % 2 else f"host{nodes[number]}"
        of_file[name].append((number, document))
    for place, (name, ranks) in enumerate(of_file.items()):
        with closing(sqlite3.connect(folder / f"{name}.sqlite")) as database, database:
            database.executescript(_SCHEMA)
            _export(database, ranks, nodes[ranks[0][0]], place)
    return folder


def _export(database: sqlite3.Connection, ranks: list[tuple[int, dict]], host: int, place: int) -> None:
    """Times count from when the recording began, a little later in each file; hosts have clocks of their own."""
    epoch_ns = round(min(row["ts"] for _, document in ranks for row in document["traceEvents"]) * 1000) - _BEFORE_NS
    epoch_ns -= place * 1000
    strings: dict[str, int] = {}
    rows: dict[str, list[tuple]] = defaultdict(list)
    for device, (number, document) in enumerate(ranks):
        pid = (1000 + number) * _PID
        events = document["traceEvents"]
        main = next((row["tid"] for row in events if row["name"].startswith(("ProfilerStep", *_NAMED))), None)
        threads = {main: 1000 + number}
        for row in events:
            begin = round(row["ts"] * 1000) - epoch_ns
            span, arguments = (begin, begin + round(row["dur"] * 1000)), row["args"]
            thread = pid + threads.setdefault(row["tid"], 2000 + len(threads))
            work = (*span, device, pid, arguments.get("stream"), arguments.get("correlation"))
            name = row["name"]
            match row["cat"]:
                case "kernel":
                    rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((*work, strings.setdefault(name, len(strings))))
                case "gpu_memcpy":
                    kind = next((code for said, code in _COPIES.items() if said in name), 8)
                    rows["CUPTI_ACTIVITY_KIND_MEMCPY"].append((*work, kind))
                case "gpu_memset":
                    rows["CUPTI_ACTIVITY_KIND_MEMSET"].append(work)
                case "cuda_runtime" | "cuda_driver":
                    called = strings.setdefault(f"{name}_v3020", len(strings))
                    rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append((*span, thread, arguments["correlation"], called))
                case category if category == "user_annotation" or name.startswith(_NAMED):
                    said = name.replace("ProfilerStep#", "step ")
                    rows["NVTX_EVENTS"].append((*span, _PUSH_POP, thread, said))
        rows["TARGET_INFO_GPU"].append((device, "NVIDIA H100 80GB HBM3"))
    rows["StringIds"] = [(code, value) for value, code in strings.items()]
    rows["TARGET_INFO_SYSTEM_ENV"] = [("Hostname", f"host{host}")]
    rows["TARGET_INFO_SESSION_START_TIME"] = [(epoch_ns, epoch_ns - _STARTED_NS)]
    for table, content in rows.items():
        database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(content[0]))})", content)
