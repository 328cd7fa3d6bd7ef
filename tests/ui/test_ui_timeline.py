"""The timeline of the UI: what a view holds against counting by hand, and what the page does in a real browser."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import shutil
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import flask
import numpy as np
import polars as pl
import pytest

import record
import simulate
from rankscope.analysis.report.lane_packing import pack_rows
from rankscope.analysis.runs.fingerprint import files_fingerprint
from rankscope.analysis.runs.trace import Trace
from rankscope.analysis.text.units import duration
from rankscope.analysis.timeline.build import Timeline, build_timeline
from rankscope.dashboard.timeline import counter_lanes, details, lane_cache, lanes, lod, scene, server
from rankscope.errors import BadInput
from support.browser import BROWSER, FLAGS


def unpack(data: bytes) -> tuple[dict, dict[str, np.ndarray], dict[int, dict[int, np.ndarray]]]:
    """A view's header, its rectangles, and lane -> kind -> heights, as the browser reads them."""
    size = int.from_bytes(data[:4], "little")
    head = json.loads(data[4 : 4 + size])
    at, n, rects = 4 + size, head["rects"], {}
    for name, dtype in (("start", "<u4"), ("length", "<u4"), ("name", "<u2"), ("lane", "<u2"), ("kind", "u1")):
        size = np.dtype(dtype).itemsize
        rects[name] = np.frombuffer(data, "u1", n * size, at).reshape(size, n).T.copy().view(dtype).ravel()
        at += n * size
    rects["start"] = np.cumsum(rects["start"], dtype=np.uint32)
    rasters: dict[int, dict[int, np.ndarray]] = {}
    for lane, kinds, _ in head["rasters"]:
        for kind in kinds:
            rasters.setdefault(lane, {})[kind] = np.frombuffer(data, "u1", head["bins"], at)
            at += head["bins"]
    assert at == len(data)
    return head, rects, rasters


def row_of(*events: tuple[int, int, int]) -> lod.Row:
    """(kind, start, end) each; the source is the position."""
    strips = []
    for kind in sorted({kind for kind, _, _ in events}):
        of_kind = [(start, end, i) for i, (k, start, end) in enumerate(events) if k == kind]
        start, end, source = (np.array(column, np.int64) for column in zip(*of_kind, strict=True))
        strips.append(lod.strip(kind, start, end, source))
    return tuple(strips)


def names(lane: int, sources: np.ndarray) -> list[str]:
    return [f"{lane}:{source}" for source in sources]


