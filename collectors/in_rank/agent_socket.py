"""The way to the node's agent, whose socket's name anybody on the node can know and take."""

from __future__ import annotations

import os
import socket
import struct

from rankscope.errors import NotRecorded

__all__ = ["connect", "peer_of"]

_CREDENTIALS = struct.Struct("3i")
_WAIT = struct.Struct("@ll")


def connect(name: str, wait_s: float) -> socket.socket:
    """Connect to the agent of this name, which must be this user's own.

    The kernel tells who listens, so that neither a name that another user took first nor one that was left by an agent
    that has died leads to someone else. While the agent's queue is full the kernel waits, at most `wait_s`.

    Raises:
        NotRecorded: another user listens there, to whom nothing may be sent.
        OSError: there is no agent, or it does not take this connection in time.
    """
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # Python's own timeout would make a full queue an error at once.
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _WAIT.pack(int(wait_s), 0))
        channel.connect(f"\0{name}")
        _, uid = peer_of(channel)
        if uid != os.geteuid():
            raise NotRecorded(f"the agent's socket {name} belongs to another user (uid {uid})")
        channel.settimeout(wait_s)
    except BaseException:
        channel.close()
        raise
    return channel


def peer_of(channel: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end, as the kernel noted them when it connected or listened."""
    pid, uid, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
