"""What the ranks of each kind of parallelism do in a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from captures.engine import Comm, Job, Rank

__all__ = ["PROGRAMS", "groups"]

_US = 1e3
_NAMES = ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "flash_fwd_kernel", "vectorized_elementwise")
_COMM, _GATHER, _SCATTER = 20, 24, 28  # streams
_TO, _FROM = 32, 40  # of a peer ahead, of one behind: two of each
_SYNCS = 1  # of a layer
_MEMORY_CALLS = 4  # of a step

Program = Iterator


def groups(job: Job) -> dict[str, list[Comm]]:
    """The job's process groups by role."""
    every = range(job.ranks)
    world = [Comm("0", "default_pg", tuple(every))]
    if job.parallel == "ddp" or (job.parallel == "fsdp" and job.split == 1):
        return {"world": world}
    if job.parallel == "pp":
        width = job.ranks // job.split
        stages = [tuple(every[s * width : (s + 1) * width]) for s in range(job.split)]
        columns = [tuple(stage[i] for stage in stages) for i in range(width)]
        data = [Comm(str(10 + s), "dp", stage) for s, stage in enumerate(stages)]
        return {"world": world, "pp": [Comm(str(1 + i), "pp", c) for i, c in enumerate(columns)], "dp": data}
    inner, outer = {"tp": ("tp", "dp"), "moe": ("ep", "dp"), "fsdp": ("shard", "replicate")}[job.parallel]
    blocks = [tuple(every[b : b + job.split]) for b in range(0, job.ranks, job.split)]
    rows = [tuple(block[i] for block in blocks) for i in range(job.split)]
    return {
        "world": world,
        inner: [Comm(str(1 + i), inner, block) for i, block in enumerate(blocks)],
        outer: [Comm(str(20 + i), outer, row) for i, row in enumerate(rows)],
    }


def _mine(rank: Rank, role: str) -> Comm:
    return next(comm for comm in groups(rank.job)[role] if rank.number in comm.members)


def _layer(rank: Rank, kind: str, layer: int, share: float = 1.0, *, experts: bool = False) -> None:
    """The kernels of one layer, forward or backward."""
    job = rank.job
    count = job.kernels * (1 if kind == "forward" else 2)
    ns = job.compute_ns / job.layers * (1 / 3 if kind == "forward" else 2 / 3) * share
    weights = np.exp(0.8 * np.random.default_rng([job.seed, 3, layer]).standard_normal(count))
    amount = rank.can.tokens[rank.step, rank.number]
    if experts:
        amount = amount * rank.can.experts[rank.step, rank.number]
    rank.thread = rank.main if kind == "forward" else rank.autograd
    for i, one in enumerate(ns * weights / weights.sum() * amount):
        rank.kernel(_NAMES[i % len(_NAMES)] + ("" if kind == "forward" else "_backward"), float(one))


def _host_of_layer(rank: Rank, layer: int) -> None:
    """What the host does in a layer's forward besides launching: faults of the host, and a longer first step."""
    job, can, me = rank.job, rank.can, rank.number
    variant = job.variant
    if rank.step == 1 and variant.stretched == "host":
        rank.spend((variant.stretch - 1) * job.compute_ns / job.layers, "aten::cudnn_convolution")
    if layer == job.layers // 2 and can.stall_ns[me] > 0:
        rank.spend(can.stall_ns[me], "prepare batch" if job.seed % 2 else None, "user_annotation")
    if layer < _MEMORY_CALLS:
        rank.memory()
    if can.sync_ns[me] > 0:
        for _ in range(_SYNCS):
            rank.item()
            rank.spend(can.sync_ns[me], "aten::nonzero")


def _optimizer(rank: Rank) -> None:
    rank.thread = rank.main
    start = rank.host
    for _ in range(6):
        rank.kernel("multi_tensor_apply_kernel", 0.01 * rank.job.compute_ns)
    rank.span("user_annotation", "Optimizer.step#AdamW.step", start)


def _steps(rank: Rank) -> Iterator[int]:
    for step in range(rank.job.steps + 1):
        rank.begin_step()
        yield step
        rank.end_step()


def _ddp(rank: Rank) -> Program:
    job, world = rank.job, _mine(rank, "world")
    for _ in _steps(rank):
        for layer in range(job.layers):
            _host_of_layer(rank, layer)
            _layer(rank, "forward", layer)
        sent = []
        for layer in reversed(range(job.layers)):
            _layer(rank, "backward", layer)
            if job.overlap:
                sent.append((yield from rank.collective(world, "allreduce", job.bytes / job.layers, _COMM)))
        if not job.overlap:
            for _ in range(job.layers):
                sent.append((yield from rank.collective(world, "allreduce", job.bytes / job.layers, _COMM)))
        for one in sent:
            yield from rank.join(one)
        _optimizer(rank)


