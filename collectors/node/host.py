"""The host's processors and memory, and what each rank's process gets of them.

Device "" is the node: cumulative `cpu_busy_s`, `cpu_steal_s`, `cpu_idle_s` (over all processors; stolen is what the
hypervisor gave away), `swap_in_bytes`, `swap_out_bytes`, `page_faults`, `major_page_faults`; momentary
`cpu_busy_fraction` (since the last reading), `load_1min`, `memory_available_bytes`, `swap_used_bytes`. Where the kernel
has it, cumulative `memory_stalled_s`: the time in which all that could run waited for memory. Where a control group
limits the processors: `cgroup_cpus` (the limit), `cgroup_periods`, `cgroup_throttled_periods`, `cgroup_throttled_s`.

Device `rank3` is a rank's process: `cpu_s`, `rss_bytes`, `major_page_faults`, `main_thread_involuntary_switches`,
`main_thread_queued_s` (the time in which it could run and had no processor), and `cgroup_throttled_s` where a control
group other than the node's limits it.

Source: psutil, `/proc` (schedstat, pressure), cgroup v1 and v2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from rankscope.collectors.node import Collector, Node, Sample, read

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_VMSTAT = {
    "pgfault": ("page_faults", 1),
    "pgmajfault": ("major_page_faults", 1),
    "pswpin": ("swap_in_bytes", _PAGE_BYTES),
    "pswpout": ("swap_out_bytes", _PAGE_BYTES),
}
# Positions in /proc/PID/stat behind the command's closing parenthesis.
_MAJFLT, _UTIME, _STIME, _RSS = 9, 11, 12, 21


@dataclass(frozen=True, slots=True)
class _Limit:
    """A control group that limits the processors."""

    cpus: float
    folder: Path
    throttled_name: str  # the name of the throttled time in cpu.stat
    throttled_unit_s: float


_limit: _Limit | None = None
_limit_of: dict[int, _Limit | None] = {}  # by process
_before = (0.0, 0.0)  # busy, all


def start(node: Node) -> None:
    global _before, _limit
    _limit = _tightest(node, "self")
    _limit_of.clear()
    busy, steal, idle = _cpu_s()
    _before = busy, busy + steal + idle


def sample(node: Node) -> Iterator[Sample]:
    for name, value in (*_processors(), *_memory(node), *_throttling()):
        yield "host", name, "", value
    for device, pid in node.pids.items():
        for name, value in _process(node, pid, node.main_tids.get(device, pid)):
            yield "host", name, device, value


def stop() -> None:
    pass


def _cpu_s() -> tuple[float, float, float]:
    """Busy, stolen and idle time of all processors since boot."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq  # user includes guests
    return busy, times.steal, times.idle + times.iowait


def _processors() -> Iterator[tuple[str, float]]:
    global _before
    busy, steal, idle = _cpu_s()
    since, whole = busy - _before[0], busy + steal + idle - _before[1]
    _before = busy, busy + steal + idle
    yield "cpu_busy_s", busy
    yield "cpu_steal_s", steal
    yield "cpu_idle_s", idle
    if whole > 0:
        yield "cpu_busy_fraction", min(1.0, max(0.0, since / whole))
    yield "load_1min", os.getloadavg()[0]


def _memory(node: Node) -> Iterator[tuple[str, float]]:
    kib = dict(line.split()[:2] for line in read(f"{node.proc}/meminfo").splitlines())
    yield "memory_available_bytes", float(kib["MemAvailable:"]) * 1024
    yield "swap_used_bytes", (float(kib["SwapTotal:"]) - float(kib["SwapFree:"])) * 1024
    vmstat = "\n" + read(f"{node.proc}/vmstat")  # some 200 lines
    for name, (known_as, unit) in _VMSTAT.items():
        _, found, rest = vmstat.partition(f"\n{name} ")
        if found:
            yield known_as, float(rest.split(None, 1)[0]) * unit
    try:
        pressure = read(f"{node.proc}/pressure/memory")
    except OSError:
        return  # not every kernel has it
    _, found, rest = pressure.partition("full ")
    if found:
        yield "memory_stalled_s", float(rest.rpartition("total=")[2]) * 1e-6


def _process(node: Node, pid: int, main_tid: int) -> Iterator[tuple[str, float]]:
    main = f"{node.proc}/{pid}" if main_tid == pid else f"{node.proc}/{pid}/task/{main_tid}"
    try:
        stat = read(f"{node.proc}/{pid}/stat").rpartition(")")[2].split()
        status = read(f"{main}/status")
    except OSError:
        return  # the rank is gone
    yield "cpu_s", (int(stat[_UTIME]) + int(stat[_STIME])) / _TICKS_PER_S
    yield "rss_bytes", float(int(stat[_RSS]) * _PAGE_BYTES)
    yield "major_page_faults", float(stat[_MAJFLT])
    _, found, rest = status.partition("nonvoluntary_ctxt_switches:")
    if found:
        yield "main_thread_involuntary_switches", float(rest.split()[0])
    yield from _scheduling(node, pid, main)


def _scheduling(node: Node, pid: int, main: str) -> Iterator[tuple[str, float]]:
    """How long the process's main thread waited for a processor, and its group was throttled, where known."""
    try:
        yield "main_thread_queued_s", int(read(f"{main}/schedstat").split()[1]) * 1e-9
        if pid not in _limit_of:
            limit = _tightest(node, str(pid))
            _limit_of[pid] = limit if _limit is None or limit is None or limit.folder != _limit.folder else None
        own = _limit_of[pid]
        if own is not None:
            yield "cgroup_throttled_s", _throttled_s(own, _cpu_stat(own))
    except OSError:
        return


def _throttling() -> Iterator[tuple[str, float]]:
    if _limit is None:
        return
    stat = _cpu_stat(_limit)
    yield "cgroup_cpus", _limit.cpus
    yield "cgroup_periods", float(stat["nr_periods"])
    yield "cgroup_throttled_periods", float(stat["nr_throttled"])
    yield "cgroup_throttled_s", _throttled_s(_limit, stat)


def _cpu_stat(limit: _Limit) -> dict[str, str]:
    return dict(line.split() for line in read(f"{limit.folder}/cpu.stat").splitlines())


def _throttled_s(limit: _Limit, stat: dict[str, str]) -> float:
    return float(stat[limit.throttled_name]) * limit.throttled_unit_s


def _tightest(node: Node, process: str) -> _Limit | None:
    return min(_limits(node, process), key=lambda limit: limit.cpus, default=None)


def _limits(node: Node, process: str) -> Iterator[_Limit]:
    """Yield the limits on a process's processors: its control group's, and those of the groups around it."""
    root = node.sys / "fs" / "cgroup"
    for line in (node.proc / process / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield from _limits_v2(root, path)
        elif "cpu" in controllers.split(","):
            yield from _limits_v1(root / controllers, path)
            yield from _limits_v1(root / "cpu", path)


def _limits_v2(root: Path, path: str) -> Iterator[_Limit]:
    for folder in _upwards(root, path):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            yield _Limit(int(quota) / int(period), folder, "throttled_usec", 1e-6)


def _limits_v1(root: Path, path: str) -> Iterator[_Limit]:
    for folder in _upwards(root, path):
        try:
            quota = int((folder / "cpu.cfs_quota_us").read_text())
            period = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota > 0:
            yield _Limit(quota / period, folder, "throttled_time", 1e-9)


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield the group's folder and those around it. In a container, whose path may be the host's, only the root is."""
    folder = root / path.lstrip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


collector = Collector(start=start, sample=sample, stop=stop)
