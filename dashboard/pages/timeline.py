"""Every phase, region, operation and kernel of every rank, on one clock."""

from __future__ import annotations

from rankscope.analysis.text.message import text
from rankscope.dashboard import timeline
from rankscope.dashboard.page_kit import Children, Page, Query
from rankscope.dashboard.run import Run

__all__ = ["page"]


def layout(run: Run, _: Query) -> Children:
    return timeline.layout(run.key, str(run.read_at))


def early(key: str) -> Children:
    """Return the page of a run whose lanes are stored, while it is being judged."""
    return timeline.layout(key, "0")


page = Page(title=text("Timeline"), order=2, layout=layout, register=timeline.register, early=early)
