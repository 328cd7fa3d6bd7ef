"""Records how long the device waits for communication: marks around each wait of the compute stream, no profiler.

A wait is `Work.wait`, `wait_tensor`, a collective that is not async (from torch 2.8 on it runs in the current stream),
`Event.wait` and what leads there (`Stream.wait_event`, `wait_stream`) for an event behind a collective in another
stream, as FSDP has them, and the end of DDP's backward. They have marks in the stream in which `device_events` put its
last mark: the compute stream. Other waits are those of communication's own streams, and delay nothing.

A second with more than `MOST` waits has all of the waits of some steps, and none of the others.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import DEVICE_MARKS
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

MOST = 2000  # waits a second
_SPARE = 1024  # events that are left to the marks of phases
_START, _END = DEVICE_MARKS.index("wait_start"), DEVICE_MARKS.index("wait_end")
_SEEN, _MISSED = DEVICE_MARKS.index("waits_seen"), DEVICE_MARKS.index("waits_missed")
_SECOND = 1_000_000_000

clock = time.perf_counter_ns

_undos: list[Callable[[], None]] = []


def start(emit: Emit) -> None:
    """Begin with the first mark that the device gets."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        why = "with CUDA_DEVICE_MAX_CONNECTIONS=1 the device's waits get no marks, which could delay communication"
        emit.gap("device_marks", "device_waits", why)
        return

    def begin(marks: Foreign) -> None:
        emit.has_marks = lambda _: None
        _put_in(emit, _Waits(marks), sys.modules["torch"])

    emit.has_marks = emit.guard("device_waits", begin)


def stop() -> None:
    while _undos:
        _undos.pop()()


def _put_in(emit: Emit, waits: _Waits, torch: Foreign) -> None:
    begins, ends = emit.guard("device_waits", waits.begins), emit.guard("device_waits", waits.ends)
    emit.mark_waits(begins, ends)
    _undos.append(lambda: emit.mark_waits(None, None))
    emit.on_step(emit.guard("device_waits", waits.stepped))
    event = torch.cuda.Event
    _undos.append(_around(torch._C._distributed_c10d.Work, "wait", lambda *_: begins(), ends))
    _undos.append(_around(event, "wait", emit.guard("device_waits", waits.begins_for), ends))
    _undos.append(emit.around("device_waits", event, "record", waits.recorded))
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def end_of_backward() -> None:
        if begins():
            queue(ends)

    def on_backward(roots: Foreign) -> None:
        """Register the first and the last callback at the end of this backward: DDP waits for buckets there."""
        if emit.in_microbatch:  # the schedule does its own communication
            return
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        root = next((root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad), None)
        if root is None or getattr(compiled, "compiled_autograd_enabled", False):
            waits.miss()
            return

        def first(_: object) -> None:
            handle.remove()
            queue(end_of_backward)

        handle = root.register_hook(emit.guard("device_waits", first))

    emit.on_backward = emit.guard("device_waits", on_backward)
    _undos.append(lambda: setattr(emit, "on_backward", lambda _: None))


def _around(owner: Foreign, name: str, begins: Callable[..., bool], ends: Callable[[], None]) -> Callable[[], None]:
    """Call `begins` with the arguments of `owner.name` before each call, and `ends` after it if that was true."""
    original = owner.__dict__[name]
    active = True

    @functools.wraps(original)
    def wrapper(*args: Foreign, **kwargs: Foreign) -> Foreign:
        waited = active and begins(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            if waited:
                ends()

    def undo() -> None:
        nonlocal active
        active = False
        if owner.__dict__.get(name) is wrapper:
            setattr(owner, name, original)

    setattr(owner, name, wrapper)
    return undo


class _Waits:
    """The waits of one compute stream, whichever of the job's threads makes them."""

    def __init__(self, marks: Foreign) -> None:
        self._marks = marks
        self._of_communication: set[int] = set()  # streams in which collectives run, or are waited for
        self._is_on, self._missed = True, True  # the first step's waits before now have no marks
        self._stride = self._step = 1
        self._waits, self._counted_ns = 0, clock()

    def miss(self) -> None:
        """Note that a wait of this step may have no marks."""
        self._missed = True

    def begins(self, stream: int | None = None) -> bool:
        """Say whether the stream (None: this thread's) is the compute stream, whose wait has got its first mark."""
        if stream is None:
            stream = self._marks.current_stream()
        if stream is None:
            self._missed = True
            return False
        if stream != self._marks.compute_stream:
            self._of_communication.add(stream)
            return False
        self._waits += 1
        if self._is_on and not self._marks.put(_START, _SPARE):
            self._missed = True
            return False
        return self._is_on

    def ends(self) -> None:
        """Put the wait's second mark."""
        if not self._marks.put(_END):
            self._missed = True

    def recorded(self, _start: int, _end: int, args: tuple[Any, ...], kwargs: dict[str, Any], _result: object) -> None:
        """Note on an event whether it stands behind communication."""
        stream = self._stream_of(*args, **kwargs)
        args[0]._rankscope_of_communication = stream in self._of_communication

    def begins_for(self, event: Foreign, stream: Foreign = None) -> bool:
        """Like `begins`, for a wait for an event."""
        if not getattr(event, "_rankscope_of_communication", False):
            return False
        return self.begins(self._stream_of(event, stream))

    def _stream_of(self, _event: object, stream: Foreign = None) -> int | None:
        current: int | None = self._marks.current_stream()  # None while it is captured
        return current if stream is None or current is None else int(stream.cuda_stream)

    def stepped(self, end_ns: int, _optimizer: int | None) -> None:
        """Say whether all waits since the last step have marks, and choose whether the next step's shall."""
        self._marks.note(_SEEN if self._is_on and not self._missed else _MISSED, end_ns)
        self._step += 1
        took_ns = end_ns - self._counted_ns
        if took_ns >= _SECOND:
            self._stride = max(1, -(-self._waits * _SECOND // (took_ns * MOST)))
            self._waits, self._counted_ns = 0, end_ns
        self._is_on, self._missed = self._step % self._stride == 0, False


collector = Collector(tables=("device_marks",), start=start, stop=stop, needs_gpu=True)
