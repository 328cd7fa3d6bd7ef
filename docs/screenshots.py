"""Take the pictures of `docs/screenshots/`: python docs/screenshots.py RUN [PAGE=RUN …]

Pages that RUN has nothing for take another one: `pipeline=TRACE kernels=TRACE what_if=TRACE`; `diff=RUN_B` compares RUN
with that one. `--all FOLDER` puts them there instead, at 1280 and 1920 pixels, light and dark. Needs Chromium.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import threading
from pathlib import Path

from playwright.sync_api import sync_playwright
from werkzeug.serving import make_server

from rankscope.dashboard.app import create_app
from rankscope.dashboard.page_kit import address, all_pages
from rankscope.dashboard.state import State

FOLDER = Path(__file__).parent / "screenshots"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SIZES = ((1280, 800), (1920, 1080))
SCHEMES = ("light", "dark")
SETTLED_MS = 1500  # after the last request: for what is drawn in the next frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("others", nargs="*", metavar="PAGE=RUN")
    parser.add_argument("--all", type=Path, metavar="FOLDER")
    chosen = parser.parse_args()
    pages = list(itertools.product(SIZES, SCHEMES))
    take(chosen.run, dict(word.split("=", 1) for word in chosen.others), chosen.all, pages if chosen.all else pages[:1])


def take(run: str, other: dict[str, str], folder: Path | None, looks: list[tuple[tuple[int, int], str]]) -> None:
    paths = {name: [Path(other.get(name, run))] for name in all_pages()}
    for name, page in all_pages().items():
        if page.of_two:
            paths[name] = [Path(run), *paths.pop(name)]
    shown = {name: of_page for name, of_page in paths.items() if len(set(of_page)) == len(of_page)}
    servers = {key: serve(key) for key in dict.fromkeys(map(tuple, shown.values()))}
    (folder or FOLDER).mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for (width, height), scheme in looks:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            for name, of_page in shown.items():
                page.goto(servers[tuple(of_page)] + address(name))
                page.wait_for_selector("#page > *")
                page.wait_for_load_state("networkidle")
                page.wait_for_function(
                    "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.main-svg'))"
                    " && !document.body.innerText.includes('Comparing …')"
                )
                if name == "timeline":
                    page.wait_for_selector("#timeline[data-painted]")
                page.wait_for_timeout(SETTLED_MS)
                page.screenshot(path=folder / f"{name}-{width}-{scheme}.png" if folder else FOLDER / f"{name}.png")
            page.close()
        browser.close()


def serve(paths: tuple[Path, ...]) -> str:
    state = State(paths)
    state.start()
    state.wait(300)
    server = make_server("127.0.0.1", 0, create_app(state).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    main()
