"""A real capture of several ranks with something put into it: what would have come later, and by how much.

Every row has a shift, found in the order of time. On the host everything later moves on, until a call that waits for
the device: what it waited can swallow the shift. A device row keeps its distance from what it waited for, the previous
row of its stream, its launch, or the end of a communication just before it, and takes up the slack of the others.
Clocks of devices and hosts differ: a device's rows are placed where none begins before its launch. A collective begins
when the last rank has come, and all its ranks leave it as much later.

Nothing is shared with `rankscope.analysis`. Times are float us as in the files.
"""

from __future__ import annotations

import gzip
import json
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

__all__ = ["Change", "Real", "Row", "load", "retimed", "write"]

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_WAITS = ("Synchronize", "cudaMemcpy")  # calls that may return only when the device has caught up
_LONG_US = 50.0  # of such a call, which did wait
_JOINED_US = 20.0  # a row that begins so soon after the end of a communication, or the reverse, waited for it


@dataclass(slots=True, eq=False)
class Row:
    """One span of a file."""

    rank: int
    event: dict
    start: float  # on the ranks' common clock
    end: float
    stream: int | None = None  # of the device
    launch: Row | None = None
    instance: int | None = None  # of the collectives that all ranks have
    extra: float = 0.0  # that it takes longer by itself
    shift: float = 0.0  # of its start
    later: float = 0.0  # of its end

    @property
    def is_communication(self) -> bool:
        return "nccl" in self.event["name"].lower()


@dataclass(slots=True)
class Real:
    """A set as it is: its files, and their rows on a common clock."""

    documents: dict[int, dict]  # by rank
    rows: list[Row]
    instances: list[list[Row]]
    steps: dict[int, list[Row]]  # ProfilerStep on the host


@dataclass(slots=True)
class Change:
    """What is put in: stalls of hosts by rank as (time, length); what rows take longer is in `Row.extra`."""

    stalls: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


def load(path: Path) -> Real:
    """A folder of one file per rank, or a tar of them. Raises ValueError if the ranks' operations do not match."""
    documents = {}
    for number, text in enumerate(_texts(path)):
        document = json.loads(text)
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("ph") in ("X", "M")]
        documents[document.get("distributedInfo", {}).get("rank", number)] = document
    rows = [row for rank, document in documents.items() for row in _rows(rank, document)]
    instances = _matched(rows, len(documents))
    ends = np.array([[row.end for row in sorted(one, key=lambda r: r.rank)] for one in instances])
    offsets = np.median(ends - np.median(ends, axis=1, keepdims=True), axis=0)
    offset = dict(zip(sorted(documents), offsets, strict=True))
    early = _device_early_us(rows)
    steps = defaultdict(list)
    for row in rows:
        off = offset[row.rank] + (early[row.rank] if row.stream is None else 0.0)
        row.start, row.end = row.start - off, row.end - off
        if row.event["name"].startswith("ProfilerStep") and row.event["cat"] == "user_annotation":
            steps[row.rank].append(row)
    return Real(documents, rows, instances, dict(steps))


def _device_early_us(rows: list[Row]) -> dict[int, float]:
    """How far a device's clock is before its host's at least: no kernel begins before the call that launches it."""
    early: dict[int, float] = defaultdict(float)
    for row in rows:
        if row.launch is not None:
            early[row.rank] = max(early[row.rank], row.launch.start - row.start)
    return early


