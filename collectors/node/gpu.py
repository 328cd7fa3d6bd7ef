"""NVIDIA GPUs: how busy, how fast, how hot, and why the clocks are not at their highest.

Device: `gpu0`, NVML's order. Momentary: `local_rank` (the one that uses it, if the node's ranks take the devices that
`CUDA_VISIBLE_DEVICES` leaves in their order), `busy_fraction`, `memory_used_bytes`, `sm_clock_hz`, `sm_clock_max_hz`,
`memory_clock_hz`, `power_w`, `power_limit_w`, `temperature_c`, `clock_event_reasons` (NVML's bit mask: 0x4 power cap,
0x8 hardware slowdown, 0x20 thermal, 0x40 hardware thermal, 0x80 power brake). Cumulative: `energy_j`, `pcie_tx_bytes`,
`pcie_rx_bytes`. A GPU has those that its driver offers.

Source: NVML (nvidia-ml-py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from rankscope.collectors.node import Node, Sample, Unavailable

tables = ("counters",)

_readings: list[tuple[str, str, Any, Callable[[Any], float]]] = []  # device, name, handle, read
_local_ranks: dict[str, int] = {}


def start(node: Node) -> None:  # noqa: ARG001
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Unavailable(f"no NVIDIA GPU can be read: {error}") from None
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for name, read in _READS.items():
            try:
                read(handle)
            except pynvml.NVMLError:
                continue  # not offered by this GPU or driver
            _readings.append((f"gpu{index}", name, handle, read))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    _local_ranks.update(_in_order(visible, pynvml.nvmlDeviceGetCount()))


def sample(node: Node) -> Iterator[Sample]:  # noqa: ARG001
    for device, local_rank in _local_ranks.items():
        yield "gpu", "local_rank", device, float(local_rank)
    for device, name, handle, read in _readings:
        yield "gpu", name, device, read(handle)


def stop() -> None:
    _readings.clear()
    _local_ranks.clear()
    pynvml.nvmlShutdown()


def _in_order(visible: str, count: int) -> dict[str, int]:
    """The local rank of each device; none where the devices are listed by another name than their number."""
    if not visible:
        return {f"gpu{index}": index for index in range(count)}
    listed = visible.split(",")
    if not all(word.strip().isdecimal() for word in listed):
        return {}
    return {f"gpu{int(word)}": place for place, word in enumerate(listed)}


def _field(handle: Any, field: int) -> float:  # noqa: ANN401  (an opaque handle of NVML's)
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [field])
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)
    return float(answer.value.ullVal)


# Not nvmlDeviceGetPcieThroughput: each call of it takes 20 ms.
_READS: dict[str, Callable[[Any], float]] = {
    "busy_fraction": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    "memory_used_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "sm_clock_hz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) * 1e6,
    "sm_clock_max_hz": lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM) * 1e6,
    "memory_clock_hz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM) * 1e6,
    "clock_event_reasons": lambda gpu: pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu),
    "power_w": lambda gpu: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
    "power_limit_w": lambda gpu: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "energy_j": lambda gpu: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
    "pcie_tx_bytes": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES),
    "pcie_rx_bytes": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES),
}
