"""Which rank the others wait for, from single operations: so that one step is enough where it holds many.

The sample is the matched operation. What it blocked each rank for is charged to the rank that came last, or to the
one for which that had itself waited (`wait_attribution`). If all ranks are alike, chance decides which one is charged:
the largest sum over ranks is held against the largest sums under permuted ranks, operation by operation, so
that neither the number of ranks nor one long step counts as evidence. A rank is a straggler if chance hardly ever shows
as much, in the earlier and in the later half of the operations alike; or if it stalls for far more than any other,
be it in one operation of one step.

Source: max-statistic of permutations, Westfall and Young 1993; block bootstrap, Künsch 1989.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.metrics.exposed_communication import spent
from rankscope.analysis.metrics.step_matrix import Estimate, Floats, StepGrid, estimate
from rankscope.analysis.metrics.wait_attribution import Delays, blocked_by, caused_by_rank
from rankscope.analysis.model.segments import reached_before

__all__ = ["MOST_CHANCE", "Charged", "Straggler", "charged", "stragglers"]

MOST_CHANCE = 0.005  # how often chance may show as much
_LEAST, _USUAL = 0.02, 0.05  # share of the step that every other rank waits, and that half of the others wait
_ONCE = 2.5  # times that where the operations are too few to exclude chance
_FAR = 1.5  # times what the next one costs: from there on such a stall stands out
_SEVERAL = 4.0  # times what one of them costs: from there on several ranks are late, and not that one
_HOLDS_UP = 3.0  # times what it waits for another of them: it is what makes that one late
_FEWEST = 4  # operations: with fewer there is no rank to name
_WIDE = 0.9  # half width over cost, from which a small cost may be chance
_ALIKE = 0.5  # of the first one's charge: ranks with as much may be late with it
_AS_LATE = 0.5  # of what the others wait for several ranks: what one of these waits for the rest of them at most
_SHOWS = 1 / 3  # of the mean step's cost: so much, or `_LEAST`, it costs in a step that shows it
_STALL = 0.5  # of what a rank waits: with so much in one operation that one stalled once, or its device idled so long
_DRAWS, _RESAMPLED = 4_000, 400
_MOST_CELLS = 2_000_000  # operations times ranks that are permuted at once
_CANDIDATES = 16  # ranks whose charges are followed back: each takes a pass over all waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Charged:
    """ns that operations blocked ranks, by root: [operation, root, waiting rank], as rows of a grid."""

    ns: Floats  # [operation, root, waiting]
    roots: tuple[int, ...]  # rows of the grid
    step: NDArray[np.int64]  # of each operation, as column of the grid
    grid: StepGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Rows of the grid that others wait for. `cost`: the least that any other rank waits for them, ns per step.

    `chance`: how often ranks that are alike would show as much. `recurs`: it is late in both halves of the operations.
    `when`: the steps that show it, all of them where nearly all do.
    """

    rows: tuple[int, ...]
    cost: Estimate
    per_step: Floats
    when: NDArray[np.bool_]
    chance: float
    recurs: bool
    charged: int  # operations that are charged to them …
    operations: int  # … of those in which any rank waited


