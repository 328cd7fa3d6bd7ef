"""The node's agent: one process per node that writes the records in the ranks' rings to files.

It outlives a rank that crashes or hangs, samples the collectors of `node/`, and relates the clocks of the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa

from rankscope.collectors.agent import clock_ping, messages
from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.agent.connections import BACKLOG, Connection, Connections
from rankscope.collectors.agent.deep_windows import Asked, Windows
from rankscope.collectors.agent.flight_recorder import FlightRecorder
from rankscope.collectors.agent.hook_builder import HookBuilder
from rankscope.collectors.agent.nccl_ras import Ras
from rankscope.collectors.agent.node_identity import SET_NODE_RANK, Peers, own_addresses
from rankscope.collectors.agent.node_sampler import Sampler
from rankscope.collectors.agent.node_tables import Node
from rankscope.collectors.agent.oom_kills import OomKills
from rankscope.collectors.agent.process import WithoutPandas, bind, let_go_of_output, take_room
from rankscope.collectors.agent.rank_exits import Exits
from rankscope.collectors.agent.rank_tables import RankTables
from rankscope.collectors.agent.retention import Retention, usual_bytes
from rankscope.collectors.agent.run_state import RunState, versions
from rankscope.collectors.agent.upload import LATE_S, UPLOAD_S, Upload, missed, remove_spool
from rankscope.collectors.schema import NO_PEER, SCHEMA_VERSION
from rankscope.collectors.switched_off import why_no_rank
from rankscope.errors import BadInput

__all__ = ["Agent", "Options", "main"]

LOOK_NS = 500_000_000  # whether a ring is filling; a rank that writes little is read once a second
BUSY_LOOK_NS = 200_000_000  # of ranks that write much
READ_NS = 1_000_000_000
WRITE_NS = 2_000_000_000
ANCHOR_NS = 10_000_000_000
RETAIN_NS = 5_000_000_000
LINGER_NS = 5_000_000_000  # after the last rank, where no launcher says when to end
GIVE_UP_NS = 600_000_000_000
NICE = 5

clock = time.perf_counter_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The agent's command line."""

    out: Path
    hz: float
    until_stdin_closes: bool
    launch: dict[str, Any]
    keep_bytes: int | None
    profile_first: int = 0
    profile_steps: tuple[int, int] | None = None
    profile_slow: int = 0
    upload: str | None = None


