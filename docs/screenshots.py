"""Take the pictures of `docs/screenshots/`: python docs/screenshots.py RUN [PAGE=RUN …]

Pages that RUN has nothing for take another one: `pipeline=TRACE kernels=TRACE what_if=TRACE`; `diff=RUN_B` compares RUN
with that one. Needs Chromium.
"""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright
from werkzeug.serving import make_server

from rankscope.dashboard.app import create_app
from rankscope.dashboard.page import address, all_pages
from rankscope.dashboard.state import State

FOLDER = Path(__file__).parent / "screenshots"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SETTLED_MS = 1500  # after the last request: for what is drawn in the next frames


def main(first: str, *others: str) -> None:
    other = dict(word.split("=", 1) for word in others)
    paths = {name: [Path(other.get(name, first))] for name in all_pages()}
    for name, page in all_pages().items():
        if getattr(page, "OF_TWO", False):
            paths[name] = [Path(first), *paths.pop(name)]
    shown = {name: of_page for name, of_page in paths.items() if len(set(of_page)) == len(of_page)}
    servers = {key: serve(key) for key in dict.fromkeys(map(tuple, shown.values()))}
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        for name, of_page in shown.items():
            page.goto(servers[tuple(of_page)] + address(name))
            page.wait_for_selector("#page > *")
            page.wait_for_load_state("networkidle")
            page.wait_for_function("[...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))")
            page.wait_for_timeout(SETTLED_MS)
            page.screenshot(path=FOLDER / f"{name}.png")
        browser.close()


def serve(paths: tuple[Path, ...]) -> str:
    state = State(paths)
    state.start()
    state.wait(300)
    server = make_server("127.0.0.1", 0, create_app(state).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    main(*sys.argv[1:])
