"""Pipeline-parallel steps as operations: their dependencies, the schedule, and how much of it is bubble."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.model.finding import Pipeline
from rankscope.analysis.model.pipeline_ops import BACKWARD, CLIP, COMPUTES, FORWARD, OPTIMIZER, WEIGHTS
from rankscope.analysis.replay.dual_pipe import dual_pipe, is_dual_pipe
from rankscope.analysis.replay.pipeline_plan import Floats, Group, Plan, plan, replay, transfers
from rankscope.analysis.text.message import joined, text
from rankscope.analysis.text.units import percent
from rankscope.errors import NotReplayable

__all__ = [
    "EXCESS",
    "TRANSFERS",
    "Key",
    "OpGrid",
    "as_other_stages",
    "communicates",
    "compute_order",
    "even_by",
    "even_microbatches",
    "even_stages",
    "measured_pipeline",
    "op_grid",
    "pipeline",
    "schedule",
    "theory_fraction",
]


# kind -> (the kind at the other end, how many stages further)
_PEER = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
_EMBEDDING, _GATHER, _SCATTER = (
    "embedding-grads-all-reduce",
    "params-all-gather",
    "grads-reduce-scatter",
)
_ACROSS_REPLICAS = (_GATHER, _SCATTER, CLIP)
# After a stage's last computation, one after the other.
_TAIL = ("gc", "layernorm-grads-all-reduce", _EMBEDDING, _SCATTER, CLIP, OPTIMIZER)
_KNOWN = (*COMPUTES, *_PEER, _GATHER, *_TAIL)
# What can keep the busiest stage idle for longer than the schedule must, in the order in which it is taken away.
# Transfers as quick as between the quickest pair of stages are "transfers": no schedule does without them.
TRANSFERS = text("transfers")
EXCESS = (
    *(text("waiting for what is not recorded"), text("late transfers"), TRANSFERS),
    *(text("microbatches of unequal length"), text("stages of unequal length")),
)
_HEAVIER = 1.02  # times as much computing as any other stage: it has the most work
_WORTH_SAYING = 0.001
_COMPUTES = (*COMPUTES, "gc", OPTIMIZER)
_MOST_PLACES, _MOST_PLACES_OF_AN_OP = 1 << 20, 64  # of operations in steps; where steps are alike there are as many
_LETTERS = {FORWARD: "F", BACKWARD: "B", WEIGHTS: "W"}


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """One operation of a step of a replica."""

    stage: int
    kind: str
    seq: int


@dataclass(frozen=True, slots=True)
class OpGrid:
    """The operations that all steps have in common. Times are ns since the step's first start, [op, step, replica]."""

    keys: tuple[Key, ...]
    steps: tuple[int, ...]
    step_start_ns: NDArray[np.int64]  # one per step
    ranks: NDArray[np.int32]  # [op, replica]
    start_ns: Floats
    end_ns: Floats
    plan: Plan
    dropped: int  # steps that lack operations others have, or have more

    @property
    def places(self) -> tuple[int, ...]:
        """Of each operation the first stage that its rank holds: ranks of interleaved schedules hold several."""
        return _places(self.keys, self.ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted({key.stage for key in self.keys}))

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(key.kind for key in self.keys)

    @property
    def duration_ns(self) -> Floats:
        """Each operation's own time: computation as measured, communication without the wait for its peers."""
        return transfers(self.plan, self.start_ns, self.end_ns)

    @property
    def measured_ns(self) -> Floats:
        """Length of each step, first start to last end."""
        length: Floats = self.end_ns.max(axis=(0, 2)) - self.start_ns.min(axis=(0, 2))
        return length


def communicates(kind: str) -> bool:
    """Whether the ideal of this kind of operation is its median (a transfer) rather than its mean (a computation)."""
    return kind not in _COMPUTES


