"""Local disks: traffic, for how much of the time they had requests, and how long requests took.

Cumulative, device the disk's name: `read_bytes`, `written_bytes`, `io_busy_s` (a request was under way), `read_wait_s`
and `write_wait_s` (from a request to its end, summed over requests). Partitions, loop devices, and what is made of
other disks (md, dm) are left out, and so are file systems of the network.

Source: `/proc/diskstats`, `/sys/block`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.collectors.node import Collector, Node, Sample, read
from rankscope.errors import Unavailable

_SECTOR_BYTES = 512  # whatever the disk's own are
_MS = 1e-3
# Position of each number behind the disk's name, and its unit.
_COLUMNS = {
    "read_bytes": (2, _SECTOR_BYTES),
    "read_wait_s": (3, _MS),
    "written_bytes": (6, _SECTOR_BYTES),
    "write_wait_s": (7, _MS),
    "io_busy_s": (9, _MS),
}


_is_one: dict[str, bool] = {}  # of what the kernel lists: a disk, not a part of one, or made of others


def start(node: Node) -> None:
    _is_one.clear()
    if not any(_disks(node)):
        raise Unavailable("this node shows no disk of its own")


def sample(node: Node) -> Iterator[Sample]:
    for disk, numbers in _disks(node):
        for name, (column, unit) in _COLUMNS.items():
            yield "disk", name, disk, int(numbers[column]) * unit


def stop() -> None:
    pass


def _disks(node: Node) -> Iterator[tuple[str, list[str]]]:
    try:
        lines = read(f"{node.proc}/diskstats").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, disk, *numbers = line.split()
        if disk not in _is_one:
            _is_one[disk] = (node.sys / "block" / disk.replace("/", "!") / "device").exists()
        if _is_one[disk]:
            yield disk, numbers


collector = Collector(start=start, sample=sample, stop=stop)
