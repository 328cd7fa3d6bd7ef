"""Relates the clocks of two nodes: bursts of small questions over TCP, answered with the times they came and went."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import deque

__all__ = ["Exchange", "Pinger", "listen", "unix_anchor"]

Exchange = tuple[int, int, int, int]  # t1 … t4 of the table `clocks`

_REQUEST = b"rankscpe"
_ANSWER = struct.Struct("<qq")
_AT_ONCE = 4  # nodes that are answered; others wait, as all of a large job ask in the same moment
_WAITING = 4096
_PINGS = 50
_KEPT = 10
_EVERY_S = 10.0
_NODES_A_SECOND = 25  # 3 % of a core of the node that answers
_WAIT_S = 2.0
_TURN_S = 15.0  # until a node's turn comes

clock = time.perf_counter_ns


def unix_anchor() -> Exchange:
    """The tightest of a few readings of the unix time between two readings of the monotonic clock."""
    readings = []
    for _ in range(5):
        before = clock()
        unix_ns = time.time_ns()
        readings.append((before, unix_ns, unix_ns, clock()))
    return min(readings, key=_round_trip_ns)


def _round_trip_ns(exchange: Exchange) -> int:
    t1, t2, t3, t4 = exchange
    return (t4 - t1) - (t3 - t2)


def listen() -> int:
    """Answer pings on all interfaces from now on; returns the port, 0 if none can be opened."""
    try:
        server = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_WAITING)
    except (OSError, ValueError):  # no IPv6 here
        try:
            server = socket.create_server(("", 0), backlog=_WAITING)
        except OSError:
            return 0
    for _ in range(_AT_ONCE):
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def _accept(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            time.sleep(1)  # out of file descriptors
            continue
        # Blocked in recv, a thread answers with less and steadier delay than a selector.
        with connection, contextlib.suppress(OSError):
            _set_up(connection, _WAIT_S)
            for _ in range(_PINGS):
                if len(connection.recv(len(_REQUEST))) < len(_REQUEST):
                    break
                received_ns = clock()
                connection.sendall(_ANSWER.pack(received_ns, clock()))


def _set_up(connection: socket.socket, wait_s: float) -> None:
    """Without delay, and with a timeout of the kernel's: Python's own would add a poll to every recv."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    wait = struct.pack("@ll", int(wait_s), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def _burst(host: str, port: int) -> list[Exchange]:
    """The exchanges with the shortest round trips of one burst. Raises OSError."""
    exchanges = []
    with socket.create_connection((host, port), timeout=_WAIT_S) as connection:
        _set_up(connection, _TURN_S)
        for _ in range(_PINGS):
            t1 = clock()
            connection.sendall(_REQUEST)
            answer = connection.recv(_ANSWER.size)
            t4 = clock()
            if len(answer) < _ANSWER.size:
                raise ConnectionError("the other agent closed the connection")
            exchanges.append((t1, *_ANSWER.unpack(answer), t4))
    return sorted(exchanges, key=_round_trip_ns)[:_KEPT]


class Pinger(threading.Thread):
    """Pings another node's agent at once, then every 10 s, whenever asked, and a last time at the end.

    Where that has very many `nodes` to answer, each pings it less often.
    """

    def __init__(self, host: str, port: int, nodes: int) -> None:
        super().__init__(daemon=True)
        self._every_s = max(_EVERY_S, nodes / _NODES_A_SECOND)
        self.host = host
        self.port = port
        self.exchanges: deque[Exchange] = deque()
        self.failures = 0  # in a row
        self.succeeded = False
        self.why = ""
        self._wake = threading.Event()
        self._ending = False

    def run(self) -> None:
        while True:
            ending = self._ending
            try:
                self.exchanges.extend(_burst(self.host, self.port))
                self.failures, self.succeeded = 0, True
            except OSError as error:
                self.failures += 1
                self.why = f"{self.host}:{self.port}: {error.strerror or error}"
            if ending:
                return
            self._wake.wait(self._every_s * random.uniform(0.8, 1.2))  # not all nodes in step
            self._wake.clear()

    def ping_now(self) -> None:
        self._wake.set()

    def finish(self) -> None:
        """The last burst has been made, or has failed."""
        self._ending = True
        self._wake.set()
        self.join(2 * _WAIT_S)
