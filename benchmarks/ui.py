"""How fast the timeline is: from a turn of the wheel to the next frame, which enlarges what is there, and to the one
that is painted of new data, in a real browser; and what a view weighs.

    python benchmarks/ui.py --events 1e6 1e7 1e8
    python benchmarks/ui.py --run RUN      # how long until `rankscope ui RUN` shows its first page, and the verdict

The run is made up: 64 ranks of one lane each, with phases of random lengths in steps. One process makes and stores its
lanes; another one opens and serves them; Chromium on the same machine looks at them, at 1600 × 1120. The largest needs
12 GB of memory to be made, and 7 GB in TMPDIR.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
from dash import Dash, html
from playwright.sync_api import Page, sync_playwright
from werkzeug.serving import WSGIRequestHandler, make_server

from rankscope.analysis.report.palette import LIGHT, css_variables
from rankscope.analysis.runs.fingerprint import files_fingerprint
from rankscope.analysis.timeline.build import Timeline
from rankscope.analysis.timeline.host_breakdown import PARTS
from rankscope.dashboard import timeline
from rankscope.dashboard.timeline.lane_cache import FOLDER, build_or_store, load
from rankscope.dashboard.timeline.scene import Scene
from rankscope.dashboard.timeline.server import packed_view

SEEN = """const look = () => document.querySelector(".verdict h1")?.offsetHeight
    ? setTimeout(() => { sessionStorage.seen ??= Date.now(); }) : requestAnimationFrame(look);
requestAnimationFrame(look);"""  # notes the time after the first frame with the verdict in it, whichever page shows it
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

FRAMES = """
window.frames_ms = [];
document.querySelector(".rst canvas").addEventListener("wheel", () => {
  const began = performance.now();
  requestAnimationFrame(() => setTimeout(() => window.frames_ms.push(performance.now() - began)));
});
"""


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
    def __init__(self, folder: Path) -> None:
        scene = load(folder, files_fingerprint(folder))
        assert scene is not None
        self._scene = scene

    def scene(self, _: str) -> Scene:
        return self._scene

    def report(self, _: str) -> None:
        return None

    def critical_path(self, _: str) -> None:
        return None

    def counters(self, _: str) -> tuple[()]:
        return ()


class Silent(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        pass


def serve(folder: Path, port: int) -> None:
    run = OneRun(folder)
    app = Dash("timeline", update_title=None)
    app.index_string = (
        "<!doctype html><html><head>{%metas%}<link rel=icon href='data:,'>{%css%}<style>:root {"
        f"{css_variables(LIGHT)}"
        "} body { margin: 8px }</style></head><body>{%app_entry%}{%config%}{%scripts%}{%renderer%}</body></html>"
    )
    app.layout = html.Div(timeline.layout("", "1"))
    timeline.register(app, run)
    make_server("127.0.0.1", port, app.server, threaded=True, request_handler=Silent).serve_forever()


def make(events: int, folder: Path) -> None:
    """Stores the lanes as the first opening of a run does."""
    run = made_up(events)
    before = memory("VmHWM")
    began = time.process_time()
    build_or_store(folder, files_fingerprint(folder), run)
    took = time.process_time() - began
    stored = sum(file.stat().st_size for file in (folder / FOLDER).iterdir())
    print(
        f"  lanes are made in {took:.1f} s of CPU, at most {memory('VmHWM')} MB held ({before} MB by the tables); "
        f"{stored / 1e6:.0f} MB stored, {stored / events:.0f} bytes per event"
    )


def on_the_server(folder: Path) -> None:
    """CPU time of what the server does, without a browser."""
    began = time.process_time()
    scene = OneRun(folder).scene("")
    print(f"  opened again in {1000 * (time.process_time() - began):.0f} ms of CPU")
    lanes = [[lane] for lane in range(LANES)]
    for share in (1, 0.1, 0.01, 0.001, 0.0001):
        span = int(scene.end * share)
        t0 = (scene.end - span) // 2
        asked = {"t0": t0, "t1": t0 + span, "pixels": 1900, "levels": 12, "lanes": lanes}
        times = []
        for _ in range(5):
            began = time.process_time()
            data = packed_view(asked, scene)
            times.append(time.process_time() - began)
        ms = 1000 * statistics.median(times)
        print(f"  1/{1 / share:<6.0f} of the run: {ms:5.1f} ms of CPU, {len(data) / 1e3:.0f} kB")


def memory(what: str, pid: int | str = "self") -> int:
    """MB, as Linux counts them."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{what}:"))
    return int(line.split()[1]) >> 10


def in_the_browser(folder: Path, port: int, zooms: int) -> None:
    server = subprocess.Popen([sys.executable, __file__, "--serve", str(folder), "--port", str(port)])
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
            page.evaluate(FRAMES)
            measured = turn_the_wheel(page, zooms)
            frames = sorted(page.evaluate("window.frames_ms"))
            browser.close()
        times = sorted(entry["duration"] for entry in measured)
        sizes = sorted(entry["detail"]["bytes"] for entry in measured)
        own, mapped = (memory(what, server.pid) for what in ("RssAnon", "RssFile"))
        print(f"  first picture {first_ms:.0f} ms, page opened again {again_ms:.0f} ms")
        print(f"  server: {own} MB of its own, {mapped} MB of files mapped")
        print(f"  wheel to the next frame: median {at(frames, 0.5):.0f} ms, p95 {at(frames, 0.95):.0f} ms")
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
    for _ in range(30000):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            time.sleep(0.02)
    raise TimeoutError("the server does not come up")


def first_page(run: Path, port: int) -> None:
    """From the command to what an open browser shows that asks as soon as it is answered."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1600, "height": 1120})
        page.add_init_script(SEEN)
        began, began_unix = time.monotonic(), time.time()
        server = subprocess.Popen([sys.executable, "-m", "rankscope", "ui", str(run), "--port", str(port)])
        try:
            wait_until_up(port)
            print(f"{run}: accepts connections after {time.monotonic() - began:.1f} s", flush=True)
            page.goto(f"http://127.0.0.1:{port}/", wait_until="commit")
            page.wait_for_selector(".nav-link.on", timeout=300_000)  # of the app
            page.wait_for_selector("#page .verdict h1", timeout=300_000)
            drawn = time.monotonic() - began
            seen = page.evaluate("Number(sessionStorage.seen)")
            print(
                f"  the verdict after {seen / 1000 - began_unix:.1f} s, the page with its scripts after {drawn:.1f} s",
                flush=True,
            )
            browser.close()
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--zooms", type=int, default=60)
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path)
    chosen = parser.parse_args()
    if chosen.run:
        first_page(chosen.run, chosen.port)
        return
    if chosen.serve:
        serve(chosen.serve, chosen.port)
        return
    if chosen.make:
        make(int(chosen.events[0]), chosen.make)
        return
    for events in chosen.events:
        print(f"{int(events):,} events in {LANES} lanes", flush=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "run").mkdir()
            subprocess.run([sys.executable, __file__, "--make", name, "--events", str(events)], check=True)
            on_the_server(folder)
            in_the_browser(folder, chosen.port, chosen.zooms)


if __name__ == "__main__":
    main()
