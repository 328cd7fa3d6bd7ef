"""InfiniBand and RoCE ports: cumulative traffic, congestion, retries and errors.

Device: `mlx5_0/1` (device/port). Names are the kernel's, except `port_xmit_data_bytes` and `port_rcv_data_bytes`
(the kernel counts four-byte words) and `rate_bytes_per_s`, the port's speed. A port has those that its driver offers.

Source: `/sys/class/infiniband/*/ports/*/`, Linux `sysfs-class-infiniband`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rankscope.collectors.node import Node, Sample, Unavailable

tables = ("counters",)

_WORD_BYTES = 4
_IN_WORDS = ("port_xmit_data", "port_rcv_data")
# Those that say something about slowness: each costs a system call, and a node has up to 16 ports.
_COUNTERS = (
    *_IN_WORDS,
    "port_xmit_packets",
    "port_rcv_packets",
    "port_xmit_wait",
    "port_xmit_discards",
    "port_rcv_errors",
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "local_link_integrity_errors",
)
_HW_COUNTERS = (
    "out_of_sequence",
    "out_of_buffer",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "roce_slow_restart",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
)

_files: list[tuple[str, str, int]] = []  # device, name, file descriptor kept open
_rates: list[tuple[str, float]] = []


def start(node: Node) -> None:
    ports = sorted((node.sys / "class" / "infiniband").glob("*/ports/*"))
    if not ports:
        raise Unavailable("this node has no RDMA device")
    for port in ports:
        device = f"{port.parent.parent.name}/{port.name}"
        for folder, names in (("counters", _COUNTERS), ("hw_counters", _HW_COUNTERS)):
            _open(device, port / folder, names)
        _note_rate(device, port / "rate")


def sample(node: Node) -> Iterator[Sample]:  # noqa: ARG001
    for device, rate in _rates:
        yield "rdma", "rate_bytes_per_s", device, rate
    for device, name, fd in _files:
        value = int(os.pread(fd, 64, 0))
        if name in _IN_WORDS:
            yield "rdma", f"{name}_bytes", device, float(value * _WORD_BYTES)
        else:
            yield "rdma", name, device, float(value)


def stop() -> None:
    for _, _, fd in _files:
        os.close(fd)
    _files.clear()
    _rates.clear()


def _open(device: str, folder: Path, names: tuple[str, ...]) -> None:
    """Those of `names` that are there and hold a number are read from now on."""
    for name in names:
        try:
            fd = os.open(folder / name, os.O_RDONLY)
        except OSError:
            continue
        try:
            int(os.pread(fd, 64, 0))
        except (OSError, ValueError):
            os.close(fd)
            continue
        _files.append((device, name, fd))


def _note_rate(device: str, file: Path) -> None:
    try:
        gigabits = float(file.read_text().split()[0])  # "100 Gb/sec (4X EDR)"
    except (OSError, ValueError, IndexError):
        return
    _rates.append((device, gigabits * 1e9 / 8))
