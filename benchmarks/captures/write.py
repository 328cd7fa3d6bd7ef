"""Writes a simulated capture as torch.profiler writes it: one JSON file per rank, with what real files lack."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from captures.engine import COMPUTE, Rank
from captures.planted import Capture

__all__ = ["documents", "write"]

_EPOCH = 1_750_000_000_000_000_000
_BASE = 1_749_000_000_000_000_000
_FIRST_STEP = 10
_KERNELS = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
_OTHER = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
_BYTES = 2  # of an element
_LAUNCHES = ("cuda_runtime", "hip_runtime")


def write(capture: Capture, folder: Path) -> Path:
    """One file for each rank, named as torch names them, or by rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, (_, document) in zip(capture.ranks, documents(capture), strict=True):
        text = json.dumps(document, separators=(",", ":"))
        ending = ".pt.trace.json" + (".gz" if capture.files.packed else "")
        node = capture.job.nodes[rank.number]
        known = capture.files.information in ("all", "rank only")
        name = f"node{node}_{rank.main}.{_EPOCH + rank.number}" if capture.files.host_named and known else ""
        path = folder / ((name or f"rank{rank.number}") + ending)
        path.write_bytes(gzip.compress(text.encode(), 1) if capture.files.packed else text.encode())
    return folder


def documents(capture: Capture) -> Iterator[tuple[int, dict]]:
    """Each rank's number, and what its file says."""
    for rank in capture.ranks:
        yield rank.number, _document(capture, rank)


class _Document:
    """Rows of one file, on the clock of its rank."""

    def __init__(self, capture: Capture, rank: Rank) -> None:
        self.files, self.rank = capture.files, rank
        self.offset = capture.clock.offset_ns[rank.number]
        self.begin = rank.starts[1]
        self.events: list[dict] = []

    def ts(self, ns: float) -> int | float:
        at = _EPOCH + round(ns + self.offset)
        if self.files.unit == "whole us":
            return at // 1000
        if self.files.unit == "base":
            return (at - _BASE) / 1000
        return at / 1000

    def add(self, category: str, name: str, pid: object, tid: object, start: float, end: float, args: dict) -> None:
        whole = self.files.unit == "whole us"
        lasts = round(end) - round(start)
        row = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": self.ts(start)}
        self.events.append(row | {"dur": lasts // 1000 if whole else lasts / 1000, "args": args})


def _document(capture: Capture, rank: Rank) -> dict:
    document = _Document(capture, rank)
    files, job = capture.files, capture.job
    _host(document)
    _device(document)
    if files.extras:
        first = document.begin
        document.add("overhead", "Activity Buffer Request", -1, 0, first, first + 2e6, {})
        document.add("kernel", "empty", 0, 7, first, first, {"device": 0, "stream": 7})
    comms = {row[6]["comm"].name: row[6]["comm"] for row in rank.rows if row[6]}
    head: dict[str, object] = {"schemaVersion": 1}
    whole: dict[str, object] = {"backend": "nccl", "rank": rank.number, "world_size": job.ranks}
    whole["pg_config"] = [
        {"pg_name": c.name, "pg_desc": c.role, "backend_config": "cuda:nccl", "ranks": list(c.members)}
        for c in comms.values()
    ]
    kept = {"all": tuple(whole), "rank only": ("rank",), "backend only": ("backend",), "none": ()}[files.information]
    if kept:
        head["distributedInfo"] = {name: whole[name] for name in kept}
    head["deviceProperties"] = [{"id": 0, "name": "" if files.vendor == "amd" else "NVIDIA H100 80GB HBM3"}]
    if files.unit == "base":
        head["baseTimeNanoseconds"] = _BASE
    head["displayTimeUnit"] = "ms"
    return head | {"traceEvents": document.events}


def _host(document: _Document) -> None:
    """What the host did since the capture began; an operator that had begun before is not seen."""
    rank, files = document.rank, document.files
    pid = rank.main
    if files.marks:
        ends = [*rank.starts[2:], rank.host]
        for number, (start, end) in enumerate(zip(rank.starts[1:], ends, strict=True)):
            document.add("user_annotation", f"ProfilerStep#{_FIRST_STEP + number}", pid, rank.main, start, end, {})
    for number, (category, name, thread, start, end) in enumerate(rank.spans):
        if start >= document.begin:
            document.add(category, name, pid, thread, start, end, {"External id": number, "Ev Idx": number})
    amd = files.vendor == "amd"
    for name, thread, start, end, correlation in rank.launches:
        if start >= document.begin and not _lost(document, correlation):
            called = name.replace("cuda", "hip", 1) if amd else name
            args = {"External id": correlation, "correlation": correlation}
            document.add(_LAUNCHES[amd], called, pid, thread, start, end, args)


def _lost(document: _Document, correlation: int) -> bool:
    """Whether the capture of calls had not begun yet."""
    of_capture = [one[4] for one in document.rank.launches if one[2] >= document.begin]
    return correlation < of_capture[0] + document.files.unlaunched * len(of_capture)


def _device(document: _Document) -> None:
    rank, files = document.rank, document.files
    amd = files.vendor == "amd"
    launched = {one[4] for one in rank.launches if one[2] >= document.begin and not _lost(document, one[4])}
    device = rank.number % document.rank.job.node_size
    sequence: dict[str, int] = {}
    for category, name, stream, start, end, correlation, meta in rank.rows:
        if meta:
            sequence[meta["comm"].name] = sequence.get(meta["comm"].name, 0) + 1
            end, name = end.end, _OTHER if amd else _KERNELS.get(name, _OTHER)
            name = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)" if amd else name
        if start < document.begin and end <= document.begin:
            continue
        where = {COMPUTE: 0}.get(stream, stream) if amd else stream
        args: dict = {"device": device, "stream": where, "correlation": correlation}
        if files.external_is_correlation:
            args["External id"] = correlation
        if meta and files.metadata != "none" and correlation in launched:
            args |= _metadata(meta, sequence[meta["comm"].name] if files.metadata == "all" else None)
        document.add(category, name, device, where, start, end, args)
        if files.extras and meta:
            document.add("gpu_user_annotation", f"nccl:{meta['op']}", device, where, start, end, {})


def _metadata(meta: dict, seq: int | None) -> dict:
    comm, elements = meta["comm"], round(meta["size"] / _BYTES)
    out = elements if meta["received"] is None else round(meta["received"] / _BYTES)
    fields = {
        "Collective name": meta["op"],
        "In msg nelems": elements // len(comm.members) if meta["op"] == "_allgather_base" else elements,
        "Out msg nelems": out // len(comm.members) if meta["op"] == "_reduce_scatter_base" else out,
        "Group size": len(comm.members),
        "dtype": "BFloat16",
        "Process Group Name": comm.name,
        "Process Group Description": comm.role,
        "Process Group Ranks": str(list(comm.members)),
    }
    if meta["peer"] is not None:
        fields |= {"Src Rank" if meta["op"] == "recv" else "Dst Rank": meta["peer"]}
    return fields | ({"Seq": seq} if seq is not None else {})
