"""What a run folder lacks: nodes that did not close, ranks that left nothing, rows that were removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import polars as pl

from rankscope.analysis.model.finding import Gap
from rankscope.analysis.readers.native.stored_rows import StoredRows
from rankscope.analysis.readers.native.worlds import World
from rankscope.analysis.text.message import plural, text
from rankscope.analysis.text.phrases import as_recorded, counted, named
from rankscope.analysis.text.units import bytes_text, duration

__all__ = ["open_ends", "other_worlds", "recorded_gaps", "removed_rows", "silent_ranks", "unclosed_nodes"]

_NAMED_WORLDS = 4  # besides the one that is read; engines that generate for a job may each have their own


def unclosed_nodes(stored: StoredRows, read: Callable[[str], pl.DataFrame]) -> list[Gap]:
    """Nodes that did not close their run; `read` gives a table."""
    return [
        Gap(table="run", rank=None, node=node, count=None, why=_why_open(node, stored, read))
        for node, launch in sorted(stored.run.items())
        if launch.get("state") != "closed"
    ]


def silent_ranks(stored: StoredRows) -> list[Gap]:
    """Ranks that left no file."""
    world = max(stored.read("ranks")["world_size"].drop_nulls().to_list(), default=0)
    missing = sorted(set(range(world)) - set(stored.ranks()))
    if not missing:
        return []
    why = text(
        "{missing} of {world} left no trace: if they ran on another node, give its folder too, else they never joined",
        missing=named("rank", missing),
        world=world,
    )
    rank = missing[0] if len(missing) == 1 else None
    return [Gap(table="ranks", rank=rank, node=None, count=len(missing), why=why)]


def removed_rows(run: Mapping[int, Mapping[str, Any]], kept_since: Mapping[int, int], *, shrunk: bool) -> Iterator[Gap]:
    """Yield that old records were evicted, before the run was opened, and since; one line each for all nodes."""
    since = [ns - run[node].get("start_ns", ns) for node, ns in kept_since.items()]
    sizes = [run[node].get("keep_bytes", 0) for node in kept_since]
    if since:
        why = text(
            "records of the first {removed} were evicted, to keep within {size} a node (rankscope run --keep)",
            removed=duration(max(since)),
            size=bytes_text(min(sizes)),
        )
        yield Gap(table="*", rank=None, node=None, count=None, why=why)
    if shrunk:
        why = text(
            "more records were evicted while this was read, so rows of the first steps may be missing: read it again"
        )
        yield Gap(table="*", rank=None, node=None, count=None, why=why)


def other_worlds(worlds: Sequence[World], analyzed: int, where: str) -> list[Gap]:
    """Return a line for each other attempt and world; of very many, how many more there are."""
    mine = worlds[analyzed]
    others = [(number, world) for number, world in enumerate(worlds) if number != analyzed]
    whys = [
        _why_not_analyzed(f"{where.rstrip('/')}/world={number}", world, mine)
        for number, world in others[:_NAMED_WORLDS]
    ]
    if len(others) > _NAMED_WORLDS:
        whys.append(text("{count} further worlds are not analyzed either", count=len(others) - _NAMED_WORLDS))
    return [Gap(table="ranks", rank=None, node=None, count=None, why=why) for why in whys]


def _why_not_analyzed(address: str, world: World, mine: World) -> str:
    if world.is_beside(mine):
        return plural(
            "{ranks} of another world ran at the same time ({what}) and is not analyzed here: rankscope report {it}",
            "{ranks} of another world ran at the same time ({what}) and are not analyzed here: rankscope report {it}",
            len(world.ranks),
            ranks=named("rank", world.ranks),
            what=text("they train") if world.trains else text("no optimizer ran there"),
            it=address,
        )
    if world.attempt < mine.attempt:
        return text(
            "attempt {attempt} was restarted and is not analyzed, only the last attempt ({last}) is",
            attempt=world.attempt,
            last=mine.attempt,
        )
    if world.attempt > mine.attempt:
        return text(
            "attempt {attempt}, which came later, is not analyzed here: rankscope report {it}",
            attempt=world.attempt,
            it=address,
        )
    return text(
        "another job of {count} in this run is not analyzed here: rankscope report {it}",
        count=counted(len(world.ranks), "rank"),
        it=address,
    )


def _why_open(node: int, stored: StoredRows, read: Callable[[str], pl.DataFrame]) -> str:
    start = stored.started_ns(pl.col("node") == node)
    last = read("regions").filter(pl.col("node") == node)["end_ns"].max()
    until = (
        text("; nothing after {last:.1f} s", last=(last - start) / 1e9)
        if start is not None and isinstance(last, int)
        else ""
    )
    return text(
        "node {node} has not closed its run: it is still recording, or its agent was killed{until}",
        node=node,
        until=until,
    )


def open_ends(unended: pl.DataFrame, flight_records: pl.DataFrame) -> list[Gap]:
    """Return collectives whose end was never seen, by rank; `unended` has the rank of each."""
    timed = flight_records.drop_nulls("duration_ns")["rank"].unique()  # what lacks one is unmatched
    unseen = unended.filter(~pl.col("rank").is_in(timed.implode()))
    counts = unseen.group_by("rank").len().sort("rank")
    return [
        Gap(
            table="collectives",
            rank=rank,
            node=None,
            count=n,
            why=plural(
                "the end of {n} collective was never seen", "the ends of {n} collectives were never seen", n, n=n
            ),
        )
        for rank, n in counts.iter_rows()
    ]


def recorded_gaps(stored: StoredRows) -> list[Gap]:
    """Return the gaps that collectors, session and agent recorded."""
    said = stored.read("gaps").select("table", "rank", "node", "count", "why", "source")
    return [_named(row.pop("source"), Gap(**row)) for row in said.iter_rows(named=True)]


def _named(source: str, gap: Gap) -> Gap:
    """Translate a recorded gap; where it concerns all that a collector writes, name the collector."""
    why = as_recorded(gap.why)
    if gap.table == "*" and source not in ("agent", "session"):
        why = text("{collector}: {why}", collector=source, why=why)
    return replace(gap, why=why)
