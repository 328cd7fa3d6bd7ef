"""Reads the collectors of `node/` at a steady rate, in a thread, so that a driver that hangs stops nothing else."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
from queue import SimpleQueue
from typing import cast

from rankscope.collectors import node as node_collectors
from rankscope.collectors import topology
from rankscope.collectors.node import Collector, Node, Sample, Unavailable

__all__ = ["Sampler"]

_WAIT_S = 3.0


class Sampler(threading.Thread):
    """From `start` to `finish`, `readings` fills with (time_ns, samples) and `gaps` with (source, why, time_ns).

    `topology` is what `topology.read` found, None until it has.
    """

    def __init__(self, addresses: frozenset[str], hz: float) -> None:
        """The collectors are imported, which would slow down a thread beside it; their sources are not touched yet."""
        super().__init__(daemon=True)
        self.readings: SimpleQueue[tuple[int, list[Sample]]] = SimpleQueue()
        self.gaps: SimpleQueue[tuple[str, str, int]] = SimpleQueue()
        self.node = Node(addresses=addresses, gap=self._gap)
        self.topology: dict[str, list[topology.Device]] | None = None
        self._every_s = 1 / hz
        self._ending = threading.Event()
        self._collectors: dict[str, Collector] = {}
        for module in pkgutil.iter_modules(node_collectors.__path__):
            try:
                imported = importlib.import_module(f"{node_collectors.__name__}.{module.name}")
                self._collectors[module.name] = cast(Collector, imported)
            except Exception as error:
                self._gap(module.name, f"the collector cannot be imported: {type(error).__name__}: {error}")

    def run(self) -> None:
        self._start_all()
        self._read_topology()
        while not self._ending.is_set():
            self._sample_all()
            self._ending.wait(self._every_s - time.monotonic() % self._every_s)
        self._sample_all()
        for name in list(self._collectors):
            self._switch_off(name)

    def finish(self) -> None:
        """A last reading has been made, and the collectors are stopped, or there is a gap that says which hangs."""
        if self.ident is None:
            return  # never started
        self._ending.set()
        self.join(_WAIT_S)
        if self.is_alive():
            self._gap("agent", "a collector of the node hangs; what it had to say at the end is missing")

    def _gap(self, source: str, why: str) -> None:
        self.gaps.put((source, why, time.perf_counter_ns()))

    def _start_all(self) -> None:
        for name, collector in list(self._collectors.items()):
            try:
                collector.start(self.node)
                continue
            except Unavailable as error:
                self._gap(name, str(error))
            except Exception as error:
                self._gap(name, f"the collector did not start: {type(error).__name__}: {error}")
            del self._collectors[name]

    def _read_topology(self) -> None:
        try:
            found = topology.read(self.node.sys)
            if "gpu" in self._collectors:  # it has initialised the driver's library
                from rankscope.collectors.node import gpu  # not above: without NVML, the other collectors still work

                gpu.add_driver_facts(found["gpus"])
            self.topology = found
        except Exception as error:
            self._gap("topology", f"where this node's devices are was not seen: {type(error).__name__}: {error}")

    def _sample_all(self) -> None:
        for name, collector in list(self._collectors.items()):
            time_ns = time.perf_counter_ns()
            try:
                self.readings.put(
                    (time_ns, [(s, n, d, float(value)) for s, n, d, value in collector.sample(self.node)])
                )
            except Exception as error:
                self._gap(name, f"the collector was switched off: {type(error).__name__}: {error}")
                self._switch_off(name)

    def _switch_off(self, name: str) -> None:
        try:
            self._collectors.pop(name).stop()
        except Exception as error:
            self._gap(name, f"the collector did not stop: {type(error).__name__}: {error}")
