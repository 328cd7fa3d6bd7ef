"""GPUs: how busy, how fast, how hot, and why the clocks are not at their highest. For AMD's see `amd.py`.

Device: `gpu0`, the driver's order. Momentary: `busy_fraction`, `memory_used_bytes`, `sm_clock_hz`, `sm_clock_max_hz`,
`memory_clock_hz`, `power_w`, `power_limit_w`, `temperature_c`, `clock_event_reasons` (NVML's bit mask: 0x4 power cap,
0x8 hardware slowdown, 0x20 thermal, 0x40 hardware thermal, 0x80 power brake), `power_limit_default_w`,
`memory_temperature_c`, `pcie_generation`, `pcie_lanes` (some GPUs slow their link down when idle), `nvlinks_up`,
`remapped_rows_pending`. Cumulative: `energy_j`, `pcie_tx_bytes`, `pcie_rx_bytes`, `pcie_replays`, `nvlink_tx_bytes`,
`nvlink_rx_bytes`, `nvlink_errors` (CRC, replays, recoveries), `ecc_corrected`, `ecc_uncorrected` (since the driver was
loaded), `xid_errors` (since the start; each is a row of `gaps` too, with its number). How long the clocks were held
down: `power_capped_s`, `thermal_slowdown_s`, `hw_thermal_slowdown_s`, `power_brake_s`. A GPU has those that its driver
offers; of NVIDIA's, `energy_j`, `hw_thermal_slowdown_s` and `power_brake_s` are in every tenth sample.

Source: NVML (nvidia-ml-py), AMD SMI.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pynvml

from rankscope.collectors import topology
from rankscope.collectors.node import Collector, Node, Sample
from rankscope.collectors.node.gpu.amd import AmdGpus
from rankscope.collectors.untyped import Foreign
from rankscope.errors import Unavailable

_KIB = 1024
_ALL_LINKS = 2**32 - 1
_XIDS_AT_ONCE = 100  # a GPU that has fallen off the bus may report without end

_CONSTANT = "sm_clock_max_hz"  # 1.1 ms a reading on an H100
_SLOW = {"energy_j", "hw_thermal_slowdown_s", "power_brake_s"}  # 2.7, 0.5 and 0.5 ms there, the others 1.5 ms together
_SELDOM = 10  # of so many samples one has the slow ones

_samples = 0
_readings: list[tuple[str, str, Any, Callable[[Any], float]]] = []  # device, name, handle, read
_xids: _XidWatch | None = None
_amd: AmdGpus | None = None  # where there is no NVIDIA GPU


def start(node: Node) -> None:
    global _xids, _amd, _samples
    _samples = 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _amd = AmdGpus.begin(node)
        if _amd is None:
            raise Unavailable(f"no NVIDIA GPU can be read: {error}") from None
        return
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        for name, read in _READS.items():
            try:
                value = read(handle)
            except (pynvml.NVMLError, AttributeError):
                continue  # not offered by this GPU, driver or nvidia-ml-py
            again = (lambda _, value=value: value) if name == _CONSTANT else read
            _readings.append((f"gpu{index}", name, handle, again))
    _xids = _XidWatch.begin(node)


def sample(node: Node) -> Iterator[Sample]:
    global _samples
    if _amd:
        yield from _amd.sample(node)
    lost = set()
    has_slow, _samples = _samples % _SELDOM == 0, _samples + 1
    for reading in list(_readings):
        device, name, handle, read = reading
        if device in lost:
            _readings.remove(reading)
            continue
        if name in _SLOW and not has_slow:
            continue
        try:
            yield "gpu", name, device, read(handle)
        except pynvml.NVMLError as error:
            _readings.remove(reading)
            if error.value == pynvml.NVML_ERROR_GPU_IS_LOST:
                lost.add(device)
                node.gap("gpu", f"{device} cannot be read any more: {error}")
            else:
                node.gap("gpu", f"{name} of {device} cannot be read any more: {error}")
    if _xids:
        for device, count in _xids.read(node).items():
            yield "gpu", "xid_errors", device, float(count)


def stop() -> None:
    global _xids, _amd
    if _amd:
        _amd.end()
        _amd = None
        return
    if _xids:
        _xids.end()
    _xids = None
    _readings.clear()
    pynvml.nvmlShutdown()


def add_driver_facts(gpus: Iterable[topology.Device]) -> None:
    """Add the driver's facts on these GPUs. The collector must have started."""
    if _amd:
        _amd.add_driver_facts(gpus)
    else:
        topology.add_driver_facts(gpus, pynvml)


