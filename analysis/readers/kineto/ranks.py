"""Which rank, node and device each capture is of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.base import gap
from rankscope.analysis.readers.json_scan import MISSING_SHORT
from rankscope.analysis.readers.kineto.capture import MAX_WORLD, Capture
from rankscope.analysis.readers.spill_file import Rows
from rankscope.analysis.text.message import text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import ranges
from rankscope.errors import BadInput

__all__ = ["all_ranks", "by_rank", "devices_of", "missing_ranks", "nodes_of", "ranks_frame", "world_of"]

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)
_HOST_IN_NAME = re.compile(r"^(.+?)_\d+\.\d+\.pt\.trace\.json")
_FEW = 0.01  # share of the device rows that another device may have


def by_rank(captures: list[Capture], gaps: list[Gap]) -> dict[int, Capture]:
    """Return the captures by rank, in order. A rank that is neither in the file nor in its name is asked for."""
    ranks: dict[int, Capture] = {}
    for capture in captures:
        rank = _rank_of(capture)
        if rank is None and len(captures) == 1:
            rank = 0
            gaps.append(gap("ranks", text("the file does not name its rank: it is assumed to be rank 0"), rank=0))
        if rank is None:
            raise BadInput(
                f"{capture.file_name} does not say which rank it is: put it into the file's name, as in rank3.json"
            )
        if rank in ranks:
            raise BadInput(
                f"rank {rank} is in both {ranks[rank].file_name} and {capture.file_name}: "
                "these are two captures, give the files of one"
            )
        ranks[rank] = capture
    return dict(sorted(ranks.items()))


def _rank_of(capture: Capture) -> int | None:
    rank = capture.distributed.get("rank")
    if isinstance(rank, int) and 0 <= rank < MAX_WORLD:
        return rank
    found = _RANK_IN_NAME.search(capture.file_name)
    return int(found[1]) if found else None


def nodes_of(ranks: Mapping[int, Capture]) -> dict[int, int]:
    """Each rank's node: by the host in the file's name; else a device that comes again begins another node."""
    hosts = {rank: found[1] for rank, c in ranks.items() if (found := _HOST_IN_NAME.match(c.file_name))}
    if len(hosts) == len(ranks) and not all(_RANK_IN_NAME.search(host) for host in hosts.values()):
        order = list(dict.fromkeys(hosts.values()))
        return {rank: order.index(host) for rank, host in hosts.items()}
    seen: dict[int, int] = {}
    nodes = {}
    for rank, capture in ranks.items():
        device = capture.main_device
        nodes[rank] = seen.get(device, 0) if device is not None else 0
        if device is not None:
            seen[device] = nodes[rank] + 1
    return nodes


def devices_of(rows: Rows) -> list[int]:
    """Return the devices that work for this process, the one with most rows first, without those that hardly do."""
    seen: Counter[int] = Counter()
    for block in rows.blocks("device"):
        which, count = np.unique(block["device"], return_counts=True)
        seen.update(dict(zip(which.tolist(), count.tolist(), strict=True)))
    del seen[MISSING_SHORT]
    return [d for d in sorted(seen, key=lambda d: (-seen[d], d)) if seen[d] >= _FEW * seen.total()]


def missing_ranks(ranks: Mapping[int, Capture]) -> list[Gap]:
    """Return a gap for the ranks of which no trace is here, or where it is not known whether there are any."""
    world = world_of(ranks)
    if world is None:
        alone = not any(len(capture.calls["op"]) for capture in ranks.values())
        why = text("no trace says how many ranks the job has: there may be more than these")
        return [] if alone else [gap("ranks", why)]
    missing = sorted(set(range(world)) - set(ranks))
    if not missing:
        return []
    why = text("{missing} of {world}: no trace of them is here", missing=named("rank", missing), world=world)
    return [gap("ranks", why, rank=missing[0] if len(missing) == 1 else None, count=len(missing))]


def world_of(ranks: Mapping[int, Capture]) -> int | None:
    """Return how many ranks the job has: what a file says, else what the numbers of ranks and groups show at least.

    None where these are the ranks that are here, which may or may not be all.
    """
    said = max((capture.world_size or 0 for capture in ranks.values()), default=0)
    members = (text for capture in ranks.values() for text in capture.groups.members.values() if text)
    last = (int(text.rpartition(",")[2].rpartition("-")[2]) for text in members)
    least = 1 + max([*ranks, *(rank for rank in last if rank < MAX_WORLD)])
    return said or (least if least > len(ranks) else None)


def ranks_frame(capture: Capture, world: int | None) -> pl.DataFrame:
    starts = [rows.first_ns for rows in (capture.device, capture.launches, capture.spans) if len(rows)]
    host = _HOST_IN_NAME.match(capture.file_name)
    row = {
        "start_ns": min(starts, default=0),
        "local_rank": capture.main_device,
        "world_size": world,
        "hostname": host[1] if host else None,
        "device": _device_name(capture),
    }
    schema = {"start_ns": pl.Int64, "local_rank": pl.Int32, "world_size": pl.Int32}
    return pl.DataFrame([row], schema=schema | {"hostname": pl.String, "device": pl.String})


def _device_name(capture: Capture) -> str:
    if not len(capture.device):
        return "cpu"
    listed = capture.info.get("deviceProperties")
    for device in listed if isinstance(listed, list) else []:
        if isinstance(device, dict) and device.get("id") == capture.main_device and device.get("name"):
            return str(device["name"])
    return "accelerator"


def all_ranks(ranks: Mapping[int, Capture]) -> str:
    """Return the ranks of the job: all that are here, where it is not known how many it has; of one alone none."""
    world = world_of(ranks)
    if world is None:
        return ranges(sorted(ranks)) if len(ranks) > 1 else ""  # no rank communicates alone
    return ranges(sorted({*ranks, *range(world)}))
