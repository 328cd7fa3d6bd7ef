"""Records when the device reaches the ends of the step's phases: one CUDA event per mark, without a profiler.

`device_waits` puts further ones around the waits for communication. `emit.mark` puts an event into the main thread's
current stream, which blocks no thread. A thread of its own polls every `PERIOD_S` which events the device reached.
The functions are the driver's, which every process that uses CUDA has loaded; CUDA is never initialised, no context
made, and a stream that is being captured gets no marks.

The device's clock is read by events of the thread's own, in an empty stream: such an anchor lies between two readings
of the host's clock. What is true of one anchor is true of the next, but for a drift of the clocks; and no mark is on
the device before the host has recorded it. An anchor's time is the middle of what all of that leaves open, and a mark's
lies between those of two anchors. So it also works where `CUDA_DEVICE_MAX_CONNECTIONS=1` makes anchors queue behind the
training, as long as the queue is empty now and then; else the error says so.

Not on AMD: there a look at an event from another thread breaks the capture of a graph (ROCm/hip issue 3876).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rankscope.collectors.rank import Collector
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

PERIOD_S = 0.5
EVENTS = 4096  # marks that are under way, or were seen since the last look
_LAST_S = 0.3  # an exiting rank waits no longer for its last marks
_DRIFT = 10_000  # clocks drift apart by less than one part in so many
_RESOLUTION_NS = 1_000  # of the time between two events, 0.5 µs each

# The driver's own numbers.
_NOT_READY = 600
_BLOCKING_SYNC, _NON_BLOCKING = 1, 1
_THREAD_LOCAL = 1  # captures in other threads are none of this thread's business

clock = time.perf_counter_ns

_current: _Marks | None = None


def start(emit: Emit) -> None:
    """Begin with the first mark after the job has made a CUDA context."""
    global _current
    _current = _Marks(emit)
    emit.mark = emit.guard("device_events", _current.mark)


def stop() -> None:
    global _current
    current, _current = _current, None
    if current is not None:
        current.close()


@dataclass(slots=True)
class _Anchor:
    """An event, and the times of the host's clock between which the device reached it."""

    event: int
    low_ns: int
    high_ns: int

    @property
    def middle_ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def error_ns(self) -> int:
        return (self.high_ns - self.low_ns + 1) // 2

    def narrow(self, low_ns: int, high_ns: int) -> None:
        """Intersect with these bounds, unless they contradict."""
        low_ns, high_ns = max(low_ns, self.low_ns), min(high_ns, self.high_ns)
        if low_ns <= high_ns:
            self.low_ns, self.high_ns = low_ns, high_ns


