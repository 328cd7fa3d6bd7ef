"""Color-blind readers can distinguish the parts of a step, on light and dark pages.

Colors are seen through the matrices of Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation
of Color Vision Deficiency" (IEEE TVCG 15(6), 2009), severity 1.0, on linear RGB. Distances are CIE76, in CIELAB.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from rankscope.analysis.report.palette import DARK, LIGHT

EYES = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}
# IEC 61966-2-1: linear RGB to XYZ, with white at D65.
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1.0, 1.08883]
OFTEN = ("compute", "overlapped", "host", "optimizer", "input", "transfer", "wait", "other")  # beside one another


def lab(color: str, eye: str) -> NDArray[np.float64]:
    """CIELAB coordinates of `#rrggbb` as this eye sees it."""
    rgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.array(XYZ) @ np.clip(np.array(EYES[eye]) @ linear, 0, 1) / WHITE
    x, y, z = np.where(seen > 216 / 24389, np.cbrt(seen), (24389 / 27 * seen + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def apart(one: str, other: str) -> float:
    """The least distance of two colors in any of the eyes."""
    return min(float(np.linalg.norm(lab(one, eye) - lab(other, eye))) for eye in EYES)


def test_distances_are_those_of_known_colors():
    assert apart("#ffffff", "#000000") == pytest.approx(100, abs=0.1)
    assert np.linalg.norm(lab("#ff0000", "normal") - lab("#00ff00", "normal")) == pytest.approx(170.6, abs=0.1)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_parts_of_a_step_are_distinct(palette):
    assert apart(palette["host"], palette["wait"]) > 30
    close = [pair for pair in itertools.combinations(OFTEN, 2) if apart(*(palette[part] for part in pair)) < 14]
    assert close == []
    assert [part for part in OFTEN if apart(palette[part], palette["page"]) < 25] == []
