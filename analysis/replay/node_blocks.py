"""Nodes of a graph in blocks, as they are found in any order, until the graph is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rankscope.analysis.replay.graph import Graph, Nodes, assemble
from rankscope.analysis.timeline.device_time import by_rank

__all__ = ["NodeBlocks"]

Ints = NDArray[np.signedinteger[Any]]  # times take 8 bytes, codes and numbers of nodes 4
Shorts = NDArray[np.int32]

_MOST_AHEAD = np.iinfo(np.int32).max


@dataclass(slots=True)
class NodeBlocks:
    """Nodes as they are found, in blocks."""

    origin_ns: int
    count: int = 0
    columns: dict[str, list[NDArray[Any]]] = field(default_factory=dict)
    waits: list[Shorts] = field(default_factory=list)
    waited_for: list[Shorts] = field(default_factory=list)

    def add(
        self,
        duration: Ints,
        end: Ints,
        *,
        rank: int,
        part: Ints | int,
        label: Ints | int,
        **known: Ints | int,
    ) -> Ints:
        """Numbers of new nodes. They began no later than `end` - `duration`.

        `known` are `instance`, `cycle` and `launched`, where there are such.
        """
        size = len(duration)
        times = {"duration": duration, "end": end} | {name: known.get(name, -1) for name in ("instance", "cycle")}
        ahead = np.clip(end - duration - known["launched"], 0, _MOST_AHEAD) if "launched" in known else -1
        codes = {"rank": rank, "part": part, "label": label, "ahead": ahead}
        for block, kind in ((times, np.int64), (codes, np.int32)):
            for name, values in block.items():
                self.columns.setdefault(name, []).append(np.broadcast_to(np.asarray(values, kind), (size,)))
        self.count += size
        return np.arange(self.count - size, self.count, dtype=np.int32)

    def wait(self, nodes: Ints, others: Ints) -> None:
        """Each of the nodes waits for the other beside it; a negative number is nothing."""
        known = others >= 0
        self.waits.append(nodes[known].astype(np.int32))
        self.waited_for.append(others[known].astype(np.int32))

    def graph(self, steps: pl.DataFrame, parts: tuple[str, ...], labels: tuple[str, ...]) -> tuple[Graph, Ints]:
        """Return the graph and, by node, its cycle. What was added is gone then."""
        rows = {name: np.concatenate(self.columns.pop(name)) for name in [*self.columns]}
        waits, self.waits = np.concatenate(self.waits), []
        waited_for, self.waited_for = np.concatenate(self.waited_for), []
        start, cycle = rows["end"] - rows["duration"], rows.pop("cycle")
        nodes = Nodes(
            duration_ns=rows.pop("duration").astype(np.float64),
            step=_step_of(steps, rows["rank"], rows["end"]),
            rank=rows.pop("rank"),
            part=rows.pop("part"),
            label=rows.pop("label"),
            instance=rows.pop("instance"),
            start_ns=start,
            end_ns=rows.pop("end"),
            ahead_ns=rows.pop("ahead"),
            parts=parts,
            labels=labels,
            origin_ns=self.origin_ns,
        )
        return assemble(nodes, waits, waited_for), cycle


def _step_of(steps: pl.DataFrame, rank: Ints, end: Ints) -> Ints:
    """Return the step in which each node ended, -1 outside; a transfer is in no rank's step."""
    step = np.full(len(rank), -1, np.int32)
    for of, rows in by_rank(steps.sort("rank", "start_ns")):
        mine = np.flatnonzero(rank == of)
        begin, until, number = (rows[c].to_numpy() for c in ("start_ns", "end_ns", "step"))
        at = np.searchsorted(begin, end[mine], side="left") - 1
        step[mine] = np.where((at >= 0) & (end[mine] <= until[at]), number[at], -1)
    return step