def op_grid(ops: pl.DataFrame) -> OpGrid:
    """Return the table `ops` as arrays, with its plan. Raises `NotReplayable`."""
    unknown = sorted(set(ops["name"].unique()) - set(_KNOWN))
    if unknown:
        raise NotReplayable(text("what operations of type {kind} wait for is unknown", kind=unknown[0]))
    if is_dual_pipe(ops):
        raise NotReplayable(
            text("forwards and backwards of a rank overlap (DualPipe): what each takes alone is not recorded")
        )
    stages = ops.filter(pl.col("stage") >= 0)["stage"].unique().sort().to_numpy()
    # No more are made than there are: a number may be damaged.
    absent = np.flatnonzero(stages != np.arange(len(stages)))
    if len(absent) or not len(stages):
        lacking = int(absent[0]) if len(absent) else 0
        raise NotReplayable(text("no operations of stage {stage} were recorded", stage=lacking))
    by = ["stage", "name", "seq"]
    names = ops.select(by).unique().sort(by)
    lanes = [ops["step"].unique().sort(), ops["replica"].unique().sort()]
    shape = (len(names), len(lanes[0]), len(lanes[1]))
    if math.prod(shape) > max(_MOST_PLACES, _MOST_PLACES_OF_AN_OP * len(ops)):
        raise NotReplayable(text("no two steps consist of the same operations"))
    placed = ops.join(names.with_row_index("_op"), on=by).with_columns(
        pl.col("step").replace_strict(lanes[0], range(shape[1]), return_dtype=pl.UInt32).alias("_step"),
        pl.col("replica").replace_strict(lanes[1], range(shape[2]), return_dtype=pl.UInt32).alias("_replica"),
    )
    at = tuple(placed[c].to_numpy() for c in ("_op", "_step", "_replica"))
    count = np.bincount(np.ravel_multi_index(at, shape), minlength=math.prod(shape)).reshape(shape)
    usual = np.median(count, axis=(1, 2)) == 1
    whole = (count == usual[:, None, None]).all(axis=(0, 2))
    if not whole.any():
        raise NotReplayable(text("no two steps consist of the same operations"))
    first = placed.group_by("_step").agg(pl.col("start_ns").min()).sort("_step")["start_ns"].to_numpy()
    start, end = np.zeros(shape), np.zeros(shape)
    start[at] = placed["start_ns"].to_numpy() - first[at[1]]
    end[at] = placed["end_ns"].to_numpy() - first[at[1]]
    ranks = np.zeros((shape[0], shape[2]), dtype=np.int32)
    ranks[at[0], at[2]] = placed["rank"].to_numpy()
    keys = tuple(Key(*row) for row in names.filter(pl.Series(usual)).iter_rows())
    start, end = start[usual][:, whole], end[usual][:, whole]
    return OpGrid(
        keys=keys,
        steps=tuple(lanes[0].filter(pl.Series(whole)).to_list()),
        step_start_ns=first[whole],
        ranks=ranks[usual],
        start_ns=start,
        end_ns=end,
        plan=_plan(keys, _places(keys, ranks[usual]), start, end),
        dropped=int((~whole).sum()),
    )


def _stage_means(grid: OpGrid, duration_ns: Floats, kind: str) -> dict[int, tuple[list[int], float]]:
    """Return for each stage its operations of this kind, and their mean."""
    found = {stage: [i for i, key in enumerate(grid.keys) if key == Key(stage, kind, key.seq)] for stage in grid.stages}
    return {stage: (rows, float(duration_ns[rows].mean())) for stage, rows in found.items() if rows}


def as_other_stages(grid: OpGrid, duration_ns: Floats, stage: int) -> Floats:
    """Return the durations if a stage computed as long as is usual for the others: scatter stays what it is."""
    changed: Floats = duration_ns.copy()
    for kind in COMPUTES:
        means = _stage_means(grid, duration_ns, kind)
        others = [mean for of, (_, mean) in means.items() if of != stage]
        if stage in means and others and means[stage][1] > 0:
            changed[means[stage][0]] *= float(np.median(others)) / means[stage][1]
    return changed


