"""Reads a rank's ring into columns: which records are whole, which were lost, and which table each belongs to."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankscope.collectors.schema import (
    ALL_TO_ALL_OPS,
    DEVICE_MARKS,
    DTYPES,
    NCCL_EVENTS,
    NO_PEER,
    OPS,
    P2P_OPS,
    RECORD,
    RECORD_FIELDS,
    REGION_KINDS,
    RING_SLOTS,
    TABLES,
    Column,
    RecordType,
)

__all__ = [
    "IS_KNOWN",
    "OTHER_THREAD",
    "RECORD_DTYPE",
    "Progress",
    "Ring",
    "Threads",
    "columns_by_table",
    "fitting",
    "progress_in",
]

Records = npt.NDArray[Any]
Columns = dict[str, npt.NDArray[Any]]

# numpy names these field types by the same letters as struct
RECORD_DTYPE = np.dtype(
    [(name, f"<{letter}") for name, letter in zip(RECORD_FIELDS, RECORD.format.lstrip("<"), strict=True)]
)
assert RECORD_DTYPE.itemsize == RECORD.size

OTHER_THREAD = 65_535
HOLE_NS = 1_000_000_000
_ALL_TO_ALL_CODES = [OPS.index(op) for op in ALL_TO_ALL_OPS]
_MASK = RING_SLOTS - 1
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_CHUNK = 256  # records: a slow rank writes fewer in a second
_MOST_RECORDS = 1 << 48
_LATEST_NS = 1 << 62
_EMPTY = np.empty(0, RECORD_DTYPE)
_NCCL_WAITS = (RecordType.NCCL_PROXY, RecordType.NCCL_STEP)
_P2P_CODES = [OPS.index(op) for op in P2P_OPS]


class Ring:
    """Reads one rank's ring in the order of the record numbers.

    `overwritten` and `unfinished` count the records that were passed over since they were last set to 0: those that the
    rank wrote over before they were read, and those whose number was taken but that were never completed.
    """

    def __init__(self, fd: int) -> None:
        """Map the ring; `fd` may be closed afterwards. Raises OSError or ValueError if it is not a ring."""
        # Sealed first: truncating memory that is mapped would crash this process.
        if fd < 0:
            raise ValueError("there is no ring")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the ring is not sealed")
        if os.fstat(fd).st_size != RING_SLOTS * RECORD.size:
            raise ValueError("the ring has another size")
        self._map = mmap.mmap(fd, RING_SLOTS * RECORD.size, mmap.MAP_SHARED, mmap.PROT_READ)
        slots = np.frombuffer(self._map, RECORD_DTYPE)
        self._numbers = slots["number"]
        self._checks = slots["check"]
        self._slots = slots.view(f"V{RECORD.size}")  # numpy would copy records with fields one field after the other
        self._next = 1
        self._hole: tuple[int, int] | None = None  # number, since when
        self.overwritten = 0
        self.unfinished = 0

    @property
    def is_filling(self) -> bool:
        """Whether an eighth of the ring has been written since it was read."""
        ahead = self._next + RING_SLOTS // 8
        return int(self._numbers[ahead & _MASK]) >= ahead

    def read(self, now_ns: int, *, last: bool = False) -> Records:
        """Return all whole records that were not read before, in order.

        Waits, over several calls, up to 1 s for a record that others have overtaken. With `last`, when writers
        have ended, it waits for none, and counts what is missing up to the highest number seen.
        """
        chunks: list[Records] = []
        for _ in range(2 * RING_SLOTS // _CHUNK):  # bounded, however fast the rank writes
            chunk = self._take()
            if len(chunk):
                chunks.append(chunk)
            elif not self._pass_over(now_ns, last):
                break
        return np.concatenate(chunks) if chunks else _EMPTY

    def _take(self) -> Records:
        start = self._next & _MASK
        if self._numbers[start] != self._next:
            return _EMPTY
        # The check is written last: where it is there before the copy, the record was complete. The number is written
        # first: where it is there after the copy, nothing was written over it, but for what the copy itself shows.
        checks = self._checks[start : start + _CHUNK]
        expected = np.arange(self._next, self._next + len(checks), dtype=np.uint64)
        count = _leading(checks == expected)
        copy = self._slots[start : start + count].copy().view(RECORD_DTYPE)
        is_whole = (copy["number"] == expected[:count]) & (copy["check"] == expected[:count])
        count = _leading(is_whole & (self._numbers[start : start + count] == expected[:count]))
        self._next += count
        whole: Records = copy[:count]
        return whole

    def _pass_over(self, now_ns: int, last: bool) -> bool:
        """Say whether there is more to read now, behind records that will never be read."""
        ahead = np.arange(1, RING_SLOTS if last else _CHUNK, dtype=np.uint64) + np.uint64(self._next)
        places = ahead & np.uint64(_MASK)
        numbers = self._numbers[places]
        if self._numbers[self._next & _MASK] > self._next or (numbers > ahead).any():
            oldest = self._highest() - RING_SLOTS + 1
            self.overwritten += oldest - self._next
            self._next = oldest
            return True
        whole = (numbers == ahead) & (self._checks[places] == ahead)
        if not whole.any():
            if last and self._highest() >= self._next:
                self.unfinished += self._highest() + 1 - self._next
                self._next = self._highest() + 1
            return False
        if not last:
            if self._hole is None or self._hole[0] != self._next:
                self._hole = (self._next, now_ns)
            if now_ns - self._hole[1] < HOLE_NS:
                return False
        follower = int(ahead[whole.argmax()])
        self.unfinished += follower - self._next
        self._next = follower
        return True

    def _highest(self) -> int:
        """Return the newest record's number. Raises ValueError if it is too large for a ring."""
        highest = int(self._numbers.max())
        if highest > _MOST_RECORDS:
            raise ValueError(f"record number {highest}")
        return highest


