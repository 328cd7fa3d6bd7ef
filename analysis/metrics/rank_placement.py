"""Where each rank's GPU is, and which network card serves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

__all__ = ["PLACES", "rank_places"]

PLACES = pl.Schema(
    {
        "rank": pl.Int64(),
        "node": pl.Int64(),
        "gpu": pl.String(),  # PCI address
        "numa_node": pl.Int64(),
        "pcie": pl.String(),
        "pcie_max": pl.String(),
        "nics": pl.List(pl.String()),
        "rails": pl.List(pl.Int64()),
        "distance": pl.String(),
    }
)


def rank_places(run: Mapping[int, Mapping[str, Any]]) -> pl.DataFrame:
    """One row per rank whose GPU is known: its address, its PCIe link, the nearest cards and their rails.

    `run` has each node's JSON, as `Trace.run`. A rank without a GPU, or whose node did not report its devices' places,
    has no row. `collectors/topology.py` says what distances and rails are.
    """
    rows = []
    for node, said in run.items():
        topology = said.get("topology") or {}
        gpus = {gpu["uuid"]: gpu for gpu in topology.get("gpus", ()) if gpu.get("uuid")}
        rails = {nic["name"]: nic.get("rail") for nic in topology.get("nics", ())}
        by_rank = {report["rank"]: report.get("gpu_uuid") for report in said.get("ranks", ())}  # of the last attempt
        for rank, uuid in by_rank.items():
            gpu = gpus.get(uuid)
            if gpu is None:
                continue
            facts = {name: gpu.get(name) for name in ("numa_node", "pcie", "pcie_max", "nics", "distance")}
            near = [rails[nic] for nic in gpu["nics"] if rails.get(nic) is not None]
            rows.append({"rank": rank, "node": node, "gpu": gpu["pci"], "rails": near} | facts)
    return pl.DataFrame(rows, schema=PLACES).sort("rank")
