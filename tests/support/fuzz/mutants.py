"""Small files of every format that is read, and seeded mutants of them: random bytes, and values that hurt."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

_HURTS: tuple[Any, ...] = (None, -1, 2**31, 2**40, 2**63, 1e308, float("inf"), "", "x", "0-2000000000", [], {}, True)
_HURTS += ("[0,2000000000]", "[0, 1", "[-5,0]", "\ud800", [[[]]], 0)


def flight_recorder(folder: Path) -> None:
    for rank in range(3):
        entry = {"record_id": 1, "pg_id": 0, "process_group": ["0", "dp"], "collective_seq_id": 5, "p2p_seq_id": 0}
        entry |= {"profiling_name": "nccl:all_reduce", "time_created_ns": 1000 + rank, "state": "scheduled"}
        entry |= {"input_sizes": [[4, 2]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"]}
        entry |= {"time_discovered_completed_ns": None, "retired": False, "is_p2p": False}
        counters = {"last_enqueued_collective": 5, "last_completed_collective": 4}
        groups = {"0": {"name": "0", "desc": "dp", "ranks": "[0, 1, 2]"}}
        dump = {"version": "2.9", "pg_config": groups, "pg_status": {"0": counters}, "entries": [entry]}
        content = pickle.dumps(dump) if rank else json.dumps(dump).encode()
        (folder / f"dump_{rank}").write_bytes(content)


def chakra(folder: Path) -> None:
    nodes = [{"id": n, "name": "mm", "ts": 5.0 + n, "dur": 2.0, "attrs": [{"name": "x", "value": 1}]} for n in range(3)]
    (folder / "et_0.json").write_text(json.dumps({"schema": "1.0.2", "nodes": nodes}))


def primus(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"world_size": 2, "pp_size": 2}))
    for rank in range(2):
        times = {
            f"{kind}_{end}": [1.0 + rank + n + (end == "end") for n in range(2)]
            for kind in ("fwd", "bwd")
            for end in ("start", "end")
        }
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps({"1": times, "2": times}))


def operations(folder: Path) -> None:
    rows = [
        {"dp_rank": 0, "stage": s, "rank": s, "step": n, "optype": o, "start_ts": 0.1 * m + s, "duration": 0.1}
        | {"seq_id": m, "mc": 0, "mb_id": m}
        for s in range(2)
        for n in range(3)
        for m, o in enumerate(("forward-compute", "backward-compute"))
    ]
    pl.DataFrame(rows).write_parquet(folder / "ops.parquet")


def kineto(folder: Path) -> None:
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": 10.0 + 20 * n, "dur": 5.0}
        for n in range(4)
    ]
    events += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "pid": 7,
            "tid": 7,
            "ts": 9.0 + 20 * n,
            "dur": 19.0,
        }
        for n in range(4)
    ]
    events += [
        {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": 14.0 + 20 * n, "dur": 9.0}
        | {"args": {"correlation": n, "stream": 7, "device": 0}}
        for n in range(4)
    ]
    events += [
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 7,
            "tid": 7,
            "ts": 12.0 + 20 * n,
            "dur": 1.0,
        }
        | {"args": {"correlation": n}}
        for n in range(4)
    ]
    said = {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 0, "world_size": 2, "backend": "nccl"},
        "traceEvents": events,
    }
    (folder / "rank0.json").write_text(json.dumps(said))


def nccl_log(folder: Path) -> None:
    lines = []
    for n in range(3):
        said = {"coll": "AllReduce", "coll_sn": n, "coll_msg_size_bytes": 8}
        said |= {"event_trace_ts": {"coll_start_ts": 10 + n, "coll_stop_ts": 11 + n, "kernel_events": []}}
        lines.append(
            {
                "header": {"id": "0x1", "rank": 0, "n_ranks": 2},
                "metadata": {"hostname": "a", "pid": 1},
                "coll_perf": said,
            }
        )
    (folder / "inspector.log").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def nsight(folder: Path) -> None:
    prefix = "CUPTI_ACTIVITY_KIND_"
    with sqlite3.connect(folder / "a.sqlite") as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", [(1, "sgemm"), (2, "cudaLaunchKernel")])
        columns = "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName"
        database.execute(f"CREATE TABLE {prefix}KERNEL ({columns})")
        database.execute(f"INSERT INTO {prefix}KERNEL VALUES (20, 30, 0, 7, 1, 16777216, 1, 1)")
        database.execute(f"CREATE TABLE {prefix}RUNTIME (start, end, nameId, globalTid, correlationId)")
        database.execute(f"INSERT INTO {prefix}RUNTIME VALUES (10, 12, 2, 16777217, 1)")
    database.close()


def run_folder(folder: Path) -> None:
    """What `rankscope import` makes of the pipeline files."""
    from rankscope.analysis.runs.trace import Trace
    from rankscope.profiler.commands.import_ import write

    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    flight_recorder(source)
    (folder / "run").mkdir()
    write(Trace.open(source), folder)
    shutil.rmtree(source)


FORMATS: dict[str, Callable[[Path], None]] = {
    made.__name__: made for made in (flight_recorder, chakra, primus, operations, kineto, nccl_log, nsight, run_folder)
}


def mutate(folder: Path, seed: int) -> str:
    """Damage one of the folder's files, the same way for the same seed; which and how."""
    chance = random.Random(seed)
    file = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = file.read_bytes()
    how, changed = chance.choice((_flip, _cut, _repeat, _value))(content, chance)
    file.write_bytes(changed)
    return f"{file.relative_to(folder)}: {how}"


def _flip(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 3, 20))):
        changed[chance.randrange(len(changed))] = chance.choice((0, 255, chance.randrange(256)))
    return "bytes changed", bytes(changed)


def _cut(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    return "cut", content[: chance.randrange(len(content))]


def _repeat(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    begin, end = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    return "a piece twice", content[:end] + content[begin:]


def _value(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Another value somewhere in JSON or in a pickle; other formats get other bytes."""
    is_pickle = content[:1] == b"\x80"
    try:
        said = pickle.loads(content) if is_pickle else json.loads(content)
    except (ValueError, EOFError, pickle.UnpicklingError):
        return _flip(content, chance)
    hurt = chance.choice(_HURTS)
    place = _replace(said, hurt, chance)
    return f"{place} is {hurt!r}", pickle.dumps(said) if is_pickle else json.dumps(said).encode()


def _replace(said: Any, hurt: Any, chance: random.Random) -> str:
    inner, path = said, ""
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = chance.choice(keys)
        path += f"/{key}"
        if not isinstance(inner[key], (dict, list)) or not inner[key] or chance.random() < 0.2:
            inner[key] = hurt
            return path
        inner = inner[key]
