"""Exceptions of the script's signal handlers that are raised while a hook runs: they must reach the training.

Python runs a signal's handler between two steps of the main thread, which may be in a hook. What the handler raises
passes through the hook. Where C calls the hook and takes no exception (the garbage collector, the hook in C++), Python
would print it and go on; then it is raised again in the main thread.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import signal
import sys
import threading
import time
from types import CodeType
from typing import TYPE_CHECKING, Any

from rankscope.collectors.rank import Collector
from rankscope.collectors.untyped import Foreign

if TYPE_CHECKING:
    from rankscope.collectors.in_rank.session import Emit

__all__ = ["collector", "is_of_handler"]

_AGAIN = "_rankscope_again"  # set on what is raised again, whose traceback does not show the handler any more
_OWN = __name__.partition(".in_rank")[0]
_AWAY_S = 0.001  # from one look whether the main thread has left the hook to the next

_before: Any = None
_hook: Any = None
_sleep, _frames = time.sleep, sys._current_frames  # not what the script may replace them by


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler of the script's has raised it."""
    if _AGAIN in error.__dict__:
        return True
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in handlers:
        trace = trace.tb_next
    return trace is not None


def _start(emit: Emit) -> None:
    """Take a hook's exceptions from `sys.unraisablehook`: a hook's own errors never get there."""
    global _before, _hook
    before = _before = sys.unraisablehook

    def hook(unraisable: Foreign) -> None:
        error = unraisable.exc_value
        if emit.live and error is not None and _is_own(unraisable.object):
            _thread.start_new_thread(_raise_in_main_thread, (error,))
        else:
            before(unraisable)

    _hook = sys.unraisablehook = hook


def _stop() -> None:
    if sys.unraisablehook is _hook:
        sys.unraisablehook = _before


collector = Collector(tables=(), start=_start, stop=_stop)


def _is_own(function: object) -> bool:
    return str(getattr(function, "__module__", "")).startswith(f"{_OWN}.")


def _raise_in_main_thread(error: BaseException) -> None:
    main = threading.main_thread().ident or 0
    _sleep(_AWAY_S)
    while _is_in_hook(main):  # where Python would print the exception, and it would be lost
        _sleep(_AWAY_S)
    error.__dict__[_AGAIN] = True  # the main thread may be in another hook by now; a frozen dataclass allows this too
    # Python takes a class and instantiates it: `__new__` returns this instance.
    again = type(type(error).__name__, (BaseException,), {"__new__": lambda _: error})
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(again))


def _is_in_hook(thread: int) -> bool:
    """Say whether a thread is in `sys.unraisablehook`, ours or the script's around it."""
    codes = {_code_of(_hook), _code_of(sys.unraisablehook)} - {None}
    frame = _frames().get(thread)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _code_of(handler: Foreign) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(handler, "__func__", None), type(handler).__dict__.get("__call__")):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None