def charged(delays: Delays, phases: pl.DataFrame, collectives: pl.DataFrame, grid: StepGrid) -> Charged | None:
    """Return the waits of the grid's ranks in its steps, by root; those that are charged most are followed.

    None where no rank was blocked.
    """
    among_seen = _waits_among_seen(phases, collectives)
    caused = Counter(caused_by_rank(delays))
    caused.update(dict(among_seen.group_by("late").agg(pl.col("ns").sum()).iter_rows()))
    ranks = sorted((r for r in grid.ranks if caused[r]), key=lambda rank: (-caused[rank], rank))[:_CANDIDATES]
    frames = [
        pl.concat(
            [blocked_by(delays, [rank]), among_seen.filter(late=rank).select("rank", "instance_id", "step", "ns")],
            how="vertical_relaxed",
        )
        for rank in ranks
    ]
    if not frames:
        return None
    rows = pl.concat(frame.with_columns(root=pl.lit(root)) for root, frame in enumerate(frames))
    rows = rows.filter(pl.col("step").is_in(grid.steps), pl.col("rank").is_in(grid.ranks))
    begun = collectives.with_columns(instance_id=_operation(collectives)).drop_nulls("instance_id")
    order = begun.group_by("instance_id").agg(pl.coalesce("device_start_ns", "start_ns").max().alias("at_ns"))
    order = order.sort("at_ns", "instance_id").join(rows, on="instance_id", how="semi").with_row_index("row")
    rows = rows.join(order.select("row", pl.col("instance_id").cast(rows["instance_id"].dtype)), on="instance_id")
    if rows.is_empty():
        return None
    ns = np.zeros((len(order), len(ranks), len(grid.ranks)))
    at = rows["row"].to_numpy(), rows["root"].to_numpy(), np.searchsorted(grid.ranks, rows["rank"])
    np.add.at(ns, at, rows["ns"].to_numpy())
    step = np.zeros(len(order), np.int64)
    step[rows["row"].to_numpy()] = np.searchsorted(grid.steps, rows["step"])
    roots = tuple(int(row) for row in np.searchsorted(grid.ranks, ranks))
    for root, row in enumerate(roots):
        ns[:, root, row] = 0.0
    return Charged(ns=ns, roots=roots, step=step, grid=grid)


def _operation(collectives: pl.DataFrame) -> pl.Expr:
    return pl.coalesce("instance_id", "seen_id") if "seen_id" in collectives.columns else pl.col("instance_id")


