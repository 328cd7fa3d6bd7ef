"""torch's Flight Recorder, asked from outside the rank: how long each operation took on the device.

A rank that uses NCCL runs torch's worker server, which answers on a unix socket from a C++ thread, without the
interpreter's lock; the agent asks it. Source: `torch/csrc/distributed/c10d/control_plane`, `…/FlightRecorder`.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

__all__ = ["LAST", "SOCKET", "FlightRecorder", "fetch"]

SOCKET, LAST = "rank", "last.json"  # in the rank's folder; the second is what it leaves behind
SHORTEST_S, LONGEST_S = 1.0, 30.0
TIMEOUT_S = 10.0
_GOING_S = 5.0

Row = dict[str, Any]


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def fetch(path: str, handler: str) -> bytes:
    """The JSON of this recorder from the worker server at this socket. Raises OSError, HTTPException or ValueError."""
    connection = _Connection(path)
    try:
        connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ValueError(f"{handler} answered {response.status}")
    return body


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
        self._asked_at = time.monotonic()
        self._pause_s = SHORTEST_S

    def run(self) -> None:
        while not self._ending.wait(self._pause_s):
            try:
                self._take(fetch(str(self._folder / SOCKET), self._handler))
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                if not self._ending.wait(_GOING_S):  # a rank that ends shuts its server first
                    self.gaps.put((f"torch's Flight Recorder does not answer: {type(error).__name__}: {error}", None))
                return

    def finish(self) -> None:
        """What the rank left behind has been read, and its folder is gone."""
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
        to_monotonic_ns = time.perf_counter_ns() - time.time_ns()
        entries = json.loads(answer).get("entries", [])
        if not entries:
            return
        numbers = [int(entry["record_id"]) for entry in entries]
        missed = max(0, min(numbers) - self._next) + sum(number < min(numbers) for number in self._open)
        if missed:
            self.gaps.put(("torch's Flight Recorder was overwritten; TORCH_FR_BUFFER_SIZE makes it larger", missed))
        rows, still_open = [], set()
        for number, entry in zip(numbers, entries, strict=True):
            if number < self._next and number not in self._open:
                continue
            if is_last or entry.get("retired") or entry.get("state") == "completed":
                rows.append(_row(number, entry, to_monotonic_ns))
            else:
                still_open.add(number)
        self._set_pause(max(numbers) + 1 - self._next, len(entries))
        self._next, self._open = max(numbers) + 1, still_open
        if rows:
            self.rows.put(rows)

    def _set_pause(self, new: int, held: int) -> None:
        """Half of what the recorder holds may be new at the next answer."""
        now = time.monotonic()
        per_s = new / max(now - self._asked_at, 1e-3)
        self._asked_at = now
        self._pause_s = min(LONGEST_S, max(SHORTEST_S, held / 2 / per_s)) if per_s else LONGEST_S


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
