"""The rings of one rank of one attempt, and the tables that its rows go to."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rankscope.collectors.agent import messages
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.flight_recorder import FlightRecorder
from rankscope.collectors.agent.ring_reader import (
    IS_KNOWN,
    Progress,
    Records,
    Ring,
    Threads,
    columns_by_table,
    fitting,
    progress_in,
)
from rankscope.collectors.schema import RING_SLOTS, RecordType

__all__ = ["RankTables", "Row"]

Row = messages.String | messages.Frames | messages.Group | messages.Gap

clock = time.perf_counter_ns


class RankTables:
    """One rank of one attempt: its ring, and the tables that its rows go to."""

    def __init__(
        self, hello: messages.Hello, ring_fd: int, world: str | None, attempt: int, node: int, run: RunFolder
    ) -> None:
        """Take the rank's ring. Raises ValueError or OSError when it is none."""
        self.rank = hello.rank
        self.world = world
        self.tables = Partition(run, f"rank={self.rank:05d}", f"w{world}-a{attempt}-" if world else f"a{attempt}-")
        self._rings: list[tuple[Ring, tuple[str, ...]]] = [(Ring(ring_fd), ("*",))]  # and what lacks its losses
        self._threads = Threads(hello.main_thread)
        self._records: list[Records] = []
        self._flushed_ns = clock()
        self._recent = 0  # records: those since the last flush, half of those before, a quarter …
        self.heard_ns: int | None = None  # when its last record came, once it has communicated
        self.progress: Progress | None = None  # as it last said
        names = ("hostname", "device", "torch", "python", "command", "start_ns", "local_rank", "world_size", "pid")
        self.world_size = hello.world_size
        self._row: dict[str, Any] = {name: getattr(hello, name) for name in names} | {"node": node}
        self.tables.add_row("ranks", self._row)

    @property
    def device(self) -> str:
        """The device name of its readings among the node's counters."""
        return f"rank{self.rank}@{self.world}" if self.world else f"rank{self.rank}"

    def train_on(self, thread: int) -> None:
        """Its main thread is the one with this ident."""
        self._threads.train(thread)

    def name_device(self, name: str) -> None:
        """Write the rank's row again, with the device that it was found to use; readers take the last."""
        self.tables.add_row("ranks", self._row | {"device": name})

    def add_nccl_ring(self, ring_fd: int) -> None:
        """Take the ring of NCCL's plugin. Raises ValueError or OSError if it is not a ring."""
        self._rings.append((Ring(ring_fd), ("nccl_calls", "nccl_events")))

    @property
    def is_filling(self) -> bool:
        """Whether a ring should be read before it is time to."""
        return any(ring.is_filling for ring, _ in self._rings)

    @property
    def is_busy(self) -> bool:
        """Whether the rank writes so much that its rings should be looked at often."""
        return self._recent > RING_SLOTS // 16

    def read(self, *, last: bool = False) -> None:
        """Read the rings as far as they go."""
        self._guard(lambda: self._read(last))
        if sum(map(len, self._records)) > RING_SLOTS:
            self.flush()

    def _guard(self, read: Callable[[], None]) -> None:
        """Call `read`; the ring is untrusted, and an exception costs only this rank its records."""
        try:
            read()
        except Exception as error:
            lost = sum(map(len, self._records))
            self._records, self._rings = [], []
            why = f"what this rank wrote is not understood, and nothing more of it is read: {error}"
            self.tables.gap("*", why, start_ns=self._flushed_ns, count=lost or None)

    def _read(self, last: bool) -> None:
        for ring, _ in self._rings:
            records = ring.read(clock(), last=last)
            if len(records):
                self._recent += len(records)
                self._records.append(records)
                self.progress = progress_in(records) or self.progress
                of_job = records["type"] != RecordType.SAMPLE  # those come as long as the process lives
                if (of_job if self.heard_ns else records["type"] == RecordType.COLLECTIVE).any():
                    self.heard_ns = clock()

    def add(self, message: Row) -> None:
        """Add the message to the rank's rows."""
        if isinstance(message, messages.String):
            self.tables.add_row("strings", {"name_id": message.id, "name": message.name})
        elif isinstance(message, messages.Frames):
            if message.rows:
                names = ("frame", "parent", "function", "file", "line")
                self.tables.add("frames", dict(zip(names, zip(*message.rows, strict=True), strict=True)))
        elif isinstance(message, messages.Group):
            columns = ("start_ns", "name", "backend", "role", "members")
            self.tables.add_row("groups", {c: getattr(message, c) for c in columns} | {"group_id": message.id})
        else:
            self.tables.add_row("gaps", msgspec.structs.asdict(message))

    def take_flight(self, recorder: FlightRecorder) -> None:
        """Add what torch's Flight Recorder has answered to the rank's rows."""
        while not recorder.rows.empty():
            rows = recorder.rows.get()
            self.tables.add("flight_records", {name: [row[name] for row in rows] for name in rows[0]})
        while not recorder.gaps.empty():
            why, count = recorder.gaps.get()
            self.tables.gap("flight_records", why, source="flight_recorder", start_ns=clock(), count=count)

    def flush(self) -> None:
        """Write what was read, and note what was lost in `gaps`."""
        self._guard(self._take_records)
        self._recent //= 2
        self.tables.flush()

    def _take_records(self) -> None:
        now_ns = clock()
        if self._records:
            records = np.concatenate(self._records)
            unknown = int((~IS_KNOWN[records["type"]]).sum())
            self._report_refused("*", "records of a type that this version does not know", now_ns, unknown)
            for table, columns in columns_by_table(records, self._threads).items():
                fit, refused = fitting(table, columns)
                self.tables.add(table, fit)
                self._report_refused(table, "records with a value out of range, which were left out", now_ns, refused)
            self._records = []
        for ring, lacking in self._rings:
            for count, why in (
                (ring.overwritten, "the rank wrote faster than the agent could read, and the oldest were overwritten"),
                (ring.unfinished, "records that a thread began and did not complete within a second"),
            ):
                for table in lacking if count else ():
                    self.tables.gap(table, why, start_ns=self._flushed_ns, end_ns=now_ns, count=count)
            ring.overwritten = ring.unfinished = 0
        self._flushed_ns = now_ns

    def _report_refused(self, table: str, why: str, now_ns: int, count: int) -> None:
        if count:
            self.tables.gap(table, why, start_ns=self._flushed_ns, end_ns=now_ns, count=count)
