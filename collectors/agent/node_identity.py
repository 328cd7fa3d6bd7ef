"""The node's number, the folder of its files, and the offset of its clock from node 0's."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import psutil

from rankscope.collectors.agent import clock_ping
from rankscope.collectors.agent.arrow_writer import RunFolder
from rankscope.collectors.agent.messages import Peer
from rankscope.collectors.agent.node_tables import Node
from rankscope.collectors.agent.run_state import RunState, file_of, is_run_of

__all__ = ["SET_NODE_RANK", "Peers", "index_alone", "index_beside", "own_addresses"]

MEET_NS = 5_000_000_000  # after its first rank's hello another node should have been met
PING_FAILURES = 3  # in a row
SET_NODE_RANK = "set NODE_RANK on each node"

clock = time.perf_counter_ns


def own_addresses() -> set[str]:
    """All of this node's IPv4 and IPv6 addresses, without zone."""
    families = (socket.AF_INET, socket.AF_INET6)
    interfaces = psutil.net_if_addrs().values()
    return {entry.address.partition("%")[0] for each in interfaces for entry in each if entry.family in families}


def index_beside(index: int, peer: int, lowest_rank: int, taken: Callable[[int], bool]) -> int:
    """Give this node's number beside node `peer`.

    Where both have the same number, since no launcher set one, it is the lowest rank here or the next free number.
    """
    index = lowest_rank if index == peer else index
    while index == peer or taken(index):
        index += 1
    return index


def index_alone(ranks: Iterable[Mapping[str, Any]]) -> int | None:
    """Give the number of a node that meets no other but lacks ranks of a world: its lowest rank, if not 0."""
    here: dict[tuple[str | None, int], list[int]] = {}
    for report in ranks:
        here.setdefault((report["world"], report["world_size"]), []).append(report["rank"])
    lowest = [min(ranks) for (_, size), ranks in here.items() if len(set(ranks)) < size and min(ranks)]
    return lowest[0] if lowest else None


class Peers:
    """The agents of the other nodes: rank 0's says the run's name, and answers pings."""

    def __init__(self, run: RunFolder, node: Node, state: RunState) -> None:
        self.id = os.urandom(4).hex()  # the others know this agent by that
        self._run = run
        self._node = node
        self._state = state
        self._server: clock_ping.Server | None = None
        self._pinger: clock_ping.Pinger | None = None
        self._peer = 0  # the node that it pings
        self._has_ping_gap = False

    @property
    def is_met(self) -> bool:
        return self._pinger is not None

    def listen(self, host: str | None) -> dict[str, Any]:
        """Return the address and key by which other nodes ask for this one's time, for rank 0 to pass on."""
        if host is not None and self._server is None:
            try:
                self._server = clock_ping.Server(host)
            except OSError as error:
                self._node.gap("clocks", f"no pings are answered at {host or 'any address'}: {error}")
        if host is None or self._server is None:
            return {"host": "", "port": 0}
        return {"host": host, "port": self._server.port, "key": self._server.key}

    def meet(self, message: Peer, *, lowest_rank: int, nodes: int) -> None:
        """Move the run into the folder that rank 0's node named, mostly node 0, whose agent is pinged."""
        name, agent = message.name, message.agent
        if not self._node.has_begun or agent == self.id or self._pinger:
            return  # after an elastic restart there may be another node 0; ours is the first
        here, there = self._run.path, self._run.path.parent / name

        def taken(index: int) -> bool:
            is_ours = index == self._node.index
            files = (file_of(index, run) for run in {here, there} if not (is_ours and run == here))
            return any(map(os.path.exists, files))

        if here != there and not is_run_of(there, agent):
            why = f"this node's files stay in {here.name}: {name}, as node 0 calls the run, is another run here"
            self._node.gap("*", why)
            name = here.name
        index = index_beside(self._node.index, message.node, lowest_rank, taken)
        if index != self._node.index:
            if self._node.is_said:
                why = f"another node than this one is node {self._node.index} too, so this is node {index}"
                self._node.gap("clocks", f"{why}: {SET_NODE_RANK}")
            self._node.renumber(index)
            if self._node.index != index:
                return  # that node's files must not be written over
        self._state.publish(peer=agent)
        try:
            self._run.move(name)
        except OSError as error:
            self._node.gap("*", f"this node's files stay in {here.name}, node 0's are in {name}: {error}")
        if message.port:
            self._peer = message.node
            self._pinger = clock_ping.Pinger(message.host, message.port, message.key, nodes=nodes)
            self._pinger.start()

    def number_alone(self) -> None:
        """Give the node the number of its lowest rank, if rank 0's node was not met since it records nothing."""
        node = self._node
        if node.index or node.is_said or self._pinger or clock() - node.since_ns < MEET_NS:
            return
        index = index_alone(self._state.ranks)
        if index is not None:
            node.renumber(index)

    def take(self, *, ending: bool = False) -> None:
        """Add the answers of the pings to the node's rows, or a gap if there are none."""
        pinger = self._pinger
        if pinger is None:
            return
        while pinger.exchanges:
            self._node.add_exchange(self._peer, pinger.exchanges.popleft())
        lasting = pinger.failures >= PING_FAILURES or (ending and not pinger.succeeded)
        if lasting and not self._has_ping_gap:
            self._has_ping_gap = True
            why = f"node {self._peer}'s agent does not answer pings at {pinger.why}; is a firewall between?"
            self._node.gap("clocks", why)

    def ping_now(self) -> None:
        if self._pinger:
            self._pinger.ping_now()

    def finish(self) -> None:
        if self._pinger:
            self._pinger.finish()
