"""Writes a simulated job as the run folder that rankscope's agents would have left, each node on a clock of its own.

Clocks: every node was booted at another time and runs up to 20 ppm fast or slow; pings to node 0 take as long one way
as the other except for what queues add. Lost records are missing in stretches, and `gaps` counts them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rankscope.collectors.agent.arrow_writer import write_sealed
from rankscope.collectors.rank_ranges import as_ranges
from rankscope.collectors.schema import DEVICE_MARKS, DEVICE_WORK, NO_PEER, OPS, REGION_KINDS, SCHEMA_VERSION, TABLES
from simulate import GPUS, Job, Recording

__all__ = ["as_it_was", "write"]

_SCHEMAS = {
    table.name: pa.schema([pa.field(c.name, pa.type_for_alias(c.type), nullable=c.nullable) for c in table.columns])
    for table in TABLES.values()
}
_FLOAT32 = 2
_UNPROFILED = ("ddp-nccl", "ddp-rccl", "pp-nccl", "3d-nccl")
_LAUNCH = "cudaLaunchKernel"
_UNIX_NS = 1_790_000_000_000_000_000
_PING_EVERY_NS, _PINGS = 10e9, 10
_SAMPLED_NS = 1e9
_MARK, _MARK_ERROR_NS = ("rank", "recorded_ns", "device_ns", "mark"), 30_000
_AFTER_A_HANG_NS = 40e9  # the recording goes on until the job is ended


class _Clocks:
    """The nodes' monotonic clocks."""

    def __init__(self, job: Job) -> None:
        rng = np.random.default_rng([job.seed, 5])
        self.boot_ns = rng.integers(3_600 * 10**9, 900_000 * 10**9, job.nodes)
        self.ppm = np.where(np.arange(job.nodes) == 0, 0.0, rng.uniform(-20, 20, job.nodes))
        self.unix_error_ns = rng.normal(0, 3e6, job.nodes)

    def of(self, node: np.ndarray | int, true_ns: np.ndarray) -> np.ndarray:
        """True time as this node's clock shows it, whole ns. 0 where it never comes."""
        ever = np.isfinite(true_ns)
        shown = self.boot_ns[node] + np.rint(np.where(ever, true_ns, 0.0) * (1 + self.ppm[node] / 1e6))
        return np.where(ever, shown, 0).astype(np.int64)


def write(log: Recording, folder: Path) -> Path:
    """The run folder. `folder` must not exist."""
    job, clocks = log.job, _Clocks(log.job)
    ranks = np.arange(job.ranks)
    names = sorted({r["name"] for r in (*log.regions, *log.kernels)} | {_LAUNCH})
    hung = not np.isfinite(log.optimizer_end).all()
    end = np.concatenate([np.atleast_1d(c["start_ns"]) for c in log.collectives])
    end_ns = float(end[np.isfinite(end)].max()) + (_AFTER_A_HANG_NS if hung else 1e9)

    kinds, ops = (dict(zip(known, range(len(known)), strict=True)) for known in (REGION_KINDS, OPS))
    name_ids = dict(zip(names, range(len(names)), strict=True))
    calls = _stacked(
        [c | {"op": ops[c["op"]]} for c in log.collectives],
        *("rank", "start_ns", "issued_ns", "end_ns", "group_id", "seq", "op", "is_async", "peer", "size_bytes"),
        *("device_start_ns", "received_bytes"),
    )
    calls = {name: column[np.isfinite(calls["start_ns"])] for name, column in calls.items()}
    size = len(calls["rank"])
    calls |= {"dtype": np.full(size, _FLOAT32), "tag": np.zeros(size, int), "thread": np.zeros(size, int)}
    calls["number"] = np.arange(1, size + 1)
    calls["received_bytes"] = np.ma.masked_invalid(calls["received_bytes"])
    losses = _losses(job, float(calls["start_ns"].max()))
    calls = _without(losses, calls)
    if job.parallel in _UNPROFILED:
        calls = _without_a_profiler(log, folder, clocks, calls)
    _by_rank(folder, "collectives", _on_nodes_clocks(clocks, calls))
    del calls  # of a large job one table fits, not both

    rows = [r | {"kind": kinds[r["kind"]], "name_id": name_ids[r["name"]]} for r in log.regions]
    regions = _stacked(rows, "rank", "start_ns", "end_ns", "kind", "name_id", "microbatch", "stage")
    regions["thread"] = np.zeros(len(regions["rank"]), np.int64)
    regions = {name: column[np.isfinite(regions["end_ns"])] for name, column in regions.items()}
    _by_rank(folder, "regions", _on_nodes_clocks(clocks, _without(losses, regions)))
    gaps = {rank: [] for rank in ranks}
    for loss in losses:
        gaps[loss.rank].append(loss.gap(clocks))
    if job.parallel == "ddp-gpu":
        _device_tables(log, folder, clocks, name_ids)
    for rank in ranks:
        _small_tables(log, folder, int(rank), clocks, names, gaps[rank])
    for node in range(job.nodes):
        _node_tables(log, folder, node, clocks, end_ns)
    return folder


