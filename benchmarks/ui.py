"""How fast the timeline is: from a turn of the wheel to the painted frame, in a real browser, and what a view weighs.

    python benchmarks/ui.py --events 1e6 1e7

The run is made up: 64 ranks of one lane each, with phases of random lengths in steps. It is served by a process of its
own, and looked at by Chromium on the same machine, at 1600 × 1120.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

import numpy as np
import polars as pl
import psutil
from dash import Dash, html
from playwright.sync_api import Page, sync_playwright
from werkzeug.serving import WSGIRequestHandler, make_server

from rankscope.analysis.report.palette import LIGHT, css_variables
from rankscope.analysis.timeline.breakdown import PARTS
from rankscope.analysis.timeline.build import Timeline
from rankscope.dashboard import timeline
from rankscope.dashboard.timeline.scene import Scene, build_scene
from rankscope.dashboard.timeline.server import view

LANES = 64
NAMES = 500
STEPS = 200
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def made_up(events: int) -> Timeline:
    """A timeline of phases only; everything else is empty."""
    of_lane = events // LANES
    named = [f"region_{i}" for i in range(NAMES)]
    parts, names = pl.Series(PARTS), pl.Series(named)
    frames = []
    for rank in range(LANES):
        rng = np.random.default_rng(rank)
        length = (rng.lognormal(2.5, 1.0, of_lane) * 1000).astype(np.int64) + 500
        gap = rng.exponential(2500, of_lane).astype(np.int64)
        gap[:: max(1, of_lane // STEPS)] += 2_000_000
        start = np.cumsum(length + gap) - length
        frames.append(
            pl.DataFrame(
                {
                    "rank": np.full(of_lane, rank, np.int32),
                    "step": np.minimum(np.arange(of_lane) * STEPS // of_lane, STEPS - 1).astype(np.int32),
                    "part": parts.gather(rng.integers(0, 6, of_lane)),
                    "label": names.gather(rng.integers(0, NAMES, of_lane)),
                    "start_ns": start,
                    "end_ns": start + length,
                }
            )
        )
    phases = pl.concat(frames)
    ranks = pl.DataFrame({"rank": range(LANES), "node": [rank // 8 for rank in range(LANES)], "hostname": "made-up"})
    steps = (
        phases.filter(pl.col("rank") == 0)
        .group_by("rank", "step")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .sort("step")
    )
    steps = steps.with_columns(judged=pl.lit(False))
    groups = pl.DataFrame(schema={"name": pl.String, "role": pl.String, "members": pl.String})
    stages = pl.DataFrame(schema={"rank": pl.Int32, "stage": pl.Int32})
    rest = {name: pl.DataFrame() for name in Timeline.__dataclass_fields__ if name not in ("comparable",)}
    given = {"ranks": ranks, "phases": phases, "steps": steps, "groups": groups, "ops": stages, "regions": stages}
    return Timeline(**(rest | given | {"comparable": True, "clocks": [], "matched_fraction": None, "gaps": []}))


class OneRun:
    def __init__(self, run: Timeline) -> None:
        self._scene = build_scene(run)

    def scene(self, _: str) -> Scene:
        return self._scene

    def report(self, _: str) -> None:
        return None

    def critical_path(self, _: str) -> None:
        return None


class Silent(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        pass


def serve(events: int, port: int) -> None:
    run = OneRun(made_up(events))
    app = Dash("timeline", update_title=None)
    app.index_string = (
        "<!doctype html><html><head>{%metas%}<link rel=icon href='data:,'>{%css%}<style>:root {"
        f"{css_variables(LIGHT)}"
        "} body { margin: 8px }</style></head><body>{%app_entry%}{%config%}{%scripts%}{%renderer%}</body></html>"
    )
    app.layout = html.Div(timeline.layout("", "1"))
    timeline.register(app, run)
    make_server("127.0.0.1", port, app.server, threaded=True, request_handler=Silent).serve_forever()


def on_the_server(events: int) -> None:
    """CPU time of what the server does, without a browser."""
    run = made_up(events)
    began = time.process_time()
    scene = build_scene(run)
    print(
        f"  lanes are made in {time.process_time() - began:.2f} s of CPU, {psutil.Process().memory_info().rss >> 20} MB"
    )
    lanes = [[lane] for lane in range(LANES)]
    for share in (1, 0.1, 0.01, 0.001, 0.0001):
        span = int(scene.end * share)
        t0 = (scene.end - span) // 2
        asked = {"t0": t0, "t1": t0 + span, "pixels": 1900, "levels": 12, "lanes": lanes}
        times = []
        for _ in range(5):
            began = time.process_time()
            data = view(asked, scene)
            times.append(time.process_time() - began)
        ms = 1000 * statistics.median(times)
        print(f"  1/{1 / share:<6.0f} of the run: {ms:5.1f} ms of CPU, {len(data) / 1e3:.0f} kB unpacked")


def in_the_browser(events: int, port: int, zooms: int) -> None:
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(events), "--port", str(port)])
    try:
        wait_until_up(port)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1600, "height": 1120})
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_selector("#timeline[data-painted]", timeout=120_000)
            first_ms = page.evaluate("performance.getEntriesByName('rankscope-first-picture')[0].duration")
            page.reload()
            page.wait_for_selector("#timeline[data-painted]", timeout=120_000)
            again_ms = page.evaluate("performance.getEntriesByName('rankscope-first-picture')[0].duration")
            measured = turn_the_wheel(page, zooms)
            browser.close()
        times = sorted(entry["duration"] for entry in measured)
        sizes = sorted(entry["detail"]["bytes"] for entry in measured)
        memory = psutil.Process(server.pid).memory_info().rss >> 20
        print(
            f"  first picture {first_ms:.0f} ms, lanes being made; {again_ms:.0f} ms once they are; server {memory} MB"
        )
        print(f"  zoom to paint, {len(times)} zooms: median {at(times, 0.5):.0f} ms, p95 {at(times, 0.95):.0f} ms")
        kb = [at(sizes, share) / 1e3 for share in (0.5, 0.95, 1)]
        print(f"  a view on the wire: median {kb[0]:.0f} kB, p95 {kb[1]:.0f} kB, most {kb[2]:.0f} kB")
    finally:
        server.terminate()
        server.wait()


def turn_the_wheel(page: Page, zooms: int) -> list[dict]:
    """Zooms in and out at random places, each painted before the next."""
    rng = random.Random(0)
    box = page.locator(".rst canvas").bounding_box()
    depth = 0
    for _ in range(zooms):
        closer = depth < 1 or (depth < 14 and rng.random() < 0.65)
        depth += 1 if closer else -1
        before = page.locator("#timeline").get_attribute("data-painted")
        page.mouse.move(box["x"] + box["width"] * rng.uniform(0.3, 0.9), box["y"] + box["height"] / 2)
        page.mouse.wheel(0, -240 if closer else 240)
        page.wait_for_function(f"document.getElementById('timeline').dataset.painted !== '{before}'")
    return page.evaluate(
        "performance.getEntriesByName('rankscope-zoom-to-paint').map(e => ({duration: e.duration, detail: e.detail}))"
    )


def at(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def wait_until_up(port: int) -> None:
    for _ in range(1200):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise TimeoutError("the server does not come up")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--zooms", type=int, default=60)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(int(chosen.serve), chosen.port)
        return
    for events in chosen.events:
        print(f"{int(events):,} events in {LANES} lanes", flush=True)
        subprocess.run(
            [sys.executable, "-c", f"from ui import on_the_server; on_the_server({int(events)})"],
            check=True,
            cwd=sys.path[0],
        )
        in_the_browser(int(events), chosen.port, chosen.zooms)


if __name__ == "__main__":
    main()
