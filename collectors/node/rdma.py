"""InfiniBand and RoCE ports, EFA and eRDMA: cumulative traffic, congestion, retries and errors.

Device: `mlx5_0/1` (device/port). Every driver has names of its own; `COUNTERS` below says which of them become which of
ours. A port has those that its driver offers. `rate_bytes_per_s` is the port's speed.

A counter that wraps at 32 bits goes on growing here, and so does one that is reset (`perfquery -R`).
Those of InfiniBand's port management that stop at their highest value are left out from there on; `gaps` says so.

Source: `/sys/class/infiniband/*/ports/*/`; Linux `sysfs-class-infiniband` and the drivers mlx5, bnxt_re (Broadcom),
irdma (Intel), efa (AWS), erdma (Alibaba); InfiniBand Architecture Specification, PortCounters.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rankscope.collectors.node import Collector, Node, Sample
from rankscope.errors import Unavailable

# Our name: the drivers' names in the order of preference. `+` adds up, `counters/` is the folder of that
# name, the others are in `hw_counters/`. Ours are the kernel's own where it has one. Each counter read costs a system
# call and a node has up to 16 ports, so only those that say something about slowness are here.
COUNTERS: dict[str, tuple[str, ...]] = {
    "port_xmit_data_bytes": (
        "counters/port_xmit_data",
        "tx_bytes",
        "tx_bytes_cnt",
        "hw_tx_bytes_cnt",
        "ip4OutOctets+ip6OutOctets",
    ),
    "port_rcv_data_bytes": (
        "counters/port_rcv_data",
        "rx_bytes",
        "rx_bytes_cnt",
        "hw_rx_bytes_cnt",
        "ip4InOctets+ip6InOctets",
    ),
    "port_xmit_packets": (
        "counters/port_xmit_packets",
        "tx_pkts",
        "tx_packets_cnt",
        "hw_tx_packets_cnt",
        "ip4OutPkts+ip6OutPkts",
    ),
    "port_rcv_packets": (
        "counters/port_rcv_packets",
        "rx_pkts",
        "rx_packets_cnt",
        "hw_rx_packets_cnt",
        "ip4InPkts+ip6InPkts",
    ),
    "port_xmit_wait": ("counters/port_xmit_wait",),
    "port_xmit_discards": ("counters/port_xmit_discards",),
    "port_rcv_errors": ("counters/port_rcv_errors", "rx_roce_errors"),
    "rx_drops": ("rx_drops", "rx_roce_discards", "rx_disable_drop_cnt", "hw_rx_disable_drop_cnt"),
    "limit_drops": (
        "tx_bps_limit_drop_cnt+tx_pps_limit_drop_cnt+rx_bps_limit_drop_cnt+rx_pps_limit_drop_cnt",
        "hw_bps_limit_drop_cnt+hw_pps_limit_drop_cnt+hw_rx_bps_limit_drop_cnt+hw_rx_pps_limit_drop_cnt",
    ),
    "symbol_error": ("counters/symbol_error",),
    "link_error_recovery": ("counters/link_error_recovery",),
    "link_downed": ("counters/link_downed",),
    "local_link_integrity_errors": ("counters/local_link_integrity_errors",),
    "retransmits": ("retrans_pkts", "RetransSegs", "tcpRetransSegs"),
    "out_of_sequence": ("out_of_sequence", "oos_drop_count"),
    "out_of_buffer": ("out_of_buffer", "rx_out_of_buffer"),
    "packet_seq_err": ("packet_seq_err", "seq_err_naks_rcvd", "Nak Sequence Error"),
    "implied_nak_seq_err": ("implied_nak_seq_err",),
    "local_ack_timeout_err": ("local_ack_timeout_err", "to_retransmits", "retrans_timeout_events"),
    "rnr_nak_retry_err": ("rnr_nak_retry_err", "rnr_naks_rcvd", "RNR received"),
    "roce_adp_retrans": ("roce_adp_retrans",),
    "roce_slow_restart": ("roce_slow_restart",),
    "unresponsive_remotes": ("unresponsive_remote_events",),
    "impaired_remotes": ("impaired_remote_conn_events",),
    "np_cnp_sent": ("np_cnp_sent", "np_cnp_pkts", "tx_cnp_pkts", "cnpSent"),
    "np_ecn_marked_roce_packets": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts", "RxECNMrkd"),
    "rp_cnp_handled": ("rp_cnp_handled", "rx_cnp_pkts", "cnpHandled"),
}
# The kernel gives data in words of four bytes, as InfiniBand counts them, whatever the port is.
_WORD_BYTES = {"counters/port_xmit_data": 4, "counters/port_rcv_data": 4}
# Where a counter of PortCounters stops, if the port has no wider one.
_HIGHEST = {
    "port_xmit_wait": 2**32 - 1,
    "port_xmit_discards": 2**16 - 1,
    "port_rcv_errors": 2**16 - 1,
    "symbol_error": 2**16 - 1,
    "link_error_recovery": 2**8 - 1,
    "link_downed": 2**8 - 1,
    "local_link_integrity_errors": 2**4 - 1,
}
_WRAP = 2**32


@dataclass(slots=True)
class _Counter:
    """One of COUNTERS at one port: the files it is the sum of, kept open, and what they held."""

    device: str
    name: str
    unit_bytes: int
    fds: list[int]
    before: list[int]
    total: int

    def read(self) -> int:
        """Return the count so far, which never decreases."""
        for place, fd in enumerate(self.fds):
            value = int(os.pread(fd, 64, 0))
            before, self.before[place] = self.before[place], value
            grown = value - before
            if grown < 0:  # it has wrapped at 32 bits if it was near there, else it was reset to 0
                grown = grown + _WRAP if before < _WRAP <= before + _WRAP // 4 else value
            self.total += grown
        return self.total * self.unit_bytes


_counters: list[_Counter] = []
_rates: list[tuple[str, float]] = []


def start(node: Node) -> None:
    ports = sorted((node.sys / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        raise Unavailable("this node has no RDMA device")
    for port in ports:
        device = f"{port.parent.parent.name}/{port.name}"
        for name, sources in COUNTERS.items():
            _open(device, name, port, sources)
        _note_rate(device, port / "rate")
    if not any(counter.name.endswith("_data_bytes") for counter in _counters):
        node.gap("rdma", "no port reports its traffic: rankscope does not know the counter names of its driver")


def sample(node: Node) -> Iterator[Sample]:
    gone: set[str] = set()
    for device, rate in _rates:
        yield "rdma", "rate_bytes_per_s", device, rate
    for counter in list(_counters):
        if counter.device in gone:
            _drop(counter)
            continue
        try:
            value = counter.read()
        except (OSError, ValueError) as error:  # for instance, its driver was removed
            gone.add(counter.device)
            _rates[:] = [rate for rate in _rates if rate[0] != counter.device]
            _drop(counter)
            node.gap("rdma", f"{counter.device} cannot be read any more: {error}")
            continue
        if counter.before == [_HIGHEST.get(counter.name)]:
            node.gap(
                "rdma", f"{counter.name} of {counter.device} stands at its highest value: perfquery -R sets it back"
            )
            _drop(counter)
        else:
            yield "rdma", counter.name, counter.device, float(value)


def stop() -> None:
    for counter in list(_counters):
        _drop(counter)
    _rates.clear()


def _open(device: str, name: str, port: Path, sources: tuple[str, ...]) -> None:
    """Read the first of the sources of which there is a file that holds a number from now on."""
    for source in sources:
        opened = [found for part in source.split("+") if (found := _opened(port, part))]
        if opened:
            fds, values = [fd for fd, _ in opened], [value for _, value in opened]
            _counters.append(_Counter(device, name, _WORD_BYTES.get(source, 1), fds, values, sum(values)))
            return


def _opened(port: Path, part: str) -> tuple[int, int] | None:
    """Return a file descriptor and the number that it gave."""
    try:
        fd = os.open(port / (part if "/" in part else f"hw_counters/{part}"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return fd, int(os.pread(fd, 64, 0))
    except (OSError, ValueError):
        os.close(fd)
        return None


def _drop(counter: _Counter) -> None:
    _counters.remove(counter)
    for fd in counter.fds:
        os.close(fd)


def _note_rate(device: str, file: Path) -> None:
    try:
        gigabits = float(file.read_text().split()[0])  # "100 Gb/sec (4X EDR)"
    except (OSError, ValueError, IndexError):
        return
    _rates.append((device, gigabits * 1e9 / 8))


collector = Collector(start=start, sample=sample, stop=stop)
