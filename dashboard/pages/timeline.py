"""Every phase, region, operation and kernel of every rank, on one clock."""

from __future__ import annotations

from typing import Any

from rankscope.analysis.text.message import text
from rankscope.dashboard import timeline
from rankscope.dashboard.page_kit import Page, Query
from rankscope.dashboard.run import Run

__all__ = ["page"]


def layout(run: Run, _: Query) -> Any:  # noqa: ANN401 - Dash's components are not typed
    return timeline.layout(run.key, str(run.read_at))


def early(key: str) -> Any:  # noqa: ANN401
    """Return the page of a run whose lanes are stored, while it is being judged."""
    return timeline.layout(key, "0")


page = Page(title=text("Timeline"), order=2, layout=layout, register=timeline.register, early=early)
