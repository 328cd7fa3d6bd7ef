"""Ranks wait for transfers that no computation hides: gradients after backward, and operations of any process group.

**Signal.** Of any group: transfer of one kind of operation in groups of one purpose that blocks the median rank after
the last peer arrived; waits for peers are no part of it. The first and the last such operation of a step do not count,
since nothing of the step lies before or after them to hide behind. No more can be hidden than the rank computes in the
step: that is the speedup, and the rest takes faster links, or fewer bytes. Reported from `min_fraction` of the step on;
from `min_fraction_coarse` on where the next operator needs the result, so that earlier calls cannot hide it (tensor,
expert and pipeline parallelism, all-to-alls), or may need it: groups of some of the ranks whose names say nothing; and
of all kinds of operations together where each takes less.
Where the other ranks were not recorded, transfer and wait for peers cannot be distinguished: the finding is an upper
bound, and reported from `min_fraction_coarse` on, too. Sends and receives of pipeline stages are left open then: stages
wait for each other by design. Where gradients cannot be distinguished from other operations (no backward, or no
optimizer, was recorded) they are analyzed as these.

Of gradients: transfer that blocks a rank between the last computation of backward and the optimizer, compared with what
would be left if the same bytes were reduced in `k` buckets while backward runs: bucket i is ready after i / k of it,
and takes 1 / k of the time that the gradients' communication took. The best k up to `max_buckets`,
of 1 MiB or more each, is the measure; what is above it is the loss, reported above `min_fraction` of the step, or above
`min_fraction_unhidden` where less than half of this communication is hidden and a step has one backward. Where buckets
bring less, and devices take longer to reduce gradients than backward to compute them, all that comes after backward is
the loss, reported from `min_fraction_coarse` on, as all is of unknown size. What blocks devices otherwise in groups
that reduce gradients, which may be reductions in forward, is reported from `min_fraction_rest` on.

**Why it costs time.** A device that only transfers computes nothing. Parameters that are gathered one layer ahead, or
gradients that are sent as soon as a layer's are there, move while other layers compute; one bucket for all
(`bucket_cap_mb` too large, `no_sync`, a reduction by hand after backward), or a gather that is issued when its layer
begins, leaves the links idle first and the ranks idle then.

On a device backward is what autograd's thread launched, and lies where its kernels do. By CUDA events it is the phase
of that name, and a wait's transfer, a lower bound, counts for the last operation that was enqueued before the wait.

**False positives.** On CPU ranks computation and communication share the processors: hiding one slows down the other,
and less is gained than the model says. Waiting for slow peers is not counted, slow links are: what a finding of
`slow_link` or `low_bandwidth` costs in the same groups is taken off.

**What to try.** Gradients: a smaller `bucket_cap_mb` in DistributedDataParallel, `gradient_as_bucket_view=True`,
`static_graph=True`; for a reduction by hand, issue it per layer from a hook, asynchronously. Sharded parameters:
prefetch (FSDP2's `set_modules_to_forward_prefetch`, ZeRO-3's `stage3_prefetch_bucket_size`), and
`reshard_after_forward=False` where memory allows. Tensor parallelism: sequence parallelism with asynchronous tensor
parallelism. `rankscope whatif` has `overlap:`, `prefetch:`, `reshard:off` and `bucket-mb:`.

**Source.** The bucket model of DDP: e_k = max(ready_k, e_(k-1)) + S_k / B; Li et al. 2020, PyTorch Distributed.
Prefetch and reshard: Zhao et al. 2023, PyTorch FSDP. Tensor parallelism: Wang et al. 2023, decomposed overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.detectors import FEW_STEPS, judged_grid, longest_rows, price
from rankscope.analysis.metrics.backward import last_backwards, last_backwards_by_marks
from rankscope.analysis.metrics.exposed_communication import hidden_behind, is_awaited, with_exposed
from rankscope.analysis.metrics.exposed_operations import BY_SORT, P2P, computed, exposed_operations, surely_saved_ns
from rankscope.analysis.metrics.once import once
from rankscope.analysis.metrics.step_matrix import (
    ENOUGH_STEPS,
    TRIM,
    Estimate,
    Floats,
    StepGrid,
    estimate,
    estimate_of_operations,
    sums,
)
from rankscope.analysis.model.finding import Finding, NotChecked
from rankscope.analysis.model.lookup import looked_up
from rankscope.analysis.model.parts import MIXED
from rankscope.analysis.model.segments import reached_before
from rankscope.analysis.model.spec import AS_EXPOSED, Detector
from rankscope.analysis.model.tables import in_order
from rankscope.analysis.text.message import Text, joined, text
from rankscope.analysis.text.units import duration, percent
from rankscope.collectors.schema import OPS
from rankscope.errors import NotResolvable

__all__ = ["detect", "detector", "resolution_ns"]

detector = Detector(
    needs=("backward", "collectives"),
    cost="bounded",
    # No link is faster.
    bound=lambda finding: f"op:{finding.where}=0" if finding.where in OPS and finding.fix else None,
    saves_at_least=lambda finding, of: surely_saved_ns(of["collectives"], of["phases"], finding.where),
    has_other_fixes=True,  # faster links, fewer bytes
    waited_for=False,
    lost_as=AS_EXPOSED,
    own_loss="communication",
)

_ALL_REDUCES = ("allreduce", "allreduce_coalesced")
_REDUCTIONS = (*_ALL_REDUCES, "reduce_scatter", "reduce_scatter_base")
_NEARLY_ALL = 0.98  # of backward's computation: it is over then
_NEARLY_ALL_ENDED = 0.9  # of the operations: where fewer have an end, what they hold up is not known
_LEAST_BUCKET_BYTES = 1 << 20  # smaller ones are bound by latency: to send more of them takes longer
_AS_GOOD = 1.1  # the fewest buckets that leave no more than this times the least
_IN_OTHERS = 1 / 3  # of the mean loss
_STAGES = "pipeline"
_EXCHANGES = ("expert", "exchange")  # of a batch, so that a step has few
_INLINE = ("tensor", *_EXCHANGES, _STAGES, "unknown")  # groups whose results the next operator needs, or may need
_KINDS = {
    "data": text("data parallelism"),
    "sharded": text("sharded parameters"),
    "tensor": text("tensor parallelism"),
    "expert": text("expert parallelism"),
    "exchange": text("all-to-all"),  # of tokens, sequences or embeddings: its name does not say
    "pipeline": text("pipeline parallelism"),
    "unknown": text("its name does not say what for"),
}
_ADVICE = {
    "data": text("Reduce gradients in smaller buckets while backward runs (bucket_cap_mb, or hooks per layer)."),
    "sharded": text(
        "Gather parameters and reduce gradients while other layers compute: prefetch further ahead (FSDP2: "
        "set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; ZeRO-3: stage3_prefetch_bucket_size and "
        "overlap_comm), or keep parameters after forward (reshard_after_forward=False) where memory allows."
    ),
    "tensor": text(
        "The next operator needs the result, so issuing it earlier hides nothing: sequence parallelism with "
        "asynchronous tensor parallelism (Megatron's --tp-comm-overlap, torch's _micro_pipeline_tp) moves one part of "
        "a product while the next is computed; fewer ranks per tensor-parallel group move less."
    ),
    "expert": text(
        "Experts need the tokens, so issuing it earlier hides nothing: compute one part of the batch while the tokens "
        "of another move (Megatron's --overlap-moe-expert-parallel-comm, DualPipe), or keep experts on the node."
    ),
    "exchange": text(
        "What follows needs the data, so issuing it earlier hides nothing: compute one part of the batch while that of "
        "another moves, keep the group on the node, or send less."
    ),
    "pipeline": text(
        "Send and receive while another microbatch is computed (Megatron's --overlap-p2p-communication with an "
        "interleaved schedule), or send less: sequence parallelism, larger microbatches."
    ),
    "unknown": text(
        "Where the next operator does not need the result, issue it while something else is computed; where it does, "
        "compute one part of the batch while that of another moves, keep the group on the node, or send less."
    ),
}


def detect(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    kernels: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    slow_link: list[Finding] | NotChecked | None = None,
    low_bandwidth: list[Finding] | NotChecked | None = None,
    *,
    min_fraction: float = 0.05,
    min_fraction_unhidden: float = 0.03,
    min_fraction_coarse: float = 0.10,
    min_fraction_rest: float = 0.15,
    max_buckets: int = 8,
) -> list[Finding]:
    """Report what hiding gradients behind backward would bring, and what exposed operations of other kinds cost."""
    findings: list[Finding] = []
    unresolved: NotResolvable | None = None
    on_devices = kernels is not None and not kernels.is_empty()
    try:
        least = (min_fraction, min_fraction_unhidden)
        spans = _spans(breakdown, phases, collectives, regions, kernels)
        findings += _of_gradients(spans, least, min_fraction_coarse if on_devices else None, max_buckets)
    except NotResolvable as reason:
        unresolved = reason
    if groups is not None:
        judged: list[tuple[str, ...]] = []  # kinds of groups whose reductions were judged as gradients
        if unresolved is None:
            kinds = ("data", "unknown", "sharded") if findings else ("data", "unknown")
            judged = [(kind, *_REDUCTIONS) for kind in kinds]
        slow = [f for found in (slow_link, low_bandwidth) if isinstance(found, list) for f in found]
        grid, costly, open_ns = judged_grid(breakdown, 1), [], 0.0
        fractions = min_fraction, min_fraction_coarse, min_fraction_rest if on_devices and not findings else None
        for one, fraction in _asked(_operations(breakdown, phases, collectives, groups), judged, grid, fractions):
            least_ns = fraction * grid.step_ns
            elsewhere_ns = sum(f.lost_ns_per_step for f in slow if not f.groups or set(f.groups) & set(one.groups))
            lost = one.lost(elsewhere_ns)
            if lost.clear and lost.ns >= least_ns and one.is_bound and (one.op == P2P or one.kind == _STAGES):
                open_ns = max(open_ns, lost.ns)
            elif lost.clear and lost.ns >= least_ns:
                costly.append((one, lost))
        behind = [hidden_behind(collectives, phases, one.groups) for one, _ in costly]
        findings += [_of_operations(one, grid, lost, of) for (one, lost), of in zip(costly, behind, strict=True)]
        if open_ns and not findings:
            why = text(
                "in {share} of the step it is not known whether pipeline stages transfer or wait for each other",
                share=percent(open_ns / grid.step_ns),
            )
            raise NotResolvable(why)
    if (
        unresolved is not None
        and not findings
        and not _are_judged(breakdown, phases, collectives, groups, min_fraction)
    ):
        raise unresolved
    return findings


def _of_gradients(
    seen: tuple[StepGrid, pl.DataFrame, dict[str, Floats], bool],
    least: tuple[float, float],
    coarse: float | None,
    max_buckets: int,
) -> list[Finding]:
    grid, rows, spans, is_alone = seen
    size = float(np.median(spans["bytes"]))
    most = min(max_buckets, max(1, int(size // _LEAST_BUCKET_BYTES))) if size else max_buckets
    left = np.stack([_left_over(spans, buckets) for buckets in range(1, most + 1)])
    saved = np.median(spans["exposed"] - left, axis=1)  # (buckets, step), of the median rank
    means = [estimate(np.maximum(of_buckets, 0.0), TRIM) for of_buckets in saved]
    best = max(means, key=lambda mean: mean.ns)
    unhidden = np.median(spans["exposed"] - spans["hidden"]) > 0 and is_alone
    fraction = (least[1 if unhidden else 0] if size else coarse) or least[0]
    if not best.clear or best.ns < fraction * grid.step_ns:
        return [] if coarse is None else _of_slow_links(grid, rows, spans, coarse)
    buckets = 1 + next(i for i, mean in enumerate(means) if mean.ns * _AS_GOOD >= best.ns)
    lost = means[buckets - 1]
    exposed, communication = float(np.median(spans["exposed"])), float(np.median(spans["exposed"] + spans["hidden"]))
    said = {"buckets": buckets, "share": percent(1 - lost.ns / exposed)}
    advice = text(
        "In {buckets} buckets, each reduced while backward runs, {share} of that would be left: lower bucket_cap_mb in "
        "DistributedDataParallel; where gradients are reduced by hand, do it layer by layer from hooks.",
        **said,
    )
    if size:
        advice = text(
            "In {buckets} buckets, each reduced while backward runs, {share} of that would be left: set bucket_cap_mb "
            "to about {size_mb:.2g} in DistributedDataParallel; where gradients are reduced by hand, do it layer by "
            "layer from hooks.",
            **said,
            size_mb=size / buckets / 2**20,
        )
    return [
        Finding(
            detector="exposed_communication",
            title=text(
                "Of {communication} per step for reducing gradients, {exposed} come after backward and block all ranks",
                communication=duration(communication),
                exposed=duration(exposed),
            ),
            where="after backward",
            advice=advice,
            evidence=longest_rows(rows, "collectives"),
            **price(grid, lost, lost.ns),
        )
    ]


def _of_slow_links(grid: StepGrid, rows: pl.DataFrame, spans: dict[str, Floats], min_fraction: float) -> list[Finding]:
    """Return the loss by gradients that take longer to reduce than backward takes to compute them."""
    communication, lost = spans["exposed"] + spans["hidden"], estimate(np.median(spans["exposed"], axis=0), TRIM)
    is_short = np.median(communication) <= np.median(spans["backward"])
    if is_short or not lost.clear or lost.ns < min_fraction * grid.step_ns:
        return []
    return [
        Finding(
            detector="exposed_communication",
            title=text(
                "Gradients take {communication} per step to reduce, longer than backward computes: {exposed} come "
                "after backward and block all ranks",
                communication=duration(float(np.median(communication))),
                exposed=duration(lost.ns),
            ),
            where="after backward",
            advice=text(
                "Backward, {backward} per step, hides no more than that. Reduce less often (accumulate gradients over "
                "several microbatches with no_sync), compute more per step (larger batches), send fewer bytes (bf16 "
                "gradients, a compression hook), or use faster links.",
                backward=duration(float(np.median(spans["backward"]))),
            ),
            evidence=longest_rows(rows, "collectives"),
            **price(grid, lost, lost.ns),
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operations:
    """One kind of operation in groups of one purpose: its transfers that block the median of their ranks.

    Or several kinds, of which `op` has the names.
    """

    sort: str
    kind: str
    op: str
    groups: tuple[str, ...]
    rows: pl.DataFrame  # without edges, but for exchanges: a part of the batch hides those too
    is_bound: bool
    exposed_ns: Floats  # per step, of the median rank
    hidden_ns: float | None  # per step; None: CUDA events do not show it
    computed_ns: Floats  # per step: what could hide it
    pieces_ns: Floats  # exposed parts of its operations, on the median rank

    def least_fraction(self, usual: float, coarse: float) -> float:
        """Return the share of the step from which on it is reported."""
        return coarse if self.kind in _INLINE or self.is_bound or self.are_several else usual

    @property
    def are_several(self) -> bool:
        return ", " in self.op

    def lost(self, elsewhere_ns: float) -> Estimate:
        """Return its cost without that of other findings.

        Of few steps its operations are the sample, or the steps where these agree better.
        Where the steps but the one that loses most lose less than a third of the mean, it is an event of that step.
        """
        values = np.maximum(self.exposed_ns - elsewhere_ns, 0.0)
        steps = len(values)
        if steps >= ENOUGH_STEPS:
            return estimate(values, TRIM)
        mean, of_operations = float(values.mean()), estimate_of_operations(self.pieces_ns, steps)
        half_width_ns = of_operations.half_width_ns / max(of_operations.ns, 1.0) * mean
        if steps > 1:
            in_others = float(np.sort(values)[:-1].mean())
            half_width_ns = min(half_width_ns, estimate(values).half_width_ns)
            half_width_ns = max(half_width_ns, (mean - in_others) / (1 - _IN_OTHERS))
        return Estimate(mean, half_width_ns)


@once
def _operations(
    breakdown: pl.DataFrame, phases: pl.DataFrame, collectives: pl.DataFrame, groups: pl.DataFrame
) -> list[_Operations]:
    """Return exposed transfers, by purpose of the group and kind of operation."""
    grid, every, found = judged_grid(breakdown, 1), exposed_operations(collectives, phases, groups), []
    computing, by_marks = sums(grid, computed(phases), "ns"), is_awaited(collectives)
    for (sort, kind, op), rows in every.group_by(BY_SORT, maintain_order=True):
        inner = rows if kind in _EXCHANGES else rows.filter(~pl.col("is_edge"))
        members = np.isin(grid.ranks, rows["rank"].unique())
        exposed = sums(grid, inner, "exposed_ns")[members]
        if not exposed.any():
            continue
        of_rank = exposed.sum(axis=1)
        median_rank = np.asarray(grid.ranks)[members][np.argsort(of_rank)[len(of_rank) // 2]]
        whole, shown = (sums(grid, rows, c)[members] for c in ("transfer_ns", "exposed_ns"))
        unknown_ns = inner.filter("is_bound")["exposed_ns"].sum()
        one = _Operations(
            sort=str(sort),
            kind=str(kind),
            op=str(op),
            groups=tuple(rows["group"].drop_nulls().unique().sort().to_list()),
            rows=inner.filter(pl.col("exposed_ns") > 0),
            is_bound=2 * unknown_ns > inner["exposed_ns"].sum(),
            exposed_ns=np.median(exposed, axis=0),
            hidden_ns=None if by_marks else float(np.median(np.maximum(whole - shown, 0.0), axis=0).mean()),
            computed_ns=np.median(computing[members], axis=0),
            pieces_ns=inner.filter(rank=int(median_rank))["exposed_ns"].to_numpy().astype(np.float64),
        )
        found.append(one)
    return found


def _asked(
    every: list[_Operations],
    judged: list[tuple[str, ...]],
    grid: StepGrid,
    fractions: tuple[float, float, float | None],
) -> list[tuple[_Operations, float]]:
    """Return the operations, with the share of the step from which on each is reported.

    Those of kinds that were `judged` as gradients only from the last fraction on, if there is one.
    """
    usual, coarse, rest = fractions
    of_gradients = [any(one.kind == kind and one.op in ops for kind, *ops in judged) for one in every]
    others = [one for one, is_gradient in zip(every, of_gradients, strict=True) if not is_gradient]
    asked = [(one, one.least_fraction(usual, coarse)) for one in _together(others, grid, usual, coarse)]
    if rest is None:
        return asked
    return asked + [(one, rest) for one, is_gradient in zip(every, of_gradients, strict=True) if is_gradient]


def _together(
    operations: list[_Operations], grid: StepGrid, min_fraction: float, min_fraction_coarse: float
) -> list[_Operations]:
    """Return the operations, those of one purpose as one kind where each takes less than is reported."""
    found: list[_Operations] = []
    for sort, kind in dict.fromkeys((one.sort, one.kind) for one in operations):
        of_purpose = [one for one in operations if (one.sort, one.kind) == (sort, kind)]
        least_ns = [one.least_fraction(min_fraction, min_fraction_coarse) * grid.step_ns for one in of_purpose]
        is_small = all(one.exposed_ns.mean() < least for one, least in zip(of_purpose, least_ns, strict=True))
        if len(of_purpose) == 1 or not is_small or any(one.is_bound for one in of_purpose):
            found += of_purpose
            continue
        hidden = [one.hidden_ns for one in of_purpose]
        found.append(
            _Operations(
                sort=sort,
                kind=kind,
                op=", ".join(one.op for one in of_purpose),
                groups=tuple(sorted({group for one in of_purpose for group in one.groups})),
                rows=pl.concat([one.rows for one in of_purpose]),
                is_bound=False,
                exposed_ns=np.sum([one.exposed_ns for one in of_purpose], axis=0),
                hidden_ns=None if None in hidden else sum(ns for ns in hidden if ns is not None),
                computed_ns=of_purpose[0].computed_ns,
                pieces_ns=np.concatenate([one.pieces_ns for one in of_purpose]),
            )
        )
    return found


def _are_judged(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    groups: pl.DataFrame | None,
    min_fraction: float,
) -> bool:
    """Say whether operations of groups cannot be distinguished from those of gradients.

    Nearly all of them have ends, and those of which a step has edges only, as of one bucket, are not exposed by much.
    """
    if groups is None:
        return False
    grid, every = judged_grid(breakdown, 1), exposed_operations(collectives, phases, groups)
    inner = every.filter(~pl.col("is_edge")).select(BY_SORT).unique()
    only_edges = sums(grid, every.join(inner, on=BY_SORT, how="anti"), "exposed_ns")
    is_seen = not inner.is_empty() and len(every) >= _NEARLY_ALL_ENDED * len(collectives)
    return is_seen and float(np.median(only_edges, axis=0).mean()) < min_fraction * grid.step_ns


def _of_operations(one: _Operations, grid: StepGrid, lost: Estimate, behind: str) -> Finding:
    op = one.op if one.op != "unknown" else text("communication")
    said = {"group": one.sort, "kind": _KINDS[one.kind], "op": op, "exposed": duration(lost.ns)}
    if one.is_bound:
        title = text(
            "Exposed communication: up to {exposed} per step of {op} in group {group} ({kind}); without the other "
            "ranks, transfer and wait for peers cannot be distinguished",
            **said,
        )
    else:
        title = text(
            "Exposed communication: {exposed} per step of {op} in group {group} ({kind}) that no computation hides",
            **said,
        )
    return Finding(
        detector="exposed_communication",
        title=title,
        where=one.op,
        advice=joined(" ", (_ADVICE[one.kind], _limit(one, behind))),
        groups=one.groups,
        fix=None if one.is_bound else f"overlap:{one.sort}" if one.are_several else f"overlap:{one.sort}:{one.op}",
        gain_why=text("at most what it costs, any part of which may be waiting for peers") if one.is_bound else None,
        evidence=longest_rows(one.rows, "collectives"),
        **price(grid, lost),
    )


def _limit(one: _Operations, behind: str) -> Text:
    """Say how much of it could be hidden; some is `behind` phases of this label."""
    computed_each = duration(float(one.computed_ns.mean()))
    if one.hidden_ns is None:
        return text(
            "{computed} per step are computed, and no more than that can be hidden: the rest takes faster links, or "
            "fewer bytes.",
            computed=computed_each,
        )
    hidden = text("{hidden} per step is hidden", hidden=duration(one.hidden_ns))
    if behind:
        hidden = text("{hidden} per step is hidden behind {label}", hidden=duration(one.hidden_ns), label=behind)
    return text(
        "{hidden}; {computed} per step are computed with nothing in flight, so no more than that can be hidden: the "
        "rest takes faster links, or fewer bytes.",
        hidden=hidden,
        computed=computed_each,
    )


def resolution_ns(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    regions: pl.DataFrame | None = None,
    kernels: pl.DataFrame | None = None,
    groups: pl.DataFrame | None = None,
    *,
    min_fraction: float = 0.05,
    min_fraction_coarse: float = 0.10,
) -> int:
    """Return the smallest loss per step that would have been reported in each group that has something exposed."""
    grid = judged_grid(breakdown, 1)
    try:
        _spans(breakdown, phases, collectives, regions, kernels)
    except NotResolvable:
        if not _are_judged(breakdown, phases, collectives, groups, min_fraction):
            raise
    seen = [] if groups is None else _operations(breakdown, phases, collectives, groups)
    limits = [one.least_fraction(min_fraction, min_fraction_coarse) for one in seen]
    return round(max([min_fraction, *limits]) * grid.step_ns)


@once
def _spans(
    breakdown: pl.DataFrame,
    phases: pl.DataFrame,
    collectives: pl.DataFrame,
    regions: pl.DataFrame | None,
    kernels: pl.DataFrame | None,
) -> tuple[StepGrid, pl.DataFrame, dict[str, Floats], bool]:
    """Return the grid, the transfers after backward, and by (rank, step) ns of backward, hidden and exposed, and bytes.

    Last, whether most steps have one backward: no gradients accumulate, and there is no pipeline. `backward` reaches to
    its last computation; `hidden` and `exposed` is the gradients' communication before and after.
    """
    grid = judged_grid(breakdown, FEW_STEPS)
    if grid.of(MIXED).any():
        raise NotResolvable(text("CUDA events do not distinguish transfers from computation that overlaps them"))
    if not grid.blocked.any():
        raise NotResolvable(text("no rank was seen blocked on communication"))
    by_marks = is_awaited(collectives)
    # Sharded gradients are reduced layer by layer, and CUDA events show the wait for each.
    ops = _ALL_REDUCES if by_marks else _REDUCTIONS
    collectives = collectives.filter(pl.col("op").is_in(ops))
    if by_marks:
        window = last_backwards_by_marks(phases)
    else:
        window = pl.DataFrame() if regions is None else last_backwards(regions, phases, kernels)
    if window.is_empty():
        raise NotResolvable(text("no backward was recorded that an optimizer follows"))
    by_step, length = ["rank", "step"], pl.col("end_ns") - pl.col("start_ns")

    def inside(rows: pl.DataFrame) -> pl.DataFrame:
        rows = looked_up(
            rows.drop("label"), window.select(*by_step, "backward_ns", "returned_ns", "update_ns"), by_step
        )
        rows = rows.filter(pl.col("end_ns") > pl.col("backward_ns"), pl.col("start_ns") < pl.col("update_ns"))
        return rows.with_columns(start_ns=pl.max_horizontal("start_ns", "backward_ns"))

    work = inside(phases.filter(pl.col("part").is_in(["compute", "overlapped"])))
    window = window.join(_computed(work.filter(pl.col("start_ns") < pl.col("returned_ns"))), on=by_step)
    moved = phases.filter(pl.col("part") == "transfer").filter(pl.col("label").is_in(ops))
    exposed = looked_up(inside(moved), window.select(*by_step, "computed_ns"), by_step)
    exposed = exposed.filter(pl.col("start_ns") >= pl.col("computed_ns")).with_columns(ns=length)
    hidden = _hidden_by_marks(collectives, phases, window) if by_marks else _hidden(collectives, window)
    is_known = hidden["size_bytes"].null_count() < len(hidden)
    if window.is_empty() or hidden.is_empty() or (is_known and hidden["size_bytes"].sum() == 0):
        raise NotResolvable(text("no reduction of gradients was seen between backward and optimizer"))
    backward = window.select(*by_step, ns=pl.col("computed_ns") - pl.col("backward_ns"))
    spans = {
        "backward": sums(grid, backward, "ns"),
        "exposed": sums(grid, exposed, "ns"),
        "hidden": np.maximum(sums(grid, hidden, "hidden_ns"), 0.0),
        "bytes": sums(grid, hidden.with_columns(pl.col("size_bytes").fill_null(0)), "size_bytes"),
    }
    return grid, exposed, spans, 2 * int(window["alone"].sum()) > len(window)


def _computed(worked: pl.DataFrame) -> pl.DataFrame:
    """(rank, step, computed_ns): when each rank had computed nearly all of the step's backward, by its phases.

    What little comes after the last transfer (copies into the gradients) is not what buckets could hide behind.
    """
    if worked.is_empty():
        return worked.select("rank", "step", computed_ns="end_ns")
    ordered = in_order(worked, "rank", "start_ns")
    rank, step, start, end = (ordered[column].to_numpy() for column in ("rank", "step", "start_ns", "end_ns"))
    first = np.flatnonzero(np.append(True, (np.diff(rank) != 0) | (np.diff(step) != 0)))
    done, times = np.cumsum(end - start), np.diff(first, append=len(end))
    before, all_ns = done[first] - (end - start)[first], np.add.reduceat(end - start, first)
    is_late = done - np.repeat(before, times) >= _NEARLY_ALL * np.repeat(all_ns, times)
    computed = np.minimum.reduceat(np.where(is_late, end, np.iinfo(np.int64).max), first)
    return ordered[first].select("rank", "step", computed_ns=pl.Series(computed))


def _hidden(collectives: pl.DataFrame, window: pl.DataFrame) -> pl.DataFrame:
    """Return the reductions of the windows, with `hidden_ns`: their transfer before backward had computed all."""
    began = pl.coalesce(pl.col("^device_start_ns$"), "start_ns")
    reductions = (
        collectives.filter(pl.col("wait_ns").is_not_null(), pl.col("end_ns").is_not_null())
        .select("rank", "step", "end_ns", "wait_ns", "size_bytes", start_ns=began)
        .pipe(looked_up, window, ["rank", "step"])
        .filter(pl.col("start_ns").is_between("backward_ns", "update_ns", closed="left"))
    )
    reductions = in_order(reductions, "rank", "start_ns")
    begin = pl.max_horizontal(pl.col("start_ns") + pl.col("wait_ns"), reached_before(reductions, "rank"))
    return reductions.with_columns(hidden_ns=(pl.min_horizontal("end_ns", "computed_ns") - begin).clip(0, None))


def _hidden_by_marks(collectives: pl.DataFrame, phases: pl.DataFrame, window: pl.DataFrame) -> pl.DataFrame:
    """As `_hidden`; what of them the device did not wait for, which may be negative of a single one."""
    return (
        with_exposed(collectives, phases)
        .join(window, on=["rank", "step"])
        .filter(pl.col("begin_ns").is_between("backward_ns", "update_ns", closed="left"))
        .with_columns(hidden_ns=pl.col("transfer_ns") - pl.col("exposed_ns"))
    )


def _left_over(spans: dict[str, Floats], buckets: int) -> Floats:
    """Return ns by (rank, step) that the last of so many equal buckets ends after backward."""
    each = (spans["hidden"] + spans["exposed"]) / buckets
    end = np.zeros_like(each)
    for bucket in range(1, buckets + 1):
        end = np.maximum(end, spans["backward"] * bucket / buckets) + each
    return end - spans["backward"]
