"""The parts that a rank's step is cut into; they do not overlap, and sum to the step."""

from __future__ import annotations

__all__ = ["OWN_WORK", "PART_ORDER"]

# A rank's own work first and waiting last: the late rank is the one whose own work is long and whose waiting is short.
OWN_WORK = (
    *("compute", "overlapped", "memory", "optimizer", "host", "input", "gc", "compile"),
    *("checkpoint", "other"),
)
PART_ORDER = (*OWN_WORK, "mixed", "unsplit", "transfer", "bubble", "wait")
