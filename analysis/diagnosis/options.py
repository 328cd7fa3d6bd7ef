"""The options of a report."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReportOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Inputs of a report that are not recorded.

    `flops_per_step` are those that the model needs, on all ranks together; `peak_tflops` those of one device per second
    (None: by its name). `price` is that of an hour of one GPU, for ranks on CPUs of one rank.
    """

    flops_per_step: float | None = None
    peak_tflops: float | None = None
    price: float | None = None
