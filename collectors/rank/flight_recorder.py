"""How long NCCL's operations took on the device: torch's Flight Recorder, with timing, for the agent to ask.

The rank opens torch's worker server on a unix socket that only its user can reach. Timing makes NCCL record two events
around each operation. With `CUDA_DEVICE_MAX_CONNECTIONS=1` that would keep communication from overlapping, so there it
stays as the job has set it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.collectors.flight import LAST, SOCKET, fetch

if TYPE_CHECKING:
    from rankscope.collectors.session import Emit

tables = ("flight_records",)

_server: Any = None
_folder: Path | None = None


def start(emit: Emit) -> None:
    """The server runs from the first tick on at which the job uses NCCL."""
    timed: set[str] = set()

    def tick() -> None:
        torch = sys.modules["torch"]
        if not torch.cuda.is_initialized() or "nccl" not in str(torch.distributed.get_backend_config()):
            return
        if _server is None:
            serve(emit)
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
            for group, name in list(sys.modules["torch.distributed.distributed_c10d"]._world.pg_names.items()):
                if name not in timed:
                    timed.add(name)
                    with contextlib.suppress(RuntimeError):  # a backend beside NCCL that has no timing
                        group._enable_collectives_timing()
        elif not timed:
            timed.add("")
            why = "CUDA_DEVICE_MAX_CONNECTIONS=1: timing would keep NCCL from overlapping, so there are no durations"
            emit.gap("flight_records", "flight_recorder", why)

    emit.on_tick(emit.guard("flight_recorder", tick))


def serve(emit: Emit) -> None:
    """Let the agent ask this process's Flight Recorder. Raises AttributeError where torch has no worker server."""
    global _server, _folder
    server = sys.modules["torch"]._C._distributed_c10d._WorkerServer
    _folder = Path(tempfile.mkdtemp(prefix="rankscope-"))
    _server = server(str(_folder / SOCKET))
    emit.send({"type": "flight_recorder", "folder": str(_folder)})


def stop() -> None:
    """What the recorder holds is left in the folder, and the server is gone."""
    global _server, _folder
    if _server is None or _folder is None:
        return
    (_folder / LAST).write_bytes(fetch(str(_folder / SOCKET)))
    _server.shutdown()
    _server = _folder = None
