"""The matrix: the simulated jobs, their planted faults and doses, and the true costs.

A dose is the share of the step that the fault makes up. How strong a fault must be for it follows from simulating the
job with and without: what a slow link costs depends on how much of its traffic is hidden behind computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np

from simulate import GPUS, Job, Recording, Resources, healthy_resources, run, stages_of, step_ns, steps_ns

__all__ = [
    *("CLEAN", "CONFOUNDERS", "DOSES", "KINDS", "LASTING_KINDS", "UNPROFILED_KINDS"),
    *("Case", "Truth", "cases", "simulated"),
]

DOSES = {"loud": (0.30, 0.40), "quiet": (0.10, 0.15), "masked": (0.03, 0.08)}
CLEAN = "clean"

# The jobs in which each kind of fault is planted.
KINDS = {
    "slow_rank": ("ddp", "ddp-gpu", "fsdp", "tp", "moe", "pp-1f1b", "3d"),
    "sporadic_rank": ("ddp", "fsdp", "tp", "moe"),
    "slow_node": ("ddp", "fsdp", "tp", "moe"),
    "slow_link": ("ddp", "fsdp", "tp", "moe"),
    "input_stall": ("ddp", "ddp-gpu", "fsdp", "tp", "moe"),
    "host_bound": ("ddp-gpu",),
    "gc_stall": ("ddp", "ddp-gpu", "fsdp", "moe", "pp-1f1b"),
    "load_imbalance": ("ddp", "fsdp"),
    "expert_imbalance": ("moe",),
    "gradual_slowdown": ("ddp", "ddp-gpu", "fsdp", "tp", "moe"),
    "stage_imbalance": ("pp-1f1b", "pp-gpipe", "3d"),
    "exposed_communication": ("ddp",),
    "recompile": ("ddp", "fsdp", "moe"),
    "hang": ("ddp", "fsdp", "tp", "moe", "pp-1f1b", "3d"),
}
# Those that are planted in jobs as they are always recorded on GPUs, without a profiler.
_IN_DDP = (
    "slow_rank",
    "sporadic_rank",
    "slow_node",
    "input_stall",
    "gc_stall",
    "load_imbalance",
    "gradual_slowdown",
    "recompile",
)
UNPROFILED_KINDS = {
    "ddp-nccl": _IN_DDP,
    "ddp-rccl": _IN_DDP,
    "pp-nccl": ("slow_rank", "sporadic_rank", "stage_imbalance", "gc_stall", "gradual_slowdown", "recompile"),
    "3d-nccl": ("slow_rank", "stage_imbalance", "gc_stall", "recompile"),
}
# Those that can begin, or end, in the midst of a run.
_NOT_LASTING = ("sporadic_rank", "gradual_slowdown", "exposed_communication", "hang")
LASTING_KINDS = tuple(kind for kind in KINDS if kind not in _NOT_LASTING)
CONFOUNDERS = ("none", "lengths", "warm-up", "slow alike", "numa", "checkpoint", "lost records")
_PARALLELS = ("ddp", "ddp-gpu", "fsdp", "tp", "moe", "pp-1f1b", "pp-gpipe", "3d")
_PAIRS = (
    ("slow_rank", "input_stall"),
    ("slow_rank", "gc_stall"),
    ("slow_rank", "slow_link"),
    ("input_stall", "gc_stall"),
    ("slow_node", "gc_stall"),
    ("slow_link", "gc_stall"),
)
_SEVERAL_NODES = ("slow_node", "slow_link")
# A few steps do not show what these cost.
_RANDOM = (
    "sporadic_rank",
    "gc_stall",
    "load_imbalance",
    "expert_imbalance",
    "recompile",
    "gradual_slowdown",
    "host_bound",
)
_BURSTS = 0.25  # share of the steps
_GC_EVERY = 5
_MOST_EXPOSED = (0.22, 0.27)  # no more than backward can hide is lost by not hiding it
_STEPS, _STEPS_OF_PARTS = 40, 60
_PART = (0.25, 0.85)  # of the steps
_SHORT = 14  # steps that show what a steady fault costs


@dataclass(frozen=True, slots=True)
class Case:
    """One run of the matrix. Everything about it follows from this."""

    kind: str  # one of KINDS, two joined by "+", or CLEAN
    dose: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.dose}/{self.seed}"

    @property
    def split(self) -> str:
        """Thresholds are set on "tune" and reported on "report"."""
        return "tune" if self.seed % 2 == 0 else "report"


@dataclass(frozen=True, slots=True)
class Truth:
    """One planted fault: its ranks, and what the same job with the same seed takes less per step without it."""

    kind: str
    ranks: tuple[int, ...]  # empty: none in particular
    nodes: tuple[int, ...]
    cost_ns: float  # per step; of a hang 0
    cost_fraction: float  # of the step with all faults
    acts: tuple[int, ...] = ()  # the steps that it makes longer by at least half of its cost


def cases(seeds: int, clean: int) -> Iterator[Case]:
    """Every kind in every dose, pairs of faults, and healthy jobs."""
    for seed in range(seeds):
        for kind in KINDS:
            for dose in ("loud",) if kind == "hang" else DOSES:
                yield Case(kind, dose, seed)
        for first, second in _PAIRS[seed // 2 % 2 :: 2]:
            yield Case(f"{first}+{second}", "two", seed)
        for number in range(seed * clean // seeds, (seed + 1) * clean // seeds):
            yield Case(CLEAN, CONFOUNDERS[number // 2 % len(CONFOUNDERS)], number)


def simulated(
    case: Case, *, small: bool = False, parallel: str = "", part: bool = False
) -> tuple[Recording, tuple[Truth, ...]]:
    """The recording of the case, and what is true of it. `small` jobs have at most 16 ranks, or 4 nodes.

    `parallel`: one of UNPROFILED_KINDS, of a job on GPUs as it is recorded without a profiler. `part`: faults act in a
    part of the steps: from one on, until one, or between two.
    """
    rng = np.random.default_rng([case.seed, *case.kind.encode(), *case.dose.encode()])
    kinds = [] if case.kind == CLEAN else case.kind.split("+")
    job = _job(case, kinds, rng, small, (parallel,) if parallel else _PARALLELS)
    if part:
        job = replace(job, steps=_STEPS_OF_PARTS)
    faults: list[_Fault] = []
    for kind in kinds:
        # Two faults on one node could not be distinguished.
        taken = {
            rank for fault in faults for rank in range(job.ranks) if rank // GPUS in {r // GPUS for r in fault.ranks}
        }
        faults.append(_choose(kind, job, rng, taken))
    if "exposed_communication" in kinds:
        alike = job
        size = _enough(lambda x: _share(replace(alike, gradient_bytes=x), faults), case, rng, of_bytes=True)
        job = replace(job, gradient_bytes=size)
    elif kinds and kinds != ["hang"]:
        faults = _dosed(job, faults, case, rng)
    if part:
        faults = [replace(fault, inside=_part_of(job, rng)) for fault in faults]
    log = run(job, _planted(job, faults))
    if not faults or kinds == ["hang"]:
        return log, tuple(Truth(f.kind, f.ranks, f.nodes, 0.0, 0.0) for f in faults)
    whole = step_ns(log)
    truths = []
    for fault in faults:
        # The dose of a long stage is what even layers bring; what it costs is what the stage is longer than the others.
        left = [rest for rest in _left_of(fault) if rest.kind != fault.kind]
        others = [f for f in faults if f is not fault] + left
        without = run(_without(job, fault), _planted(_without(job, fault), others))
        cost = whole - step_ns(without)
        acts = np.flatnonzero(steps_ns(log) - steps_ns(without) >= cost / 2)
        truths.append(Truth(fault.kind, fault.ranks, fault.nodes, cost, cost / whole, tuple(acts.tolist())))
    return log, tuple(truths)


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    where: np.ndarray  # [step, rank] or [stage]: where it acts, by kind
    strength: float = 0.0
    inside: np.ndarray | None = None  # [step]: it acts in these only; None: in all


def _job(case: Case, kinds: list[str], rng: np.random.Generator, small: bool, parallels: tuple[str, ...]) -> Job:
    fitting = [p for p in parallels if p not in _PARALLELS or all(p in KINDS[k] for k in kinds)]
    parallel = str(rng.choice(fitting))
    sizes = [8, 16] if small else [8, 16, 32, 64]
    if parallel in ("pp-1f1b", "pp-gpipe", "pp-nccl"):
        sizes = sizes[:3]
    if parallel in ("3d", "3d-nccl"):
        sizes = [16 if small else 32]
    if parallel == "ddp-gpu":
        sizes = [8, 16]
    elif set(kinds) & set(_SEVERAL_NODES) or len(kinds) > 1:
        sizes = [s for s in sizes if s >= 3 * GPUS] or [4 * GPUS]
    ranks = int(rng.choice(sizes))
    large = rng.random()
    if parallel in ("ddp", "fsdp") and large < 0.02 and not small:
        ranks = 1024 if large < 0.004 else 256
    healthy = {
        "lengths": {"common_lengths": 0.3},
        "warm-up": {"warmup_steps": 5},
        "slow alike": {"slowness": 1.6},
        "numa": {"numa": 0.015},
        "checkpoint": {"checkpoint_every": 10},
        "lost records": {"lost": 0.05},
    }
    # Jobs with a fault have harmless peculiarities too.
    peculiar = case.dose if case.kind == CLEAN else str(rng.choice(["none", "none", "none", "lengths", "numa"]))
    return Job(
        parallel=parallel,
        ranks=ranks,
        microbatches=4 if parallel in ("3d", "3d-nccl") else 6,
        steps=_STEPS,
        seed=1000 * case.seed + sum(case.name.encode()) % 1000,
        compute_ns=float(rng.uniform(80e6, 240e6)),
        layers=int(rng.integers(3, 6)),
        buckets=int(rng.integers(3, 7)),
        gradient_bytes=float(rng.uniform(8e6, 30e6)),
        loader_workers=bool(rng.random() < 0.5) and len(kinds) < 2,  # what workers load a second fault would hide
        **healthy.get(peculiar, {}),
    )


def _choose(kind: str, job: Job, rng: np.random.Generator, taken: set[int]) -> _Fault:
    """Choose the ranks that have it, and when it shows."""
    free = [r for r in range(job.ranks) if r not in taken] or list(range(job.ranks))
    one = int(rng.choice(free))
    node = one // GPUS
    of_node = tuple(range(node * GPUS, min((node + 1) * GPUS, job.ranks)))
    everybody = tuple(range(job.ranks))
    always = np.ones((job.steps, job.ranks), bool)
    bursts = rng.random((job.steps, job.ranks)) < _BURSTS
    settled = np.arange(job.steps)[:, np.newaxis] >= 3
    many = rng.random()
    if kind in ("slow_rank", "sporadic_rank", "hang"):
        return _Fault(kind, (one,), (), bursts if kind == "sporadic_rank" else always)
    if kind == "slow_node":
        return _Fault(kind, of_node, (node,), always)
    if kind == "slow_link":
        return _Fault(kind, of_node, (node,), always)
    if kind == "input_stall":
        ranks = (one,) if many < 0.5 else of_node if many < 0.7 and job.nodes > 1 else everybody
        return _Fault(kind, ranks, (), always)
    if kind == "host_bound":
        return _Fault(kind, everybody, (), always)
    if kind == "gc_stall":
        phase = rng.integers(0, _GC_EVERY, job.ranks)
        due = (np.arange(job.steps)[:, np.newaxis] + phase) % _GC_EVERY == 0
        return _Fault(kind, (one,) if many < 0.4 else everybody, (), due)
    if kind == "recompile":
        ranks = (one,) if many < 0.4 else everybody
        due = bursts if many < 0.4 else np.broadcast_to(bursts[:, :1], bursts.shape)
        return _Fault(kind, ranks, (), due & settled)
    if kind == "stage_imbalance":
        stage = int(rng.integers(0, stages_of(job)))
        size = job.ranks // stages_of(job)
        where = np.arange(stages_of(job)) == stage
        return _Fault(kind, tuple(range(stage * size, (stage + 1) * size)), (), where)
    if kind == "gradual_slowdown":
        ranks = (one,) if many < 0.5 else everybody
        later = np.linspace(0, 1, job.steps)[:, np.newaxis]
        return _Fault(kind, ranks if many < 0.5 else (), (), later * np.isin(np.arange(job.ranks), ranks))
    if kind == "expert_imbalance" and many < 0.5:  # one rank's experts are always popular
        return _Fault(kind, (one,), (), np.broadcast_to(np.arange(job.ranks) == one, always.shape) * 1.0)
    return _Fault(kind, (), (), rng.standard_normal((job.steps, job.ranks)))


def _part_of(job: Job, rng: np.random.Generator) -> np.ndarray:
    """[step]: the part in which a fault acts."""
    inside = round(rng.uniform(*_PART) * job.steps)
    first = int(rng.choice([0, job.steps - inside, rng.integers(0, job.steps - inside + 1)]))
    return (np.arange(job.steps) >= first) & (np.arange(job.steps) < first + inside)


def _without(job: Job, fault: _Fault) -> Job:
    return replace(job, overlap=True) if fault.kind == "exposed_communication" else job


def _left_of(fault: _Fault) -> list[_Fault]:
    """What a fixed fault leaves: misplaced work does not go away, it is spread evenly."""
    if fault.kind == "stage_imbalance":
        return [replace(fault, where=np.ones_like(fault.where), strength=fault.strength / len(fault.where))]
    return [replace(fault, kind="even work")] if fault.kind == "load_imbalance" else []


def _planted(job: Job, faults: list[_Fault]) -> Resources:
    """The job's resources as the faults leave them."""
    can = healthy_resources(job)
    for fault in faults:
        before = replace(can)
        ranks, x, steps = list(fault.ranks), fault.strength, slice(0, job.steps)
        mine = np.isin(np.arange(job.ranks), ranks)
        where = fault.where[steps] & mine if fault.where.dtype == bool and fault.where.ndim == 2 else fault.where
        match fault.kind:
            case "slow_rank" | "sporadic_rank" | "slow_node":
                can.slowness = can.slowness * np.where(where, 1 + x, 1.0)
            case "gradual_slowdown":
                can.slowness = can.slowness * (1 + x * where[steps])
            case "slow_link":
                can.nic = np.where(np.isin(np.arange(job.nodes), fault.nodes), can.nic / (1 + x), can.nic)
            case "input_stall":
                can.load_ns = can.load_ns + np.where(mine, x * job.compute_ns, 0.0)
            case "gc_stall":
                can.gc_ns = np.where(where, x * job.compute_ns, can.gc_ns)
            case "host_bound":
                can.launch_ns = can.launch_ns * (1 + 50 * x)
            case "recompile":
                can.compile_ns = can.compile_ns + np.where(where, x * job.compute_ns, 0.0)
            case "load_imbalance":
                can.tokens = can.tokens * _lengths(fault)
            case "even work":
                even = (can.tokens * _lengths(fault)).mean(axis=1, keepdims=True)
                can.tokens = np.broadcast_to(even, can.tokens.shape)
            case "expert_imbalance":
                popular = np.exp(min(x, 3) * where[steps]).reshape(job.steps, -1, min(GPUS, job.ranks))
                share = popular / popular.mean(axis=2, keepdims=True)
                can.expert_tokens = can.expert_tokens * share.reshape(job.steps, job.ranks)
            case "stage_imbalance":
                can.stage_work = can.stage_work * np.where(where, 1 + x, 1.0)
            case "exposed_communication":
                can.overlap = False
            case "hang":
                can.hang = (ranks[0], round(0.6 * job.steps))
        if fault.inside is not None:
            acts = fault.inside[:, np.newaxis]
            for name, healthy in _by_step(before).items():
                setattr(can, name, np.where(acts, getattr(can, name), healthy))
    return can


