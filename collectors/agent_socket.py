"""Connect to the node's agent, whose socket's name any user of the node can know and take."""

from __future__ import annotations

import os
import socket
import struct

from rankscope.errors import NotRecorded

__all__ = ["Channel", "connect", "peer_of"]

_CREDENTIALS = struct.Struct("3i")
_WAIT = struct.Struct("@ll")


def connect(name: str, wait_s: float) -> socket.socket:
    """Connect to the agent of this name, which must be this user's own.

    The kernel names the listening user, so a name taken by another user, before the agent or after its death, is
    recognized. While the agent's queue is full the kernel waits, at most `wait_s`.

    Raises:
        NotRecorded: another user listens there, and must get no data.
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


class Channel:
    """The connection to the agent, while its descriptor is that: a script may close what it does not know.

    Under the same number there may be a file or connection of the script's then, which is not to be touched.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._identity = self._look()

    def __call__(self) -> socket.socket:
        """Return the socket. Raises OSError where it was closed."""
        if self._look() != self._identity:
            self._socket.detach()
            raise OSError("the script has closed the connection to the agent")
        return self._socket

    def _look(self) -> tuple[int, int]:
        status = os.fstat(self._socket.fileno())
        return status.st_dev, status.st_ino