class Agent:
    """Serves the ranks of one node until the job is over; `run` returns when everything is on disk."""

    def __init__(self, listener: socket.socket, options: Options) -> None:
        """Set up the agent. Raises OSError when the run cannot be written."""
        self._run = RunFolder(options.out)
        self._run.reserve()
        self._until_stdin_closes = options.until_stdin_closes
        self._stdin_open = options.until_stdin_closes
        self._terminated = False
        self._is_closing = False
        self._started_ns = clock()
        self._due_ns = {"look": 0, "read": 0, "write": 0, "anchor": 0, "retain": 0}
        self._last_rank_ns: int | None = None
        self._callers: set[int] = set()  # processes that have asked whether there is an agent, and have not ended
        keep_bytes = usual_bytes(options.out) if options.keep_bytes is None else options.keep_bytes
        addresses = own_addresses()
        self._state = RunState(self._run, _said(options, addresses) | {"keep_bytes": keep_bytes})
        self._node = Node(self._run, self._state)
        self._peers = Peers(self._run, self._node, self._state)
        self._state.said["agent"] = self._peers.id
        self._sampler = Sampler(frozenset(addresses), options.hz)
        self._ras = Ras(os.environ)
        self._uses_nccl = "NCCL_RAS_ADDR" in os.environ
        self._hook_builder = HookBuilder(os.environ)
        self._upload = Upload(options.upload) if options.upload else None
        self._retention = Retention(keep_bytes, self._upload.has) if self._upload else Retention(keep_bytes)
        self._has_retention_gap = False
        asked = Asked(options.profile_first, options.profile_steps, options.profile_slow)
        self._windows = Windows(self._run, self._gap_of_rank, self._add_window, asked)
        self._windows_of: str | None = None  # the world whose ranks it knows
        self._selector = selectors.DefaultSelector()
        self._connections = Connections(self._selector, self._handle, self._end, self._gap_of_process)
        self._connections.listen(listener)
        self._exits = Exits(self._selector)
        if options.until_stdin_closes:
            self._watch_stdin()
        self._watch_signals()

    # ---- the loop

    def run(self) -> None:
        """Serve until the job is over; then all records are on disk, sealed, and the run's state is `closed`."""
        try:
            while not self._over():
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._work()
        except Exception as error:
            # A traceback here would not be seen; the run must say it itself, and keep what there is.
            self._begin(None)
            self._node.gap("*", f"the agent failed: {type(error).__name__}: {error}")
        self._close()

    def _over(self) -> bool:
        if self._terminated:
            return True
        if self._connections.ranks():
            return False
        if self._until_stdin_closes:
            return not self._stdin_open
        if self._callers:
            return False
        if self._last_rank_ns is None:
            return clock() - self._started_ns > GIVE_UP_NS
        return clock() - self._last_rank_ns > LINGER_NS

    def _pause_s(self) -> float:
        return max(0, self._due_ns["look"] - clock()) / 1e9

    def _is_due(self, task: str, every_ns: int) -> bool:
        now_ns = clock()
        if now_ns < self._due_ns[task]:
            return False
        self._due_ns[task] = now_ns - now_ns % every_ns + every_ns
        return True

    def _work(self) -> None:
        ranks = [rank for _, rank in self._connections.ranks()]
        if self._is_due("look", BUSY_LOOK_NS if any(rank.is_busy for rank in ranks) else LOOK_NS):
            for rank in ranks:
                if rank.is_filling:
                    rank.read()
        if not self._node.has_begun:
            return
        if self._is_due("anchor", ANCHOR_NS):
            self._node.add_exchange(NO_PEER, clock_ping.unix_anchor())
        if self._is_due("read", READ_NS):
            self._read()

    def _read(self) -> None:
        if self._run.gone:
            self._terminated = True
            return
        self._peers.number_alone()
        for _, rank in self._connections.ranks():
            rank.read()
            if rank.progress and self._gets_windows(rank):
                self._windows.advance(rank.rank, rank.progress)
        self._windows.work(self._node.index)
        if self._is_due("write", WRITE_NS):
            self._write()
        if self._is_due("retain", RETAIN_NS) and self._retention.decide():
            self._state.publish(kept_since_ns=self._retention.since_ns)
        if self._state.changed:
            self._state.write()
        self._retain()

    def _write(self) -> None:
        for connection, rank in self._connections.ranks():
            if connection.flight:
                rank.take_flight(connection.flight)
            rank.flush()
        self._take_samples()
        self._peers.take()
        self._take_ras()
        self._build_hook()
        self._node.tables.flush()
        self._send()

    def _send(self) -> None:
        """Upload files once their run is certain: rank 0 is here, or its node was met."""
        is_certain = self._peers.is_met or any(report["rank"] == 0 for report in self._state.ranks)
        if self._upload and is_certain:
            self._upload.look(self._run.path)

    def _retain(self) -> None:
        """Evict a little of the excess, once `kept_since_ns` is in the run's JSON."""
        if self._state.kept_since_ns != self._retention.since_ns:
            try:  # the disk is full
                self._run.spend_reserve()
                self._state.write()
            except OSError:
                return
        if self._state.kept_since_ns == self._retention.since_ns:
            try:
                self._retention.work()
            except (OSError, pa.ArrowInvalid) as error:
                if not self._has_retention_gap:
                    self._has_retention_gap = True
                    self._node.gap("*", f"some older records could not be removed, which is tried again: {error}")
        self._run.refill_reserve()

    # ---- the ranks

    def _handle(self, connection: Connection, message: messages.Message, fds: list[int]) -> None:
        rank = connection.rank
        if isinstance(message, messages.Hello):
            self._hello(connection, message, fds[0] if fds else -1)
        elif rank is None:
            raise BadInput("it came before the hello")
        elif isinstance(message, messages.Gpu):
            rank.name_device(message.name)
            if message.uuid is not None:
                self._windows.uses(rank.rank, message.uuid)
                connection.report["gpu_uuid"] = message.uuid
                self._state.changed = True
        elif isinstance(message, messages.TrainingThread):
            rank.train_on(message.thread)
            connection.tid = message.tid
            self._share_pids()
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
            lowest = min(other.rank for _, other in self._of_world(rank.world))
            nodes = rank.world_size // len(self._of_world(rank.world))
            self._peers.meet(message, lowest_rank=lowest, nodes=nodes)
        elif isinstance(message, messages.OfWindow):
            if self._gets_windows(rank):
                self._windows.hear(rank.rank, message)
        elif isinstance(message, messages.Raised):
            connection.raised = message
        elif isinstance(message, messages.Bye):
            self._say_bye(connection, rank, message.dropped)
        else:
            rank.add(message)
            self._uses_nccl |= isinstance(message, messages.Group) and "nccl" in message.backend

    def _hello(self, connection: Connection, hello: messages.Hello, ring_fd: int) -> None:
        if connection.rank:
            raise BadInput("it said hello before")
        node = self._node
        self._begin(hello.node)
        attempt = self._state.free_attempt(hello)
        try:
            connection.rank = RankTables(hello, ring_fd, hello.world, attempt, node.index, self._run)
        except (OSError, ValueError) as error:
            raise BadInput(f"the ring cannot be mapped: {error}") from None
        self._retention.watch(connection.rank.tables)
        known = {"name": self._run.path.name, "node": node.index, "agent": self._peers.id}
        known |= self._peers.listen(hello.listen) | {"runs": os.path.realpath(self._run.path.parent)}
        with contextlib.suppress(OSError):  # its end will be noticed with the next packet
            # before all that takes longer: the rank waits for it
            connection.channel.send(json.dumps(known).encode())
        connection.report = self._state.add_rank(hello, attempt)
        connection.oom_kills = OomKills(connection.pid)
        self._share_pids()
        self._sampler.start()
        self._windows.work(node.index)
        if hello.world == self._windows_of or not self._of_world(self._windows_of):
            self._windows_of = hello.world
            self._windows.join(hello.rank, connection.send, connection.pid, hello.world_size)
        if hello.node not in (None, node.index):
            why = f"rank {hello.rank} says that it is on node {hello.node}, where others are on node {node.index}"
            node.gap("clocks", f"{why}: {SET_NODE_RANK}")

    def _of_world(self, world: str | None) -> list[tuple[Connection, RankTables]]:
        """Return the ranks of one world. Deep windows and stacks are of the world `_windows_of`."""
        return [(connection, rank) for connection, rank in self._connections.ranks() if rank.world == world]

    def _gets_windows(self, rank: RankTables) -> bool:
        """Give windows to the world that steps first, trainers and not engines; return whether this rank is of it."""
        if rank.world != self._windows_of and not self._windows.step_ns:
            self._windows.forget()
            self._windows_of = rank.world
            for connection, member in self._of_world(rank.world):
                self._windows.join(member.rank, connection.send, connection.pid, member.world_size)
        return rank.world == self._windows_of

    def _say_bye(self, connection: Connection, rank: RankTables, dropped: int) -> None:
        connection.report["bye"] = True
        if dropped:
            rank.tables.gap("*", "messages of the rank (names, groups, gaps) that could not be sent", count=dropped)
        self._connections.end(connection)

    def _wait_for(self, pid: int, pidfd: int) -> None:
        """Keep the agent until this process ends: `rankscope exec` or its command, which may start ranks."""

        def gone() -> None:
            self._selector.unregister(pidfd)
            os.close(pidfd)
            self._callers.discard(pid)
            if self._last_rank_ns is not None:
                self._last_rank_ns = clock()

        self._callers.add(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, gone)

    def _end(self, connection: Connection) -> None:
        """Read the rest of the records of a process that has ended, if it was a rank."""
        rank = connection.rank
        if rank is None:
            if connection.pidfd >= 0 and not self._until_stdin_closes and connection.pid not in self._callers:
                self._wait_for(connection.pid, connection.pidfd)
            elif connection.pidfd >= 0:
                os.close(connection.pidfd)
            return
        if rank.world == self._windows_of:
            self._windows.leave(rank.rank)
        rank.read(last=True)
        if connection.flight:
            connection.flight.finish()
            rank.take_flight(connection.flight)
        if not connection.report["bye"]:
            killed = "it ended without a goodbye (killed or crashed); nothing after that was recorded"
            asked = "the agent was asked to end while the rank was still running"
            rank.tables.gap("*", asked if self._is_closing else killed, start_ns=clock())
        rank.flush()
        self._exits.expect(connection)
        connection.report |= {"ended": True, "end_ns": clock()}
        self._state.changed = True
        self._last_rank_ns = clock()
        self._share_pids()
        self._peers.ping_now()  # node 0's agent may be gone soon

    # ---- the node

    def _begin(self, said: int | None) -> None:
        """Give the node a number, with the first rank that says hello."""
        node = self._node
        if not node.has_begun:
            node.begin(said)
            self._retention.watch(node.tables)
        elif said is not None and not node.is_said and not self._peers.is_met:
            node.renumber(said)
        node.is_said |= said is not None

    def _share_pids(self) -> None:
        ranks = [(rank.device, c.pid, c.tid or c.pid) for c, rank in self._connections.ranks()]
        self._sampler.node.pids = {device: pid for device, pid, _ in ranks}
        self._sampler.node.main_tids = {device: tid for device, _, tid in ranks}

    def _take_samples(self) -> None:
        if self._sampler.topology and "topology" not in self._state.said:
            self._state.publish(topology=self._sampler.topology)
        readings = []
        while not self._sampler.readings.empty():
            readings.append(self._sampler.readings.get())
        self._node.add_samples(readings)
        self._sampler.report_hanging()
        while not self._sampler.gaps.empty():
            source, why, time_ns = self._sampler.gaps.get()
            self._node.tables.gap("counters", why, source=source, start_ns=time_ns)

    def _build_hook(self) -> None:
        """Build the collectives hook in C++ for the next job, if this one lasts and the node can spare it."""
        came = self._hook_builder.look(self._node.since_ns, self._state.said["versions"].get("torch", ""))
        if came is not None:
            self._state.publish(collectives_hook=came)

    def _take_ras(self) -> None:
        """Query NCCL's RAS if the job hangs, from the agent of rank 0: it answers for all processes."""
        ranks = [rank for _, rank in self._connections.ranks()]
        heard = [rank.heard_ns for rank in ranks if rank.heard_ns]
        if any(rank.rank == 0 for rank in ranks) and self._uses_nccl and heard:
            self._ras.look(max(heard), self._windows.step_ns)
        while not self._ras.answers.empty():
            time_ns, answer, rows = self._ras.answers.get()
            with contextlib.suppress(OSError):
                (self._run.path / "run" / "ras.txt").write_text(answer)
            if rows:
                columns: dict[str, list[object]] = {name: [row[name] for row in rows] for name in rows[0]}
                self._node.tables.add("ras", columns | {"time_ns": [time_ns] * len(rows)})
        while not self._ras.gaps.empty():
            self._node.gap("ras", self._ras.gaps.get(), source="ras")

    def _gap_of_rank(self, rank: int, why: str) -> None:
        for _, member in self._of_world(self._windows_of):
            if member.rank == rank:
                member.tables.gap("windows", why, source="window", start_ns=clock())
                return
        self._node.gap("windows", why)

    def _add_window(self, rank: int, row: Mapping[str, Any]) -> None:
        """Add a row of `windows`. Raises ValueError or TypeError if it is none."""
        for _, member in self._of_world(self._windows_of):
            if member.rank == rank:
                member.tables.add_row("windows", row)

    def _gap_of_process(self, why: str, count: int | None) -> None:
        self._node.gap("*", why, count=count)

    # ---- the end

    def _close(self) -> None:
        if self._run.gone:
            return
        for connection in self._connections:
            self._connections.receive(connection)
        self._is_closing = True
        for connection in self._connections:
            self._connections.end(connection)
        self._exits.finish()
        if not self._node.has_begun:
            self._begin(None)
            self._node.gap("ranks", why_no_rank(os.environ))
        self._windows.close()
        self._close_node()
        self._run.close()
        self._state.publish(state="closed", closed_ns=clock(), closed_unix_ns=time.time_ns())
        self._state.write()
        if self._upload:
            self._finish_upload(self._upload)

    def _finish_upload(self, upload: Upload) -> None:
        """Complete the upload; files that did not arrive stay here, with a row of `gaps`."""
        here = self._run.path
        came = upload.finish(here, UPLOAD_S)
        self._state.publish(upload=came)
        self._state.write()
        if came["missing"] != 0:
            late = Partition(self._run, self._node.tables.key)
            why = f"files have not arrived in object storage: {missed(came, here)}"
            late.gap("*", why, start_ns=clock())
            late.close()
            upload.finish(here, LATE_S)
        upload.close()
        if came["missing"] == 0 and not self._until_stdin_closes:  # it is not read here
            remove_spool(here)

    def _close_node(self) -> None:
        self._hook_builder.finish()
        self._sampler.finish()
        self._peers.finish()
        self._ras.finish()
        self._take_samples()
        self._peers.take(ending=True)
        self._take_ras()
        self._node.add_exchange(NO_PEER, clock_ping.unix_anchor())
        self._node.tables.close()

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


