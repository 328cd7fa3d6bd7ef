"""The node's agent: one process per node that turns what the ranks of the node leave in their rings into files.

It outlives a rank that crashes or hangs, samples the collectors of `node/`, and relates the clocks of the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import platform
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import psutil
import pyarrow as pa

from rankscope.collectors.agent import clock_ping, messages
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.deep_windows import Windows
from rankscope.collectors.agent.flight_recorder import FlightRecorder
from rankscope.collectors.agent.nccl_ras import Ras
from rankscope.collectors.agent.node_sampler import Sampler
from rankscope.collectors.agent.retention import Retention, usual_bytes
from rankscope.collectors.agent.ring_reader import KNOWN_TYPES, Records, Ring, Threads, columns_by_table, fitting
from rankscope.collectors.in_rank.agent_socket import peer_of
from rankscope.collectors.node import Sample
from rankscope.collectors.schema import NO_PEER, RING_SLOTS, SCHEMA_VERSION, RecordType
from rankscope.errors import BadInput

__all__ = ["Agent", "main"]

DRAIN_NS = 200_000_000
FLUSH_NS = 1_000_000_000
ANCHOR_NS = 10_000_000_000
RETAIN_NS = 5_000_000_000
LINGER_NS = 5_000_000_000  # after the last rank, where no launcher says when to end
GIVE_UP_NS = 600_000_000_000
MEET_NS = 5_000_000_000  # after its first rank's hello another node should have been met
PACKETS = 1000  # of one rank at a turn
TOLD_BAD = 10  # messages of a process that make no sense have a row each; more are counted
PING_FAILURES = 3  # in a row
NICE = 5

NO_RANK = (
    "no rank reported: torch is older than 2.5, or TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set, or the ranks' Python has no "
    "rankscope, or no process group was made"
)

_BACKLOG = 4096
_FD = struct.Struct("i")
_SET_NODE_RANK = "set NODE_RANK on each node"

clock = time.perf_counter_ns


class _Rank:
    """One rank of one attempt: its ring, and the tables that its rows go to."""

    def __init__(
        self, hello: messages.Hello, ring_fd: int, world: str | None, attempt: int, node: int, run: RunFolder
    ) -> None:
        """Raises ValueError or OSError when the ring is none."""
        self.rank = hello.rank
        self.world = world
        self.tables = Partition(run, f"rank={self.rank:05d}", f"w{world}-a{attempt}-" if world else f"a{attempt}-")
        self._rings: list[tuple[Ring, tuple[str, ...]]] = [(Ring(ring_fd), ("*",))]  # and what lacks its losses
        self._threads = Threads(hello.main_thread)
        self._records: list[Records] = []
        self._flushed_ns = clock()
        self.heard_ns: int | None = None  # when its last record came, once it has communicated
        names = ("hostname", "device", "torch", "python", "command", "start_ns", "local_rank", "world_size", "pid")
        self.world_size = hello.world_size
        self._row: dict[str, Any] = {name: getattr(hello, name) for name in names} | {"node": node}
        self.tables.add_row("ranks", self._row)

    @property
    def device(self) -> str:
        """What its readings are called among the node's counters."""
        return f"rank{self.rank}@{self.world}" if self.world else f"rank{self.rank}"

    def train_on(self, thread: int) -> None:
        """Its main thread is the one with this ident."""
        self._threads.train(thread)

    def name_device(self, name: str) -> None:
        """The rank's row is there again, with the device that it was found to use; readers take the last."""
        self.tables.add_row("ranks", self._row | {"device": name})

    def add_nccl_ring(self, ring_fd: int) -> None:
        """Raises ValueError or OSError if it is not a ring."""
        self._rings.append((Ring(ring_fd), ("nccl_calls", "nccl_events")))

    def read(self, *, last: bool = False) -> None:
        """The rings are read as far as they go."""
        self._guard(lambda: self._read(last))
        if sum(map(len, self._records)) > RING_SLOTS:
            self.flush()

    def _guard(self, read: Callable[[], None]) -> None:
        """What the rank wrote may be anything: an exception costs this rank its records, and no other one."""
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
                self._records.append(records)
                of_job = records["type"] != RecordType.SAMPLE  # those come as long as the process lives
                if (of_job if self.heard_ns else records["type"] == RecordType.COLLECTIVE).any():
                    self.heard_ns = clock()

    def take_flight(self, recorder: FlightRecorder) -> None:
        """What torch's Flight Recorder has answered is among the rank's rows."""
        while not recorder.rows.empty():
            rows = recorder.rows.get()
            self.tables.add("flight_records", {name: [row[name] for row in rows] for name in rows[0]})
        while not recorder.gaps.empty():
            why, count = recorder.gaps.get()
            self.tables.gap("flight_records", why, source="flight_recorder", start_ns=clock(), count=count)

    def flush(self) -> None:
        """What was read is with the system, and what was lost is in `gaps`."""
        self._guard(self._take_records)
        self.tables.flush()

    def _take_records(self) -> None:
        now_ns = clock()
        if self._records:
            records = np.concatenate(self._records)
            unknown = int((~np.isin(records["type"], KNOWN_TYPES)).sum())
            self._tell_refused("*", "records of a type that this version does not know", now_ns, unknown)
            for table, columns in columns_by_table(records, self._threads).items():
                fit, refused = fitting(table, columns)
                self.tables.add(table, fit)
                self._tell_refused(table, "records with a value out of range, which were left out", now_ns, refused)
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

    def _tell_refused(self, table: str, why: str, now_ns: int, count: int) -> None:
        if count:
            self.tables.gap(table, why, start_ns=self._flushed_ns, end_ns=now_ns, count=count)


