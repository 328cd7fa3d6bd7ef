"""Records how long NCCL's operations took on the device: torch's Flight Recorder, with timing, for the agent to query.

The rank opens torch's worker server on a unix socket that only its user can reach. Timing makes NCCL record two events
around each operation. With `CUDA_DEVICE_MAX_CONNECTIONS=1` that would keep communication from overlapping, so there it
stays as the job has set it.

Torch's first NCCL backend keeps a recorder of its own; others, which torch 2.15 takes unless `TORCH_DIST_USE_NCCL2=0`,
have one each by their name.

An answer looks at the events of what has not ended, from a thread of torch's. That would break the capture of a CUDA
graph under way in another thread, so there are no queries from `capture_begin` to `capture_end`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from rankscope.collectors.rank import Collector
from rankscope.collectors.untyped import Foreign
from rankscope.collectors.worker_server import GATE, LAST, SOCKET, fetch

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

NCCL_RECORDER = "dump_nccl_trace_json"  # the worker server's handler for the recorder of torch's first NCCL backend
_server: Any = None
_folder: Path | None = None
_handler = ""
_emit: Emit | None = None
_undos: list[Callable[[], None]] = []
_LONGEST_S = 2.0  # for an answer that is under way


def start(emit: Emit) -> None:
    """Run the server from the first tick on at which the job uses NCCL."""
    seen: WeakSet[Any] = WeakSet()  # groups; a name may be used again
    is_timed = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"

    def tick() -> None:
        torch = sys.modules["torch"]
        if not torch.distributed.is_initialized() or "nccl" not in str(torch.distributed.get_backend_config()):
            return
        for group, name in list(sys.modules["torch.distributed.distributed_c10d"]._world.pg_names.items()):
            if group in seen:
                continue
            seen.add(group)
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

    emit.on_tick(emit.guard("flight_recorder", tick), needs_cuda=True)
    cuda = sys.modules["torch"].cuda

    def begun(*_: object) -> None:
        if not cuda.is_current_stream_capturing():  # it was refused, and will not be ended
            _gate.open()

    graph = cuda.CUDAGraph
    _undos.append(emit.around("flight_recorder", graph, "capture_begin", begun, before=lambda _: _gate.shut()))
    _undos.append(emit.around("flight_recorder", graph, "capture_end", lambda *_: _gate.open()))


def recorder_of(torch: Foreign, group: Foreign) -> str | None:
    """Return the worker server's handler for the recorder of this group's operations on CUDA; None if it has none."""
    try:
        name = group._get_backend(torch.device("cuda")).name()
    except RuntimeError:
        return None
    has_others = hasattr(torch._C._distributed_c10d, "FlightRecorderHook")
    return f"fr_trace_json?backend={name}" if has_others and name != "nccl" else NCCL_RECORDER


def serve(emit: Emit, handler: str) -> None:
    """Let the agent ask this process's Flight Recorder. Raises AttributeError where torch has no worker server."""
    global _server, _folder, _handler, _emit
    server = sys.modules["torch"]._C._distributed_c10d._WorkerServer
    _folder, _handler = Path(tempfile.mkdtemp(prefix="rankscope-")), handler
    _emit = emit
    _gate.place(_folder / GATE)
    _server = server(str(_folder / SOCKET))
    emit.send({"type": "flight_recorder", "folder": str(_folder), "handler": handler})


def stop() -> None:
    """Write the recorder's content into the folder, and end the server."""
    global _server, _folder
    while _undos:
        _undos.pop()()
    server, folder, _server, _folder = _server, _folder, None, None
    if server is None or folder is None:
        return
    try:
        if _emit is not None and _emit.exiting:  # else the agent is gone, or this collector is off
            (folder / LAST).write_bytes(fetch(str(folder / SOCKET), _handler))
    finally:
        server.shutdown()


class _Gate:
    """A lock on a file: shared by queries, exclusive while graphs are captured."""

    def __init__(self) -> None:
        self._fd = -1
        self._captures = 0
        self._lock = threading.Lock()

    def place(self, path: Path) -> None:
        with self._lock:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if self._captures:
                fcntl.flock(self._fd, fcntl.LOCK_EX)  # the file is not known to others yet

    def shut(self) -> None:
        """Stop queries. An answer that is under way has ended, or has taken `_LONGEST_S`."""
        with self._lock:
            self._captures += 1
            if self._captures > 1 or self._fd < 0:
                return
            until_s = time.monotonic() + _LONGEST_S
            while time.monotonic() < until_s:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.0005)

    def open(self) -> None:
        with self._lock:
            self._captures = max(0, self._captures - 1)
            if not self._captures and self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


_gate = _Gate()


collector = Collector(tables=("flight_records",), start=start, stop=stop, needs_gpu=True)