def _by_step(can: Resources) -> dict[str, np.ndarray]:
    return {f.name: value for f in fields(can) if isinstance(value := getattr(can, f.name), np.ndarray)}


def _lengths(fault: _Fault) -> np.ndarray:
    """How much work the data of a rank and step make, 1 on average: lognormal."""
    sigma = min(fault.strength, 1.5)
    return np.exp(sigma * fault.where - sigma**2 / 2)


def _dosed(job: Job, faults: list[_Fault], case: Case, rng: np.random.Generator) -> list[_Fault]:
    """The faults as strong as the dose wants, each on its own. Two at once are both between quiet and loud."""
    return [
        replace(f, strength=_enough(lambda x, f=f: _share(job, [replace(f, strength=x)]), case, rng)) for f in faults
    ]


def _enough(
    share_at: Callable[[float], float], case: Case, rng: np.random.Generator, *, of_bytes: bool = False
) -> float:
    """The strength at which a fault takes the share of the step that its dose says, within a twelfth of it.

    Where none does, the one that comes nearest: of gradients that are too large, backward hides next to nothing.
    """
    low, high = _MOST_EXPOSED if of_bytes and case.dose == "loud" else DOSES.get(case.dose, (0.12, 0.25))
    target = float(rng.uniform(low, high))
    odds = target / (1 - target)  # cost over the healthy step, which grows about in proportion
    x = 4e6 if of_bytes else odds
    low_x, low_odds, high_x, high_odds = 0.0, 0.0, np.inf, np.inf
    off: dict[float, float] = {}
    for _ in range(16):
        share = share_at(x)
        got = share / (1 - share)
        off[x] = abs(got - odds)
        if off[x] <= 0.08 * odds:
            break
        if got < odds:
            low_x, low_odds = x, max(got, 0.0)
        else:
            high_x, high_odds = x, got
        if np.isinf(high_x):
            x *= 1.7 if of_bytes else min(max(1.1 * odds / max(got, 0.01), 1.5), 6)
        else:
            way = (odds - low_odds) / (high_odds - low_odds)
            x = low_x + (high_x - low_x) * min(max(way, 0.1), 0.9)
    return min(off, key=lambda tried: off[tried])


def _share(job: Job, faults: list[_Fault]) -> float:
    """Share of the step that the faults make up."""
    if not {f.kind for f in faults} & set(_RANDOM):
        faults = [replace(f, where=f.where[:_SHORT]) if f.where.ndim == 2 else f for f in faults]
        job = replace(job, steps=min(job.steps, _SHORT))
    healthy = job
    for fault in faults:
        healthy = _without(healthy, fault)
    faulty_ns = step_ns(run(job, _planted(job, faults)))
    left = [rest for fault in faults for rest in _left_of(fault)]
    return 1 - step_ns(run(healthy, _planted(healthy, left))) / faulty_ns
