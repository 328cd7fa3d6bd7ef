"""Shared by all plotly figures. A figure is the plain mapping that plotly draws in the browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rankscope.analysis.model.parts import PARTS
from rankscope.analysis.report.palette import DARK, LIGHT
from rankscope.analysis.text.units import bytes_text, duration

__all__ = [
    "COLOURS",
    "Figure",
    "axis",
    "bytes_text",
    "colour",
    "figure",
    "log_axis",
    "round_marks",
    "styles",
    "time_axis",
]

Figure = dict[str, Any]

# For lines and points that are no part of a step: distinct for the colour-blind, and on light and dark.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a929c", "#882255")
_TICKS = 6
_LEAST = 1e-3
_MARGIN = 0.15  # of a decade


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def figure(
    traces: Sequence[Mapping[str, Any]], *, x: Mapping[str, Any], y: Mapping[str, Any], **layout: object
) -> Figure:
    """Return the traces on these axes, without colours of its own for page and text: those are the page's."""
    shown = {
        "xaxis": x,
        "yaxis": y,
        "margin": {"l": 72, "r": 16, "t": 12, "b": 48},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12.5, "family": "system-ui, Segoe UI, Roboto, DejaVu Sans, sans-serif"},
        "hoverlabel": {"bgcolor": LIGHT["text"], "font": {"color": LIGHT["page"], "size": 13}, "align": "left"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12.5}},
        "showlegend": len(traces) > 1,
        "hovermode": "closest",
    }
    return {"data": list(traces), "layout": shown | layout}


def styles() -> str:
    """CSS for figures on dark pages: plotly writes the light palette's colors into its drawings.

    Areas that bear a text (`surface`) keep theirs: plotly chose the text's color for it.
    """
    rules = []
    for name, light in LIGHT.items():
        if DARK[name] != light and (name in PARTS or name == "backward"):
            written = f"rgb({', '.join(str(int(light[at : at + 2], 16)) for at in (1, 3, 5))})"
            rules += [
                f'.plot path:not(.surface)[style*="{drawn}: {written}"] {{ {drawn}: var(--{name}) !important; }}'
                for drawn in ("fill", "stroke")
            ]
    return "\n".join(rules)


def axis(title: str, **more: object) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 13}, "standoff": 14},
        "zeroline": False,
        "automargin": True,
        **more,
    }


def log_axis(title: str, values: Sequence[float], write: Callable[[float], str]) -> dict[str, Any]:
    """Return a logarithmic axis around these values, marked at powers of ten as `write` writes them."""
    low, high = (math.log10(max(edge, _LEAST)) for edge in (min(values), max(values)))
    low, high = low - _MARGIN, high + _MARGIN
    if high - low < 1:  # always at least one mark to read from
        low, high = math.floor(low), math.ceil(high)
    every = max(1, math.ceil((high - low) / _TICKS))
    marks = [10.0**power for power in range(math.floor(low), math.ceil(high) + 1, every)]
    return axis(title, type="log", range=[low, high], tickvals=marks, ticktext=[write(mark) for mark in marks])


def time_axis(title: str, largest_ns: float) -> dict[str, Any]:
    """Return a linear axis from 0 whose values are ns and whose marks are times."""
    marks = round_marks(largest_ns)
    return axis(
        title,
        range=[0, max(largest_ns, 1) * 1.05],
        tickvals=marks,
        ticktext=[duration(mark) if mark else "0" for mark in marks],
    )


def round_marks(largest: float, smallest: float = 0.0) -> list[float]:
    """Return a few round numbers from the smallest to the largest."""
    if not largest > smallest:
        return [largest]
    power = 10.0 ** math.floor(math.log10((largest - smallest) / _TICKS))
    every = next(power * part for part in (1, 2, 2.5, 5, 10) if (largest - smallest) / (power * part) <= _TICKS)
    return [i * every for i in range(math.ceil(smallest / every), math.floor(largest / every) + 1)]
