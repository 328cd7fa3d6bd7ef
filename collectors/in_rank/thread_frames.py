"""The current frame of every Python thread of this process, read safely."""

from __future__ import annotations

import gc
import operator
import sys
from collections.abc import Callable, Mapping
from types import FrameType

__all__ = ["UNSAFE", "current_frames"]

# Threads without a common lock change a frame while it is read (gh-152355).
UNSAFE = "" if getattr(sys, "_is_gil_enabled", lambda: True)() else "Python runs without its lock (free-threaded)"

_call = operator.methodcaller("__call__")
_LOOK: tuple[Callable[[], object], ...] = (gc.isenabled, gc.disable, sys._current_frames, gc.enable)


def current_frames() -> Mapping[int, FrameType]:
    """Return the innermost frame of each thread, by ident. Keeping a frame keeps its function's objects.

    Before Python 3.11.12 a garbage collection inside `sys._current_frames` can stop the process for good (gh-106883),
    so there is none: `map` calls these functions one after the other, and no other thread can run between.
    """
    if sys.version_info >= (3, 11, 12) or not gc.isenabled():
        return sys._current_frames()
    was_enabled, _, frames, _ = map(_call, _LOOK)
    if not was_enabled:  # another thread has just switched it off
        gc.disable()
    try:
        return frames  # type: ignore[no-any-return]
    finally:
        del frames  # it holds this call's frame, which would hold it
