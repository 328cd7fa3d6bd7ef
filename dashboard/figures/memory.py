"""Memory of the ranks over time."""

from __future__ import annotations

from typing import Any

import polars as pl

from rankscope.analysis.text.message import text
from rankscope.dashboard.figures.plots import Figure, axis, bytes_text, colour, figure, round_marks

__all__ = ["by_rank", "lines"]

_LINES, _POINTS = 12, 600


def lines(memory: pl.DataFrame, name: str, origin_ns: int) -> Figure:
    """One line per rank, at most 12: those that grow most."""
    rows = memory.filter(pl.col("name") == name)
    kept = by_rank(rows).sort("growth", descending=True).head(_LINES)["rank"].sort()
    traces: list[dict[str, Any]] = []
    for number, rank in enumerate(kept.to_list()):
        mine = rows.filter(pl.col("rank") == rank).sort("time_ns")
        mine = mine.gather_every(max(1, -(-len(mine) // _POINTS)))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(mine) < 40 else "lines",
                "name": f"rank {rank}",
                "x": ((mine["time_ns"] - origin_ns) / 1e9).to_list(),
                "y": mine["value"].to_list(),
                "line": {"color": colour(number), "width": 1.6, "dash": ("solid", "dash")[number // 8 % 2]},
                "text": [_written(name, value) for value in mine["value"]],
                "hovertemplate": f"rank {rank}<br>%{{text}} at %{{x:.1f}} s<extra></extra>",
            }
        )
    low, high = (float(str(edge)) for edge in (rows["value"].min(), rows["value"].max()))
    margin = max((high - low) * 0.1, high * 0.02, 1)
    marks = round_marks(high, low)
    y = axis(
        "", range=[max(low - margin, 0), high + margin], tickvals=marks, ticktext=[_written(name, m) for m in marks]
    )
    return figure(traces, x=axis(text("s since the first reading")), y=y, showlegend=True)


def by_rank(memory: pl.DataFrame) -> pl.DataFrame:
    """One row per rank and reading: the first, the last, the largest value, and the growth."""
    return (
        memory.sort("time_ns")
        .group_by("name", "rank")
        .agg(
            pl.col("value").first().alias("first"),
            pl.col("value").last().alias("last"),
            pl.col("value").max().alias("largest"),
            (pl.col("value").last() - pl.col("value").first()).alias("growth"),
        )
        .sort("name", "rank")
    )


def _written(name: str, value: float) -> str:
    return bytes_text(value) if name.endswith("bytes") or "alloc" in name or "reserved" in name else f"{value:.4g}"
