"""What a user does with `rankscope ui`, in a browser: each task by the clicks that it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
import polars as pl
import pytest

pytest.importorskip("dash", reason="needs the UI's packages: pip install 'rankscope[ui]'")


import record
import simulate
from rankscope.analysis.detectors import detectors
from rankscope.analysis.model.spec import name_of
from rankscope.analysis.report import html, terminal
from rankscope.analysis.report.palette import DARK, LIGHT
from rankscope.analysis.text.units import duration
from rankscope.dashboard.app import create_app
from rankscope.dashboard.figures.collectives import operations
from rankscope.dashboard.state import State
from support.browser import BROWSER, FLAGS, Screen

pytestmark = pytest.mark.browser
SLOW = 3


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A healthy run, and one of 8 ranks in which rank 3 is slow."""
    folder = tmp_path_factory.mktemp("tasks")
    small = simulate.Job(parallel="ddp", ranks=2, steps=20, compute_ns=90e6)
    healthy = record.write(simulate.run(small, simulate.healthy_resources(small)), folder / "healthy")
    job = simulate.Job(parallel="tp", ranks=8, steps=40, compute_ns=90e6)
    resources = simulate.healthy_resources(job)
    resources.slowness = resources.slowness * np.where(np.arange(8) == SLOW, 1.4, 1.0)
    simulated = record.write(simulate.run(job, resources), folder / "slow")
    state = State([healthy, simulated])
    state.start()
    state.wait(200)
    return state


