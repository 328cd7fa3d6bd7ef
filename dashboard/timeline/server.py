"""The routes that feed the canvas. Small questions and answers are JSON, the picture is binary (see `lod.view`)."""

from __future__ import annotations

import itertools
import json
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
from flask import Flask, Response, request

from rankscope.analysis.model.finding import Report
from rankscope.analysis.report.view import facts_of
from rankscope.analysis.text.message import spoken
from rankscope.dashboard.timeline import details, lod
from rankscope.dashboard.timeline.counter_lanes import CounterLane, packed, said_at
from rankscope.dashboard.timeline.lod import Indices, Row
from rankscope.dashboard.timeline.scene import KINDS, Scene, spoken_title

__all__ = ["ROUTES", "packed_view", "register_routes", "view"]

ROUTES = "/timeline-data"
_MOST_PIXELS, _MOST_LEVELS = 8192, 128
_SEARCHES = 8
_PATH_PIECES = 3_000
_MOST_BYTES, _COARSEST = 100_000, 4


class _Searches:
    """The last search."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._searches: OrderedDict[tuple[int, str], details.Matches] = OrderedDict()

    def matches(self, scene: Scene, text: str) -> details.Matches:
        key = id(scene), text
        with self._lock:
            if key not in self._searches:
                self._searches[key] = details.matches(scene, text)
                while len(self._searches) > _SEARCHES:
                    self._searches.popitem(last=False)
            return self._searches[key]


class _BadRequest(Exception):  # noqa: N818
    """The query is invalid; the message says why."""


def register_routes(
    server: Flask,
    scene: Callable[[str], Scene | None],
    report: Callable[[str], Report | None],
    critical_path: Callable[[str], pl.DataFrame | None],
    counters: Callable[[str], Sequence[CounterLane] | None],
) -> None:
    """Add routes below `/timeline-data/`: each takes one JSON object that names the `run`."""
    searches = _Searches()

    def route(name: str, answer: Callable[[dict[str, Any], Scene], Any]) -> None:
        def handle() -> Response:
            asked = request.get_json(silent=True)
            if not isinstance(asked, dict):
                return _json({"error": "the question is not a JSON object"}, 400)
            try:
                made = scene(str(asked.get("run", "")))
            except KeyError as missing:
                return _json({"error": f"there is no run {missing}"}, 404)
            if made is None:
                return _json({"waiting": True}, 202)
            try:
                said = answer(asked, made)
            except _BadRequest as bad:
                return _json({"error": str(bad)}, 400)
            return _picture(said) if isinstance(said, bytes) else _json(spoken(said))

        server.add_url_rule(f"{ROUTES}/{name}", f"timeline_{name}", handle, methods=["POST"])

    route("scene", lambda _, scene: _scene(scene))
    route("marks", lambda asked, scene: _marks(report(str(asked.get("run", ""))), scene))
    route("view", lambda asked, scene: packed_view(asked, scene))
    route("at", lambda asked, scene: details.describe(scene, *_ints(asked, "lane", "t", "slack")))
    route("spent", lambda asked, scene: details.spent(scene, _lanes(asked), *_ints(asked, "t0", "t1")))
    route("find", lambda asked, scene: _find(asked, scene, searches))
    route("path", lambda asked, scene: _path(asked, scene, critical_path(str(asked.get("run", "")))))
    route("counters", lambda asked, _: _counters(counters(str(asked.get("run", "")))))
    route("readings", lambda asked, scene: _readings(asked, scene, counters(str(asked.get("run", ""))) or ()))
    route("reading", lambda asked, scene: _reading(asked, scene, counters(str(asked.get("run", ""))) or ()))


def _scene(scene: Scene) -> dict[str, Any]:
    """Everything but the events. Times on the run's clock are texts: they are beyond what JavaScript counts exactly."""
    return {
        "origin": str(scene.origin_ns),
        "end": scene.end,
        "kinds": [[spoken(kind.label), kind.colour] for kind in KINDS],
        "present": scene.lanes.kinds(),
        "groupings": [
            [spoken_title(g.title), [[spoken_title(title), list(ranks)] for title, ranks in g.groups.items()]]
            for g in scene.groupings
        ],
        "tracks": [
            [rank, [[spoken_title(track.title), list(track.lanes), track.hidden] for track in tracks]]
            for rank, tracks in scene.tracks.items()
        ],
        "nodes": [[rank, node] for rank, node in scene.nodes.items()],
        "clocks": [[node, error_ns] for node, error_ns in scene.clocks.items()],
        "steps": scene.steps,
        "judged": scene.judged,
    }


def _marks(report: Report | None, scene: Scene) -> dict[str, Any]:
    """Return the findings and their evidence, `finding` is a position.

    `waiting` while the run is still being analyzed.
    """
    if report is None:
        return {"waiting": True}
    marks = [
        {
            "finding": number,
            "severity": finding.severity,
            "note": evidence.note,
            "rank": evidence.rank,
            "t0": evidence.start_ns - scene.origin_ns,
            "t1": evidence.end_ns - scene.origin_ns,
        }
        for number, finding in enumerate(report.findings)
        for evidence in finding.evidence
        if evidence.steps is None
    ]
    findings = [
        {
            "title": finding.title,
            "facts": [[fact.name, fact.value] for fact in facts_of(report, finding)],
        }
        for finding in report.findings
    ]
    return {"marks": marks, "findings": findings}


def packed_view(asked: dict[str, Any], scene: Scene) -> bytes:
    """Return the view as it goes over the wire, of no more than 100 kB: where it would be more, with fewer bins."""
    for coarser in itertools.count():
        packed = _gzip(view(asked, scene, coarser))
        if len(packed) <= _MOST_BYTES or coarser == _COARSEST:
            break
    return packed


