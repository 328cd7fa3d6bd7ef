"""How long tasks of the node waited for processors, storage or memory (PSI, pressure stall information).

Cumulative, device "": `cpu_some_s`, `io_some_s`, `memory_some_s` (at least one task waited) and `io_full_s` (all tasks
that were not idle did). All tasks waiting for memory is `memory_stalled_s` of the collector `host`.

Source: `/proc/pressure`, Linux 4.20 with CONFIG_PSI.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope.collectors.node import Collector, Node, Sample, read
from rankscope.errors import Unavailable

_LINES = {("cpu", "some"), ("io", "some"), ("io", "full"), ("memory", "some")}
_RESOURCES = ("cpu", "io", "memory")


def start(node: Node) -> None:
    if not any(_samples(node)):
        raise Unavailable("this kernel measures no pressure: boot it with psi=1 to see what tasks wait for")


def sample(node: Node) -> Iterator[Sample]:
    return _samples(node)


def stop() -> None:
    pass


def _samples(node: Node) -> Iterator[Sample]:
    for resource in _RESOURCES:
        try:
            lines = read(f"{node.proc}/pressure/{resource}").splitlines()
        except OSError:  # not built in, or switched off: reading fails with EOPNOTSUPP
            continue
        for line in lines:
            kind, _, rest = line.partition(" ")
            if (resource, kind) in _LINES:
                yield "pressure", f"{resource}_{kind}_s", "", float(rest.rpartition("total=")[2]) * 1e-6


collector = Collector(start=start, sample=sample, stop=stop)
