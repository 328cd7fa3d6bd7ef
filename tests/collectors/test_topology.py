"""Where a node's devices are, read from folders that look like /sys and from answers like NVML's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.analysis.metrics.rank_placement import rank_places
from rankscope.collectors import topology

GPU, NIC = ("0x10de", "0x030200"), ("0x15b3", "0x020000")


def pci(sys: Path, path: str, numa: int, kind: tuple[str, str], link: str = "32.0 GT/s PCIe", width: int = 16) -> Path:
    device = sys / "devices" / path
    device.mkdir(parents=True)
    facts = {"vendor": kind[0], "class": kind[1], "numa_node": str(numa), "current_link_speed": link}
    facts |= {"current_link_width": str(width), "max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"}
    for name, text in facts.items():
        (device / name).write_text(text + "\n")
    (sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
    (sys / "bus/pci/devices" / device.name).symlink_to(device)
    return device


def rdma(sys: Path, name: str, device: Path, state: str = "4: ACTIVE", layer: str = "InfiniBand") -> None:
    port = device / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    for file, text in {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": layer}.items():
        (port / file).write_text(text + "\n")
    (device / "infiniband" / name / "device").symlink_to(device)
    (sys / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (sys / "class/infiniband" / name).symlink_to(device / "infiniband" / name)


@pytest.fixture
def node(tmp_path):
    """Two NUMA nodes. In each a PCIe switch with a GPU and a 400 Gbit/s card; in the second one more GPU behind the
    same host bridge but not the switch, whose link has come down to eight lanes."""
    for numa, root in ((0, "pci0000:10"), (1, "pci0000:80")):
        bus = root[-2:]
        switch = f"{root}/0000:{bus}:01.0/0000:{bus}:02.0"
        pci(tmp_path, f"{switch}/0000:{bus}:03.0/0000:{bus}:04.0", numa, GPU)
        card = pci(tmp_path, f"{switch}/0000:{bus}:05.0/0000:{bus}:06.0", numa, NIC)
        rdma(tmp_path, f"mlx5_{numa}", card)
    pci(tmp_path, "pci0000:80/0000:80:07.0/0000:80:08.0", 1, GPU, width=8)
    return tmp_path


def test_every_gpu_knows_its_nearest_card(node):
    found = topology.read(node)
    assert [(gpu["pci"], gpu["numa_node"], gpu["nics"], gpu["distance"]) for gpu in found["gpus"]] == [
        ("0000:10:04.0", 0, ["mlx5_0"], "PIX"),
        ("0000:80:04.0", 1, ["mlx5_1"], "PIX"),
        ("0000:80:08.0", 1, ["mlx5_1"], "PHB"),
    ]
    assert [gpu["pcie"] for gpu in found["gpus"]] == ["32.0 GT/s x16", "32.0 GT/s x16", "32.0 GT/s x8"]


def test_cards_of_one_kind_are_rails_in_their_order(node):
    """A card without a link is on no rail, and an Ethernet card of its own is none of theirs."""
    down = pci(node, "pci0000:10/0000:10:09.0/0000:10:0a.0", 0, NIC)
    rdma(node, "mlx5_9", down, state="1: DOWN")
    plain = pci(node, "pci0000:10/0000:10:0b.0/0000:10:0c.0", 0, NIC)
    for name, device in (("eth0", plain), ("ib0", node / "bus/pci/devices/0000:10:06.0")):
        interface = device / "net" / name
        interface.mkdir(parents=True)
        (interface / "speed").write_text("25000\n")
        (interface / "device").symlink_to(device)
        (node / "class/net").mkdir(parents=True, exist_ok=True)
        (node / "class/net" / name).symlink_to(interface)
    nics = topology.read(node)["nics"]
    assert [(nic["name"], nic["kind"], nic["rail"], nic["rate_bytes_per_s"]) for nic in nics] == [
        ("mlx5_0", "infiniband", 0, 50e9),
        ("mlx5_9", "infiniband", None, None),
        ("mlx5_1", "infiniband", 1, 50e9),
        ("eth0", "ethernet", 0, 25e9 / 8),  # ib0 is mlx5_0's own
    ]


def test_places_beyond_the_host_bridge_are_known_by_numa_nodes(tmp_path):
    pci(tmp_path, "pci0000:10/0000:10:01.0/0000:10:04.0", 0, GPU)
    rdma(tmp_path, "mlx5_0", pci(tmp_path, "pci0000:20/0000:20:01.0/0000:20:04.0", 0, NIC))
    pci(tmp_path, "pci0000:80/0000:80:01.0/0000:80:04.0", 1, GPU)
    pci(tmp_path, "pci0000:90/0000:90:01.0/0000:90:04.0", -1, GPU)
    found = [(gpu["nics"], gpu["distance"]) for gpu in topology.read(tmp_path)["gpus"]]
    assert found == [(["mlx5_0"], "NODE"), (["mlx5_0"], "SYS"), ([], None)]


def test_nvlinks_are_counted_by_where_they_lead(node):
    """GPU 0 has two links to GPU 1 and one to a switch, of which one is down; GPU 1's driver reports no links."""

    class NVMLError(Exception):
        pass

    def state(handle, link):
        if handle == 1 or link > 3:
            raise NVMLError
        return link != 2

    far = {0: "00000000:80:04.0", 1: "00000000:80:04.0"}
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_FEATURE_ENABLED=1,
        NVML_NVLINK_DEVICE_TYPE_SWITCH=2,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=("00000000:10:04.0", b"00000000:80:04.0")[handle]),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: b"NVIDIA H100",
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2 if link > 1 else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=far[link]),
    )
    found = topology.read(node)
    topology.add_driver_facts(found["gpus"], nvml)
    assert [(gpu.get("index"), gpu.get("uuid"), gpu.get("nvlinks")) for gpu in found["gpus"]] == [
        (0, "GPU-0", {"0000:80:04.0": 2, "switch": 1}),
        (1, "GPU-1", {}),
        (None, None, None),
    ]
    lines = list(topology.described(found))
    assert lines[0] == (
        "gpu0",
        "0000:10:04.0; NUMA node 0; PCIe 32.0 GT/s x16; 2 NVLinks to 0000:80:04.0, 1 NVLinks to switch; "
        "nearest NIC mlx5_0 (PIX)",
    )
    assert lines[2] == (
        "gpu2",
        "0000:80:08.0; NUMA node 1; PCIe 32.0 GT/s x8 of 32.0 GT/s x16; nearest NIC mlx5_1 (PHB)",
    )


def test_rank_is_joined_to_its_gpu_and_its_card(node):
    """Rank 5's second attempt is on the GPU behind the slower link; rank 6 uses none, and node 1 reported nothing."""
    found = topology.read(node)
    for gpu, uuid in zip(found["gpus"], ("GPU-a", "GPU-b", "GPU-c"), strict=True):
        gpu["uuid"] = uuid
    reports = [{"rank": 5, "gpu_uuid": "GPU-a"}, {"rank": 5, "gpu_uuid": "GPU-c"}, {"rank": 6}]
    places = rank_places({0: {"topology": found, "ranks": reports}, 1: {"ranks": [{"rank": 7, "gpu_uuid": "GPU-a"}]}})
    assert places.to_dicts() == [
        {
            "rank": 5,
            "node": 0,
            "gpu": "0000:80:08.0",
            "numa_node": 1,
            "pcie": "32.0 GT/s x8",
            "pcie_max": "32.0 GT/s x16",
            "nics": ["mlx5_1"],
            "rails": [1],
            "distance": "PHB",
        }
    ]
