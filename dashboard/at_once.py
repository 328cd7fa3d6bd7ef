"""The verdict in the frame of the page itself: it can be read before the scripts have arrived, and without them."""

from __future__ import annotations

from markupsafe import Markup, escape

from rankscope.analysis.text.message import spoken
from rankscope.dashboard.page_kit import Children, all_pages, in_language
from rankscope.dashboard.state import State

__all__ = ["at_once"]

_PATIENCE_S = 0.5  # for what is kept of a report
_GOES = """<script>new MutationObserver((_, seen) => {
  if (document.querySelector("#page h1")) { document.getElementById("at-once").remove(); seen.disconnect(); }
}).observe(document.body, {childList: true, subtree: true});</script>"""


def at_once(runs: State, page: str, key: str) -> str:
    """Return what stands in this page's place until it is drawn, as HTML; empty where no report is known yet."""
    shown = all_pages().get(page)
    if shown is None or shown.at_once is None or key not in runs.keys:
        return ""
    report = runs.kept_report(key, _PATIENCE_S)
    if report is None:
        return ""
    return f'<div id="at-once">{_markup(in_language(shown.at_once(spoken(report))))}</div>{_GOES}'


def _markup(part: Children) -> Markup:
    """Return elements of `dash.html` as what they are."""
    if part is None:
        return Markup()
    if isinstance(part, (list, tuple)):
        return Markup().join(map(_markup, part))
    if isinstance(part, str):
        return escape(part)
    tag = Markup(type(part).__name__.lower())
    return Markup('<{0} class="{1}">{2}</{0}>').format(
        tag, getattr(part, "className", ""), _markup(getattr(part, "children", None))
    )