def even_stages(grid: OpGrid, duration_ns: Floats) -> Floats:
    """Return the durations if all stages had as much of each kind of computation: scatter stays what it is."""
    changed: Floats = duration_ns.copy()
    for kind in COMPUTES:
        means = _stage_means(grid, duration_ns, kind)
        mean = float(np.mean([of_one for _, of_one in means.values()])) if means else 0.0
        for rows, of_one in means.values():
            changed[rows] *= mean / of_one if of_one > 0 else 1.0
    return changed


def even_microbatches(grid: OpGrid, duration_ns: Floats) -> Floats:
    """Return the durations if all microbatches of a step, on all replicas, were equally long for a stage."""
    changed: Floats = duration_ns.copy()
    for kind in COMPUTES:
        for rows, _ in _stage_means(grid, duration_ns, kind).values():
            changed[rows] = duration_ns[rows].mean(axis=(0, 2), keepdims=True)
    return changed


def even_by(grid: OpGrid, duration_ns: Floats, factor: Floats) -> Floats:
    """Return the durations times the factors, so that each stage has as much of each kind to do in a step as before."""
    changed: Floats = duration_ns * factor
    for kind in COMPUTES:
        for rows, _ in _stage_means(grid, duration_ns, kind).values():
            whole = changed[rows].sum(axis=(0, 2), keepdims=True)
            changed[rows] *= duration_ns[rows].sum(axis=(0, 2), keepdims=True) / np.maximum(whole, 1.0)
    return changed


