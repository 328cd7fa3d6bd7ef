"""The nodes' counters below the ranks: what each read between two instants, for every pixel of the view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.text.message import Text, text
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.counters import rates
from rankscope.collectors.counters import GAUGES
from rankscope.dashboard.figures.counters import HEADLINES, changing, title_of, words_of, written
from rankscope.dashboard.timeline.lod import Bytes, Ints

__all__ = ["CounterLane", "columns", "counter_lanes", "packed", "said_at"]

_UNKNOWN = 255  # of a column; the others are shares of the lane's top
_HIGHEST = 254
_HELD = 3  # usual intervals, after which a gauge's reading says nothing any more; a rate is that of one interval
_RANK = r"^rank(\d+)$"
_ONE = ("node", "source", "name", "device")


@dataclass(frozen=True, slots=True)
class CounterLane:
    """One counter of a node, or of the rank whose process or GPU it is. A value holds until the next one.

    `time` is on the run's clock; `top` is the highest value of this counter anywhere, so that lanes can be compared.
    """

    node: int
    rank: int | None
    label: str
    title: str  # the label with more words
    name: str
    time: Ints
    value: NDArray[np.float64]  # nan: not known
    top: float

    @property
    def top_text(self) -> str:
        return written(self.name, self.top)


def counter_lanes(timeline: Timeline) -> list[CounterLane]:
    """Return the headline counters that changed, by node, then rank."""
    counters = timeline.counters
    changed = [name for name in changing(counters)[0] if name in HEADLINES]
    if not changed:
        return []
    order = pl.DataFrame(changed, schema=["source", "name"], orient="row").with_row_index("order")
    gpus = timeline.gpus.select(pl.col("node").cast(pl.Int64), "device", gpu_of=pl.col("rank").cast(pl.Int64))
    rows = (
        rates(counters.join(order, on=["source", "name"], how="semi"))
        .with_columns(pl.col("node").cast(pl.Int64))
        .join(order, on=["source", "name"])
        .join(gpus, on=["node", "device"], how="left")
        .with_columns(rank=pl.coalesce(pl.col("device").str.extract(_RANK).cast(pl.Int64), "gpu_of"))
        .with_columns(top=pl.col("value").max().over("source", "name"))
        .sort("node", "rank", "order", "device", "time_ns", nulls_last=True)
    )
    return [_lane(rows) for rows in rows.partition_by(*_ONE, maintain_order=True)]


def _lane(rows: pl.DataFrame) -> CounterLane:
    node, source, name, device, rank, top = rows.select(*_ONE, "rank", "top").row(0)
    time = rows["time_ns"].to_numpy()
    usual = np.median(np.diff(time)) if len(time) > 1 else 0.0
    holds = int(usual * (_HELD if name in GAUGES else 1))
    ends = np.append(np.flatnonzero((np.diff(time) > holds) & (name in GAUGES)), len(time) - 1)
    owner = source if rank is not None or not device else device
    what = title_of(source, name)
    return CounterLane(
        node=node,
        rank=rank,
        label=text("{source}: {what}", source=owner, what=Text(words_of(name), {})),
        title=text("{what}, {device}", what=what, device=device) if device and rank is None else what,
        name=name,
        time=np.insert(time, ends + 1, time[ends] + holds),
        value=np.insert(rows["value"].cast(pl.Float64).fill_null(np.nan).to_numpy(), ends + 1, np.nan),
        top=top or 0.0,
    )


def columns(lane: CounterLane, t0: int, t1: int, pixels: int) -> Bytes:
    """Lowest and highest value in each of the columns, as shares of the lane's top: first all lowest, then all highest.

    What holds when a column begins is in it; 255 is where nothing is known.
    """
    edges = t0 + (t1 - t0) * np.arange(pixels + 1) / pixels
    end = np.searchsorted(lane.time, edges, "right")
    first, last = np.maximum(end[:-1] - 1, 0), end[1:]
    known = last > first
    shown = np.full((2, pixels), _UNKNOWN, np.uint8)
    bounds = np.stack([first[known], last[known]], axis=1).ravel()
    values = np.append(lane.value, np.nan)  # the last bound may be the end
    for found, least in zip(shown, (np.fmin, np.fmax), strict=True):
        if len(bounds):
            shares = least.reduceat(values, bounds)[::2] / (lane.top or 1.0)
            scaled = np.round(np.clip(shares, 0.0, 1.0) * _HIGHEST)
            found[known] = np.where(np.isnan(scaled), _UNKNOWN, np.nan_to_num(scaled)).astype(np.uint8)
    return shown.ravel()


def said_at(lane: CounterLane, t: int) -> str | None:
    """Return the value that holds at this moment, with its unit; None where it is not known."""
    at = int(np.searchsorted(lane.time, t, "right")) - 1
    if at < 0 or np.isnan(lane.value[at]):
        return None
    return written(lane.name, float(lane.value[at]))


def packed(lanes: Sequence[CounterLane], t0: int, t1: int, pixels: int) -> bytes:
    """Return the columns of these lanes, one lane after the other."""
    return b"".join(columns(lane, t0, t1, pixels).tobytes() for lane in lanes)
