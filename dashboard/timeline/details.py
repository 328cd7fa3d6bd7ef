"""Facts of one event, a selection or a search: the texts and tables beside the picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankscope.analysis.model.parts import BLOCKED, PARTS
from rankscope.analysis.report.labels import part_label
from rankscope.analysis.text.message import spoken, text
from rankscope.analysis.text.phrases import named
from rankscope.analysis.text.units import duration, percent
from rankscope.dashboard.timeline.lod import Ints, event_at, tally
from rankscope.dashboard.timeline.scene import KINDS, Scene, Table

__all__ = ["Matches", "describe", "find", "matches", "shown_name", "spent"]

_DERIVED = "phases"  # made of the rows of the other tables
_NO_EDGES = np.zeros(0, np.int64), np.zeros(0, np.int64)
_LONGEST = 50  # matches of a search that are listed
_NAMES = 30  # rows of the table of a selection
_TABLE_TITLES = {
    "phases": text("main threads"),
    "ops": text("operations"),
    "kernels": text("device"),
    "collectives": text("communication"),
    "regions": text("regions"),
}
_WORDS = {
    "step": text("step"),
    "group": text("group"),
    "seq": text("number in the group"),
    "peer": text("peer"),
    "tag": text("tag"),
    "dtype": text("type"),
    "stream": text("stream"),
    "device": text("device"),
    "thread": text("thread"),
    "stage": text("stage"),
    "replica": text("replica"),
    "microbatch": text("microbatch"),
    "unmatched": text("not matched"),
}
_BRIEF = ("what", "duration", "step", "size", "group", "waited for peers", "last to arrive", "not matched")


def shown_name(table: str, name: str) -> str:
    """Return an event's name; a phase that has none of its own is called like its part of the step."""
    return part_label(name) if table == _DERIVED and name in PARTS else name


def describe(scene: Scene, lane: int, t: int, slack: int) -> dict[str, Any] | None:
    """Return the event of this lane at this time, its facts in words and where its peers are; None: nothing there."""
    if not 0 <= lane < len(scene.lanes):
        return None
    found = event_at(scene.lanes[lane].row, t, slack)
    return None if found is None else _described(scene, scene.lanes[lane].table, found.source)


def _described(scene: Scene, name: str, source: int) -> dict[str, Any]:
    table = scene.tables[name]
    rank, start, end = table.rank(source), int(table.start[source]), int(table.end[source])
    kind = KINDS[table.kind[source]]
    what = text("communication") if name == "collectives" else kind.label
    facts = [[text("what"), what], [text("duration"), _exact(end - start)], [text("start"), f"{start / 1e9:.6f} s"]]
    if table.fact("open", source):
        facts[1] = [text("duration"), text("its end was not seen")]
    facts += [
        [word, str(table.fact(fact, source))] for fact, word in _WORDS.items() if _says_something(table, fact, source)
    ]
    size, moved, wait, transfer, spread = (
        table.fact(fact, source) for fact in ("size_bytes", "bytes", "wait_ns", "transfer_ns", "arrival_spread_ns")
    )
    facts += [[text("size"), _size(known)] for known in (size, moved) if isinstance(known, int)]
    if isinstance(wait, int) and isinstance(transfer, int):
        facts += [[text("waited for peers"), _exact(wait)], [text("transfer"), _exact(transfer)]]
    if isinstance(spread, int):
        facts.append([text("first to last arrival"), _exact(spread)])
    operation = source if name == "collectives" else None
    if name == "phases" and kind.key in BLOCKED:
        operation = _operation_of(scene, rank, start, end)
    peers = [] if operation is None else _peers(scene, operation)
    last = [peer["rank"] for peer in peers if peer["last"]]
    if last:
        facts.append([text("last to arrive"), named("rank", last)])
    return {
        "name": shown_name(name, table.names[table.name[source]]),
        "rank": rank,
        "facts": facts,
        "brief": [fact for fact in facts if fact[0] in _BRIEF],
        "start": start,
        "end": end,
        "lane": int(table.lane[source]),
        "table": name,
        "source": source,
        "peers": peers,
    }


