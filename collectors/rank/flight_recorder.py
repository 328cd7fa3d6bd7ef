"""How long NCCL's operations took on the device: torch's Flight Recorder, with timing, for the agent to ask.

The rank opens torch's worker server on a unix socket that only its user can reach. Timing makes NCCL record two events
around each operation. With `CUDA_DEVICE_MAX_CONNECTIONS=1` that would keep communication from overlapping, so there it
stays as the job has set it.

Torch's first NCCL backend keeps a recorder of its own; others, which torch 2.15 takes unless `TORCH_DIST_USE_NCCL2=0`,
have one each by their name.
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

NCCL_RECORDER = "dump_nccl_trace_json"  # the worker server's handler for the recorder of torch's first NCCL backend
_server: Any = None
_folder: Path | None = None
_handler = ""


def start(emit: Emit) -> None:
    """The server runs from the first tick on at which the job uses NCCL."""
    seen: set[str] = set()
    is_timed = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"

    def tick() -> None:
        torch = sys.modules["torch"]
        if not torch.cuda.is_initialized() or "nccl" not in str(torch.distributed.get_backend_config()):
            return
        for group, name in list(sys.modules["torch.distributed.distributed_c10d"]._world.pg_names.items()):
            if name in seen:
                continue
            seen.add(name)
            handler = recorder_of(torch, group)
            if handler is None:
                continue
            if _server is None:
                serve(emit, handler)
                if not is_timed:
                    why = "timing would keep NCCL from overlapping, so there are no durations"
                    emit.gap("flight_records", "flight_recorder", f"CUDA_DEVICE_MAX_CONNECTIONS=1: {why}")
            elif handler != _handler:
                why = f"group {name} records into {handler}, and only {_handler} is read"
                emit.gap("flight_records", "flight_recorder", why)
            if is_timed:
                with contextlib.suppress(RuntimeError):  # a backend beside NCCL that has no timing
                    group._enable_collectives_timing()

    emit.on_tick(emit.guard("flight_recorder", tick))


def recorder_of(torch: Any, group: Any) -> str | None:  # noqa: ANN401
    """The worker server's handler for the recorder of this group's operations on CUDA; None if it has none there."""
    try:
        name = group._get_backend(torch.device("cuda")).name()
    except RuntimeError:
        return None
    has_others = hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
    return f"fr_trace_json?backend={name}" if has_others and name != "nccl" else NCCL_RECORDER


def serve(emit: Emit, handler: str) -> None:
    """Let the agent ask this process's Flight Recorder. Raises AttributeError where torch has no worker server."""
    global _server, _folder, _handler
    server = sys.modules["torch"]._C._distributed_c10d._WorkerServer
    _folder, _handler = Path(tempfile.mkdtemp(prefix="rankscope-")), handler
    _server = server(str(_folder / SOCKET))
    emit.send({"type": "flight_recorder", "folder": str(_folder), "handler": handler})


def stop() -> None:
    """What the recorder holds is left in the folder, and the server is gone."""
    global _server, _folder
    if _server is None or _folder is None:
        return
    (_folder / LAST).write_bytes(fetch(str(_folder / SOCKET), _handler))
    _server.shutdown()
    _server = _folder = None
