"""Which ranks are shown together: of a node, of a pipeline stage, of a process group."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.timeline.build import Timeline
from rankscope.collectors.rank_ranges import members_of
from rankscope.dashboard.timeline.scene import Grouping

__all__ = ["groupings", "nodes_of"]


def groupings(timeline: Timeline) -> list[Grouping]:
    """By node, by pipeline stage, by the process groups that share a role; only where that parts the ranks."""
    nodes = nodes_of(timeline)
    ranks = sorted(nodes)
    hosts = dict(timeline.ranks.select("node", "hostname").unique("node").iter_rows())
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        node = nodes.get(rank, 0)
        title = f"node {node}" + (f"  {hosts[node]}" if hosts.get(node) else "")
        by_node.setdefault(title, []).append(rank)
    found = [Grouping("node", by_node)]
    stages = _stages(timeline)
    if len(set(stages.values())) > 1:
        by_stage: dict[str, list[int]] = {}
        for rank in sorted(ranks, key=lambda r: (stages.get(r, -1), r)):
            by_stage.setdefault(f"stage {stages[rank]}" if rank in stages else "no stage", []).append(rank)
        found.append(Grouping("pipeline stage", by_stage))
    families: dict[str, dict[str, list[int]]] = {}
    for name, role, members in timeline.groups.select("name", "role", "members").unique("members").iter_rows():
        mine = members_of(members)
        if 1 < len(mine) < len(ranks):
            family = role or f"groups of {len(mine)}"
            families.setdefault(family, {})[f"{role or 'group'} {name}"] = mine
    for family, groups in sorted(families.items()):
        inside = [rank for mine in groups.values() for rank in mine]
        if len(inside) == len(set(inside)) and len(groups) > 1:
            rest = sorted(set(ranks) - set(inside))
            ordered = dict(sorted(groups.items(), key=lambda item: item[1]))
            found.append(Grouping(family, ordered | ({"in none of them": rest} if rest else {})))
    return found


def nodes_of(timeline: Timeline) -> dict[int, int]:
    """Return the node of each rank."""
    return dict(timeline.ranks.select("rank", pl.col("node").fill_null(0)).iter_rows())


def _stages(timeline: Timeline) -> dict[int, int]:
    """Return the pipeline stage of each rank that has exactly one."""
    seen = (
        pl.concat([frame.select("rank", "stage") for frame in (timeline.ops, timeline.regions)]).drop_nulls().unique()
    )
    return dict(seen.filter(pl.len().over("rank") == 1).iter_rows())
