"""The node's collectors against a real kernel where it has the source, else against folders that look like it."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

from rankscope.analysis.timeline.counters import rates
from rankscope.collectors.agent.node_sampler import Sampler
from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.node import Node, gpu, host, nic, rdma, tcp
from rankscope.dashboard.figures import counters as figures
from rankscope.errors import Unavailable


@pytest.fixture
def gaps():
    return []


@pytest.fixture
def node(gaps):
    return Node(addresses=frozenset(), gap=lambda source, why: gaps.append((source, why)))


@pytest.fixture
def read(node, monkeypatch):  # monkeypatch: what a test has patched holds until the collector is stopped
    """Start a collector, read it as often as asked, and stop it after the test."""
    running = []

    def read(collector):
        if collector not in running:
            collector.start(node)
            running.append(collector)
        samples = list(collector.sample(node))
        assert {sample[:2] for sample in samples} <= {(counter.source, counter.name) for counter in COUNTERS}
        return {(device, name): value for _, name, device, value in samples}

    yield read
    for collector in running:
        collector.stop()


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_rdma_counts_words_of_four_bytes(node, read, tmp_path):
    node.sys = tmp_path
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    put(port / "counters/port_xmit_data", "1000\n")
    put(port / "counters/port_xmit_wait", "7\n")
    put(port / "hw_counters/out_of_sequence", "3\n")
    put(port / "hw_counters/rnr_nak_retry_err", "N/A (no PMA)\n")
    put(port / "rate", "100 Gb/sec (4X EDR)\n")
    assert read(rdma) == {
        ("mlx5_0/1", "port_xmit_data_bytes"): 4000,
        ("mlx5_0/1", "port_xmit_wait"): 7,
        ("mlx5_0/1", "out_of_sequence"): 3,
        ("mlx5_0/1", "rate_bytes_per_s"): 12.5e9,
    }
    put(port / "counters/port_xmit_data", "2000\n")
    assert read(rdma)["mlx5_0/1", "port_xmit_data_bytes"] == 8000


@pytest.mark.parametrize(
    ("driver", "files", "expected"),
    [
        (
            "bnxt_re0",  # Broadcom
            {"tx_bytes": 100, "rx_pkts": 7, "to_retransmits": 2, "seq_err_naks_rcvd": 3, "rx_ecn_marked_pkts": 4},
            {
                "port_xmit_data_bytes": 100,
                "port_rcv_packets": 7,
                "local_ack_timeout_err": 2,
                "packet_seq_err": 3,
                "np_ecn_marked_roce_packets": 4,
            },
        ),
        (
            "irdma0",  # Intel: bytes by protocol
            {"ip4OutOctets": 60, "ip6OutOctets": 40, "RetransSegs": 5, "cnpHandled": 6, "RNR received": 7},
            {"port_xmit_data_bytes": 100, "retransmits": 5, "rp_cnp_handled": 6, "rnr_nak_retry_err": 7},
        ),
        (
            "rdmap0s6",  # EFA
            {"rx_bytes": 9, "rx_drops": 1, "retrans_pkts": 2, "retrans_timeout_events": 3, "submitted_cmds": 99},
            {"port_rcv_data_bytes": 9, "rx_drops": 1, "retransmits": 2, "local_ack_timeout_err": 3},
        ),
        (
            "erdma_0",  # Alibaba, by the names of its own kernel
            {"hw_tx_packets_cnt": 8, "hw_bps_limit_drop_cnt": 1, "hw_rx_pps_limit_drop_cnt": 2},
            {"port_xmit_packets": 8, "limit_drops": 3},
        ),
    ],
)
def test_every_drivers_names_become_ours(node, read, tmp_path, driver, files, expected):
    node.sys = tmp_path
    for file, value in files.items():
        put(tmp_path / f"class/infiniband/{driver}/ports/1/hw_counters/{file}", f"{value}\n")
    assert read(rdma) == {(f"{driver}/1", name): value for name, value in expected.items()}


def test_rdma_device_that_goes_is_reported_once_and_the_others_stay(node, read, tmp_path, gaps):
    node.sys = tmp_path
    ports = [tmp_path / f"class/infiniband/mlx5_{card}/ports/1" for card in range(2)]
    for port in ports:
        put(port / "counters/port_xmit_data", "1000\n")
        put(port / "counters/port_xmit_wait", "7\n")
        put(port / "rate", "100 Gb/sec (4X EDR)\n")
    assert len(read(rdma)) == 6
    put(ports[0] / "counters/port_xmit_data", "")
    put(ports[0] / "counters/port_xmit_wait", "")
    read(rdma)
    assert read(rdma).keys() == {
        ("mlx5_1/1", name) for name in ("port_xmit_data_bytes", "port_xmit_wait", "rate_bytes_per_s")
    }
    ((source, why),) = gaps
    assert (source, why.partition(":")[0]) == ("rdma", "mlx5_0/1 cannot be read any more")


def test_rdma_counters_never_fall(node, read, tmp_path, gaps):
    """One counter wraps at 32 bits, another is reset; a third stops where InfiniBand's do."""
    node.sys = tmp_path
    counters = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    for waits, packets, downed in ((2**32 - 10, 1000, 254), (5, 20, 255)):
        put(counters / "port_xmit_wait", f"{waits}\n")
        put(counters / "port_xmit_packets", f"{packets}\n")
        put(counters / "link_downed", f"{downed}\n")
        found = {name: value for (_, name), value in read(rdma).items()}
    assert found == {"port_xmit_wait": 2**32 + 5, "port_xmit_packets": 1020}
    assert gaps[-1] == ("rdma", "link_downed of mlx5_0/1 stands at its highest value: perfquery -R sets it back")


