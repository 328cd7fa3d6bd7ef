"""Reads the collectors of `node/` at a steady rate, each in a thread: a driver that hangs costs its own source only."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue

from rankscope.collectors import node as node_collectors
from rankscope.collectors import topology
from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.node import Collector, Node, Sample
from rankscope.errors import Unavailable

__all__ = ["Sampler"]

_KNOWN = {(counter.source, counter.name) for counter in COUNTERS}
_WAIT_S = 3.0
_HANGS_S = 30.0


class Sampler:
    """From `start` to `finish`, `readings` fills with (time_ns, samples) and `gaps` with (source, why, time_ns).

    `topology` is what `topology.read` found, None until it has.
    """

    def __init__(self, addresses: frozenset[str], hz: float) -> None:
        """Import the collectors, which would slow down a thread beside it; their sources are not touched yet."""
        self.readings: SimpleQueue[tuple[int, list[Sample]]] = SimpleQueue()
        self.gaps: SimpleQueue[tuple[str, str, int]] = SimpleQueue()
        self.node = Node(addresses=addresses, gap=self._gap)
        self.topology: dict[str, list[topology.Device]] | None = None
        self._every_s = 1 / hz
        self._ending = threading.Event()
        self._began_ns: dict[str, int] = {}  # by collector: when its unanswered reading began
        self._reported_ns: dict[str, int] = {}  # those of them with a gap that they hang
        self._unknown: set[tuple[str, str]] = set()
        self._threads: list[threading.Thread] = []
        for module in pkgutil.iter_modules(node_collectors.__path__):
            try:
                collector: Collector = importlib.import_module(f"{node_collectors.__name__}.{module.name}").collector
            except Exception as error:
                self._gap(module.name, f"the collector cannot be imported: {type(error).__name__}: {error}")
                continue
            work = (module.name, collector)
            self._threads.append(threading.Thread(target=self._work, args=work, name=module.name, daemon=True))
        if "gpu" not in {thread.name for thread in self._threads}:
            self._threads.append(threading.Thread(target=self._read_topology, daemon=True))

    def start(self) -> None:
        """Start the collectors. A second call does nothing."""
        if self._threads[0].ident is None:
            for thread in self._threads:
                thread.start()

    def finish(self) -> None:
        """Make a last reading and stop the collectors, or leave a gap that says which hang."""
        self._ending.set()
        until_s = time.monotonic() + _WAIT_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until_s - time.monotonic()))
        self.report_hanging(0)

    def report_hanging(self, after_s: float = _HANGS_S) -> None:
        """Add a gap for each collector that has not answered for so long, once."""
        now_ns = time.perf_counter_ns()
        for name, began_ns in self._began_ns.copy().items():
            if now_ns - began_ns >= after_s * 1e9 and self._reported_ns.get(name) != began_ns:
                self._reported_ns[name] = began_ns
                self.gaps.put((name, "the collector hangs: until it answers, nothing of its source is seen", began_ns))

    def _gap(self, source: str, why: str) -> None:
        self.gaps.put((source, why, time.perf_counter_ns()))

    def _work(self, name: str, collector: Collector) -> None:
        self._began_ns[name] = time.perf_counter_ns()
        try:
            collector.start(self.node)
            has_started = True
        except Unavailable as error:
            has_started = False
            self._gap(name, str(error))
        except Exception as error:
            has_started = False
            self._gap(name, f"the collector did not start: {type(error).__name__}: {error}")
        if name == "gpu":
            self._read_topology(has_driver=has_started)
        if has_started:
            self._sample(name, collector)
        del self._began_ns[name]

    def _sample(self, name: str, collector: Collector) -> None:
        is_last = False
        try:
            while not is_last:
                is_last = self._ending.is_set()
                self._began_ns[name] = time_ns = time.perf_counter_ns()
                self.readings.put((time_ns, list(self._known(collector.sample(self.node)))))
                if not is_last:
                    del self._began_ns[name]
                    self._ending.wait(self._every_s - time.monotonic() % self._every_s)
        except Exception as error:
            self._gap(name, f"the collector was switched off: {type(error).__name__}: {error}")
        try:
            collector.stop()
        except Exception as error:
            self._gap(name, f"the collector did not stop: {type(error).__name__}: {error}")

    def _known(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield counters that the list has, and report each other counter once as not recorded."""
        for source, name, device, value in samples:
            if (source, name) in _KNOWN:
                yield source, name, device, float(value)
            elif (source, name) not in self._unknown:
                self._unknown.add((source, name))
                self._gap(source, f"{name} is not recorded: collectors/counters.py lacks it")

    def _read_topology(self, *, has_driver: bool = False) -> None:
        try:
            found = topology.read(self.node.sys)
            if has_driver:
                from rankscope.collectors.node import gpu  # not above: without NVML, the other collectors still work

                gpu.add_driver_facts(found["gpus"])
            self.topology = found
        except Exception as error:
            self._gap("topology", f"where this node's devices are was not seen: {type(error).__name__}: {error}")