@pytest.fixture(scope="module")
def server(state: State, served: Any) -> Iterator[str]:
    with served(create_app(state)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def screen(browser: Any, server: str) -> Iterator[Screen]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.set_default_timeout(20_000)
    screen = Screen(page, server)
    yield screen
    context.close()
    assert screen.complaints == []


@pytest.mark.long
def test_a_check_has_one_name_in_the_ui_and_in_both_reports(state, screen):
    ids = [name for name in detectors() if "_" in name]
    screen.open("/?run=2")
    screen.wait_for_text("Checked, nothing found")
    said = [screen.page.inner_text("#page"), html.render(state.report("2")), terminal.render(state.report("2"))]
    for page in said:
        assert not [name for name in ids if re.search(rf"\b{name}\b", page)]
        assert name_of("slow_rank") in page


def test_what_a_fix_saves_is_the_findings_cost_or_the_difference_is_named(state, screen):
    finding = state.report("2").findings[0]
    screen.open("/what_if?run=2")
    row = screen.page.locator(".fix", has_text=f"rank {SLOW} as fast").inner_text()
    cost = duration(finding.lost_ns_per_step)
    assert cost.split()[0] in row, (cost, row)


def test_a_share_is_the_same_number_in_headline_finding_table_and_what_if(state, screen):
    """To a tenth of a percent everywhere, so that what is the same can be seen to be the same."""
    run = state.ready("2")
    finding = run.report.findings[0]
    cost = f"{duration(finding.lost_ns_per_step)}"
    share = f"{finding.lost_fraction * 100:.1f} %"
    assert share in run.report.verdict
    screen.open("/?run=2")
    said = screen.page.locator("#finding-1").inner_text().replace("\u00a0", " ")
    assert f"{cost.split()[0]} ± " in said
    assert share in said
    whole = screen.page.locator(".waterfall tr.sum td.number").all_inner_texts()
    left = screen.page.locator(".waterfall .bar-fixed").locator("xpath=ancestor::tr").locator("td.number").nth(1)
    screen.open("/what_if?run=2")
    gain = screen.page.locator(".fix", has_text=f"rank {SLOW} as fast").locator(".number").nth(1).inner_text()
    assert gain == f"{finding.gain_fraction * 100:.1f} %"
    assert whole[1] == "100.0"
    screen.open("/?run=2")
    assert float(left.inner_text()) == pytest.approx(100 - float(gain.split()[0]), abs=0.11)
    for written in (html.render(run.report), terminal.render(run.report)):
        assert share in written.replace("\u00a0", " ")


@pytest.mark.long
def test_the_longest_operation_is_the_first_row_and_its_moment_opens_with_who_came_last(state, screen):
    run = state.ready("2")
    longest = operations(run.timeline.collectives).row(0, named=True)
    screen.open("/collectives?run=2")
    row = screen.page.locator(".grid .ag-row[row-index='0']").first
    row.get_by_text(duration(longest["duration_ns"]), exact=True).first.wait_for()
    row.get_by_role("link", name=f"rank {longest['last']}: show").click()
    screen.page.wait_for_url("**/timeline?*#*")
    address = screen.page.url
    assert f"t0={longest['start_ns']}&t1={longest['end_ns']}&rank={longest['last']}" in address
    assert f"lanes={longest['last']}" in address or "lanes=all" in address


@pytest.mark.long
def test_two_ranks_are_compared_with_a_click_and_any_other_two_by_choosing(screen):
    """The finding leads to its rank beside the median; the address says what is compared."""
    screen.open("/?run=2")
    screen.page.get_by_role("link", name=f"Compare rank {SLOW} with the median").first.click()
    screen.page.get_by_role("heading", name=re.compile(rf"^From rank \d to rank {SLOW}$")).wait_for()
    assert screen.page.locator(".waterfall tr.longer td.label", has_text="compute").count() == 1
    bars = screen.page.locator(".plot .bars .point path")
    bars.first.wait_for()
    assert screen.page.locator(".plot .yaxislayer-above .ytick").count() == 2
    assert bars.count() > 4
    screen.page.get_by_label("against").select_option(label="rank 6")
    screen.page.get_by_role("heading", name=f"From rank 6 to rank {SLOW}").wait_for()
    assert "against=6" in screen.page.url
    screen.page.go_back()
    screen.page.get_by_role("heading", name=f"From rank 6 to rank {SLOW}").wait_for(state="detached")


@pytest.mark.long
def test_a_chart_on_a_dark_page_has_its_colors(screen):
    assert LIGHT["compute"] != DARK["compute"]
    screen.open("/collectives?run=2")  # its histogram has the first of the colors
    for scheme, palette in (("light", LIGHT), ("dark", DARK)):
        screen.page.emulate_media(color_scheme=scheme)
        wanted = ", ".join(str(int(palette["compute"][at : at + 2], 16)) for at in (1, 3, 5))
        screen.page.wait_for_function(
            "c => [...document.querySelectorAll('.plot .point path')].some((bar) => getComputedStyle(bar).fill === c)",
            arg=f"rgb({wanted})",
        )


@pytest.mark.long
def test_what_a_table_shows_is_taken_away_as_it_is_filtered(state, screen):
    """Operations of one group only, by their skew; as a file and in SQL."""
    found = operations(state.ready("2").timeline.collectives)
    group = found["group"].unique().sort()[0]
    screen.open("/collectives?run=2")
    card = screen.page.locator(".card", has_text="Operations, the longest first")
    card.locator(".ag-floating-filter input").nth(1).fill(str(group))
    card.get_by_text("skew", exact=True).click()
    link = card.get_by_role("link", name="as SQL")
    link.and_(screen.page.locator("[title*='ORDER BY']")).and_(screen.page.locator("[title*='WHERE']")).wait_for()
    link.click()
    screen.page.wait_for_url("**/data?**")
    screen.page.locator("#data-count").get_by_text(f"{found['group'].eq(group).sum()} rows").wait_for()
    query = screen.page.locator("#data-sql").input_value()
    filtered = f"""contains(lower(CAST("group" AS VARCHAR)), '{group}')"""
    assert query == f'SELECT * FROM operations WHERE {filtered} ORDER BY "skew_ns" ASC NULLS LAST'
    with screen.page.expect_download() as download:
        screen.page.get_by_role("link", name="download parquet").click()
    got = pl.read_parquet(download.value.path())
    expected = found.filter(pl.col("group") == group).sort("skew_ns", nulls_last=True)
    assert got["skew_ns"].to_list() == expected["skew_ns"].to_list()


def test_who_is_slow_and_what_it_does_longer_is_on_the_first_screen(state, screen):
    screen.open("/?run=2")
    verdict = screen.page.get_by_role("heading", name=re.compile(rf"Rank {SLOW} is slow"))
    verdict.first.wait_for()
    box = screen.page.locator("#finding-1 dl").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 900
    assert state.report("2").findings[0].title in screen.page.locator("#finding-1 h3").inner_text()


def test_the_timeline_opens_at_the_evidence_with_one_click(state, screen):
    screen.open("/?run=2")
    screen.page.locator("#finding-1 a.button").first.click()
    screen.page.wait_for_url("**/timeline?*#*")
    screen.page.locator(".rst-side h3", has_text=state.report("2").findings[0].title).wait_for()


def test_all_events_of_a_name_are_a_search_away(state, screen):
    """One shortcut, the name, and they are counted and listed."""
    screen.open("/timeline?run=2")
    screen.page.wait_for_selector("#timeline[data-painted]")
    screen.page.keyboard.press("/")
    screen.page.keyboard.type("optimizer")
    screen.page.locator(".rst-found tr").first.wait_for()
    assert re.match(r"\d+ of [\d,]+", screen.page.locator(".rst-bar [role=status]").inner_text())


def test_the_time_between_two_events_is_two_keys_away(screen):
    screen.open("/timeline?run=2")
    screen.page.wait_for_selector("#timeline[data-painted]")
    box = screen.page.locator(".rst canvas").bounding_box()
    for across in (0.4, 0.7):
        screen.page.mouse.move(box["x"] + across * box["width"], box["y"] + 80)
        screen.page.keyboard.press("m")
    screen.page.locator(".rst-between", has_text="A to B: ").wait_for()


@pytest.mark.long
def test_a_view_is_shared_by_a_click_and_opens_the_same(state, screen):
    screen.open("/compare?run=2&rank=5&against=1")
    screen.page.get_by_role("heading", name="From rank 1 to rank 5").wait_for()
    assert screen.page.title() == "Compare ranks · slow · rankscope"
    screen.page.get_by_role("button", name="Copy link").click()
    screen.page.locator("#copy-link", has_text="✓").wait_for()
    link = screen.page.evaluate("navigator.clipboard.readText()")
    screen.open("/data?run=2")
    screen.page.goto(link)
    screen.page.get_by_role("heading", name="From rank 1 to rank 5").wait_for()


def test_what_is_dragged_over_on_the_ruler_fills_the_view(screen):
    def window() -> list[int]:
        return [int(edge) for edge in screen.page.url.partition("#")[2].partition("&")[0].split(",")]

    screen.open("/timeline?run=2")
    screen.page.wait_for_selector("#timeline[data-painted]")
    screen.page.wait_for_url("**/timeline?*#*")
    (t0, t1), whole = window(), screen.page.url
    box = screen.page.locator(".rst canvas").bounding_box()
    assert box is not None
    quarter, ruler = (box["width"] - 168) / 4, box["y"] + 40
    screen.page.mouse.move(box["x"] + 168 + quarter, ruler)
    screen.page.mouse.down()
    screen.page.mouse.move(box["x"] + 168 + 3 * quarter, ruler, steps=4)
    screen.page.mouse.up()
    screen.page.wait_for_function("before => location.href !== before", arg=whole)
    a, b = window()
    assert (b - a) / (t1 - t0) == pytest.approx(0.5, abs=0.01)
    assert (a - t0) / (t1 - t0) == pytest.approx(0.25, abs=0.01)


def test_on_a_narrow_screen_the_menu_opens_and_makes_way_for_the_page(screen):
    screen.page.set_viewport_size({"width": 600, "height": 800})
    screen.open("/")
    navigation, menu = screen.page.locator("#navigation"), screen.page.get_by_role("button", name="Navigation")
    screen.page.locator(".verdict").wait_for()
    assert not navigation.is_visible()
    menu.click()
    navigation.get_by_text("Ranks", exact=True).click()
    screen.page.get_by_role("heading", name="Ranks", exact=True).wait_for()
    navigation.wait_for(state="hidden")
    for is_shown in (True, False):
        menu.click()
        navigation.wait_for(state="visible" if is_shown else "hidden")


def test_light_or_dark_is_as_the_system_has_it_until_it_is_chosen(screen):
    shown = "getComputedStyle(document.body).backgroundColor"
    screen.page.emulate_media(color_scheme="dark")
    screen.open("/")
    screen.page.locator(".verdict").wait_for()
    dark = screen.page.evaluate(shown)
    screen.page.emulate_media(color_scheme="light")
    screen.page.wait_for_function(f"dark => {shown} !== dark", arg=dark)
    screen.page.get_by_title("Light or dark").click()
    screen.page.wait_for_function(f"dark => {shown} === dark", arg=dark)
    screen.page.reload()
    screen.page.locator(".verdict").wait_for()
    assert screen.page.evaluate(shown) == dark


def test_what_is_chosen_on_a_page_is_in_its_address(screen):
    screen.open("/ranks?run=2")
    screen.page.get_by_label("Show").select_option(label="waiting for peers")
    screen.page.wait_for_url("**quantity=**")
    screen.page.reload()
    screen.page.get_by_role("img", name=re.compile("^waiting for peers, 8 ranks")).wait_for()
    assert screen.page.get_by_label("Show").locator("option:checked").inner_text() == "waiting for peers"


@pytest.mark.long
def test_pages_ranks_events_and_commands_are_a_key_and_a_few_letters_away(screen):
    """Ctrl-K on any page; what is chosen there is opened, and the timeline's keys are in the same list."""
    page = screen.page
    dialog = page.get_by_role("dialog", name="commands")

    def ask(typed: str) -> None:
        page.keyboard.press("Control+k")
        dialog.get_by_role("combobox").fill(typed)

    screen.open("/?run=2")
    screen.wait_for_text("Checked, nothing found")
    ask("what if")
    assert dialog.get_by_role("option", selected=True).inner_text() == "What if"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="What if").wait_for()
    assert "run=2" in page.url
    ask("99")
    assert dialog.get_by_role("option", name="rank 99").count() == 0  # there are 8
    dialog.get_by_role("combobox").fill("rank 5")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_selector("#timeline[data-painted]")
    assert "rank=5" in page.url
    ask("zoom in")
    assert "W" in dialog.get_by_role("option", selected=True).inner_text().split()
    before = page.url
    page.keyboard.press("Enter")
    page.wait_for_function("before => location.href !== before", arg=before)
    ask("optimizer")
    page.keyboard.press("ArrowUp")  # round to the last one
    page.keyboard.press("Enter")
    page.locator(".rst-found tr").first.wait_for()
    assert page.locator(".rst-bar input[type=search]").input_value() == "optimizer"
    page.keyboard.press("Control+k")
    page.keyboard.press("Escape")
    assert dialog.count() == 0


