"""How much of a run fits into memory, timeline and replay included: the OOM killer gives no message."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from rankscope.collectors.free_memory import available_bytes, own_bytes
from rankscope.errors import BadInput

if TYPE_CHECKING:
    from rankscope.analysis.readers.native.run_folder import NativeReader
    from rankscope.analysis.runs.trace import Trace

__all__ = [
    "ENOUGH_ROWS",
    "ENOUGH_STEPS",
    "MOST_ROWS",
    "available_bytes",
    "bytes_of_rows",
    "check_memory",
    "check_share",
    "give_back",
    "held_share",
    "needed_bytes",
    "readable_share",
]

# Kernels and launches of a graph, which with its path takes some 200 bytes for each: so many at most; and no more than
# the others, or than so many judged steps have, since a gain is the mean of the steps.
MOST_ROWS = 2_000_000
ENOUGH_ROWS, ENOUGH_STEPS = 300_000, 30
# Measured on traces of 0.3 to 2.5 GB (docs/performance.md).
_BEFORE = 160_000_000
_OF_TIMELINE, _OF_GRAPH = 260, 290  # for each kernel and launch

# Of a recorded run, for each row: measured on simulated ones of 16 to 1,024 ranks (docs/performance.md).
_OF_ROW, _OF_OTHER_ROW = {"regions": 1300, "collectives": 1300, "device_marks": 400, "flight_records": 400}, 200
_MOST = 3_000_000_000  # a report on so much takes half a minute, while a job that has ended may hold its machines
# Of a run that is larger a report holds so much, or so many steps as far as they fit: what it does not hold is analyzed
# in stretches, in less time and by several processes.
_ENOUGH, _ENOUGH_LAST_STEPS = 500_000_000, 50
_SHARE = 0.5  # of the memory that is free


def give_back() -> None:
    """Return to the system what is free between what is used, as glibc and Arrow do not by themselves."""
    pa.default_memory_pool().release_unused()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def check_memory(trace: Trace) -> None:
    """Raise `BadInput`, with what to do, where the device's rows are known not to fit."""
    rows = {name: trace.reader.rows(name) for name in ("kernels", "launches")}
    needed, free = needed_bytes(sum(rows.values())), available_bytes()
    if free is None or needed <= free:
        return
    counted = " and ".join(f"{count:,} {name}" for name, count in rows.items())
    raise BadInput(
        f"{trace.path} does not fit into memory: {counted} need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB "
        "are free. Give the files of fewer ranks, profile fewer steps, or report on a machine with more memory "
        "(rankscope import does with 0.2 GB and makes a small folder that can be moved there)"
    )


def readable_share(reader: NativeReader) -> float:
    """Return the share of a recorded run that a report holds by default: 1 is all."""
    free = available_bytes()
    most = _MOST if free is None else min(_MOST, _SHARE * free)
    return (most - _BEFORE) / max(bytes_of_rows(reader), 1)


def held_share(reader: NativeReader, steps: int) -> float:
    """Return the share of a run with so many steps that a report holds: of one that does not fit less than would."""
    share = readable_share(reader)
    if share >= 1:
        return share
    return min(share, max((_ENOUGH - _BEFORE) / bytes_of_rows(reader), _ENOUGH_LAST_STEPS / max(steps, 1)))


def check_share(reader: NativeReader, share: float, *, beside: bool = False) -> None:
    """Raise `BadInput`, with what to do, where this share of a recorded run is known not to fit.

    `beside` says that it must fit beside what this process holds already.
    """
    needed, free = _BEFORE + share * bytes_of_rows(reader), available_bytes()
    if free is not None and beside:
        free -= own_bytes(Path("/proc"))
    if free is not None and needed > free:
        raise BadInput(
            f"{reader.where}: so many steps need about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: name "
            "fewer of them, or report on a machine with more memory"
        )


def bytes_of_rows(reader: NativeReader) -> float:
    """About what a report on all rows of a recorded run takes."""
    return sum(count * _OF_ROW.get(name, _OF_OTHER_ROW) for name, count in reader.estimated_rows().items())


def needed_bytes(rows: int) -> int:
    """Return the most memory for a report on so many kernels and launches, this process included."""
    return _BEFORE + rows * _OF_TIMELINE + min(rows, MOST_ROWS) * _OF_GRAPH
