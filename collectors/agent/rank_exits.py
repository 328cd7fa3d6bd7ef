"""How the ranks' processes ended: what the kernel shows of their exit.

The agent is not their parent, and cannot wait for them. Of a process that has ended and that its parent has not yet
waited for, `/proc` shows the status; from Linux 6.15 on the pidfd has it afterwards too.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import struct
import time
from pathlib import Path

from rankscope.collectors.agent.connections import Connection

__all__ = ["Exits", "exit_status"]

_INFO = struct.Struct("=QQ11Ii")  # struct pidfd_info: mask, …, exit_code
_GET_INFO, _WITH_EXIT = 0xC040FF0B, 1 << 3  # PIDFD_GET_INFO, PIDFD_INFO_EXIT
_EXIT_CODE = 49  # place in /proc/PID/stat behind the name

clock = time.perf_counter_ns


class Exits:
    """Ranks that are no longer connected; once the process has ended, its row is written and its tables sealed."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._ending: set[Connection] = set()

    def expect(self, connection: Connection) -> None:
        """Note that the rank of this connection ends, or has ended."""
        if connection.pidfd < 0:
            self._seal(connection)
            return
        self._ending.add(connection)
        self._selector.register(connection.pidfd, selectors.EVENT_READ, lambda: self._ended(connection))

    def finish(self) -> None:
        """Seal all tables, also those of processes that still run."""
        for connection in list(self._ending):
            if select.select([connection.pidfd], [], [], 0)[0]:
                self._ended(connection)
            else:
                self._leave(connection)

    def _ended(self, connection: Connection) -> None:
        status = exit_status(connection.pid, connection.pidfd)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        raised = connection.raised
        row = {
            "end_ns": clock(),
            "exit_code": None if code is None or code < 0 else code,
            "signal": None if code is None or code >= 0 else -code,
            "bye_ns": connection.report["end_ns"] if connection.report["bye"] else None,
            "oom_kills": connection.oom_kills.count() if connection.oom_kills else None,
            "raised_ns": raised.time_ns if raised else None,
            "error": raised.error if raised else None,
            "place": raised.place if raised else None,
        }
        if connection.rank:
            connection.rank.tables.add_row("exits", row)
        self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        self._ending.discard(connection)
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        self._seal(connection)

    def _seal(self, connection: Connection) -> None:
        if connection.rank:
            connection.rank.flush()
            connection.rank.tables.close()


def exit_status(pid: int, pidfd: int) -> int | None:
    """Give the status of a process that has ended, as `wait` has it; None where it cannot be seen any more."""
    for look in (_of_pidfd, _of_stat, _of_pidfd):  # its parent may wait for it in between
        status = look(pid, pidfd)
        if status is not None:
            return status
    return None


def _of_pidfd(_pid: int, pidfd: int) -> int | None:
    try:
        answer = fcntl.ioctl(pidfd, _GET_INFO, _INFO.pack(_WITH_EXIT, *[0] * 13))
    except OSError:  # an older kernel
        return None
    mask, *_, status = _INFO.unpack(answer)
    return int(status) if mask & _WITH_EXIT else None


def _of_stat(pid: int, _pidfd: int) -> int | None:
    try:
        said = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(said[_EXIT_CODE]) if said[0] == "Z" else None
    except (OSError, ValueError, IndexError):
        return None
