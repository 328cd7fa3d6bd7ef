"""Collectives, sends and receives: one row per kernel of NCCL or RCCL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from rankscope.analysis.model.kernels import SEND_RECV, device_work, kernel_op, op_said
from rankscope.analysis.readers.event_text import MISSING
from rankscope.analysis.readers.kineto.capture import MAX_WORLD, Calls, Capture, Ints, or_null
from rankscope.analysis.readers.kineto.collective_metadata import metadata_of, ops_by_range
from rankscope.collectors.schema import ALL_TO_ALL_OPS

__all__ = ["collective_rows", "collectives_frame"]


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


def collective_rows(capture: Capture) -> Calls:
    """One row per kernel of NCCL or RCCL, in order, of a batch of sends and receives one for each of these.

    `group` and `seq` are null where the file does not have them.
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
    is_batch = np.array([SEND_RECV in name for name in capture.names], bool)[rows["name"]]
    said = metadata_of(capture, rows["row"], launches, launch, is_batch)
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
            capture.groups.add(name, ranks, role)
    by_kernel = [None if op_of[int(code)] == "unknown" else op_of[int(code)] for code in rows["name"]]
    by_range = ops_by_range(capture, launches, launch)
    ops = [
        op_said(said) or of_kernel or of_range or "unknown"
        for said, of_kernel, of_range in zip(names["collective"], by_kernel, by_range, strict=True)
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


def _peers(ops: Sequence[str], meta: Mapping[str, Ints]) -> list[int]:
    """Global rank of the peer of a send or receive, where the file says it."""
    other = {"send": "dst", "recv": "src"}
    peers = [int(meta[other[op]][i]) if op in other else -1 for i, op in enumerate(ops)]
    return [peer if 0 <= peer < MAX_WORLD else -1 for peer in peers]


def collectives_frame(capture: Capture) -> pl.DataFrame:
    calls = capture.calls
    identity = {name: capture.groups.identity(name) for name in set(calls["group"])}
    ids = pl.Series([identity[name] for name in calls["group"]], dtype=pl.Int64)
    columns = {c: values for c, values in calls.items() if c != "group"}
    types = {"size_bytes": pl.Int64, "received_bytes": pl.Int64, "op": pl.String, "dtype": pl.String, "peer": pl.Int64}
    frame = pl.DataFrame(columns, schema_overrides=types)
    return frame.with_columns(group_id=ids, seq=or_null(calls["seq"], MISSING))
