"""How long a collective takes by its size: models per algorithm, the run's own line, and bus bandwidth.

Every model is linear in the size n: `hops` × α + `sent` × n × β + `reduced` × n × γ, where α is the latency of one
message, β the time to send a byte and γ the time to reduce one. n is the whole array: what an all-reduce reduces, what
an all-gather gives and a reduce-scatter takes, what one rank of an all-to-all sends. ⌈log2 p⌉ stands for log2 p where p
is no power of two, which is at most one round too few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import Floats, robust_deviation
from rankscope.analysis.model.segments import reached_before
from rankscope.analysis.model.tables import in_order, is_like
from rankscope.collectors.schema import OPS

__all__ = [
    "Cost",
    "Line",
    "Link",
    "bus_factor",
    "busbw",
    "costs",
    "faster_than_ring",
    "fit_line",
    "kind_of",
    "lines",
    "link_of",
    "transfers",
]

_MODEL_ERROR = 0.05  # of a size's median: a straight line is no better than this
_SIZES_DIFFER = 1.5  # ratio of sizes from which latency and bandwidth can be separated
_ENOUGH_ALONE = 3  # transfers of one size
_BINS = 8  # per doubling of the size: sizes that are closer count as one
_CLEARLY_FASTER = 0.15
_SPECIAL = ("parameter server", "in-network")  # they need other hardware
_KINDS = ("allreduce", "allgather", "reduce_scatter", "alltoall", "broadcast")
_MEASURED = tuple(op for op in OPS if op.startswith(("allreduce", "allgather", "reduce_scatter", "alltoall")))


@dataclass(frozen=True, slots=True)
class Link:
    """α in ns per message, β and γ in ns per byte sent and reduced."""

    latency_ns: float
    ns_per_byte: float
    reduce_ns_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The serial cost of an algorithm: messages, and bytes sent and reduced as shares of the whole array."""

    hops: float
    sent: float
    reduced: float = 0.0

    def ns(self, size_bytes: float, link: Link) -> float:
        per_byte = self.sent * link.ns_per_byte + self.reduced * link.reduce_ns_per_byte
        return self.hops * link.latency_ns + size_bytes * per_byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A collective's time as `latency_ns` + `ns_per_byte` × size, from `sizes` different sizes.

    `latency_error_ns` and `rate_error_ns_per_byte` are standard errors; `error` is the distance of a size's median from
    the line, as a share, in the median over the operations.
    """

    latency_ns: float
    ns_per_byte: float
    latency_error_ns: float
    rate_error_ns_per_byte: float
    error: float
    sizes: int

    def ns(self, size_bytes: float) -> float:
        return self.latency_ns + self.ns_per_byte * size_bytes

    @property
    def half_bytes(self) -> float:
        """n½: the size at which half of the time is latency. Source: Hockney 1994."""
        return self.latency_ns / self.ns_per_byte if self.ns_per_byte > 0 else math.inf


def kind_of(op: str) -> str | None:
    """Return the kind of an operation of OPS.

    Allreduce, allgather, reduce_scatter, alltoall, broadcast; None: another one.
    """
    return next((kind for kind in _KINDS if op.startswith(kind)), None)


def costs(op: str, ranks: int) -> dict[str, Cost]:
    """Return the cost of each algorithm for `op` among so many ranks, by its name.

    Empty for other operations or one rank.
    """
    kind = kind_of(op)
    if kind is None or ranks < 2:
        return {}
    return {name: model(ranks) for name, model in _MODELS[kind].items()}


def bus_factor(op: str, ranks: int) -> float:
    """Bytes that cross the busiest link for each byte of the size, whatever the algorithm.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    share = (ranks - 1) / ranks if ranks else 0.0
    return {"allreduce": 2 * share, "allgather": share, "reduce_scatter": share, "alltoall": share}.get(
        kind_of(op) or "", 1.0
    )


def busbw() -> pl.Expr:
    """Bytes per second over the busiest link, from size_bytes, transfer_ns, op and group_size; null: cannot be said.

    A barrier moves no bytes, and of a transfer that took no time nothing can be said.
    Source: nccl-tests, doc/PERFORMANCE.md, with the size of the whole tensor.
    """
    n = pl.col("group_size").cast(pl.Float64)
    factor = (
        pl.when(is_like("op", "^allreduce"))
        .then(2 * (n - 1) / n)
        .when(is_like("op", "^(allgather|reduce_scatter|alltoall)"))
        .then((n - 1) / n)
        .otherwise(1.0)
    )
    moved = (pl.col("size_bytes") > 0) & (pl.col("transfer_ns") > 0)
    return pl.when(moved).then(factor * pl.col("size_bytes") / pl.col("transfer_ns") * 1e9)


def link_of(line: Line, cost: Cost) -> Link:
    """α and β of one message, if the line is that of this algorithm. What reducing takes is part of β then."""
    return Link(line.latency_ns / cost.hops, line.ns_per_byte / cost.sent)


