"""AMD GPUs for the collector `gpu`: the same counters as NVIDIA's, with the same names.

Most come from one reading of the driver's table of metrics per GPU. `clock_event_reasons` has NVML's bits: 0x4 power
cap (package power tracking), 0x40 thermal (socket, memory, voltage regulators), 0x8 slowdown by the hardware (PROCHOT;
of GPUs before MI300, which do not say why, any). A bit is set if the driver's counter of that has grown since the last
reading. Not `amdsmi_get_violation_status`, which waits 100 ms for a second reading.

Source: AMD SMI (`amdsmi`, a part of ROCm).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from rankscope.collectors.node import Node, Sample
from rankscope.collectors.topology import Device
from rankscope.collectors.topology import read as read_topology
from rankscope.collectors.untyped import Foreign
from rankscope.errors import Unavailable

__all__ = ["AmdGpus"]

_POWER_CAP, _SLOWDOWN, _THERMAL = 0x4, 0x8, 0x40
_RESIDENCIES = {
    "ppt_residency_acc": _POWER_CAP,
    "prochot_residency_acc": _SLOWDOWN,
    "socket_thm_residency_acc": _THERMAL,
    "vr_thm_residency_acc": _THERMAL,
    "hbm_thm_residency_acc": _THERMAL,
}
_GENERATIONS = {25: 1, 50: 2, 80: 3, 160: 4, 320: 5, 640: 6}  # by speed in 0.1 GT/s
_NOT_LOADED = (ImportError, KeyError, AttributeError, OSError)  # KeyError: amdsmi is there and ROCm's library is not
_NOT_OFFERED = (KeyError, TypeError, ValueError, AttributeError)  # "N/A", or a name that this version does not have


class AmdGpus:
    """All AMD GPUs of this node, in AMD SMI's order."""

    def __init__(self, smi: Foreign) -> None:  # the module amdsmi
        """Open the library. Raises AmdSmiException."""
        self._smi = smi
        self._gpus = [_Gpu(smi, index, handle) for index, handle in enumerate(smi.amdsmi_get_processor_handles())]

    @classmethod
    def begin(cls, node: Node) -> AmdGpus | None:
        """None where the node has none. Raises Unavailable."""
        if not any(gpu["vendor"] == "amd" for gpu in read_topology(node.sys)["gpus"]):
            return None
        try:
            smi = importlib.import_module("amdsmi")
        except _NOT_LOADED as error:
            raise Unavailable(f"the AMD GPUs cannot be read without ROCm's Python package amdsmi: {error!r}") from None
        try:
            smi.amdsmi_init()
            return cls(smi)
        except smi.AmdSmiException as error:
            raise Unavailable(f"the AMD GPUs cannot be read: {_line(error)}") from None

    def sample(self, node: Node) -> Iterator[Sample]:
        for gpu in self._gpus:
            yield from gpu.sample(node)

    def end(self) -> None:
        self._smi.amdsmi_shut_down()

    def add_driver_facts(self, gpus: Iterable[Device]) -> None:
        """Give each its `index` and `name`, and as `uuid` its PCI address: HIP's UUID is not that of all drivers."""
        by_address = {gpu["pci"]: gpu for gpu in gpus}
        for gpu in self._gpus:
            address = str(self._smi.amdsmi_get_gpu_device_bdf(gpu.handle)).lower()
            if address in by_address:
                name = self._smi.amdsmi_get_gpu_asic_info(gpu.handle)["market_name"]
                by_address[address] |= {"index": gpu.index, "uuid": address, "name": str(name)}