def _texts(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        for file in sorted(path.glob("*.json*")):
            yield gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return
    with tarfile.open(path) as tar:
        for member in sorted((m for m in tar.getmembers() if ".json" in m.name), key=lambda m: m.name):
            file = tar.extractfile(member)
            assert file is not None
            yield file.read()


def _rows(rank: int, document: dict) -> list[Row]:
    launches, rows = {}, []
    for event in document["traceEvents"]:
        if event["ph"] != "X" or "dur" not in event:
            continue
        args = event.get("args", {})
        start, lasts = float(event["ts"]), float(event["dur"])
        row = Row(rank, event, start, start + lasts)
        if event.get("cat") in _DEVICE:
            row.stream = args.get("stream", -1)
        elif event.get("cat") in _CALLS and "correlation" in args:
            launches[args["correlation"]] = row
        elif str(event.get("cat", "")).startswith("gpu_"):
            row.stream = -2  # an annotation on the device: it moves with what is there
        rows.append(row)
    for row in rows:
        if row.stream is not None:
            row.launch = launches.get(row.event.get("args", {}).get("correlation"))
    return rows


def _matched(rows: list[Row], ranks: int) -> list[list[Row]]:
    """The collectives that were launched in the captures, in order: by kernel all ranks must have as many."""
    of_rank: dict[int, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda r: r.start):
        if row.stream is not None and row.stream >= 0 and row.is_communication and row.launch is not None:
            of_rank[row.rank].append(row)
    names = [[row.event["name"].split("(")[0] for row in mine] for mine in of_rank.values()]
    if len(names) != ranks or any(one != names[0] for one in names):
        raise ValueError("ranks do not have the same collectives")
    instances = [list(one) for one in zip(*of_rank.values(), strict=True)]
    for number, one in enumerate(instances):
        for row in one:
            row.instance = number
    return instances


def retimed(real: Real, change: Change) -> dict[int, float]:
    """Give every row of the set its shift. Returns what each rank's steps then take longer, as a share of them."""
    _Shifts(real, change).work()
    before = np.mean([mine[-1].end - mine[0].start for mine in real.steps.values()])
    after = {rank: mine[-1].later - mine[0].shift for rank, mine in real.steps.items()}
    return {rank: float(us / (before + us)) for rank, us in after.items()}


def write(real: Real, folder: Path) -> Path:
    """The set's files with all rows where they now are."""
    folder.mkdir(parents=True, exist_ok=True)
    of_rank: dict[int, list[dict]] = defaultdict(list)
    for row in real.rows:
        whole = isinstance(row.event["ts"], int)
        ts, dur = row.event["ts"] + row.shift, row.event["dur"] + row.later - row.shift
        times = {"ts": round(ts) if whole else round(ts, 3), "dur": round(dur) if whole else round(dur, 3)}
        of_rank[row.rank].append(row.event | times)
    for rank, document in real.documents.items():
        rest = [event for event in document["traceEvents"] if event["ph"] == "M"]
        text = json.dumps(document | {"traceEvents": rest + of_rank[rank]})
        (folder / f"rank{rank}.pt.trace.json").write_text(text)
    return folder


class _Shifts:
    """Passes over the starts and ends of all rows in the order of time.

    Ends of one collective differ by some µs between ranks, so that a rank may leave a short one before another is seen
    to begin it: passes follow each other until nothing moves.
    """

    def __init__(self, real: Real, change: Change) -> None:
        self.real = real
        self.change = change

    def work(self) -> None:
        for row in self.real.rows:
            row.shift = row.later = 0.0
        order, before = _order(self.real.rows), None
        while before != (before := [row.later for row in self.real.rows]):
            self._pass(order)

    def _pass(self, order: list[tuple[float, int, int, Row]]) -> None:
        self.stalls = {rank: sorted(of) for rank, of in self.change.stalls.items()}
        self.host = dict.fromkeys(self.real.documents, 0.0)  # of everything later on the rank's host
        self.streams: dict[int, dict[int, Row]] = {rank: {} for rank in self.real.documents}  # the last that has ended
        for _, is_start, _, row in order:
            if row.stream is None:
                self._of_host(row, is_start)
            elif is_start:
                row.shift = self._device_start(row)
                if row.end <= row.start:
                    self._device_end(row)
            elif row.end > row.start:
                self._device_end(row)

    def _of_host(self, row: Row, is_start: int) -> None:
        at, stalls = row.start if is_start else row.end, self.stalls.get(row.rank, [])
        while stalls and stalls[0][0] <= at:
            self.host[row.rank] += stalls.pop(0)[1]
        if is_start:
            row.shift = row.later = self.host[row.rank]
            return
        if any(word in row.event["name"] for word in _WAITS) and row.end - row.start > _LONG_US:
            ended = [one for one in self.streams[row.rank].values() if one.end <= row.end]
            waited_for = max(ended, key=lambda one: one.end, default=None)
            left = self.host[row.rank] - (row.end - row.start)  # the call may be over at once
            device = waited_for.later if waited_for is not None else 0.0
            self.host[row.rank] = max(left, device, 0.0)
        row.later = max(self.host[row.rank], row.shift - (row.end - row.start))

    def _device_start(self, row: Row) -> float:
        streams = self.streams[row.rank]
        before = [(row.start - one.end, one.later) for stream, one in streams.items() if stream == row.stream]
        if row.launch is not None:
            before.append((max(row.start - row.launch.end, 0.0), row.launch.shift))
        for stream, one in streams.items():
            near = 0 <= row.start - one.end < _JOINED_US
            if stream != row.stream and near and (row.is_communication or one.is_communication or row.stream == -2):
                before.append((row.start - one.end, one.later))
        if row.stream == -2:
            return max((one.later for one in streams.values()), default=0.0)
        nearest = min((max(gap, 0.0) for gap, _ in before), default=0.0)
        return max(0.0, max((shift - (max(gap, 0.0) - nearest) for gap, shift in before), default=0.0))

    def _device_end(self, row: Row) -> None:
        row.later = row.shift + row.extra
        if row.instance is not None:
            ranks = self.real.instances[row.instance]
            late = max(one.start + one.shift for one in ranks) - max(one.start for one in ranks)
            transfer = min(one.end - one.start for one in ranks)  # no rank is in it for less
            row.later = max(late, row.shift - (row.end - row.start) + transfer, 0.0) + row.extra
        if row.stream != -2:
            self.streams[row.rank][row.stream] = row


def _order(rows: list[Row]) -> list[tuple[float, int, int, Row]]:
    """Starts and ends by time, ends first where both are at once."""
    order = []
    for number, row in enumerate(rows):
        order.append((row.start, 1, number, row))
        order.append((row.end, 0 if row.end > row.start else 2, number, row))
    return sorted(order, key=lambda one: one[:3])
