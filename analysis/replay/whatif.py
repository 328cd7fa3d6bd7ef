"""Predicts the step with fixes: fixes as the user writes them, applied to the graph and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.distinct import distinct
from rankscope.analysis.metrics.links import busy_time, link_rates
from rankscope.analysis.model.finding import Fidelity
from rankscope.analysis.model.parts import OWN
from rankscope.analysis.replay.communication import (
    Pieces,
    hidden,
    kept_parameters,
    operations,
    prefetched,
    split,
)
from rankscope.analysis.replay.device_graph import BETWEEN, LAUNCH, device_graph, first_steps
from rankscope.analysis.replay.fixes import SCHEDULES, VANISHING, Fix, refused
from rankscope.analysis.replay.gradient_buckets import gradient_buckets, latency_and_rate, merged_buckets
from rankscope.analysis.replay.graph import Changes, Floats, Ints, Shorts, replay, replay_with
from rankscope.analysis.replay.host_calls import may_wait
from rankscope.analysis.replay.host_graph import HostGraph, before_steps, fidelity, graph_of, step_lengths
from rankscope.analysis.replay.pipeline import (
    OpGrid,
    as_other_stages,
    communicates,
    even_microbatches,
    even_stages,
    op_grid,
)
from rankscope.analysis.replay.pipeline_plan import WhatIf, ends, ideal
from rankscope.analysis.replay.protocol import Gain
from rankscope.analysis.replay.sections import launched_alike, operations_before
from rankscope.analysis.replay.wiring import NONE, Wiring, transfers, wiring
from rankscope.analysis.runs.memory_budget import give_back
from rankscope.analysis.text.message import text
from rankscope.analysis.text.units import percent
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.parallelism import role_codes, roles
from rankscope.collectors.schema import P2P_OPS
from rankscope.errors import BadFix, NotReplayable

__all__ = ["MAX_ERROR", "PipelineRerun", "Rerun", "rerun"]

MAX_ERROR = 0.05  # a replay that is further off, in the median over steps, predicts nothing
_TWICE_THE_USUAL = 50  # MiB; DDP's own bucket_cap_mb is 25

_WHY_NOT = {
    "rank": "it has no such rank beside others that do the same",
    "node": "it has no such node beside others that do the same",
    "stage": "it has no such stage of a pipeline beside others",
    "balance": "it has one rank only, or no pipeline's stages",
    "link": "no traffic between such nodes was recorded",
    "op": "it has no such operation",
    "bucket-mb": "no step has two buckets of gradients or more",
    **dict.fromkeys(VANISHING, "no time is lost to it"),
}

Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """A run that can be replayed with fixes."""

    host: HostGraph
    fidelity: Fidelity
    nodes: dict[int, int]  # rank -> node
    role: Ints  # of the ranks in order; only ranks of one role do the same work
    stages: dict[int, int]  # rank -> its stage of the pipeline, where it has one only
    links: pl.DataFrame
    timeline: Timeline  # of what is replayed
    lengths_ns: Floats  # of the rows of `host.steps`, as replayed with nothing changed
    judged: Bools
    earlier: Ints  # nodes before their rank's first step: no fix changes them, or it would begin sooner and be longer

    @cached_property
    def buckets(self) -> pl.DataFrame:
        """Those of DDP's gradients: group_id, step, instance_id and size_bytes, in the order they are reduced."""
        found = gradient_buckets(self.timeline)
        return found.filter(transfers(self.host.graph, found["instance_id"].to_numpy()) != NONE)

    @cached_property
    def operations(self) -> pl.DataFrame:
        return operations(self.timeline)

    @cached_property
    def section(self) -> Shorts:
        return operations_before(self.host.graph)

    @property
    def step_ns(self) -> float:
        return float(self.host.steps["measured_ns"].to_numpy()[self.judged].mean())

    def places(self, kind: str) -> dict[int, tuple[int, ...]]:
        """Return the ranks' nodes or stages, or their own numbers."""
        places = {"rank": {rank: rank for rank in self.nodes}, "node": self.nodes, "stage": self.stages}
        return {rank: (place,) for rank, place in places.get(kind, {}).items()}

    def gain(self, *fixes: str, beyond: tuple[str, ...] = ()) -> Gain:
        """Return the gain of these fixes together, or what they gain beyond other ones. Raises `BadFix`."""
        saved_ns = self._saved(fixes) - self._saved(beyond)
        gain = _gain(fixes, self.step_ns, saved_ns, self.fidelity)
        if not any(self._pieces(Fix.parse(fix)) for fix in fixes):
            return gain
        least_ns = self._saved(fixes, at_end=True) - self._saved(beyond, at_end=True)
        return replace(gain, uncertainty_ns=gain.uncertainty_ns + abs(float((saved_ns - least_ns).mean())) / 2)

    def _saved(self, fixes: tuple[str, ...], *, at_end: bool = False) -> Floats:
        """Return the gain in each step; `at_end`: the gradients of a bucket are all ready when its last is."""
        if not fixes:
            return np.zeros(1)
        known = self._known_gains.get((fixes, at_end))
        if known is None:
            known = self._known_gains[fixes, at_end] = self._replayed_gain(fixes, at_end=at_end)
        return known

    @cached_property
    def _known_gains(self) -> dict[tuple[tuple[str, ...], bool], Floats]:
        return {}

    def _replayed_gain(self, fixes: tuple[str, ...], *, at_end: bool) -> Floats:
        graph, duration = self.host.graph, self.host.graph.duration_ns
        parsed = [Fix.parse(fix) for fix in fixes]
        waiting = [fix for fix in parsed if fix.kind in SCHEDULES or self._pieces(fix)]
        for fix in parsed:
            if fix not in waiting:
                duration = self._fixed(fix, duration)
        none = np.zeros(0, dtype=np.int64)
        changes = Changes(duration_ns=duration, gone=none, waits=none, waited_for=none)
        for fix in sorted(waiting, key=lambda fix: self._pieces(fix) is not None):  # what adds nodes comes last
            changes = self._scheduled(fix, changes, at_end=at_end)
        changes.duration_ns[self.earlier] = graph.duration_ns[self.earlier]
        try:
            lengths = step_lengths(self.host, replay_with(graph, changes))
        except NotReplayable as reason:
            raise BadFix(f"cannot fix '{', '.join(fixes)}' in this run: {reason}") from None
        per_step = (self.lengths_ns - lengths)[self.judged]
        # Ranks gain alike: a step counts once, however many ranks there are.
        _, of = np.unique(self.host.steps["step"].to_numpy()[self.judged], return_inverse=True)
        return np.asarray(np.bincount(of, weights=per_step) / np.bincount(of))

    def possible(self, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the fixes that this run allows, most with a placeholder; a replay for some, but of those `without`."""
        graph, parts = self.host.graph, self._parts()
        ranks, nodes = sorted(self.nodes), sorted(set(self.nodes.values()))
        found = [f"rank:{ranks[0]} … rank:{ranks[-1]}", "balance"] if len(ranks) > 1 else []
        found += [f"node:{n}" for n in nodes] if 1 < len(nodes) < len(ranks) else []
        found += [f"stage:{stage}" for stage in sorted(set(self.stages.values()))]
        found += [f"link:node{n}" for n in nodes if link_rates(self.links, (n,)) is not None]
        found += [f"op:{op}=0" for op in self._operations()]
        found += [part for part in VANISHING if graph.parts.index(part) in parts]
        exposed = self.operations.filter(pl.col("exposed_ns") > 0, ~pl.col("is_edge"))
        found += [f"overlap:{sort}:{op}" for sort, op in sorted({*exposed.select("sort", "op").iter_rows()})]
        replayed = ("prefetch:1", "reshard:off", *self._other_buckets())
        found += [fix for fix in replayed if not fix.startswith(without) and self._allows(Fix.parse(fix))]
        return tuple(found)

    def _other_buckets(self) -> list[str]:
        """Buckets twice as large as usual, and half as large as they are."""
        largest = self.buckets["size_bytes"].max()
        half = [f"bucket-mb:{largest / 2**21:.3g}"] if isinstance(largest, int) else []
        return [f"bucket-mb:{_TWICE_THE_USUAL}", *half]

    def _allows(self, fix: Fix) -> bool:
        try:
            if fix.kind not in SCHEDULES and not self._pieces(fix):
                return self._larger_buckets(fix, self.host.graph.duration_ns) is not None
            self._saved((str(fix),))
        except BadFix:
            return False
        return True

    def _fixed(self, fix: Fix, duration: Floats) -> Floats:
        """Return the durations with one more fix."""
        kinds: dict[str, Callable[[Fix, Floats], Floats | None]] = {
            "rank": self._like_peers,
            "node": self._like_other_nodes,
            "stage": self._like_other_stages,
            "link": self._healthy_link,
            "op": self._faster_operation,
            "balance": self._balanced,
            "bucket-mb": self._larger_buckets,
            **dict.fromkeys(VANISHING, self._without),
        }
        fixed = kinds[fix.kind](fix, duration) if fix.kind in kinds else None
        if fixed is None:
            raise refused(fix, _WHY_NOT.get(fix.kind, "no run has it"), self.possible())
        return fixed

    # ---- when communication happens

    @cached_property
    def _transfers(self) -> Ints:
        return transfers(self.host.graph, self.operations["instance_id"].to_numpy())

    @cached_property
    def _wired(self) -> Wiring:
        return wiring(self.host.graph, self.operations["instance_id"].to_numpy())

    def _scheduled(self, fix: Fix, changes: Changes, *, at_end: bool) -> Changes:
        """Return the changes with one more fix."""
        changed: Changes | None
        if fix.kind == "overlap":
            sort, _, op = fix.of.rpartition(":") if ":" in fix.of else (fix.of, "", "")
            changed = hidden(self.operations, sort, op, self._transfers, changes)
        elif fix.kind == "prefetch":
            changed = prefetched(self.operations, int(fix.of), self._wired, changes)
        elif fix.kind == "reshard":
            changed = kept_parameters(self.operations, self._wired, changes)
        else:
            pieces = self._pieces(fix)
            assert pieces is not None
            ends = replay(self.host.graph, self.host.graph.duration_ns)
            changed = split(replace(pieces, at_end=at_end), self._wired, changes, ends)
        if changed is None:
            raise BadFix(f"cannot fix '{fix}' in this run: it has no such operations")
        return changed

    def _pieces(self, fix: Fix) -> Pieces | None:
        """Return the parts into which buckets go that are too large.

        None where they only become larger. Raises `BadFix`.
        """
        if fix.kind != "bucket-mb" or fix.amount is None or self._buckets_per_step() <= 1:
            return None
        cap = fix.amount * 2**20
        of = ["group_id", "step"]
        merged = merged_buckets(self.buckets, cap)
        seen = self.operations["instance_id"].to_numpy()[self._transfers != NONE]
        node = self._bucket_nodes()
        ended = self.buckets.with_columns(_end=self.host.graph.end_ns[node]).sort("group_id", "step", "_end")
        earlier = ended.select("instance_id", _earlier=pl.col("instance_id").shift(1).over(of))
        ordered = self.buckets.join(earlier, on="instance_id", how="left", maintain_order="left")
        large = ordered.with_columns(_before=pl.col("instance_id").shift(1).over(of)).filter(
            pl.col("size_bytes") > cap,
            pl.col("_before").is_not_null(),
            pl.Series(np.isin(self.buckets["instance_id"].to_numpy(), seen)),
        )
        if len(np.unique(merged)) < len(merged) or large.is_empty():
            return None
        size = self.buckets["size_bytes"].to_numpy().astype(np.float64)
        latency_ns, ns_per_byte = latency_and_rate(size, self.host.graph.duration_ns[node])
        sizes = large["size_bytes"].to_numpy().astype(np.float64)
        parts = np.ceil(sizes / cap).astype(np.int64)
        share = (latency_ns + ns_per_byte * sizes / parts) / (latency_ns + ns_per_byte * sizes)
        names = ("instance_id", "_before", "_earlier")
        bucket, before, earlier = (large[name].cast(pl.Int64).fill_null(NONE).to_numpy() for name in names)
        return Pieces(bucket, before, earlier, parts, share, at_end=False)

    def _bucket_nodes(self) -> Ints:
        """Return the transfer of each bucket."""
        return transfers(self.host.graph, self.buckets["instance_id"].to_numpy())

    # ---- whose own time is too long

    def _like_peers(self, fix: Fix, duration: Floats) -> Floats | None:
        ranks = fix.numbers
        return self._as_the_others(ranks, duration) if ranks and set(ranks) <= set(self.nodes) else None

    def _like_other_nodes(self, fix: Fix, duration: Floats) -> Floats | None:
        of_node = tuple(rank for rank, node in self.nodes.items() if (node,) == fix.numbers)
        return self._as_the_others(of_node, duration)

    def _as_the_others(self, ranks: tuple[int, ...], duration: Floats) -> Floats | None:
        """Own time of `ranks`, by step and label, becomes the median of all others that have their role."""
        chosen = np.isin(sorted(self.nodes), ranks)
        alike = [self.role == each for each in np.unique(self.role[chosen])]
        peers = [_Peers(chosen & role, ~chosen & role, np.median) for role in alike]
        known = bool(peers) and all(some.others.any() for some in peers)
        return self._own_time_as(peers, duration) if known else None

    def _like_other_stages(self, fix: Fix, duration: Floats) -> Floats | None:
        """Own time of the stage's ranks, by step and label, becomes the median over the ranks of the other stages."""
        staged = np.isin(sorted(self.nodes), list(self.stages))
        of_stage = [rank for rank, stage in self.stages.items() if (stage,) == fix.numbers]
        chosen = np.isin(sorted(self.nodes), of_stage)
        known = chosen.any() and (staged & ~chosen).any()
        return self._own_time_as([_Peers(chosen, staged & ~chosen, np.median)], duration) if known else None

    def _balanced(self, fix: Fix, duration: Floats) -> Floats | None:
        """Own time of every rank, by step and label, becomes the mean over ranks."""
        if fix.of or len(self.nodes) < 2:
            return None
        everybody = np.ones(len(self.nodes), bool)
        return self._own_time_as([_Peers(everybody, everybody, np.mean)], duration)

    def _own_time_as(self, peers: Sequence[_Peers], duration: Floats) -> Floats:
        """Durations in which own time of the chosen ranks is, by step and label, what is typical of the others.

        It is spread over the spans between operations as that of the others is, if all have one role and call equally
        many in the step. What a rank has no time of stays away. How late kernels begin depends on what else the device
        does and stays; calls that may hold a wait for others become shorter only.
        """
        scaled = duration.copy()
        for some in peers:
            ranks = np.flatnonzero(some.chosen | some.others)
            for nodes, at, shape, waits in self._spans_by_label(tuple(ranks.tolist())):
                spent = np.bincount(at, duration[nodes], math.prod(shape)).reshape(shape).astype(np.float64)
                factor = _as_peers(spent, some.chosen[ranks], some.others[ranks], some.typical).ravel()[at]
                scaled[nodes] *= np.minimum(factor, 1.0) if waits else factor
        return np.asarray(scaled)

    def _spans_by_label(self, rows: tuple[int, ...]) -> list[tuple[Ints, Ints, tuple[int, int, int], bool]]:
        """Of these rows of the ranks the nodes of own time by label, with each one's place by (rank, step, span).

        Also how many of each there are, and whether the label's calls may hold a wait.
        """
        if rows not in self._known_spans:
            graph, (own, row, calls) = self.host.graph, self._own_work
            ranks, found, first = np.array(rows), [], self._first_step
            comparable = (calls[ranks] == calls[ranks[0]]).all(axis=0) & (self.role[ranks] == self.role[ranks[0]]).all()
            of_ranks = np.isin(row, ranks)
            nodes, place = own[of_ranks], np.searchsorted(ranks, row[of_ranks])
            labels = _shared(graph.label[nodes], place, len(ranks))
            for label in distinct(labels)[0]:
                of_label = labels == label
                some_nodes, step = nodes[of_label], graph.step[nodes[of_label]] - first
                at = place[of_label] * calls.shape[1] + step
                alike = launched_alike(graph, some_nodes, self.section, at, (len(ranks), calls.shape[1]))
                sections, span = distinct(self.section[some_nodes] * (comparable & alike)[step])
                shape = (len(ranks), calls.shape[1], len(sections))
                at = at * shape[2] + span
                found.append((some_nodes, at, shape, bool(label >= 0 and may_wait(graph.labels[label]))))
            self._known_spans[rows] = found
        return self._known_spans[rows]

    @cached_property
    def _known_spans(self) -> dict[tuple[int, ...], list[tuple[Ints, Ints, tuple[int, int, int], bool]]]:
        return {}

    @cached_property
    def _first_step(self) -> int:
        step = self.host.graph.step
        return int(step[step >= 0].min())

    @cached_property
    def _own_work(self) -> tuple[Ints, Ints, Ints]:
        """The nodes of own time that is the rank's work, the row of each in the ranks, and calls by (rank, step)."""
        graph = self.host.graph
        in_step = np.isin(graph.part, [graph.parts.index(part) for part in OWN]) & (graph.step >= 0)
        late = np.isin(graph.label, [code for code, name in enumerate(graph.labels) if name in (BETWEEN, LAUNCH)])
        own = np.flatnonzero(in_step & ~late)
        row = np.searchsorted(sorted(self.nodes), graph.rank[own])
        calls = np.zeros((len(self.nodes), int(graph.step.max()) + 1 - self._first_step), np.int64)
        np.maximum.at(calls, (row, graph.step[own] - self._first_step), self.section[own])
        return own, row, calls

    # ---- what takes no time or less

    def _without(self, fix: Fix, duration: Floats) -> Floats | None:
        graph = self.host.graph
        of_part = graph.part == graph.parts.index(fix.kind)
        return duration * ~of_part if of_part.any() else None

    def _faster_operation(self, fix: Fix, duration: Floats) -> Floats | None:
        op = fix.of.rpartition("=")[0]
        if fix.amount is None or op not in self._operations():
            return None
        graph = self.host.graph
        of_op = (graph.instance >= 0) & (graph.label == graph.labels.index(op))
        factor: Floats = np.where(of_op, fix.amount, 1.0)
        return duration * factor

    def _healthy_link(self, fix: Fix, duration: Floats) -> Floats | None:
        """Transfers that cross the link take the time less that its bytes would save elsewhere.

        What a transfer takes beside them, among the ranks of a node and between two messages, stays: the link has
        nothing under way then.
        """
        nodes = fix.numbers
        rates = link_rates(self.links, nodes, is_pair=fix.is_pair) if nodes else None
        if rates is None:
            return None
        graph = self.host.graph
        on = np.array([self.nodes.get(rank, -1) for rank in range(max(self.nodes) + 1)])
        members = np.flatnonzero((graph.instance >= 0) & (graph.rank >= 0))
        instance, node = graph.instance[members], on[graph.rank[members]]
        count = int(graph.instance.max()) + 1
        has = [np.bincount(instance[node == one], minlength=count) > 0 for one in nodes]
        among = np.bincount(instance, minlength=count)
        leaves = [
            mine & (np.bincount(instance[node == one], minlength=count) < among)
            for one, mine in zip(nodes, has, strict=True)
        ]
        crosses = (graph.rank < 0) & (graph.instance >= 0)
        crosses[crosses] = (np.all(has, axis=0) if fix.is_pair else np.any(leaves, axis=0))[graph.instance[crosses]]
        busy_ns, since_ns, until_ns = busy_time(self.links, nodes, is_pair=fix.is_pair)
        seen = crosses & (graph.end_ns > since_ns) & (graph.end_ns <= until_ns)
        one_way = np.isin(graph.label, [code for code, op in enumerate(graph.labels) if op in P2P_OPS])
        each_way_ns = float((graph.duration_ns[seen] * np.where(one_way[seen], 0.5, 1.0)).sum())
        busy = min(busy_ns / max(each_way_ns, 1.0), 1.0)
        saved = busy * (1 - min(rates[0] / rates[1], 1.0))
        return np.asarray(duration * np.where(crosses, 1 - saved, 1.0))

    # ---- DDP's buckets

    def _larger_buckets(self, fix: Fix, duration: Floats) -> Floats | None:
        """Buckets that fit together into so many MiB are one: reduced when the last is ready, α + S / B long."""
        if fix.amount is None or self._buckets_per_step() <= 1:
            return None
        size = self.buckets["size_bytes"].to_numpy().astype(np.float64)
        merged = merged_buckets(self.buckets, fix.amount * 2**20)
        if len(np.unique(merged)) == len(merged):
            raise BadFix(f"no two of the recorded buckets fit into {fix.of} MiB, and none but a first one is larger")
        node = self._bucket_nodes()
        latency_ns, ns_per_byte = latency_and_rate(size, duration[node])
        last = np.concatenate([merged[1:] != merged[:-1], [True]])
        alone = np.bincount(merged)[merged] == 1
        changed: Floats = duration.copy()
        together = latency_ns + ns_per_byte * np.bincount(merged, weights=size)[merged]
        changed[node] = np.where(alone, duration[node], np.where(last, together, 0.0))
        return changed

    def _buckets_per_step(self) -> float:
        steps = self.buckets.select("group_id", "step").n_unique()
        return len(self.buckets) / steps if steps else 0.0

    # ---- what there is

    def _parts(self) -> set[int]:
        return set(np.unique(self.host.graph.part).tolist())

    def _operations(self) -> list[str]:
        graph = self.host.graph
        return [graph.labels[code] for code in np.unique(graph.label[graph.instance >= 0]).tolist()]


@dataclass(frozen=True, slots=True)
class _Peers:
    """Ranks whose own time becomes what is typical of others, a function such as the median."""

    chosen: Bools
    others: Bools
    typical: Callable[..., Floats]


def _shared(label: NDArray[np.integer], place: Ints, ranks: int) -> NDArray[np.integer]:
    """Return the labels, -1 for those that not every rank has: a compiler names its code differently on each rank."""
    labels, of = distinct(label)
    on_rank = np.zeros((len(labels), ranks), bool)
    on_rank[of, place] = True
    on_all = np.asarray(on_rank.all(axis=1))
    return np.where(on_all[of], label, -1)


def _as_peers(spent: Floats, chosen: Bools, others: Bools, typical: Callable[..., Floats]) -> Floats:
    """Factors for times of (rank, step, span): each step's sum becomes the typical one, spread as is typical."""
    mine, theirs = spent[chosen], spent[others]
    whole = typical(theirs @ np.ones(theirs.shape[2]), axis=0)  # a sum over few takes numpy long
    share = np.where(mine > 0, typical(theirs, axis=0), 0.0)
    share = np.where(share.sum(axis=2, keepdims=True) > 0, share, mine)
    total = share.sum(axis=2, keepdims=True)
    wanted = np.divide(share * whole[:, np.newaxis], total, out=np.zeros_like(share), where=total > 0)
    factors = np.ones_like(spent)
    factors[chosen] = np.divide(wanted, mine, out=np.ones_like(mine), where=mine > 0)
    return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRerun:
    """A pipeline's steps that can be replayed with stages fixed."""

    grid: OpGrid
    whatif: WhatIf
    fidelity: Fidelity

    @property
    def host(self) -> None:
        return None

    def places(self, kind: str) -> dict[int, tuple[int, ...]]:
        """Return the ranks' stages, or their own numbers."""
        held: dict[int, set[int]] = {}
        for key, ranks in zip(self.grid.keys, self.grid.ranks.tolist(), strict=True):
            for rank in ranks:
                held.setdefault(rank, set()).add(key.stage if kind == "stage" else rank)
        return {rank: tuple(sorted(of)) for rank, of in held.items()} if kind in ("rank", "stage") else {}

    @property
    def step_ns(self) -> float:
        return float(self.grid.measured_ns.mean())

    def gain(self, *fixes: str, beyond: tuple[str, ...] = ()) -> Gain:
        """Return the gain of these fixes together, or what they gain beyond other ones. Raises `BadFix`."""
        return _gain(fixes, self.step_ns, self._ends(beyond) - self._ends(fixes), self.fidelity)

    def _ends(self, fixes: tuple[str, ...]) -> Floats:
        """Return when each step ends with these fixes."""
        duration = self.whatif.actual_ns
        for fix in fixes:
            fixed = self._fixed(Fix.parse(fix), duration)
            if fixed is None:
                why = "only a pipeline's operations were recorded, and it changes none of them"
                raise refused(Fix.parse(fix), why, self.possible())
            duration = fixed
        return ends(self.grid.plan, duration)

    def possible(self, without: tuple[str, ...] = ()) -> tuple[str, ...]:  # noqa: ARG002 (none needs a replay)
        ranks = np.unique(self.grid.ranks)
        found = [f"rank:{ranks[0]} … rank:{ranks[-1]}"] if self.grid.ranks.shape[1] > 1 else []
        return (*found, "balance", *(f"stage:{stage}" for stage in self.grid.stages), "balance:stages")

    def _fixed(self, fix: Fix, duration: Floats) -> Floats | None:
        """Return the durations with one more fix: a stage or a rank is like its peers, or all take their mean."""
        computes = np.array([not communicates(kind) for kind in self.grid.kinds])[:, np.newaxis, np.newaxis]
        if fix.kind == "stage" and len(fix.numbers) == 1 and {*fix.numbers} < {*self.grid.stages}:
            return as_other_stages(self.grid, duration, fix.numbers[0])
        if fix.kind == "balance" and fix.of in ("", "stages"):
            return (even_stages if fix.of else even_microbatches)(self.grid, duration)
        chosen = np.isin(self.grid.ranks, fix.numbers)[:, np.newaxis, :]
        if fix.kind != "rank" or not chosen.any() or chosen.all(axis=2).any():
            return None
        others = np.nanmedian(np.where(chosen, np.nan, duration), axis=2, keepdims=True)
        return np.where(computes & chosen, others, duration)


def rerun(timeline: Timeline, links: pl.DataFrame) -> Rerun | PipelineRerun:
    """Return the run, ready to be replayed.

    Raises `NotReplayable`, also where the replay does not meet what was measured.
    """
    only_ops = len(timeline.ops) and (timeline.phases.is_empty() or len(timeline.marks))
    if not only_ops:
        return _trusted(_host_rerun(timeline, links))
    judged = timeline.steps.filter("judged").select("rank", "step")
    return _trusted(_pipeline_rerun(timeline.ops.join(judged, on=["rank", "step"], how="semi")))


def _trusted(run: Rerun | PipelineRerun) -> Rerun | PipelineRerun:
    error = run.fidelity.median_error
    if error > MAX_ERROR:
        raise NotReplayable(
            text(
                "a replay misses the steps by {error}, more than {most}",
                error=percent(error),
                most=percent(MAX_ERROR),
            )
        )
    return run


def _pipeline_rerun(ops: pl.DataFrame) -> PipelineRerun:
    grid = op_grid(ops)
    own = grid.duration_ns
    replayed = ends(grid.plan, own)
    error = np.abs(replayed - grid.measured_ns) / grid.measured_ns
    return PipelineRerun(
        grid=grid,
        whatif=WhatIf(grid.plan, own, ideal(own, grid.kinds, communicates)),
        fidelity=Fidelity(
            steps=len(error),
            median_error=float(np.median(error)),
            p90_error=float(np.quantile(error, 0.9)),
            mean_error=float(replayed.sum() / grid.measured_ns.sum() - 1),
        ),
    )


def _host_rerun(timeline: Timeline, links: pl.DataFrame) -> Rerun:
    timeline = first_steps(timeline)
    give_back()  # before and after a report takes most memory
    host = device_graph(timeline) if len(timeline.kernels) else graph_of(timeline)
    give_back()
    nodes = dict(timeline.ranks.select("rank", "node").iter_rows())
    stages = roles(timeline.groups, timeline.regions, timeline.collectives)
    held = timeline.ops.select("rank", "stage").unique()
    return Rerun(
        host=host,
        fidelity=fidelity(host),
        nodes=nodes,
        role=role_codes(stages, sorted(nodes)),
        stages=dict(held.filter(pl.len().over("rank") == 1).iter_rows()),
        links=links,
        timeline=timeline,
        lengths_ns=step_lengths(host, replay(host.graph, host.graph.duration_ns)),
        judged=host.steps["judged"].fill_null(False).to_numpy(),
        earlier=before_steps(host),
    )


def _gain(fixes: tuple[str, ...], step_ns: float, saved_ns: Floats, fidelity: Fidelity) -> Gain:
    """Return the gain, from that in each step."""
    gain_ns = float(saved_ns.mean())
    scatter = 1.96 * float(saved_ns.std(ddof=1)) / len(saved_ns) ** 0.5 if len(saved_ns) > 1 else abs(gain_ns)
    return Gain(
        fixes=fixes,
        step_ns=step_ns - gain_ns,
        gain_ns=gain_ns,
        uncertainty_ns=scatter + abs(fidelity.mean_error) * (step_ns - gain_ns),
    )
