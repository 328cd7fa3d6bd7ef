"""The nodes' counters over time: gauges as they were read, cumulative counters as rates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import polars as pl

from rankscope.analysis.text.message import Text, text
from rankscope.analysis.text.units import duration, percent
from rankscope.collectors.counters import GAUGES, UNITS
from rankscope.dashboard.figures.plots import Figure, axis, bytes_text, colour, figure, round_marks

__all__ = ["HEADLINES", "MOST_LINES", "changing", "lines", "series", "title_of", "words_of"]

# What is looked at first, in this order.
HEADLINES = (
    *(("host", "cpu_busy_fraction"), ("host", "cpu_s"), ("host", "cpu_steal_s"), ("host", "cgroup_throttled_s")),
    *(("gpu", "busy_fraction"), ("gpu", "sm_clock_hz"), ("gpu", "power_w"), ("gpu", "temperature_c")),
    ("gpu", "memory_used_bytes"),
    *(("tcp", "bytes_sent"), ("tcp", "rtt_s"), ("tcp", "retransmits"), ("rdma", "port_xmit_data_bytes")),
    *(("nic", "tx_bytes"), ("nic", "rx_bytes"), ("host", "memory_available_bytes"), ("host", "major_page_faults")),
    ("host", "main_thread_involuntary_switches"),
)
_POINTS = 600
_UNIT = re.compile(r"_(bytes_per_s|bytes|fraction|s|hz|w|c|j)$")
MOST_LINES = 12
_IN_ROWS = 4  # lines whose names fit above the chart; those of more stand beside it


def changing(counters: pl.DataFrame) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Counters as (source, name) that changed during the run, headlines first, and those that did not."""
    varied = counters.group_by("source", "name", "node", "device").agg(pl.col("value").n_unique() > 1)
    found = varied.group_by("source", "name").agg(pl.col("value").any()).sort("source", "name")
    names = [(row[0], row[1]) for row in found.filter("value").iter_rows()]
    names.sort(key=lambda name: HEADLINES.index(name) if name in HEADLINES else len(HEADLINES))
    return names, [(row[0], row[1]) for row in found.filter(~pl.col("value")).iter_rows()]


def series(counters: pl.DataFrame, source: str, name: str) -> pl.DataFrame:
    """node, device, time_ns, value: at most 600 points a line; the value of a cumulative counter is its rate per s."""
    rows = counters.filter(pl.col("source") == source, pl.col("name") == name).sort("node", "device", "time_ns")
    one_line = ["node", "device"]
    every = (pl.len().over(one_line) / _POINTS).ceil().cast(pl.Int64)
    numbered = rows.with_columns((pl.int_range(pl.len()).over(one_line) // every).alias("_bin"))
    if name in GAUGES:
        thin = numbered.group_by(*one_line, "_bin", maintain_order=True).agg(
            pl.col("time_ns").first(), pl.col("value").mean()
        )
        return thin.drop("_bin")
    thin = numbered.group_by(*one_line, "_bin", maintain_order=True).agg(pl.col("time_ns", "value").last())
    passed_s = pl.col("time_ns").diff().over(one_line) / 1e9
    rate = pl.col("value").diff().over(one_line) / passed_s
    # A counter that falls was set back: what it counted in between is not known.
    return thin.with_columns(pl.when((passed_s > 0) & (rate >= 0)).then(rate).alias("value")).drop("_bin")


def lines(found: pl.DataFrame, name: str, origin_ns: int, last_ns: int, step_ends_ns: Sequence[int]) -> Figure:
    """One line per node and device, at most 12: those that change most. Faint verticals: ends of steps."""
    kept = (
        found.group_by("node", "device")
        .agg((pl.col("value").max() - pl.col("value").min()).alias("range"))
        .sort("range", "node", "device", descending=[True, False, False], nulls_last=True)
        .head(MOST_LINES)
        .sort("node", "device")
    )
    several = found["node"].n_unique() > 1
    traces: list[dict[str, Any]] = []
    for number, (node, device, _) in enumerate(kept.iter_rows()):
        rows = found.filter(pl.col("node") == node, pl.col("device") == device)
        label = " ".join(part for part in (f"node {node}" if several or not device else "", device) if part)
        values = rows["value"].to_list()
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": label,
                "x": ((rows["time_ns"] - origin_ns) / 1e9).to_list(),
                "y": values,
                "line": {"color": colour(number), "width": 1.6, "dash": ("solid", "dash", "dot")[number // 8 % 3]},
                "text": ["" if value is None else written(name, value) for value in values],
                "hovertemplate": f"{label}<br>"
                + text("{value} at {s} s", value="%{text}", s="%{x:.1f}")
                + "<extra></extra>",
            }
        )
    highest = max((value for value in found["value"].drop_nulls()), default=0.0)
    marks = round_marks(highest)
    y = axis("", range=[0, highest * 1.08 or 1], tickvals=marks, ticktext=[written(name, mark) for mark in marks])
    shapes = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": (end - origin_ns) / 1e9,
            "x1": (end - origin_ns) / 1e9,
            "y0": 0,
            "y1": 1,
            "line": {"color": "rgba(128,128,128,.3)", "width": 1},
            "layer": "below",
        }
        for end in step_ends_ns
    ]
    x = axis(text("s since the first event"), range=[0, (last_ns - origin_ns) / 1e9])
    legend = {} if len(traces) <= _IN_ROWS else {"legend": {"x": 1.01, "y": 1, "font": {"size": 11}}}
    return figure(traces, x=x, y=y, shapes=shapes, **legend)


def words_of(name: str) -> str:
    """`tx` for tx_bytes, `sm clock` for sm_clock_hz: the counter's name without its unit."""
    return _UNIT.sub("", name).replace("_", " ")


def title_of(source: str, name: str) -> str:
    """`nic: tx bytes per s`."""
    what = Text(words_of(name), {})
    if name in GAUGES:
        return text("{source}: {what}", source=source, what=what)
    if name.endswith("_s"):
        return text("{source}: {what} seconds per second", source=source, what=what)
    return text("{source}: {what} per second", source=source, what=what)


def written(name: str, value: float) -> str:
    """Return a value of this counter, or its rate, with its unit."""
    unit = UNITS.get(name, "")
    if name not in GAUGES:
        return f"{bytes_text(value)}/s" if unit == "bytes" else f"{value:.3g}" if unit == "s" else f"{value:.3g}/s"
    if unit == "fraction":
        return percent(value)
    if unit in ("bytes", "bytes/s"):
        return bytes_text(value) + unit.removeprefix("bytes")
    if unit == "s":
        return duration(value * 1e9)
    if unit == "Hz":
        return f"{value / 1e6:.4g} MHz"
    return f"{value:.4g} {unit}" if unit in ("W", "°C") else f"{value:.4g}"