def _said(options: Options, addresses: set[str]) -> dict[str, Any]:
    """Return the initial fields of the run's JSON."""
    return {
        "schema_version": SCHEMA_VERSION,
        "state": "running",
        "hostname": socket.gethostname(),
        "addresses": sorted(a for a in addresses if not (a == "::1" or a.startswith("127."))),
        "start_ns": clock(),
        "start_unix_ns": time.time_ns(),
        "closed_unix_ns": None,
        "hz": options.hz,
        "launch": options.launch,
        "versions": versions(),
    }


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rankscope.collectors.agent.loop", description=__doc__)
    parser.add_argument("--socket", required=True, help="name of the abstract socket, without the leading NUL")
    parser.add_argument("--out", required=True, type=Path, help="folder of the run")
    parser.add_argument("--hz", type=float, default=1.0, help="readings of the node's counters per second")
    parser.add_argument(
        "--until-stdin-closes", action="store_true", help="end when the launcher and the ranks are gone"
    )
    parser.add_argument("--profile-first", type=int, default=0, help="steps of the window that GPU jobs begin with")
    parser.add_argument("--profile-steps", type=json.loads, help="first and last step of a profiled window, as JSON")
    parser.add_argument("--profile-slow", type=int, default=0, help="how many slow steps may open a profiled window")
    parser.add_argument("--keep-bytes", type=int, help="what the node's files may take; 0: all are kept")
    parser.add_argument("--upload", help="URL in object storage where the run goes")
    parser.add_argument("--launch", type=json.loads, default={}, help="JSON object to keep with the run")
    arguments = parser.parse_args(argv)
    if not arguments.hz > 0:
        parser.error("--hz must be above 0")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Be the node's agent until the job is over; 0 as well if the node has one already, 1 if it cannot write."""
    said = _arguments(argv)
    sys.meta_path.insert(0, WithoutPandas())
    pa.set_cpu_count(1)
    listener = bind(said.socket)
    if listener is None:
        return 0
    try:
        options = Options(
            out=said.out.absolute(),
            hz=said.hz,
            until_stdin_closes=said.until_stdin_closes,
            launch=said.launch,
            profile_first=said.profile_first,
            profile_steps=said.profile_steps,
            profile_slow=said.profile_slow,
            keep_bytes=said.keep_bytes,
            upload=said.upload,
        )
        agent = Agent(listener, options)
    except OSError as error:
        print(f"rankscope: nothing is recorded: cannot write to {said.out}: {error.strerror}", file=sys.stderr)
        return 1
    listener.listen(BACKLOG)
    os.nice(NICE)
    take_room(shares=not said.until_stdin_closes)
    print(json.dumps({"ready": True}), flush=True)
    let_go_of_output()
    agent.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