class _XidWatch:
    """The driver's error events (Xid) of all GPUs, as they come."""

    def __init__(self, events: Foreign, devices: dict[int | None, str]) -> None:
        self._events = events
        self._devices = devices
        self._counts = dict.fromkeys(devices.values(), 0)
        self._is_lost = False

    @classmethod
    def begin(cls, node: Node) -> _XidWatch | None:
        """None, and a gap, where no GPU's driver gives events."""
        devices = {}
        try:
            events = pynvml.nvmlEventSetCreate()
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                devices[_pointer(handle)] = f"gpu{index}"
        except (pynvml.NVMLError, AttributeError) as error:
            node.gap("gpu", f"the driver's error events (Xid) are not seen: {error}")
            return None
        return cls(events, devices)

    def read(self, node: Node) -> dict[str, int]:
        """Return how many there were of each GPU since the start; each new one is reported once."""
        for _ in range(_XIDS_AT_ONCE):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError as error:
                if error.value != pynvml.NVML_ERROR_TIMEOUT and not self._is_lost:  # a timeout: there is none
                    self._is_lost = True
                    node.gap("gpu", f"the driver's error events (Xid) cannot be read any more: {error}")
                break
            device = self._devices.get(_pointer(event.device), "a GPU")
            self._counts[device] = self._counts.get(device, 0) + 1
            node.gap("gpu", f"{device}: the driver reports Xid {event.eventData}; `dmesg` has its text")
        return self._counts

    def end(self) -> None:
        pynvml.nvmlEventSetFree(self._events)


def _pointer(handle: Foreign) -> int | None:
    """Return what identifies a device: a GPU that has fallen off the bus does not even give its index."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _field(handle: Foreign, field: int, link: int = 0) -> float:  # an opaque handle of NVML's
    (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [(field, link)])
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)
    value = answer.value
    return float(value.uiVal if answer.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else value.ullVal)


def _total(handle: Foreign, *fields: int) -> float:
    """Return the sum of those that the driver offers. Raises NVMLError if it offers none."""
    values = []
    for field in fields:
        try:
            values.append(_field(handle, field))
        except pynvml.NVMLError as error:
            refused = error
    if not values:
        raise refused
    return sum(values)


def _links_up(handle: Foreign) -> float:
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link))
        except pynvml.NVMLError as error:  # no such link
            refused = error
    if not states:
        raise refused
    return float(sum(states))


def _all_links(handle: Foreign, field: int) -> float:
    return _field(handle, field, _ALL_LINKS) * _KIB


def _ecc(handle: Foreign, kind: int) -> float:
    return float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, pynvml.NVML_VOLATILE_ECC))


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
    "power_limit_default_w": lambda gpu: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1e3,
    "memory_temperature_c": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_MEMORY_TEMP),
    "pcie_generation": lambda gpu: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu),
    "pcie_lanes": lambda gpu: pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu),
    "pcie_replays": lambda gpu: pynvml.nvmlDeviceGetPcieReplayCounter(gpu),
    "nvlinks_up": lambda gpu: _links_up(gpu),
    "nvlink_tx_bytes": lambda gpu: _all_links(gpu, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
    "nvlink_rx_bytes": lambda gpu: _all_links(gpu, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
    "nvlink_errors": lambda gpu: _total(
        gpu,
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    ),
    "ecc_corrected": lambda gpu: _ecc(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
    "ecc_uncorrected": lambda gpu: _ecc(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    "remapped_rows_pending": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_REMAPPED_PENDING),
    "power_capped_s": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP) / 1e9,
    "thermal_slowdown_s": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN) / 1e9,
    "hw_thermal_slowdown_s": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN) / 1e9,
    "power_brake_s": lambda gpu: _field(gpu, pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN) / 1e9,
}


collector = Collector(start=start, sample=sample, stop=stop)
