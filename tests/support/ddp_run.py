"""A run folder of a DDP job whose every millisecond is known."""

from __future__ import annotations

import json

from rankscope.collectors.agent.arrow_writer import Partition, RunFolder
from rankscope.collectors.schema import OPS, REGION_KINDS, SCHEMA_VERSION
from support.command_line import MS, RANK

STEPS = 14  # the first 2 are warm-up


def each(value, step):
    return value[step % len(value)] if isinstance(value, list) else value


def record(folder, before, after=0, *, transfer=10, gc=None, late=None, forgets=None, ranks_per_node=8):
    """A run folder of a DDP job; all times in ms, a number or a list that is gone through again and again.

    Each step of rank r is a forward of `before[r]`, one all-reduce that is issued, `after[r]` more backward while it is
    in flight, the wait for it and an optimizer of 10. `gc[r]` of the time before the call is garbage collection. Rank
    0 does not record the operation of step `forgets`.
    """
    after = after if isinstance(after, dict) else dict.fromkeys(before, after)
    now, rows = dict.fromkeys(before, 100), {rank: [] for rank in before}
    for step in range(STEPS):
        called = {rank: now[rank] + each(before[rank], step) for rank in before}
        done = max(called.values()) + each(transfer, step)
        for rank, call in called.items():
            begin, busy = now[rank], call + each(after[rank], step)
            over = max(busy, done)
            add = rows[rank].append
            add(("forward", begin, call - 5))
            if gc and each(gc.get(rank, 0), step):
                add(("gc", begin + 1, begin + 1 + each(gc[rank], step)))
            add(("backward", call - 5, over))
            if over > busy:
                add(("wait", busy, over))
            add(("optimizer", over, over + 10))
            if not (rank == 0 and step == forgets):
                add((step, call, done + (late or {}).get(rank, 0)))
            now[rank] = over + 10
    (folder / "run").mkdir(parents=True)
    for node in {rank // ranks_per_node for rank in before}:
        said = {"schema_version": SCHEMA_VERSION, "node": node, "state": "closed", "launch": {}}
        (folder / f"run/node={node:05}.json").write_text(json.dumps(said))
    if node:
        pings = Partition(RunFolder(folder), f"node={node:05}", "")
        for at in range(0, 100 * MS, MS):  # a round trip of 10 µs, the same time on both nodes
            times = {"t1_ns": at, "t2_ns": at + 5000, "t3_ns": at + 5000, "t4_ns": at + 10000}
            pings.add_row("clocks", {"peer": 0, **times})
        pings.flush()
        pings.close()
    for rank, of_rank in rows.items():
        place = {"node": rank // ranks_per_node, "local_rank": rank % ranks_per_node}
        write(folder, rank, of_rank, world_size=len(before), **place)
    return folder


def write(folder, rank, rows, *, world_size, node, local_rank=0, is_async=True, op="allreduce"):
    """A rank's regions, by kind, and operations, by number: (which, start, end[, bytes]), ms."""
    part = Partition(RunFolder(folder), f"rank={rank:05}", "a0-")
    part.add_row("ranks", RANK | {"world_size": world_size, "node": node, "local_rank": local_rank})
    members = f"0-{world_size - 1}"
    group = {"start_ns": 0, "group_id": 7, "name": "0", "backend": "gloo", "role": "", "members": members}
    part.add_row("groups", group)
    names = ("forward", "backward", "gc", "wait", "optimizer")
    for number, name in enumerate(names):
        part.add_row("strings", {"name_id": number, "name": name})
    for what, start, end, *size in rows:
        span = {"start_ns": start * MS, "end_ns": end * MS}
        if what in names:
            kind = {"kind": REGION_KINDS.index(what), "name_id": names.index(what), "thread": 0}
            part.add_row("regions", span | kind | {"microbatch": None, "stage": None})
            continue
        call = {"issued_ns": start * MS, "group_id": 7, "seq": what, "op": OPS.index(op), "dtype": 2}
        call |= {"device_start_ns": None, "is_async": is_async, "peer": -1, "tag": 0, "thread": 0}
        call |= {"size_bytes": size[0] if size else 4096}
        part.add_row("collectives", span | call | {"number": what + 1})
    part.flush()
    part.close()
