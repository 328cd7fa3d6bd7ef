"""The deep window: torch.profiler is on for a few steps that all chosen ranks agree on, when the agent asks for it.

The agent names the steps; each rank starts and stops at their ends, on the thread that trains, without waiting. It
stops at the first end of a step at which the device has done what the window's steps launched, so that the device has
work meanwhile. The trace is saved in a thread of its own, without Python's lock where the compiled hook is there, and
converted by the agent. A profiler of the script's own, or one that watches the process from outside, is left alone:
then there is no window. Also answers, from the session's thread, what the rank's Python threads are doing, for a rank
that waits.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.in_rank.thread_frames import UNSAFE, current_frames
from rankscope.collectors.rank import Collector
from rankscope.collectors.schema import WINDOW_STEP
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

# Set by tools that use the one way there is to see a device's work.
_WATCHED_BY = {
    "NSYS_PROFILING_SESSION_ID": "Nsight Systems",
    "CUDA_INJECTION64_PATH": "a tool injected into CUDA (Nsight Systems, Nsight Compute, …)",
    "HSA_TOOLS_LIB": "a ROCm profiler",
    "ROCP_TOOL_LIB": "a ROCm profiler",
    "ROCP_TOOL_LIBRARIES": "a ROCm profiler",
    "ROCPROFILER_REGISTER_TOOL_LIB": "a ROCm profiler",
}
_HISTORY, _ENOUGH = 50, 20  # steps
_SLOW_RATIO, _SLOW_MADS = 1.5, 10
_RENEWED = 10  # steps between two looks at what is usual
_RARE = 20  # an optimizer that runs less often than 1 in 20 of the most frequent one makes no steps
_SAVING_S = 10.0  # an exiting rank waits no longer for its trace
_DEVICE_S = 2.0  # nor for what its device still does
_MOST_LATER = 3  # steps after a window in which its profiler is on, for a device that is behind
_LONGEST_S, _LONGEST = 30.0, 20  # a window is open no longer than so many times its usual steps, 30 s at least
_MOST_FRAMES, _MOST_THREADS, _MOST_BYTES = 40, 64, 100_000

clock = time.perf_counter_ns

_current: _Windows | None = None


def start(emit: Emit) -> None:
    global _current
    _current = _Windows(emit)
    _current.watch_others()
    emit.on_message("window", emit.guard("window", _current.ask))
    emit.on_message("watch", emit.guard("window", _current.watch))
    emit.on_message("stacks", emit.guard("window", _current.stacks))
    emit.on_step(emit.guard("window", _current.step))
    emit.on_tick(emit.guard("window", _current.progress))


def stop() -> None:
    global _current
    current, _current = _current, None
    if current is not None:
        current.close()


class _Steps:
    """Counts the steps that have ended on this rank, as every rank of the job does.

    Once the script says `rankscope.step()`, that counts. Else a step has ended when every optimizer has run once more,
    but for those that run less than once in 20 times. What happens on other threads than the first does not count.
    Runs after one backward count once, as many as came after each so far: DeepSpeed's, by group of weights. More do
    count: a graph of CUDA's hides backwards.
    """

    def __init__(self) -> None:
        self.done = 0
        self._thread: int | None = None
        self._marked = False
        self._runs: dict[int, int] = {}  # by optimizer
        self._series: dict[int, tuple[int, int]] = {}  # by optimizer: after how many backwards, and its runs since
        self._shortest: dict[int, int] = {}

    def ended(self, optimizer: int | None, backwards: int) -> bool:
        """Say whether a step has ended now, after so many backwards."""
        if self._thread is None:
            self._thread = threading.get_ident()
        if self._thread != threading.get_ident():
            return False
        before = self.done
        if optimizer is None:
            if not self._marked:
                self._marked, before = True, 0
            self.done = before + 1
        elif not self._marked and not self._goes_on(optimizer, backwards):
            runs = self._runs
            runs[optimizer] = runs.get(optimizer, 0) + 1
            most = max(runs.values())
            self.done = min(count for count in runs.values() if count * _RARE >= most)
        return self.done > before

    def _goes_on(self, optimizer: int, backwards: int) -> bool:
        """Say whether this run belongs to the step that the optimizer's last one ended."""
        then, runs = self._series.get(optimizer, (backwards, 0))
        if then != backwards:
            self._shortest[optimizer] = min(runs, self._shortest.get(optimizer, runs))
            runs = 0
        self._series[optimizer] = backwards, runs + 1
        return 0 < runs < self._shortest.get(optimizer, 1)


