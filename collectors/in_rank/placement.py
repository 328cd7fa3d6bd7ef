"""The place of a rank: its world, its node, and rank 0's host, by the launcher's environment and the group's store."""

from __future__ import annotations

import contextlib
import os
import socket

from rankscope.collectors.untyped import Foreign

__all__ = ["address_towards", "host_of", "place", "world_of"]

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_WORLD_KEY = "rankscope/world"


def host_of(store: Foreign) -> str:
    """Return rank 0's host by the store, as after `init_process_group(init_method="tcp://…")`; else this host."""
    while inner := getattr(store, "underlying_store", None):
        store = inner
    return getattr(store, "host", "")


def address_towards(master: str) -> str | None:
    """Return the address of this node at which other nodes reach it, if rank 0 runs here.

    Empty where they may reach it at another one, as a host's name may be a loopback address on the host itself;
    None where the host is unknown.
    """
    if not master:
        return None
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # of a datagram: nothing is sent
                own = str(probe.getsockname()[0])
                is_reached = master in _LOOPBACK or not own.startswith(("127.", "::1"))
                return own if is_reached and "%" not in own else ""
    return ""


def world_of(store: Foreign) -> str | None:
    """Return the name of this job's world, which the first rank to ask decides. None where the store cannot.

    A job of several worlds (trainers, and engines that generate for them) has every rank several times.
    """
    with contextlib.suppress(Exception):  # FakeStore, or one of the script's own
        name: str = store.compare_set(_WORLD_KEY, "", os.urandom(4).hex()).decode()
        return name
    return None


def place(rank: int, world_size: int) -> tuple[int, int, int | None]:
    """Local rank, ranks on this node, and node, as torchrun, `rankscope exec`, Lightning or DeepSpeed say it.

    If the number of ranks on a node is unknown, all are on this one if they meet at its loopback address; else one.
    If the node's number is unknown, the agent numbers it when it meets another one.
    """

    def said(*names: str) -> int | None:
        values = (os.environ.get(name, "") for name in names)
        return next((int(value) for value in values if value.isdecimal()), None)

    local_world = said("LOCAL_WORLD_SIZE", "RANKSCOPE_LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    if local_world is None:
        local_world = world_size if os.environ.get("MASTER_ADDR") in _LOOPBACK else 1
    local_rank = said("LOCAL_RANK", "RANKSCOPE_LOCAL_RANK")
    node = said("GROUP_RANK", "RANKSCOPE_NODE", "NODE_RANK", "CROSS_RANK")
    return rank % local_world if local_rank is None else local_rank, local_world, node
