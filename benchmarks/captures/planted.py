"""The matrix: which jobs are captured, what is planted in them, how strongly, and what that truly costs per step.

A dose is the share of the step that the fault makes up: loud 30-40 %, quiet 10-15 %, masked 4-8 %. The strength that
it takes is found by simulating the job with and without. Written before any detector was changed for captures.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from captures.engine import Job, Rank, Resources, resources, run, step_ns
from captures.programs import PROGRAMS, groups
from captures.variants import HALVES, Clock, Files, clock, files, variant

__all__ = ["CLEAN", "DOSES", "KINDS", "Capture", "Case", "Truth", "cases", "simulated"]

DOSES = {"loud": (0.30, 0.40), "quiet": (0.10, 0.15), "masked": (0.04, 0.08)}
CLEAN = "clean"
_MS, _US = 1e6, 1e3
_ALL = ("ddp", "fsdp", "tp", "moe", "pp")

# The jobs in which each kind of fault is planted.
KINDS = {
    "slow_rank": _ALL,
    "rank_stall": ("ddp", "fsdp", "tp", "moe"),  # the host of one rank does something else
    "slow_node": ("ddp", "fsdp", "tp"),
    "slow_link": ("fsdp", "tp", "moe", "pp"),  # of one group of several that are alike
    "input_stall": ("ddp", "fsdp", "tp", "moe"),
    "host_bound": ("ddp", "fsdp", "tp", "moe"),
    "host_sync": ("ddp", "fsdp"),
    "memory_pressure": ("ddp", "fsdp", "moe"),
    "load_imbalance": ("ddp", "fsdp"),
    "expert_imbalance": ("moe",),
    "stage_imbalance": ("pp",),
    "exposed_communication": ("ddp", "fsdp"),
    "exposed_copies": ("ddp", "fsdp", "tp", "moe"),  # of the batch, from the host
}
_LEAST_STEPS = {"load_imbalance": 3}  # fewer do not show that it is another rank each time
_FIT = 0.1  # of the cost wanted


@dataclass(frozen=True, slots=True)
class Case:
    """One capture of the matrix. Everything about it follows from this."""

    kind: str  # of KINDS, or CLEAN
    dose: str
    steps: int
    seed: int
    half: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.dose}/{self.steps}/{self.half}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Truth:
    """What was planted: whose fault it is (empty: of all alike), and what the same job takes less without it."""

    kind: str
    ranks: tuple[int, ...]
    group: str
    cost_fraction: float  # of the step with the fault


@dataclass(frozen=True, slots=True)
class Capture:
    """What is to be written: the ranks as they were, and how their profilers and clocks are."""

    case: Case
    job: Job
    ranks: list[Rank]
    clock: Clock
    files: Files
    truth: Truth | None


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    ranks: tuple[int, ...]
    group: str
    pattern: np.ndarray  # of load_imbalance: [step, rank]


def cases(seeds: int, clean: int, steps: tuple[int, ...], half: str, doses: tuple[str, ...]) -> Iterator[Case]:
    """Every kind and dose with every number of steps, and healthy captures."""
    for count in steps:
        for seed in range(seeds):
            for kind in KINDS:
                if count >= _LEAST_STEPS.get(kind, 1):
                    yield from (Case(kind, dose, count, seed, half) for dose in doses)
    for seed in range(clean):
        yield Case(CLEAN, "", (1, 2, 3, 5)[seed % 4], seed, half)


def simulated(case: Case) -> Capture:
    rng = np.random.default_rng([HALVES.index(case.half), case.seed, zlib.crc32(f"{case.kind}{case.steps}".encode())])
    job = _job(case, rng)
    fault = _choose(case.kind, job, rng) if case.kind != CLEAN else None
    how = files(rng, one_group=job.parallel in ("ddp", "fsdp") and job.split == 1)
    if case.kind in ("slow_node", "slow_link"):
        how = replace(how, information="all")
    clocks = clock(job.nodes, rng)
    if fault is None:
        return Capture(case, job, _run(job, resources(job)), clocks, how, None)
    strength = _dosed(job, fault, float(np.random.default_rng(job.seed).uniform(*DOSES[case.dose])))
    ranks = _run(*_with(job, fault, strength))
    whole = step_ns(ranks)
    cost = whole - step_ns(_run(*_without(job, fault, strength)))
    return Capture(case, job, ranks, clocks, how, Truth(fault.kind, fault.ranks, fault.group, cost / whole))


def _run(job: Job, can: Resources) -> list[Rank]:
    return run(job, can, PROGRAMS[job.parallel])


def _job(case: Case, rng: np.random.Generator) -> Job:
    parallel = str(rng.choice(KINDS.get(case.kind, _ALL)))
    ranks, node_size, split = int(rng.choice([3, 4, 8])), 8, 1
    if parallel in ("tp", "moe"):
        ranks, node_size, split = 8, 4, int(rng.choice([2, 4]))
    if parallel == "pp":
        split = int(rng.choice([2, 4]))
        ranks, node_size = split * int(rng.choice([1, 2])), int(rng.choice([4, 8]))
    if case.kind == "slow_node":
        ranks, node_size = (8, 2) if parallel == "tp" else (int(rng.choice([6, 8, 9])), 0)
        node_size = node_size or (3 if ranks == 9 else 2)
        split = 2 if parallel == "tp" else 1
    if case.kind == "slow_link":
        ranks, node_size, split = 8, 4, {"pp": 2}.get(parallel, int(rng.choice([2, 4])))
    compute = float(rng.uniform(30 * _MS, 120 * _MS))
    kind = variant(case.half, case.steps, rng)
    layers = int(rng.integers(2, 4)) if parallel == "pp" else int(rng.integers(5, 9))
    hidden = float(rng.uniform(0.15, 0.35)) * compute  # of transfers that computation hides
    inline = float(rng.uniform(0.01, 0.03)) * compute  # of those in its way
    bandwidth = 100e9
    times = {"tp": 4 * layers, "moe": 4 * layers, "pp": 1.0}.get(parallel, 1.0)
    factor = {"ddp": 2.0, "fsdp": 3.0}.get(parallel, 2.0)
    return Job(
        parallel=parallel,
        ranks=ranks,
        node_size=node_size,
        steps=case.steps,
        seed=zlib.crc32(f"{case.kind}/{case.steps}/{case.half}/{case.seed}".encode()),
        variant=kind,
        compute_ns=compute,
        layers=layers,
        kernels=2 if parallel == "pp" else int(rng.integers(4, 7)),
        bytes=(hidden if parallel != "pp" else inline) / 1e9 * bandwidth / factor,
        activation_bytes=inline / 1e9 * bandwidth / times / 2,
        bandwidth=bandwidth,
        python_ns=float(rng.uniform(8, 20)) * _US,
        split=split,
        microbatches=int(rng.choice([4, 6, 8])),
        synchronous=bool(rng.random() < 0.6),
    )


def _choose(kind: str, job: Job, rng: np.random.Generator) -> _Fault:
    """Choose the ranks that have it."""
    one, every = int(rng.integers(job.ranks)), tuple(range(job.ranks))
    node = tuple(r for r in every if job.nodes[r] == job.nodes[one])
    alone = rng.random() < 0.5
    pattern = rng.standard_normal((job.steps + 1, job.ranks))
    if kind == "slow_node":
        return _Fault(kind, node, "", pattern)
    if kind == "slow_link":
        role = {"fsdp": "shard", "tp": "tp", "moe": "ep", "pp": "pp"}[job.parallel]
        if job.parallel in ("fsdp", "tp") and alone:
            role = {"fsdp": "replicate", "tp": "dp"}[job.parallel]
        alike = groups(job)[role]
        comm = alike[int(rng.integers(len(alike)))]
        return _Fault(kind, comm.members, comm.name, pattern)
    if kind == "stage_imbalance":
        stage = int(rng.integers(job.split))
        width = job.ranks // job.split
        return _Fault(kind, tuple(range(stage * width, (stage + 1) * width)), str(stage), pattern)
    if kind in ("slow_rank", "rank_stall", "expert_imbalance") or (kind in ("input_stall", "exposed_copies") and alone):
        return _Fault(kind, (one,), "", pattern)
    return _Fault(kind, (), "", pattern)


def _with(job: Job, fault: _Fault, x: float) -> tuple[Job, Resources]:
    """The job's resources with the fault, `x` strong: about the share of the healthy step that it adds."""
    can = resources(job)
    mine = np.isin(np.arange(job.ranks), fault.ranks or range(job.ranks))
    work = x * job.compute_ns
    match fault.kind:
        case "slow_rank" | "slow_node":
            can.device = can.device * np.where(mine, 1 + x, 1.0)
        case "rank_stall":
            can.stall_ns = np.where(mine, work, 0.0)
        case "slow_link":
            can.links = {fault.group: 1 + 30 * x}
        case "input_stall":
            can.load_ns = can.load_ns + np.where(mine, work, 0.0)
        case "exposed_copies":
            can.copy_ns = can.copy_ns + np.where(mine, work, 0.0)
        case "host_bound":
            can.host = can.host * (1 + 10 * x)
        case "host_sync":
            can.sync_ns = np.full(job.ranks, 5 * _US + work / job.layers)
        case "memory_pressure":
            can.memory_ns = np.full(job.ranks, work / 4)
        case "load_imbalance":
            can.tokens = can.tokens * np.exp(min(x, 2) * fault.pattern)
            can.tokens /= can.tokens.mean()
        case "expert_imbalance":
            popular = np.where(mine, 1 + 3 * x, 1.0)
            comm = next(c for c in groups(job)["ep"] if fault.ranks[0] in c.members)
            can.experts = can.experts * popular
            can.experts[:, comm.members] /= popular[list(comm.members)].mean()
        case "stage_imbalance":
            can.stages = np.where(np.arange(job.split) == int(fault.group), 1 + x, 1.0)
        case "exposed_communication":
            return replace(job, overlap=False, bytes=job.bytes * (1 + 10 * x)), can
    return job, can