def _fsdp(rank: Rank) -> Program:
    """Parameters are gathered one layer ahead. With `split` ranks of a shard group, gradients are reduced over these

    groups' replicas after that.
    """
    job = rank.job
    shard = _mine(rank, "world" if job.split == 1 else "shard")
    replicate = None if job.split == 1 else _mine(rank, "replicate")
    size = job.bytes / job.layers
    for _ in _steps(rank):
        for kind in ("forward", "backward"):
            ahead = yield from rank.collective(shard, "_allgather_base", size, _GATHER)
            for i in range(job.layers):
                now, ahead = ahead, None
                if job.overlap and i + 1 < job.layers:
                    ahead = yield from rank.collective(shard, "_allgather_base", size, _GATHER)
                yield from rank.join(now)
                layer = i if kind == "forward" else job.layers - 1 - i
                if kind == "forward":
                    _host_of_layer(rank, layer)
                _layer(rank, kind, layer)
                if kind == "backward":
                    done = yield from rank.collective(shard, "_reduce_scatter_base", size, _SCATTER)
                    if replicate is not None:
                        yield from rank.join(done)
                        done = yield from rank.collective(replicate, "allreduce", size / job.split, _COMM)
                    if not job.overlap or i + 1 == job.layers:
                        yield from rank.join(done)
                    else:
                        rank.pending -= 1
                if ahead is None and i + 1 < job.layers:
                    ahead = yield from rank.collective(shard, "_allgather_base", size, _GATHER)
        _optimizer(rank)


def _tp(rank: Rank) -> Program:
    """Layers are split: two all-reduces of each, in the way of the computation. Gradients are reduced over replicas."""
    job, inside, data = rank.job, _mine(rank, "tp"), _mine(rank, "dp")
    for _ in _steps(rank):
        sent = []
        for kind in ("forward", "backward"):
            for layer in range(job.layers) if kind == "forward" else reversed(range(job.layers)):
                if kind == "forward":
                    _host_of_layer(rank, layer)
                for _ in range(2):
                    _layer(rank, kind, layer, 0.5)
                    done = yield from rank.collective(inside, "allreduce", job.activation_bytes, _GATHER)
                    yield from rank.join(done)
                if kind == "backward":
                    sent.append((yield from rank.collective(data, "allreduce", job.bytes / job.layers, _COMM)))
        for one in sent:
            yield from rank.join(one)
        _optimizer(rank)


def _moe(rank: Rank) -> Program:
    """Tokens go to the experts' ranks and back. Gradients of what is not experts are reduced over all ranks."""
    job, experts, world = rank.job, _mine(rank, "ep"), _mine(rank, "world")
    for _ in _steps(rank):
        sent = []
        for kind in ("forward", "backward"):
            for layer in range(job.layers) if kind == "forward" else reversed(range(job.layers)):
                if kind == "forward":
                    _host_of_layer(rank, layer)
                _layer(rank, kind, layer, 0.5)
                size = job.activation_bytes
                there = size * rank.can.experts[rank.step, rank.number]
                done = yield from rank.collective(experts, "all_to_allv", size, _GATHER, received=there)
                yield from rank.join(done)
                _layer(rank, kind, layer, 0.5, experts=True)
                done = yield from rank.collective(experts, "all_to_allv", there, _GATHER, received=size)
                yield from rank.join(done)
                if kind == "backward":
                    sent.append((yield from rank.collective(world, "allreduce", job.bytes / job.layers, _COMM)))
        for one in sent:
            yield from rank.join(one)
        _optimizer(rank)


def _pp(rank: Rank) -> Program:
    """One forward, one backward; transfers to and from a neighbour have streams of their own."""
    job, line, data = rank.job, _mine(rank, "pp"), _mine(rank, "dp")
    stage = line.members.index(rank.number)
    before = line.members[stage - 1] if stage else None
    after = line.members[stage + 1] if stage + 1 < job.split else None
    warm = min(job.split - stage - 1, job.microbatches)
    order = ["forward"] * warm + ["forward", "backward"] * (job.microbatches - warm) + ["backward"] * warm
    share = float(rank.can.stages[stage]) / job.microbatches
    for _ in _steps(rank):
        first = True
        for kind in order:
            source, target = (before, after) if kind == "forward" else (after, before)
            way = 0 if kind == "forward" else 4
            if source is not None:
                received = yield from rank.collective(line, "recv", job.activation_bytes, _FROM + way, peer=source)
                yield from rank.join(received)
            for layer in range(job.layers):
                if first:
                    _host_of_layer(rank, layer)
                _layer(rank, kind, layer, share)
            first = False
            if target is not None:
                yield from rank.collective(line, "send", job.activation_bytes, _TO + way, peer=target)
                rank.pending -= 1
        if len(data.members) > 1:
            done = yield from rank.collective(data, "allreduce", job.bytes, _COMM)
            yield from rank.join(done)
        _optimizer(rank)


PROGRAMS = {"ddp": _ddp, "fsdp": _fsdp, "tp": _tp, "moe": _moe, "pp": _pp}
