"""The page of kernels: how many bytes copies and fills of memory moved, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")


from rankscope.dashboard.app import create_app
from rankscope.dashboard.state import State
from support.browser import BROWSER, FLAGS, Screen
from support.kineto import copy, kernel, write

OWN = {"Host": "localhost", "Sec-Fetch-Site": "same-origin"}  # what a browser says of a request by the page itself
HTOD, FILL = "Memcpy HtoD (Pinned -> Device)", "Memset (Device)"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A trace with copies, and one without.

    Copies of 1 MB and 3 MB take 100 µs each: 4 MB in 200 µs. The third, of 1 ms, does not say how much it moved. A fill
    takes no time.
    """
    folder = tmp_path_factory.mktemp("kernels")
    copies = [copy(HTOD, 0, 100, bytes=1_000_000), copy(HTOD, 200, 100, bytes=3_000_000), copy(HTOD, 400, 1000)]
    others = [copy(FILL, 2000, 0, bytes=4096), kernel("gemm", 3000, 50)]
    paths: list[Path] = [
        write(folder / "copies" / "rank0.json", [*copies, *others]),
        write(folder / "none" / "rank0.json", others[1:]),
    ]
    state = State(paths)
    state.start()
    state.wait(60)
    return state


def test_bytes_are_summed_by_name_and_their_rate_is_that_of_the_rows_that_have_them(state: State) -> None:
    client = create_app(state).server.test_client()
    query = "SELECT+name,+count,+total_ns,+bytes,+bytes_per_s+FROM+kernels_by_name"
    got = client.get(f"/data-download?format=csv&query={query}", headers=OWN)
    assert got.get_data(as_text=True).splitlines()[1:] == [
        f"{HTOD},3,1200000,4000000,20000000000.0",
        "gemm,1,50000,,",
        f"{FILL},1,0,4096,",
    ]


def test_the_timeline_says_how_much_a_copy_moved(state: State) -> None:
    """Of 4 copies and fills one has no size; each is a phase of its device, too."""
    client = create_app(state).server.test_client()
    sizes = []
    for number in range(8):
        question = {"run": state.keys[0], "text": "mem", "after": 0, "number": number}
        event = client.post("/timeline-data/find", json=question, headers=OWN).get_json()["event"]
        sizes += [dict(event["facts"]).get("size")] if event["table"] == "kernels" else []
    assert sizes == ["1.0 MB", "3.0 MB", None, "4.1 kB"]


@pytest.fixture(scope="module")
def screen(state: State, served: Any) -> Iterator[Screen]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, served(create_app(state)) as address:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield Screen(browser.new_page(viewport={"width": 1920, "height": 800}), address)
        browser.close()


@pytest.mark.browser
def test_bytes_and_their_rate_are_columns_where_a_trace_has_any(state: State, screen: Screen) -> None:
    screen.open(f"/kernels?run={state.keys[0]}")
    screen.wait_for_text("bytes/s")
    rows = screen.page.locator(".ag-center-cols-container .ag-row")
    shown = [[rows.nth(n).locator(f"[col-id={c}]").inner_text() for c in ("bytes", "bytes_per_s")] for n in range(3)]
    assert shown == [["4.00 MB", "20.0 GB/s"], ["", ""], ["4.10 kB", ""]]
    screen.open(f"/kernels?run={state.keys[1]}")
    screen.wait_for_text("1 rows of 1 rank")
    assert screen.page.locator("[col-id=total_ns]").count()
    assert not screen.page.locator("[col-id=bytes], [col-id=bytes_per_s]").count()
    assert screen.complaints == []