class _Gpu:
    def __init__(self, smi: Foreign, index: int, handle: Foreign) -> None:
        self.index = index
        self.handle = handle
        self._smi = smi
        self._before: Mapping[str, Any] = {}
        self._reported = False
        self._others = {name: ask for name, ask in _OTHERS.items() if self._offers(ask)}

    def sample(self, node: Node) -> Iterator[Sample]:
        device = f"gpu{self.index}"
        metrics = self._metrics(node)
        for name, read in _OF_METRICS.items():
            with contextlib.suppress(*_NOT_OFFERED):
                yield "gpu", name, device, float(read(metrics))
        reasons = self._reasons(metrics)
        if reasons is not None:
            yield "gpu", "clock_event_reasons", device, float(reasons)
        for name, ask in list(self._others.items()):
            try:
                yield "gpu", name, device, float(ask(self))
            except (self._smi.AmdSmiRetryException, *_NOT_OFFERED):
                continue  # not at this moment
            except self._smi.AmdSmiException as error:
                del self._others[name]
                node.gap("gpu", f"{name} of {device} cannot be read any more: {_line(error)}")

    def _offers(self, ask: Callable[[_Gpu], float]) -> bool:
        try:
            ask(self)
        except (self._smi.AmdSmiException, *_NOT_OFFERED):
            return False
        return True

    def of(self, function: str, *arguments: str) -> Foreign:
        """Return the result of AMD SMI's function for this GPU; an argument `Enum.MEMBER` is one of its constants."""
        constants = [getattr(getattr(self._smi, enum), member) for enum, member in (a.split(".") for a in arguments)]
        return getattr(self._smi, f"amdsmi_get_{function}")(self.handle, *constants)

    def _metrics(self, node: Node) -> Mapping[str, Any]:
        """Return the metrics; empty while the driver gives none, which is reported once."""
        try:
            found: Mapping[str, Any] = self.of("gpu_metrics_info")
        except self._smi.AmdSmiException as error:
            if not self._reported:
                node.gap("gpu", f"the metrics of gpu{self.index} cannot be read: {_line(error)}")
            self._reported = True
            return {}
        return found

    def _reasons(self, metrics: Mapping[str, Any]) -> int | None:
        """Return why the clock was held down since the last reading; None where the driver does not report it."""
        before, self._before = self._before, metrics
        if isinstance(metrics.get("accumulation_counter"), int):
            if not before:
                return None
            grown = (bit for name, bit in _RESIDENCIES.items() if _number(metrics, name) > _number(before, name))
            return sum(set(grown))
        throttled = metrics.get("indep_throttle_status")
        return _SLOWDOWN * throttled if isinstance(throttled, bool) else None


def _number(metrics: Mapping[str, Any], name: str) -> int:
    value = metrics.get(name)
    return value if isinstance(value, int) else 0


def _first(metrics: Mapping[str, Any], *names: str) -> float:
    """Return the first of these that is a number, or the mean of the numbers in it. Raises ValueError if none is."""
    for name in names:
        value = metrics.get(name)
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, (int, float)) and v]
        if numbers:
            return fmean(numbers)
    return float(metrics[names[-1]])  # 0 is one


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


_OF_METRICS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "busy_fraction": lambda m: m["average_gfx_activity"] / 100,
    "sm_clock_hz": lambda m: _first(m, "current_gfxclks", "current_gfxclk", "average_gfxclk_frequency") * 1e6,
    "memory_clock_hz": lambda m: _first(m, "current_uclk", "average_uclk_frequency") * 1e6,
    "power_w": lambda m: _first(m, "current_socket_power", "average_socket_power"),
    "temperature_c": lambda m: float(m["temperature_hotspot"]),
    "memory_temperature_c": lambda m: float(m["temperature_mem"]),
    "pcie_generation": lambda m: _GENERATIONS[m["pcie_link_speed"]],
    "pcie_lanes": lambda m: float(m["pcie_link_width"]),
    "pcie_replays": lambda m: float(m["pcie_replay_count_acc"]),
}
_OTHERS: dict[str, Callable[[_Gpu], float]] = {
    "memory_used_bytes": lambda gpu: gpu.of("gpu_memory_usage", "AmdSmiMemoryType.VRAM"),
    "sm_clock_max_hz": lambda gpu: gpu.of("clock_info", "AmdSmiClkType.GFX")["max_clk"] * 1e6,
    "power_limit_w": lambda gpu: gpu.of("power_cap_info")["power_cap"] / 1e6,
    "power_limit_default_w": lambda gpu: gpu.of("power_cap_info")["default_power_cap"] / 1e6,
    "energy_j": lambda gpu: _joules(gpu.of("energy_count")),
    "ecc_corrected": lambda gpu: gpu.of("gpu_total_ecc_count")["correctable_count"],
    "ecc_uncorrected": lambda gpu: gpu.of("gpu_total_ecc_count")["uncorrectable_count"],
}


def _joules(energy: Mapping[str, Any]) -> float:
    return float(energy["energy_accumulator"] * energy["counter_resolution"] / 1e6)