def _places(keys: Sequence[Key], ranks: NDArray[np.int32]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    for key, rank in zip(keys, ranks[:, 0].tolist(), strict=True):
        first[rank] = min(first.get(rank, key.stage), key.stage)
    return tuple(first[rank] for rank in ranks[:, 0].tolist())


def compute_order(keys: Sequence[Key], places: Sequence[int], start_ns: Floats) -> dict[int, list[int]]:
    """For each place the indices of its forwards, backwards and gradients of weights, in the order of their starts."""
    order: dict[int, list[int]] = {}
    for i in sorted(range(len(keys)), key=lambda i: (start_ns[i], keys[i].seq)):
        if keys[i].kind in COMPUTES:
            order.setdefault(places[i], []).append(i)
    return order


def _plan(keys: tuple[Key, ...], places: Sequence[int], start_ns: Floats, end_ns: Floats) -> Plan:
    """Return the dependencies of a step's operations.

    Computations of a rank run one after the other, and so do a stage's sends and receives of one direction. A
    computation waits for what it receives, a send for what it sends; where nothing is sent (a trace of computations
    alone), for the neighbour's computation itself. A receive that in every step begins to the ns where the rank's
    computation before it ends is one that the rank stands in (`stages.stage_ops` gives them so): it waits for that one
    too. Parameters are gathered before the first forward; gradients are reduced, and the optimizer runs, after the last
    computation.

    Source: the dependency model of ByteDance's StragglerAnalysis, without its overlapped reduce-scatter.
    """
    index = {key: i for i, key in enumerate(keys)}
    before: dict[int, list[int]] = {i: [] for i in range(len(keys))}

    def chain(ops: Sequence[int]) -> None:
        for earlier, later in pairwise(ops):
            before[later].append(earlier)

    for computes in compute_order(keys, places, np.median(start_ns, axis=(1, 2))).values():
        chain(computes)
        for earlier, later in pairwise(computes):
            receive = index.get(Key(keys[later].stage, keys[later].kind.replace("compute", "recv"), keys[later].seq))
            if receive is not None and (start_ns[receive] == end_ns[earlier]).all():
                before[receive].append(earlier)
        _first_backward_transfers(before, keys, index, computes)
        stages = sorted({keys[i].stage for i in computes})
        gathers = [op for stage in stages for op in _of(index, stage, _GATHER)]
        tail = [op for kind in _TAIL for stage in stages for op in _of(index, stage, kind)]
        chain([*computes[-1:], *tail])
        chain(gathers)
        if gathers:
            before[computes[0]].append(gathers[-1])
        for stage in stages:
            for kind in _PEER:
                chain(_of(index, stage, kind))
    for key, i in index.items():
        if key.kind in (FORWARD, BACKWARD):
            _neighbours(before, index, key, i)
    return plan(before, _groups(index), len(keys))


def _of(index: Mapping[Key, int], stage: int, kind: str) -> list[int]:
    """Return the stage's operations of a kind, by seq."""
    return [index[key] for key in sorted(k for k in index if k.stage == stage and k.kind == kind)]


def _neighbours(before: dict[int, list[int]], index: Mapping[Key, int], compute: Key, i: int) -> None:
    """Tie a computation to its receive and send, or to the neighbour's computation where nothing is sent."""
    way = compute.kind.split("-")[0]
    send = index.get(Key(compute.stage, f"{way}-send", compute.seq))
    receive = index.get(Key(compute.stage, f"{way}-recv", compute.seq))
    if send is not None:
        before[send].append(i)
    if receive is not None:
        before[i].append(receive)
        earlier = index.get(Key(compute.stage, compute.kind, compute.seq - 1))
        if earlier is not None:
            before[receive].append(earlier)
        return
    other = index.get(Key(compute.stage + (1 if way == "backward" else -1), compute.kind, compute.seq))
    if other is not None:
        before[i].append(other)


def _first_backward_transfers(
    before: dict[int, list[int]], keys: Sequence[Key], index: Mapping[Key, int], computes: Sequence[int]
) -> None:
    """Post the first receive of a gradient while the last forward before it runs, not at the start of the step."""
    first = next((n for n, i in enumerate(computes) if keys[i].kind == BACKWARD), 0)
    if first < 2:
        return
    for kind in ("backward-recv", "backward-send"):
        op = index.get(Key(keys[computes[first]].stage, kind, 0))
        if op is not None:
            before[op].append(computes[first - 2])


def _groups(index: Mapping[Key, int]) -> list[Group]:
    """Return the groups of stages that transfer to each other."""
    stages = sorted({key.stage for key in index})
    groups = []
    for key, i in index.items():
        if key.kind in ("forward-send", "backward-send"):
            kind, step = _PEER[key.kind]
            peer = index.get(Key(key.stage + step, kind, key.seq))
            if peer is not None:
                groups.append(Group((i, peer)))
        elif key.kind in (_GATHER, _SCATTER):
            groups.append(Group((i,), across_replicas=True))
    for kind, across in ((CLIP, True), (_EMBEDDING, False)):
        members = tuple(op for stage in stages for op in _of(index, stage, kind))
        if members:
            groups.append(Group(members, across))
    return groups


def schedule(order: Mapping[int, Sequence[str]], chunks: int = 1, *, turns: bool = False) -> str:
    """Return the schedule's name by each place's sequence of "F", "B" and "W" (gradients of weights alone).

    Where some W does not follow its B at once, it is `ZB-H1` if forwards and backwards are in the order of 1F1B,
    and `ZBV` if the second of two chunks `turns` back and as many activations are kept as under 1F1B.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """
    sequences = {place: "".join(order[place]) for place in sorted(order)}
    whole = {place: sequence.replace("W", "") for place, sequence in sequences.items()}
    if not any("W" in sequence.replace("BW", "B") for sequence in sequences.values()):
        return "unknown" if turns else _schedule(whole, chunks)
    if chunks == 1:
        return "ZB-H1" if _schedule(whole, chunks) == "1F1B" else "unknown"
    first = next(iter(whole.values()))
    kept = max(first[:n].count("F") - first[:n].count("B") for n in range(1, len(first) + 1))
    return "ZBV" if turns and kept >= min(2 * len(whole) - 1, first.count("F")) else "unknown"


def _schedule(order: Mapping[int, str], chunks: int) -> str:
    """Return the schedule's name from each place's sequence of "F" and "B": `1F1B`, `GPipe` or `unknown`.

    With several `chunks` of the model at each place they are `interleaved 1F1B`, whose places run as many forwards
    ahead as they like, and `interleaved GPipe`.
    """
    places = sorted(order)
    names = set()
    for place, stage in enumerate(places):
        sequence = order[stage]
        forwards = sequence.count("F")
        if chunks == 1:
            ahead = min(len(places) - place - 1, forwards)
        else:
            first = len(sequence) - len(sequence.lstrip("F"))
            ahead = first - 1 if first < forwards else forwards
        if sequence == _one_and_one(ahead, forwards):
            names.add("1F1B" if chunks == 1 or ahead < forwards else "GPipe")
        elif sequence == _one_and_one(forwards, forwards):
            names.add("GPipe")
        else:
            return "unknown"
    # The first stages of both look alike where there are few microbatches.
    name = "1F1B" if "1F1B" in names else "GPipe"
    return f"interleaved {name}" if chunks > 1 else name


def _one_and_one(ahead: int, forwards: int) -> str:
    return "F" * ahead + "FB" * (forwards - ahead) + "B" * ahead


def theory_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Return the bubble's share of the time from the first forward to the last backward, with stages equally fast."""
    return (stages - 1) / (chunks * microbatches + stages - 1)


def _theory(grid: OpGrid, name: str, stages: int, microbatches: int, chunks: int) -> float | None:
    """Return the bubble's share under this schedule, from what its computations take on average.

    None if it is not known.

    Idle are (p - 1) (F + B - W) under ZB-H1, for the inputs' gradients B, and (p - 1) F under ZBV: until the last place
    begins; after that none need idle. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism".
    """
    if name == "unknown":
        return None
    if not name.startswith("ZB"):
        return theory_fraction(stages, microbatches, chunks)
    took = {kind: grid.duration_ns[[k == kind for k in grid.kinds]] for kind in COMPUTES}
    forward, backward, weights = (float(took[kind].mean()) for kind in COMPUTES)
    idle = (stages - 1) * (max(forward + backward - weights, 0.0) if name == "ZB-H1" else forward)
    return idle / (idle + microbatches * chunks * (forward + backward + weights))


def pipeline(ops: pl.DataFrame) -> Pipeline:
    """Return the schedule of these steps and their bubble. Raises `NotReplayable` where there is no pipeline."""
    return dual_pipe(ops) if is_dual_pipe(ops) else measured_pipeline(ops)[0]


def measured_pipeline(ops: pl.DataFrame) -> tuple[Pipeline, Floats]:
    """Return the same, and for each step how much longer its computations took than without the excess, in ns.

    Of the excess transfers as quick as any do not count there.
    """
    grid = op_grid(ops.filter(pl.col("name").is_in([*COMPUTES, *_PEER])))
    order = compute_order(grid.keys, grid.places, np.median(grid.start_ns, axis=(1, 2)))
    if len(order) < 2:
        raise NotReplayable(text("there is only one pipeline stage"))
    letters = {s: [_LETTERS[grid.keys[i].kind] for i in ops] for s, ops in order.items()}
    chunks = max(len({grid.keys[i].stage for i in ops}) for ops in order.values())
    turns = {grid.keys[i].stage for i in order[0]} == {0, 2 * len(order) - 1}
    name = schedule(letters, chunks, turns=turns)
    microbatches = max(sequence.count("F") for sequence in letters.values()) // chunks
    theory = _theory(grid, name, len(order), microbatches, chunks)
    # Means over replicas and the middle half of the steps: they add up, and a stall now and then does not move them.
    length = _span(grid, order)
    middle = np.argsort(length)[len(length) // 4 : len(length) - len(length) // 4]
    busy = {s: (grid.end_ns - grid.start_ns)[ops].sum(axis=0).mean(axis=1) for s, ops in order.items()}
    bubble = {s: float(1 - (busy[s] / length)[middle].mean()) for s in busy}
    busiest = min(bubble, key=lambda stage: bubble[stage])
    excess: dict[str, float] = {}
    longer: Floats = np.zeros_like(length)
    if theory is not None:
        spans = _without_excess(grid, order)
        longer = length - busy[busiest] / (1 - theory) - (spans[1] - spans[2])
        shares = [float(1 - (busy[busiest] / span)[middle].mean()) for span in (length, *spans)]
        excess = {
            cause: before - after for cause, before, after in zip(EXCESS, shares, [*shares[1:], theory], strict=True)
        }
    found = Pipeline(
        schedule=name,
        stages=len(order),
        microbatches=microbatches,
        theory_fraction=theory,
        bubble=bubble,
        busiest_stage=busiest,
        excess=excess,
        explanation=_explanation(name, theory, bubble, busiest, excess, is_heaviest=_is_heaviest(grid, order, busiest)),
    )
    return found, longer


def _is_heaviest(grid: OpGrid, order: Mapping[int, Sequence[int]], stage: int) -> bool:
    """Say whether most replicas of the stage compute longer than those of the others, and not only a slow one."""
    took = {s: float(np.median((grid.end_ns - grid.start_ns)[ops].sum(axis=0))) for s, ops in order.items()}
    return all(took[stage] > _HEAVIER * ns for s, ns in took.items() if s != stage)


def _span(grid: OpGrid, order: Mapping[int, Sequence[int]]) -> Floats:
    """Return for each step the time from the first computation to the last, on the mean of the replicas."""
    computes = [i for ops in order.values() for i in ops]
    span: Floats = (grid.end_ns[computes].max(axis=0) - grid.start_ns[computes].min(axis=0)).mean(axis=1)
    return span


def _without_excess(grid: OpGrid, order: Mapping[int, Sequence[int]]) -> list[Floats]:
    """Return the spans without one cause of excess after the other, in the order of `EXCESS`."""
    computes = np.zeros(len(grid.keys), dtype=bool)
    computes[[i for ops in order.values() for i in ops]] = True
    recorded = grid.duration_ns
    hops: dict[tuple[int, str], list[int]] = {}
    for i, key in enumerate(grid.keys):
        if key.kind in ("forward-recv", "backward-recv"):  # a send may be over before
            hops.setdefault((key.stage, key.kind), []).append(i)
    quickest = min((float(np.median(recorded[ops])) for ops in hops.values()), default=0.0)
    quick = np.where(computes[:, None, None], recorded, np.minimum(recorded, quickest))
    no_transfers = np.where(computes[:, None, None], recorded, 0.0)
    even = no_transfers.copy()
    for ops in order.values():
        for of_one in {(grid.keys[i].stage, grid.keys[i].kind) for i in ops}:
            rows = [i for i in ops if (grid.keys[i].stage, grid.keys[i].kind) == of_one]
            even[rows] = no_transfers[rows].mean(axis=0)
    spans = []
    for durations in (recorded, quick, no_transfers, even):
        start, end = replay(grid.plan, durations)
        spans.append((end[computes].max(axis=0) - start[computes].min(axis=0)).mean(axis=1))
    return spans


def _explanation(
    name: str,
    theory: float | None,
    bubble: Mapping[int, float],
    busiest: int,
    excess: Mapping[str, float],
    *,
    is_heaviest: bool,
) -> str:
    """Return the parts of the bubble, in a sentence or two."""
    share = bubble[busiest]
    others = percent(sum(idle for stage, idle in bubble.items() if stage != busiest) / (len(bubble) - 1))
    more = (
        text("the others idle {others}, since stage {stage} has the most work", others=others, stage=busiest)
        if is_heaviest
        else text("the others idle {others}", others=others)
    )
    if theory is None:
        return text(
            "The schedule is neither 1F1B nor GPipe. Stage {stage} idles {share}; {more}.",
            stage=busiest,
            share=percent(share),
            more=more,
        )
    causes = [
        text("{cause} {points:+.1f} points", cause=cause, points=100 * part)
        for cause, part in excess.items()
        if abs(part) >= _WORTH_SAYING
    ]
    return text(
        "Stage {stage} idles {share} where {schedule} needs {needed}{made_of}; {more}.",
        stage=busiest,
        share=percent(share),
        schedule=name,
        needed=percent(theory),
        made_of=text(" ({causes})", causes=joined(", ", causes)) if causes else "",
        more=more,
    )