def test_node_without_rdma_says_so(node, tmp_path):
    node.sys = tmp_path
    with pytest.raises(Unavailable, match="no RDMA device"):
        rdma.start(node)


def test_interfaces_that_carried_something_are_read(node, read, tmp_path):
    node.proc, node.sys = tmp_path / "proc", tmp_path / "sys"
    put(
        node.proc / "net/dev",
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
        "    lo: 900 9 0 0 0 0 0 0 900 9 0 0 0 0 0 0\n"
        "  eth0: 100 1 2 3 0 0 0 0 200 4 5 6 0 0 0 0\n"
        "  eth1: 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n",
    )
    put(node.sys / "class/net/eth0/speed", "10000\n")
    assert read(nic) == {
        ("eth0", "rx_bytes"): 100,
        ("eth0", "rx_packets"): 1,
        ("eth0", "rx_errors"): 2,
        ("eth0", "rx_drops"): 3,
        ("eth0", "tx_bytes"): 200,
        ("eth0", "tx_packets"): 4,
        ("eth0", "tx_errors"): 5,
        ("eth0", "tx_drops"): 6,
        ("eth0", "speed_bytes_per_s"): 1.25e9,
    }


def test_a_virtual_pair_has_no_speed_and_a_bond_has(node, read, tmp_path):
    """A veth says 10 Gb/s whatever carries it."""
    node.proc, node.sys = tmp_path / "proc", tmp_path / "sys"
    numbers = " ".join(["1"] * 16)
    put(node.proc / "net/dev", f"\n\nveth0: {numbers}\nbond0: {numbers}\n")
    (node.sys / "class/net").mkdir(parents=True)
    for interface, about in (("veth0", "INTERFACE=veth0\n"), ("bond0", "DEVTYPE=bond\nINTERFACE=bond0\n")):
        device = node.sys / "devices/virtual/net" / interface
        put(device / "uevent", about)
        put(device / "speed", "10000\n")
        (node.sys / "class/net" / interface).symlink_to(device)
    assert [device for device, name in read(nic) if name == "speed_bytes_per_s"] == ["bond0"]


def test_host_and_a_rank_of_it_are_read(node, read):
    node.pids = {"rank3": os.getpid(), "rank4": 2**22 + 1}  # the second is long gone
    first = read(host)
    sum(range(5_000_000))
    second = read(host)
    assert second["rank3", "cpu_s"] >= first["rank3", "cpu_s"] > 0
    assert 10e6 < second["rank3", "rss_bytes"] < second["", "memory_available_bytes"]
    assert second["", "cpu_busy_s"] >= first["", "cpu_busy_s"] > 0
    assert 0 <= second["", "cpu_busy_fraction"] <= 1
    assert {"load_1min", "page_faults", "swap_in_bytes", "cpu_steal_s"} <= {name for _, name in second}
    assert second["rank3", "main_thread_queued_s"] >= first["rank3", "main_thread_queued_s"] >= 0
    assert not any(device == "rank4" for device, _ in second)