class _Usual:
    """The usual length of steps, and which step is much longer."""

    def __init__(self) -> None:
        self.lengths: deque[int] = deque(maxlen=_HISTORY)
        self._limit_ns = 0.0
        self._looks = 0

    @property
    def median_ns(self) -> int:
        return int(statistics.median(self.lengths)) if self.lengths else 0

    def is_slow(self, length_ns: int) -> bool:
        """Say whether this step takes more than 1.5 × the median of the last 50 and 10 deviations (MAD) above it."""
        if len(self.lengths) < _ENOUGH:
            return False
        if self._looks % _RENEWED == 0:
            median = statistics.median(self.lengths)
            mad = statistics.median(abs(length - median) for length in self.lengths)
            self._limit_ns = max(_SLOW_RATIO * median, median + _SLOW_MADS * 1.4826 * mad)
        self._looks += 1
        return length_ns > self._limit_ns


class _Profile:
    """One recording of torch.profiler, with nothing read from it in Python. Used on one thread, but for `save`."""

    def __init__(self, device: int | None, native: Foreign) -> None:
        """`device` is the index of that which the training uses, if it uses one; `native` the hook in C++ or None."""
        self._index = device
        self._native = native
        self._profiler = sys.modules["torch.autograd.profiler"]
        torch = sys.modules["torch"]
        has_cuda = torch.profiler.ProfilerActivity.CUDA in torch.profiler.supported_activities()
        # Asking a CUDA that is not initialised would initialise it.
        self._device = "cuda" if has_cuda and torch.cuda.is_initialized() else None
        self._torch = torch
        self._kineto = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
        config = _without_events(torch)
        self._kineto.profiler = self._profiler.profile(
            use_device=self._device, use_kineto=True, experimental_config=config
        )
        # torch's own way to know this would import the compiler, for more than a second.
        inductor = sys.modules.get("torch._inductor.config")
        self._kineto.has_cudagraphs = inductor is not None and bool(inductor.triton.cudagraphs)
        self._span: Any = None
        self._end: Any = None  # an event behind the last step's work
        self._result: Any = None
        self.marks: list[tuple[int, int, int]] = []  # step, and between which times its span began

    def prepare(self) -> None:
        self._kineto.profiler._prepare_trace()

    def start(self) -> None:
        self._kineto.start_trace()

    def next_step(self, step: int) -> None:
        """Begin the span of a step, where another one ended; its begin relates the clocks.

        It is not called as torch's are: a profiler of the script's own that waits for its turn makes those meanwhile.
        """
        self.end_step()
        before = clock()
        self._span = self._torch.ops.profiler._record_function_enter_new(f"{WINDOW_STEP}{step}")
        self.marks.append((step, before, clock()))

    def end_step(self) -> None:
        if self._span is not None:
            self._torch.ops.profiler._record_function_exit._RecordFunction(self._span)
            self._span = None

    def has_done(self) -> bool:
        """Say whether the device has done what was launched in the steps, the last of which has ended."""
        self.end_step()
        if self._device and self._end is None:
            self._end = self._torch.cuda.Event()
            self._end.record(self._torch.cuda.current_stream(self._index))
        return self._end is None or bool(self._end.query())

    def device_ends(self) -> bool:
        """Say whether the device completes all enqueued work, within a while."""
        until_s = time.monotonic() + _DEVICE_S
        while not self.has_done():
            if time.monotonic() > until_s:
                return False
            time.sleep(0.005)
        return True

    def stop(self, *, at_exit: bool = False) -> None:
        if not at_exit and not self.has_done():  # at exit what another stream waits for may never come
            self._torch.cuda.synchronize(self._index)  # else what still runs is lost, as torch's own profiler has it
        self.end_step()
        self._result = self._native.Profile() if self._native else self._profiler._disable_profiler()
        self._profiler._run_on_profiler_stop()

    def save(self, path: str) -> None:
        """Save the trace to this file; takes 2 to 13 µs per event. Raises OSError."""
        unfinished = f"{path}.part"
        self._result.save(unfinished)  # does not report errors
        self._result = None
        if not os.path.isfile(unfinished):
            for rest in glob.glob(f"{glob.escape(unfinished)}*"):  # of a disk that is full now
                os.unlink(rest)
            raise OSError(f"torch wrote no {unfinished}")
        os.replace(unfinished, path)


