"""Pages in a real browser."""

from __future__ import annotations

import shutil
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Screen:
    """A page in a browser. Whatever it complains about, or asks of other hosts, is kept."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self.base = page, base
        self.complaints: list[str] = []
        page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._asked(request.url))

    def _asked(self, url: str) -> None:
        if not url.startswith((self.base, "data:", "blob:")):
            self.complaints.append(f"asks for {url}")

    def open(self, path: str) -> None:
        """Go there, by the page's own links where it is open already: scripts are loaded once."""
        if self.page.url.startswith(self.base):
            self.page.evaluate(
                "path => { history.pushState({}, '', path);"
                " window.dispatchEvent(new CustomEvent('_dashprivate_pushstate')); }",
                path,
            )
        else:
            self.load(path)

    def load(self, path: str) -> None:
        """Go there as by typing the address: nothing of a page before is left."""
        self.page.goto(self.base + path)
        self.page.wait_for_selector("#at-once", state="detached")  # the page is drawn, and keys are heard

    def wait_for_text(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for(timeout=60_000)
