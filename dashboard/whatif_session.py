"""Predict what fixes save: a run made ready to be replayed once, and the fixes that it allows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import polars as pl

from rankscope.analysis.metrics.links import judged_links
from rankscope.analysis.replay.critical_path import critical_path
from rankscope.analysis.replay.fixes import Fix
from rankscope.analysis.replay.protocol import Gain, Replay, Unreplayable
from rankscope.analysis.replay.whatif import rerun
from rankscope.analysis.text.message import Text, text
from rankscope.dashboard.run import Run
from rankscope.errors import BadFix, NotReplayable

__all__ = ["TriedFix", "fixes", "gain", "path", "replayable"]

_PATIENCE_S = 4.0  # for trying single fixes; those that findings name come first
_MANY = ("node", "stage", "link")
_OF_ONE = {
    "rank": text("rank {number} as fast as the others"),
    "node": text("node {number} as fast as the others"),
    "stage": text("stage {number} as fast as the others"),
    "link": text("the network of node {number} as fast as the others'"),
    "prefetch": text("prefetch depth {number}"),
}
_WHOLE = {
    "op:unknown=0": text("operations of unknown kind move their bytes in no time"),
    "balance": text("work shared out evenly over the ranks"),
    "gc": text("no garbage collection"),
    "input": text("no waiting for input"),
    "compile": text("no compilation"),
    "checkpoint": text("checkpoints block no rank"),
    "host": text("the host never delays the device"),
    "reshard:off": text("no resharding after forward"),
}


@dataclass(frozen=True, slots=True)
class TriedFix:
    """One fix, and what it alone would bring."""

    key: str  # as `rankscope whatif --fix` takes it
    text: str
    gain: Gain


@lru_cache(maxsize=4)
def replayable(run: Run) -> Replay | Unreplayable:
    """Return the run ready to be replayed, or why nothing can be predicted."""
    addresses = {node: launch.get("addresses", ()) for node, launch in run.trace.run.items()}
    timeline = run.timeline
    try:
        return rerun(timeline, judged_links(timeline.counters, timeline.steps, addresses))
    except NotReplayable as reason:
        return Unreplayable(reason.args[0])


@lru_cache(maxsize=4)
def fixes(run: Run) -> tuple[list[TriedFix], int]:
    """Single fixes, those that bring most first, and how many were not tried for lack of time."""
    ready = replayable(run)
    if isinstance(ready, Unreplayable):
        return [], 0
    deadline = time.monotonic() + _PATIENCE_S
    keys = list(dict.fromkeys(_keys(run, ready)))
    tried = []
    for key in keys:
        if time.monotonic() > deadline:
            break
        try:
            tried.append(TriedFix(key, _text(key), ready.gain(key)))
        except BadFix:  # a finding may name what cannot be replayed
            keys = [other for other in keys if other != key]
    tried.sort(key=lambda fix: -fix.gain.gain_ns)
    return tried, len(keys) - len(tried)


@lru_cache(maxsize=4)
def path(run: Run) -> pl.DataFrame | None:
    """Return the critical path's own time: rank, start_ns, end_ns; None where the run cannot be replayed."""
    ready = replayable(run)
    if isinstance(ready, Unreplayable) or ready.host is None:
        return None
    return critical_path(ready.host).drop_nulls("rank").select("rank", "start_ns", "end_ns")


def gain(run: Run, keys: Sequence[str]) -> Gain | None:
    """Return the gain of these fixes together; None where nothing can be predicted."""
    ready = replayable(run)
    if isinstance(ready, Unreplayable):
        return None
    try:
        return ready.gain(*keys)
    except BadFix:
        return None


def _keys(run: Run, ready: Replay) -> Iterator[str]:
    for finding in run.report.findings:
        yield from (str(Fix.numbered("rank", rank)) for rank in finding.ranks)
        yield from (str(Fix.numbered("node", node)) for node in finding.nodes)
    possible = ready.possible()
    # Of a wide run's nodes there are more than can be tried.
    yield from sorted((key for key in possible if not _is_any_rank(key)), key=lambda key: Fix.parse(key).kind in _MANY)
    if any(map(_is_any_rank, possible)):
        yield from (str(Fix.numbered("rank", rank)) for rank in sorted(ready.places("rank")))


def _is_any_rank(key: str) -> bool:
    """Say whether it stands for each rank: `rank:0 … rank:7`."""
    fix = Fix.parse(key)
    return fix.kind == "rank" and not fix.numbers


def _text(key: str) -> str:
    fix = Fix.parse(key)
    if key in _WHOLE:
        return _WHOLE[key]
    if fix.kind in _OF_ONE and len(fix.numbers) == 1:
        return Text(_OF_ONE[fix.kind].template, {"number": fix.numbers[0]})
    if fix.kind == "op" and fix.amount == 0:
        return text("{number} moves its bytes in no time", number=fix.of.rpartition("=")[0])
    if fix.kind == "bucket-mb":
        return text("gradient buckets of {size} MiB", size=fix.of)
    if fix.kind == "overlap":
        group, _, op = fix.of.partition(":")
        return text("{op} overlaps compute (group: {group})", op=op, group=group)
    return key