def test_what_a_ranks_main_thread_gets_is_read_of_the_thread_that_trains(node, read, tmp_path):
    """Process 10 trains in thread 12, process 11 in its first."""
    cgroup(node, tmp_path, "0::/\n")
    node.pids, node.main_tids = {"rank0": 10, "rank1": 11}, {"rank0": 12, "rank1": 11}
    for pid, folder, queued in ((10, "10/task/12", 2), (11, "11", 1)):
        put(node.proc / str(pid) / "stat", f"{pid} (python) " + " ".join(["0"] * 50))
        put(node.proc / folder / "schedstat", f"0 {queued}000000000 7\n")
        put(node.proc / folder / "status", f"nonvoluntary_ctxt_switches:\t{10 * queued}\n")
    readings = read(host)
    assert [readings[f"rank{rank}", "main_thread_queued_s"] for rank in (0, 1)] == [2.0, 1.0]
    assert [readings[f"rank{rank}", "main_thread_involuntary_switches"] for rank in (0, 1)] == [20.0, 10.0]


def cgroup(node: Node, tmp_path: Path, membership: str) -> Path:
    """A node that is real but for its control groups."""
    node.sys = tmp_path / "sys"
    node.proc = tmp_path / "proc"
    put(node.proc / "self/cgroup", membership)
    for name in ("meminfo", "vmstat"):
        put(node.proc / name, Path("/proc", name).read_text())
    return node.sys / "fs/cgroup"


def throttling(readings: dict[tuple[str, str], float]) -> dict[str, float]:
    return {name: value for (_, name), value in readings.items() if name.startswith("cgroup")}


def test_limit_of_the_group_around_is_found_v2(node, read, tmp_path):
    root = cgroup(node, tmp_path, "0::/pod/container\n")
    put(root / "pod/container/cpu.max", "max 100000\n")
    put(root / "pod/cpu.max", "150000 100000\n")
    put(root / "pod/cpu.stat", "usage_usec 9\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500000\n")
    assert throttling(read(host)) == {
        "cgroup_cpus": 1.5,
        "cgroup_periods": 10,
        "cgroup_throttled_periods": 4,
        "cgroup_throttled_s": 2.5,
    }


def test_limit_is_found_v1_where_the_path_is_the_hosts(node, read, tmp_path):
    root = cgroup(node, tmp_path, "4:cpu,cpuacct:/docker/abc\n0::/\n") / "cpu,cpuacct"
    put(root / "cpu.cfs_quota_us", "50000\n")
    put(root / "cpu.cfs_period_us", "100000\n")
    put(root / "cpu.stat", "nr_periods 10\nnr_throttled 4\nthrottled_time 2500000000\n")
    assert throttling(read(host))["cgroup_cpus"] == 0.5
    assert throttling(read(host))["cgroup_throttled_s"] == 2.5


def test_group_of_a_rank_that_is_not_the_nodes_is_read_for_the_rank(node, read, tmp_path):
    root = cgroup(node, tmp_path, "0::/node\n")
    for name, throttled in (("node", 1), ("job", 3)):
        put(root / name / "cpu.max", "150000 100000\n")
        put(root / name / "cpu.stat", f"nr_periods 10\nnr_throttled 4\nthrottled_usec {throttled}000000\n")
    node.pids = {"rank0": 10, "rank1": 11}
    for pid, group in ((10, "node"), (11, "job")):
        put(node.proc / str(pid) / "cgroup", f"0::/{group}\n")
        put(node.proc / str(pid) / "schedstat", "5000000000 250000000 7\n")
        put(node.proc / str(pid) / "stat", f"{pid} (python) " + " ".join(["0"] * 50))
        put(node.proc / str(pid) / "status", "Name:\tpython\n")
    readings = read(host)
    assert {key: v for key, v in readings.items() if key[1] in ("cgroup_throttled_s", "main_thread_queued_s")} == {
        ("", "cgroup_throttled_s"): 1.0,
        ("rank0", "main_thread_queued_s"): 0.25,
        ("rank1", "main_thread_queued_s"): 0.25,
        ("rank1", "cgroup_throttled_s"): 3.0,
    }


