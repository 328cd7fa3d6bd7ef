"""Which ranks do the same work by design: those of one pipeline stage. Only they can be compared with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.collectors.rank_ranges import members_of
from rankscope.collectors.schema import NO_PEER, P2P_OPS

Ints = NDArray[np.int64]

__all__ = ["Role", "may_be_stages", "role_codes", "roles", "roles_of", "schedule", "wait_by_design"]

# `pp0`, `mesh_pp`, Megatron's PIPELINE_MODEL_PARALLEL_GROUP
_PIPELINE_NAME = r"(?i)(?:^|[^a-z])pp(?:[^a-z]|$)|pipeline"
_IN_TURN = 0.05  # of the time: two ranks that both wait so long for each other do so by design
_LEAST_CHAIN = 3  # two ranks that send to each other may as well exchange halves of something

Role = tuple[int, ...]  # the stages that a rank holds, several where they are interleaved


def roles(groups: pl.DataFrame, regions: pl.DataFrame | None, collectives: pl.DataFrame) -> dict[int, Role]:
    """Return the role of each rank of a pipeline; empty where none was seen, and then all ranks do the same.

    Stages are those that the schedule gives its microbatches. Where it names none, they are the places of the ranks
    in process groups that are called a pipeline's and in which ranks send to each other; else along the chains of
    ranks that send to their neighbours only (a ring is no pipeline: its ranks do all the same), or that do with them
    what a trace does not name.
    """
    if regions is not None and regions["stage"].null_count() < len(regions):
        named = regions.filter(pl.col("stage").is_not_null()).group_by("rank").agg(pl.col("stage").unique().sort())
        return {rank: tuple(stages) for rank, stages in named.iter_rows()}
    sent = collectives.filter(pl.col("op").is_in(P2P_OPS))
    if sent.is_empty():
        return _in_chains(collectives)
    pipelines = groups.filter(
        pl.col("group_id").is_in(sent["group_id"].unique().implode()),
        pl.any_horizontal(pl.col("name", "role").str.contains(_PIPELINE_NAME).fill_null(value=False)),
    )
    if len(pipelines):
        return _places(members_of(text or "") for text in pipelines["members"].unique())
    edges = sent.filter(pl.col("peer") >= 0).select("rank", "peer").unique().iter_rows()
    in_schedule = regions is not None and regions["microbatch"].is_not_null().any()
    return _places(_chains({(min(edge), max(edge)) for edge in edges}, 2 if in_schedule else _LEAST_CHAIN))


def schedule(groups: pl.DataFrame, regions: pl.DataFrame | None, collectives: pl.DataFrame) -> tuple[int, int] | None:
    """Return the stages of a pipeline, and how many messages its first one sends to the next in a step.

    These are the microbatches, or several times as many. None where no stages were seen that send. What they do in the
    same group and a trace does not name sends, too: to send and receive at once is one kernel.
    """
    held = {rank: stages[0] for rank, stages in roles(groups, regions, collectives).items() if len(stages) == 1}
    first = min(held.values(), default=0)
    on_first, on_next = ([rank for rank, stage in held.items() if stage == first + at] for at in (0, 1))
    to_next = pl.col("peer").is_in([NO_PEER, *on_next])
    of_first = collectives.filter(pl.col("step").is_not_null(), pl.col("rank").is_in(on_first))
    sends = of_first.filter(pl.col("op") == "send").filter(to_next)
    both = of_first.filter(pl.col("op") == "unknown").join(sends, on=["rank", "group_id"], how="semi")
    messages = pl.concat([sends, both]).group_by("rank", "step").len()["len"].median()
    return (len(set(held.values())), round(messages)) if on_next and isinstance(messages, float) else None


def wait_by_design(collectives: pl.DataFrame, judged_ns: float) -> bool:
    """Say whether ranks wait for each other as stages of a pipeline do: those that send, or that seem to."""
    is_pipeline = collectives["op"].is_in(P2P_OPS).any() or len(_in_chains(collectives)) > 0
    return is_pipeline or may_be_stages(collectives, judged_ns)


def may_be_stages(collectives: pl.DataFrame, judged_ns: float) -> bool:
    """Say whether two ranks, in `judged_ns` of each, wait so long for each other in what a trace does not name.

    Stages of a pipeline do, by design; where one of two ranks is late only the other waits. Not of ranks that hang
    together as stages do: then these are known.
    """
    if _in_chains(collectives):
        return False
    waits = collectives.join(_unnamed(collectives), on="group_id", how="semi").group_by("group_id", "rank")
    less = waits.agg(pl.col("wait_ns").sum()).group_by("group_id").agg(pl.col("wait_ns").min())["wait_ns"]
    return bool((less > _IN_TURN * judged_ns).any())


def _in_chains(collectives: pl.DataFrame) -> dict[int, Role]:
    """Return the places of the ranks in chains of those that do with their neighbours what a trace does not name."""
    return _places(_chains(set(map(tuple, _unnamed(collectives)["ranks"].to_list())), _LEAST_CHAIN))


def _unnamed(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return (group_id, ranks) of two ranks that have a group of their own in which no operation is known."""
    groups = collectives.filter(pl.col("group_size") == 2, pl.col("op") == "unknown")["group_id"].unique()
    of_two = collectives.filter(pl.col("group_id").is_in(groups.implode())).group_by("group_id")
    known = of_two.agg(pl.col("rank").unique().sort().alias("ranks"), (pl.col("op") == "unknown").all())
    return known.filter(pl.col("op"), pl.col("ranks").list.len() == 2).drop("op")


def role_codes(role: Mapping[int, Role], ranks: Sequence[int]) -> Ints:
    """Return a number for each of `ranks`, equal for those of one role.

    Ranks without one have one of their own together.
    """
    found = [role.get(rank, ()) for rank in ranks]
    code = {each: number for number, each in enumerate(sorted(set(found)))}
    return np.array([code[each] for each in found], np.int64)


def roles_of(
    ranks: Sequence[int], groups: pl.DataFrame | None, regions: pl.DataFrame | None, collectives: pl.DataFrame | None
) -> Ints:
    """Return the number of each of `ranks`' role; where a table is missing all are taken to do the same work."""
    if groups is None or collectives is None:
        return role_codes({}, ranks)
    return role_codes(roles(groups, regions, collectives), ranks)


def _places(pipelines: Iterable[Sequence[int]]) -> dict[int, Role]:
    return {rank: (place,) for ranks in pipelines for place, rank in enumerate(ranks)}


def _chains(edges: set[tuple[int, int]], least: int) -> list[list[int]]:
    """Return the ranks that hang together, in order, if they all form chains of one length; else none."""
    neighbours: dict[int, set[int]] = {}
    for one, other in edges:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    chains: list[list[int]] = []
    left = set(neighbours)
    while left:
        reached, found = [left.pop()], set[int]()
        while reached:
            rank = reached.pop()
            found.add(rank)
            reached += neighbours[rank] - found
        left -= found
        degrees = [len(neighbours[rank]) for rank in found]
        if len(found) < least or max(degrees) > 2 or degrees.count(1) != 2:
            return []
        chains.append(sorted(found))
    return chains if len({len(chain) for chain in chains}) == 1 else []
