"""Ranks with a host and a device in virtual time: what a profiler on each of them would have seen.

A rank's program is a generator. Its host launches kernels ahead of its device, one stream computes, others communicate.
A transfer begins when its last rank has come and takes what its group's link takes; earlier ranks wait inside their
kernels, as NCCL's do. A program gives way where it needs the end of a transfer that is not known yet.

Faults change `Resources` and nothing else. Random numbers are the same with a fault as without, so that the difference
of two runs is what the fault costs. Nothing is shared with `rankscope.analysis`. Times are float ns of true time.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from captures.variants import Variant, multipliers

__all__ = ["COMPUTE", "Comm", "Job", "Rank", "Resources", "World", "resources", "run", "step_ns"]

COMPUTE = 7  # stream
_US = 1e3
_LATENCY, _CALL, _DRIVER = 4 * _US, 12 * _US, 4 * _US
_AHEAD = 900  # kernels that a host may be ahead
_FACTOR = {"allreduce": 2.0}  # times (n - 1) / n of the bytes
_DRAWS = 700  # of a rank and step


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained and how. Work is that of one rank and step."""

    parallel: str  # "ddp" | "fsdp" | "tp" | "moe" | "pp"
    ranks: int
    node_size: int
    steps: int  # that are captured; one more is simulated before them
    seed: int
    variant: Variant
    compute_ns: float  # forward a third, backward two thirds
    layers: int
    kernels: int  # of one layer's forward; backward has twice as many
    bytes: float  # of gradients or parameters
    activation_bytes: float
    bandwidth: float  # bytes/s of a group's link
    python_ns: float  # of host time for one kernel
    split: int = 1  # ranks of a tensor- or expert-parallel group, stages of a pipeline
    microbatches: int = 8
    synchronous: bool = True  # the loss is read at the end of each step
    overlap: bool = True

    @property
    def nodes(self) -> list[int]:
        return [rank // self.node_size for rank in range(self.ranks)]


@dataclass(slots=True)
class Resources:
    """How fast everything is: arrays are [step, rank] with the step before the capture as 0, or [rank], or [stage]."""

    device: np.ndarray  # slowness of the device
    host: np.ndarray  # [rank]: slowness of Python
    tokens: np.ndarray  # how much work the data makes
    experts: np.ndarray  # what the router sends to the rank's experts
    load_ns: np.ndarray  # [rank]: for one batch
    copy_ns: np.ndarray  # [rank]: to the device, of one batch
    stall_ns: np.ndarray  # [rank]: the host does something else in the middle of forward
    sync_ns: np.ndarray  # [rank]: what Python does after each of the synchronisations of a layer; 0: there are none
    memory_ns: np.ndarray  # [rank]: of each of 4 calls of the driver for memory
    stages: np.ndarray  # [stage]: share of work, 1 is the mean
    links: dict[str, float] = field(default_factory=dict)  # group's name -> slowness


@dataclass(frozen=True, slots=True)
class Comm:
    """A process group."""

    name: str
    role: str
    members: tuple[int, ...]


class _Transfer:
    __slots__ = ("end", "members", "ns", "ready", "size")

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members, self.ready, self.size = members, {}, 0.0
        self.ns: Callable[[float], float] | None = None
        self.end: float | None = None

    def arrive(self, rank: int, ready: float, size: float) -> None:
        self.ready[rank] = ready
        self.size = max(self.size, size)
        if len(self.ready) == len(self.members):
            assert self.ns is not None
            self.end = max(self.ready.values()) + self.ns(self.size)


Program = Iterator[_Transfer]


class World:
    """Shared by ranks: groups, and transfers under way."""

    def __init__(self, job: Job, can: Resources) -> None:
        self.job, self.can = job, can
        self.comms: dict[str, Comm] = {}
        self.transfers: dict[tuple, _Transfer] = {}

    def comm(self, name: str, role: str, members: tuple[int, ...]) -> Comm:
        return self.comms.setdefault(name, Comm(name, role, members))

    def transfer(self, comm: Comm, op: str, key: tuple, members: tuple[int, ...]) -> _Transfer:
        known = self.transfers.get(key)
        if known is None:
            known = self.transfers[key] = _Transfer(members)
            rng = np.random.default_rng([self.job.seed, zlib.crc32(repr(key).encode())])
            noise = float(np.exp(0.05 * rng.standard_normal())) + (rng.random() < 0.01) * rng.exponential(0.5)
            slow = self.can.links.get(comm.name, 1.0) * self.job.variant.transfer_slowdown * noise
            share = _FACTOR.get(op, 1.0) * (len(members) - 1) / len(members) if op not in ("send", "recv") else 1.0
            known.ns = lambda size: 15 * _US + slow * share * size / self.job.bandwidth * 1e9
        return known


class Rank:
    """One rank's host, streams, and what was seen of them."""

    def __init__(self, world: World, number: int) -> None:
        job = world.job
        self.world, self.job, self.can, self.number = world, job, world.can, number
        node = np.random.default_rng([job.seed, 1, job.nodes[number]])
        own = np.random.default_rng([job.seed, 2, number])
        self.noise = multipliers(job.variant, own, node, _DRAWS * (job.steps + 1))
        self.python = np.exp(0.25 * own.standard_normal(len(self.noise)))
        self.drawn = self.step = self.correlation = 0
        self.main, self.autograd = 1000 + number, 1200 + number
        self.thread = self.main
        self.host = 0.0
        self.free: dict[int, float] = {}
        self.last: dict[int, _Transfer | None] = {}  # of each stream, as long as its end is not known
        self.pending = 0  # transfers that no rank has joined
        self.begun: deque[float] = deque()
        self.numbers: dict[tuple, int] = {}
        # name, start, end and what else is known of it; a transfer's end is looked up in the end
        self.spans: list[tuple[str, str, int, float, float]] = []  # category, name, thread
        self.launches: list[tuple[str, int, float, float, int]] = []  # name, thread, start, end, correlation
        self.rows: list[tuple[str, str, int, float, float | _Transfer, int, dict]] = []  # category, name, stream
        self.starts: list[float] = []  # of the host, per step
        self.marks: list[float] = []  # where the device has done with all that was launched before the step

    def span(self, category: str, name: str, start: float) -> None:
        self.spans.append((category, name, self.thread, start, self.host))

    def spend(self, ns: float, name: str | None = None, category: str = "cpu_op") -> None:
        start, self.host = self.host, self.host + ns
        if name is not None and ns > 0:
            self.span(category, name, start)

    def launch(self, name: str, ns: float = _DRIVER) -> int:
        self.correlation += 1
        start, self.host = self.host, self.host + ns
        self.launches.append((name, self.thread, start, self.host, self.correlation))
        return self.correlation

    def kernel(self, name: str, ns: float, category: str = "kernel") -> None:
        """One kernel of the computing stream, or a copy, that takes `ns` at full speed."""
        i = self.drawn % len(self.noise)
        self.drawn += 1
        start = self.host
        self.host += self.job.python_ns * self.python[i] * self.can.host[self.number]
        if len(self.begun) >= _AHEAD:
            self.host = max(self.host, self.begun.popleft())
        correlation = self.launch("cudaLaunchKernel" if category == "kernel" else "cudaMemcpyAsync")
        self.span("cpu_op", f"aten::{name}", start)
        slow = self.can.device[self.step, self.number] * self.noise[i]
        if self.pending:
            slow *= self.job.variant.compute_slowdown
        begin = max(self.host + _LATENCY, self.free.get(COMPUTE, 0.0) + 0.6 * _US)
        self.free[COMPUTE] = begin + ns * slow
        self.begun.append(begin)
        self.rows.append((category, name, COMPUTE, begin, self.free[COMPUTE], correlation, {}))

    def collective(
        self, comm: Comm, op: str, size: float, stream: int, *, peer: int | None = None, received: float | None = None
    ) -> Iterator[_Transfer]:
        """Communicate what has been computed so far. `peer`: of a send or receive."""
        previous = self.last.get(stream)
        if previous is not None:
            if previous.end is None:
                yield previous
            self.free[stream] = max(self.free.get(stream, 0.0), previous.end)
        start = self.host
        self.host += _CALL * self.can.host[self.number]
        correlation = self.launch("cudaLaunchKernelExC")
        self.spans.append(("cpu_op", "record_param_comms", self.thread, start, self.host))
        ends = (self.number, peer) if op == "send" else (peer, self.number)
        key = (comm.name, *ends) if peer is not None else (comm.name,)
        number = self.numbers[key] = self.numbers.get(key, -1) + 1
        members = comm.members if peer is None else (self.number, peer)
        transfer = self.world.transfer(comm, op, (*key, number), members)
        ready = max(self.host + _LATENCY, self.free.get(COMPUTE, 0.0), self.free.get(stream, 0.0))
        transfer.arrive(self.number, ready, received if received is not None else size)
        self.last[stream] = transfer
        self.pending += 1
        meta = {"op": op, "comm": comm, "size": size, "received": received, "peer": peer, "of": key}
        self.rows.append(("kernel", op, stream, ready, transfer, correlation, meta))
        return transfer

    def join(self, transfer: _Transfer) -> Iterator[_Transfer]:
        """The computing stream waits for the transfer; the host does not."""
        if transfer.end is None:
            yield transfer
        self.free[COMPUTE] = max(self.free.get(COMPUTE, 0.0), transfer.end)
        self.pending -= 1

    def synchronize(self, name: str = "cudaStreamSynchronize") -> None:
        """The host waits for the computing stream."""
        start = self.host
        self.host = max(self.host + 2 * _US, self.free.get(COMPUTE, 0.0) + 6 * _US)
        self.correlation += 1
        self.launches.append((name, self.thread, start, self.host, self.correlation))

    def item(self) -> None:
        """A number is read from the device."""
        start = self.host
        self.kernel("Memcpy DtoH (Device -> Pageable)", 1.5 * _US, "gpu_memcpy")
        self.synchronize()
        self.span("cpu_op", "aten::item", start)

    def memory(self) -> None:
        ns = self.can.memory_ns[self.number]
        if ns > 0:
            self.synchronize("cudaFree")
            self.launch("cudaFree", ns / 2)
            self.launch("cudaMalloc", ns / 2)

    def begin_step(self) -> None:
        start = self.host
        self.starts.append(start)
        self.marks.append(self.now())
        self.thread = self.main
        self.spend(self.can.load_ns[self.number])
        self.span("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start)
        self.kernel("Memcpy HtoD (Pinned -> Device)", self.can.copy_ns[self.number], "gpu_memcpy")

    def end_step(self) -> None:
        if self.job.synchronous:
            self.item()
        self.step += 1

    def now(self) -> float:
        return max(self.host, self.free.get(COMPUTE, 0.0))


def resources(job: Job) -> Resources:
    """A healthy job's."""
    shape = (job.steps + 1, job.ranks)
    device = np.ones(shape)
    if job.variant.stretched == "kernels":
        device[1] *= job.variant.stretch
    return Resources(
        device=device,
        host=np.ones(job.ranks),
        tokens=np.ones(shape),
        experts=np.ones(shape),
        load_ns=np.full(job.ranks, 200 * _US),
        copy_ns=np.full(job.ranks, 30 * _US),
        stall_ns=np.zeros(job.ranks),
        sync_ns=np.zeros(job.ranks),
        memory_ns=np.zeros(job.ranks),
        stages=np.ones(job.split),
    )


def run(job: Job, can: Resources, program: Callable[[Rank], Program]) -> list[Rank]:
    """All ranks to the end. Raises RuntimeError if they wait for each other for ever."""
    world = World(job, can)
    ranks = [Rank(world, number) for number in range(job.ranks)]
    waiting: deque[tuple[Program, _Transfer | None]] = deque((program(rank), None) for rank in ranks)
    idle = 0
    while waiting:
        running, blocked = waiting.popleft()
        if blocked is not None and blocked.end is None:
            waiting.append((running, blocked))
            idle += 1
            if idle > len(waiting):
                raise RuntimeError("ranks wait for each other for ever")
            continue
        idle = 0
        wanted = next(running, None)
        if wanted is not None:
            waiting.append((running, wanted))
    return ranks


def step_ns(ranks: list[Rank]) -> float:
    """Mean length of the captured steps, as devices come to them."""
    return float(np.mean([(rank.now() - rank.marks[1]) / rank.job.steps for rank in ranks]))
