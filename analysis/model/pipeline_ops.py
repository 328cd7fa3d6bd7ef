"""What operations of a pipeline stage are called, in the table `ops`."""

from __future__ import annotations

__all__ = ["BACKWARD", "CLIP", "FORWARD", "OPTIMIZER"]

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
CLIP = "optimizer-clip-main-grad"
