"""Steps of 100 ms in which the host waits for its device."""

from __future__ import annotations

import re

import polars as pl

from rankscope.analysis.model.kernels import WAITING_CALLS

MS = 1_000_000
STEPS = 10
ITEM = "aten::_local_scalar_dense"


def tables(*calls, idle=(80, 100), ranks=2, launched=True, busy_ns=50_000):
    """Steps of 100 ms; from 80 to 100 the device idles for work launched late, if `idle` says nothing else.

    `calls` are (name, start, end) in ms of each step, by rank if they are a dict. The host launches for `busy_ns`.
    """
    parts, phases, kernels, launches, regions = [], [], [], [], []
    for rank in range(ranks):
        for step in range(STEPS):
            at = [round((100 * step + ms) * MS) for ms in (0, *idle, 100)]
            spans = [("compute", at[0], at[1]), ("host", at[1], at[2]), ("compute", at[2], at[3])]
            for part, start, end in spans:
                if end > start:
                    parts.append((rank, step, part, end - start))
                    phases.append((rank, step, part, "loss", start, end))
                if end > start and part == "compute":
                    kernels.append((rank, start, end, start if launched else None, 0))
            # The step's work is launched at once: this host has a lead to lose.
            launches += [
                (rank, at[0] + ns, at[0] + ns + 4_000, "cudaLaunchKernel", 0) for ns in range(0, busy_ns, 10_000)
            ]
            # And late: the host calls on in the time in which the device idles.
            late = range(round(idle[0] * MS), round(idle[1] * MS), 2 * MS)
            launches += [(rank, 100 * step * MS + ns, 100 * step * MS + ns + 1, "cudaEventQuery", 0) for ns in late]
            for name, start, end in calls[0].get(rank, ()) if isinstance(calls[0], dict) else calls:
                begin, done = round((100 * step + start) * MS), round((100 * step + end) * MS)
                launches.append((rank, begin, done, name, 0))
                regions += [
                    (rank, begin - MS, done, "aten::item", "operator", 0),
                    (rank, begin - MS // 2, done, ITEM, "operator", 0),
                    (rank, begin - 2 * MS, done, "log the loss", "user", 0),
                ]
    # A last piece of work: else nothing would be late for the last gap.
    kernels += [(rank, STEPS * 100 * MS, STEPS * 100 * MS + 1, 0 if launched else None, 0) for rank in range(ranks)]
    # The profiler's own, behind everything.
    launches += [(rank, STEPS * 100 * MS, STEPS * 100 * MS + 1, "cudaDeviceSynchronize", 0) for rank in range(ranks)]
    span = {"start_ns": pl.Int64, "end_ns": pl.Int64}
    frames = (
        (parts, {"rank": pl.Int32, "step": pl.Int32, "part": pl.String, "ns": pl.Int64}),
        (phases, {"rank": pl.Int32, "step": pl.Int32, "part": pl.String, "label": pl.String, **span}),
        (kernels, {"rank": pl.Int32, **span, "launch_ns": pl.Int64, "launch_thread": pl.UInt16}),
        (
            [(*call, re.search(WAITING_CALLS, call[3]) is not None) for call in launches],
            {"rank": pl.Int32, **span, "name": pl.String, "thread": pl.UInt16, "waits": pl.Boolean},
        ),
        (regions, {"rank": pl.Int32, **span, "name": pl.String, "kind": pl.String, "thread": pl.UInt16}),
    )
    return [pl.DataFrame(rows, schema, orient="row") for rows, schema in frames]
