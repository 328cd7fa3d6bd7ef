"""Writes docs/tables.md from the tables that the code declares: `make docs`."""

from __future__ import annotations

from pathlib import Path

from rankscope.analysis.diagnosis.step_summaries import STEP_SUMMARIES
from rankscope.collectors.counters import COUNTERS
from rankscope.collectors.schema import (
    DEVICE_MARKS,
    DEVICE_WORK,
    DTYPES,
    NCCL_ALGORITHMS,
    NCCL_EVENTS,
    NCCL_PROTOCOLS,
    OPS,
    REGION_KINDS,
    SCHEMA_VERSION,
    TABLES,
    Table,
)

PAGE = Path(__file__).with_name("tables.md")


def render() -> str:
    """Give the whole page."""
    parts = [
        "# Tables",
        "Generated from `collectors/schema.py` by `make docs`; edit that instead. "
        f"This is schema version {SCHEMA_VERSION}.",
        "Times are nanoseconds of the node's monotonic clock unless the column says otherwise. A `*_id` column points "
        "into the `strings` of the same partition. Which rank or node a row belongs to stands in the file's path; "
        "`Trace.table` adds it as columns and puts names in the place of ids and codes.",
        *(_table(table) for table in (*TABLES.values(), STEP_SUMMARIES)),
        "## Counters",
        "The names in the table `counters`, from `collectors/counters.py`. A gauge is read at a moment; a counter is "
        "cumulative, and shown as a rate.",
        "\n".join(
            (
                "| source | name | unit | kind | |",
                "|---|---|---|---|---|",
                *(f"| {one.source} | `{one.name}` | {one.unit} | {one.kind} | {one.doc} |" for one in COUNTERS),
            )
        ),
        "## Codes",
        *(
            f"`{name}`: " + ", ".join(f"{code} {word}" for code, word in enumerate(words))
            for name, words in (
                ("REGION_KINDS", REGION_KINDS),
                ("OPS", OPS),
                ("DTYPES", DTYPES),
                ("DEVICE_MARKS", DEVICE_MARKS),
                ("DEVICE_WORK", DEVICE_WORK),
                ("NCCL_EVENTS", NCCL_EVENTS),
                ("NCCL_ALGORITHMS", NCCL_ALGORITHMS),
                ("NCCL_PROTOCOLS", NCCL_PROTOCOLS),
            )
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [
        f"## {table.name}",
        "",
        f"{table.doc} One file per {table.partition}, rows in the order of `{table.order}`.",
        "",
        "| column | type | unit | |",
        "|---|---|---|---|",
    ]
    for column in table.columns:
        kind = f"{column.type} or null" if column.nullable else column.type
        lines.append(f"| `{column.name}` | {kind} | {column.unit} | {column.doc} |")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
