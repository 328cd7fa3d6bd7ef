"""Rows of the host: regions, operators and launches."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from rankscope.analysis.model.annotations import compiles, range_kind
from rankscope.analysis.readers.event_text import MISSING
from rankscope.analysis.readers.flops import flops
from rankscope.analysis.readers.json_scan import OTHER_NAME
from rankscope.analysis.readers.kineto.capture import Capture, spans_frame

__all__ = ["launches_frames", "operators_frames", "regions_frames"]


def launches_frames(capture: Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.launches.in_time(most):
        frame = spans_frame(capture, rows).with_columns(correlation=pl.Series(rows["correlation"]))
        yield frame.filter(pl.col("correlation") != MISSING)


def regions_frames(capture: Capture, most: int | None) -> Iterator[pl.DataFrame]:
    kinds = [range_kind(name) for name in capture.names]
    for code in np.union1d(capture.device_metas["collective"], capture.operator_metas["collective"]):
        if code > OTHER_NAME:  # torch 2.15 calls the spans of NCCL's operations as it calls those, without `nccl:`
            kinds[code] = None
    kind_of, is_region = pl.Series(kinds, dtype=pl.String), np.array([kind is not None for kind in kinds])
    for rows in capture.spans.in_time(most):
        regions = {c: values[is_region[rows["name"]]] for c, values in rows.items()}
        yield spans_frame(capture, regions).with_columns(kind=kind_of.gather(regions["name"]))
    kind_of = pl.Series(["compile" if compiles(name) else "operator" for name in capture.names], dtype=pl.String)
    for rows in capture.operators.in_time(most):
        yield spans_frame(capture, rows).with_columns(kind=kind_of.gather(rows["name"]))


def operators_frames(capture: Capture, most: int | None) -> Iterator[pl.DataFrame]:
    for rows in capture.shaped.in_time(most):
        pairs, of_row = np.unique(np.stack([rows["name"], rows["dims"]]), axis=1, return_inverse=True)
        done = [flops(capture.names[name], capture.names[dims]) for name, dims in pairs.T]
        yield spans_frame(capture, rows).with_columns(flops=pl.Series(done, dtype=pl.Int64).gather(of_row.ravel()))
