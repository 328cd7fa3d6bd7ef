"""The file's metadata on communication, on the kernel or on the operator that launched it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.model.kernels import op_said
from rankscope.analysis.readers.event_text import MISSING
from rankscope.analysis.readers.json_scan import NO_NAME
from rankscope.analysis.readers.kineto.capture import META_KEPT, Capture, Ints
from rankscope.collectors.schema import P2P_OPS

__all__ = ["metadata_of", "ops_by_range"]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The file's metadata on communication: row by row the position of the kernel, and columns."""

    kernel: Ints
    meta: dict[str, Ints]


def metadata_of(capture: Capture, at: Ints, launches: Mapping[str, Ints], launch: Ints, is_batch: Ints) -> Metadata:
    """Return the file's metadata on each of these kernels.

    On the kernel itself, else on the operator that launched it.

    A batch of sends and receives is launched where it ends, within none of their operators: its kernel has a row for
    each that came before it. One whose operators are not in the file is a send without a peer.
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
    for column in META_KEPT:
        none = MISSING if column in ("in_nelems", "out_nelems", "seq", "src", "dst") else NO_NAME
        values = np.full(len(at), none, np.int64)
        values[own >= 0] = metas[column][own[own >= 0]]
        values[of_operator >= 0] = ops[column][of_operator[of_operator >= 0]]
        if len(alone) and column in ("collective", "group", "ranks", "description"):
            values[alone] = transfers[column][0]
        if column == "seq":
            values[alone] = 0
        found[column] = np.concatenate([np.delete(values, np.unique(batched)), transfers[column][transfer]])[order]
    return Metadata(kernel[order], found)


def ops_by_range(capture: Capture, launches: Mapping[str, Ints], launch: Ints) -> list[str | None]:
    """Return what each kernel does by torch's range (`nccl:all_to_all`) in which it was launched; None outside of such.

    Before torch 2.2 only that says it of a kernel of sends and receives.
    """
    begin = "nccl:"
    op_of = [op_said(name.removeprefix(begin)) if name.startswith(begin) else None for name in capture.names]
    is_said = np.array([op is not None for op in op_of], bool)
    ranges = capture.spans.where(is_said.__getitem__, "name")
    found = _enclosing(ranges, launches, launch) if len(ranges["ts"]) else np.full(len(launch), -1)
    return [op_of[int(ranges["name"][row])] if row >= 0 else None for row in found]


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
