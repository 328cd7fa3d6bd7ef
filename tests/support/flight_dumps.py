"""Dumps of torch's Flight Recorder."""

from __future__ import annotations

import json
import pickle


def dump(rank, *, enqueued=5, completed=4, entries=True, op="nccl:all_reduce"):
    """A dump of one rank of a group of two that is in operation 5."""
    entry = {
        "record_id": 10,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": enqueued,
        "p2p_seq_id": 0,
        "profiling_name": op,
        "time_created_ns": 1_000 + rank,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled",
        "time_discovered_completed_ns": None,
        "retired": False,
        "is_p2p": False,
    }
    counters = {
        "last_enqueued_collective": enqueued,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }
    return {
        "version": "2.9",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": counters},
        "entries": [entry] if entries else [],
    }


def write_dumps(folder, *dumps, suffix=""):
    for rank, content in enumerate(dumps):
        if suffix:  # torch writes 0 there for None
            content |= {"entries": [entry | {"time_discovered_completed_ns": 0} for entry in content["entries"]]}
        written = json.dumps(content).encode() if suffix else pickle.dumps(content)
        (folder / f"nccl_trace_rank_{rank}{suffix}").write_bytes(written)
    return folder
