"""The page that shows what changed from one run to another."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from support.browser import BROWSER

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")


from rankscope.analysis.compare.compared_run import ComparedRun
from rankscope.analysis.compare.two_runs import compare
from rankscope.dashboard.app import create_app
from rankscope.dashboard.figures.diff_waterfall import from_a_to_b
from rankscope.dashboard.state import State
from record import write
from simulate import Job, healthy_resources, run

JOB = Job(parallel="ddp", ranks=4, steps=20, compute_ns=90e6)


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> State:
    """A healthy run, and the same job with a slow rank 2."""
    folder = tmp_path_factory.mktemp("diff")
    slow = healthy_resources(JOB)
    slow.slowness = slow.slowness * np.where(np.arange(4) == 2, 1.5, 1.0)
    resources = {"before": healthy_resources(JOB), "after": slow}
    state = State([write(run(JOB, can), folder / name) for name, can in resources.items()])
    state.start()
    state.wait(60)
    return state


def test_bars_lead_from_a_to_b_and_what_is_shown_adds_up(state):
    a, b = (state.progress(key).run for key in state.keys)
    found = compare(*(ComparedRun.of(run.report, run.timeline, None) for run in (a, b)))
    (first, *parts, last), unit = from_a_to_b(found.step, found.parts, ("A", "B"))
    assert unit == "ms"
    at = first.start + first.length
    for part in parts:
        before, after = (part.start, part.start + part.length)[:: 1 if part.kind == "longer" else -1]
        assert before == pytest.approx(at)
        at = after
    assert at == pytest.approx(last.length)
    assert sum(float(part.change) for part in parts) == pytest.approx(float(last.change), abs=1e-9)
    assert float(first.a) + float(last.change) == pytest.approx(float(last.b), abs=1e-9)


@pytest.mark.long
@pytest.mark.browser
def test_the_page_says_what_changed_and_leads_to_both_runs(state, served):
    from playwright.sync_api import sync_playwright

    complaints: list[str] = []
    with served(create_app(state)) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--headless", "--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(f"{address}/diff")
        page.get_by_role("heading", name="Mean step").wait_for(timeout=60_000)
        assert "longer" in page.locator(".verdict h1").inner_text()
        assert page.locator(".waterfall tr.longer").count() > 2
        assert page.get_by_text("slow rank, rank 2").count() == 1
        changed = page.locator(".card", has_text="Ranks that changed differently from the others")
        rows = changed.locator(".ag-center-cols-container .ag-row")
        rows.first.wait_for()
        shown = rows.count()
        with page.expect_download() as download:
            changed.get_by_role("link", name="download csv").click()
        taken = pl.read_csv(download.value.path())
        assert (len(taken), 2 in taken["rank"]) == (shown, True)
        parts = page.locator(".card", has_text="From A to B").first
        with page.expect_download() as download:
            parts.get_by_role("link", name="download csv").click()
        changes = pl.read_csv(download.value.path())
        assert changes["b_ns"].sum() > changes["a_ns"].sum()
        assert len(changes) == page.locator(".waterfall tr.longer, .waterfall tr.shorter").count()
        changed.get_by_role("link", name="as SQL").click()
        page.locator("#data-count").get_by_text(f"{shown} row").wait_for()
        page.goto(f"{address}/diff")
        page.locator(".verdict").get_by_role("link", name="after").click()
        page.get_by_role("heading", name="Rank 2 is slow").first.wait_for(timeout=60_000)
        browser.close()
    assert complaints == []
