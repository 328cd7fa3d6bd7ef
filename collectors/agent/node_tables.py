"""The node's own rows (readings of its collectors, relations of clocks, gaps), and its number."""

from __future__ import annotations

import os
import time

from rankscope.collectors.agent import clock_ping
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.run_state import RunState, file_of
from rankscope.collectors.node import Sample

__all__ = ["Node"]

clock = time.perf_counter_ns


class Node:
    """The node's tables, from its first rank on; before that it has no number, and nothing is written."""

    def __init__(self, run: RunFolder, state: RunState) -> None:
        self.index = 0
        self.is_said = False  # by a launcher; else it is the only one until it meets another
        self.since_ns = clock()
        self._run = run
        self._state = state
        self._tables: Partition | None = None
        self._ids: dict[str, int] = {}

    @property
    def tables(self) -> Partition:
        assert self._tables
        return self._tables

    @property
    def has_begun(self) -> bool:
        return self._tables is not None

    def begin(self, said: int | None) -> None:
        """Give the node the launcher's number, else 0 at first. Raises OSError."""
        if self._run.gone:  # nothing was in it yet
            self._run.reserve()
        self.index, self.is_said, self.since_ns = said or 0, said is not None, clock()
        self._tables = Partition(self._run, f"node={self.index:05d}")
        self._state.publish(node=self.index)

    def renumber(self, index: int) -> None:
        """Rename all that the node has written to `index`; readers take a rank's node from its entry in the JSON."""
        key = f"node={index:05d}"
        if index == self.index or os.path.exists(file_of(index, self._run.path)):  # of a node that has joined this run
            return
        try:
            self._run.rename(self.tables.key, key)
        except OSError as error:
            self.gap("*", f"the node's files could not be renamed to {key}: {error}")
            return
        self.index, self.tables.key = index, key
        self._state.publish(node=index)
        self._state.write()

    def gap(self, table: str, why: str, *, source: str = "agent", count: int | None = None) -> None:
        if self._tables:
            self._tables.gap(table, why, source=source, start_ns=clock(), count=count)

    def add_samples(self, readings: list[tuple[int, list[Sample]]]) -> None:
        """One row of `counters` per sample. Raises ValueError or TypeError if a value is not a number."""
        samples = [sample for _, taken in readings for sample in taken]
        columns = {
            "time_ns": [time_ns for time_ns, taken in readings for _ in taken],
            "source_id": [self._id(source) for source, _, _, _ in samples],
            "name_id": [self._id(name) for _, name, _, _ in samples],
            "device_id": [self._id(device) for _, _, device, _ in samples],
            "value": [float(value) for _, _, _, value in samples],
        }
        self.tables.add("counters", columns)

    def add_exchange(self, peer: int, exchange: clock_ping.Exchange) -> None:
        t1_ns, t2_ns, t3_ns, t4_ns = exchange
        self.tables.add_row("clocks", {"peer": peer, "t1_ns": t1_ns, "t2_ns": t2_ns, "t3_ns": t3_ns, "t4_ns": t4_ns})

    def _id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = len(self._ids)
            self.tables.add_row("strings", {"name_id": self._ids[text], "name": text})
        return self._ids[text]
