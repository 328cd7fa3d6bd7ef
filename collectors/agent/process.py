"""The agent as a process: its socket, its limits, and its output."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket

__all__ = ["WithoutPandas", "bind", "let_go_of_output", "take_room"]


class WithoutPandas:
    """Keep pyarrow from importing pandas only to check types, which takes nearly a second and 50 MB."""

    def find_spec(self, name: str, _path: object, _target: object = None) -> None:
        if name == "pandas":
            raise ImportError("the agent works without pandas")


def bind(name: str) -> socket.socket | None:
    """Bind the node's abstract socket, which accepts no connections yet; None if another agent has it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def take_room(*, shares: bool) -> None:
    """Allow descriptors for the most ranks there may be; if the first rank started it, use all its processors."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if shares:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # schedulers send them to all of a job
        signal.signal(number, signal.SIG_IGN)


def let_go_of_output() -> None:
    """Let readers of the launcher's output reach its end without waiting for the agent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
