"""The HTML report, printed by a browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rankscope.analysis.model.finding import Report
from rankscope.analysis.report import html
from rankscope.errors import NotExportable

__all__ = ["write_pdf"]

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
_LIMIT_S = 120


def write_pdf(report: Report, path: Path, *, language: str = "en") -> None:
    """Write the report to `path`, as the first Chromium on PATH prints it.

    Raises NotExportable, and OSError if `path` cannot be written.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        page = path.with_suffix(".html")
        raise NotExportable(
            f"a PDF is printed by Chromium or Chrome, and none is on PATH: -o {page} writes a page to print"
        )
    with tempfile.TemporaryDirectory(prefix="rankscope-pdf-") as folder:
        written, printed = Path(folder, "report.html"), Path(folder, "report.pdf")
        written.write_text(html.render(report, language=language), encoding="utf-8")
        options = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            options.append("--no-sandbox")  # root cannot have one
        options += [f"--user-data-dir={folder}/profile", "--no-pdf-header-footer", f"--print-to-pdf={printed}"]
        try:
            done = subprocess.run(
                [browser, *options, written.as_uri()], capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise NotExportable(f"{browser} did not print the report within {_LIMIT_S} s") from None
        if not printed.exists():
            last = (done.stderr.strip().splitlines() or ["it did not say why"])[-1]
            raise NotExportable(f"{browser} did not print the report: {last}")
        shutil.copyfile(printed, path)