def _waits_among_seen(phases: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return (late, rank, instance_id, step, ns): how long operations of which some ranks were not seen blocked others.

    At least that long, for the last of those that were seen; less what that one was held up itself, since its step
    began, in communication that may have been waiting for ranks that were not.
    """
    if "seen_id" not in collectives.columns:
        schema = {"late": pl.Int32, "rank": pl.Int64, "instance_id": pl.Int64, "step": pl.Int64, "ns": pl.Float64}
        return pl.DataFrame(schema=schema)
    began = phases.group_by("rank", "step").agg(began_ns=pl.col("start_ns").min())
    seen = collectives.drop_nulls(["seen_id", "step"]).join(began, on=["rank", "step"])
    seen = seen.with_columns(arrival_ns=pl.coalesce("device_start_ns", "start_ns"))
    last = seen.filter(least_wait_ns=0).unique("seen_id", keep="first").sort("rank", "arrival_ns")
    since = last.select("rank", pl.min_horizontal("began_ns", "arrival_ns").alias("start_ns"), end_ns="arrival_ns")
    held_up = pl.Series(spent(phases, ("unsplit",), since), dtype=pl.Int64)
    rows = (
        seen.filter(pl.col("least_wait_ns") > 0)
        .join(last.select("seen_id", late="rank", held_up_ns=held_up), on="seen_id")
        .with_columns(start_ns="arrival_ns", end_ns=pl.col("arrival_ns") + pl.col("least_wait_ns"))
        .sort("rank", "start_ns", "end_ns")
    )
    alone = rows.select("rank", pl.max_horizontal("start_ns", reached_before(rows, "rank")).alias("start_ns"), "end_ns")
    rows = rows.with_columns(waited_ns=pl.Series(spent(phases, ("unsplit",), alone), dtype=pl.Int64))
    of = ["rank", "late", "step"]
    so_far = (pl.col("waited_ns").cum_sum() - pl.col("held_up_ns")).clip(0).cum_max()
    rows = rows.with_columns(ns=(so_far - so_far.shift(1, fill_value=0)).over(of)).filter(pl.col("ns") > 0)
    return rows.select("late", "rank", "step", instance_id="seen_id", ns=pl.col("ns").cast(pl.Float64))


def stragglers(
    charged: Charged, units: Sequence[tuple[int, ...]] = (), *, any_several: bool = True
) -> Straggler | None:
    """Return the rank that the others wait for.

    Or one of `units`, such as nodes, or two or three ranks, if these cost more.

    None if there is none. `any_several`: also ranks that are no unit may be late together.
    """
    single: list[tuple[int, ...]] = [(row,) for row in charged.roots]
    ranks = len(charged.grid.ranks)
    together = [rows for rows in units if set(rows) & set(charged.roots) and 1 < len(rows) < ranks]
    first = max(single, key=lambda rows: _costs(charged, rows).sum(axis=0).min())
    found = _judged(charged, first, single)
    tried: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = [(rows, together) for rows in together]
    tried += [(rows, single) for rows in _late_together(charged)] if any_several else []
    for rows, peers in tried:
        named = rows if _are_late(charged, rows) else _first_of(charged, rows)
        several = _judged(charged, rows, peers) if named else None
        if several and (found is None or several.cost.ns > _SEVERAL * found.cost.ns):
            found = replace(several, rows=named)
    return found


def _costs(charged: Charged, rows: tuple[int, ...]) -> Floats:
    """Return how long each operation blocks each other rank because of these rows: [operation, other rank]."""
    of_rows = [charged.roots.index(row) for row in rows if row in charged.roots]
    others = [row for row in range(len(charged.grid.ranks)) if row not in rows]
    return np.asarray(charged.ns[:, of_rows].sum(axis=1)[:, others])


def _are_late(charged: Charged, rows: tuple[int, ...]) -> bool:
    """Whether each of these waits for the others of them much less than all other ranks do: it is as late itself."""
    of_rows = [charged.roots.index(row) for row in rows if row in charged.roots]
    waited = charged.ns[:, of_rows].sum(axis=(0, 1))
    return bool(waited[list(rows)].max() <= _AS_LATE * np.delete(waited, rows).min())


def _first_of(charged: Charged, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return that one of several ranks which makes each of the others late; empty if there is none."""
    least = _LEAST * charged.grid.step_ns * len(charged.grid.steps)
    sums = charged.ns.sum(axis=0)
    for row in (row for row in rows if row in charged.roots):
        mine = charged.roots.index(row)
        others = [other for other in rows if other != row]
        back = {other: sums[charged.roots.index(other), row] if other in charged.roots else 0.0 for other in others}
        blocks = [(sums[mine, other], back[other]) for other in others]
        if all(held_up >= max(least, _HOLDS_UP * waited) for held_up, waited in blocks):
            return (row,)
    return ()


def _late_together(charged: Charged) -> list[tuple[int, ...]]:
    """Return the two or three ranks with the largest charges, where these are about the same."""
    sums = charged.ns.sum(axis=(0, 2))
    order = np.argsort(-sums)
    alike = [charged.roots[i] for i in order[:3] if sums[i] >= _ALIKE * sums[order[0]]]
    few = len(charged.grid.ranks) // 3
    return [tuple(sorted(alike[:count])) for count in range(2, len(alike) + 1) if count <= few]


def _judged(charged: Charged, rows: tuple[int, ...], peers: Sequence[tuple[int, ...]]) -> Straggler | None:
    """Return these rows as stragglers, if they are: held against what would be charged to `peers` by chance."""
    grid, steps = charged.grid, len(charged.grid.steps)
    of_others = _costs(charged, rows)
    waited = of_others.sum(axis=0) / steps / grid.step_ns
    if waited.min() < _LEAST or np.median(waited) < _USUAL:
        return None
    of_operation = of_others[:, int(waited.argmin())]
    per_step = np.bincount(charged.step, weights=of_operation, minlength=steps).astype(np.float64)
    cost = Estimate(float(per_step.mean()), _half_width(of_operation, per_step))
    each = np.stack([_costs(charged, peer).sum(axis=1) for peer in peers], axis=1)
    mine = _costs(charged, rows).sum(axis=1)
    any_waited = each.sum(axis=1) > 0
    each, mine = each[any_waited], mine[any_waited]
    chance = _chance(each, len(rows) if rows not in peers else 1, float(mine.sum()), len(grid.ranks) // len(peers[0]))
    recurs = all(half.sum() > 0 and _is_largest(half, e) for half, e in zip(_halves(mine), _halves(each), strict=True))
    if recurs and cost.ns < _FAR * _USUAL * grid.step_ns and cost.half_width_ns > _WIDE * cost.ns:
        return None
    shows = per_step >= min(_SHOWS * cost.ns, _LEAST * grid.step_ns)
    nearly_all = shows.sum() >= steps - steps // 4
    few = int(any_waited.sum()) < _FEWEST  # of a single operation one rank is always the last
    at_once = np.median(of_others.max(axis=0, initial=0.0) / np.maximum(of_others.sum(axis=0), 1.0))
    idled = np.minimum(_idle_beyond(grid, rows), per_step).sum()
    is_stall = max(at_once, idled / max(per_step.sum(), 1.0)) >= _STALL
    # Late in many operations, of some steps: it may have more data.
    is_data = chance <= MOST_CHANCE and not nearly_all and not is_stall
    if few or is_data or not ((chance <= MOST_CHANCE and recurs) or _is_far(charged, rows, waited)):
        return None
    return Straggler(
        rows=rows,
        cost=cost,
        per_step=per_step,
        when=shows | nearly_all,
        chance=chance,
        recurs=recurs,
        charged=int((mine > 0.5 * each.sum(axis=1)).sum()),
        operations=int(any_waited.sum()),
    )


def _idle_beyond(grid: StepGrid, rows: tuple[int, ...]) -> Floats:
    """Return how long the devices of these rows idled for their hosts beyond what is usual, ns of each step."""
    idle = grid.of("host")
    return np.asarray(np.maximum(idle[list(rows)].mean(axis=0) - np.median(idle, axis=0), 0.0))


def _is_far(charged: Charged, rows: tuple[int, ...], waited: Floats) -> bool:
    """Say whether one rank holds the others up for so long that few operations are enough."""
    if len(rows) > 1:
        return False
    others = [_costs(charged, (row,)).sum(axis=0).min() for row in charged.roots if row not in rows]
    next_one = max(others, default=0.0) / len(charged.grid.steps) / charged.grid.step_ns
    return bool(waited.min() >= max(_ONCE * _LEAST, _FAR * next_one) and np.median(waited) >= 2 * _USUAL)


def _halves(values: Floats) -> tuple[Floats, Floats]:
    return values[: len(values) // 2], values[len(values) // 2 :]


def _is_largest(mine: Floats, each: Floats) -> bool:
    return bool(mine.sum() >= (1 - 1e-9) * each.sum(axis=0).max())


def _chance(each: Floats, taken: int, observed: float, ranks: int) -> float:
    """Return how often the largest sum over ranks, `taken` of them together, is as large if ranks are permuted.

    `ranks`: how many could have been charged; those that never were have no column in `each`, [operation, rank].
    """
    wide = np.pad(each, ((0, 0), (0, max(ranks - each.shape[1], 0))))
    rng = np.random.default_rng(0)
    at_once = max(_MOST_CELLS // wide.size, 1)
    as_large = done = 0
    while done < _DRAWS:
        count = min(at_once, _DRAWS - done)
        drawn = rng.permuted(np.broadcast_to(wide, (count, *wide.shape)), axis=2).sum(axis=1)
        largest = np.sort(drawn, axis=1)[:, -taken:].sum(axis=1)
        as_large += int((largest >= (1 - 1e-9) * observed).sum())
        done += count
    return (as_large + 1) / (_DRAWS + 1)


def _half_width(of_operation: Floats, per_step: Floats) -> float:
    """Half the 95 % interval of the mean per step.

    By blocks of about as many operations as there are blocks; or by steps where that is narrower, as what happens once
    in each step makes blocks differ.
    """
    values = of_operation[of_operation > 0]
    blocks = np.array([block.sum() for block in np.array_split(values, max(int(len(values) ** 0.5), 1))])
    rng = np.random.default_rng(0)
    sums = blocks[rng.integers(len(blocks), size=(_RESAMPLED, len(blocks)))].sum(axis=1)
    low, high = np.quantile(sums, (0.025, 0.975))
    by_block = float(high - low) / 2 / len(per_step) if len(blocks) > 1 else float(per_step.mean())
    return min(by_block, estimate(per_step).half_width_ns) if len(per_step) > 2 else by_block
