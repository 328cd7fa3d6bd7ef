"""What differs between captures without being a fault: noise, clocks, what the files hold. Two halves of it.

Written before any detector was changed for captures. "tuning" is for setting thresholds; a capture of the "report"
half has another tail of kernel times, another jitter and another model of overlap, which no threshold was set on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["HALVES", "Clock", "Files", "Variant", "clock", "files", "multipliers", "variant"]

HALVES = ("tuning", "report")
_TAILS = {"tuning": ("lognormal", "spikes"), "report": ("pareto", "two modes")}
_JITTERS = {"tuning": ("independent", "preempted"), "report": ("drifting", "shared by node")}
_OVERLAPS = {"tuning": ("free", "compute slower"), "report": ("transfer slower", "both slower")}
_US, _MS = 1e3, 1e6


@dataclass(frozen=True, slots=True)
class Variant:
    """One choice of each kind of noise."""

    tail: str
    jitter: str
    overlap: str
    stretch: float  # of the first captured step, 1 to 3
    stretched: str  # "kernels" | "host": what is longer in it

    @property
    def compute_slowdown(self) -> float:
        """Of kernels that run while something is transferred."""
        return {"compute slower": 1.08, "both slower": 1.12}.get(self.overlap, 1.0)

    @property
    def transfer_slowdown(self) -> float:
        """Of transfers beside which kernels run."""
        return {"transfer slower": 1.25, "both slower": 1.12}.get(self.overlap, 1.0)


@dataclass(frozen=True, slots=True)
class Clock:
    """Where the ranks' clocks are, ns from the true one."""

    offset_ns: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Files:
    """How the files are written: what real ones were seen to lack or to hold in excess."""

    unit: str  # "whole us" | "float us" | "base"
    information: str  # "all" | "rank only" | "backend only" | "none": of distributedInfo
    marks: bool  # ProfilerStep
    metadata: str  # "all" | "no seq" | "none": on NCCL's kernels
    external_is_correlation: bool
    unlaunched: float  # share of the device rows whose launch is not in the file, at the beginning
    extras: bool  # annotations on the device, overhead rows, kernels of no length
    packed: bool
    vendor: str  # "nvidia" | "amd": names of kernels and streams
    host_named: bool  # the file's name has the host's


def variant(half: str, steps: int, rng: np.random.Generator) -> Variant:
    stretch = 1.0 if rng.random() < 0.4 else float(rng.uniform(1, 3))
    tail, jitter, overlap = (str(rng.choice(of[half])) for of in (_TAILS, _JITTERS, _OVERLAPS))
    stretched = str(rng.choice(["kernels", "host"]))
    return Variant(tail, jitter, overlap, stretch if steps > 1 else 1.0, stretched)


def clock(nodes: list[int], rng: np.random.Generator) -> Clock:
    """Up to 10 ms between nodes, up to 50 us between the processes of one: `nodes` has the node of each rank."""
    of_node = {node: rng.uniform(-5 * _MS, 5 * _MS) for node in sorted(set(nodes))}
    return Clock(tuple(float(of_node[node] + rng.uniform(-25 * _US, 25 * _US)) for node in nodes))


def files(rng: np.random.Generator, *, one_group: bool) -> Files:
    """A third of the captures have all that a file can have. Without metadata only those with one group of ranks:

    of several groups it would not name the members.
    """
    whole = rng.random() < 1 / 3
    draw = rng.random(8)
    lacks = ("all", "no seq", "none") if one_group else ("all", "no seq")
    return Files(
        unit=str(rng.choice(["whole us", "float us", "base"], p=[0.15, 0.35, 0.5])),
        information="all" if whole else str(rng.choice(["all", "rank only", "backend only", "none"])),
        marks=whole or bool(draw[0] < 0.8),
        metadata="all" if whole else str(rng.choice(lacks)),
        external_is_correlation=not whole and bool(draw[1] < 0.2),
        unlaunched=0.0 if whole or draw[2] < 0.5 else float(0.08 * draw[3]),
        extras=not whole and bool(draw[4] < 0.5),
        packed=bool(draw[5] < 0.5),
        vendor="amd" if not whole and draw[6] < 0.15 else "nvidia",
        host_named=whole or bool(draw[7] < 0.5),
    )


def multipliers(kind: Variant, of_rank: np.random.Generator, of_node: np.random.Generator, count: int) -> np.ndarray:
    """How much longer each of a rank's kernels takes than it should: mean 1, with a heavy tail.

    Both generators give the same numbers whatever the fault is; `of_node` is the same for the ranks of a node.
    """
    if kind.tail == "lognormal":
        noise = np.exp(0.10 * of_rank.standard_normal(count) - 0.005)
    elif kind.tail == "spikes":
        noise = 1 + 0.03 * of_rank.standard_normal(count)
        noise = noise + (of_rank.random(count) < 0.01) * of_rank.exponential(2.0, count)
    elif kind.tail == "pareto":
        noise = 0.95 + 0.05 * of_rank.pareto(2.2, count)
    else:  # two modes
        noise = np.where(of_rank.random(count) < 0.9, 0.97, 1.27) * (1 + 0.03 * of_rank.standard_normal(count))
    noise = np.maximum(noise, 0.5)
    if kind.jitter == "preempted":
        noise = noise * np.where(of_rank.random(count) < 0.002, of_rank.uniform(2, 8, count), 1.0)
    elif kind.jitter == "drifting":
        noise = noise * np.exp(_drift(of_rank, count, 0.02))
    elif kind.jitter == "shared by node":
        noise = noise * np.exp(_drift(of_node, count, 0.03))
    return noise / noise.mean()


def _drift(rng: np.random.Generator, count: int, size: float) -> np.ndarray:
    """First-order autoregression, with a memory of about 50 kernels."""
    pushes = rng.standard_normal(count)
    value, values = 0.0, np.empty(count)
    for i, push in enumerate(pushes):
        value = 0.98 * value + 0.199 * push
        values[i] = value
    return size * values
