"""The timeline page: a canvas in the browser, fed by the server with what fits its pixels.

`register(app, source)` adds the routes below `/timeline-data/`, `layout(run, version)` is the page's content; a new
version makes it look for what a run that goes on has added. The view is in the address: `?run=RUN#t0,t1&lanes=…`, times
in ns on the run's clock; `?t0=…&t1=…&rank=…` opens a finding's evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import polars as pl
from dash import Dash
from dash.development.base_component import Component

from rankscope.analysis.model.finding import Report
from rankscope.dashboard.timeline.counter_lanes import CounterLane
from rankscope.dashboard.timeline.scene import Scene
from rankscope.dashboard.timeline.server import ROUTES, register_routes

__all__ = ["Source", "TimelineCanvas", "layout", "register"]

# In the order in which they need each other.
_SCRIPTS = (
    *("base.js", "commands.js", "drawing.js", "server.js", "lanes.js", "counters.js", "panel.js", "markers.js"),
    *("input.js", "timeline.js"),
)

__version__ = "1"  # Dash asks for one where a script comes from; the file's time distinguishes versions


class Source(Protocol):
    """The page's view of the app's state. Each may be None while the run is still being read or analyzed.

    `run` is the key in the address; "" is the first run. KeyError: there is no such run.
    """

    def scene(self, run: str) -> Scene | None: ...

    def report(self, run: str) -> Report | None: ...

    def critical_path(self, run: str) -> pl.DataFrame | None:
        """rank, start_ns, end_ns of the critical path, where that is known."""
        ...

    def counters(self, run: str) -> Sequence[CounterLane] | None:
        """Return the nodes' counters that are drawn below the ranks."""
        ...


class TimelineCanvas(Component):
    """The component of `timeline.js`."""

    _namespace = "rankscope_timeline"
    _type = "TimelineCanvas"

    def __init__(self, *, id: str, base: str, run: str, version: str) -> None:
        self._prop_names = ["id", "base", "run", "version"]
        self.available_properties = self._prop_names
        self.available_wildcard_properties: list[str] = []
        self._valid_wildcard_attributes: list[str] = []
        super().__init__(id=id, base=base, run=run, version=version)  # type: ignore[no-untyped-call]


def layout(run: str, version: str) -> TimelineCanvas:
    """Return the canvas for this run."""
    return TimelineCanvas(id="timeline", base=ROUTES, run=run, version=version)


def register(app: Dash, source: Source) -> None:
    """Serve the canvas's scripts and data."""
    for script in _SCRIPTS:
        app.scripts.append_script({"namespace": __name__, "relative_package_path": script})  # type: ignore[no-untyped-call]
    register_routes(app.server, source.scene, source.report, source.critical_path, source.counters)
