"""Steps, as the profiler or rankscope's deep windows announce them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.readers.kineto.capture import Capture, spans_frame
from rankscope.collectors.schema import WINDOW_STEP

__all__ = ["announces_step", "steps_frame"]

_STEP_NAME = re.compile(r"ProfilerStep#(\d+)")


def announces_step(names: Sequence[str]) -> NDArray[np.bool_]:
    """Return which names begin a step: in a deep window those of rankscope, and none of the script's own."""
    of_window = np.array([name.startswith(WINDOW_STEP) for name in names], bool)
    return of_window if of_window.any() else np.array([bool(_STEP_NAME.search(name)) for name in names], bool)


def steps_frame(capture: Capture) -> pl.DataFrame:
    rows = capture.spans.where(announces_step(capture.names).__getitem__, "name")
    return spans_frame(capture, rows).select("start_ns", "end_ns", "thread")
