"""Devices are busy, and get little done: far from the FLOPs that they could do in that time.

**Signal.** The FLOPs that the model needs in a step are given (`rankscope report --flops-per-step`), or the trace holds
the shapes of operators that launched at least 90 % of the time of all matrix products. So is the devices' peak, else it
is taken from their names (dense bf16). Devices compute for at least `min_busy` of the step, and in
that time reach less than `min_reach` of their peak. The cost is what they compute beyond the time that the same FLOPs
take at `usual` of the peak, as large models reach it; reported above `min_fraction` of the step.

**Why it costs time.** Nothing waits, so no other check says anything: the time goes into kernels that are slow for what
they do, or that do what the model does not need.

**False positives.** The peak is that of large matrix products in bf16. A model of small or sparse operations
(embeddings, convolutions of few channels, a short batch in inference) never comes near it. Activation checkpointing
computes more than the model needs, and that is meant.

**What to try.** Matrix products slow: bf16 instead of fp32 (`torch.set_float32_matmul_precision`), sizes in multiples
of 64 or more, larger batches. Other kernels long: `torch.compile`, fused attention, norms and optimizer.

**Source.** MFU as in PaLM (2022), which reached 46 %; `usual` is 40 %. The other thresholds are ours.
"""

from __future__ import annotations

import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_rows, price, visible
from rankscope.analysis.metrics.mfu import PRODUCTS
from rankscope.analysis.metrics.step_matrix import Floats, StepGrid, estimate
from rankscope.analysis.model.finding import Finding
from rankscope.analysis.model.spec import Detector
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector()


def detect(
    breakdown: pl.DataFrame,
    kernels: pl.DataFrame,
    model: pl.DataFrame,
    *,
    min_busy: float = 0.6,
    min_reach: float = 0.2,
    usual: float = 0.4,
    min_fraction: float = 0.1,
) -> list[Finding]:
    """Devices that compute all the time and reach little of their peak, as one finding."""
    grid, busy, needed_ns = _busy(breakdown, kernels, model)
    lost = estimate((busy - needed_ns / usual).mean(axis=0))
    share, reach = float(busy.mean()) / grid.step_ns, float(needed_ns.mean() / max(busy.mean(), 1.0))
    if share < min_busy or reach >= min_reach or lost.ns < min_fraction * grid.step_ns or not lost.clear:
        return []
    length = pl.col("end_ns") - pl.col("start_ns")
    computing = kernels.filter(pl.col("work") == "compute")
    multiplies = pl.col("name").str.contains(PRODUCTS)
    products = computing.select(length.filter(multiplies).sum() / length.sum()).item() or 0.0
    most = multiplies if products >= 0.5 else ~multiplies
    return [
        Finding(
            detector="low_mfu",
            title=text(
                "The devices compute {share} of the step and reach {reach} of their peak meanwhile; "
                "matrix products take {products} of that time",
                share=percent(share),
                reach=percent(reach),
                products=percent(products),
            ),
            where=text("matrix products") if products >= 0.5 else text("kernels that are no matrix products"),
            advice=_PRODUCTS if products >= 0.5 else _OTHERS,
            evidence=longest_rows(computing.filter(most), "kernels"),
            **price(grid, lost),
        )
    ]


def resolution_ns(
    breakdown: pl.DataFrame,
    kernels: pl.DataFrame,
    model: pl.DataFrame,
    *,
    usual: float = 0.4,
    min_fraction: float = 0.1,
) -> int:
    """Return the smallest loss that would have been reported."""
    grid, busy, needed_ns = _busy(breakdown, kernels, model)
    scatter = estimate((busy - needed_ns / usual).mean(axis=0)).half_width_ns
    return visible(grid, max(min_fraction * grid.step_ns, scatter))


_PRODUCTS = text("See their types and sizes: bf16 instead of fp32, multiples of 64 and more, larger batches.")
_OTHERS = text("Fuse them: torch.compile, fused attention, norms and optimizer; look at the longest by name.")


def _busy(breakdown: pl.DataFrame, kernels: pl.DataFrame, model: pl.DataFrame) -> tuple[StepGrid, Floats, Floats]:
    """Return the grid of ranks whose devices were seen.

    By (rank, step) their time of computing and what is needed at peak.
    """
    seen = kernels["rank"].unique()
    grid = judged_grid(breakdown.filter(pl.col("rank").is_in(seen.implode())), FEW_STEPS)
    of_ranks = model.filter(pl.col("rank").is_in(list(grid.ranks))).sort("rank")
    unknown = of_ranks.filter(pl.col("peak_flops").is_null())["device"].unique().sort().to_list()
    if unknown:
        raise NotResolvable(text("the peak of {devices} is unknown: give --peak-tflops", devices=", ".join(unknown)))
    needed_ns = (of_ranks["flops"] / of_ranks["peak_flops"]).to_numpy()[:, None] * 1e9
    return grid, grid.of("compute", "overlapped"), needed_ns
