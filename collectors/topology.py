"""The topology of a node: GPUs, network cards, their distances, and which cards are one rail.

Source: Linux `sysfs-bus-pci`, `sysfs-class-infiniband`, `sysfs-class-net`; NVML for NVLink (nvidia-ml-py).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rankscope.collectors.untyped import Foreign

__all__ = ["DISTANCES", "add_driver_facts", "described", "read"]

# From near to far, in the words of `nvidia-smi topo`: behind one PCIe switch, behind several, behind one host bridge,
# in one NUMA node, beyond it.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_VENDORS = {"0x10de": "nvidia", "0x1002": "amd"}
_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")  # VGA, 3D, display, accelerator

Device = dict[str, Any]


def read(sys: Path = Path("/sys")) -> dict[str, list[Device]]:
    """`gpus` in the order of their PCI addresses, and `nics`, the RDMA devices first.

    A GPU has `pci vendor numa_node pcie pcie_max nics distance`: the nearest cards, and how near. `pcie` is the link as
    it is, "32.0 GT/s x16", which some GPUs slow down when idle. A card has `name kind pci numa_node pcie pcie_max`,
    where its port is up `rate_bytes_per_s`, and `rail`: its place among the node's cards of its kind with that rate,
    which is that of the same rail on nodes that are built and cabled alike. What is not known is null.
    """
    found = [_pci_device(path) for path in sorted((sys / "bus" / "pci" / "devices").glob("*")) if _is_gpu(path)]
    nics = [*_rdma_devices(sys), *_interfaces(sys)]
    owners = {nic["pci"] for nic in nics if nic["kind"] != "ethernet"}
    nics = [nic for nic in nics if nic["kind"] != "ethernet" or nic["pci"] not in owners]
    _number_rails(nics)
    rdma = [nic for nic in nics if nic["kind"] != "ethernet" and nic["rate_bytes_per_s"]]
    candidates = rdma or [nic for nic in nics if nic["rate_bytes_per_s"]]
    for gpu in found:
        gpu["nics"], gpu["distance"] = _nearest(gpu, candidates)
    for device in (*found, *nics):
        del device["_path"]
    return {"gpus": found, "nics": nics}


def add_driver_facts(gpus: Iterable[Device], nvml: Foreign) -> None:  # the module pynvml
    """Give each NVIDIA GPU its `index`, `uuid` and `name`, and how many of its NVLinks are up, by where they lead.

    `nvlinks` has another GPU's PCI address, or `switch`, for a key. NVML must have been initialised. Raises NVMLError.
    """
    by_address = {gpu["pci"]: gpu for gpu in gpus}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = by_address.get(_address(nvml.nvmlDeviceGetPciInfo(handle).busId))
        if gpu is not None:
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            gpu |= {"index": index, "uuid": _word(uuid), "name": _word(name), "nvlinks": _nvlinks(nvml, handle)}


def described(topology: Mapping[str, list[Device]]) -> Iterator[tuple[str, str]]:
    """Name and one line for people, device by device."""
    for place, gpu in enumerate(topology["gpus"]):
        nics = f"nearest NIC {', '.join(gpu['nics'])} ({gpu['distance']})" if gpu["nics"] else "no NIC near it is known"
        links = ", ".join(f"{count} NVLinks to {end}" for end, count in gpu.get("nvlinks", {}).items())
        yield f"gpu{gpu.get('index', place)}", "; ".join(filter(None, (*_where(gpu), links, nics)))
    for nic in topology["nics"]:
        rate = f"{nic['rate_bytes_per_s'] * 8 / 1e9:.0f} Gbit/s" if nic["rate_bytes_per_s"] else "speed unknown"
        rail = "" if nic["rail"] is None else f"rail {nic['rail']}"
        yield nic["name"], "; ".join(filter(None, (nic["kind"], *_where(nic), rate, rail)))


def _where(device: Device) -> Iterator[str]:
    yield device["pci"] or "not on PCI"
    if device["numa_node"] is not None:
        yield f"NUMA node {device['numa_node']}"
    if device["pcie"]:
        most = device["pcie_max"]
        yield f"PCIe {device['pcie']}" + (f" of {most}" if most and most != device["pcie"] else "")


def _nvlinks(nvml: Foreign, handle: Foreign) -> dict[str, int]:
    ends: Counter[str] = Counter()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            is_switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            ends["switch" if is_switch else _address(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)] += 1
        except nvml.NVMLError:
            continue  # no such link, or not for this GPU
    return dict(ends)


def _word(text: bytes | str) -> str:
    return text.decode() if isinstance(text, bytes) else text


def _address(bus_id: bytes | str) -> str:
    """NVML's `00000000:3B:00.0` as sysfs writes it, `0000:3b:00.0`."""
    domain, _, rest = _word(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _is_gpu(path: Path) -> bool:
    kind, vendor = _text(path / "class") or "", _text(path / "vendor") or ""
    return vendor in _VENDORS and kind.startswith(_GPU_CLASSES)  # an NVSwitch is a bridge, 0x0680


def _pci_device(path: Path) -> Device:
    """Return the PCI device at or above this one: a card's driver may put devices of its own between."""
    real = path.resolve()
    while real.parent != real and not _ADDRESS.fullmatch(real.name):
        real = real.parent
    numa = _text(real / "numa_node") or ""
    return {
        "pci": real.name or None,
        "vendor": _VENDORS.get(_text(real / "vendor") or ""),
        "numa_node": int(numa) if numa.isdigit() else None,  # -1: unknown to the machine
        "pcie": _link(real, "current"),
        "pcie_max": _link(real, "max"),
        "_path": tuple(part for part in real.parts if _ADDRESS.fullmatch(part) or _ROOT.fullmatch(part)),
    }


def _link(device: Path, which: str) -> str | None:
    speed, width = _text(device / f"{which}_link_speed"), _text(device / f"{which}_link_width")
    if not speed or not width or not width.isdigit() or "GT/s" not in speed:
        return None
    return f"{speed.partition(' PCIe')[0]} x{width}"


def _rdma_devices(sys: Path) -> list[Device]:
    devices = []
    for path in sorted((sys / "class" / "infiniband").glob("*")):
        ports = sorted(path.glob("ports/*"))
        active = [port for port in ports if "ACTIVE" in (_text(port / "state") or "")]
        layer = _text(ports[0] / "link_layer") if ports else None
        kind = {"InfiniBand": "infiniband", "Ethernet": "roce"}.get(layer or "", "rdma")
        nic: Device = {"name": path.name, "kind": kind} | _pci_device(path / "device")
        nic["rate_bytes_per_s"] = sum(map(_rate_bytes_per_s, active)) or None
        devices.append(nic)
    return _by_address(devices)


def _interfaces(sys: Path) -> list[Device]:
    devices = []
    for path in sorted((sys / "class" / "net").glob("*")):
        nic: Device = {"name": path.name, "kind": "ethernet"} | _pci_device(path / "device")
        megabits = _text(path / "speed") or ""
        nic["rate_bytes_per_s"] = int(megabits) * 1e6 / 8 if megabits.isdigit() and int(megabits) else None
        if nic["pci"]:
            devices.append(nic)
    return _by_address(devices)


def _rate_bytes_per_s(port: Path) -> float:
    words = (_text(port / "rate") or "").split()  # "400 Gb/sec (4X NDR)"
    with contextlib.suppress(ValueError, IndexError):
        return float(words[0]) * 1e9 / 8
    return 0.0


def _by_address(devices: list[Device]) -> list[Device]:
    return sorted(devices, key=lambda nic: (nic["pci"] or "", nic["name"]))


def _number_rails(nics: Iterable[Device]) -> None:
    places: Counter[tuple[str, float]] = Counter()
    for nic in nics:
        nic["rail"] = None
        if nic["rate_bytes_per_s"]:
            like = (nic["kind"], nic["rate_bytes_per_s"])
            nic["rail"] = places[like]
            places[like] += 1


def _nearest(gpu: Device, nics: list[Device]) -> tuple[list[str], str | None]:
    distances = {nic["name"]: _distance(gpu, nic) for nic in nics}
    known = [distance for distance in distances.values() if distance]
    if not known:
        return [], None
    least = min(known, key=DISTANCES.index)
    return [name for name, distance in distances.items() if distance == least], least


def _distance(a: Device, b: Device) -> str | None:
    """How far two PCI devices are from each other, in the words of DISTANCES; None: their places are not known."""
    path, other = a["_path"], b["_path"]
    if not path or not other:
        return None
    common = next((i for i, (x, y) in enumerate(zip(path, other, strict=False)) if x != y), min(len(path), len(other)))
    if common == 0:
        if a["numa_node"] is None or b["numa_node"] is None:
            return None
        return "NODE" if a["numa_node"] == b["numa_node"] else "SYS"
    if common == 1:
        return "PHB"
    below = max(len(path), len(other)) - 1 - common  # bridges between the device and the one that both are behind
    return "PIX" if below <= 1 else "PXB"
