"""What ranks compute for their experts, and elsewhere, by the all-to-alls that take tokens there and back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from rankscope.analysis.metrics.exposed_communication import spent
from rankscope.analysis.metrics.step_matrix import (
    ENOUGH_STEPS,
    Floats,
    by_rank_and_step,
    estimate,
    estimate_of_operations,
)
from rankscope.collectors.schema import ALL_TO_ALL_OPS

__all__ = ["ExpertCompute", "expert_compute", "until_next"]

_COMPUTING = ("compute", "overlapped", "memory")
_TINY = 0.01  # of the largest all-to-all of the group: it carries only how many tokens will come
_EVEN = 0.25  # of the share by which experts take longer: as much may what ranks compute elsewhere differ
_ENOUGH = 0.2  # of the experts' time: with less elsewhere it does not show whether all that a rank computes is slow
_LEAST = 0.05  # share by which experts take longer
_RECURS = 0.8  # of the steps that show at least half of the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCompute:
    """What the ranks of a group compute, ns of (rank, step): for experts and elsewhere.

    `windows`: rank, step, place, start_ns, end_ns, ns, of which `experts` are the sums.
    """

    name: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    experts: Floats
    elsewhere: Floats
    windows: pl.DataFrame

    def longer(self, rank: int, slow: Collection[int]) -> float:
        """Return by how many ns per step this rank takes longer than those not `slow`, if for its experts only; else 0.

        Also 0 where that does not recur, or no one is left to compare with.
        """
        peers = [row for row, other in enumerate(self.ranks) if other not in slow]
        if not peers:
            return 0.0
        row, peers_ns = self.ranks.index(rank), np.median(self.experts[peers], axis=0)
        each, usual = self.experts[row] - peers_ns, np.median(self.elsewhere[peers], axis=0)
        share = float(each.mean() / max(peers_ns.mean(), 1.0))
        recurs = (each >= each.mean() / 2).mean() >= _RECURS
        if share < _LEAST or not recurs or usual.mean() < _ENOUGH * peers_ns.mean():
            return 0.0
        differs = ((self.elsewhere[[*peers, row]] - usual) / np.maximum(usual, 1.0)).mean(axis=1)
        is_even = np.abs(differs).max() <= _EVEN * share
        return float(each.mean()) if is_even and self._is_clear(row, peers, each) else 0.0

    def _is_clear(self, row: int, peers: Sequence[int], each: Floats) -> bool:
        """Say whether the excess is clear of its scatter; of few steps over their windows."""
        if len(each) >= ENOUGH_STEPS:
            return estimate(each).clear
        by_place = [
            by_rank_and_step(rows, "ns", self.ranks, self.steps)
            for _, rows in self.windows.group_by("place", maintain_order=True)
        ]
        longer = np.concatenate([ns[row] - np.median(ns[peers], axis=0) for ns in by_place])
        return estimate_of_operations(longer, len(each)).clear


def expert_compute(phases: pl.DataFrame, collectives: pl.DataFrame, steps: Sequence[int]) -> list[ExpertCompute]:
    """Return what experts compute, of each group whose ranks were all seen, in the steps that all of them have whole.

    Of a step's all-to-alls the first takes tokens to the experts, the next brings them back, and so on, forward and
    backward: experts compute after the first, the third, … The tiny ones before them carry no tokens.
    """
    calls = collectives.filter(pl.col("op").is_in(ALL_TO_ALL_OPS), pl.col("step").is_in(steps))
    is_tiny = pl.col("size_bytes").max().over("group", "seq") < _TINY * pl.col("size_bytes").max().over("group")
    calls = calls.filter(~is_tiny.fill_null(value=False))
    is_whole = (pl.len().over("group", "step", "seq") == pl.col("group_size")) & pl.col("end_ns").is_not_null()
    calls = calls.filter(is_whole.fill_null(value=False).all().over("group", "step"))
    nth = pl.col("seq").rank("dense").over("group", "rank", "step") - 1
    windows = until_next(calls, collectives).with_columns(place=nth).filter(pl.col("place") % 2 == 0)
    windows = windows.select("group", "rank", "step", "place", start_ns="end_ns", end_ns="next_ns")
    windows = windows.filter(pl.col("start_ns") < pl.col("end_ns"))
    windows = windows.with_columns(ns=pl.Series(spent(phases, _COMPUTING, windows), dtype=pl.Int64))
    length = pl.col("end_ns") - pl.col("start_ns")
    computed = phases.filter(pl.col("part").is_in(_COMPUTING)).select("rank", "step", ns=length)
    return [_of_group(str(group), rows, computed) for (group,), rows in windows.group_by("group", maintain_order=True)]


def until_next(calls: pl.DataFrame, collectives: pl.DataFrame) -> pl.DataFrame:
    """Return these all-to-alls that ended, with `next_ns`: when the rank begins the next one of its group and step.

    Of the last one it is when the rank begins another collective of the step; null where there is none.
    """
    begin = pl.coalesce("device_start_ns", "start_ns")
    later = collectives.select("rank", "step", other_ns=begin).drop_nulls().sort("other_ns")
    next_ns = begin.shift(-1).over("group", "rank", "step")
    ended = calls.sort("group", "rank", "seq").with_columns(next_ns=next_ns).drop_nulls("end_ns")
    followed = ended.sort("end_ns").join_asof(
        later,
        left_on="end_ns",
        right_on="other_ns",
        by=["rank", "step"],
        strategy="forward",
        check_sortedness=False,
    )
    return followed.with_columns(next_ns=pl.coalesce("next_ns", "other_ns")).sort("group", "rank", "seq")


def _of_group(name: str, windows: pl.DataFrame, computed: pl.DataFrame) -> ExpertCompute:
    ranks, steps = (tuple(windows[column].unique().sort().to_list()) for column in ("rank", "step"))
    experts = by_rank_and_step(windows, "ns", ranks, steps)
    elsewhere = by_rank_and_step(computed, "ns", ranks, steps) - experts
    return ExpertCompute(name=name, ranks=ranks, steps=steps, experts=experts, elsewhere=elsewhere, windows=windows)