def faster_than_ring(op: str, ranks: int, line: Line, size_bytes: float) -> tuple[str, float] | None:
    """Return the algorithm that takes the least for this size, and its share of a ring's time, if the line is a ring's.

    None where nothing is 15 % faster. Algorithms that need servers or a switch that computes are left out.
    """
    models = costs(op, ranks)
    if "ring" not in models:
        return None
    link = link_of(line, models["ring"])
    took = {name: cost.ns(size_bytes, link) for name, cost in models.items() if name not in _SPECIAL}
    best = min(took, key=lambda name: took[name])
    share = took[best] / took["ring"] if took["ring"] else 1.0
    return (best, share) if share <= 1 - _CLEARLY_FASTER else None


@once
def transfers(collectives: pl.DataFrame, *, unsized: bool = False) -> pl.DataFrame:
    """Each whole operation among all ranks of a group that moves bytes, with the time that these bytes took.

    One row per operation: instance_id, group_id, group, group_size, op, step, size_bytes, `ns`, and `alone`: no
    earlier operation of the group was under way on any of its ranks. `ns` begins when the last rank has arrived and the
    group's earlier operations have ended; of those that are not alone it can be too short, where a backend runs several
    at once. Operations with a root are left out: the time in them is no transfer time. Where only the
    durations on the device are known, `ns` is the least of them, which begins when the stream reaches the operation.
    Where none has a size all are given if `unsized`.
    """
    arrival = pl.coalesce("device_start_ns", "start_ns")
    by_group = ["rank", "group_id"]
    rows = collectives.filter(
        pl.col("instance_id").is_not_null(), pl.col("wait_ns").is_not_null(), pl.col("op").is_in(_MEASURED)
    ).select(
        *("rank", "instance_id", "group_id", "group", "group_size", "op", "step", "size_bytes"),
        *("wait_ns", "end_ns", "transfer_ns", arrival.alias("_arrival_ns")),
    )
    rows = in_order(rows, *by_group, "_arrival_ns")
    any_size = not unsized or rows["size_bytes"].null_count() < len(rows)
    return (
        rows.with_columns(begin_ns=pl.col("_arrival_ns") + pl.col("wait_ns"), free_ns=reached_before(rows, *by_group))
        .with_columns(free_ns=pl.col("free_ns").fill_null(pl.col("begin_ns")))
        .group_by("instance_id")
        .agg(
            pl.col("group_id", "group", "group_size", "op", "step").first(),
            pl.col("size_bytes").max(),
            ns=pl.coalesce(pl.col("end_ns") - pl.max_horizontal("begin_ns", "free_ns"), "transfer_ns").min().clip(0),
            alone=((pl.col("free_ns") <= pl.col("begin_ns")) | pl.col("end_ns").is_null()).all(),
        )
        .filter((pl.col("size_bytes") > 0).fill_null(not any_size))
        .sort("instance_id")
    )


def lines(moved: pl.DataFrame) -> dict[tuple[str, int], Line]:
    """Return the line of each (op, group_id) whose sizes differ enough, from its `transfers`.

    Of a size those count that were alone, if there are a few, else all: those of tiny buckets never are.
    """
    by_size = ["op", "group_id", (pl.col("size_bytes").log(2) * _BINS).round()]
    few = pl.col("alone").sum().over(by_size) < _ENOUGH_ALONE
    counting = moved.filter(pl.col("ns") > 0).filter(pl.col("alone") | few)
    found = {
        (str(op), int(group)): fit_line(rows["size_bytes"].to_numpy(), rows["ns"].to_numpy())
        for (op, group), rows in counting.group_by("op", "group_id", maintain_order=True)
    }
    return {key: line for key, line in found.items() if line is not None}


def fit_line(size_bytes: Floats, ns: Floats) -> Line | None:
    """Return the line through the median time of each size, both its numbers at least 0.

    None where sizes hardly differ.

    Weighted by how well each median is known, but none better than 5 %: so small sizes, which show the latency, weigh
    no less than large ones. Medians make single late transfers harmless.
    """
    each = np.round(np.log2(size_bytes) * _BINS).astype(np.int64)
    bins = [each == number for number in np.unique(each)]
    size = np.array([float(np.median(size_bytes[at])) for at in bins])
    usual = np.array([float(np.median(ns[at])) for at in bins])
    if len(size) < 2 or size[-1] < _SIZES_DIFFER * size[0]:
        return None
    # The standard error of a median is 1.2533 times that of the mean.
    scatter, count = np.array([robust_deviation(ns[at]) for at in bins]), np.array([at.sum() for at in bins])
    known_to = np.maximum(1.2533 * scatter / np.sqrt(count), np.maximum(_MODEL_ERROR * usual, 1.0))
    weighted = np.stack([1 / known_to, size / known_to], axis=1)
    covariance = np.linalg.inv(weighted.T @ weighted)
    latency, rate = covariance @ weighted.T @ (usual / known_to)
    if latency < 0:
        latency, rate = 0.0, _through(size / known_to, usual / known_to)
    elif rate < 0:
        latency, rate = _through(1 / known_to, usual / known_to), 0.0
    off = np.abs(latency + rate * size - usual) / np.maximum(usual, 1.0)
    return Line(
        latency_ns=float(latency),
        ns_per_byte=float(rate),
        latency_error_ns=float(covariance[0, 0] ** 0.5),
        rate_error_ns_per_byte=float(covariance[1, 1] ** 0.5),
        error=float(np.median(np.repeat(off, count))),
        sizes=len(size),
    )


