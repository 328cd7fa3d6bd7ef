"""Rows of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import polars as pl

from rankscope.analysis.model.kernels import MEMORY, device_work
from rankscope.analysis.readers.event_text import MISSING
from rankscope.analysis.readers.json_scan import MISSING_SHORT
from rankscope.analysis.readers.kineto.capture import Capture, Ints, or_null, span_columns

__all__ = ["kernels_frames"]

_MOVED = pl.when((pl.col("work") == MEMORY) & (pl.col("bytes") >= 0)).then("bytes")  # MISSING is negative


def kernels_frames(capture: Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.device.in_time(most):
        yield pl.DataFrame(
            {
                **span_columns(rows),
                "name": capture.text(rows["name"]),
                "work": _work(capture, rows),
                "device": or_null(rows["device"], MISSING_SHORT),
                "stream": or_null(rows["stream"], MISSING_SHORT),
                "correlation": or_null(rows["correlation"], MISSING),
                "bytes": rows["bytes"],
            }
        ).with_columns(bytes=_MOVED)


def _work(capture: Capture, rows: Mapping[str, Ints]) -> pl.Series:
    """Return the kind of each device row: decided once for each category and name."""
    pairs, which = np.unique(rows["cat"].astype(np.int64) << 32 | rows["name"], return_inverse=True)
    kinds = [device_work(capture.names[int(p) >> 32], capture.names[int(p) & 0xFFFFFFFF]) for p in pairs]
    return pl.Series(kinds, dtype=pl.String).gather(which)