def test_memory_stalls_are_read_where_the_kernel_has_them(node, read, tmp_path):
    cgroup(node, tmp_path, "0::/\n")
    assert ("", "memory_stalled_s") not in read(host)
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n"
    put(node.proc / "pressure/memory", text)
    assert read(host)["", "memory_stalled_s"] == 2.5


def test_no_limit_is_no_reading(node, read, tmp_path):
    cgroup(node, tmp_path, "0::/\n")
    assert throttling(read(host)) == {}


@pytest.fixture
def connect():
    """Connect to a local address and have both ends closed after the test."""
    ends = []

    def connect(address: str) -> tuple[socket.socket, socket.socket]:
        with socket.create_server((address, 0)) as server:
            client = socket.create_connection(server.getsockname())
            ends.extend((client, server.accept()[0]))
        return ends[-2], ends[-1]

    yield connect
    for end in ends:
        end.close()


def send(client: socket.socket, other: socket.socket, count: int) -> None:
    client.sendall(bytes(count))
    left = count
    while left:
        left -= len(other.recv(left))


def test_tcp_traffic_is_counted_per_rank_and_address_and_outlives_its_socket(node, read, connect):
    """Both ends are this process, so what one sends the other receives. The handshake may count as one byte."""
    node.pids = {"rank3": os.getpid()}
    client, other = connect("127.0.0.1")
    send(client, other, 300_000)
    first = read(tcp)
    device = "rank3>127.0.0.1"
    assert first[device, "bytes_sent"] == pytest.approx(300_000, abs=2)
    assert first[device, "bytes_received"] == 300_000
    assert first[device, "sockets"] == 2
    assert 0 < first[device, "min_rtt_s"] <= first[device, "rtt_s"] < 1
    assert first[device, "retransmits"] == 0
    assert 10_000 < first[device, "window_bytes"] < 2**30
    second = read(tcp)
    assert second[device, "bytes_sent"] == first[device, "bytes_sent"]
    assert (device, "rtt_s") not in second  # nothing was sent in between
    client.close()
    other.close()
    third = read(tcp)
    assert third[device, "bytes_sent"] == first[device, "bytes_sent"]
    assert third[device, "sockets"] == 0


def test_tcp_within_the_node_and_of_others_is_left_out(node, read, connect):
    client, other = connect("127.0.0.1")
    send(client, other, 1000)
    assert read(tcp) == {}  # no rank has it
    node.pids = {"rank3": os.getpid()}
    node.addresses = frozenset({"127.0.0.1"})
    assert read(tcp) == {}


def test_more_addresses_than_are_read_are_a_gap(node, gaps, read, connect, monkeypatch):
    monkeypatch.setattr(tcp, "MAX_PAIRS", 1)
    node.pids = {"rank3": os.getpid()}
    connect("127.0.0.1")
    connect("127.0.0.2")
    read(tcp)
    devices = {device for device, _ in read(tcp)}
    assert len(devices) == 1
    assert gaps == [("tcp", "the ranks talk to more than 1 addresses; further ones are not read")]


class NvmlError(Exception):
    def __init__(self, text, value=3):
        super().__init__(text)
        self.value = value


def refuse(*_):
    raise NvmlError("Not Supported")


def lose(*_):
    raise NvmlError("GPU is lost", 15)


def time_out():
    raise NvmlError("Timeout", 10)


def test_gpu_units_and_what_a_gpu_does_not_offer(read, monkeypatch):
    """A made NVML with one GPU that knows no energy and no PCIe counters."""
    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        NVML_SUCCESS=0,
        NVML_FI_DEV_PCIE_COUNT_TX_BYTES=197,
        NVML_FI_DEV_PCIE_COUNT_RX_BYTES=198,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=25),
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=4096),
        nvmlDeviceGetClockInfo=lambda gpu, kind: 1500,
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 2000,
        nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: 4,
        nvmlDeviceGetPowerUsage=lambda gpu: 350_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetTemperature=lambda gpu, sensor: 60,
        nvmlDeviceGetTotalEnergyConsumption=refuse,
        nvmlDeviceGetFieldValues=refuse,
    )
    monkeypatch.setattr(gpu, "pynvml", nvml)
    assert {name: value for (_, name), value in read(gpu).items()} == {
        "busy_fraction": 0.25,
        "memory_used_bytes": 4096,
        "sm_clock_hz": 1.5e9,
        "sm_clock_max_hz": 2e9,
        "memory_clock_hz": 1.5e9,
        "clock_event_reasons": 4,
        "power_w": 350,
        "power_limit_w": 700,
        "temperature_c": 60,
    }


