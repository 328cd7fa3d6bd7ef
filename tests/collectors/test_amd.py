"""AMD GPUs, read through a module `amdsmi` that answers as AMD SMI 7 does for an MI300X and an MI250X."""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import pytest

from rankscope.collectors import topology
from rankscope.collectors.agent.node_sampler import Sampler
from rankscope.collectors.node import Node, gpu
from rankscope.collectors.rank import device
from rankscope.errors import Unavailable

AMDSMI = """
class AmdSmiException(Exception): pass
class AmdSmiRetryException(AmdSmiException): pass
class AmdSmiMemoryType: VRAM = 0
class AmdSmiClkType: GFX = 1

MI300X = {
    "temperature_hotspot": 61, "temperature_mem": 48, "average_gfx_activity": 97, "current_socket_power": 742,
    "average_socket_power": "N/A", "current_gfxclk": 2093, "current_gfxclks": [2100, 2100, 2090, 2090, "N/A", "N/A"],
    "average_gfxclk_frequency": "N/A", "current_uclk": 1300, "pcie_link_width": 16, "pcie_link_speed": 320,
    "pcie_replay_count_acc": 3, "indep_throttle_status": "N/A", "accumulation_counter": 1000,
    "ppt_residency_acc": 40, "prochot_residency_acc": 0, "socket_thm_residency_acc": 7, "vr_thm_residency_acc": 0,
    "hbm_thm_residency_acc": 0,
}
MI250X = {
    "temperature_hotspot": 52, "temperature_mem": "N/A", "average_gfx_activity": 0, "average_socket_power": 90,
    "current_socket_power": "N/A", "current_gfxclk": 800, "current_gfxclks": ["N/A"], "current_uclk": 400,
    "pcie_link_width": 16, "pcie_link_speed": 160, "accumulation_counter": "N/A", "indep_throttle_status": True,
}
metrics = [MI300X, MI250X]
broken = set()

def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return [0, 1]
def amdsmi_get_gpu_metrics_info(handle):
    if "metrics" in broken and handle == 0:
        raise AmdSmiException("Error code:\\n\\t2 | NOT_SUPPORTED")
    return dict(metrics[handle])
def amdsmi_get_gpu_memory_usage(handle, kind): return (68719476736, 0)[handle]
def amdsmi_get_clock_info(handle, kind): return {"clk": 2093, "max_clk": (2100, "N/A")[handle]}
def amdsmi_get_power_cap_info(handle): return {"power_cap": 750000000, "default_power_cap": 750000000}
def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": 1000000, "counter_resolution": 15.259, "timestamp": 1}
def amdsmi_get_gpu_total_ecc_count(handle):
    if handle == 1 or "ecc" in broken:
        raise AmdSmiException("Error code:\\n\\t2 | NOT_SUPPORTED")
    return {"correctable_count": 5, "uncorrectable_count": 0, "deferred_count": 0}
def amdsmi_get_gpu_device_bdf(handle): return ("0000:0C:00.0", "0000:22:00.0")[handle]
def amdsmi_get_gpu_asic_info(handle): return {"market_name": "AMD Instinct"}
"""


def no_nvml():
    raise NvmlError("Driver Not Loaded")


class NvmlError(Exception):
    pass


@pytest.fixture
def gaps():
    return []


@pytest.fixture
def node(tmp_path, gaps, monkeypatch):
    """A node with two AMD GPUs and no NVIDIA driver."""
    for address in ("0000:0c:00.0", "0000:22:00.0"):
        place = tmp_path / "sys" / "bus" / "pci" / "devices" / address
        place.mkdir(parents=True)
        for name, value in {"class": "0x120000", "vendor": "0x1002", "numa_node": "0"}.items():
            (place / name).write_text(value)
    monkeypatch.setattr(gpu, "pynvml", SimpleNamespace(NVMLError=NvmlError, nvmlInit=no_nvml))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    return Node(addresses=frozenset(), gap=lambda source, why: gaps.append((source, why)), sys=tmp_path / "sys")


@pytest.fixture
def amdsmi(tmp_path, monkeypatch):
    """Puts a module `amdsmi` on the path."""

    def put(body):
        (tmp_path / "amdsmi.py").write_text(textwrap.dedent(body))
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    sys.modules.pop("amdsmi", None)


def values(node, index):
    return {name: value for source, name, place, value in gpu.sample(node) if (source, place) == ("gpu", f"gpu{index}")}


def test_amd_gpus_have_the_counters_of_nvidia_ones(node, gaps, amdsmi):
    amdsmi(AMDSMI)
    gpu.start(node)
    try:
        assert values(node, 0) == {
            "busy_fraction": 0.97,
            "sm_clock_hz": 2.095e9,  # of its four XCDs
            "memory_clock_hz": 1.3e9,
            "power_w": 742,
            "temperature_c": 61,
            "memory_temperature_c": 48,
            "pcie_generation": 5,
            "pcie_lanes": 16,
            "pcie_replays": 3,
            "memory_used_bytes": 64 * 2**30,
            "sm_clock_max_hz": 2.1e9,
            "power_limit_w": 750,
            "power_limit_default_w": 750,
            "energy_j": pytest.approx(15.259),
            "ecc_corrected": 5,
            "ecc_uncorrected": 0,
        }
        assert values(node, 1) == {  # it does not offer the others
            "busy_fraction": 0,
            "sm_clock_hz": 8e8,
            "memory_clock_hz": 4e8,
            "clock_event_reasons": 0x8,  # it does not say why
            "power_w": 90,
            "temperature_c": 52,
            "pcie_generation": 4,
            "pcie_lanes": 16,
            "memory_used_bytes": 0,
            "power_limit_w": 750,
            "power_limit_default_w": 750,
            "energy_j": pytest.approx(15.259),
        }
        assert gaps == []
    finally:
        gpu.stop()


