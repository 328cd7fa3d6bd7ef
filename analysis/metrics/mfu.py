"""MFU: a model's FLOPs per step against the peak of its devices."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Utilisation
from rankscope.analysis.timeline.device_time import by_rank

__all__ = ["PRODUCTS", "count_flops", "demand", "flops_of_kernels", "peak_tflops", "utilisation"]

_HALF = 0.5  # share of the products' time; a bound from less says nothing
# Names of kernels that multiply matrices, convolve or attend.
PRODUCTS = (
    r"(?i)gemm|nvjet|cutlass|cublas|matmul|wgmma|hmma|Cijk_|triton_tem"
    r"|conv(_|\d|ol|fwd|bwd)|fprop|dgrad|wgrad|flash|fmha|attention"
)

# Dense bf16 (V100: fp16) of one device as torch counts them, by name. The first that matches counts.
# Source: the vendors' data sheets; AMD's MI200 series shows each of its two dies as a device.
_PEAKS = (
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"H200|GH200", 989.4),
    (r"H100 PCIe|H100 80GB PCIe", 756.0),
    (r"H100 NVL", 835.5),
    (r"H100|H800", 989.4),
    (r"A100|A800", 312.0),
    (r"L40S", 362.1),
    (r"L4\b", 121.0),
    (r"A40\b", 149.7),
    (r"A30\b", 165.0),
    (r"V100", 125.0),
    (r"MI325X|MI300X", 1307.4),
    (r"MI300A", 980.6),
    (r"MI250X", 191.5),
    (r"MI250", 181.0),
    (r"MI210", 181.0),
)


@lru_cache
def peak_tflops(device: str) -> float | None:
    """Dense bf16 peak of a device of this name; None: not known."""
    return next((peak for name, peak in _PEAKS if re.search(name, device)), None)


def demand(ranks: pl.DataFrame, flops_per_step: float, peak: float | None) -> pl.DataFrame:
    """rank, device, flops (its even share of a step), peak_flops (per second; null: not known).

    `peak` in TFLOP/s holds for all devices; None: by their names.
    """
    seen = ranks.unique("rank", keep="last").sort("rank")
    world = max([1, len(seen), *seen["world_size"].drop_nulls().to_list()])
    peaks = [peak if peak is not None else peak_tflops(device or "") for device in seen["device"]]
    return seen.select("rank", "device").with_columns(
        pl.lit(flops_per_step / world).alias("flops"),
        pl.Series("peak_flops", [None if one is None else one * 1e12 for one in peaks], dtype=pl.Float64),
    )


def count_flops(
    ranks: pl.DataFrame, operators: pl.DataFrame, kernels: pl.DataFrame, steps: pl.DataFrame, peak: float | None
) -> tuple[pl.DataFrame, float]:
    """As `demand`, with the mean FLOPs of the operators of judged steps; and how far they can be trusted.

    That is the least share, over ranks, of the time of kernels that multiply which these operators launched: kernels of
    captured graphs, convolutions and a model's own are not counted. An operator is part of the step in which its first
    kernel began. A rank without shapes has 0 of both.
    """
    judged = steps.filter("judged").sort("rank", "start_ns")
    with_shapes, of_kernels = dict(by_rank(operators)), dict(by_rank(kernels))  # slices, no copies
    found = dict.fromkeys(judged["rank"].unique(maintain_order=True), (0.0, 0.0))
    found |= {
        rank: _counted_on(with_shapes[rank], of_kernels[rank], rows)
        for rank, rows in by_rank(judged.filter(pl.col("rank").is_in(list(with_shapes.keys() & of_kernels.keys()))))
    }
    needs = demand(ranks.filter(pl.col("rank").is_in(list(found))), 0.0, peak)
    flops = pl.Series([found[rank][0] for rank in needs["rank"]], dtype=pl.Float64)
    return needs.with_columns(flops=flops), min((share for _, share in found.values()), default=0.0)


def _counted_on(operators: pl.DataFrame, kernels: pl.DataFrame, steps: pl.DataFrame) -> tuple[float, float]:
    """Of one rank: mean FLOPs of a step, and the share of its products' time that they are of."""
    computing = _computing(kernels)
    launched = _launched(operators, computing)
    in_all, in_counted = (float(frame.filter("multiplies")["length"].sum()) for frame in (computing, launched))
    begun = launched.group_by("operator").agg(pl.col("start_ns").min(), pl.col("flops").first())
    begins, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    step = np.searchsorted(begins, begun["start_ns"].to_numpy(), "right") - 1
    in_step = (step >= 0) & (begun["start_ns"].to_numpy() < ends[step])
    return float(begun["flops"].filter(pl.Series(in_step)).sum()) / len(steps), in_counted / in_all if in_all else 0.0


def _computing(kernels: pl.DataFrame) -> pl.DataFrame:
    return kernels.filter(pl.col("work") == "compute").select(
        "name",
        "start_ns",
        "launch_ns",
        "launch_thread",
        length=pl.col("end_ns") - pl.col("start_ns"),
        multiplies=pl.col("name").str.contains(PRODUCTS),
    )


def _launched(operators: pl.DataFrame, computing: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of one rank that its operators launched, each with `operator` and what that does, `flops`."""
    spans = operators.drop_nulls("flops").select(
        pl.col("start_ns").alias("launch_ns"),
        pl.col("thread").alias("launch_thread"),
        pl.col("end_ns").alias("until_ns"),
        "flops",
        operator=pl.int_range(pl.len()),
    )
    return (
        computing.drop_nulls("launch_ns")
        .sort("launch_ns")
        .join_asof(spans.sort("launch_ns"), on="launch_ns", by="launch_thread", check_sortedness=False)
        .filter(pl.col("launch_ns") <= pl.col("until_ns"))
    )


def flops_of_kernels(operators: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """name, flops, flops_per_s: what kernels of this name did for operators whose shapes are known, and how fast.

    An operator's FLOPs are those of its kernels that multiply, else of all that it launched, by their time.
    """
    found = [pl.DataFrame(schema={"name": pl.String, "flops": pl.Float64, "length": pl.Int64})]
    of_kernels = dict(by_rank(kernels))
    for rank, mine in by_rank(operators):
        if rank not in of_kernels:
            continue
        launched = _launched(mine, _computing(of_kernels[rank]))
        does = launched.filter(pl.col("multiplies") | ~pl.col("multiplies").any().over("operator"))
        share = pl.col("length") / pl.col("length").sum().over("operator")
        found.append(does.filter(share.is_finite()).select("name", share.mul(pl.col("flops")).alias("flops"), "length"))
    by_name = pl.concat(found).group_by("name").agg(pl.col("flops", "length").sum())
    return by_name.select("name", "flops", flops_per_s=pl.col("flops") / pl.col("length") * 1e9)


def utilisation(needs: pl.DataFrame, step_ns: float | None, counted: float | None) -> Utilisation | None:
    """MFU of the mean step; None where no step or a device's peak is not known, or less than half was counted.

    `counted`: the FLOPs are those of operators, which so large a share of the products' time is of; then it is HFU.
    Source: PaLM (2022), appendix B: FLOPs that the model needs (HFU: those that are done) over those at peak.
    """
    if not step_ns or needs.is_empty() or needs["peak_flops"].null_count():
        return None
    if counted is not None and counted < _HALF:
        return None
    flops, peak = float(needs["flops"].sum()), float(needs["peak_flops"].sum())
    return Utilisation(mfu=flops / (peak * step_ns / 1e9), flops_per_step=flops, peak_flops=peak, counted=counted)