def test_gpu_has_links_errors_and_reasons_of_low_clocks(node, read, gaps, monkeypatch):
    """NVLink counts in KiB, slowdowns in ns, one of two links is up; an Xid 79 comes, then energy and events are gone.

    A GPU that has fallen off the bus (79) does not give its index.
    """
    fields = {1: 2048, 2: 4096, 3: 5, 4: 1, 5: 2_500_000_000, 6: 1}
    xids = [SimpleNamespace(device=0, eventData=79)]

    def field_values(handle, asked):
        ((field, link),) = asked
        known = field in fields and (link == 2**32 - 1 or field > 2)  # the link's traffic is asked for all links
        value = SimpleNamespace(ullVal=fields.get(field), uiVal=fields.get(field))
        return (SimpleNamespace(nvmlReturn=0 if known else 3, value=value, valueType=1),)

    def state(handle, link):
        return (1, 0)[link] if link < 2 else refuse()

    nvml = SimpleNamespace(
        NVMLError=NvmlError,
        NVML_SUCCESS=0,
        NVML_ERROR_TIMEOUT=10,
        NVML_ERROR_GPU_IS_LOST=15,
        NVML_VALUE_TYPE_UNSIGNED_INT=1,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_VOLATILE_ECC=0,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=0,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX=1,
        NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX=2,
        NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL=3,
        NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL=99,
        NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL=4,
        NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL=99,
        NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP=5,
        NVML_FI_DEV_REMAPPED_PENDING=6,
        nvmlEventTypeXidCriticalError=8,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetIndex=refuse,
        nvmlDeviceGetFieldValues=field_values,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetTotalEccErrors=lambda handle, kind, counter: 10 + kind,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 5000,
        nvmlEventSetCreate=lambda: "events",
        nvmlEventSetFree=lambda events: None,
        nvmlDeviceRegisterEvents=lambda handle, kinds, events: None,
        nvmlEventSetWait_v2=lambda events, timeout: xids.pop() if xids else time_out(),
    )
    monkeypatch.setattr(gpu, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a1f")
    expected = {
        "energy_j": 5,
        "nvlink_tx_bytes": 2048 * 1024,
        "nvlink_rx_bytes": 4096 * 1024,
        "nvlink_errors": 6,
        "nvlinks_up": 1,
        "ecc_corrected": 10,
        "ecc_uncorrected": 11,
        "remapped_rows_pending": 1,
        "power_capped_s": 2.5,
        "xid_errors": 1,
    }
    assert {name: value for (_, name), value in read(gpu).items()} == expected
    assert gaps == [("gpu", "gpu0: the driver reports Xid 79; `dmesg` has its text")]
    nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    del expected["energy_j"]
    for _ in range(10):  # one of ten samples has what takes long to read
        assert {name: value for (_, name), value in read(gpu).items()} == expected
    assert gaps[1:] == [("gpu", "energy_j of gpu0 cannot be read any more: Not Supported")]
    nvml.nvmlDeviceGetTotalEccErrors = nvml.nvmlDeviceGetFieldValues = nvml.nvmlDeviceGetNvLinkState = lose
    assert read(gpu) == {("gpu0", "xid_errors"): 1}
    assert gaps[2:] == [("gpu", "gpu0 cannot be read any more: GPU is lost")]
    nvml.nvmlEventSetWait_v2 = refuse
    assert [read(gpu)["gpu0", "xid_errors"] for _ in range(2)] == [1, 1]
    assert gaps[3:] == [("gpu", "the driver's error events (Xid) cannot be read any more: Not Supported")]


def test_collector_that_fails_is_switched_off_alone(monkeypatch):
    def fail(node):
        raise RuntimeError("no")

    monkeypatch.setattr(nic, "collector", replace(nic.collector, sample=fail))
    sampler = Sampler(frozenset(), hz=1000)
    sampler.start()
    read = [sampler.readings.get(timeout=10)[1] for _ in range(200)]
    sources = {source for samples in read for source, *_ in samples}
    assert "host" in sources
    assert "nic" not in sources
    sampler.finish()
    gaps = [sampler.gaps.get() for _ in range(sampler.gaps.qsize())]
    assert [why for source, why, _ in gaps if source == "nic"] == ["the collector was switched off: RuntimeError: no"]


def test_counter_that_the_list_lacks_is_not_recorded_and_a_gap_says_so_once(monkeypatch):
    def sample(of):
        return [("nic", "rx_bytes", "a", 1), ("nic", "rx_colours", "a", 2)]

    monkeypatch.setattr(nic, "collector", replace(nic.collector, sample=sample))
    sampler = Sampler(frozenset(), hz=1000)
    sampler.start()
    read = [sampler.readings.get(timeout=10)[1] for _ in range(100)]
    sampler.finish()
    assert {sample for samples in read for sample in samples if sample[0] == "nic"} == {("nic", "rx_bytes", "a", 1.0)}
    gaps = [sampler.gaps.get() for _ in range(sampler.gaps.qsize())]
    lacking = "rx_colours is not recorded: collectors/counters.py lacks it"
    assert [why for source, why, _ in gaps if source == "nic"] == [lacking]


def test_every_counter_has_a_unit_and_a_kind_and_means_the_same_in_each_collector():
    assert len({(one.source, one.name) for one in COUNTERS}) == len(COUNTERS)
    assert all(one.unit and one.kind in ("gauge", "counter") and one.doc.endswith(".") for one in COUNTERS)
    assert len({(one.name, one.unit, one.kind) for one in COUNTERS}) == len({one.name for one in COUNTERS})


def test_links_that_go_and_links_that_slow_down_stay_visible():
    """NVLinks fall from 18 to 16, a PCIe link from generation 5 to 1: each fall is shown as it was read."""
    fallen = {"nvlinks_up": [18.0, 18.0, 16.0], "pcie_generation": [5.0, 1.0, 1.0], "pcie_lanes": [16.0, 8.0, 4.0]}
    fallen |= {"memory_temperature_c": [90.0, 80.0, 70.0], "power_limit_default_w": [700.0, 700.0, 500.0]}
    fallen |= {"remapped_rows_pending": [1.0, 1.0, 0.0]}
    rows = pl.DataFrame(
        [
            {"node": 0, "time_ns": second * 10**9, "source": "gpu", "name": name, "device": "gpu0", "value": value}
            for name, values in fallen.items()
            for second, value in enumerate(values)
        ]
    )
    shown = rates(rows)
    for name, values in fallen.items():
        assert shown.filter(pl.col("name") == name)["value"].to_list() == values
        assert figures.series(rows, "gpu", name)["value"].to_list() == values
    assert {name for _, name in figures.changing(rows)[0]} == set(fallen)
    assert (figures.title_of("gpu", "nvlinks_up"), figures.written("nvlinks_up", 16.0)) == ("gpu: nvlinks up", "16")


def test_collector_that_hangs_costs_its_own_source_and_is_reported_once(monkeypatch):
    """A driver does not answer the second question; host and the others are read on meanwhile."""
    asked, answer = [], threading.Event()

    def sample(node):
        asked.append(time.perf_counter_ns())
        if len(asked) > 1:
            answer.wait()
        return [("nic", "rx_bytes", "eth0", 1.0)]

    monkeypatch.setattr(nic, "collector", replace(nic.collector, sample=sample))
    sampler = Sampler(frozenset(), hz=50)
    sampler.start()
    from_hosts = 0
    while from_hosts < 10:
        _, samples = sampler.readings.get(timeout=10)
        from_hosts += len(asked) > 1 and any(source == "host" for source, *_ in samples)
        sampler.report_hanging(0.1)
    sampler.report_hanging(0.1)
    sampler.finish()
    answer.set()
    gaps = [sampler.gaps.get() for _ in range(sampler.gaps.qsize())]
    ((why, since_ns),) = [(why, time_ns) for source, why, time_ns in gaps if source == "nic"]
    assert why == "the collector hangs: until it answers, nothing of its source is seen"
    assert abs(since_ns - asked[1]) < 50e6