def test_what_held_the_clock_down_since_the_last_reading_has_nvmls_bits(node, gaps, amdsmi):
    amdsmi(AMDSMI)
    gpu.start(node)
    try:
        smi = sys.modules["amdsmi"]
        assert "clock_event_reasons" not in values(node, 0)  # nothing to compare with yet
        assert values(node, 0)["clock_event_reasons"] == 0
        smi.MI300X |= {"accumulation_counter": 2000, "ppt_residency_acc": 90}
        assert values(node, 0)["clock_event_reasons"] == 0x4
        smi.MI300X |= {"accumulation_counter": 3000, "ppt_residency_acc": 91, "hbm_thm_residency_acc": 1}
        assert values(node, 0)["clock_event_reasons"] == 0x44
        smi.broken |= {"ecc", "metrics"}
        for _ in range(2):
            assert not {"ecc_corrected", "busy_fraction"} & set(values(node, 0))
        assert [why for _, why in gaps] == [
            "the metrics of gpu0 cannot be read: Error code: 2 | NOT_SUPPORTED",
            "ecc_corrected of gpu0 cannot be read any more: Error code: 2 | NOT_SUPPORTED",
            "ecc_uncorrected of gpu0 cannot be read any more: Error code: 2 | NOT_SUPPORTED",
        ]
    finally:
        gpu.stop()


def test_rank_finds_its_gpu_by_the_pci_address(node, amdsmi, monkeypatch):
    """Torch on ROCm gives domain, bus and device; the node's topology has the same address as the GPU's identity."""
    amdsmi(AMDSMI)
    gpu.start(node)
    try:
        gpus = topology.read(node.sys)["gpus"]
        gpu.add_driver_facts(gpus)
    finally:
        gpu.stop()
    assert [(g["index"], g["uuid"], g["name"]) for g in gpus] == [
        (0, "0000:0c:00.0", "AMD Instinct"),
        (1, "0000:22:00.0", "AMD Instinct"),
    ]
    found = SimpleNamespace(name="AMD Instinct", uuid="3030-3030", pci_domain_id=0, pci_bus_id=0x22, pci_device_id=0)
    cuda = SimpleNamespace(
        is_initialized=lambda: True, current_device=lambda: 0, get_device_properties=lambda index: found
    )
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip="7.0"))
    monkeypatch.setitem(sys.modules, "torch", torch)
    said = []
    device.start(
        SimpleNamespace(send=said.append, guard=lambda name, run: run, on_tick=lambda run, **_: run(), device=0)
    )
    torch.version.hip = None
    device.start(
        SimpleNamespace(send=said.append, guard=lambda name, run: run, on_tick=lambda run, **_: run(), device=0)
    )
    assert [message["uuid"] for message in said] == ["0000:22:00.0", "GPU-3030-3030"]
    assert [message["name"] for message in said] == ["AMD Instinct"] * 2

    del found.pci_bus_id  # torch 2.5
    torch.version.hip, torch.__version__, gaps = "6.2", "2.5.1", []
    emit = SimpleNamespace(send=said.append, guard=lambda name, run: run, on_tick=lambda run, **_: run(), device=0)
    emit.gap = lambda table, source, why: gaps.append(why)
    device.start(emit)
    assert ["torch 2.5.1 does not say" in why for why in gaps] == [True]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (None, "without ROCm's Python package amdsmi: ModuleNotFoundError"),
        ("{}['libamd_smi.so']", "without ROCm's Python package amdsmi: KeyError"),  # as it fails without ROCm's library
        (
            "class AmdSmiException(Exception): pass\ndef amdsmi_init(): raise AmdSmiException('Error code:\\n\\t34')",
            "the AMD GPUs cannot be read: Error code: 34",
        ),
    ],
)
def test_amd_gpus_that_cannot_be_read_are_one_line(node, amdsmi, body, why):
    if body:
        amdsmi(body)
    with pytest.raises(Unavailable, match="AMD GPUs cannot be read") as caught:
        gpu.start(node)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_node_without_any_gpu_reports_what_it_did_before(node, tmp_path):
    node.sys = tmp_path / "empty"
    with pytest.raises(Unavailable, match="no NVIDIA GPU can be read: Driver Not Loaded"):
        gpu.start(node)


def test_the_agent_samples_them_and_places_them(node, amdsmi, tmp_path):
    amdsmi(AMDSMI)
    sampler = Sampler(frozenset(), hz=50)
    sampler.node.sys = node.sys
    sampler.start()
    sampler.finish()
    assert sampler.topology is not None
    assert [found["uuid"] for found in sampler.topology["gpus"]] == ["0000:0c:00.0", "0000:22:00.0"]
    read = [sampler.readings.get() for _ in range(sampler.readings.qsize())]
    assert {d for _, samples in read for source, _, d, _ in samples if source == "gpu"} == {"gpu0", "gpu1"}
