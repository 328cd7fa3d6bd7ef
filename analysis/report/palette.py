"""The colours of report and UI: safe for colour-blind readers, the same for the same thing everywhere.

The parts' colors are those of Okabe and Ito and of Tol, but for those that would be taken for another with protanopia
or deuteranopia (`tests/analysis/test_palette.py`). Dark pages change only what would not stand out there.

Source: Okabe and Ito, Color Universal Design (2008); Tol, Colour Schemes (2021).
"""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.analysis.model.parts import PARTS

__all__ = ["DARK", "LIGHT", "css_variables"]

LIGHT = {
    "page": "#ffffff",
    "text": "#1b1f24",
    "quiet": "#5a636e",
    "rule": "#d5dae0",
    "panel": "#f5f7f9",
    "accent": "#b3261e",
    "column": "#aab4bf",
    "median": "#1b1f24",
    "line": "#0b5a94",
    "band": "#bcd5e8",
    **{part.name: part.color for part in PARTS.values()},
    # regions that are no part
    "backward": "#004a75",
    "region": "#5b8a8a",
    # cells of a raster, from low to high
    "level0": "#e6edf3",
    "level1": "#b9cfe2",
    "level2": "#6fa0c8",
    "level3": "#2a6aa3",
    "level4": "#07315c",
    # severities
    "high": "#b3261e",
    "medium": "#8a5a00",
    "low": "#2b5f8a",
    "good": "#17643a",
}

DARK = LIGHT | {
    **{part.name: part.dark for part in PARTS.values() if part.dark},
    "page": "#14181d",
    "text": "#e6e9ed",
    "quiet": "#a2abb6",
    "rule": "#333b45",
    "panel": "#1c2229",
    "accent": "#ff8a7a",
    "column": "#56616d",
    "median": "#e6e9ed",
    "line": "#7fc1f2",
    "band": "#2c4a63",
    "backward": "#1a5d8f",
    "level0": "#222a32",
    "level1": "#2d4a66",
    "level2": "#3f77a8",
    "level3": "#6fb0e4",
    "level4": "#d3ecff",
    "high": "#ff8a7a",
    "medium": "#f0b541",
    "low": "#8cc4f0",
    "good": "#7bd3a0",
}


def css_variables(colours: Mapping[str, str]) -> str:
    """`--compute: #0072b2; …`, for a style sheet's `:root`."""
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
