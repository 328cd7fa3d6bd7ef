"""The collector `disk`: against folders that look like /proc and /sys, and against this machine's disks."""

from __future__ import annotations

import os

import pytest

from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.node import Node, disk
from rankscope.errors import Unavailable

# major, minor, name, reads, merged, sectors, ms, writes, merged, sectors, ms, under way, ms busy, …
DISKSTATS = """\
 259 0 nvme0n1 10 0 4000 250 20 5 8000 1500 0 900 1750
 259 1 nvme0n1p1 10 0 4000 250 20 5 8000 1500 0 900 1750
   7 0 loop0 1 0 8 1 0 0 0 0 0 1 1
 253 0 dm-0 10 0 4000 250 20 0 8000 1500 0 900 1750
"""


def node_in(proc, sys):
    return Node(addresses=frozenset(), gap=lambda source, why: None, proc=proc, sys=sys)


def read_by(node):
    disk.start(node)
    read = list(disk.sample(node))
    disk.stop()
    return {(device, name): value for _, name, device, value in read}


def test_whole_disks_are_read_in_bytes_and_seconds(tmp_path):
    """4,000 sectors of 512 bytes read, 8,000 written; a partition and what lies on a disk would count twice."""
    (tmp_path / "diskstats").write_text(DISKSTATS)
    (tmp_path / "block/nvme0n1/device").mkdir(parents=True)
    (tmp_path / "block/dm-0").mkdir()
    expected = {
        "read_bytes": 2_048_000,
        "read_wait_s": 0.25,
        "written_bytes": 4_096_000,
        "write_wait_s": 1.5,
        "io_busy_s": 0.9,
    }
    read = read_by(node_in(tmp_path, tmp_path))
    assert read == {("nvme0n1", name): pytest.approx(value) for name, value in expected.items()}
    assert {("disk", name) for _, name in read} == {(c.source, c.name) for c in COUNTERS if c.source == "disk"}


def test_node_without_a_disk_says_so_in_one_line(tmp_path):
    with pytest.raises(Unavailable, match="no disk of its own"):
        disk.start(node_in(tmp_path, tmp_path))


def test_what_is_written_to_a_real_disk_is_counted(tmp_path):
    node = Node(addresses=frozenset(), gap=lambda source, why: None)
    try:
        before = read_by(node)
    except Unavailable:
        pytest.skip("this machine shows no disk")
    with (tmp_path / "written").open("wb") as file:
        file.write(os.urandom(16_000_000))  # not what a disk could leave out
        os.fsync(file.fileno())
    if not _lies_on(before, tmp_path):
        pytest.skip("the temporary folder lies on no disk of this machine's own")
    after = read_by(node)
    grown = {name: sum(after[key] - before[key] for key in before if key[1] == name) for _, name in before}
    assert grown["written_bytes"] >= 16_000_000
    assert grown["io_busy_s"] > 0


def _lies_on(read, folder):
    device = os.stat(folder).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    link = f"/sys/dev/block/{numbers}"
    return any(disk in os.path.realpath(link).split("/") for disk, _ in read) if os.path.exists(link) else False