def view(asked: dict[str, Any], scene: Scene, coarser: int = 0) -> bytes:
    """Return the picture of a question.

    `t0`, `t1`, `pixels`, `levels`, and for each drawn lane the `lanes` behind it.
    """
    t0, t1, pixels, levels = _ints(asked, "t0", "t1", "pixels", "levels")
    if not (t0 < t1 and 1 <= pixels <= _MOST_PIXELS):
        raise _BadRequest(f"no picture of {t0} to {t1} ns on {pixels} pixels")
    levels = min(max(levels, 1), _MOST_LEVELS)
    wanted = asked.get("lanes")
    if not isinstance(wanted, list) or not all(isinstance(of_one, list) for of_one in wanted):
        raise _BadRequest("lanes is no list of lists")
    lanes = [[_row(scene, lane) for lane in of_one] for of_one in wanted]
    owners = [scene.lanes[of_one[0]].table if of_one else "" for of_one in wanted]

    def names(lane: int, sources: Indices) -> Sequence[str]:
        table = scene.tables.get(owners[lane])
        if table is None:
            return []
        return [details.shown_name(owners[lane], table.names[code]) for code in table.name[sources]]

    return lod.view(lanes, t0, t1, pixels, levels, names, coarser)


def _find(asked: dict[str, Any], scene: Scene, searches: _Searches) -> dict[str, Any]:
    text = str(asked.get("text", "")).strip()
    if not text:
        raise _BadRequest("there is no text to look for")
    number = asked.get("number")
    (after,) = _ints(asked, "after")
    return details.find(scene, searches.matches(scene, text), number if isinstance(number, int) else None, after)


def _path(asked: dict[str, Any], scene: Scene, path: pl.DataFrame | None) -> dict[str, Any]:
    """Return the pieces of the critical path in view, the longest where there are too many."""
    if path is None:
        return {"pieces": None}
    t0, t1 = (t + scene.origin_ns for t in _ints(asked, "t0", "t1"))
    inside = path.filter((pl.col("start_ns") < t1) & (pl.col("end_ns") > t0))
    kept = inside.top_k(_PATH_PIECES, by=pl.col("end_ns") - pl.col("start_ns")).sort("start_ns")
    start, end = kept["start_ns"] - scene.origin_ns, kept["end_ns"] - scene.origin_ns
    return {"pieces": list(zip(kept["rank"].to_list(), start.to_list(), end.to_list(), strict=True))}


def _counters(lanes: Sequence[CounterLane] | None) -> dict[str, Any]:
    """Return the nodes' counters that have a lane; `waiting` while the run is still being read."""
    if lanes is None:
        return {"waiting": True}
    said = [
        {"node": one.node, "rank": one.rank, "label": one.label, "title": one.title, "top": one.top_text}
        for one in lanes
    ]
    return {"lanes": said}


def _readings(asked: dict[str, Any], scene: Scene, lanes: Sequence[CounterLane]) -> bytes:
    """Lowest and highest of some `lanes` in each of the `pixels` from `t0` to `t1`; see `counter_lanes.columns`."""
    t0, t1, pixels = _ints(asked, "t0", "t1", "pixels")
    wanted = _lanes(asked)
    if not (t0 < t1 and 1 <= pixels <= _MOST_PIXELS and all(0 <= lane < len(lanes) for lane in wanted)):
        raise _BadRequest(f"no readings of counters {wanted} from {t0} to {t1} ns on {pixels} pixels")
    return _gzip(packed([lanes[lane] for lane in wanted], t0 + scene.origin_ns, t1 + scene.origin_ns, pixels))


def _reading(asked: dict[str, Any], scene: Scene, lanes: Sequence[CounterLane]) -> dict[str, Any]:
    lane, t = _ints(asked, "lane", "t")
    if not 0 <= lane < len(lanes):
        raise _BadRequest(f"there is no counter {lane}")
    return {"value": said_at(lanes[lane], t + scene.origin_ns)}


def _row(scene: Scene, lane: object) -> Row:
    if not isinstance(lane, int) or not 0 <= lane < len(scene.lanes):
        raise _BadRequest(f"there is no lane {lane}")
    return scene.lanes[lane].row


def _lanes(asked: dict[str, Any]) -> list[int]:
    lanes = asked.get("lanes")
    if not isinstance(lanes, list) or not all(isinstance(lane, int) for lane in lanes):
        raise _BadRequest("lanes is no list of numbers")
    return lanes


def _ints(asked: dict[str, Any], *names: str) -> tuple[int, ...]:
    values = [asked.get(name) for name in names]
    if not all(isinstance(value, int) and abs(value) < 2**62 for value in values):
        raise _BadRequest(f"{', '.join(names)} must be whole numbers")
    return tuple(value for value in values if isinstance(value, int))


def _json(said: object, status: int = 200) -> Response:
    return _answer(json.dumps(said, separators=(",", ":")).encode(), "application/json", status)


def _picture(packed: bytes) -> Response:
    response = _answer(packed, "application/octet-stream", 200)
    response.headers["Content-Encoding"] = "gzip"
    return response


def _answer(data: bytes, kind: str, status: int) -> Response:
    response = Response(data, status, mimetype=kind)
    response.headers["Cache-Control"] = "no-store"
    return response


def _gzip(data: bytes) -> bytes:
    # Runs only: on pictures that is smaller than a search for repeats, and faster.
    packer = zlib.compressobj(1, zlib.DEFLATED, 31, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()