def _through(x: Floats, y: Floats) -> float:
    """Return the factor of the least squares line through 0."""
    return float((x * y).sum() / (x * x).sum())


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _ring(passes: int, reducing: int) -> Callable[[int], Cost]:
    """Every rank sends one part of p to its neighbour, p - 1 times; an all-reduce does it twice.

    Source: Patarasuk and Yuan 2009, bandwidth optimal all-reduce algorithms.
    """
    return lambda p: Cost(passes * (p - 1), passes * (p - 1) / p, reducing * (p - 1) / p)


def _halving(passes: int, reducing: int) -> Callable[[int], Cost]:
    """Recursive halving (reduce-scatter) or doubling (all-gather); both are Rabenseifner's all-reduce.

    Source: Rabenseifner 2004; Thakur, Rabenseifner and Gropp 2005.
    """
    return lambda p: Cost(passes * _rounds(p), passes * (p - 1) / p, reducing * (p - 1) / p)


def _torus(passes: int, reducing: int) -> Callable[[int], Cost]:
    """Rings along the rows of a grid as square as p allows, then along its columns on what one row has left.

    Source: Mikami et al. 2018; Ying et al. 2018.
    """

    def model(p: int) -> Cost:
        rows = next(d for d in range(math.isqrt(p), 0, -1) if p % d == 0)
        return Cost(passes * (rows - 1 + p // rows - 1), passes * (p - 1) / p, reducing * (p - 1) / p)

    return model


def _tree(p: int) -> Cost:
    """Return the time of binomial trees: one reduces to one rank, another one gives it back.

    Nothing is pipelined. Source: Thakur 2005.
    """
    return Cost(2 * _rounds(p), 2 * _rounds(p), _rounds(p))


def _double_tree(p: int) -> Cost:
    """Two binary trees, each with half of the array, in which every rank is a leaf of one; pipelined.

    Source: Sanders, Speck and Träff 2009; NCCL 2.4.
    """
    return Cost(2 * _rounds(p), 2, 1)


def _recursive_doubling(p: int) -> Cost:
    """Ranks exchange all that they have with one twice as far away each time. Source: Thakur 2005."""
    return Cost(_rounds(p), _rounds(p), _rounds(p))


def _parameter_server(_: int) -> Cost:
    """As many servers as workers, each with a part of the array; sending and receiving go on at once.

    Source: Jiang et al. 2020 (BytePS): 2α + max(n / B of a worker, p × n / (servers × B of a server)).
    """
    return Cost(2, 1, 1)


def _in_network(sent: Callable[[int], float]) -> Callable[[int], Cost]:
    """Return the time where the switch reduces or multiplies.

    Busbw can be more than the link's rate. Source: NCCL, NVLS; NVIDIA SHARP.
    """
    return lambda p: Cost(1, sent(p))


def _all_but_own(p: int) -> float:
    return (p - 1) / p


_MODELS: Mapping[str, Mapping[str, Callable[[int], Cost]]] = {
    "allreduce": {
        "ring": _ring(2, 1),
        "tree": _tree,
        "double binary tree": _double_tree,
        "recursive doubling": _recursive_doubling,
        "Rabenseifner": _halving(2, 1),
        "2D torus": _torus(2, 1),
        "parameter server": _parameter_server,
        "in-network": _in_network(lambda _: 1.0),
    },
    "reduce_scatter": {
        "ring": _ring(1, 1),
        "recursive halving": _halving(1, 1),
        "2D torus": _torus(1, 1),
        "in-network": _in_network(_all_but_own),
    },
    "allgather": {
        "ring": _ring(1, 0),
        "recursive doubling": _halving(1, 0),
        "2D torus": _torus(1, 0),
        "in-network": _in_network(_all_but_own),
    },
    "broadcast": {
        "ring": lambda p: Cost(p - 1, 1),  # a pipelined chain
        "tree": lambda p: Cost(_rounds(p), _rounds(p)),
        "double binary tree": lambda p: Cost(_rounds(p), 1),
        # A scatter, then an all-gather: Barnett et al. 1994.
        "scatter and all-gather": lambda p: Cost(_rounds(p) + p - 1, 2 * (p - 1) / p),
        "in-network": _in_network(lambda _: 1.0),
    },
    "alltoall": {
        "pairwise": lambda p: Cost(p - 1, (p - 1) / p),  # Thakur 2005
        "Bruck": lambda p: Cost(_rounds(p), _rounds(p) / 2),  # Bruck et al. 1997
    },
}
