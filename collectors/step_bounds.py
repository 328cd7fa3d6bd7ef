"""Which calls show where steps begin and end: what is kept of old rows, and what counting the steps of a run needs."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["last_before_each"]


def last_before_each(marks: npt.NDArray[np.int64], times: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which of the ordered times show between which two marks there is any: the last before each mark.

    With the first and the last of all, as other times may come before and after.
    """
    between = np.searchsorted(marks, times)
    kept = np.append(between[1:] != between[:-1], True) if len(times) else np.zeros(0, bool)
    kept[:1] = True
    return kept
