"""No page is wider than its window, on narrow and wide screens, in light and dark; links open what they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")


import record
import simulate
from rankscope.analysis.report import html
from rankscope.dashboard.app import create_app
from rankscope.dashboard.page_kit import all_pages
from rankscope.dashboard.state import State
from support.browser import BROWSER, FLAGS, Screen
from support.flight_dumps import dump, write_dumps
from support.paths import DATA

PUBLIC = ("flight_recorder/nvrx/lock_gil_1st", "kineto/nanogpt-normuon", "ops/bytedance-ar", "pipeline/primus-pp8")
WIDTHS = (600, 900, 1440)
BOXES = "main .card, main .verdict, main .finding, main figure, main h1, main p"
WIDER = """(boxes) => {
  const over = [...document.querySelectorAll(boxes)].map((box) => [`${box.className || box.tagName}`, box]);
  return [["the page", document.documentElement], ...over]
    .filter(([, box]) => box.scrollWidth > box.clientWidth + 1 && getComputedStyle(box).display !== "inline")
    .map(([name, box]) => `${name}: ${box.scrollWidth} > ${box.clientWidth} "${box.textContent.slice(0, 60)}"`);
}"""
PATIENCE_MS = 3_000  # charts follow the window a moment later


@pytest.fixture(scope="module")
def state(slow_rank_1: Path, tmp_path_factory: pytest.TempPathFactory) -> State:
    """A recorded run, every second of 64 ranks slow, a job that hangs, and public traces where they are there."""
    folder = tmp_path_factory.mktemp("layout")
    job = simulate.Job(parallel="tp", ranks=64, steps=20, compute_ns=90e6)
    slow = simulate.healthy_resources(job)
    slow.slowness = slow.slowness * np.where(np.arange(64) % 2 == 1, 1.4, 1.0)
    odd = record.write(simulate.run(job, slow), folder / "odd")
    (folder / "hung").mkdir()
    hung = write_dumps(folder / "hung", dump(0), dump(1, enqueued=4, entries=False))
    state = State([slow_rank_1, odd, hung, *(path for name in PUBLIC if (path := DATA / name).exists())])
    state.start()
    state.wait(300)
    return state


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield started
        started.close()


def _wider(page: Any) -> list[str]:
    """What is wider than its place, by width of the window and color scheme."""
    from playwright.sync_api import TimeoutError

    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            try:
                page.wait_for_function(f"(boxes) => !({WIDER})(boxes).length", arg=BOXES, timeout=PATIENCE_MS)
            except TimeoutError:
                found += [f"at {width} px, {scheme}: {what}" for what in page.evaluate(WIDER, BOXES)]
    return found


@pytest.mark.browser
@pytest.mark.long
def test_no_page_is_wider_than_its_window(state, served, browser):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    found = []
    with served(create_app(state)) as address:
        screen = Screen(page, address)
        for key in state.keys:
            for name, of_name in all_pages().items():
                page.set_viewport_size({"width": WIDTHS[-1], "height": 900})
                screen.open(f"/{'' if name == 'overview' else name}?run={key}")
                page.locator(f"a.nav-link.on:has-text('{of_name.title}')").wait_for(state="attached")
                page.wait_for_load_state("networkidle")
                found += [f"{state.progress(key).name} {name} {what}" for what in _wider(page)]
        page.close()  # while the server answers
    assert not found, "\n".join(found)
    assert screen.complaints == []


@pytest.mark.long
@pytest.mark.browser
def test_no_html_report_is_wider_than_its_window(state, browser, tmp_path):
    page = browser.new_page()
    found = []
    for key in state.keys:
        (tmp_path / "report.html").write_text(html.render(state.report(key)), encoding="utf-8")
        page.goto((tmp_path / "report.html").as_uri())
        found += [f"{state.progress(key).name}: {what}" for what in _wider(page)]
    page.close()
    assert not found, "\n".join(found)


@pytest.mark.browser
def test_a_moment_of_one_rank_opens_with_that_rank_unfolded(state, served, browser):
    """Of 64 ranks, all folded."""
    page = browser.new_page()
    with served(create_app(state)) as address:
        step = state.ready("2").timeline.steps.row(0, named=True)
        page.goto(f"{address}/timeline?run=2&rank=5&t0={step['start_ns']}&t1={step['end_ns']}")
        page.wait_for_url("**&lanes=5&**", timeout=60_000)
    page.close()