@pytest.mark.long
@pytest.mark.parametrize(("path", "drawn"), [("/", "svg"), ("/collectives", "plotly"), ("/ranks", "canvas")])
def test_a_chart_is_saved_as_png_and_as_svg(screen, path, drawn):
    """Which holds the shapes of the chart, in the page's colors, or a canvas's pixels with the names beside them."""
    screen.open(f"{path}?run=2")
    figure = screen.page.locator(".figure", has=screen.page.locator(".chart-box svg, .js-plotly-plot, canvas")).first
    figure.hover()
    saved = {}
    for form in ("PNG", "SVG"):
        with screen.page.expect_download() as download:
            figure.get_by_role("button", name=form).click()
        assert download.value.suggested_filename.endswith(f"-slow.{form.lower()}")
        saved[form] = download.value.path().read_bytes()
    assert saved["PNG"].startswith(b"\x89PNG")
    svg = ElementTree.fromstring(saved["SVG"])
    tags = {element.tag.rpartition("}")[2] for element in svg.iter()}
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert {"text", "image" if drawn == "canvas" else "path" if drawn == "plotly" else "rect"} <= tags
    if drawn == "svg":
        hexes = [LIGHT[name] for name in ("high", "medium", "low", "compute", "column")]
        colors = [", ".join(str(int(value[at : at + 2], 16)) for at in (1, 3, 5)) for value in hexes]
        assert any(f"rgb({color})".encode() in saved["SVG"] for color in colors)
