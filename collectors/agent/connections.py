"""The processes of this node that are connected to the agent; one is a rank once it has said hello."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.collectors.agent import messages
from rankscope.collectors.agent.flight_recorder import FlightRecorder
from rankscope.collectors.agent.oom_kills import OomKills
from rankscope.collectors.agent.rank_tables import RankTables
from rankscope.collectors.agent_socket import peer_of

__all__ = ["Connection", "Connections"]

PACKETS = 1000  # of one process at a turn
TOLD_BAD = 10  # messages of a process that make no sense have a row each; more are counted
BACKLOG = 4096

_FD = struct.Struct("i")


@dataclass(eq=False, slots=True)
class Connection:
    """A process that connected."""

    channel: socket.socket
    pid: int
    pidfd: int = -1
    tid: int = 0  # of the thread that trains
    rank: RankTables | None = None
    report: dict[str, Any] = field(default_factory=dict)  # its entry in the run's JSON
    flight: FlightRecorder | None = None
    raised: messages.Raised | None = None  # the exception that ends it
    oom_kills: OomKills | None = None
    bad: int = 0  # messages that made no sense

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, if the process takes it now; a rank whose socket is full has ended or is about to."""
        with contextlib.suppress(OSError):
            self.channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


Handle = Callable[[Connection, messages.Message, list[int]], None]
Gap = Callable[[str, int | None], None]


class Connections:
    """The open connections; `handle` gets each message, with its file descriptors, and `over` each closed one."""

    def __init__(
        self, selector: selectors.BaseSelector, handle: Handle, over: Callable[[Connection], None], gap: Gap
    ) -> None:
        self._selector = selector
        self._handle = handle
        self._over = over
        self._gap = gap
        self._all: set[Connection] = set()

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def ranks(self) -> list[tuple[Connection, RankTables]]:
        """Return the connections that have said hello."""
        return [(connection, connection.rank) for connection in self._all if connection.rank]

    def listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        """Accept or reject all pending connections at once, so that another user's connections block no rank."""
        for _ in range(BACKLOG):
            try:
                channel, _ = listener.accept()
            except OSError:
                return
            pid, uid = peer_of(channel)
            if uid == os.geteuid():
                self._let_in(channel, pid)
            else:
                channel.close()

    def _let_in(self, channel: socket.socket, pid: int) -> None:
        channel.setblocking(False)
        connection = Connection(channel, pid)
        self._all.add(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self.receive(connection))
        with contextlib.suppress(OSError):
            # A forked child may hold the rank's socket open after the rank has died; its pidfd shows the death.
            connection.pidfd = os.pidfd_open(pid)
            self._selector.register(connection.pidfd, selectors.EVENT_READ, lambda: self.receive(connection, gone=True))

    def receive(self, connection: Connection, *, gone: bool = False) -> None:
        """All packets that have come are dealt with; where they end, or the process is `gone`, so is the connection."""
        for _ in range(PACKETS):
            if connection not in self._all:
                return
            try:
                packet, ancillary, _, _ = connection.channel.recvmsg(messages.PACKET_BYTES, socket.CMSG_SPACE(_FD.size))
            except BlockingIOError:
                if gone:
                    self.end(connection)
                return
            except OSError:
                packet, ancillary = b"", []
            fds = [fd for _, kind, data in ancillary if kind == socket.SCM_RIGHTS for (fd,) in _FD.iter_unpack(data)]
            try:
                if packet:
                    self._handle(connection, messages.parse(packet), fds)
                else:
                    self.end(connection)
            except Exception as error:  # whatever a process sends, the others are recorded
                connection.bad += 1
                if connection.bad <= TOLD_BAD:
                    self._gap(f"a message of process {connection.pid} was not understood: {error!r}", None)
            finally:
                for fd in fds:
                    os.close(fd)

    def end(self, connection: Connection) -> None:
        """Close the connection."""
        if connection not in self._all:
            return
        self._all.discard(connection)
        self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.pidfd >= 0:
            self._selector.unregister(connection.pidfd)
        if connection.bad > TOLD_BAD:
            why = f"further messages of process {connection.pid} that were not understood"
            self._gap(why, connection.bad - TOLD_BAD)
        self._over(connection)