def _without(job: Job, fault: _Fault, x: float) -> tuple[Job, Resources]:
    """The same job with the fault fixed: work that lies where it should not is spread evenly."""
    can = resources(job)
    if fault.kind == "stage_imbalance":
        can.stages = can.stages * (1 + x / job.split)
    if fault.kind == "load_imbalance":
        uneven = _with(job, fault, x)[1].tokens
        can.tokens = np.broadcast_to(uneven.mean(axis=1, keepdims=True), uneven.shape)
    if fault.kind == "exposed_communication":
        return replace(job, bytes=job.bytes * (1 + 10 * x)), can
    return job, can


def _dosed(job: Job, fault: _Fault, target: float) -> float:
    """The strength at which the fault costs this share of the step, or the nearest to it that was tried."""
    odds = target / (1 - target)
    low, high, x = 0.0, 0.0, odds
    tried: dict[float, float] = {}
    for _ in range(10):
        whole = step_ns(_run(*_with(job, fault, x)))
        share = 1 - step_ns(_run(*_without(job, fault, x))) / whole
        tried[x] = abs(share - target)
        if tried[x] <= _FIT * target:
            break
        if share < target:
            low = x
            x = (x + high) / 2 if high else x * min(max(1.1 * target / max(share, 0.01), 1.3), 4)
        else:
            high = x
            x = (x + low) / 2
    return min(tried, key=lambda one: tried[one])