def _without_events(torch: Foreign) -> Foreign:
    """Leave out the events in this process, which are not read: a fifth less to do at the end, as of torch 2.13."""
    try:
        return torch._C._profiler._ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


class _Windows:
    """This rank's windows, one at a time. All but `ask`, `watch` and `stacks` is called on the thread that trains."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._steps = _Steps()
        self._usual = _Usual()
        self._watching = False
        self._last_ns: int | None = None
        self._heard: deque[dict[str, Any]] = deque()
        self._asked: list[dict[str, Any]] = []  # by first step
        self._window: dict[str, Any] | None = None  # the one that is prepared or records
        self._profile: _Profile | None = None
        self._recording = False
        self._thread = 0  # that which prepared and records
        self._until_s = 0.0  # when the window is closed at the latest
        self._cuda = sys.modules["torch"].cuda
        self._row: dict[str, int] = {}
        self._own_call = False
        self._other_warms_up = False  # a profiler of the script's own, of which torch says nothing until it records
        self._give_back: list[Callable[[], None]] = []
        self._saving: threading.Thread | None = None
        self._why_closed = ""

    # ---- from the session's thread

    def ask(self, window: dict[str, Any]) -> None:
        """Take the agent's request for a window, or the path of its trace; the next end of a step handles it."""
        if self._why_closed:
            self._say(window, "refused", why=self._why_closed)
        else:
            self._heard.append(window)

    def watch(self, _: dict[str, Any]) -> None:
        self._watching = True

    def stacks(self, message: dict[str, Any]) -> None:
        """Send the agent the stack of each Python thread, the innermost call first."""
        if UNSAFE:
            return  # the agent asks py-spy
        own = threading.get_ident()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        # Without this call's own frame, which would hold the list that holds it, and with it all that others work on.
        others = [(ident, frame) for ident, frame in current_frames().items() if ident != own]
        frames = sorted(others, key=lambda item: item[0] != main)
        threads: list[dict[str, Any]] = []
        for ident, frame in frames[:_MOST_THREADS]:
            calls: list[str] = []
            at: FrameType | None = frame
            while at is not None and len(calls) < _MOST_FRAMES:
                if not at.f_code.co_filename.startswith("<frozen"):
                    calls.append(f"{at.f_code.co_filename}:{at.f_lineno} {at.f_code.co_name}")
                at = at.f_back
            threads.append({"name": names.get(ident, "?"), "calls": calls})
            if len(json.dumps(threads)) > _MOST_BYTES:
                del threads[-1]
                break
        self._emit.send({"type": "stacks", "id": message["id"], "step": self._steps.done, "threads": threads})

    # ---- from the thread that trains

    def progress(self) -> None:
        """Send the agent this rank's step, so that it can name a later one; close a window that takes too long."""
        if self._recording and time.monotonic() > self._until_s and self._may_act():
            self._finish("its steps took too long, and a profiler takes more memory the longer it is on")
        self._emit.ring.progress(self._steps.done, clock(), self._usual.median_ns)

    def step(self, end_ns: int, optimizer: int | None) -> None:
        """Begin, continue or end a window at the end of a step."""
        if self._why_closed or self._emit.in_backward or self._is_capturing():
            return  # torch's profiler can neither begin nor end within a backward or a capture of a CUDA graph
        if not self._steps.ended(optimizer, self._emit.backwards):
            return
        done = self._steps.done
        self._take_in()
        if self._window is not None and self._profile is not None:
            self._go_on(done)
        elif self._asked and done >= int(self._asked[0]["first"]) - 1:
            self._window = self._asked.pop(0)
            self._prepare(done)
        else:
            if self._last_ns is not None:
                if self._watching:
                    self._look_at(end_ns - self._last_ns)
                self._usual.lengths.append(end_ns - self._last_ns)
            self._last_ns = end_ns
            return
        self._last_ns = None  # what a window touches is not usual

    def _may_act(self) -> bool:
        """Whether a recording can be ended here: on the thread that began it, and not within a backward or capture."""
        return threading.get_ident() == self._thread and not self._emit.in_backward and not self._is_capturing()

    def _is_capturing(self) -> bool:
        """Whether a CUDA graph is captured here. To ask of a device that the training does not use makes a context."""
        device = self._emit.device
        return device is not None and device == self._cuda.current_device() and self._cuda.is_current_stream_capturing()

    def _take_in(self) -> None:
        """Add the agent's requests to the open ones, or change those."""
        while self._heard:
            heard = self._heard.popleft()
            if self._window is not None and self._window["id"] == heard["id"]:
                self._window["path"] = heard["path"]
                continue
            others = [asked for asked in self._asked if asked["id"] != heard["id"]]
            self._asked = sorted([*others, heard], key=lambda asked: int(asked["first"]))

    def _look_at(self, length_ns: int) -> None:
        """Report a step to the agent that is much longer than usual."""
        if self._usual.is_slow(length_ns):
            slow = {"step": self._steps.done - 1, "ns": length_ns, "usual_ns": self._usual.median_ns}
            self._emit.send({"type": "slow"} | slow)

    def _prepare(self, done: int) -> None:
        assert self._window is not None
        first = int(self._window["first"])
        if done > first:
            self._refuse(f"the request came when step {first} was over (now in step {done})")
            return
        other = self._other_profiler()
        if other:
            self._refuse(f"{other} is at work and is not disturbed")
            return
        start_ns = clock()
        self._thread = threading.get_ident()
        self._profile = _Profile(self._emit.device, self._emit.ring.native)
        self._ours(self._profile.prepare)
        self._row = {"start_ns": start_ns, "start_stall_ns": clock() - start_ns}
        if done == first:
            self._go_on(done)

    def _go_on(self, done: int) -> None:
        """Begin a step of the window, the first or another, or end the window."""
        assert self._window is not None
        assert self._profile is not None
        first, steps = int(self._window["first"]), int(self._window["steps"])
        if done < first:
            return
        if done >= first + steps:
            if self._profile.has_done() or done >= first + steps + _MOST_LATER:
                self._finish()
            return
        if not self._recording:
            self._recording = True
            self._until_s = time.monotonic() + max(_LONGEST_S, _LONGEST * steps * self._usual.median_ns / 1e9)
            begin_ns = clock()
            self._ours(self._profile.start)
            self._row["start_stall_ns"] += clock() - begin_ns
        self._profile.next_step(done)

    def _finish(self, why: str = "", *, at_exit: bool = False, stop: bool = True) -> None:
        """End the recording; save it, or discard it for this reason."""
        assert self._window is not None
        assert self._profile is not None
        window, profile = self._window, self._profile
        self._window, self._profile = None, None
        stop_ns = clock()
        if self._recording:
            self._recording = False
            if stop:
                profile.stop(at_exit=at_exit)
        end_ns = clock()
        row = self._row | {"end_ns": end_ns, "stop_stall_ns": end_ns - stop_ns}
        if why:
            self._emit.gap("windows", "window", f"window {window['id']}: {why}")
        self._say(window, "discarded" if why else "saving", why=why, row=row)
        if why:
            return
        if at_exit:  # when no thread can be started any more
            self._save(window, profile)
        else:
            save = self._emit.guard("window", self._save)
            self._saving = threading.Thread(target=save, args=(window, profile), name="rankscope-save", daemon=True)
            self._saving.start()

    def _save(self, window: dict[str, Any], profile: _Profile) -> None:
        path = str(window["path"])
        try:
            if not (self._emit.may_write(path) and self._emit.may_write(f"{path}.part")):
                raise OSError(f"{path} is not below the folder of the runs, or is a link")
            profile.save(path)
        except OSError as error:
            why = f"the trace could not be saved: {error}"
            self._emit.gap("windows", "window", f"window {window['id']}: {why}")
            self._say(window, "failed", why=why)
        else:
            self._say(window, "saved", marks=profile.marks)

    def _refuse(self, why: str) -> None:
        assert self._window is not None
        window, self._window = self._window, None
        self._emit.gap("windows", "window", f"window {window['id']} was not opened: {why}")
        self._say(window, "refused", why=why)

    def _say(self, window: dict[str, Any], state: str, **more: object) -> None:
        self._emit.send({"type": "window", "id": window["id"], "state": state} | more)

    def close(self) -> None:
        """End and save a recording as the rank ends, or the collector is off; refuse what was asked for."""
        try:
            if self._window is not None and self._recording:
                self._end()
            elif self._profile is not None and not self._emit.exiting and self._may_act():
                self._ours(self._profile.start)  # else the driver would go on to collect for it
                self._profile.stop(at_exit=True)
        finally:
            self._get_out_of_the_way()
            self._why_closed = "the collector 'window' was switched off" if self._emit.live else "the job ended before"
            self._take_in()
            if self._window is not None:
                self._refuse(self._why_closed)
            while self._asked:
                self._window = self._asked.pop(0)
                self._refuse(self._why_closed)
            if self._saving is not None:
                self._saving.join(_SAVING_S)

    def _end(self) -> None:
        """End a recording that is under way when the rank ends, or the collector is off."""
        assert self._profile is not None
        if not self._may_act():
            self._finish("it ended on another thread, or within a backward", stop=False)
        elif not self._emit.exiting:
            self._finish("the agent is gone, or the collector was switched off")
        elif not self._profile.device_ends():
            self._finish("the rank ended while its device was still at work", stop=False)
        else:
            self._finish(at_exit=True)

    # ---- other profilers

    def _other_profiler(self) -> str:
        """Return what else profiles this process, or would be disturbed; empty if none."""
        for variable, tool in _WATCHED_BY.items():
            if os.environ.get(variable):
                return f"{tool} ({variable} is set)"
        profiler = sys.modules["torch.autograd.profiler"]
        if profiler._is_profiler_enabled or sys.modules["torch"].autograd._profiler_enabled():
            return "a torch.profiler of the script's own"
        if self._other_warms_up:  # torch would end with SIGSEGV when it stops
            return "a torch.profiler of the script's own, which warms up,"
        return ""

    def _ours(self, call: Callable[[], None]) -> None:
        self._own_call = True
        try:
            call()
        finally:
            self._own_call = False

    def watch_others(self) -> None:
        """Stop for a profiler that the script prepares or starts while ours is on: torch refuses two at once."""
        profiler = sys.modules["torch.autograd.profiler"]
        for name, prepares in (("_prepare_profiler", True), ("_enable_profiler", False)):
            original = getattr(profiler, name)
            hears = self._emit.guard("window", functools.partial(self._hear_of_other, prepares=prepares))

            def wrapper(
                *args: Foreign,
                _original: Callable[..., Any] = original,
                _hears: Callable[[], None] = hears,
                **kwargs: Foreign,
            ) -> Foreign:
                _hears()
                return _original(*args, **kwargs)

            def undo(name: str = name, original: object = original, wrapper: object = wrapper) -> None:
                if getattr(profiler, name) is wrapper:
                    setattr(profiler, name, original)

            setattr(profiler, name, wrapper)
            self._give_back.append(undo)

    def _hear_of_other(self, *, prepares: bool) -> None:
        if not self._own_call:
            self._leave()
            self._other_warms_up = prepares

    def _leave(self) -> None:
        forked = not self._emit.live
        if self._window is not None and self._profile is not None and not forked:
            self._finish("the script started a profiler of its own, which was not disturbed")

    def _get_out_of_the_way(self) -> None:
        while self._give_back:
            self._give_back.pop()()


collector = Collector(tables=("windows",), start=start, stop=stop)
