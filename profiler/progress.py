"""A progress line on the terminal."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rankscope.analysis.text.message import speaking, spoken
from rankscope.analysis.text.progress import heard_by

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["shown"]

_AFTER_S = 2.0


@contextmanager
def shown(language: str = "en") -> Iterator[None]:
    """While the context is open and has been for two seconds, a terminal shows how far the work in it is."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    line = _Line(language)
    with heard_by(line.reached):
        try:
            yield
        finally:
            line.end()


class _Line:
    """One line, of the work that was reached last."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._lock = threading.Lock()  # work goes on in threads, and the line begins in one of its own
        self._last: tuple[str, int, int | None] = ("", 0, None)
        self._bar: Progress | None = None
        self._timer = threading.Timer(_AFTER_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def reached(self, what: str, done: int, of: int | None) -> None:
        with self._lock:
            self._last = what, done, of
            self._show()

    def end(self) -> None:
        """Take the line away."""
        self._timer.cancel()
        with self._lock:
            if self._bar:
                self._bar.stop()
                self._bar = None

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # What is printed goes where it would go without the line: standard output may be a file.
        bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False)
        with self._lock:
            if self._timer.finished.is_set():  # the work has ended meanwhile
                return
            self._bar = bar
            self._bar.add_task("")
            self._bar.start()
            self._show()

    def _show(self) -> None:
        if self._bar is None:
            return
        what, done, of = self._last
        with speaking(self._language):
            said = f"{spoken(what)} {done:,}" + (f"/{of:,}" if of is not None else "")
        self._bar.update(self._bar.task_ids[0], description=said if what else "", completed=done, total=of)
