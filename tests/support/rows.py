"""Tables of a timeline, row by row, and collectives that are matched."""

from __future__ import annotations

import polars as pl

from rankscope.analysis.model.finding import Clock
from rankscope.analysis.model.tables import schema_of
from rankscope.analysis.timeline.matching import match_collectives
from rankscope.collectors.schema import TABLES

ONE_NODE = [Clock(node=0, offset_ns=0, drift_ppm=0.0, error_ns=0, source="reference")]


def table(name, *rows, **defaults):
    """Rows of a table; columns that a test does not name are null where they may be, else 0 or the like."""
    schema = schema_of(name)
    base = {c: "" if t == pl.String else False if t == pl.Boolean else 0 for c, t in schema.items()}
    base |= {c.name: None for c in TABLES[name].columns if c.nullable}
    base |= {"peer": -1, "group_id": 1}
    return pl.DataFrame([{c: (base | defaults | row)[c] for c in schema} for row in rows], schema=schema)


def regions(*rows):
    """(rank, kind, start, end[, name])."""
    return table(
        "regions",
        *(
            {"rank": r[0], "kind": r[1], "start_ns": r[2], "end_ns": r[3], "name": r[4] if len(r) > 4 else r[1]}
            for r in rows
        ),
    )


def collectives(*rows, **defaults):
    """(rank, seq, start, end[, op])."""
    return table(
        "collectives",
        *(
            {
                "rank": r[0],
                "seq": r[1],
                "start_ns": r[2],
                "issued_ns": r[2],
                "end_ns": r[3],
                "op": r[4] if len(r) > 4 else "allreduce",
            }
            for r in rows
        ),
        **defaults,
    )


def groups(members="0-1"):
    return table("groups", {"name": "dp", "members": members})


def matched(rows, members="0-1", clocks=ONE_NODE):
    return match_collectives(rows, groups(members), clocks)


def step_spans(*rows):
    """(rank, step, start, end)."""
    schema = {"rank": pl.Int32, "step": pl.Int32, "start_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(source=pl.lit("optimizer"))
