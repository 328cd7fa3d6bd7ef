"""What a model needs of its devices: FLOPs per step against the peak of each."""

from __future__ import annotations

import re

import polars as pl

from rankscope.analysis.finding import Utilisation

__all__ = ["demand", "peak_tflops", "utilisation"]

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


def peak_tflops(device: str) -> float | None:
    """Dense bf16 peak of a device of this name; None: not known."""
    return next((peak for name, peak in _PEAKS if re.search(name, device)), None)


def demand(ranks: pl.DataFrame, flops_per_step: float, peak: float | None) -> pl.DataFrame:
    """rank, device, flops (its even share of a step), peak_flops (per second; null: not known).

    `peak` in TFLOP/s holds for all devices; None: by their names.
    """
    seen = ranks.unique("rank", keep="last").sort("rank")
    world = max([len(seen), *seen["world_size"].drop_nulls().to_list()])
    peaks = [peak if peak is not None else peak_tflops(device or "") for device in seen["device"]]
    return seen.select("rank", "device").with_columns(
        pl.lit(flops_per_step / world).alias("flops"),
        pl.Series("peak_flops", [None if one is None else one * 1e12 for one in peaks], dtype=pl.Float64),
    )


def utilisation(needs: pl.DataFrame, step_ns: float | None) -> Utilisation | None:
    """MFU of the mean step; None where no step or a device's peak is not known.

    Source: PaLM (2022), appendix B: FLOPs that the model needs, not those that are done, over those at peak.
    """
    if not step_ns or needs.is_empty() or needs["peak_flops"].null_count():
        return None
    flops, peak = float(needs["flops"].sum()), float(needs["peak_flops"].sum())
    return Utilisation(mfu=flops / (peak * step_ns / 1e9), flops_per_step=flops, peak_flops=peak)
