"""Arrays as the compiled parts take them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pointer"]


def pointer(array: NDArray[np.generic]) -> int:
    """Return the array's address: the limited API that serves every Python has no buffers before 3.11."""
    return int(array.__array_interface__["data"][0])