def random_row(seed: int, count: int = 400, kinds: int = 5) -> tuple[lod.Row, list[tuple[int, int, int]]]:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, 10_000, 2 * count))
    events = [(int(rng.integers(kinds)), int(a), int(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    return row_of(*events), events


@pytest.mark.parametrize("seed", range(5))
def test_what_a_kind_covers_of_a_pixel_is_exact(seed):
    row, events = random_row(seed)
    edges = np.linspace(-500, 10_500, 138).astype(np.int64)
    covered, present = lod.occupancy(row, edges)
    for i, strip in enumerate(row):
        for pixel, (a, b) in enumerate(itertools.pairwise(edges)):
            own = [(start, end) for kind, start, end in events if kind == strip.kind]
            assert covered[i, pixel] == sum(max(0, min(end, b) - max(start, a)) for start, end in own)
            instants = any(start == end and a <= start < b for start, end in own)
            assert present[i, pixel] == (covered[i, pixel] > 0 or instants)


def test_no_kind_is_hidden_by_another_and_none_is_higher_than_the_lane():
    """Nine kinds of 1 ns beside one of 991 ns, in a pixel of 1000 ns and a lane of 12: 1 each, and 3 for the large."""
    covered = np.array([[991], *[[1]] * 9], np.int64)
    tall = lod.heights(covered, covered > 0, np.array([1000.0]), 12)
    assert tall[:, 0].tolist() == [3, *[1] * 9]


def test_rounding_leaves_no_gap_in_a_busy_pixel():
    """Five kinds of a fifth each in a lane of 12 would be 2 high each: the first gets what is left."""
    covered = np.full((5, 1), 200, np.int64)
    tall = lod.heights(covered, covered > 0, np.array([1000.0]), 12)
    assert tall[:, 0].tolist() == [4, 2, 2, 2, 2]


def test_an_event_without_duration_is_seen():
    _, _, rasters = unpack(lod.view([[row_of((3, 50, 50))]], 0, 100, 10, 12, names))
    assert rasters[0][3].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_wide_events_are_rectangles_and_narrow_ones_heights():
    """Pixels of 10 ns: 40 ns are a rectangle, 5 ns are half of a pixel's height."""
    row = row_of((0, 10, 50), (1, 60, 65))
    head, rects, rasters = unpack(lod.view([[row], [row_of((2, 0, 200))]], 0, 100, 10, 12, names))
    assert head["events"] == 3
    assert [head["names"][i] for i in rects["name"]] == ["0:0", "1:0"]
    assert rects["start"].tolist() == [10, 0]
    assert rects["length"].tolist() == [40, 100]  # cut at the end of the view
    assert list(rasters) == [0]  # all of the second lane is rectangles
    assert rasters[0][1].tolist() == [0, 0, 0, 0, 0, 0, 6, 0, 0, 0]
    assert rasters[0][0].tolist() == [0, 12, 12, 12, 12, 0, 0, 0, 0, 0]


def test_a_lane_of_several_rows_is_their_mean():
    _, rects, rasters = unpack(lod.view([[row_of((0, 0, 100)), row_of((1, 0, 50))]], 0, 100, 2, 12, names))
    assert not len(rects["start"])
    assert rasters[0][0].tolist() == [6, 6]
    assert rasters[0][1].tolist() == [6, 0]


def test_a_view_stays_small_however_many_events_it_holds():
    start = np.arange(1_000_000, dtype=np.int64) * 100
    row = (lod.strip(0, start, start + 60, np.arange(len(start))),)
    data = lod.view([[row]], 0, 100_000_000, 1500, 12, names)
    head, _, rasters = unpack(data)
    assert head["events"] == 1_000_000
    assert len(data) < 2_000
    assert set(rasters[0][0].tolist()) == {7}  # 60 % of 12


def test_events_that_overlap_lie_in_rows_of_their_own_and_children_below_their_parents():
    events = [(0, 100), (10, 40), (20, 30), (50, 60), (100, 130), (110, 150), (135, 140)]
    start, end = (np.array(column, np.int64) for column in zip(*events, strict=True))
    assert pack_rows(start, end, 9).tolist() == [0, 1, 2, 1, 0, 1, 0]
    assert pack_rows(start, end, 1).tolist() == [0, 1, 1, 1, 0, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_those_of_first_fit(seed):
    rng = np.random.default_rng(seed)
    start = np.sort(rng.integers(0, 3_000, 500))
    end = start + rng.integers(0, 40, 500)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    free_from: list[int] = []
    expected = []
    for s, e in zip(start, end, strict=True):
        row = next((i for i, free in enumerate(free_from) if free <= s), len(free_from))
        free_from[row : row + 1] = [int(e)]
        expected.append(row)
    assert pack_rows(start, end, 99).tolist() == expected


def test_the_event_under_the_pointer():
    row = row_of((0, 10, 20), (1, 20, 22), (0, 90, 95))
    assert lod.event_at(row, 19, 0) == lod.Event(0, 0, 10, 20)
    assert lod.event_at(row, 20, 0) == lod.Event(1, 1, 20, 22)
    assert lod.event_at(row, 50, 5) is None
    assert lod.event_at(row, 87, 5) == lod.Event(0, 2, 90, 95)


def test_waiting_and_transfer_of_an_operation_are_drawn_apart_and_an_open_one_lasts_to_the_end():
    """Rank 0 waits 60 of 100 ns; rank 1's operation has no end, and the last thing that the run shows ends at 500.

    Of rank 2's second only the duration is known, and when it was called: from 20 to 30. So its first, called from 0 to
    10, of which that is not known either, was over then.
    """
    rows = {
        "rank": [0, 1, 2, 2],
        "start_ns": [1_000, 1_200, 1_000, 1_020],
        "issued_ns": [1_010, 1_210, 1_010, 1_030],
        "device_start_ns": [None] * 4,
        "end_ns": [1_100, None, None, None],
        "wait_ns": [60, None, None, 30],
        "transfer_ns": [40, None, None, 40],
        "group": ["dp", None, "dp", "dp"],
        "group_id": [7, 8, 7, 7],
        "op": ["allreduce", "allgather", "allreduce", "allreduce"],
    }
    types = {"device_start_ns": pl.Int64, "wait_ns": pl.Int64, "rank": pl.Int32}
    region = {"rank": [0], "start_ns": [1_400], "end_ns": [1_500], "kind": ["forward"], "name": [None], "thread": [0]}
    made = lanes.build_scene(
        timeline_of(collectives=pl.DataFrame(rows, schema_overrides=types), regions=pl.DataFrame(region))
    )
    shown = [
        (lane.rank, scene.KINDS[strip.kind].key, strip.start.tolist(), (strip.start + np.diff(strip.done)).tolist())
        for lane in made.lanes
        for strip in lane.row
    ]
    assert shown == [
        (0, "transfer", [60], [100]),
        (0, "wait", [0], [60]),
        (1, "unsplit", [200], [500]),
        (2, "unsplit", [0, 20], [10, 30]),
        (0, "forward", [400], [500]),
    ]
    assert [track.title for track in made.tracks[0]] == ["group dp", "regions"]


ONE_PHASE = {"rank": [0], "part": ["compute"], "label": ["a"], "start_ns": [0], "end_ns": [100]}


def test_a_selection_counts_only_what_lies_inside():
    phases = {
        "rank": [0, 0, 0],
        "part": ["compute", "wait", "compute"],
        "label": ["forward", "allreduce", "backward"],
        "start_ns": [0, 100, 150],
        "end_ns": [100, 150, 400],
    }
    made = lanes.build_scene(timeline_of(phases=pl.DataFrame(phases)))
    (table,) = details.spent(made, [0], 50, 200)
    assert [(row["label"], row["time"], row["share"]) for row in table["kinds"]] == [
        ("compute", "100 ns", "66.7 %"),
        ("waiting for peers", "50 ns", "33.3 %"),
    ]
    assert {row["name"]: row["count"] for row in table["names"]} == {"forward": 1, "backward": 1, "allreduce": 1}


def test_the_first_view_is_of_the_judged_steps():
    steps = {"rank": [0, 0, 0, 1, 1, 1], "step": [0, 1, 2] * 2, "judged": [False, True, True] * 2}
    at = {"start_ns": [0, 50, 60, 0, 49, 60], "end_ns": [50, 60, 70, 49, 60, 72]}
    made = lanes.build_scene(timeline_of(steps=pl.DataFrame(steps | at), phases=pl.DataFrame(ONE_PHASE)))
    assert (made.judged, made.end) == ((49, 72), 100)


def test_times_far_beyond_what_a_float_counts_stay_exact():
    """Profilers write unix time: 1.7e18 ns. Two phases of 3 ns each."""
    phases = {"rank": [0, 0], "part": ["compute"] * 2, "label": ["a", "b"]}
    at = {"start_ns": [1_700_000_000_000_000_001, 1_700_000_000_000_000_004]}
    frame = pl.DataFrame(phases | at | {"end_ns": [t + 3 for t in at["start_ns"]]})
    made = lanes.build_scene(timeline_of(phases=frame))
    assert made.origin_ns == 1_700_000_000_000_000_001
    assert made.end == 6
    assert details.describe(made, 0, 3, 0)["name"] == "b"


def client(timelines: dict[str, Timeline | None]) -> Any:
    """Asks the routes about these runs; `ask(name, question)` gives status and answer."""
    app = flask.Flask("test")
    scenes = {key: timeline and lanes.build_scene(timeline) for key, timeline in timelines.items()}
    server.register_routes(app, scenes.__getitem__, lambda run: None, lambda run: None, lambda run: None)

    def ask(name: str, question: object) -> tuple[int, Any]:
        answer = app.test_client().post(f"{server.ROUTES}/{name}", json=question)
        return answer.status_code, answer.get_json()

    return ask


def test_an_empty_run_and_one_that_is_still_read_are_distinguished():
    ask = client({"": timeline_of(), "2": None})
    status, empty = ask("scene", {"run": ""})
    assert (status, empty["present"], empty["tracks"]) == (200, [], [])
    assert ask("scene", {"run": "2"}) == (202, {"waiting": True})
    assert ask("scene", {"run": "3"}) == (404, {"error": "there is no run '3'"})


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("view", []),
        ("view", {"t0": 5, "t1": 5, "pixels": 10, "levels": 8, "lanes": []}),
        ("view", {"t0": 0, "t1": 5, "pixels": 10**9, "levels": 8, "lanes": []}),
        ("view", {"t0": 0, "t1": 5, "pixels": 10, "levels": 8, "lanes": [[7]]}),
        ("view", {"t0": 0, "t1": 5, "pixels": 10, "levels": 8, "lanes": "all"}),
        ("at", {"lane": "0", "t": 0, "slack": 0}),
        ("spent", {"t0": 0, "t1": None, "lanes": []}),
        ("find", {"text": " ", "after": 0}),
    ],
)
def test_a_question_without_sense_is_refused_in_one_line(name, question):
    status, answer = client({"": timeline_of()})(name, question)
    assert status == 400
    assert "\n" not in answer["error"]


def timeline_of(**frames: pl.DataFrame) -> Timeline:
    """A timeline that holds these frames only."""
    ranks = sorted({rank for frame in frames.values() for rank in frame["rank"]})
    known = {
        "ranks": pl.DataFrame({"rank": ranks, "node": 0, "hostname": "here"}),
        "groups": pl.DataFrame(schema={"name": pl.String, "role": pl.String, "members": pl.String}),
        "ops": pl.DataFrame(schema={"rank": pl.Int64, "stage": pl.Int32}),
        "regions": pl.DataFrame(schema={"rank": pl.Int64, "stage": pl.Int32}),
        "steps": pl.DataFrame(
            schema=dict.fromkeys(("rank", "step", "start_ns", "end_ns"), pl.Int64) | {"judged": pl.Boolean}
        ),
    }
    if "regions" in frames:
        frames["regions"] = frames["regions"].with_columns(stage=pl.lit(None, pl.Int32))
    rest = {field: pl.DataFrame() for field in Timeline.__dataclass_fields__}
    values = {"clocks": [], "gaps": [], "comparable": True, "matched_fraction": None}
    return Timeline(**(rest | known | frames | values))


# ---------------------------------------------------------------- many events


def many_phases(ranks: int = 2, each: int = 20_000) -> Timeline:
    """Phases of 600 ns every 1000 ns, of which every hundredth is input, each rank 100 ns after the one before."""
    start = np.concatenate([np.arange(each, dtype=np.int64) * 1000 + 100 * rank for rank in range(ranks)])
    part = np.where(np.arange(ranks * each) % 100 == 0, "input", "compute")
    phases = {"rank": np.repeat(np.arange(ranks), each), "part": part, "start_ns": start, "end_ns": start + 600}
    return timeline_of(phases=pl.DataFrame(phases).with_columns(label=pl.lit("work"), step=pl.lit(3)))


def test_samples_move_edges_by_an_eighth_of_a_pixel_at_most_and_lose_nothing():
    """Random events, some without duration: each pixel is exact for edges within 1/8 of it, and so is the sum."""
    row, events = random_row(3, count=5_000, kinds=3)
    end = max(end for _, _, end in events)
    bin_ns, _, samples = lod.sample(row, end)
    row = tuple(replace(strip, samples=own) for strip, own in zip(row, samples, strict=True))
    edges = np.linspace(-200, end + 200, 41).astype(np.int64)
    covered, present = lod.sampled(row, edges)
    width = np.diff(edges)[0]
    assert 4 * bin_ns <= width
    moved = (edges + bin_ns // 2) // bin_ns * bin_ns
    assert abs(moved - edges).max() <= width / 8
    exact, there = lod.occupancy(row, moved)
    assert present.tolist() == there.tolist()
    assert covered == pytest.approx(exact * np.diff(edges) / np.diff(moved), abs=1)
    assert exact.sum() == sum(end - start for _, start, end in events)


def test_a_long_lane_looks_the_same_by_samples_as_by_its_events_and_hides_no_kind():
    """60 % of each pixel is covered, one percent of it by input: of 12 levels 7 and 1."""
    made = lanes.build_scene(many_phases(each=100_000))
    (strip, *_) = made.lanes[0].row
    assert strip.samples is not None
    _, _, rasters = unpack(server.view({"t0": 0, "t1": 10**8, "pixels": 250, "levels": 12, "lanes": [[0]]}, made))
    compute, rare = (next(i for i, kind in enumerate(scene.KINDS) if kind.key == key) for key in ("compute", "input"))
    assert set(rasters[0][compute].tolist()) == {7}
    assert set(rasters[0][rare].tolist()) == {1}


def test_no_view_weighs_more_than_100_kb():
    """64 lanes of six kinds at random, which do not pack: a bin is as many pixels as it takes."""
    rng = np.random.default_rng(0)
    rank = np.repeat(np.arange(64), 3_000)
    start = np.tile(np.arange(3_000) * 1_000, 64) + rng.integers(0, 400, len(rank))
    part = np.array(["compute", "wait", "transfer", "input", "optimizer", "other"])[rng.integers(0, 6, len(rank))]
    phases = {"rank": rank, "start_ns": start, "end_ns": start + rng.integers(0, 600, len(rank)), "part": part}
    made = lanes.build_scene(timeline_of(phases=pl.DataFrame(phases).with_columns(label=pl.lit("work"))))
    for pixels in (1_300, 2_300, 8_000):
        asked = {"t0": 0, "t1": made.end, "pixels": pixels, "levels": 24, "lanes": [[lane] for lane in range(64)]}
        packed = server.packed_view(asked, made)
        head, _, rasters = unpack(gzip.decompress(packed))
        assert len(packed) <= 100_000
        assert head["bins"] > 300
        assert all(len(rasters[lane]) == 6 for lane in range(64))


def test_a_large_screen_full_of_wide_events_weighs_no_more():
    """160 lanes of 300 events, each some 27 px of 8192 wide: 48,000 would have their names; the rest is heights."""
    rng = np.random.default_rng(0)
    rank, start = np.repeat(np.arange(160), 300), np.tile(np.arange(300) * 1_000, 160)
    phases = {"rank": rank, "start_ns": start, "end_ns": start + rng.integers(950, 1_000, len(rank)), "part": "compute"}
    labels = pl.Series("label", [f"region {number}" for number in rng.integers(0, 500, len(rank))])
    made = lanes.build_scene(timeline_of(phases=pl.DataFrame(phases).with_columns(labels)))
    asked = {"t0": 0, "t1": made.end, "pixels": 8_192, "levels": 12, "lanes": [[lane] for lane in range(160)]}
    packed = server.packed_view(asked, made)
    head, rects, rasters = unpack(gzip.decompress(packed))
    assert len(packed) <= 100_000
    assert head["rects"] == 9_000
    assert {*rects["lane"].tolist(), *rasters} == set(range(160))


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, in a world in which every run is a large one."""
    monkeypatch.setattr(lane_cache, "_STORED_FROM", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/node=00000.json").write_text("{}")
    (tmp_path / "phases").mkdir()
    (tmp_path / "phases/part.arrow").write_text("rows")
    return tmp_path


def answers(made: scene.Scene) -> list[object]:
    """What the page asks of a run."""
    lanes = [[lane] for lane in range(len(made.lanes))]
    views = [(0, made.end), (made.end // 3, made.end // 2)]
    pictures = [
        server.view({"t0": t0, "t1": t1, "pixels": 300, "levels": 12, "lanes": lanes}, made) for t0, t1 in views
    ]
    events = [details.describe(made, lane, made.end // 3, made.end) for lane in range(len(made.lanes))]
    found = details.matches(made, "a")
    return [pictures, events, details.spent(made, range(len(lanes)), 0, made.end), found.source.tolist(), made.tracks]


def test_stored_lanes_are_those_that_were_made(large):
    files = files_fingerprint(large)
    opened = lane_cache.build_or_store(large, files, many_phases())
    assert not opened.lanes[0].row[0].start.flags.writeable  # a file, mapped
    assert answers(lane_cache.load(large, files)) == answers(opened) == answers(lanes.build_scene(many_phases()))
    assert files_fingerprint(large) == files


def test_lanes_of_other_tables_or_torn_ones_are_not_used(large, tmp_path_factory):
    files = files_fingerprint(large)
    lane_cache.build_or_store(large, files, many_phases())
    (large / "phases/part.arrow").write_text("more rows")
    grown = files_fingerprint(large)
    assert grown != files
    assert lane_cache.load(large, grown) is None
    lane_cache.build_or_store(large, grown, many_phases(3))
    assert sorted(lane_cache.load(large, grown).tracks) == [0, 1, 2]
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(large, other, dirs_exist_ok=True, copy_function=shutil.copy)  # as new files
    assert lane_cache.load(other, files_fingerprint(other)) is None
    values = large / lane_cache.FOLDER / "event.start"
    values.write_bytes(values.read_bytes()[:-8])
    assert lane_cache.load(large, grown) is None
    assert sorted(lane_cache.build_or_store(large, grown, many_phases(3)).tracks) == [0, 1, 2]
    assert lane_cache.load(large, grown) is not None
    (large / lane_cache.FOLDER / "lanes.json").write_text("{")
    assert lane_cache.load(large, grown) is None


def test_a_run_that_grew_while_it_was_read_is_not_stored(large):
    files = files_fingerprint(large)
    (large / "phases/part.arrow").write_text("more rows")
    made = lane_cache.build_or_store(large, files, many_phases())
    assert sorted(made.tracks) == [0, 1]
    assert sorted(path.name for path in large.iterdir()) == ["phases", "run"]


def test_where_nothing_can_be_written_lanes_stay_in_memory_with_a_warning(large, caplog):
    (large / lane_cache.FOLDER).write_text("in the way")
    made = lane_cache.build_or_store(large, files_fingerprint(large), many_phases())
    assert sorted(made.tracks) == [0, 1]
    assert "are kept in memory" in caplog.text
    assert sorted(path.name for path in large.iterdir()) == ["lanes", "phases", "run"]


# ---------------------------------------------------------------- in a browser


LABELS, RULER, LINE, BELOW_RANK = 168, 52, 18, 4  # px, as in base.js and lanes.js


@pytest.fixture(scope="module")
def run(slow_rank_1: Path) -> Path:
    return slow_rank_1


@pytest.fixture(scope="module")
def state(run: Path) -> Any:
    return state_of(run)


def state_of(run: Path) -> Any:
    from rankscope.dashboard.state import State

    held = State([run])
    held.start()
    held.wait(60)
    return held


@pytest.fixture(scope="module")
def address(state: Any, served: Any) -> Iterator[str]:
    from rankscope.dashboard.app import create_app

    with served(create_app(state)) as address:
        yield f"{address}/timeline"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield started
        started.close()


class Screen:
    """The timeline in a browser's page. Whatever the page complains about, or asks of other hosts, is kept."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.complaints = page, []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on(
            "request", lambda r: None if "//127.0.0.1:" in r.url or r.url.startswith("data:") else self._kept(r.url)
        )
        page.goto(address)
        self.settle()

    def _kept(self, url: str) -> None:
        self.complaints.append(f"asked {url}")

    def do(self, action: Callable[[], object]) -> None:
        """Do something that changes the view, and wait until it is painted and in the address."""
        painted = self.page.locator("#timeline").get_attribute("data-painted")
        action()
        self.page.wait_for_function(f"document.getElementById('timeline').dataset.painted !== '{painted}'")
        self.settle()

    def settle(self) -> None:
        """Wait until the view is painted and in the address."""
        self.page.wait_for_selector("#timeline[data-painted]:not([data-moving])")

    def window(self) -> tuple[int, int]:
        """What the address says is in view, on the run's clock."""
        start, end = self.page.evaluate("location.hash").lstrip("#").split("&")[0].split(",")
        return int(start), int(end)

    def spot(self, line: int, t_ns: float, open_above: int = 0) -> tuple[float, float]:
        """Where on the page this moment of a line is, below so many unfolded ranks; line -1 has the steps' names."""
        box = self.page.locator(".rst canvas").bounding_box()
        t0, t1 = self.window()
        across = (t_ns - t0) / (t1 - t0) * (box["width"] - LABELS)
        return box["x"] + LABELS + across, box["y"] + RULER + (line + 0.5) * LINE + open_above * BELOW_RANK

    def colour(self, x: float, y: float) -> str:
        """The canvas's colour at this place of the page."""
        found = self.page.evaluate(
            "([x, y]) => { const c = document.querySelector('.rst canvas'), b = c.getBoundingClientRect();"
            " return [...c.getContext('2d').getImageData(x - b.left, y - b.top, 1, 1).data].slice(0, 3); }",
            [round(x), round(y) + 5],  # below the names
        )
        return "#" + "".join(f"{value:02x}" for value in found)

    def pixels(self, ink: str, x: float, y: float, width: int, height: int) -> int:
        """How many of the canvas's pixels in this part of the page have this colour of the palette."""
        return self.page.evaluate(
            "([ink, x, y, w, h]) => { const c = document.querySelector('.rst canvas'), b = c.getBoundingClientRect();"
            " const hex = getComputedStyle(document.documentElement).getPropertyValue('--' + ink).trim();"
            " const wanted = parseInt(hex.slice(1), 16);"
            " const copy = new OffscreenCanvas(w, h).getContext('2d', {willReadFrequently: true});"
            " copy.drawImage(c, Math.round(b.left - x), Math.round(b.top - y));"
            " const d = copy.getImageData(0, 0, w, h).data; let n = 0;"
            " for (let i = 0; i < d.length; i += 4) n += (d[i] << 16 | d[i + 1] << 8 | d[i + 2]) === wanted;"
            " return n; }",
            [ink, round(x), round(y), width, height],
        )

    def leave(self) -> None:
        """Take the pointer off the canvas, so that what it points at is no longer drawn."""
        self.page.mouse.move(5, 5)
        self.redrawn()

    def redrawn(self) -> None:
        """Wait until what was asked for by now is drawn: a frame that had begun, and the next."""
        self.page.evaluate("() => new Promise((d) => requestAnimationFrame(() => requestAnimationFrame(() => d())))")

    def beside(self) -> str:
        return self.page.locator(".rst-side").inner_text()


@pytest.fixture
def screen(browser: Any, address: str) -> Iterator[Screen]:
    with opened(browser, address) as screen:
        yield screen


@contextmanager
def opened(browser: Any, address: str) -> Iterator[Screen]:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    shown = Screen(page, address)
    counters = page.get_by_label("counters")
    counters.wait_for()  # they come later than the lanes, and where few, below each rank
    if counters.is_checked():
        counters.press("Space")  # what stands beside it still changes: a click may miss it
    assert not counters.is_checked()
    shown.do(lambda: page.get_by_role("button", name="whole run").click())
    yield shown
    page.close()
    assert shown.complaints == []


@pytest.fixture(scope="module")
def truth(run: Path) -> Timeline:
    return build_timeline(Trace.open(run))


@pytest.mark.browser
def test_the_timeline_opens_on_the_judged_steps(screen, truth):
    screen.page.locator(".rst canvas").focus()
    screen.do(lambda: screen.page.keyboard.press("Home"))
    home = screen.window()
    judged = truth.steps.filter("judged")
    assert home == pytest.approx((judged["start_ns"].min(), judged["end_ns"].max()), abs=2)
    screen.page.goto(screen.page.url.split("#")[0])
    screen.page.reload()
    screen.settle()
    assert screen.window() == pytest.approx(home, abs=2)


@pytest.mark.long
@pytest.mark.browser
def test_zoom_and_pan_do_what_they_say_and_the_address_keeps_the_view(screen, truth):
    first = truth.phases["start_ns"].min()
    t0, t1 = screen.window()
    assert t0 <= first <= truth.phases["end_ns"].max() <= t1
    middle = (t0 + t1) // 2
    screen.page.mouse.move(*screen.spot(0, middle))
    screen.do(lambda: screen.page.mouse.wheel(0, -240))
    z0, z1 = screen.window()
    assert (z1 - z0) / (t1 - t0) == pytest.approx(math.exp(-0.48), rel=0.01)
    assert (z0 + z1) / 2 == pytest.approx(middle, abs=(t1 - t0) / 200)  # zoomed at the pointer
    screen.page.locator(".rst canvas").focus()
    screen.do(lambda: screen.page.keyboard.press("d"))
    p0, p1 = screen.window()
    assert p1 - p0 == pytest.approx(z1 - z0, rel=1e-6)
    assert (p0 - z0) / (z1 - z0) == pytest.approx(0.15, abs=0.001)
    screen.page.reload()
    screen.settle()
    assert screen.window() == pytest.approx((p0, p1), abs=2)


@pytest.mark.browser
def test_hovering_names_the_phase_and_a_click_on_an_operation_shows_all_its_ranks(screen, truth):
    screen.settle()
    phase = truth.phases.filter((pl.col("rank") == 0) & (pl.col("label") == "backward"))
    phase = phase.sort(pl.col("end_ns") - pl.col("start_ns")).row(-1, named=True)
    middle = screen.spot(0, (phase["start_ns"] + phase["end_ns"]) / 2)
    assert screen.colour(*middle) == screen.page.evaluate(
        "getComputedStyle(document.documentElement).getPropertyValue('--compute').trim()"
    )
    screen.page.mouse.move(*middle)
    tip = screen.page.locator(".rst-tip")
    tip.wait_for()
    assert "backward" in tip.inner_text()
    assert "rank 0" in tip.inner_text()
    operations = truth.collectives.with_row_index().filter((pl.col("rank") == 0) & (pl.col("wait_ns") > 0))
    operation = operations.sort("wait_ns").row(-1, named=True)
    made = lanes.build_scene(truth)
    lines = [lane for track in made.tracks[0] for lane in track.lanes]
    line = lines.index(made.tables["collectives"].lane[operation["index"]])
    screen.page.mouse.click(*screen.spot(line, operation["start_ns"] + operation["wait_ns"] / 2))
    screen.page.wait_for_function("document.querySelector('.rst-side').innerText.includes('all its ranks')")
    assert "1 ← last" in " ".join(screen.beside().split())
    assert operation["op"] in screen.beside()


@pytest.mark.browser
def test_search_counts_all_matches_and_jumps_to_each(screen, truth):
    regions = truth.regions.filter(pl.col("name").str.contains("(?i)adam"))
    named = regions.height  # the pieces of the main thread that are made of them are no events of their own
    assert named < truth.phases.filter(pl.col("label").str.contains("(?i)adam")).height + named
    status = screen.page.locator(".rst-bar [role=status]")
    screen.page.fill(".rst input", "adam")
    screen.page.wait_for_function("document.querySelector('.rst-bar [role=status]').textContent !== ''")
    assert status.inner_text() == f"1 of {named}"
    screen.page.wait_for_function("document.querySelector('.rst-side').innerText.includes('optimizer')")
    assert f"{named} matches, the longest first" in screen.beside()
    rows = screen.page.locator(".rst-found tr")
    assert rows.count() == named
    longest = regions.sort(pl.col("end_ns") - pl.col("start_ns")).row(-1, named=True)
    assert f"rank {longest['rank']}" in rows.first.inner_text()
    assert duration(longest["end_ns"] - longest["start_ns"]) in rows.first.inner_text()
    screen.page.locator(".rst canvas").focus()
    screen.page.keyboard.press("n")
    screen.page.wait_for_function(f"document.querySelector('.rst-bar [role=status]').textContent === '2 of {named}'")


@pytest.mark.browser
def test_a_selection_is_summed_up(screen, truth):
    screen.settle()
    t0, t1 = screen.window()
    screen.page.keyboard.down("Shift")
    screen.page.mouse.move(*screen.spot(0, t0 + (t1 - t0) * 0.001))
    screen.page.mouse.down()
    screen.page.mouse.move(*screen.spot(0, t0 + (t1 - t0) * 0.5))
    screen.page.mouse.move(*screen.spot(0, t0 + (t1 - t0) * 0.999))
    screen.page.mouse.up()
    screen.page.keyboard.up("Shift")
    screen.page.wait_for_function("document.querySelector('.rst-side').innerText.includes('main threads, 1 lane')")
    computed = truth.phases.filter((pl.col("rank") == 0) & (pl.col("part") == "compute"))
    own_ns = computed.select(pl.col("end_ns") - pl.col("start_ns")).sum().item()
    said = " ".join(screen.beside().split())
    found = re.search(r" compute ([\d,.]+) (m?s) ", said)
    shown_ns = float(found[1].replace(",", "")) * {"s": 1e9, "ms": 1e6}[found[2]]
    assert own_ns - 0.002 * (t1 - t0) <= shown_ns <= own_ns + 1e6  # no more is outside than the selection leaves out
    backwards = computed.filter(pl.col("label") == "backward").height
    shown = int(re.search(r" backward (\d+) ", said)[1])
    assert backwards - 2 <= shown <= backwards  # a piece at either end may lie outside the selection


def lines_of(made: scene.Scene, rank: int) -> list[int]:
    """The lanes of a rank, one per line."""
    return [lane for track in made.tracks[rank] for lane in track.lanes]


@pytest.mark.browser
def test_an_arrow_leads_from_the_late_rank_to_the_one_that_waited(screen, truth):
    """Rank 1 comes last: at that moment there is a dot on its lane and a line up to the lane of rank 0."""
    made = lanes.build_scene(truth)
    calls = truth.collectives.with_row_index()
    waited = calls.filter((pl.col("rank") == 0) & (pl.col("wait_ns") > 0)).sort("wait_ns").row(-1, named=True)
    (late,) = calls.filter((pl.col("instance_id") == waited["instance_id"]) & pl.col("is_last")).iter_rows(named=True)
    assert late["rank"] == 1
    above, below = (lines_of(made, rank) for rank in (0, 1))
    lane_of = made.tables["collectives"].lane
    from_line, to_line = len(above) + below.index(lane_of[late["index"]]), above.index(lane_of[waited["index"]])
    arrival = waited["start_ns"] + waited["wait_ns"]
    page = screen.page
    page.locator(".rst canvas").focus()
    page.mouse.click(*screen.spot(to_line, waited["start_ns"] + waited["wait_ns"] / 2))
    page.wait_for_function("document.querySelector('.rst-side').innerText.includes('all its ranks')")
    screen.do(lambda: page.keyboard.press("f"))
    screen.leave()
    dot_x, dot_y = screen.spot(from_line, late["start_ns"], open_above=1)
    tip_x, tip_y = screen.spot(to_line, arrival)
    left, width = min(dot_x, tip_x) - 4, round(abs(dot_x - tip_x)) + 9  # ends may be stamped ms late: then it slants

    def drawn() -> tuple[int, int]:
        dot = screen.pixels("accent", dot_x - 5, dot_y - 5, 11, 11)
        return dot, screen.pixels("accent", left, tip_y + LINE, width, round(dot_y - tip_y - 1.5 * LINE))

    dot, line = drawn()
    assert dot > 20
    assert line > dot_y - tip_y - 1.5 * LINE - 20
    page.keyboard.press("Escape")
    screen.redrawn()
    assert drawn() == (0, 0)


@pytest.mark.browser
def test_findings_are_marked_above_the_lanes_and_a_click_shows_the_finding(screen, state):
    finding = state.report("").findings[-1]
    evidence = finding.evidence[-1]  # nothing is drawn over it
    x, y = screen.spot(-1, evidence.start_ns)
    y += 9 - RULER + LINE / 2  # the marks are 11 px high, at the top
    screen.leave()
    assert screen.pixels(finding.severity, x + 1, y - 5, 2, 10) == 20  # a wide one bears its title after 4 px
    screen.do(lambda: screen.page.mouse.click(x + 3, y))
    assert finding.title in screen.beside()
    assert evidence.note in screen.beside()
    start, end = screen.window()
    assert start < evidence.start_ns < evidence.end_ns < end


@pytest.mark.browser
def test_two_markers_lie_on_edges_and_say_the_time_between(screen, truth):
    """Each is put 3 px inside of the longest phase of rank 0."""
    phases = truth.phases.filter(pl.col("rank") == 0).sort(pl.col("end_ns") - pl.col("start_ns"))
    start, end = phases.select("start_ns", "end_ns").row(-1)
    between = screen.page.locator(".rst-between")
    for edge, inside, said in ((start, 3, "marker B"), (end, -3, "A to B")):
        x, y = screen.spot(0, edge)
        screen.page.mouse.move(x + inside, y)
        screen.page.keyboard.press("m")
        between.filter(has_text=said).wait_for()
    value, unit = between.inner_text().removeprefix("A to B: ").split()
    measured = float(value) * {"s": 1e9, "ms": 1e6, "µs": 1e3}[unit]
    assert measured == pytest.approx(end - start, rel=1e-3)
    screen.page.wait_for_function("location.hash.includes('&marks=')")
    screen.page.keyboard.press("Escape")
    screen.page.wait_for_function("!location.hash.includes('&marks=')")
    assert between.inner_text() == ""


@pytest.mark.browser
def test_evidence_opens_beside_its_finding_also_on_a_narrow_screen(browser, address, state):
    evidence = [(finding, seen) for finding in state.report("").findings for seen in finding.evidence]
    finding, seen = evidence[0]
    rank = "" if seen.rank is None else f"&rank={seen.rank}"
    page = browser.new_page(viewport={"width": 600, "height": 800})
    shown = Screen(page, f"{address}?t0={seen.start_ns}&t1={seen.end_ns}{rank}")
    drawer = page.locator(".rst-drawer")
    drawer.get_by_role("heading", name=finding.title).wait_for()
    drawer.get_by_text(str(finding.advice)).wait_for()
    drawer.get_by_text(f"evidence 1 of {len(evidence)}").wait_for()
    page.get_by_role("button", name="next ›").click()
    drawer.get_by_text(f"evidence {min(2, len(evidence))} of").wait_for()
    page.get_by_role("button", name="hide the details", exact=True).click()
    drawer.wait_for(state="hidden")
    page.locator(".rst canvas").focus()
    page.keyboard.press("?")
    drawer.get_by_text("zoom to what is chosen").wait_for()
    page.close()
    assert shown.complaints == []


@pytest.mark.long
@pytest.mark.browser
def test_the_critical_path_underlines_the_rank_that_the_others_wait_for(browser, served, tmp_path):
    """Of a simulated job, since a real one on a busy machine may be none that can be replayed. In the analyzed steps
    the longest piece is rank 1's: a line below its lane, and none below rank 0's.
    """
    from rankscope.dashboard.app import create_app

    job = simulate.Job(parallel="ddp", ranks=2, steps=14, compute_ns=90e6)
    slow = simulate.healthy_resources(job)
    slow.slowness = slow.slowness * np.array([1.0, 1.4])
    run = record.write(simulate.run(job, slow), tmp_path / "run")
    truth, state = build_timeline(Trace.open(run)), state_of(run)
    judged = truth.steps.filter("judged")
    pieces = state.critical_path("").filter(pl.col("start_ns") >= judged["start_ns"].min())
    rank, start, end = pieces.sort(pl.col("end_ns") - pl.col("start_ns")).row(-1)
    assert rank == 1
    line = len(lines_of(lanes.build_scene(truth), 0))
    step_ns = int((judged["end_ns"] - judged["start_ns"]).max())

    def drawn(screen: Screen, at: int) -> int:
        x, y = screen.spot(at, (start + end) / 2, open_above=int(at > 0))
        return screen.pixels("text", x, y + LINE / 2 - 3, 1, 4)

    with served(create_app(state)) as address:
        with opened(browser, f"{address}/timeline") as screen:  # all analyzed steps: too many
            screen.leave()
            screen.page.get_by_text("critical path: the ranks").wait_for()
            assert drawn(screen, line) == 0
        few = f"{address}/timeline#{start - step_ns},{end + step_ns}"
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        try:
            screen = Screen(page, few)
            screen.leave()
            screen.page.get_by_text("critical path: the ranks").wait_for()
            screen.redrawn()
            assert drawn(screen, line) >= 1
            assert drawn(screen, 0) == 0
            screen.page.get_by_label("critical path", exact=True).uncheck()
            screen.redrawn()
            assert drawn(screen, line) == 0
            assert screen.complaints == []
        finally:
            page.close()


@pytest.mark.browser
def test_an_address_with_evidence_opens_its_window(browser, address, truth):
    step = truth.steps.filter((pl.col("rank") == 1) & (pl.col("step") == 5)).row(0, named=True)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    shown = Screen(page, f"{address}?t0={step['start_ns']}&t1={step['end_ns']}&rank=1")
    length = step["end_ns"] - step["start_ns"]
    assert shown.window() == pytest.approx(
        (step["start_ns"] - length / 2, step["end_ns"] + length / 2), abs=length / 50
    )
    page.close()
    assert shown.complaints == []


@pytest.mark.long
@pytest.mark.browser
def test_4096_ranks_open_folded_by_node(browser, served):
    """Every rank of 512 nodes computes for 60 ms and waits for 40, three times: each node has one line, of the mean."""
    from dash import Dash, html

    from rankscope.analysis.report.palette import LIGHT, css_variables
    from rankscope.dashboard import timeline

    ranks = np.arange(4096)
    start = np.tile([0, 60, 100, 160, 200, 260], len(ranks)) * 1_000_000
    length = np.tile([60, 40] * 3, len(ranks)) * 1_000_000
    phases = {"rank": np.repeat(ranks, 6), "part": ["compute", "wait"] * 3 * len(ranks), "label": "work"}
    made = lanes.build_scene(
        timeline_of(
            phases=pl.DataFrame(phases | {"start_ns": start, "end_ns": start + length}),
            ranks=pl.DataFrame({"rank": ranks, "node": ranks // 8, "hostname": "here"}),
        )
    )
    app = Dash("many", update_title=None)
    style = f"<link rel=icon href='data:,'><style>:root {{ {css_variables(LIGHT)} }}</style>"
    app.index_string = f"{style}{{%app_entry%}}{{%config%}}{{%scripts%}}{{%renderer%}}"
    app.layout = html.Div(timeline.layout("", "1"))
    only_lanes = types.SimpleNamespace(
        scene=lambda _: made, report=lambda _: None, critical_path=lambda _: None, counters=lambda _: None
    )
    timeline.register(app, only_lanes)
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    with served(app) as address:
        shown = Screen(page, address)
        assert page.evaluate("location.hash").endswith("lanes=&fold=all")
        for ms, ink in ((30, "compute"), (80, "wait"), (230, "compute"), (280, "wait")):
            x, y = shown.spot(0, ms * 1_000_000)
            assert shown.pixels(ink, x, y, 1, 3) == 3
        page.mouse.move(*shown.spot(0, 30_000_000))
        page.wait_for_function("document.querySelector('.rst-tip').innerText.includes('mean of 8 ranks')")
        x, y = shown.spot(0, 0)
        shown.do(lambda: page.mouse.click(x - LABELS / 2, y))
        assert not page.evaluate("location.hash").endswith("fold=all")
        page.reload()
        shown.settle()
        page.mouse.move(*shown.spot(1, 30_000_000))
        page.wait_for_function("document.querySelector('.rst-tip').innerText.includes('rank 0')")
        page.close()
    assert shown.complaints == []


@pytest.mark.browser
def test_a_run_opened_again_shows_its_lanes_although_it_is_not_judged(
    browser, served, run, truth, tmp_path, monkeypatch
):
    """Here it never is: this machine lost the memory that it had when the lanes were stored."""
    from rankscope.dashboard.app import create_app
    from rankscope.dashboard.state import State

    def too_large(_: Trace) -> Timeline:
        raise BadInput("there is not enough memory")

    monkeypatch.setattr(lane_cache, "_STORED_FROM", 1)
    again = shutil.copytree(run, tmp_path / "again")
    first = State([again])
    first.start()
    first.wait(60)
    deadline = time.monotonic() + 60
    while first.scene("") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    monkeypatch.setattr("rankscope.dashboard.state.build_timeline", too_large)
    second = State([again])
    second.start()
    second.wait(60)
    assert answers(second.scene("")) == answers(first.scene("")) == answers(lanes.build_scene(truth))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    with served(create_app(second)) as address:
        shown = Screen(page, f"{address}/timeline")
        page.get_by_text("there is not enough memory").wait_for()
        page.mouse.move(*shown.spot(0, sum(shown.window()) / 2))
        page.wait_for_function("document.querySelector('.rst-tip').innerText.includes('rank 0')")
        page.close()
    assert shown.complaints == []


# ---------------------------------------------------------------- counters


def test_a_counter_is_drawn_from_its_lowest_to_its_highest_in_each_pixel_and_holds_until_the_next_reading():
    """A gauge read as 4, 8, 2 every 10 ns and 80 ns later as 6; and a card that sends 20 bytes, then is set back."""
    readings = [("gpu", "gpu1", "power_w", t, value) for t, value in ((0, 4), (10, 8), (20, 2), (100, 6))]
    readings += [("nic", "eth0", "tx_bytes", t, value) for t, value in ((0, 0), (10, 20), (20, 5))]
    counters = pl.DataFrame(readings, ["source", "device", "name", "time_ns", "value"], orient="row")
    counters = counters.with_columns(pl.lit(0).alias("node"), pl.col("value").cast(pl.Float64))
    gpus = pl.DataFrame({"rank": [5], "node": [0], "device": ["gpu1"]})
    power, sent = counter_lanes.counter_lanes(replace(timeline_of(), counters=counters, gpus=gpus))
    assert [(one.rank, one.label, one.top_text) for one in (power, sent)] == [
        (5, "gpu: power", "8 W"),
        (None, "eth0: tx", "2 GB/s"),
    ]
    low, high = counter_lanes.columns(power, 0, 75, 5).reshape(2, 5)  # 15 ns each
    assert (low[:4] / 254 * 8).round(1).tolist() == [4, 2, 2, 2]
    assert (high[:4] / 254 * 8).round(1).tolist() == [8, 8, 2, 2]
    assert (low[4], high[4]) == (255, 255)
    said = [counter_lanes.said_at(power, t) for t in (-1, 0, 15, 49, 50, 100)]
    assert said == [None, "4 W", "8 W", "2 W", None, "6 W"]  # three intervals after it was read, it is not known
    assert [counter_lanes.said_at(sent, t) for t in (5, 15)] == ["2 GB/s", None]


@pytest.mark.long
@pytest.mark.browser
def test_counters_are_lanes_below_their_ranks_with_the_value_at_the_pointer(screen):
    page = screen.page
    box = page.locator(".rst canvas").bounding_box()
    for wanted in (False, True):  # few are shown at first, many are not
        page.get_by_label("counters").set_checked(not wanted)
        page.get_by_label("counters").set_checked(wanted)
        page.wait_for_function(f"location.hash.includes('counters={int(wanted)}')")
        page.wait_for_timeout(500)
        if not wanted:
            assert screen.pixels("line", box["x"] + LABELS, box["y"] + RULER, 600, 500) == 0
    assert screen.pixels("line", box["x"] + LABELS, box["y"] + RULER, 600, 500) > 600
    said: set[str] = set()

    def all_lanes_were_seen_at(share: float) -> bool:
        for line in range(40):
            x = box["x"] + LABELS + share * (box["width"] - LABELS)
            page.mouse.move(x, box["y"] + RULER + line * LINE / 2)
            page.wait_for_timeout(100)
            said.add(page.locator(".rst-tip").inner_text())
        busy = any(re.match(r"host: cpu busy\n([<>] )?[\d.]+ %\n", tip) for tip in said)
        return busy and any("host: cpu seconds per second" in tip for tip in said)

    # tips follow the pointer when they can, and a busy machine reads its counters late
    assert any(all_lanes_were_seen_at(share) for share in (0.3, 0.5, 0.7, 0.9, 0.3, 0.5)), said
