"""The timeline of the UI: what a view holds against counting by hand, and what the page does in a real browser."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from rankscope.dashboard.timeline import lod


def unpack(data: bytes) -> tuple[dict, dict[str, np.ndarray], dict[int, dict[int, np.ndarray]]]:
    """A view's header, its rectangles, and lane -> kind -> heights, as the browser reads them."""
    size = int.from_bytes(data[:4], "little")
    head = json.loads(data[4 : 4 + size])
    at, n, rects = 4 + size, head["rects"], {}
    for name, dtype in (("start", "<u4"), ("length", "<u4"), ("name", "<u2"), ("lane", "<u2"), ("kind", "u1")):
        rects[name] = np.frombuffer(data, dtype, n, at)
        at += n * np.dtype(dtype).itemsize
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
    assert lod.pack_rows(start, end, 9).tolist() == [0, 1, 2, 1, 0, 1, 0]
    assert lod.pack_rows(start, end, 1).tolist() == [0, 1, 1, 1, 0, 1, 0]


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
    assert lod.pack_rows(start, end, 99).tolist() == expected


def test_the_event_under_the_pointer():
    row = row_of((0, 10, 20), (1, 20, 22), (0, 90, 95))
    assert lod.event_at(row, 19, 0) == lod.Event(0, 0, 10, 20)
    assert lod.event_at(row, 20, 0) == lod.Event(1, 1, 20, 22)
    assert lod.event_at(row, 50, 5) is None
    assert lod.event_at(row, 87, 5) == lod.Event(0, 2, 90, 95)