def _stacked(rows: list[dict], *columns: str) -> dict[str, np.ndarray]:
    """One array per column; what a row gives once holds for all its ranks."""
    sizes = [len(r["rank"]) for r in rows]
    return {
        c: np.concatenate([np.broadcast_to(np.asarray(r[c]), n) for r, n in zip(rows, sizes, strict=True)])
        for c in columns
    }


def _on_nodes_clocks(clocks: _Clocks, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    node = columns["rank"] // GPUS
    return {
        name: np.ma.masked_array(clocks.of(node, values), ~np.isfinite(values)) if name.endswith("_ns") else values
        for name, values in columns.items()
    }


@dataclass
class _Loss:
    """A rank loses all records of a stretch of time, as when the ring is overwritten."""

    rank: int
    begin_ns: float
    until_ns: float
    count: int = 0

    def gap(self, clocks: _Clocks) -> tuple:
        begin, until = clocks.of(self.rank // GPUS, np.array([self.begin_ns, self.until_ns]))
        why = "records were overwritten before the agent read them"
        return int(begin), int(until), "*", "agent", self.count, why


def _losses(job: Job, last_ns: float) -> list[_Loss]:
    """A few ranks lose records."""
    if not job.lost:
        return []
    rng = np.random.default_rng([job.seed, 6])
    losing = rng.choice(job.ranks, max(1, job.ranks // 16), replace=False)
    begins = [float(rng.uniform(0.3, 0.8)) * last_ns for _ in losing]
    return [_Loss(int(rank), begin, begin + job.lost * last_ns) for rank, begin in zip(losing, begins, strict=True)]


def _without(losses: list[_Loss], columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The rows that are left, the others counted."""
    keep = np.ones(len(columns["rank"]), bool)
    for loss in losses:
        at = columns["start_ns"]
        gone = (columns["rank"] == loss.rank) & (at >= loss.begin_ns) & (at < loss.until_ns)
        keep &= ~gone
        loss.count += int(gone.sum())
    return {name: column[keep] for name, column in columns.items()} if losses else columns


def _by_rank(folder: Path, table: str, columns: dict[str, np.ndarray]) -> None:
    """One file per rank, in the table's order."""
    rank = columns.pop("rank")
    order = np.lexsort((np.ma.getdata(columns[TABLES[table].order]), rank))
    whole = _table(table, {name: values[order] for name, values in columns.items()})
    ranks, first = np.unique(rank[order], return_index=True)
    for r, start, stop in zip(ranks, first, [*first[1:], len(order)], strict=True):
        write_sealed(folder / table / f"rank={r:05d}", "a0-", whole.slice(start, stop - start))


def as_it_was(run: Path, folder: Path, seconds: float) -> Path:
    """Make of a run folder what it was so long after it began, or let it grow until then: agents still write it."""
    launches = {file.name: json.loads(file.read_text()) for file in (run / "run").glob("node=*.json")}
    node_of = {f"rank={rank['rank']:05d}": node for node, launch in launches.items() for rank in launch["ranks"]}
    (folder / "run").mkdir(parents=True, exist_ok=True)
    for name, launch in launches.items():
        (folder / "run" / name).write_text(json.dumps(launch | {"state": "running"}))
    for table in (table for table in TABLES.values() if (run / table.name).is_dir()):
        for part in sorted((run / table.name).glob("*/*.arrow")):
            rows = pa.ipc.open_file(pa.BufferReader(part.read_bytes())).read_all().replace_schema_metadata()
            if table.order.endswith("_ns"):
                launch = launches[node_of.get(part.parent.name, f"{part.parent.name}.json")]
                at = rows[table.order].to_numpy()
                rows = rows.slice(0, int(np.searchsorted(at, launch["start_ns"] + seconds * 1e9)))
            prefix, number = part.stem.split("part-")
            write_sealed(folder / table.name / part.parent.name, prefix, rows, int(number))
    return folder


def _without_a_profiler(
    log: Recording, folder: Path, clocks: _Clocks, calls: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What is always recorded of devices: durations from torch's Flight Recorder, of NVIDIA's also marks.

    Returns the calls, without ends.
    """
    ranks, never = calls["rank"], np.full(len(calls["rank"]), np.inf)
    names = {group_id: name for group_id, name, *_ in log.groups}
    records = {"rank": ranks, "start_ns": calls["start_ns"] + 20e3, "record": calls["number"], "seq": calls["seq"] + 1}
    records["group"] = np.array([names[group_id] for group_id in calls["group_id"]])
    records |= {"is_p2p": np.zeros(len(ranks), bool), "name": np.full(len(ranks), "nccl:all_reduce")}
    lasts = {"duration_ns": (calls["end_ns"] - calls["device_start_ns"]).astype(np.int64)}
    _by_rank(folder, "flight_records", _on_nodes_clocks(clocks, records) | lasts)
    if log.job.parallel != "ddp-rccl":
        marks = _stacked([m | {"mark": DEVICE_MARKS.index(m["mark"])} for m in log.marks], *_MARK)
        about = {"device": marks["rank"] % GPUS, "clock_error_ns": np.full(len(marks["rank"]), _MARK_ERROR_NS)}
        _by_rank(folder, "device_marks", _on_nodes_clocks(clocks, marks) | about)
    return calls | {"end_ns": never, "device_start_ns": never}


def _device_tables(log: Recording, folder: Path, clocks: _Clocks, name_ids: dict[str, int]) -> None:
    """What a profiler would add: the device's rows and the calls that launched them."""
    works = dict(zip(DEVICE_WORK, range(len(DEVICE_WORK)), strict=True))
    rows = [
        r | {"name_id": name_ids[r["name"]], "work": works[r["work"]], "correlation": i}
        for i, r in enumerate(log.kernels)
    ]
    kernels = _stacked(rows, "rank", "start_ns", "end_ns", "name_id", "work", "stream", "correlation")
    kernels["device"] = kernels["rank"] % GPUS
    calls = [r | {"start_ns": r["call_ns"], "end_ns": r["called_ns"], "name_id": name_ids[_LAUNCH]} for r in rows]
    launches = _stacked(calls, "rank", "start_ns", "end_ns", "name_id", "correlation")
    launches["thread"] = np.zeros(len(launches["rank"]), int)
    for table, columns in (("kernels", kernels), ("launches", launches)):
        ever = np.isfinite(columns["end_ns"])
        _by_rank(folder, table, _on_nodes_clocks(clocks, {n: c[ever] for n, c in columns.items()}))


def _table(name: str, columns: dict) -> pa.Table:
    arrays = []
    size = len(next(iter(columns.values())))
    for column in _SCHEMAS[name]:
        values = columns.get(column.name)
        if values is None:
            arrays.append(pa.nulls(size, column.type))
        elif isinstance(values, np.ma.MaskedArray):
            arrays.append(pa.array(values.data, column.type, mask=np.ma.getmaskarray(values)))
        elif column.name in ("microbatch", "stage"):
            arrays.append(pa.array(values.astype(np.int32), column.type, mask=values < 0))
        else:
            arrays.append(pa.array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=_SCHEMAS[name])


def _file(path: Path, table: pa.Table) -> None:
    """Write the table as the agent does."""
    write_sealed(path.parent, path.name.removesuffix("part-0000.arrow"), table)


def _small_tables(log: Recording, folder: Path, rank: int, clocks: _Clocks, names: list[str], gaps: list) -> None:
    job, node = log.job, rank // GPUS
    start = int(clocks.of(node, log.start[rank] - 0.5e9))
    part = f"rank={rank:05d}/a0-part-0000.arrow"
    row = {"start_ns": start, "local_rank": rank % GPUS, "world_size": job.ranks, "node": node}
    row |= {
        "hostname": f"node{node}",
        "pid": 1000 + rank,
        "device": "cuda" if log.kernels else "cpu",
        "torch": "2.13.0",
        "python": "3.11.7",
    }
    row |= {"command": f"python train.py --parallel {job.parallel}"}
    _file(folder / "ranks" / part, _table("ranks", {k: [v] for k, v in row.items()}))
    _file(folder / "strings" / part, _table("strings", {"name_id": np.arange(len(names)), "name": names}))
    own = [g for g in log.groups if rank in g[3]]
    groups = {"start_ns": [start] * len(own), "group_id": [g[0] for g in own], "name": [g[1] for g in own]}
    groups |= {"backend": ["nccl" if job.parallel in _UNPROFILED else "gloo"] * len(own), "role": [g[2] for g in own]}
    groups |= {"members": [as_ranges(g[3].tolist()) for g in own]}
    _file(folder / "groups" / part, _table("groups", groups))
    if gaps:
        columns = zip(*gaps, strict=True)
        keys = ("start_ns", "end_ns", "table", "source", "count", "why")
        _file(folder / "gaps" / part, _table("gaps", {k: list(v) for k, v in zip(keys, columns, strict=True)}))


def _node_tables(log: Recording, folder: Path, node: int, clocks: _Clocks, end_ns: float) -> None:
    job = log.job
    rng = np.random.default_rng([job.seed, 7, node])
    part = f"node={node:05d}/part-0000.arrow"
    anchors = np.array([0.5e9, end_ns / 2, end_ns])
    t1 = clocks.of(node, anchors)
    unix = (_UNIX_NS + anchors + clocks.unix_error_ns[node]).astype(np.int64)
    rows = [np.stack([np.full(3, NO_PEER), t1, unix, unix, t1 + 600], axis=1)]
    if node:
        bursts = np.append(np.arange(0.8e9, end_ns, _PING_EVERY_NS), end_ns)
        sent = (bursts[:, None] + 200e3 * np.arange(_PINGS)).ravel()
        there, back = 35e3 + rng.exponential(4e3, (2, len(sent)))
        arrived = clocks.of(0, sent + there)
        answered = arrived + 2_000
        t4 = clocks.of(node, sent + there + 2_000 + back)
        rows.append(np.stack([np.zeros(len(sent), np.int64), clocks.of(node, sent), arrived, answered, t4], axis=1))
    pings = np.concatenate(rows)
    columns = dict(zip(("peer", "t1_ns", "t2_ns", "t3_ns", "t4_ns"), pings[np.argsort(pings[:, 1])].T, strict=True))
    _file(folder / "clocks" / part, _table("clocks", columns))
    _counters(log, folder / "counters" / part, folder / "strings" / part, node, clocks, end_ns)
    run = {"schema_version": SCHEMA_VERSION, "state": "closed", "hostname": f"node{node}", "node": node}
    run |= {"addresses": [_address(node)], "start_ns": int(clocks.of(node, np.float64(0))), "hz": 1.0}
    run |= {"launch": {"command": ["torchrun", "train.py", "--parallel", job.parallel]}, "name": folder.name}
    run["ranks"] = [
        {"rank": int(rank), "attempt": 0, "world_size": job.ranks, "start_ns": run["start_ns"]}
        for rank in range(job.ranks)
        if rank // GPUS == node
    ]
    (folder / "run").mkdir(exist_ok=True)
    (folder / "run" / f"node={node:05d}.json").write_text(json.dumps(run))


def _counters(log: Recording, path: Path, strings: Path, node: int, clocks: _Clocks, end_ns: float) -> None:
    """What the node's agent reads once a second: the host's load, and the ranks' sockets by remote node."""
    times = np.arange(0.6e9, end_ns, _SAMPLED_NS)
    rng = np.random.default_rng([log.job.seed, 8, node])
    texts = ["host", "tcp", "", "cpu_busy_fraction", "bytes_sent", "busy_s", "retransmits", "rtt_s", "min_rtt_s"]
    rows = [(times, 0, 3, 2, rng.normal(0.6, 0.02, len(times)))]
    sent: dict[tuple[int, int], list[tuple]] = {}
    for at, ranks, nodes, peers, size, busy_s, rtt_s in log.traffic:
        for i in np.flatnonzero(nodes == node):
            sent.setdefault((int(ranks[i]), int(peers[i])), []).append((at, size, busy_s[i], rtt_s[i]))
    for (rank, peer), events in sorted(sent.items()):
        at, size, busy_s, rtt_s = np.array(events).T
        order = np.argsort(at)
        seen = np.searchsorted(at[order], times, side="right")
        texts.append(f"rank{rank}>{_address(peer)}")
        device = len(texts) - 1
        for name, values in ((4, size), (5, busy_s), (6, rng.random(len(size)) < 0.01)):
            rows.append((times, 1, name, device, np.concatenate([[0.0], np.cumsum(values[order])])[seen]))
        some = seen > 0
        rows.append((times[some], 1, 7, device, rtt_s[order][seen[some] - 1]))
        rows.append((times[some], 1, 8, device, np.minimum.accumulate(rtt_s[order])[seen[some] - 1]))
    sizes = [len(r[0]) for r in rows]
    columns = {"time_ns": clocks.of(node, np.concatenate([r[0] for r in rows]))}
    for name, place in (("source_id", 1), ("name_id", 2), ("device_id", 3)):
        columns[name] = np.repeat([r[place] for r in rows], sizes)
    columns["value"] = np.concatenate([r[4] for r in rows])
    order = np.argsort(columns["time_ns"], kind="stable")
    _file(path, _table("counters", {k: v[order] for k, v in columns.items()}))
    _file(strings, _table("strings", {"name_id": np.arange(len(texts)), "name": texts}))


def _address(node: int) -> str:
    return f"10.{node // 250}.{node % 250}.1"