def _says_something(table: Table, fact: str, source: int) -> bool:
    value = table.fact(fact, source)
    if value is None or value in ("", "unknown"):
        return False
    if fact in ("peer", "tag"):
        peer = table.fact("peer", source)
        return isinstance(peer, int) and peer >= 0
    return fact != "thread" or value != 0


def _operation_of(scene: Scene, rank: int, start: int, end: int) -> int | None:
    """Return the row of the rank's matched operation that shares most time with [start, end)."""
    table = scene.tables.get("collectives")
    if table is None or "instance_id" not in table.facts:
        return None
    mine = table.rows_of(rank)
    shared = np.minimum(table.end[mine], end) - np.maximum(table.start[mine], start)
    shared[~table.known("instance_id", mine)] = 0
    best = int(shared.argmax()) if len(shared) else 0
    return mine.start + best if len(shared) and shared[best] > 0 else None


def _peers(scene: Scene, operation: int) -> list[dict[str, Any]]:
    """One operation as all its ranks saw it, by arrival."""
    table = scene.tables["collectives"]
    instance = table.fact("instance_id", operation)
    if instance is None:
        return []
    peers = []
    for source in np.flatnonzero(table.facts["instance_id"] == instance).tolist():
        rank, wait = table.rank(source), table.fact("wait_ns", source)
        peers.append(
            {
                "rank": rank,
                "node": scene.nodes.get(rank, 0),
                "lane": int(table.lane[source]),
                "start": int(table.start[source]),
                "end": int(table.end[source]),
                "wait": wait,
                "waited": duration(wait) if isinstance(wait, int) else text("unknown"),
                "last": bool(table.fact("is_last", source)),
            }
        )
    return sorted(peers, key=lambda peer: (peer["start"], peer["rank"]))


def spent(scene: Scene, lanes: Iterable[int], t0: int, t1: int) -> list[dict[str, Any]]:
    """Return the time in [t0, t1) of these lanes by kind and by name, one entry per table; longest first."""
    by_table: dict[str, list[int]] = {}
    for lane in lanes:
        if 0 <= lane < len(scene.lanes):
            by_table.setdefault(scene.lanes[lane].table, []).append(lane)
    return [_spent(scene, name, of_table, t0, t1) for name, of_table in by_table.items()]


