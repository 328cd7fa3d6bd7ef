"""The critical path over all ranks: the longest chain through the graph to the end of the job.

Source: HTA's critical path analysis for the idea; Böhme et al. 2012 for the summary by rank and activity.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from rankscope.analysis.replay.graph import longest_chain, replay
from rankscope.analysis.replay.host_graph import HostGraph

__all__ = ["BEFORE", "PATH_COLUMNS", "critical_path"]

BEFORE = "before its first step"  # label of time in which a rank had not begun
PATH_COLUMNS = {
    "rank": pl.Int32,
    "step": pl.Int32,
    "part": pl.String,
    "label": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}


def critical_path(host: HostGraph) -> pl.DataFrame:
    """Return the chain of own time that made the last step end when it did.

    (rank, step, part, label, start_ns, end_ns).

    The rows are in order of time, without gap or overlap, from when the first step began on the first rank to when the
    last one was over. They are cut where a step was over on the last of its ranks: those of a step sum to the time
    since the one before was, to the nanosecond. Whatever is not in it could have taken longer. Neighbours that say the
    same are one row. Null rank: the transfer of a collective, for which all its ranks had come.
    """
    graph, steps = host.graph, host.steps.sort("step")
    if steps.is_empty():
        return pl.DataFrame(schema=PATH_COLUMNS)
    end = np.rint(replay(graph, graph.duration_ns)).astype(np.int64)
    number, first = np.unique(steps["step"].to_numpy(), return_index=True)
    last = steps["last"].to_numpy()
    over = np.maximum.accumulate(np.maximum.reduceat(end[last], first))
    since = int(end[steps["before"].to_numpy()[: np.append(first, len(last))[1]]].min())
    chain = longest_chain(graph, end, int(last[end[last].argmax()]))
    until = end[chain]
    took = until > np.maximum(np.concatenate([[0], until[:-1]]), since)
    chain, until = chain[took], until[took]
    cuts = np.sort(np.concatenate([until, over]))  # np.unique would be slower
    cuts = cuts[np.append(cuts[1:] != cuts[:-1], True)]
    node = chain[np.searchsorted(until, cuts)]
    step = number[np.searchsorted(over, cuts)]
    said = (graph.rank[node], step.astype(np.int32), graph.part[node], graph.label[node])
    differs = np.zeros(max(len(cuts) - 1, 0), np.bool_)
    for values in said:
        differs |= values[1:] != values[:-1]
    first_of_run = np.flatnonzero(np.concatenate([[True], differs]))
    last_of_run = np.append(first_of_run[1:], len(cuts)) - 1
    rank, step, part, label = (values[first_of_run] for values in said)
    rows = pl.DataFrame(
        {
            "rank": rank,
            "step": step,
            "part": pl.Series([*graph.parts, "other"]).gather(np.where(part < 0, len(graph.parts), part)),
            "label": pl.Series([*graph.labels, BEFORE]).gather(np.where(label < 0, len(graph.labels), label)),
            "start_ns": np.concatenate([[since], cuts[:-1]])[first_of_run] + graph.origin_ns,
            "end_ns": cuts[last_of_run] + graph.origin_ns,
        }
    )
    rows = rows.with_columns(pl.when(pl.col("rank") >= 0).then("rank").alias("rank"))
    return rows.select(pl.col(c).cast(t) for c, t in PATH_COLUMNS.items())
