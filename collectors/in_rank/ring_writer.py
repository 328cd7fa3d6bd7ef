"""The rank's end of the ring: fixed-size records in memory that the agent holds, so that it outlives the rank.

Records are packed here and unpacked in `agent/ring_reader.py`. Only collectives and their ends are packed by their
collector: another call costs 70 ns, on the path of every collective.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
from collections.abc import Callable
from threading import get_ident

from rankscope.collectors.schema import RECORD, RING_SLOTS, RecordType
from rankscope.collectors.untyped import Foreign

__all__ = ["Ring"]


class Ring:
    """A ring of `RING_SLOTS` records in a memfd, written by any thread of this process, read by the agent.

    Writing takes no lock: the counter and `pack_into` are single steps under the interpreter's lock; with `native`, the
    module of the hook in C++, both are its own, so that it writes into the same ring without that lock. Full means
    that the oldest record is overwritten; the agent counts what it missed.

    Raises:
        OSError: not enough memory. It is reserved at once, since a page that is missing later would be a SIGBUS in
            the training process.
    """

    def __init__(self, native: Foreign = None) -> None:
        size = RECORD.size * RING_SLOTS
        self.fd = os.memfd_create("rankscope-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.posix_fallocate(self.fd, 0, size)
        # The agent maps it only if it cannot be truncated any more, which would crash the agent for all ranks.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._memory = mmap.mmap(self.fd, size)
        self.native = native
        self.native_ring = None if native is None else native.Ring(self._memory)
        self.write: Callable[[int, int, int, int, int, int, int, int, int], int] = (
            self._writer() if self.native_ring is None else self.native_ring.write
        )

    def _writer(self) -> Callable[[int, int, int, int, int, int, int, int, int], int]:
        following = itertools.count(1).__next__
        pack = RECORD.pack_into
        memory = self._memory
        mask = RING_SLOTS - 1
        size = RECORD.size

        def write(kind: int, a: int, b: int, c: int, q0: int, q1: int, q2: int, q3: int, q4: int) -> int:
            """Write one record and return its number. With `*fields` it would take half as long again."""
            number = following()
            pack(memory, (number & mask) * size, number, kind, a, b, c, q0, q1, q2, q3, q4, number)
            return number

        return write

    def region(
        self, kind: int, name_id: int, start_ns: int, end_ns: int, microbatch: int = -1, stage: int = -1
    ) -> None:
        """Write one host span of the calling thread; times in ns of `perf_counter_ns`."""
        self.write(RecordType.REGION, kind, 0, name_id, start_ns, end_ns, get_ident(), microbatch, stage)

    def step(self, end_ns: int) -> None:
        """Write the end of a step, as the calling thread has it."""
        self.write(RecordType.STEP, 0, 0, 0, end_ns, get_ident(), 0, 0, 0)

    def memory(self, name_id: int, time_ns: int, value: int) -> None:
        """Write one reading of the memory that is in use."""
        self.write(RecordType.MEMORY, 0, 0, name_id, time_ns, value, 0, 0, 0)

    def mark(self, mark: int, device: int, recorded_ns: int, device_ns: int, error_ns: int) -> None:
        """Write when the device came to a mark, on this process's clock, and the error of that."""
        self.write(RecordType.MARK, mark, 0, device, recorded_ns, device_ns, error_ns, 0, 0)

    def sample(self, frame: int, time_ns: int) -> None:
        """Write which chain of calls the training thread was in."""
        self.write(RecordType.SAMPLE, 0, 0, frame, time_ns, 0, 0, 0, 0)

    def progress(self, done: int, time_ns: int, step_ns: int) -> None:
        """Write how many steps have ended by now, and how long one usually takes."""
        self.write(RecordType.PROGRESS, 0, 0, done, time_ns, step_ns, 0, 0, 0)
