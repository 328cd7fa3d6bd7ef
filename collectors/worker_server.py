"""torch's worker server in a rank that uses NCCL, asked over its unix socket: a C++ thread answers, without the GIL.

Source: `torch/csrc/distributed/c10d/control_plane`.
"""

from __future__ import annotations

import http.client
import socket

__all__ = ["GATE", "LAST", "SOCKET", "TIMEOUT_S", "fetch"]

# In the rank's folder: torch's socket, what the rank leaves behind, and the file that is locked during a query, or
# while the rank captures a CUDA graph: an answer looks at events, which breaks a capture under way in another thread.
SOCKET, LAST, GATE = "rank", "last.json", "gate"
TIMEOUT_S = 10.0


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def fetch(path: str, handler: str) -> bytes:
    """Get this recorder's JSON from the worker server at the socket. Raises OSError, HTTPException or ValueError."""
    connection = _Connection(path)
    try:
        connection.request("POST", f"/handler/{handler}", headers={"Connection": "close"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ValueError(f"{handler} answered {response.status}")
    return body
