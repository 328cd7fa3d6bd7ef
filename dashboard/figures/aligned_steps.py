"""One step of several ranks, one below the other, each from its own start."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from rankscope.analysis.model.parts import PART_ORDER
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.report.palette import LIGHT
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import duration
from rankscope.dashboard.figures.plots import Figure, axis, figure, time_axis

__all__ = ["MOST_PIECES", "aligned"]

MOST_PIECES = 1_500  # of a rank; the longest


def aligned(rows: Mapping[str, pl.DataFrame]) -> Figure:
    """`rows`: by the name of a side its part, label, start_ns and end_ns since the start of its step."""
    length = pl.col("end_ns") - pl.col("start_ns")
    drawn = pl.concat(
        frame.with_columns(length.alias("ns"), pl.lit(name).alias("side")).top_k(MOST_PIECES, by="ns")
        for name, frame in rows.items()
    )
    used = set(drawn["part"])
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part_label(part),
            "x": mine["ns"].to_list(),
            "base": mine["start_ns"].to_list(),
            "y": mine["side"].to_list(),
            "hovertext": [
                text(
                    "{what}: {time}, from {start}",
                    what=label or part_label(part),
                    time=duration(ns),
                    start=duration(at),
                )
                for label, ns, at in mine.select("label", "ns", "start_ns").iter_rows()
            ],
            "hovertemplate": "%{y}<br>%{hovertext}<extra></extra>",
            "marker": {"color": LIGHT.get(part, LIGHT["other"]), "line": {"width": 0}},
        }
        for part in [*(p for p in PART_ORDER if p in used), *sorted(used - set(PART_ORDER))]
        if len(mine := drawn.filter(pl.col("part") == part).sort("start_ns"))
    ]
    x = time_axis(text("since the start of the step"), float(drawn["end_ns"].max()))  # type: ignore[arg-type]
    y = axis("", autorange="reversed", categoryorder="array", categoryarray=list(rows))
    return figure(traces, x=x, y=y, barmode="overlay", bargap=0.25, showlegend=True)