def _leading(good: npt.NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(good) if good.all() else int(good.argmin())


class Progress(NamedTuple):
    """At a time, how many of a rank's steps had ended, and how long one usually takes; 0: not known."""

    time_ns: int
    done: int
    step_ns: int


def progress_in(records: Records) -> Progress | None:
    """Return the last progress among the records, if they have any that can be."""
    said = records[records["type"] == RecordType.PROGRESS]
    if not len(said) or not (0 <= said["q0"][-1] <= _LATEST_NS and 0 <= said["q1"][-1] <= _LATEST_NS):
        return None
    return Progress(*(int(said[name][-1]) for name in ("q0", "c", "q1")))


class Threads:
    """Small indices for thread idents: 0 is the main thread, others in order of appearance."""

    def __init__(self, main_ident: int) -> None:
        self._index = {main_ident: 0}
        self._following = itertools.count(1).__next__

    def train(self, ident: int) -> None:
        """Treat the training thread as the main thread from now on."""
        self._index = {known: index for known, index in self._index.items() if index} | {ident: 0}

    def index(self, idents: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
        values, first, inverse = np.unique(idents, return_index=True, return_inverse=True)
        for place in np.argsort(first):
            if int(values[place]) not in self._index and len(self._index) < OTHER_THREAD - 1:
                self._index[int(values[place])] = self._following()
        return np.array([self._index.get(int(value), OTHER_THREAD - 1) for value in values], np.uint16)[inverse]


IS_KNOWN = np.zeros(256, bool)  # by type of record
IS_KNOWN[[value for name, value in vars(RecordType).items() if name.isupper()]] = True
_CODES = {
    ("regions", "kind"): REGION_KINDS,
    ("collectives", "op"): OPS,
    ("collectives", "dtype"): DTYPES,
    ("device_marks", "mark"): DEVICE_MARKS,
    ("nccl_calls", "op"): OPS,
    ("nccl_events", "event"): NCCL_EVENTS,
}


def _range_of(table: str, column: Column) -> tuple[int, int]:
    if (table, column.name) in _CODES:
        return 0, len(_CODES[table, column.name]) - 1
    if column.unit == "ns":
        return 0, _LATEST_NS
    limits = np.iinfo(column.type)
    return int(limits.min), int(limits.max)


_RANGES = {
    table.name: [(column.name, *_range_of(table.name, column)) for column in table.columns if "int" in column.type]
    for table in TABLES.values()
}


def fitting(table: str, columns: Columns) -> tuple[Columns, int]:
    """Return the rows whose values their columns take, and how many others there are; there is at least one row."""
    fits = np.ones(len(next(iter(columns.values()))), bool)
    for name, low, high in _RANGES[table]:
        values = columns.get(name)
        if values is None or values.dtype.kind not in "iu":
            continue
        data = np.ma.getdata(values)
        if low <= int(data.min()) and int(data.max()) <= high:
            continue
        own = np.iinfo(data.dtype)
        in_range = (data >= max(low, int(own.min))) & (data <= min(high, int(own.max)))
        fits &= in_range | np.ma.getmaskarray(values)
    if fits.all():
        return columns, 0
    return {name: values[fits] for name, values in columns.items()}, int((~fits).sum())


def _null_where(values: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | bool) -> npt.NDArray[Any]:
    """Return the values as a column that may be null."""
    return np.ma.MaskedArray(values, mask=missing)


def columns_by_table(records: Records, threads: Threads) -> dict[str, Columns]:
    """Return the columns of every table that has rows among `records`.

    A collective whose end is among them has it; another has a null end, and an end whose collective is not among them
    is a row of `completions`.
    """
    by_type = {kind: records[records["type"] == kind] for kind in np.unique(records["type"]).tolist()}
    tables: dict[str, Columns] = {}
    if RecordType.REGION in by_type:
        tables["regions"] = _regions(by_type[RecordType.REGION], threads)
    done = by_type.get(RecordType.DONE, _EMPTY)
    if RecordType.COLLECTIVE in by_type:
        tables["collectives"] = _collectives(by_type[RecordType.COLLECTIVE])
        done = _give_ends(tables["collectives"], done)
    if len(done):
        tables["completions"] = {"end_ns": done["q0"], "number": done["q1"].astype(np.uint64)}
    if RecordType.STEP in by_type:
        steps = by_type[RecordType.STEP]
        tables["steps"] = {"end_ns": steps["q0"], "thread": threads.index(steps["q1"])}
    if RecordType.MEMORY in by_type:
        memory = by_type[RecordType.MEMORY]
        tables["memory"] = {"time_ns": memory["q0"], "name_id": memory["c"], "value": memory["q1"]}
    if RecordType.MARK in by_type:
        marks = by_type[RecordType.MARK]
        tables["device_marks"] = {
            "recorded_ns": marks["q0"],
            "device_ns": _null_where(marks["q1"], marks["q1"] == 0),
            "clock_error_ns": _null_where(marks["q2"], marks["q2"] < 0),
            "mark": marks["a"],
            "device": marks["c"].astype(np.int32),
        }
    if RecordType.SAMPLE in by_type:
        samples = by_type[RecordType.SAMPLE]
        tables["samples"] = {"time_ns": samples["q0"], "frame": samples["c"]}
    if RecordType.NCCL_CALL in by_type:
        tables["nccl_calls"] = _nccl_calls(by_type[RecordType.NCCL_CALL])
    if by_type.keys() & {*_NCCL_WAITS, RecordType.NCCL_SPAN}:
        tables["nccl_events"] = _nccl_events(by_type)
    return tables


def _regions(records: Records, threads: Threads) -> Columns:
    return {
        "start_ns": records["q0"],
        "end_ns": records["q1"],
        "kind": records["a"],
        "name_id": records["c"],
        "thread": threads.index(records["q2"]),
        "microbatch": _null_where(records["q3"], records["q3"] < 0),
        "stage": _null_where(records["q4"], records["q4"] < 0),
    }


def _collectives(records: Records) -> Columns:
    is_async = records["b"] >> 8
    to_all = np.isin(records["a"], _ALL_TO_ALL_CODES)
    return {
        "start_ns": records["q0"],
        "issued_ns": records["q1"],
        "end_ns": _null_where(np.zeros(len(records), np.int64), True),
        "group_id": records["q2"],
        "seq": records["c"],
        "op": records["a"],
        "dtype": (records["b"] & 0xFF).astype(np.uint8),
        "is_async": _null_where(is_async == 1, is_async > 1),
        "peer": np.where(to_all, NO_PEER, (records["q4"] >> 32) - 1),
        "tag": np.where(to_all, 0, (records["q4"] >> 16) & 0xFFFF),
        "size_bytes": records["q3"],
        "received_bytes": _null_where(records["q4"] >> 16, ~to_all),
        "thread": np.where(records["q4"] & 0xFFFF, 0, OTHER_THREAD),
        "number": records["number"],
    }


def _give_ends(collectives: Columns, done: Records) -> Records:
    """`end_ns` is set where `done` has it; returns the rest of `done`."""
    numbers = collectives["number"]  # ascending, as the ring is read in order
    wanted = done["q1"].astype(np.uint64)
    place = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
    found = numbers[place] == wanted
    collectives["end_ns"][place[found]] = done["q0"][found]
    late: Records = done[~found]
    return late


def _nccl_calls(records: Records) -> Columns:
    size = records["q2"] & 0xFFFFFFFF
    return {
        "start_ns": records["q0"],
        "call": records["c"],
        "communicator": _null_where(records["q1"], records["q1"] == 0),
        "nccl_rank": records["q2"] >> 32,
        "nccl_size": _null_where(size, size == 0),
        "seq": _null_where((records["q4"] >> 32) & 0xFFFFFFFF, np.isin(records["a"], _P2P_CODES)),
        "op": records["a"],
        "size_bytes": _null_where(records["q3"], records["q3"] < 0),
        "peer": (records["q4"] & 0xFFFFFFFF) - 1,
        "channels": (records["b"] & 0xFF).astype(np.uint8),
        "algorithm": (records["b"] >> 8 & 0xF).astype(np.uint8),
        "protocol": (records["b"] >> 12).astype(np.uint8),
    }


def _nccl_events(by_type: dict[int, Records]) -> Columns:
    """Proxies and their steps, which have waits, then kernels and the network plugin's events, which have none."""
    waits = np.concatenate([by_type.get(kind, _EMPTY) for kind in _NCCL_WAITS])
    spans = by_type.get(RecordType.NCCL_SPAN, _EMPTY)
    both = np.concatenate([waits, spans])
    is_span = np.arange(len(both)) >= len(waits)
    is_send = (both["a"] & 1 == 1) & ~is_span
    is_step = both["type"] == RecordType.NCCL_STEP
    has_peer_wait = both["a"] & 2 == 2
    gpu, middle, network = (both[name].view(np.uint64) >> np.uint64(24) for name in ("q1", "q2", "q3"))
    beside = (both[name] & 0xFFFFFF for name in ("q1", "q2"))
    peer, step = (_null_where(values, is_span) for values in beside)
    # as NCCL_EVENTS has them: send, recv, send_step, recv_step
    events = np.where(is_span, both["a"], 2 * is_step + ~is_send)
    waited = (gpu + middle + network).astype(np.int64)
    return {
        "start_ns": both["q0"],
        "end_ns": np.where(is_span, both["q1"], both["q0"] + waited),
        "event": events.astype(np.uint8),
        "call": _null_where(both["c"], both["c"] == 0),
        "channel": both["b"].astype(np.uint8),
        "peer": peer,
        "step": step,
        "size_bytes": _null_where(both["q4"], is_span | (both["q4"] < 0)),
        "gpu_wait_ns": _null_where(gpu.astype(np.int64), is_span),
        "peer_wait_ns": _null_where(middle.astype(np.int64), ~(is_send & has_peer_wait)),
        "network_wait_ns": _null_where(network.astype(np.int64), is_span),
        "flush_wait_ns": _null_where(middle.astype(np.int64), is_span | is_send),
        "device_ns": _null_where(both["q2"], ~is_span | (both["q2"] < 0)),
    }
