"""Retention: a long recording keeps the newest rows, as many as fit, and of older ones those that count its steps.

A node's files stay below a limit: above it, the oldest of every rank and of the node are evicted, all up to one time.
Of older regions and collectives about 20 bytes per step stay: the analysis counts the same steps as before, and still
has their lengths.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.collectors.agent.arrow_writer import Partition, Sealed
from rankscope.collectors.schema import COUNTS_STEPS, REGION_KINDS
from rankscope.collectors.step_bounds import last_before_each

__all__ = ["Retention", "usual_bytes"]

_REMOVED = (
    *("completions", "counters", "device_marks", "flight_records", "memory", "nccl_calls", "nccl_events"),
    "samples",
)
_REDUCED = ("collectives", "regions")
_USUAL_BYTES, _USUAL_SHARE = 10_000_000_000, 0.25  # of the disk's free space
_FREED = 0.1  # of what it may take, at once
_PARTS_AT_ONCE = 8
_PARTS_BESIDE = 16
_WORK_S = 0.05  # a second, in which the rings wait
_REST_S = 60.0
_OPTIMIZER, _BACKWARD = map(REGION_KINDS.index, ("optimizer", "backward"))
_COUNTS_STEPS = pa.array([REGION_KINDS.index(kind) for kind in COUNTS_STEPS if kind != "backward"], pa.uint8())


def usual_bytes(folder: Path) -> int:
    """Return the default limit on a node's files, above 0. Raises OSError."""
    return max(1, min(_USUAL_BYTES, int(_USUAL_SHARE * shutil.disk_usage(folder).free)))


class Retention:
    """Keeps what one node's partitions have on the disk below a number of bytes.

    `since_ns` is the time (the node's clock) after which all rows are there; None: all are. It must be in the run's
    JSON before `work` removes anything.
    """

    def __init__(self, most_bytes: int, has_arrived: Callable[[Path], bool] = lambda _: True) -> None:
        """Keep at most so many bytes (0: all), and every file that has not arrived in its second place."""
        self.since_ns: int | None = None
        self._has_arrived = has_arrived
        self._most_bytes = most_bytes
        self._partitions: list[Partition] = []
        self._to_do: deque[tuple[Partition, str]] = deque()
        self._resting: dict[tuple[Partition, str], float] = {}  # until when to pause: a file could not be removed

    def watch(self, partition: Partition) -> None:
        self._partitions.append(partition)

    def decide(self) -> bool:
        """Move `since_ns` if there is too much; return whether it moved."""
        if not self._most_bytes or self._to_do:
            return False
        excess = sum(partition.size_bytes for partition in self._partitions) - self._most_bytes
        if excess <= 0:
            return False
        wanted = excess + _FREED * self._most_bytes
        removable = list(self._removable())
        if not removable:
            return False
        oldest = sorted((part.last, part.size_bytes) for *_, part in removable)
        freed = np.cumsum([size for _, size in oldest])
        last, _ = oldest[min(int(np.searchsorted(freed, wanted)), len(oldest) - 1)]
        self.since_ns = last if self.since_ns is None else max(self.since_ns, last)
        self._to_do.extend(dict.fromkeys((p, table) for p, table, part in removable if self._is_old(part)))
        return True

    def work(self) -> None:
        """Evict a little. On OSError or ArrowInvalid, try again in a minute."""
        deadline = time.monotonic() + _WORK_S
        while self._to_do and time.monotonic() < deadline:
            partition, table = self._to_do[0]
            old = [part for part in self._arrived(partition, table) if self._is_old(part)]
            try:
                if not old:
                    self._to_do.popleft()
                elif table in _REMOVED:
                    partition.reduce(table, old[:_PARTS_AT_ONCE])
                else:
                    _reduce(partition, table, old[:_PARTS_AT_ONCE])
            except (OSError, pa.ArrowInvalid):
                self._resting[self._to_do.popleft()] = time.monotonic() + _REST_S
                raise

    def _removable(self) -> Iterator[tuple[Partition, str, Sealed]]:
        """Yield the files that may be evicted, without the newest one of a table that goes on."""
        for partition, table in itertools.product(self._partitions, (*_REMOVED, *_REDUCED)):
            if self._resting.get((partition, table), 0.0) < time.monotonic():
                newest = [] if partition.closed else partition.sealed(table)[-1:]
                for part in self._arrived(partition, table):
                    if part not in newest:
                        yield partition, table, part

    def _arrived(self, partition: Partition, table: str) -> list[Sealed]:
        """Return the files with all their rows, up to the first that has no copy elsewhere."""
        whole = [part for part in partition.sealed(table) if not part.reduced]
        return list(itertools.takewhile(lambda part: self._has_arrived(partition.path(table, part)), whole))

    def _is_old(self, part: Sealed) -> bool:
        return self.since_ns is not None and part.last <= self.since_ns


def _reduce(partition: Partition, table: str, old: Sequence[Sealed]) -> None:
    """Replace these parts, and the last that was reduced, by the rows by which steps are counted."""
    before = [part for part in partition.sealed(table) if part.reduced][-1:]
    if table == "collectives":
        while len(old) > 1 and len(_beside(partition, old)) > _PARTS_BESIDE:
            old = old[: len(old) // 2]
    rows = partition.rows(table, old).sort_by("start_ns")
    if table == "regions":
        kinds = rows["kind"]
        needed = pc.is_in(kinds, _COUNTS_STEPS).to_numpy()
        backward = np.flatnonzero(pc.equal(kinds, _BACKWARD).to_numpy())
        optimizers = _starts(rows.filter(pc.equal(kinds, _OPTIMIZER)))
        needed[backward[last_before_each(optimizers, _starts(rows)[backward])]] = True
        needed[:1] = True  # the first step begins there
    else:
        needed = last_before_each(_optimizers(partition, _beside(partition, old), old[-1].last), _starts(rows))
    kept = rows.filter(pa.array(needed))
    partition.reduce(table, [*before, *old], pa.concat_tables([partition.rows(table, before), kept]))


def _beside(partition: Partition, parts: Sequence[Sealed]) -> list[Sealed]:
    """Return the files of regions that overlap these parts in time."""
    first, last = parts[0].first, parts[-1].last
    return [part for part in partition.sealed("regions") if part.first <= last and part.last >= first]


def _optimizers(partition: Partition, files: Iterable[Sealed], until_ns: int) -> npt.NDArray[np.int64]:
    """Return the starts of optimizers in these files, in order; with the file being written, if that is not later."""
    tables = (partition.rows("regions", [file]) for file in files)
    starts = [_starts(rows.filter(pc.equal(rows["kind"], _OPTIMIZER))) for rows in tables]
    sealed = partition.sealed("regions")
    if not sealed or sealed[-1].last <= until_ns:
        live = partition.live_rows("regions")
        starts.append(_starts(live.filter(pc.equal(live["kind"], _OPTIMIZER))))
    return np.sort(np.concatenate(starts)) if starts else np.zeros(0, np.int64)


def _starts(rows: pa.Table) -> npt.NDArray[np.int64]:
    starts: npt.NDArray[np.int64] = rows["start_ns"].to_numpy()
    return starts
