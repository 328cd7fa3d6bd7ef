"""Network interfaces: cumulative traffic, errors and drops, and the speed of the link.

Names: `rx_bytes tx_bytes rx_packets tx_packets rx_errors tx_errors rx_drops tx_drops` (cumulative) and
`speed_bytes_per_s` where the driver knows it: a pair of virtual interfaces (veth, as in containers) says 10 Gb/s
whatever carries it, and so says nothing. Interfaces that never carried anything, and `lo`, are left out.

Source: `/proc/net/dev`, `/sys/class/net`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from rankscope.collectors.node import Collector, Node, Sample, read
from rankscope.errors import Unavailable

MAX_INTERFACES = 64
# Position of each number behind the interface's name.
_COLUMNS = {
    "rx_bytes": 0,
    "rx_packets": 1,
    "rx_errors": 2,
    "rx_drops": 3,
    "tx_bytes": 8,
    "tx_packets": 9,
    "tx_errors": 10,
    "tx_drops": 11,
}

_reported = False
_is_bare: dict[str, bool] = {}  # virtual; a bond, a VLAN or a bridge has a type, and the speed of what is below it


def start(node: Node) -> None:
    global _reported
    _reported = False
    _is_bare.clear()
    if not (node.proc / "net" / "dev").exists():
        raise Unavailable("there is no /proc/net/dev")


def sample(node: Node) -> Iterator[Sample]:
    interfaces = list(_interfaces(node))
    _report_if_too_many(node, len(interfaces))
    for interface, numbers in interfaces[:MAX_INTERFACES]:
        for name, column in _COLUMNS.items():
            yield "nic", name, interface, float(numbers[column])
        speed = _speed_bytes_per_s(node, interface)
        if speed:
            yield "nic", "speed_bytes_per_s", interface, speed


def stop() -> None:
    pass


def _interfaces(node: Node) -> Iterator[tuple[str, list[str]]]:
    for line in read(f"{node.proc}/net/dev").splitlines()[2:]:
        interface, _, rest = line.partition(":")
        numbers = rest.split()
        carried = numbers[_COLUMNS["rx_bytes"]] != "0" or numbers[_COLUMNS["tx_bytes"]] != "0"
        if carried and interface.strip() != "lo":
            yield interface.strip(), numbers


def _speed_bytes_per_s(node: Node, interface: str) -> float | None:
    about = f"{node.sys}/class/net/{interface}"
    try:
        if interface not in _is_bare:
            is_virtual = "/devices/virtual/" in os.path.realpath(about)
            _is_bare[interface] = is_virtual and "DEVTYPE=" not in read(f"{about}/uevent")
        if _is_bare[interface]:
            return None
        megabits = int(read(f"{about}/speed"))
    except (OSError, ValueError):  # virtual interfaces answer with an error
        return None
    return megabits * 1e6 / 8 if megabits > 0 else None


def _report_if_too_many(node: Node, count: int) -> None:
    global _reported
    if count > MAX_INTERFACES and not _reported:
        _reported = True
        node.gap("nic", f"{count} interfaces; only the first {MAX_INTERFACES} are read")


collector = Collector(start=start, sample=sample, stop=stop)