def _spent(scene: Scene, name: str, lanes: Sequence[int], t0: int, t1: int) -> dict[str, Any]:
    table = scene.tables[name]
    width = len(table.names)
    parts = [part for lane in lanes for part in tally(scene.lanes[lane].row, t0, t1) if len(part[1])]
    if not parts:
        return {"title": _TABLE_TITLES[name], "lanes": len(lanes), "kinds": [], "names": [], "more": 0}
    sources = np.concatenate([source for _, source, _ in parts])
    inside = np.concatenate([ns for _, _, ns in parts])
    kind = np.repeat(np.array([code for code, _, _ in parts], np.int64), [len(ns) for _, _, ns in parts])
    key, which = np.unique(kind * width + table.name[sources], return_inverse=True)
    total = np.zeros(len(key), np.int64)
    np.add.at(total, which, inside)
    longest = np.zeros(len(key), np.int64)
    np.maximum.at(longest, which, inside)
    count = np.bincount(which, minlength=len(key))
    all_ns = max(int(total.sum()), 1)
    per_kind = {int(code): int(total[key // width == code].sum()) for code in np.unique(key // width)}
    order = np.argsort(-total, kind="stable")
    return {
        "title": _TABLE_TITLES[name],
        "lanes": len(lanes),
        "kinds": [
            {"kind": code, "label": KINDS[code].label, "time": _exact(ns), "share": percent(ns / all_ns)}
            for code, ns in sorted(per_kind.items(), key=lambda item: -item[1])
        ],
        "names": [
            {
                "kind": int(key[i] // width),
                "name": shown_name(name, table.names[key[i] % width]),
                "count": int(count[i]),
                "time": duration(int(total[i])),
                "mean": duration(total[i] / count[i]),
                "longest": duration(int(longest[i])),
            }
            for i in order[:_NAMES]
        ],
        "more": max(len(key) - _NAMES, 0),
    }


@dataclass(frozen=True, slots=True)
class Matches:
    """Events whose name holds a text, by start; `table` is a position in `tables`."""

    tables: Sequence[str]
    table: Ints
    source: Ints
    start: Ints
    longest: Sequence[int]  # positions of the longest ones, the longest first


def matches(scene: Scene, wanted: str) -> Matches:
    """Every drawn event whose name or kind holds this text, whatever its case; each counts once.

    A phase of the main thread is no event of its own where it is a piece of one that has its name: a region's, say.
    """
    wanted = wanted.casefold()
    of_kind = np.array([wanted in kind.label or wanted in spoken(kind.label) for kind in KINDS], np.bool_)
    tables = list(scene.tables)
    rows = {}
    for name, table in scene.tables.items():
        named = np.array([wanted in one.casefold() for one in table.names], np.bool_)
        rows[name] = np.flatnonzero((named[table.name] | of_kind[table.kind]) & (table.lane >= 0))
    if _DERIVED in rows:
        rows[_DERIVED] = _not_within(scene, rows)
    none = np.zeros(0, np.int64)
    source = np.concatenate([*rows.values(), none]).astype(np.int64)
    table_of = np.repeat(np.arange(len(tables)), [len(found) for found in rows.values()])
    start, end = (
        np.concatenate(
            [*(getattr(scene.tables[name], edge)[found] for name, found in rows.items()), np.zeros(0, np.int64)]
        )
        for edge in ("start", "end")
    )
    order = np.lexsort((source, table_of, start))
    longest = np.argsort((start - end)[order], kind="stable")[:_LONGEST].tolist()
    return Matches(tables, table_of[order], source[order], start[order], longest)


def _not_within(scene: Scene, rows: Mapping[str, Ints]) -> Ints:
    """Return the derived rows that do not lie within another table's row of the same rank and name."""
    spans: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for name, found in rows.items():
        if name != _DERIVED:
            table = scene.tables[name]
            for row in found.tolist():
                key = table.rank(row), table.names[table.name[row]]
                spans.setdefault(key, []).append((int(table.start[row]), int(table.end[row])))
    edges = {}
    for key, of_key in spans.items():
        starts, ends = np.array(sorted(of_key), np.int64).T
        edges[key] = starts, np.maximum.accumulate(ends)
    derived = scene.tables[_DERIVED]
    kept = []
    for row in rows[_DERIVED].tolist():
        starts, ends = edges.get((derived.rank(row), derived.names[derived.name[row]]), _NO_EDGES)
        at = int(np.searchsorted(starts, derived.start[row], "right")) - 1
        if at < 0 or ends[at] < derived.end[row]:
            kept.append(row)
    return np.array(kept, np.int64)


def find(scene: Scene, found: Matches, number: int | None, after: int) -> dict[str, Any]:
    """One match, how many there are and which are the longest: that number, or the first that starts after a time."""
    count = len(found.source)
    if not count:
        return {"count": 0, "number": 0, "event": None, "longest": []}
    at = int(np.searchsorted(found.start, after, "left")) if number is None else number
    at %= count
    name = found.tables[found.table[at]]
    longest = [_listed(scene, found, one) for one in found.longest]
    return {"count": count, "number": at, "event": _described(scene, name, int(found.source[at])), "longest": longest}


def _listed(scene: Scene, found: Matches, number: int) -> dict[str, Any]:
    table, source = scene.tables[found.tables[found.table[number]]], int(found.source[number])
    lasted = duration(int(table.end[source] - table.start[source]))
    name = shown_name(found.tables[found.table[number]], table.names[table.name[source]])
    return {"number": number, "name": name, "rank": table.rank(source), "duration": lasted}


def _exact(ns: int) -> str:
    """Return a duration to the nanosecond, in the unit that suits it."""
    for unit, size in (("s", 1_000_000_000), ("ms", 1_000_000), ("µs", 1_000)):
        if abs(ns) >= size:
            return f"{ns / size:,.3f} {unit}"
    return f"{ns} ns"


def _size(size_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= size:
            return f"{size_bytes / size:,.1f} {unit}"
    return f"{size_bytes} bytes"