class _NodeTables:
    """The node's own rows: readings of its collectors, relations of clocks, gaps."""

    def __init__(self, run: RunFolder, index: int) -> None:
        self.index = index
        self.since_ns = clock()
        self.tables = Partition(run, f"node={index:05d}")
        self._ids: dict[str, int] = {}

    def add_samples(self, time_ns: int, samples: list[Sample]) -> None:
        """One row of `counters` per sample. Raises ValueError or TypeError if a value is not a number."""
        columns = {
            "time_ns": np.full(len(samples), time_ns),
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


@dataclass(eq=False, slots=True)
class _Connection:
    """A process that connected; it is a rank once it has said hello."""

    channel: socket.socket
    pid: int
    pidfd: int = -1
    tid: int = 0  # of the thread that trains
    rank: _Rank | None = None
    report: dict[str, Any] = field(default_factory=dict)  # its entry in the run's JSON
    flight: FlightRecorder | None = None
    bad: int = 0  # messages that made no sense

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, if the process takes it now; a rank whose socket is full has ended or is about to."""
        with contextlib.suppress(OSError):
            self.channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)


class Agent:
    """Serves the ranks of one node until the job is over; `run` returns when everything is on disk."""

    def __init__(
        self,
        listener: socket.socket,
        out: Path,
        *,
        hz: float,
        until_stdin_closes: bool,
        launch: dict[str, Any],
        profile_steps: tuple[int, int] | None = None,
        profile_slow: int = 0,
        keep_bytes: int | None = None,
    ) -> None:
        """Raises OSError when the run cannot be written to `out`."""
        self._run = RunFolder(out)
        self._run.reserve()
        self.port = clock_ping.listen()
        self._until_stdin_closes = until_stdin_closes
        self._stdin_open = until_stdin_closes
        self._terminated = False
        self._due_ns = {"drain": 0, "flush": 0, "anchor": 0, "retain": 0}
        self._last_rank_ns: int | None = None
        self._connections: set[_Connection] = set()
        self._windows = Windows(self._run, self._gap_of_rank, self._add_window, fixed=profile_steps, slow=profile_slow)
        keep_bytes = usual_bytes(out) if keep_bytes is None else keep_bytes
        self._retention = Retention(keep_bytes)
        self._windows_of: str | None = None  # the world whose ranks it knows
        self._reports: list[dict[str, Any]] = []
        self._node: _NodeTables | None = None
        self._node_said = False  # by a launcher; else it is the only one until it meets another
        self._id = os.urandom(4).hex()  # the other nodes' agents know it by that
        addresses = _own_addresses()
        self._sampler = Sampler(frozenset(addresses), hz)
        self._pinger: clock_ping.Pinger | None = None
        self._peer = 0  # the node that it pings
        self._ping_trouble_told = False
        self._ras = Ras(os.environ)
        self._uses_nccl = "NCCL_RAS_ADDR" in os.environ
        self._started_ns = clock()
        self._state: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "state": "running",
            "agent": self._id,
            "hostname": socket.gethostname(),
            "addresses": sorted(a for a in addresses if not (a == "::1" or a.startswith("127."))),
            "start_ns": self._started_ns,
            "start_unix_ns": time.time_ns(),
            "closed_unix_ns": None,
            "hz": hz,
            "keep_bytes": keep_bytes,
            "launch": launch,
            "versions": _versions(),
            "ranks": self._reports,
        }
        self._state_changed = False
        self._callers: set[int] = set()  # processes that have asked whether there is an agent, and have not ended
        self._told_since_ns: int | None = None  # by the JSON on the disk
        self._told_of_retention = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        listener.setblocking(False)
        if until_stdin_closes:
            self._watch_stdin()
        self._watch_signals()

    # ---- the loop

    def run(self) -> None:
        """Everything the ranks left is on disk, sealed, and the run's state is `closed`."""
        try:
            while not self._over():
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._work()
        except Exception as error:
            # Nobody would see a traceback here; the run must say it itself, and keep what there is.
            self._begin(None)
            self._gap("*", f"the agent failed: {type(error).__name__}: {error}")
        self._close()

    def _over(self) -> bool:
        if self._terminated:
            return True
        if any(connection.rank for connection in self._connections):
            return False
        if self._until_stdin_closes:
            return not self._stdin_open
        if self._callers:
            return False
        if self._last_rank_ns is None:
            return clock() - self._started_ns > GIVE_UP_NS
        return clock() - self._last_rank_ns > LINGER_NS

    def _pause_s(self) -> float:
        return max(0, self._due_ns["drain"] - clock()) / 1e9

    def _is_due(self, task: str, every_ns: int) -> bool:
        now_ns = clock()
        if now_ns < self._due_ns[task]:
            return False
        self._due_ns[task] = now_ns - now_ns % every_ns + every_ns
        return True

    def _work(self) -> None:
        if self._is_due("drain", DRAIN_NS):
            for connection in self._connections:
                if connection.rank:
                    connection.rank.read()
        if self._node is None:
            return
        if self._is_due("anchor", ANCHOR_NS):
            self._node.add_exchange(NO_PEER, clock_ping.unix_anchor())
        if self._is_due("flush", FLUSH_NS):
            self._flush(self._node)

    def _flush(self, node: _NodeTables) -> None:
        if self._run.gone:
            self._terminated = True
            return
        self._number_alone(node)
        for connection in self._connections:
            if connection.rank:
                if connection.flight:
                    connection.rank.take_flight(connection.flight)
                connection.rank.flush()
        self._windows.work(node.index)
        self._take_samples(node)
        self._take_pings(node)
        self._take_ras(node)
        node.tables.flush()
        if self._is_due("retain", RETAIN_NS) and self._retention.decide():
            self._state["kept_since_ns"] = self._retention.since_ns
            self._state_changed = True
        if self._state_changed:
            self._write_state()
        self._retain()

    def _retain(self) -> None:
        """A little of what is too much is removed, once the run's JSON says since when all is there."""
        if self._told_since_ns != self._retention.since_ns:
            try:  # the disk is full
                self._run.spend_reserve()
                self._write_state()
            except OSError:
                return
        if self._told_since_ns == self._retention.since_ns:
            try:
                self._retention.work()
            except (OSError, pa.ArrowInvalid) as error:
                if not self._told_of_retention:
                    self._told_of_retention = True
                    self._gap("*", f"some older records could not be removed, which is tried again: {error}")
        self._run.refill_reserve()

    # ---- the ranks

    def _accept(self, listener: socket.socket) -> None:
        """All who wait are let in or turned away at once, so that another user's connections keep nobody out."""
        for _ in range(_BACKLOG):
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
        connection = _Connection(channel, pid)
        self._connections.add(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._receive(connection))
        try:
            # A forked child may hold the rank's socket open after the rank has died; its pidfd tells all the same.
            connection.pidfd = os.pidfd_open(pid)
            self._selector.register(
                connection.pidfd, selectors.EVENT_READ, lambda: self._receive(connection, gone=True)
            )
        except OSError:
            pass

    def _receive(self, connection: _Connection, *, gone: bool = False) -> None:
        """All packets that have come are dealt with; where they end, or the process is `gone`, so is the connection."""
        for _ in range(PACKETS):
            if connection not in self._connections:
                return
            try:
                packet, ancillary, _, _ = connection.channel.recvmsg(messages.PACKET_BYTES, socket.CMSG_SPACE(_FD.size))
            except BlockingIOError:
                if gone:
                    self._end(connection)
                return
            except OSError:
                packet, ancillary = b"", []
            fds = [fd for _, kind, data in ancillary if kind == socket.SCM_RIGHTS for (fd,) in _FD.iter_unpack(data)]
            try:
                if packet:
                    self._handle(connection, messages.parse(packet), fds)
                else:
                    self._end(connection)
            except Exception as error:  # whatever a process sends, the others are recorded
                connection.bad += 1
                if connection.bad <= TOLD_BAD:
                    self._gap("*", f"a message of process {connection.pid} was not understood: {error!r}")
            finally:
                for fd in fds:
                    os.close(fd)

    def _handle(self, connection: _Connection, message: messages.Message, fds: list[int]) -> None:
        rank = connection.rank
        if isinstance(message, messages.Hello):
            self._hello(connection, message, fds[0] if fds else -1)
        elif rank is None:
            raise BadInput("it came before the hello")
        elif isinstance(message, messages.Gpu):
            rank.name_device(message.name)
            if message.uuid is not None:
                connection.report["gpu_uuid"] = message.uuid
                self._state_changed = True
        elif isinstance(message, messages.TrainingThread):
            rank.train_on(message.thread)
            connection.tid = message.tid
            self._tell_pids()
        elif isinstance(message, messages.FlightRecorder):
            if connection.flight:
                raise BadInput("it named its Flight Recorder before")
            connection.flight = FlightRecorder(message.folder, message.handler)
            connection.flight.start()
        elif isinstance(message, messages.NcclRing):
            try:
                rank.add_nccl_ring(fds[0] if fds else -1)
            except (OSError, ValueError) as error:
                raise BadInput(f"the ring cannot be mapped: {error}") from None
        elif isinstance(message, messages.Peer):
            self._meet(rank, message)
        elif isinstance(message, (messages.Step, messages.Slow, messages.Window, messages.Stacks)):
            self._hear(rank, message)
        elif isinstance(message, messages.Bye):
            self._say_bye(connection, rank, message.dropped)
        else:
            self._add_rows(rank, message)

    def _add_rows(
        self, rank: _Rank, message: messages.String | messages.Frames | messages.Group | messages.Gap
    ) -> None:
        """The message is among the rank's rows."""
        if isinstance(message, messages.String):
            rank.tables.add_row("strings", {"name_id": message.id, "name": message.name})
        elif isinstance(message, messages.Frames):
            if message.rows:
                names = ("frame", "parent", "function", "file", "line")
                rank.tables.add("frames", dict(zip(names, zip(*message.rows, strict=True), strict=True)))
        elif isinstance(message, messages.Group):
            columns = ("start_ns", "name", "backend", "role", "members")
            rank.tables.add_row("groups", {c: getattr(message, c) for c in columns} | {"group_id": message.id})
            self._uses_nccl |= "nccl" in message.backend
        else:
            rank.tables.add_row("gaps", msgspec.structs.asdict(message))

    def _hello(self, connection: _Connection, hello: messages.Hello, ring_fd: int) -> None:
        if connection.rank:
            raise BadInput("it said hello before")
        said = hello.node
        node = self._begin(said)
        rank, attempt, world = hello.rank, hello.attempt, hello.world
        seen = {report["attempt"] for report in self._reports if (report["rank"], report["world"]) == (rank, world)}
        while attempt in seen:  # a second job under the same agent
            attempt += 1
        try:
            connection.rank = _Rank(hello, ring_fd, world, attempt, node.index, self._run)
        except (OSError, ValueError) as error:
            raise BadInput(f"the ring cannot be mapped: {error}") from None
        self._retention.watch(connection.rank.tables)
        known = {"port": self.port, "name": self._run.path.name, "node": node.index, "agent": self._id}
        known["runs"] = os.path.realpath(self._run.path.parent)
        reply = json.dumps(known).encode()
        with contextlib.suppress(OSError):  # its end will be noticed with the next packet
            connection.channel.send(reply)  # before all that takes longer: the rank waits for it
        connection.report = {"rank": rank, "world": world, "attempt": attempt, "pid": hello.pid, "bye": False}
        connection.report |= {"ended": False, "world_size": hello.world_size}
        connection.report |= {"start_ns": hello.start_ns, "end_ns": None}
        self._reports.append(connection.report)
        self._state["versions"]["torch"] = hello.torch
        self._tell_pids()
        self._sampler.start()
        self._state_changed = True  # not now: on slow storage the next ranks would wait for it
        self._windows.work(node.index)
        if world == self._windows_of or not self._in_windows():
            self._windows_of = world
            self._windows.join(rank, connection.send, connection.pid)
        if said not in (None, node.index):
            why = f"rank {rank} says that it is on node {said}, where others are on node {node.index}"
            self._gap("clocks", f"{why}: {_SET_NODE_RANK}")

    def _in_windows(self) -> list[tuple[_Connection, _Rank]]:
        """Those who may record deep windows and tell their stacks: the ranks of one world, see `_hear`."""
        return [(c, c.rank) for c in self._connections if c.rank and c.rank.world == self._windows_of]

    def _hear(self, rank: _Rank, message: messages.Step | messages.Slow | messages.Window | messages.Stacks) -> None:
        """Windows are of the world that steps first: of a job's trainers, not of what generates for them."""
        if rank.world != self._windows_of:
            if self._windows.step_ns:
                return
            self._windows.forget()
            self._windows_of = rank.world
            for connection, member in self._in_windows():
                self._windows.join(member.rank, connection.send, connection.pid)
        self._windows.hear(rank.rank, message)

    def _say_bye(self, connection: _Connection, rank: _Rank, dropped: int) -> None:
        connection.report["bye"] = True
        if dropped:
            rank.tables.gap("*", "messages of the rank (names, groups, gaps) that could not be sent", count=dropped)
        self._end(connection)

    def _wait_for(self, pid: int, pidfd: int) -> None:
        """The agent does not end before this process, `rankscope exec` or what it has become, which may start ranks."""

        def gone() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._callers.discard(pid)
            if self._last_rank_ns is not None:
                self._last_rank_ns = clock()

        self._callers.add(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, gone)

    def _end(self, connection: _Connection, why: str = "") -> None:
        """The connection is closed; what its rank left is read to the end and sealed."""
        self._connections.discard(connection)
        self._selector.unregister(connection.channel)
        connection.channel.close()
        if connection.pidfd >= 0:
            self._selector.unregister(connection.pidfd)
            if connection.rank is None and not self._until_stdin_closes and connection.pid not in self._callers:
                self._wait_for(connection.pid, connection.pidfd)
            else:
                os.close(connection.pidfd)
        if connection.bad > TOLD_BAD:
            why = f"further messages of process {connection.pid} that were not understood"
            self._gap("*", why, count=connection.bad - TOLD_BAD)
        rank = connection.rank
        if rank is None:
            return
        if rank.world == self._windows_of:
            self._windows.leave(rank.rank)
        rank.read(last=True)
        if connection.flight:
            connection.flight.finish()
            rank.take_flight(connection.flight)
        if not connection.report["bye"]:
            killed = "it ended without a goodbye (killed or crashed); nothing after that was recorded"
            rank.tables.gap("*", why or killed, start_ns=clock())
        rank.flush()
        rank.tables.close()
        connection.report |= {"ended": True, "end_ns": clock()}
        self._state_changed = True
        self._last_rank_ns = clock()
        self._tell_pids()
        if self._pinger:
            self._pinger.ping_now()  # node 0's agent may be gone soon

    # ---- the node

    def _begin(self, said: int | None) -> _NodeTables:
        """The node has a number, with the first rank that says hello: what a launcher said to it, else 0 at first."""
        if self._node is None:
            if self._run.gone:  # nothing was in it yet
                self._run.reserve()
            self._node = _NodeTables(self._run, said or 0)
            self._retention.watch(self._node.tables)
            self._state["node"] = self._node.index
        elif said is not None and not self._node_said and self._pinger is None:
            self._renumber(self._node, said)
        self._node_said |= said is not None
        return self._node

    def _renumber(self, node: _NodeTables, index: int) -> None:
        """All that the node has written is of node `index`; readers take a rank's node from its entry in the JSON."""
        key = f"node={index:05d}"
        if index == node.index or os.path.exists(
            self._file_of(index, self._run.path)
        ):  # of a node that has joined this run
            return
        try:
            self._run.rename(node.tables.key, key)
        except OSError as error:
            self._gap("*", f"the node's files could not be renamed to {key}: {error}")
            return
        node.index, node.tables.key, self._state["node"] = index, key, index
        self._write_state()

    def _tell_pids(self) -> None:
        ranks = [(c.rank.device, c.pid, c.tid or c.pid) for c in self._connections if c.rank]
        self._sampler.node.pids = {device: pid for device, pid, _ in ranks}
        self._sampler.node.main_tids = {device: tid for device, _, tid in ranks}

    def _take_samples(self, node: _NodeTables) -> None:
        if self._sampler.topology and "topology" not in self._state:
            self._state["topology"] = self._sampler.topology
            self._state_changed = True
        while not self._sampler.readings.empty():
            node.add_samples(*self._sampler.readings.get())
        self._sampler.tell_hanging()
        while not self._sampler.gaps.empty():
            source, why, time_ns = self._sampler.gaps.get()
            node.tables.gap("counters", why, source=source, start_ns=time_ns)

    def _take_ras(self, node: _NodeTables) -> None:
        """Where the job hangs NCCL's RAS is asked, by the agent of a rank 0: it speaks for all processes."""
        ranks = [c.rank for c in self._connections if c.rank]
        heard = [rank.heard_ns for rank in ranks if rank.heard_ns]
        if any(rank.rank == 0 for rank in ranks) and self._uses_nccl and heard:
            self._ras.look(max(heard), self._windows.step_ns)
        while not self._ras.answers.empty():
            time_ns, answer, rows = self._ras.answers.get()
            with contextlib.suppress(OSError):
                (self._run.path / "run" / "ras.txt").write_text(answer)
            if rows:
                columns: dict[str, list[object]] = {name: [row[name] for row in rows] for name in rows[0]}
                node.tables.add("ras", columns | {"time_ns": [time_ns] * len(rows)})
        while not self._ras.gaps.empty():
            node.tables.gap("ras", self._ras.gaps.get(), source="ras", start_ns=clock())

    def _gap_of_rank(self, rank: int, why: str) -> None:
        for _, member in self._in_windows():
            if member.rank == rank:
                member.tables.gap("windows", why, source="window", start_ns=clock())
                return
        self._gap("windows", why)

    def _add_window(self, rank: int, row: Mapping[str, Any]) -> None:
        """Raises ValueError or TypeError if it is no row of `windows`."""
        for _, member in self._in_windows():
            if member.rank == rank:
                member.tables.add_row("windows", row)

    def _gap(self, table: str, why: str, count: int | None = None) -> None:
        if self._node:
            self._node.tables.gap(table, why, start_ns=clock(), count=count)

    # ---- the other nodes

    def _meet(self, rank: _Rank, message: messages.Peer) -> None:
        """The run lies in the folder of the name that rank 0's node gave it, mostly node 0, whose agent is pinged.

        Where both have the same number, since no launcher said one, that of the first rank here is this node's.
        """
        name, peer, agent = message.name, message.node, message.agent
        host, port = message.host, message.port
        if self._node is None or agent == self._id or self._pinger:
            return  # after an elastic restart it may be told of another node 0; ours is the first
        index = self._node.index
        if index == peer:
            index = min(c.rank.rank for c in self._connections if c.rank and c.rank.world == rank.world)
        here, there = self._run.path, self._run.path.parent / name

        def taken(index: int) -> bool:
            is_ours = index == self._state["node"]
            files = (self._file_of(index, run) for run in {here, there} if not (is_ours and run == here))
            return any(map(os.path.exists, files))

        if here != there and not _is_run_of(there, agent):
            self._gap(
                "*", f"this node's files stay in {here.name}: {name}, as node 0 calls the run, is another run here"
            )
            name = here.name

        while index == peer or taken(index):
            index += 1
        if index != self._node.index:
            if self._node_said:
                why = f"another node than this one is node {self._node.index} too, so this is node {index}"
                self._gap("clocks", f"{why}: {_SET_NODE_RANK}")
            self._renumber(self._node, index)
            if self._node.index != index:
                return  # that node's files must not be written over
        self._state["peer"] = agent
        try:
            self._run.move(name)
        except OSError as error:
            self._gap("*", f"this node's files stay in {self._run.path.name}, node 0's are in {name}: {error}")
        self._state_changed = True
        if port:
            self._peer = peer
            alike = sum(c.rank is not None and c.rank.world == rank.world for c in self._connections)
            self._pinger = clock_ping.Pinger(host, port, nodes=rank.world_size // alike)
            self._pinger.start()

    def _number_alone(self, node: _NodeTables) -> None:
        """Where rank 0's node was not met, since it records nothing, this one has the number of its lowest rank."""
        if node.index or self._node_said or self._pinger or clock() - node.since_ns < MEET_NS:
            return
        here: dict[tuple[str | None, int], list[int]] = {}
        for report in self._reports:
            here.setdefault((report["world"], report["world_size"]), []).append(report["rank"])
        lowest = [min(ranks) for (_, size), ranks in here.items() if len(set(ranks)) < size and min(ranks)]
        if lowest:
            self._renumber(node, lowest[0])

    def _take_pings(self, node: _NodeTables, *, ending: bool = False) -> None:
        pinger = self._pinger
        if pinger is None:
            return
        while pinger.exchanges:
            node.add_exchange(self._peer, pinger.exchanges.popleft())
        lasting = pinger.failures >= PING_FAILURES or (ending and not pinger.succeeded)
        if lasting and not self._ping_trouble_told:
            self._ping_trouble_told = True
            self._gap(
                "clocks", f"node {self._peer}'s agent does not answer pings at {pinger.why}; is a firewall between?"
            )

    # ---- the end

    def _close(self) -> None:
        if self._run.gone:
            return
        for connection in list(self._connections):
            self._receive(connection)
            if connection in self._connections:
                self._end(connection, "the agent was asked to end while the rank was still running")
        if self._node is None:
            self._begin(None)
            self._gap("*", NO_RANK)
        self._windows.close()
        if self._node:
            self._close_node(self._node)
        self._run.close()
        self._state |= {"state": "closed", "closed_ns": clock(), "closed_unix_ns": time.time_ns()}
        self._write_state()

    def _close_node(self, node: _NodeTables) -> None:
        self._sampler.finish()
        if self._pinger:
            self._pinger.finish()
        self._ras.finish()
        self._take_samples(node)
        self._take_pings(node, ending=True)
        self._take_ras(node)
        node.add_exchange(NO_PEER, clock_ping.unix_anchor())
        node.tables.close()

    def _write_state(self) -> None:
        """`run/node=….json` says how things stand; on a full disk it stays as it was."""
        self._state["name"] = self._run.path.name
        path = self._file_of(self._state["node"], self._run.path)
        unfinished = path.with_name(f".{path.name}.new")
        try:
            unfinished.write_text(json.dumps(self._state, indent=1))
            os.replace(unfinished, path)
            self._state_changed = False
            self._told_since_ns = self._state.get("kept_since_ns")
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()

    @staticmethod
    def _file_of(node: int, run: Path) -> Path:
        return run / "run" / f"node={node:05d}.json"

    # ---- the process

    def _watch_stdin(self) -> None:
        try:
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_stdin)
        except (OSError, ValueError):  # a file, or nothing: there is no launcher to wait for
            self._stdin_open = False

    def _read_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self._selector.unregister(sys.stdin.fileno())
            self._stdin_open = False

    def _watch_signals(self) -> None:
        def terminate(_number: int, _frame: FrameType | None) -> None:
            self._terminated = True

        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


class _WithoutPandas:
    """pyarrow imports pandas where it is installed, for nearly a second and 50 MB, only to ask it about types."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        if name == "pandas":
            raise ImportError("the agent works without pandas")


def _is_run_of(folder: Path, agent: str) -> bool:
    """Whether this agent of node 0, or one that has met it, writes there, or nobody yet."""
    said = []
    for path in folder.glob("run/node=*.json"):
        with contextlib.suppress(OSError, ValueError):
            said.append(json.loads(path.read_bytes()))
    return not said or any(agent in (state.get("agent"), state.get("peer")) for state in said)


def _own_addresses() -> set[str]:
    """All of this node's IPv4 and IPv6 addresses, without zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return {entry.address.partition("%")[0] for each in interfaces for entry in each if entry.family in families}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "pyarrow": pa.__version__, "kernel": platform.release()}
    with contextlib.suppress(PackageNotFoundError):  # run from a bare folder
        versions["rankscope"] = version("rankscope")
    return versions


def _bind(name: str) -> socket.socket | None:
    """The abstract socket of the node's agent, which nobody can connect to yet, or None if another agent has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankscope.collectors.agent.loop", description=__doc__)
    parser.add_argument("--socket", required=True, help="name of the abstract socket, without the leading NUL")
    parser.add_argument("--out", required=True, type=Path, help="folder of the run")
    parser.add_argument("--hz", type=float, default=1.0, help="readings of the node's counters per second")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="end when the launcher and the ranks are gone"
    )
    parser.add_argument("--profile-steps", type=json.loads, help="first and last step of a deep window, as JSON")
    parser.add_argument("--profile-slow", type=int, default=0, help="how many slow steps may open a deep window")
    parser.add_argument("--keep-bytes", type=int, help="what the node's files may take; 0: all are kept")
    parser.add_argument("--launch", type=json.loads, default={}, help="JSON object to keep with the run")
    arguments = parser.parse_args(argv)
    if not arguments.hz > 0:
        parser.error("--hz must be above 0")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Be the node's agent until the job is over; 0 as well if the node has one already, 1 if it cannot write."""
    arguments = _arguments(argv)
    sys.meta_path.insert(0, _WithoutPandas())
    pa.set_cpu_count(1)
    listener = _bind(arguments.socket)
    if listener is None:
        return 0
    try:
        agent = Agent(
            listener,
            arguments.out.absolute(),
            hz=arguments.hz,
            until_stdin_closes=arguments.until_stdin_closes,
            launch=arguments.launch,
            profile_steps=arguments.profile_steps,
            profile_slow=arguments.profile_slow,
            keep_bytes=arguments.keep_bytes,
        )
    except OSError as error:
        print(f"rankscope: nothing is recorded: cannot write to {arguments.out}: {error.strerror}", file=sys.stderr)
        return 1
    listener.listen(_BACKLOG)
    os.nice(NICE)
    _take_room(shares=not arguments.until_stdin_closes)
    print(json.dumps({"ready": True, "port": agent.port}), flush=True)
    _let_go_of_output()
    agent.run()
    return 0


def _take_room(*, shares: bool) -> None:
    """Descriptors for as many ranks as there may be; where the first rank has started it, not only its processor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if shares:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # schedulers send them to all of a job
        signal.signal(number, signal.SIG_IGN)


def _let_go_of_output() -> None:
    """Whoever reads the launcher's output to its end need not wait for the agent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
