"""torch's Flight Recorder, asked from outside the rank: how long each operation took on the device.

A rank that uses NCCL runs torch's worker server, which answers on a unix socket from a C++ thread, without the
interpreter's lock; the agent asks it. Source: `torch/csrc/distributed/c10d/control_plane`, `…/FlightRecorder`.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import shutil
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rankscope.collectors.agent.clock_ping import unix_anchor
from rankscope.collectors.worker_server import GATE, LAST, SOCKET, TIMEOUT_S, fetch

__all__ = ["FlightRecorder"]

SHORTEST_S, LONGEST_S = 1.0, 30.0
_GOING_S = 5.0

Row = dict[str, Any]


class FlightRecorder(threading.Thread):
    """Asks one rank's recorder, often enough that nothing is overwritten between two answers.

    `handler` is what the worker server calls it. `rows` fills with lists of rows of `flight_records`, `gaps` with (why,
    how many).
    """

    def __init__(self, folder: str, handler: str) -> None:
        super().__init__(daemon=True)
        self.rows: SimpleQueue[list[Row]] = SimpleQueue()
        self.gaps: SimpleQueue[tuple[str, int | None]] = SimpleQueue()
        self._folder, self._handler = Path(folder), handler
        self._ending = threading.Event()
        self._next = 0  # the first record that was not in the last answer
        self._open: set[int] = set()  # those in it that had not ended
        self._unmeasured: dict[int, Row] = {}  # those in it that had, without a duration: the next answer may have it
        self._asked_at = time.monotonic()
        self._per_s = 0.0  # the most new records a second so far: a job that pauses goes on as fast as before
        self._pause_s = SHORTEST_S

    def run(self) -> None:
        while not self._ending.wait(self._pause_s):
            try:
                with (self._folder / GATE).open() as gate:
                    fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    answer = fetch(str(self._folder / SOCKET), self._handler)
                self._take(answer)
            except BlockingIOError:
                self._pause_s = SHORTEST_S
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                if not self._ending.wait(_GOING_S):  # a rank that ends shuts its server first
                    self.gaps.put((f"torch's Flight Recorder does not answer: {type(error).__name__}: {error}", None))
                return

    def finish(self) -> None:
        """Read what the rank left behind, and remove its folder."""
        self._ending.set()
        self.join(TIMEOUT_S)
        last = self._folder / LAST
        try:
            if last.exists():
                self._take(last.read_bytes(), is_last=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.gaps.put((f"what torch's Flight Recorder had at the end cannot be read: {error}", None))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._next == 0 and self.gaps.empty():
            why = "torch's Flight Recorder held nothing: it is off, or the job's operations were all in CUDA graphs"
            self.gaps.put((f"{why}; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 turns it on", None))

    def _take(self, answer: bytes, *, is_last: bool = False) -> None:
        """Rows of the records that have ended since the last answer, at the end of all."""
        before_ns, unix_ns, _, after_ns = unix_anchor()
        to_monotonic_ns = (before_ns + after_ns) // 2 - unix_ns
        entries = json.loads(answer).get("entries", [])
        if not entries:
            return
        numbers = [int(entry["record_id"]) for entry in entries]
        missed = max(0, min(numbers) - self._next) + sum(number < min(numbers) for number in self._open)
        if missed:
            self.gaps.put(("torch's Flight Recorder was overwritten; TORCH_FR_BUFFER_SIZE makes it larger", missed))
        rows = [row for number, row in self._unmeasured.items() if number < min(numbers)]
        still_open, unmeasured = set(), {}
        groups_end = {_part_of(entry): number for number, entry in zip(numbers, entries, strict=True) if _ends(entry)}
        for number, entry in zip(numbers, entries, strict=True):
            if number < self._next and number not in self._open and number not in self._unmeasured:
                continue
            row = _row(number, entry, to_monotonic_ns)
            is_part = groups_end.get(_part_of(entry), number) > number
            if is_last or is_part or row["duration_ns"] is not None or number in self._unmeasured:
                rows.append(row)
            elif _has_ended(entry):
                unmeasured[number] = row
            else:
                still_open.add(number)
        self._set_pause(max(numbers) + 1 - self._next, len(entries))
        self._next, self._open, self._unmeasured = max(numbers) + 1, still_open, unmeasured
        if rows:
            self.rows.put(rows)

    def _set_pause(self, new: int, held: int) -> None:
        """Half of what the recorder holds may be new at the next answer."""
        now = time.monotonic()
        self._per_s = max(self._per_s, new / max(now - self._asked_at, 1e-3))
        self._asked_at = now
        self._pause_s = min(LONGEST_S, max(SHORTEST_S, held / 2 / self._per_s))


def _has_ended(entry: dict[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _ends(entry: dict[str, Any]) -> bool:
    """Return whether a group of coalesced operations has ended; its parts, which come before it, have no such state."""
    return str(entry["profiling_name"]).endswith(":coalesced") and _has_ended(entry)


def _part_of(entry: dict[str, Any]) -> tuple[str, int, int]:
    """Return the same for the parts of a group of coalesced operations, and for its own entry."""
    return str(entry["process_group"][0]), int(entry["collective_seq_id"]), int(entry["p2p_seq_id"])


def _row(number: int, entry: dict[str, Any], to_monotonic_ns: int) -> Row:
    is_p2p = bool(entry.get("is_p2p"))
    milliseconds = entry.get("duration_ms")
    return {
        "start_ns": int(entry["time_created_ns"]) + to_monotonic_ns,
        "record": number,
        "group": str(entry["process_group"][0]),
        "seq": int(entry["p2p_seq_id" if is_p2p else "collective_seq_id"]),
        "is_p2p": is_p2p,
        "name": str(entry["profiling_name"]),
        "duration_ns": None if milliseconds is None else round(float(milliseconds) * 1e6),
    }
