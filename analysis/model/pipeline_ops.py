"""Names of a pipeline stage's operations in the table `ops`."""

from __future__ import annotations

__all__ = ["BACKWARD", "CLIP", "COMPUTES", "FORWARD", "OPTIMIZER", "WEIGHTS"]

FORWARD, BACKWARD, OPTIMIZER = "forward-compute", "backward-compute", "optimizer"
WEIGHTS = "weights-compute"  # gradients of weights, where backward is split: `BACKWARD` is then that of inputs
COMPUTES = (FORWARD, BACKWARD, WEIGHTS)
CLIP = "optimizer-clip-main-grad"
