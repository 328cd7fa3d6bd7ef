"""Every page for readers who cannot see it or use no mouse: axe finds nothing serious, and keys reach everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")

import record
import simulate
from rankscope.dashboard.app import create_app
from rankscope.dashboard.page_kit import address, all_pages
from rankscope.dashboard.state import State
from support.browser import BROWSER, FLAGS, Screen
from support.flight_dumps import dump, write_dumps

pytestmark = pytest.mark.browser
DRAWN = """() => [...document.querySelectorAll('.grid')].every((grid) =>
    grid.querySelector('.ag-center-cols-container .ag-cell'))"""
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A job with a slow rank, and one that hangs, of which most pages have nothing to show."""
    folder = tmp_path_factory.mktemp("accessible")
    job = simulate.Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)
    slow = simulate.healthy_resources(job)
    slow.slowness = slow.slowness * np.where(np.arange(4) == 2, 1.4, 1.0)
    (folder / "hung").mkdir()
    hung = write_dumps(folder / "hung", dump(0), dump(1, enqueued=4, entries=False))
    state = State([record.write(simulate.run(job, slow), folder / "slow"), hung])
    state.start()
    state.wait(200)
    return state


@pytest.fixture(scope="module")
def server(state: State, served: Any) -> Iterator[str]:
    with served(create_app(state)) as address:
        yield address


@pytest.fixture
def screen(server: str) -> Iterator[Screen]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(60_000)
        yield Screen(page, server)
        browser.close()


def serious(axe: Any, page: Any) -> list[Any]:
    """What axe finds, and finds again: a grid draws its columns once more when it knows its width, empty until then."""
    for _ in range(4):
        found = [one for one in axe.run(page).response["violations"] if one["impact"] in SERIOUS]
        if not found:
            break
        page.wait_for_timeout(1000)
    return found


@pytest.mark.long
def test_axe_finds_nothing_serious_on_any_page(state, screen):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = []
    for key in state.keys:
        for name, page in all_pages().items():
            screen.open(address(name, key))
            screen.page.locator(f"a.nav-link.on:has-text('{page.title}')").wait_for()
            screen.page.locator("#page > *").first.wait_for()
            screen.page.wait_for_load_state("networkidle")
            screen.page.wait_for_function(DRAWN)
            for scheme in ("light", "dark"):
                screen.page.emulate_media(color_scheme=scheme)
                for one in serious(axe, screen.page):
                    where = f"{name} of {key!r}, {scheme}"
                    found += [f"{where}: {one['help']}: {node['html'][:120]}" for node in one["nodes"]]
    assert not found, "\n".join(found)
    assert screen.complaints == []


@pytest.mark.long
def test_axe_finds_nothing_serious_in_the_list_of_commands(screen):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    screen.open("/")
    screen.wait_for_text("Rank 2 is slow")
    screen.page.keyboard.press("Control+k")
    screen.page.get_by_role("option").first.wait_for()
    found = serious(axe, screen.page)
    assert not found, found


@pytest.mark.long
def test_pages_are_reached_and_opened_by_keys(screen):
    screen.open("/")
    screen.wait_for_text("Rank 2 is slow")
    focused = "document.activeElement.innerText"
    screen.page.keyboard.press("Tab")
    assert screen.page.evaluate(focused) == "Skip to the page"
    reached = set()
    for _ in range(30):
        screen.page.keyboard.press("Tab")
        reached.add(screen.page.evaluate(focused))
    assert {str(page.title) for page in all_pages().values()} <= reached
    screen.page.locator(".nav-link", has_text="Timeline").focus()
    screen.page.keyboard.press("Enter")
    screen.page.wait_for_selector("#timeline[data-painted]")
    screen.page.locator(".rst canvas").focus()
    before = screen.page.url
    screen.page.keyboard.press("d")
    screen.page.wait_for_function("before => location.href !== before", arg=before)