class _Driver:
    """The CUDA driver that this process has loaded. Raises RuntimeError where there is none, or a call fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            raise RuntimeError("CUDA is in use, but this process has no driver loaded (libcuda.so.1)") from None
        self.record = self._library.cuEventRecord  # for the training thread: nothing in between
        self.record.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._query = self._library.cuEventQuery
        self._query.argtypes = (ctypes.c_void_p,)
        self._elapsed = self._library.cuEventElapsedTime
        self._elapsed.argtypes = (ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)

    def call(self, function: str, *arguments: Foreign) -> None:
        self.check(function, self._library[function](*arguments))

    def made(self, function: str, kind: Foreign, *arguments: Foreign) -> Foreign:
        """Return the value that the function writes to its first argument."""
        value = kind()
        self.call(function, ctypes.byref(value), *arguments)
        return value.value

    def check(self, function: str, error: int) -> None:
        if error:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(error, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'').decode() or 'error'} ({error})")

    def between(self, first: int, second: int) -> int | None:
        """Nanoseconds on the device from one completed event to another; None: the device has not reached it."""
        error = self._query(second)
        if error == _NOT_READY:
            return None
        self.check("cuEventQuery", error)
        milliseconds = ctypes.c_float()
        self.check("cuEventElapsedTime", self._elapsed(ctypes.byref(milliseconds), first, second))
        return round(milliseconds.value * 1e6)


class _Marks:
    """The marks of one device. `mark` is called on the training's threads, `_work` has a thread of its own."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._torch = sys.modules["torch"]
        self._thread: threading.Thread | None = None
        self._ready = False
        self._stopping = threading.Event()
        self._context: int
        self._device: int
        self._stream: int  # of the anchors
        self.compute_stream: int  # the main thread's, at its last mark
        self._free: list[int] = []
        self._under_way: deque[tuple[int, int, int]] = deque()  # event, when it was recorded, what it marks
        self._elsewhere: set[int] = set()
        self._lost = self._reported = 0

    @cached_property
    def _driver(self) -> _Driver:
        return _Driver()

    # ---- on the training's threads

    def mark(self, mark: int) -> None:
        """Put a mark into the main thread's current stream, where that can be done without touching the job."""
        if threading.get_ident() != self._emit.training_thread:
            return
        if not self._ready:
            if self._thread is None:
                self._begin()
            return
        device = self._get_device()
        if device != self._device:
            self._report_elsewhere(device, f"only marks of device {self._device}, the first one used, are kept")
            return
        if self._is_capturing():
            return
        self.compute_stream = self._get_stream(device)
        if not self.put(mark):
            self._lost += 1
        self._emit.has_marks(self)

    def put(self, mark: int, spare: int = 0) -> bool:
        """Put a mark into the compute stream, from any thread, if more than `spare` events are free."""
        if len(self._free) <= spare:
            return False
        try:
            event = self._free.pop()
        except IndexError:  # another thread took the last
            return False
        recorded_ns = clock()
        error = self._record(event, self.compute_stream)
        if error:
            self._driver.check("cuEventRecord", error)
        self._under_way.append((event, recorded_ns, mark))
        return True

    def note(self, mark: int, at_ns: int) -> None:
        """Write a mark of the host alone."""
        self._write(mark, at_ns, 0, -1)

    def current_stream(self) -> int | None:
        """Return the current stream of this thread; None on another device, and while it is captured."""
        if self._get_device() != self._device or self._is_capturing():
            return None
        return self._get_stream(self._device)

    def _begin(self) -> None:
        """Start the thread, once the main thread has a context on the device that torch takes for the current one."""
        if self._emit.device is None or not self._torch.cuda.is_initialized():
            return
        if self._torch.version.hip:
            why = "no marks on AMD: there a look at an event from another thread breaks the capture of graphs"
            self._emit.gap("device_marks", "device_events", why)
            self.close()
            return
        self._context = self._driver.made("cuCtxGetCurrent", ctypes.c_void_p)
        if not self._context:
            return
        self._device = self._driver.made("cuCtxGetDevice", ctypes.c_int)
        module = self._torch._C
        self._get_device: Callable[[], int] = module._cuda_getDevice
        if not self._device == self._get_device() == self._emit.device:
            self._report_elsewhere(self._emit.device, "no marks there without torch.cuda.set_device")
            return
        self._get_stream: Callable[[int], int] = module._cuda_getCurrentRawStream
        self._is_capturing: Callable[[], bool] = module._cuda_isCurrentStreamCapturing
        self._record = self._driver.record
        work = self._emit.guard("device_events", self._work)
        self._thread = threading.Thread(target=work, name="rankscope-device", daemon=True)
        self._thread.start()

    def _report_elsewhere(self, device: int, what: str) -> None:
        if device not in self._elsewhere:
            self._elsewhere.add(device)
            self._emit.gap("device_marks", "device_events", f"the main thread computes on device {device}: {what}")

    def close(self) -> None:
        """Stop putting marks; those that the device has not reached are written as such."""
        self._emit.mark = lambda _: None
        self._emit.mark_waits(None, None)
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _LAST_S)
        while self._under_way:
            _, recorded_ns, mark = self._under_way.popleft()
            self._write(mark, recorded_ns, 0, -1)
        self._report_lost()

    # ---- on a thread of its own

    def _work(self) -> None:
        driver = self._driver
        driver.call("cuCtxSetCurrent", ctypes.c_void_p(self._context))
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))
        self._stream = driver.made("cuStreamCreate", ctypes.c_void_p, _NON_BLOCKING)
        spare, anchor = self._new_event(_BLOCKING_SYNC), self._anchor(self._new_event(_BLOCKING_SYNC))
        self._free += [self._new_event(0) for _ in range(EVENTS)]
        self._ready = True
        while not self._stopping.wait(PERIOD_S):
            spare, anchor = anchor.event, self._look(anchor, spare)
            if self._lost > 2 * self._reported:  # few rows, however long it goes on
                self._report_lost()
        deadline = clock() + int(_LAST_S * 1e9)
        while self._under_way and clock() < deadline:
            spare, anchor = anchor.event, self._look(anchor, spare)
            time.sleep(0.005)

    def _new_event(self, flags: int) -> int:
        event: int = self._driver.made("cuEventCreate", ctypes.c_void_p, flags)
        return event

    def _anchor(self, event: int) -> _Anchor:
        low_ns = clock()
        self._driver.call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(self._stream))
        self._driver.call("cuEventSynchronize", ctypes.c_void_p(event))
        return _Anchor(event, low_ns, clock())

    def _look(self, base: _Anchor, spare: int) -> _Anchor:
        """Write the marks that the device reached since `base`; return the next anchor."""
        driver, under_way = self._driver, self._under_way
        after = self._anchor(spare)
        span = driver.between(base.event, after.event)
        assert span is not None
        seen = []
        while under_way:
            event, recorded_ns, mark = under_way[0]
            since = driver.between(base.event, event)
            if since is None or since > span:
                break  # a stream comes to its marks in order
            under_way.popleft()
            seen.append((recorded_ns, since, mark))
            self._free.append(event)

        slack = span // _DRIFT + _RESOLUTION_NS
        earliest = max((recorded_ns - since - slack for recorded_ns, since, _ in seen), default=base.low_ns)
        base.narrow(max(earliest, after.low_ns - span - slack), after.high_ns - span + slack)
        after.narrow(base.low_ns + span - slack, base.high_ns + span + slack)
        rate = (after.middle_ns - base.middle_ns) / max(span, 1)
        error = max(base.error_ns, after.error_ns) + _RESOLUTION_NS + span // 1_000_000
        for recorded_ns, since, mark in seen:
            device_ns = max(base.middle_ns + round(since * rate), recorded_ns)
            self._write(mark, recorded_ns, device_ns, error)
        return after

    def _write(self, mark: int, recorded_ns: int, device_ns: int, error_ns: int) -> None:
        self._emit.ring.mark(mark, self._device, recorded_ns, device_ns, error_ns)

    def _report_lost(self) -> None:
        lost, self._reported = self._lost - self._reported, self._lost
        if lost:
            why = f"the device had not come to {EVENTS} marks, and there is no place for more"
            self._emit.gap("device_marks", "device_events", why, count=lost)


collector = Collector(tables=("device_marks",), start=start, stop=stop, needs_gpu=True)
