"""Relates the clocks of two nodes: bursts of small questions over TCP, answered with the times they came and went."""

from __future__ import annotations

import contextlib
import hmac
import random
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import cast

__all__ = ["Exchange", "Pinger", "Server", "unix_anchor"]

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
_BURST_S = 5.0  # a node that takes longer keeps others waiting
_TURN_S = 15.0  # until a node's turn comes
_STRANGERS = 1024  # connections that have not sent the key yet; with more, the oldest is closed
_KEY_S = 2.0  # in which it must be shown

clock = time.perf_counter_ns


def unix_anchor() -> Exchange:
    """Return the tightest of a few readings of the unix time between two readings of the monotonic clock."""
    readings = []
    for _ in range(5):
        before = clock()
        unix_ns = time.time_ns()
        readings.append((before, unix_ns, unix_ns, clock()))
    return min(readings, key=_round_trip_ns)


def _round_trip_ns(exchange: Exchange) -> int:
    t1, t2, t3, t4 = exchange
    return (t4 - t1) - (t3 - t2)


class Server:
    """Answers the pings of the job's other nodes, which send `key` first. Without it there is no answer.

    The key travels by the job's store, which its processes trust.
    """

    def __init__(self, host: str) -> None:
        """Listen at one address of this node, or at all of them (""). Raises OSError."""
        self.key = secrets.token_hex(8)
        self._listener = _listener(host)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._callers: SimpleQueue[socket.socket] = SimpleQueue()  # they have sent the key
        threading.Thread(target=self._let_in, daemon=True).start()
        for _ in range(_AT_ONCE):
            threading.Thread(target=self._answer, daemon=True).start()

    def _let_in(self) -> None:
        """Hand on connections that send the key in time. Others wait here, not in the threads that answer nodes."""
        strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)

            def forget(channel: socket.socket) -> None:
                ready.unregister(channel)
                del strangers[channel]

            while True:
                for event, _ in ready.select(_KEY_S / 4):
                    if event.fileobj is self._listener:
                        for channel in self._accept():
                            ready.register(channel, selectors.EVENT_READ)
                            strangers[channel] = _Stranger(time.monotonic() + _KEY_S)
                        continue
                    channel = cast(socket.socket, event.fileobj)
                    shown = strangers[channel].shows(channel, self.key)
                    if shown is not None:
                        forget(channel)
                        if shown:
                            self._callers.put(channel)
                        else:
                            channel.close()
                now = time.monotonic()
                for channel in list(strangers):
                    if strangers[channel].until > now and len(strangers) <= _STRANGERS:
                        break
                    forget(channel)
                    channel.close()

    def _accept(self) -> Iterator[socket.socket]:
        for _ in range(_STRANGERS):
            try:
                channel, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(1)  # out of file descriptors
                return
            channel.setblocking(False)
            yield channel

    def _answer(self) -> None:
        while True:
            # Blocked in recv, a thread answers with less and steadier delay than a selector.
            with self._callers.get() as channel, contextlib.suppress(OSError):
                _set_up(channel, _WAIT_S)
                until = time.monotonic() + _BURST_S
                for _ in range(_PINGS):
                    if len(channel.recv(len(_REQUEST))) < len(_REQUEST) or time.monotonic() > until:
                        break
                    received_ns = clock()
                    channel.sendall(_ANSWER.pack(received_ns, clock()))


@dataclass(slots=True)
class _Stranger:
    """A connection that has not sent the key yet, and its deadline."""

    until: float
    said: bytes = b""

    def shows(self, channel: socket.socket, key: str) -> bool | None:
        """Say whether it has the key; None until it has sent enough bytes."""
        try:
            came = channel.recv(len(key) - len(self.said))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self.said += came
        if came and len(self.said) < len(key):
            return None
        return hmac.compare_digest(self.said, key.encode())


def _listener(host: str) -> socket.socket:
    """Listen at the address. Raises OSError."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=_WAITING)
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_WAITING)
    except (OSError, ValueError):  # no IPv6 here
        return socket.create_server(("", 0), backlog=_WAITING)


def _set_up(connection: socket.socket, wait_s: float) -> None:
    """Without delay, and with a timeout of the kernel's: Python's own would add a poll to every recv."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(None)
    wait = struct.pack("@ll", int(wait_s), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def _burst(host: str, port: int, key: str) -> list[Exchange]:
    """Return the exchanges with the shortest round trips of one burst. Raises OSError."""
    exchanges: list[Exchange] = []
    with socket.create_connection((host, port), timeout=_WAIT_S) as connection:
        _set_up(connection, _TURN_S)
        connection.sendall(key.encode())
        until = time.monotonic() + _TURN_S + _BURST_S
        while len(exchanges) < _PINGS and time.monotonic() < until:
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

    def __init__(self, host: str, port: int, key: str, nodes: int) -> None:
        super().__init__(daemon=True)
        self._every_s = max(_EVERY_S, nodes / _NODES_A_SECOND)
        self.host = host
        self.port = port
        self._key = key
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
                self.exchanges.extend(_burst(self.host, self.port, self._key))
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
        """Try to make the last burst."""
        self._ending = True
        self._wake.set()
        self.join(2 * _WAIT_S)
