"""The timeline page: a canvas in the browser, fed by the server with what fits its pixels.

`register(app, state)` adds the routes below `/timeline-data/`, `layout(state)` is the page's content. The view is in
the address: `?run=RUN#t0,t1&lanes=…`, times in ns on the run's clock; `?t0=…&t1=…&rank=…` opens a finding's evidence.
"""

from __future__ import annotations

from typing import Protocol

import polars as pl

from rankscope.analysis.finding import Report
from rankscope.analysis.timeline.build import Timeline

__all__ = ["Source"]


class Source(Protocol):
    """What the page needs of the app's state. Each may be None while the run is still being read or analysed.

    `run` is the key that stands in the address; "" is the first run. KeyError: there is no such run.
    """

    def timeline(self, run: str) -> Timeline | None: ...

    def report(self, run: str) -> Report | None: ...

    def critical_path(self, run: str) -> pl.DataFrame | None:
        """rank, start_ns, end_ns of what the steps could not do without, where that is known."""
        ...
